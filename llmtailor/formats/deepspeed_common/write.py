"""What ZeRO's and universal checkpoints have in common: the engine's state, and the files beside its own.

Everything that is not a state (hyperparameters, loss scaler, counters, ds_config, DeepSpeed's classes by name) is
copied from the base. If the base was trained without DeepSpeed, it is what DeepSpeed 0.19.8 would have written; what a
resume takes from its own config is left out rather than invented: ``clip_grad``, ``global_samples`` and, but for
ZeRO-3, the loss scaler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmtailor.checkpoint.index import DCP, DEEPSPEED, FSDP, CheckpointIndex, TrainState
from llmtailor.checkpoint.layout import FileLayout
from llmtailor.errors import Problem, UnsupportedCheckpoint, some
from llmtailor.formats.common.lightning import regrouped
from llmtailor.formats.deepspeed_common.trees import ZeroTarget, new_engine
from llmtailor.formats.weights import lay_out_missing_weights
from llmtailor.loaders.files import ADAPTER_CONFIG, LATEST, SCALER
from llmtailor.loaders.scheduler import regroup_scheduler
from llmtailor.loaders.write import (
    Wanted,
    lay_out_trainer_files,
    made_client_files,
    params_on_disk,
    scheduler_for,
)
from llmtailor.model.states import MASTER, WEIGHT, State


def lay_out_engine(
    base: CheckpointIndex, wanted: Wanted, lay_out_states: Callable[[ZeroTarget, TrainState], Iterable[FileLayout]]
) -> tuple[list[FileLayout], list[Problem]]:
    """Return the layouts of a checkpoint of DeepSpeed, whose own files ``lay_out_states`` lays out; see `lay_out`."""
    if base.form.has_masters:
        precision, dtype, leave_out = base.precision, wanted.dtype, frozenset[str]()
    else:
        precision = dtype = wanted.dtype or base.precision
        leave_out = frozenset((SCALER, LATEST))
        _check_plain_base(base, precision)
    target, train = ZeroTarget.of(base, wanted.layout, precision, wanted.client), base.train
    if not train.optim:
        train = new_engine(base, target.layout.stage, precision)
    if wanted.from_group is not None:
        where, old = f"{base.name}: lr_scheduler of the model states", len(base.groups)
        adapted = {
            id(tree): _with_scheduler(tree, where, old, wanted.from_group) for tree in train.model if tree is not None
        }
        train = replace(train, model=tuple(adapted.get(id(tree)) for tree in train.model))
    notices: list[Problem] = []
    without = {id(tree): tree for tree in train.model if tree is not None and not tree.get("lr_scheduler")}
    if wanted.client != base.client and without:  # an engine that has a scheduler can't load None; others don't look
        scheduler, about = scheduler_for(base, wanted)
        notices += about if wanted.client == DEEPSPEED else []
        given = {key: {**tree, "lr_scheduler": scheduler} for key, tree in without.items()}
        train = replace(train, model=tuple(given.get(id(tree), tree) for tree in train.model))
    states = [*lay_out_states(target, train)]
    weights: list[FileLayout] = []
    if target.client.saves_model or base.form.is_partial:
        weights, missing = lay_out_missing_weights(base, wanted.layout.stage, dtype, wanted.is_alone)
        notices += missing
    made, about = made_client_files(base, wanted)
    notices += [*about, *_rounded_twice(base, wanted.dtype)]
    if base.form.family in (FSDP, DCP) and wanted.dtype is None:
        what = f"the run that resumes has to train in {precision}, the dtype of the params"
        notices.append(Problem(base.name, what, "for a run in bf16, use --dtype bfloat16, or dtype in the recipe"))
    return lay_out_trainer_files(base, wanted, [*states, *weights, *made], dtype, leave_out), notices


def _with_scheduler(tree: Mapping[str, Any], where: str, old: int, from_group: Sequence[int]) -> dict[str, Any]:
    found = {"lr_scheduler": regroup_scheduler(tree.get("lr_scheduler"), where, old, from_group)}
    return {**tree, **found, **regrouped(tree, where, old, from_group)}


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
    if not dtype or not base.form.has_masters:
        return []
    weights = {state.param: held for state, held in base.held.items() if state.kind == WEIGHT and held.dtype != dtype}
    known = params_on_disk(base)
    unknown = [name for name in weights if name not in known]
    if not unknown:
        return []
    what = f"{some(unknown)} are rounded a second time, from the weights: their master weights are not known"
    fix = "nothing, to resume; to export the model, call trainer.save_model() after the resume"
    return [Problem("dtype", what, fix)]
