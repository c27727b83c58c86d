"""Layout of checkpoints without DeepSpeed, from any base. `read` describes them.

From a ZeRO base the weights are the fp32 master weights, as nothing else would keep them: the Trainer should build the
model in fp32 (with ``bf16=True`` it then computes in bf16, by autocast). They have the params' own names, which a
resume looks for, also from a partial base. From a base of this format the files keep their names, order and dtypes,
unless a resume would not find a param by its name there.
"""

from __future__ import annotations

from llmtailor.checkpoint.index import ACCELERATE, CheckpointIndex
from llmtailor.checkpoint.layout import FileLayout
from llmtailor.checkpoint.schema import kinds_by_param
from llmtailor.checkpoint.wanted import Wanted
from llmtailor.containers.safetensors import SINGLE
from llmtailor.containers.torch_file import lay_out_torch_file
from llmtailor.errors import Problem, SourceError, UnsupportedCheckpoint
from llmtailor.formats.torch_states import NO_STATES, keeps_nothing, lay_out_master_weights, optimizer_tree
from llmtailor.frameworks.files import ENGINE_FILES
from llmtailor.frameworks.framework import FRAMEWORKS
from llmtailor.frameworks.write import lay_out_trainer_files, synthesize_files


def lay_out(base: CheckpointIndex, wanted: Wanted) -> tuple[list[FileLayout], list[Problem]]:
    """Lay out a composite's files; see `Writer`."""
    if not (kinds_by_param(base) or keeps_nothing(base)):
        raise SourceError.at(base.name, NO_STATES, "use a later checkpoint as base")
    if wanted.framework == ACCELERATE and (skipped := base.zero.skipped_steps):
        what = f"{skipped} of its steps were skipped, and accelerate counts steps as Adam does, without these"
        raise UnsupportedCheckpoint.at(base.name, what, "use --stage 1, 2 or 3, or --to fsdp")
    beside, notices = synthesize_files(base, wanted)
    weights = lay_out_master_weights(base)
    if wanted.framework == ACCELERATE and [one.path for one in weights] != [SINGLE]:
        what = f"accelerate reads its weights from {SINGLE} only, and they take {len(weights) - 1} files"
        raise UnsupportedCheckpoint.at(base.name, what, "use --stage 1, 2 or 3, or --to fsdp")
    optimizer = lay_out_torch_file(FRAMEWORKS[wanted.framework].optimizer, optimizer_tree(base, wanted.layout))
    made = [optimizer, *weights, *beside]
    dtype = "F32" if base.form.has_masters else None  # config.json follows the weights, which are the master weights
    return lay_out_trainer_files(base, wanted, made, dtype, ENGINE_FILES, has_weights=True), notices
