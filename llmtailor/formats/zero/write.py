"""Lays out the shard files of a composite: the base's object trees, with every tensor bound to a state.

Everything that is not a state (hyperparameters, loss scaler, counters, ds_config, DeepSpeed's classes by name) is
the base's, taken over through the decoded pickle. Tensors become plain tensors of their own storage; padding is zero.
On another number of ranks, rank r starts from the files of the base's rank r modulo its world size. In a salvage, the
files of a rank that can't be read are made from those of the first that can: they differ in nothing but states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.layout import FileLayout, Literal
from llmtailor.checkpoint.optimizer import Target
from llmtailor.containers.torch_zip import lay_out_torch_file
from llmtailor.errors import PathIn, Problems, SourceError
from llmtailor.formats.scheduler import regroup_scheduler
from llmtailor.formats.trainer import file_fact
from llmtailor.formats.trees import read_tree
from llmtailor.formats.zero import write3 as target3
from llmtailor.formats.zero import write12 as target12
from llmtailor.formats.zero.base_trees import adapt_config, read_carried
from llmtailor.formats.zero.files import (
    LATEST,
    WHOLE_MODEL,
    ShardFiles,
    find_shard_files,
    fit_world_size,
    survey_shard_files,
)


def read_model_order(base: CheckpointIndex) -> list[str]:
    """Return the names of the model's state dict, in its order; params, frozen params, buffers and tied names."""
    path = find_shard_files(base.root, base.name).model[0]
    return list(read_tree(base.root, path, PathIn(base.name, path))["module"])


def lay_out_shards(
    base: CheckpointIndex, target: Target, steps: Sequence[float], from_group: Sequence[int] | None = None
) -> Iterator[FileLayout]:
    """Yield the layouts of all shard files of a composite.

    ``steps`` is the optimizer's step of each flat id; ``from_group``, if the groups are not the base's, the old one
    whose place in the scheduler's lists each of them takes. One rank's file is decoded at a time.
    """
    files = _files_of(base)
    if LATEST not in base.files:
        yield FileLayout(LATEST, (Literal(files.tag.encode(), "the tag"),))

    def read(paths: Sequence[str], rank: int) -> Any:
        path = paths[rank % len(paths)]
        if path in base.unreadable:
            path = next(path for path in paths if path not in base.unreadable)
        where = PathIn(base.name, path)
        tree = read_tree(base.root, path, where)
        if file_fact(base.root / path) != base.files.get(path):
            raise SourceError.at(where, "the file changed while it was read", "stop what writes to it, and start again")
        return tree

    prefix = "bf16_" if files.is_bf16 else ""
    optim_tree = target3.optim_tree if target.stage == 3 else target12.optim_tree
    for rank in range(target.world_size):
        carried = read_carried(read(files.optim, rank), base, target)
        tree = optim_tree(base, target, rank, steps, carried)
        yield lay_out_torch_file(f"{files.tag}/{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", tree)
    for rank in range(target.world_size if target.stage == 3 else 1):
        tree = read(files.model, rank)
        if "ds_config" in tree:
            tree["ds_config"] = adapt_config(tree["ds_config"] or {}, base, target)
        if from_group is not None:
            where = f"{base.name}: lr_scheduler of the model states"
            tree["lr_scheduler"] = regroup_scheduler(tree.get("lr_scheduler"), where, len(base.groups), from_group)
        if target.stage == 3:
            name, tree = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", target3.model_tree(tree, base, target, rank)
        else:
            name, tree = WHOLE_MODEL, target12.model_tree(tree, base, target)
        yield lay_out_torch_file(f"{files.tag}/{name}", tree)


def _files_of(base: CheckpointIndex) -> ShardFiles:
    """Find the shards of all ranks, also those that are missing."""
    if not base.unreadable and LATEST in base.files:
        return find_shard_files(base.root, base.name)
    told = Problems()  # when the checkpoint was surveyed
    files = survey_shard_files(base.root, base.name, told)
    assert files is not None, "a checkpoint with an index has shards"
    files = fit_world_size(files, base.world_size, base.name, told)
    assert files is not None, "its world size was found to fit"
    return files
