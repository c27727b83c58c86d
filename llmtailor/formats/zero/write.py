"""Layout of a Trainer checkpoint with DeepSpeed shards of any ZeRO stage.

Tensors become plain tensors with their own storage; padding is zero. On another number of ranks, rank r copies the
other content of the base's rank r modulo its world size. In a salvage, an unreadable rank's files are modelled on the
first readable rank's: they differ only in states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmtailor.checkpoint.index import CheckpointIndex, TrainState
from llmtailor.checkpoint.layout import Bytes, FileLayout
from llmtailor.containers.torch_zip import lay_out_torch_file
from llmtailor.errors import Problem, UnsupportedCheckpoint, some
from llmtailor.formats.format import Wanted
from llmtailor.formats.scheduler import regroup_scheduler
from llmtailor.formats.trainer import ADAPTER_CONFIG, OPTIMIZER, SCALER, lay_out_trainer_files, params_on_disk
from llmtailor.formats.weights import lay_out_missing_weights
from llmtailor.formats.zero.files import LATEST, model_name, optim_name
from llmtailor.formats.zero.trees import ZeroTarget, model_tree, new_engine, optim_tree
from llmtailor.model.states import MASTER, WEIGHT, State


def check(dtype: str | None, allow_split: bool) -> None:
    """Accept any dtype and split: master weights are stored separately from the weights."""


def lay_out(base: CheckpointIndex, wanted: Wanted) -> tuple[list[FileLayout], list[Problem]]:
    """Return the layouts of a composite's files except the tokenizer's, and notices.

    Raises UnsupportedCheckpoint for a base without DeepSpeed that lacks something that its shards need.
    """
    if base.has_masters:
        precision, dtype, leave_out = base.precision, wanted.dtype, frozenset[str]()
    else:
        precision = dtype = wanted.dtype or base.precision
        leave_out = frozenset((OPTIMIZER, SCALER, LATEST))
        _check_plain_base(base, precision)
    shards = [*_lay_out_shards(ZeroTarget.of(base, wanted.layout, precision), wanted.from_group)]
    weights, notices = lay_out_missing_weights(base, wanted.layout.stage, dtype, wanted.is_alone)
    notices += _rounded_twice(base, wanted.dtype)
    return lay_out_trainer_files(base, wanted, [*shards, *weights], dtype, leave_out), notices


def _lay_out_shards(target: ZeroTarget, from_group: Sequence[int] | None) -> Iterator[FileLayout]:
    base = target.base
    train = base.train if base.train.optim else new_engine(base, target.layout.stage, target.precision)
    if from_group is not None:
        where, old = f"{base.name}: lr_scheduler of the model states", len(base.groups)
        model = (tree and _with_scheduler(tree, where, old, from_group) for tree in train.model)
        train = replace(train, model=tuple(model))
    if LATEST not in base.files or not base.train.optim:
        yield FileLayout(LATEST, (Bytes(target.tag.encode(), "the tag"),))
    for _, path, tree in make_shards(target, train):
        yield lay_out_torch_file(path, tree)


def make_shards(target: ZeroTarget, train: TrainState) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield the rank, the path and the object tree of each shard file, with its tensors bound to states."""
    layout = target.layout
    for rank in range(layout.world_size):
        name = optim_name(rank, target.precision == "BF16")
        yield rank, f"{target.tag}/{name}", optim_tree(target, rank, _of_rank(train.optim, rank))
    for rank in range(layout.world_size if layout.stage == 3 else 1):
        rest = dict(_of_rank(train.model, rank))
        if "ds_config" in rest:
            rest["ds_config"] = target.adapt_config(rest["ds_config"] or {})
        yield rank, f"{target.tag}/{model_name(rank, layout.stage)}", model_tree(target, rank, rest)


def _with_scheduler(tree: Mapping[str, Any], where: str, old: int, from_group: Sequence[int]) -> dict[str, Any]:
    return {**tree, "lr_scheduler": regroup_scheduler(tree.get("lr_scheduler"), where, old, from_group)}


def _of_rank(trees: Sequence[Mapping[str, Any] | None], rank: int) -> Mapping[str, Any]:
    return trees[rank % len(trees)] or next(tree for tree in trees if tree is not None)


def _check_plain_base(base: CheckpointIndex, precision: str) -> None:
    if precision == "F16":
        what = "an fp16 run of DeepSpeed needs the state of its loss scaler, which a checkpoint without DeepSpeed lacks"
        raise UnsupportedCheckpoint.at(base.name, what, "resume in bf16")
    if ADAPTER_CONFIG in base.files:
        what = "it is a PEFT adapter, and does not state the precision in which the model below it was trained"
        raise UnsupportedCheckpoint.at(base.name, what, "stay without DeepSpeed")
    unnamed = [param for group in base.groups for param in group.params if State(param, MASTER) not in base.held]
    if unnamed:
        what = f"the weight files have other names for {some(unnamed)} than the model, so they have no master weights"
        fix = "stay without DeepSpeed; or train on with a run that saves the params' own names"
        raise UnsupportedCheckpoint.at(base.name, what, fix)


def _rounded_twice(base: CheckpointIndex, dtype: str | None) -> list[Problem]:
    """Return notices on weights that can't be rounded from their master weights, as it is not known which these are."""
    if not dtype or not base.has_masters:
        return []
    weights = {state.param: held for state, held in base.held.items() if state.kind == WEIGHT and held.dtype != dtype}
    known = params_on_disk(base)
    unknown = [name for name in weights if name not in known]
    if not unknown:
        return []
    what = f"{some(unknown)} are rounded a second time, from the weights: their master weights are not known"
    fix = "nothing, to resume; to export the model, call trainer.save_model() after the resume"
    return [Problem("dtype", what, fix)]
