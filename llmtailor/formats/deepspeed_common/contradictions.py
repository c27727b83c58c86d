"""Places in DeepSpeed's files that must agree: steps, dtypes, the loss scaler, weight decay. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.codes import Code
from llmtailor.errors import PathIn, some
from llmtailor.findings import ERROR, WARNING, Finding
from llmtailor.formats.deepspeed_common.files import ShardFiles
from llmtailor.loaders.stock_fields import decays_vectors_alone
from llmtailor.model.states import EXP_AVG, EXP_AVG_SQ, FROZEN, ITEMSIZE, MASTER, MODULE

_FLOATS = ("F64", "F32", "BF16", "F16", "F8_E4M3", "F8_E5M2")
_MAX_SQ = "max_exp_avg_sq"
_OTHER_SAVE = "copy the checkpoint again, whole, or take another one"
_CAST = f"a resume casts them, and what was lost stays lost; {_OTHER_SAVE}"
_MASTERS_ARE_LOW = "fp16_master_weights_and_grads", "bf16_master_weights_and_grads"


@dataclass(frozen=True, slots=True)
class Shards:
    """What there is to compare."""

    index: CheckpointIndex
    files: ShardFiles
    ds_config: Mapping[str, Any]
    facts: Mapping[str, object]
    """The facts on the optimizer's file that `loaders.stock_fields` uses, by the field's name"""
    is_composite: bool
    """Whether a manifest of ours says that it is made of several saves."""
    step_lags: frozenset[int]
    """How many steps Adam may be behind the run"""

    def setting(self, *keys: str) -> Any:
        value: Any = self.ds_config
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def dtypes(self, *kinds: str) -> dict[tuple[str, str], list[str]]:
        """Return the params of each of these kinds of state and dtype."""
        found: dict[tuple[str, str], list[str]] = {}
        for state, held in self.index.held.items():
            if state.kind in kinds:
                found.setdefault((state.kind, held.dtype), []).append(state.param)
        for param, held in self.index.zero.module.items() if MODULE in kinds else ():
            found.setdefault((MODULE, held.dtype), []).append(param)
        return found


def find_contradictions(shards: Shards, name: str) -> Iterator[Finding]:
    """Yield a finding for every two places that say different things."""
    model, optim = (PathIn(name, paths[0]) for paths in (shards.files.model, shards.files.optim))
    where = PathIn(name, shards.files.tag)
    yield from _steps(shards, where)
    yield from _dtypes(shards, where)
    yield from _module_dtypes(shards, model)
    counted, steps = shards.facts.get("loss_scaler.cur_iter"), shards.index.global_step
    if type(counted) is int and counted != steps:
        what = f"the loss scaler has counted {counted} steps, the run {steps}"
        fix = f"silent: the scale grows earlier or later; {_OTHER_SAVE}"
        yield Finding(optim, what, fix, Code.STEPS_DIFFER, WARNING)
    shapes = [[shards.index.params[name].shape for name in group.params] for group in shards.index.groups]
    if decays_vectors_alone([group.hyper for group in shards.index.groups], shapes):
        what = "weight decay is on vectors alone, as if the hyperparameters of the param groups were swapped"
        fix = f"silent: a resume decays these instead of the matrices; {_OTHER_SAVE}"
        yield Finding(where, what, fix, Code.FIELD_CONFLICT, ERROR)


def _steps(shards: Shards, where: str) -> Iterator[Finding]:
    """All flat ids make their steps together; only a composite mixes them."""
    found = sorted({one.step for one in shards.index.sub_groups})
    expected = shards.index.global_step - shards.index.zero.skipped_steps
    usual = {expected - lag for lag in shards.step_lags}
    if expected in found and not usual.issuperset(found) and not shards.is_composite:
        what = f"Adam's steps are {', '.join(f'{step:g}' for step in found)}, the run has made {expected}"
        fix = f"silent: the bias is corrected by the wrong step; {_OTHER_SAVE}"
        yield Finding(where, what, fix, Code.STEPS_DIFFER, ERROR)


def _dtypes(shards: Shards, where: str) -> Iterator[Finding]:
    low = any(shards.setting(key[:4], key) is True for key in _MASTERS_ARE_LOW)
    for (_, dtype), params in shards.dtypes(MASTER).items():
        if dtype not in ("F32", "F64") and not (low and dtype in ("F16", "BF16")):
            what = f"the masters of {some(params)} are {dtype}, where DeepSpeed keeps fp32"
            yield Finding(where, what, _CAST, Code.STATE_DTYPE, ERROR, tuple(params))
    trained = {state.param for state in shards.index.held if state.kind == MASTER}
    for (kind, dtype), params in shards.dtypes(EXP_AVG, EXP_AVG_SQ, _MAX_SQ, MODULE).items():
        own = tuple(param for param in params if param in trained)
        if own and dtype not in _FLOATS:
            what = f"{kind} of {some(own)} is {dtype}, which is no floating-point type"
            yield Finding(where, what, _CAST, Code.STATE_DTYPE, ERROR, own)


def _module_dtypes(shards: Shards, where: str) -> Iterator[Finding]:
    """A frozen param has no master: what it was rounded to is all that there is."""
    run, found = shards.index.precision, shards.dtypes(FROZEN, MODULE)
    frozen = {param for (kind, _), params in found.items() if kind == FROZEN for param in params}
    for (kind, dtype), params in found.items():
        own = tuple(one for one in params if kind == FROZEN or one not in frozen)
        bits, of_run = ITEMSIZE[dtype], ITEMSIZE[run]
        if not own or dtype not in _FLOATS or dtype == run or bits > of_run:
            continue
        severity = ERROR if kind == FROZEN and bits < of_run else WARNING
        what = f"{some(own)} in the module is {dtype}, the run trained in {run}"
        yield Finding(where, what, _CAST, Code.STATE_DTYPE, severity, own)
