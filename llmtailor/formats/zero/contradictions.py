"""Fields of DeepSpeed's files that say the same thing twice, or could not be so together: do they agree? Pure.

Each of `CONTRADICTIONS` says what stock does; docs/findings.md is made from them, and tests/verify damages each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.codes import Code
from llmtailor.errors import PathIn, some
from llmtailor.findings import ERROR, WARNING, Finding
from llmtailor.formats.field_tables import decays_vectors_alone
from llmtailor.formats.zero.files import ShardFiles
from llmtailor.model.states import EXP_AVG, EXP_AVG_SQ, FROZEN, ITEMSIZE, MASTER, MODULE

_FLOATS = ("F64", "F32", "BF16", "F16", "F8_E4M3", "F8_E5M2")
_MAX_SQ = "max_exp_avg_sq"
_OTHER_SAVE = "copy the checkpoint again, whole, or take another one"
_MASTERS_ARE_LOW = "fp16_master_weights_and_grads", "bf16_master_weights_and_grads"


@dataclass(frozen=True, slots=True)
class Shards:
    """What there is to compare."""

    index: CheckpointIndex
    files: ShardFiles
    ds_config: Mapping[str, Any]
    facts: Mapping[str, object]
    """The facts on the optimizer's file that `formats.field_tables` uses, by the field's name"""
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
        for param, held in self.index.module.items() if MODULE in kinds else ():
            found.setdefault((MODULE, held.dtype), []).append(param)
        return found


_Found = Iterator[tuple[str, Iterator[str] | list[str] | tuple[str, ...]]]


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Two places that must agree."""

    title: str
    severity: str
    code: Code
    stock: str
    """What a stock resume does"""
    check: Callable[[Shards], _Found]
    """Yields what is wrong, in words, and the params concerned; none if all are"""
    kind: str
    """The kind of file concerned; empty for all"""


CONTRADICTIONS: list[Contradiction] = []


def _contradiction(
    severity: str, code: Code, stock: str, kind: str = ""
) -> Callable[[Callable[[Shards], _Found]], None]:
    """Add a check to the table; its docstring is the title."""
    return lambda check: CONTRADICTIONS.append(Contradiction(check.__doc__ or "", severity, code, stock, check, kind))


def find_contradictions(shards: Shards, name: str) -> Iterator[Finding]:
    """Yield a finding for every two places that say different things."""
    paths = {"optim": shards.files.optim[0], "model": shards.files.model[0]}
    for one in CONTRADICTIONS:
        for what, params in one.check(shards):
            where, fix = PathIn(name, paths.get(one.kind, shards.files.tag)), f"{one.stock}; {_OTHER_SAVE}"
            yield Finding(where, what, fix, one.code, one.severity, tuple(params))


@_contradiction(ERROR, Code.STEPS_DIFFER, "silent: the bias is corrected by the wrong step")
def _steps(shards: Shards) -> _Found:
    """Adam's steps of flat ids that differ, in no composite"""
    # all flat ids make their steps together; only a composite mixes them
    found = sorted({one.step for one in shards.index.sub_groups})
    expected = shards.index.global_step - shards.index.skipped_steps
    usual = {expected - lag for lag in shards.step_lags}
    if expected in found and not usual.issuperset(found) and not shards.is_composite:
        yield f"Adam's steps are {', '.join(f'{step:g}' for step in found)}, the run has made {expected}", ()


@_contradiction(ERROR, Code.STATE_DTYPE, "silent: they are copied into fp32 as they are")
def _master_dtype(shards: Shards) -> _Found:
    """masters in another dtype than fp32"""
    low = any(shards.setting(key[:4], key) is True for key in _MASTERS_ARE_LOW)
    for (_, dtype), params in shards.dtypes(MASTER).items():
        if dtype not in ("F32", "F64") and not (low and dtype in ("F16", "BF16")):
            yield f"the masters of {some(params)} are {dtype}, where DeepSpeed keeps fp32", params


@_contradiction(ERROR, Code.STATE_DTYPE, "silent: they are cast as they are")
def _not_floats(shards: Shards) -> _Found:
    """moments, or the module of ZeRO-1/2, that are not floating-point numbers"""
    trained = {state.param for state in shards.index.held if state.kind == MASTER}
    for (kind, dtype), params in shards.dtypes(EXP_AVG, EXP_AVG_SQ, _MAX_SQ, MODULE).items():
        own = [param for param in params if param in trained]
        if own and dtype not in _FLOATS:
            yield f"{kind} of {some(own)} is {dtype}, which is no floating-point type", own


@_contradiction(ERROR, Code.STATE_DTYPE, "silent: they are cast as they are", "model")
def _frozen_dtype(shards: Shards) -> _Found:
    """frozen params in fewer bits than the run has"""
    # a frozen param has no master: what it was rounded to is all that there is
    run = shards.index.precision
    for (_, dtype), params in shards.dtypes(FROZEN).items():
        if dtype in _FLOATS and ITEMSIZE[dtype] < ITEMSIZE[run]:
            yield f"{some(params)} in the module is {dtype}, the run trained in {run}", params


_STOCK = "resumes: they are cast; what the other dtype can't hold is lost"


