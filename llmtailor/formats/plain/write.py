"""Layout of a Trainer checkpoint without DeepSpeed: optimizer.pt and the weights.

From a ZeRO base the weights are the fp32 master weights, as nothing else would keep them: the Trainer should build the
model in fp32 (with ``bf16=True`` it then computes in bf16, by autocast). They have the params' own names, which is
what a resume looks for, also from a partial base. From a plain base the files keep their names, order and
dtypes, unless a resume would not find a param by its name there.

The groups list the names of their params, so that the checkpoint can be read again whatever its groups are: as the
base's do, and else under a key of ours; the Trainer keeps the key and saves it again.
"""

from __future__ import annotations

from llmtailor.checkpoint.index import ACCELERATE, CheckpointIndex
from llmtailor.checkpoint.layout import FileLayout
from llmtailor.containers.safetensors import SINGLE
from llmtailor.containers.torch_zip import lay_out_torch_file
from llmtailor.errors import PathIn, Problem, SourceError, UnsupportedCheckpoint
from llmtailor.formats.common.write import (
    check_masters,
    kinds_by_param,
    lay_out_master_weights,
    optimizer_tree,
)
from llmtailor.loaders.files import ENGINE_FILES, SCHEDULER
from llmtailor.loaders.loader import CLIENTS
from llmtailor.loaders.write import Wanted, lay_out_trainer_files, made_client_files

check = check_masters


def lay_out(base: CheckpointIndex, wanted: Wanted) -> tuple[list[FileLayout], list[Problem]]:
    """Return the layouts of a composite's files except the tokenizer's, and notices.

    Raises SourceError for a base that lacks something that a resume needs, UnsupportedCheckpoint for weights in more
    files than the client reads.
    """
    _check_base(base, wanted.client)
    if wanted.client == ACCELERATE and (skipped := base.zero.skipped_steps):
        what = f"{skipped} of its steps were skipped, and accelerate counts steps as Adam does, without these"
        raise UnsupportedCheckpoint.at(base.name, what, "use --stage 1, 2 or 3, or --to fsdp")
    beside, notices = made_client_files(base, wanted)
    weights = lay_out_master_weights(base)
    if wanted.client == ACCELERATE and [one.path for one in weights] != [SINGLE]:
        what = f"accelerate reads its weights from {SINGLE} only, and they take {len(weights) - 1} files"
        raise UnsupportedCheckpoint.at(base.name, what, "use --stage 1, 2 or 3, or --to fsdp")
    optimizer = lay_out_torch_file(CLIENTS[wanted.client].optimizer, optimizer_tree(base, wanted.layout))
    made = [optimizer, *weights, *beside]
    dtype = "F32" if base.form.has_masters else None  # config.json follows the weights, which are the master weights
    return lay_out_trainer_files(base, wanted, made, dtype, ENGINE_FILES, has_weights=True), notices


def _check_base(base: CheckpointIndex, client: str) -> None:
    problems = []
    if base.client == client and CLIENTS[client].needs_scheduler and not base.offers(SCHEDULER):
        what = "there is no scheduler state; without DeepSpeed, a resume then drops the optimizer state as well"
        problems.append(
            Problem(PathIn(base.name, SCHEDULER), what, "use a base whose run used the Trainer's scheduler")
        )
    if not kinds_by_param(base):
        what = "its optimizer has made no step yet, so it has no states"
        problems.append(Problem(base.name, what, "use a later checkpoint as base"))
    if problems:
        raise SourceError(problems)
