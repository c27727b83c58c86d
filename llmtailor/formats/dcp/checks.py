"""What a DCP resume accepts without a word: states of several saves, weights that are rounded copies. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.step_names import step_of
from llmtailor.codes import Code
from llmtailor.errors import PathIn, some
from llmtailor.findings import ERROR, WARNING, Finding
from llmtailor.formats.dcp.keys import Optimizer
from llmtailor.loaders.files import MANIFEST, TRAINER_STATE
from llmtailor.loaders.read import TrainerFiles
from llmtailor.model.states import EXP_AVG, ITEMSIZE, MASTER, State

_MIXED = "silent: copy the whole checkpoint again; its files come from different saves"


def compare_steps(
    root: Path, name: str, trainer: TrainerFiles | None, optimizer: Optimizer, steps: Mapping[str, float]
) -> Iterator[Finding]:
    """Yield findings on Adam's steps of different saves; a composite may mix them.

    ``step`` of each param is in the file of some rank. If the files have different ones, they are of different saves.
    """
    if (root / MANIFEST).is_file():
        return
    of_file: dict[str, set[float]] = {}
    for param, step in steps.items():
        if stored := optimizer.tensors.get(param, {}).get("step"):
            path = next(iter(stored.held.place.cover(0, 1))).extent.path
            of_file.setdefault(path, set()).add(step)
    found = {frozenset(one) for one in of_file.values()}
    if len(found) > 1 and not frozenset.intersection(*found):
        told = ", ".join(f"{path}: {max(own):g}" for path, own in list(of_file.items())[:3])
        what = f"the files of the ranks have different steps of Adam ({told})"
        yield Finding(PathIn(name, next(iter(of_file))), what, _MIXED, Code.STEPS_DIFFER, ERROR)
    newest = max(steps.values())
    lags = trainer.step_lags if trainer else frozenset((0,))
    newest += next((lag for lag in lags if trainer and newest + lag == trainer.global_step), 0)
    usual = {newest - lag for lag in lags}
    if lagging := [param for param, step in steps.items() if step < newest and step not in usual]:
        what = f"Adam's step of {some(lagging)} is below {newest:g}"
        yield Finding(name, what, "nothing, if it had no gradients in some steps", Code.STEPS_DIFFER, WARNING)
    counted = trainer.scheduler.num_steps if trainer and trainer.scheduler else None
    if trainer and counted is not None and counted != newest:
        what = f"the schedule is at step {counted}, the optimizer's states are from step {newest:g}"
        yield Finding(PathIn(name, trainer.client.scheduler), what, _MIXED, Code.STEPS_DIFFER, ERROR)
    if trainer and trainer.global_step is not None and trainer.global_step != newest:
        what = f"global_step is {trainer.global_step}, but the optimizer's states are from step {newest:g}"
        is_sure = newest > trainer.global_step or step_of(root) == newest
        fix = _MIXED if is_sure else "nothing, if the run was once resumed without its optimizer"
        yield Finding(PathIn(name, TRAINER_STATE), what, fix, Code.STEPS_DIFFER, ERROR if is_sure else WARNING)


def find_rounded(index: CheckpointIndex) -> Iterator[Finding]:
    """Yield a finding on weights with fewer bits than their moments: a resume with fp32 params loads them silently."""
    rounded = [
        state.param
        for state, held in index.held.items()
        if state.kind == MASTER
        and (moment := index.held.get(State(state.param, EXP_AVG)))
        and ITEMSIZE[held.dtype] < ITEMSIZE[moment.dtype]
    ]
    if rounded:
        what = f"the weights of {some(rounded)} have fewer bits than their moments: they were rounded"
        fix = "silent: fp32 params would start from rounded values; use a checkpoint that was not rounded"
        yield Finding(index.name, what, fix, Code.WEIGHTS_DTYPE, WARNING)