@_contradiction(WARNING, Code.STATE_DTYPE, _STOCK, "model")
def _model_dtype(shards: Shards) -> _Found:
    """frozen params in another format, or the module of ZeRO-1/2 in another dtype"""
    run, found = shards.index.precision, shards.dtypes(FROZEN, MODULE)
    frozen = {param for (kind, _), params in found.items() if kind == FROZEN for param in params}
    told: dict[str, list[str]] = {}
    for (kind, dtype), params in found.items():
        bits, of_run = ITEMSIZE[dtype], ITEMSIZE[run]
        if dtype in _FLOATS and dtype != run and (bits == of_run or (kind == MODULE and bits < of_run)):
            told.setdefault(dtype, []).extend(one for one in params if kind == FROZEN or one not in frozen)
    for dtype, params in told.items():
        if params:
            yield f"{some(params)} in the module is {dtype}, the run trained in {run}", params


@_contradiction(ERROR, Code.FIELD_CONFLICT, "silent: the optimizer is no longer AMSGrad")
def _amsgrad(shards: Shards) -> _Found:
    """max_exp_avg_sq with amsgrad off"""
    off = [number for number, group in enumerate(shards.index.groups) if not group.hyper.get("amsgrad", True)]
    if off and shards.dtypes(_MAX_SQ):
        yield f"there is {_MAX_SQ}, but param group {off[0]} has amsgrad off", ()


@_contradiction(ERROR, Code.FIELD_CONFLICT, "silent: these params move uphill")
def _direction(shards: Shards) -> _Found:
    """maximize in some param groups only"""
    told = [bool(group.hyper.get("maximize")) for group in shards.index.groups]
    if any(told) and not all(told):
        yield f"param group {told.index(True)} maximizes the loss, the others minimize it", ()


_STOCK = "silent: the loss goes up (neither the Trainer nor DeepSpeed has an option to maximize)"


@_contradiction(ERROR, Code.FIELD_CONFLICT, _STOCK)
def _uphill(shards: Shards) -> _Found:
    """maximize in all param groups"""
    if shards.index.groups and all(group.hyper.get("maximize") for group in shards.index.groups):
        yield "the optimizer maximizes the loss (maximize)", ()


@_contradiction(ERROR, Code.FIELD_CONFLICT, "silent: a resume decays these instead of the matrices")
def _decay(shards: Shards) -> _Found:
    """weight decay on norms and biases alone"""
    shapes = [[shards.index.params[name].shape for name in group.params] for group in shards.index.groups]
    if decays_vectors_alone([group.hyper for group in shards.index.groups], shapes):
        yield "weight decay is on vectors alone, as if the hyperparameters of the param groups were swapped", ()


@_contradiction(WARNING, Code.FIELD_CONFLICT, "silent: each group trains with its own")
def _unlike_groups(shards: Shards) -> _Found:
    """param groups with different betas, eps, amsgrad or bias_correction"""
    for key in ("betas", "eps", "amsgrad", "bias_correction"):
        values = [group.hyper.get(key) for group in shards.index.groups]
        if any(value != values[0] for value in values):
            yield f"the param groups differ in {key}: {', '.join(dict.fromkeys(f'{value}' for value in values))}", ()


@_contradiction(ERROR, Code.FIELD_CONFLICT, "silent: the scale no longer adapts", "optim")
def _scaler_kind(shards: Shards) -> _Found:
    """a static loss scaler in a run with a dynamic one"""
    if shards.facts.get("dynamic_loss_scale") is True and "loss_scaler.cur_iter" not in shards.facts:
        yield "the loss scaler is static, but dynamic_loss_scale is True", ()


@_contradiction(WARNING, Code.FIELD_CONFLICT, "resumes; gradients are scaled to no effect", "optim")
def _scale_without_fp16(shards: Shards) -> _Found:
    """a loss scale other than 1 without fp16"""
    scale, run = shards.facts.get("loss_scaler.cur_scale"), shards.index.precision
    if run != "F16" and isinstance(scale, (int, float)) and scale != 1:
        yield f"the loss scale is {scale:g} in a run in {run}, which has none", ()
    elif run != "F16" and "loss_scaler.cur_iter" in shards.facts:
        yield f"the loss scaler is dynamic in a run in {run}, which needs none", ()


@_contradiction(WARNING, Code.STEPS_DIFFER, "silent: the scale grows earlier or later", "optim")
def _scaler_steps(shards: Shards) -> _Found:
    """a loss scaler of another step"""
    counted, steps = shards.facts.get("loss_scaler.cur_iter"), shards.index.global_step
    if type(counted) is int and counted != steps:
        yield f"the loss scaler has counted {counted} steps, the run {steps}", ()


_STOCK = (
    "silent: a resume goes by the checkpoint, and ignores the settings of the run; a run that was resumed with other "
    "settings leaves the same"
)


@_contradiction(WARNING, Code.FIELD_CONFLICT, _STOCK, "optim")
def _clipping(shards: Shards) -> _Found:
    """clip_grad other than gradient_clipping of ds_config, ZeRO-1/2"""
    have, wanted = shards.facts.get("clip_grad"), shards.setting("gradient_clipping")
    if isinstance(have, (int, float)) and isinstance(wanted, (int, float)) and have != wanted:
        yield f"clip_grad is {have:g}, the settings beside it say {wanted:g}", ()
