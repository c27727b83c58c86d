"""Fields of DeepSpeed's files that say the same thing twice, or could not be so together: do they agree? Pure.

Each row of `CONTRADICTIONS` says what stock does; docs/findings.md is made from them, and tests/verify damages each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llmtailor.codes import Code
from llmtailor.errors import PathIn, some
from llmtailor.findings import ERROR, WARNING, Finding
from llmtailor.formats.resumed.optimizers import decays_vectors_alone
from llmtailor.formats.zero.common import Saved, precision
from llmtailor.formats.zero.files import ShardFiles
from llmtailor.model.states import EXP_AVG, EXP_AVG_SQ, FROZEN, ITEMSIZE, MASTER, MODULE, State

_FLOATS = ("F64", "F32", "BF16", "F16")
_ALL_FLOATS = (*_FLOATS, "F8_E4M3", "F8_E5M2")
_OTHER_SAVE = "copy the checkpoint again, whole, or take another one"
_MAX_SQ = "max_exp_avg_sq"


@dataclass(frozen=True, slots=True)
class Shards:
    """What there is to compare."""

    saved: Saved
    files: ShardFiles
    is_composite: bool
    """Whether a manifest of ours says that it is made of several saves."""


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Two places that must agree."""

    title: str
    severity: str
    code: Code
    stock: str
    """What a stock resume does"""
    check: Callable[[Shards], Iterator[tuple[str, str, tuple[str, ...]]]]
    """Yields the path of the file, what is wrong in words, and the params concerned"""


def find_contradictions(shards: Shards, name: str) -> Iterator[Finding]:
    """Yield a finding for every two places that say different things."""
    for one in CONTRADICTIONS:
        for path, what, params in one.check(shards):
            fix = f"{one.stock}; {_OTHER_SAVE}"
            yield Finding(PathIn(name, path), what, fix, one.code, one.severity, params)


_Found = Iterator[tuple[str, str, tuple[str, ...]]]


def _setting(config: Mapping[str, Any], *keys: str) -> Any:
    value: Any = config
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _steps(shards: Shards) -> _Found:
    """All flat ids make their steps together; only a composite mixes them."""
    counters, found = shards.saved.counters, sorted({one.step for one in shards.saved.sub_groups})
    expected = counters.global_steps - counters.skipped_steps
    if expected in found and len(found) > 1 and not shards.is_composite:
        what = f"Adam's steps are {', '.join(f'{step:g}' for step in found)}, the run has made {expected}"
        yield shards.files.tag, what, ()


def _master_dtype(shards: Shards) -> _Found:
    low = any(
        _setting(shards.saved.ds_config, kind, f"{kind}_master_weights_and_grads") is True for kind in ("fp16", "bf16")
    )
    found: dict[str, list[str]] = {}
    for state, held in shards.saved.held.items():
        if state.kind == MASTER and held.dtype not in ("F32", "F64") and not (low and held.dtype in ("F16", "BF16")):
            found.setdefault(held.dtype, []).append(state.param)
    for dtype, params in found.items():
        yield shards.files.tag, f"the masters of {some(params)} are {dtype}, where DeepSpeed keeps fp32", tuple(params)


def _not_floats(shards: Shards) -> _Found:
    found: dict[tuple[str, str], list[str]] = {}
    module = {State(param, MODULE): held for param, held in shards.saved.module.items()}
    trained = {state.param for state in shards.saved.held if state.kind == MASTER}
    for state, held in {**shards.saved.held, **module}.items():
        is_own = state.kind in (EXP_AVG, EXP_AVG_SQ, _MAX_SQ) or (state.kind == MODULE and state.param in trained)
        if is_own and held.dtype not in _ALL_FLOATS:
            found.setdefault((state.kind, held.dtype), []).append(state.param)
    for (kind, dtype), params in found.items():
        yield shards.files.tag, f"{kind} of {some(params)} is {dtype}, which is no floating-point type", tuple(params)


def _frozen_dtype(shards: Shards) -> _Found:
    """A frozen param has no master: what it was rounded to is all that there is."""
    run = precision(shards.files.is_bf16, shards.saved.ds_config)
    kept = {state.param: held.dtype for state, held in shards.saved.held.items() if state.kind == FROZEN}
    lost = {param: dtype for param, dtype in kept.items() if dtype in _ALL_FLOATS and ITEMSIZE[dtype] < ITEMSIZE[run]}
    yield from _by_dtype(shards.files.model[0], lost, f"the run trained in {run}")


def _model_dtype(shards: Shards) -> _Found:
    run = precision(shards.files.is_bf16, shards.saved.ds_config)
    kept = {state.param: held.dtype for state, held in shards.saved.held.items() if state.kind == FROZEN}
    other = {param: dtype for param, dtype in kept.items() if ITEMSIZE[dtype] == ITEMSIZE[run]}
    module = {param: held.dtype for param, held in shards.saved.module.items() if param not in kept}
    other |= {param: dtype for param, dtype in module.items() if ITEMSIZE[dtype] <= ITEMSIZE[run]}
    told = {param: dtype for param, dtype in other.items() if dtype in _ALL_FLOATS and dtype != run}
    yield from _by_dtype(shards.files.model[0], told, f"the run trained in {run}")


def _by_dtype(path: str, dtypes: Mapping[str, str], wanted: str) -> _Found:
    for dtype in dict.fromkeys(dtypes.values()):
        params = tuple(param for param, one in dtypes.items() if one == dtype)
        yield path, f"{some(params)} in the module is {dtype}, {wanted}", params


def _amsgrad(shards: Shards) -> _Found:
    if any(state.kind == _MAX_SQ for state in shards.saved.held):
        off = [number for number, group in enumerate(shards.saved.groups) if not group.hyper.get("amsgrad", True)]
        if off:
            yield shards.files.tag, f"there is {_MAX_SQ}, but param group {off[0]} has amsgrad off", ()


def _direction(shards: Shards) -> _Found:
    told = [bool(group.hyper.get("maximize")) for group in shards.saved.groups]
    if any(told) and not all(told):
        yield shards.files.tag, f"param group {told.index(True)} maximizes the loss, the others minimize it", ()


def _uphill(shards: Shards) -> _Found:
    if shards.saved.groups and all(group.hyper.get("maximize") for group in shards.saved.groups):
        yield shards.files.tag, "the optimizer maximizes the loss (maximize)", ()


def _decay(shards: Shards) -> _Found:
    shapes = [
        [shards.saved.params[name].shape for name in names] for names in (group.params for group in shards.saved.groups)
    ]
    if decays_vectors_alone([group.hyper for group in shards.saved.groups], shapes):
        what = "weight decay is on vectors alone, as if the hyperparameters of the param groups were swapped"
        yield shards.files.tag, what, ()


def _unlike_groups(shards: Shards) -> _Found:
    for key in ("betas", "eps", "amsgrad", "bias_correction"):
        values = [group.hyper.get(key) for group in shards.saved.groups]
        if any(value != values[0] for value in values):
            shown = ", ".join(dict.fromkeys(f"{value}" for value in values))
            yield shards.files.tag, f"the param groups differ in {key}: {shown}", ()


def _scaler_kind(shards: Shards) -> _Found:
    flag, is_dynamic = shards.saved.facts.get("dynamic_loss_scale"), "loss_scaler.cur_iter" in shards.saved.facts
    if flag is True and not is_dynamic:
        yield shards.files.optim[0], "the loss scaler is static, but dynamic_loss_scale is True", ()


def _scale_without_fp16(shards: Shards) -> _Found:
    scale = shards.saved.facts.get("loss_scaler.cur_scale")
    run = precision(shards.files.is_bf16, shards.saved.ds_config)
    if run != "F16" and isinstance(scale, (int, float)) and scale != 1:
        yield shards.files.optim[0], f"the loss scale is {scale:g} in a run in {run}, which has none", ()
    elif run != "F16" and "loss_scaler.cur_iter" in shards.saved.facts:
        yield shards.files.optim[0], f"the loss scaler is dynamic in a run in {run}, which needs none", ()


def _scaler_steps(shards: Shards) -> _Found:
    counted, steps = shards.saved.facts.get("loss_scaler.cur_iter"), shards.saved.counters.global_steps
    if type(counted) is int and counted != steps:
        yield shards.files.optim[0], f"the loss scaler has counted {counted} steps, the run {steps}", ()


def _clipping(shards: Shards) -> _Found:
    have, wanted = shards.saved.facts.get("clip_grad"), _setting(shards.saved.ds_config, "gradient_clipping")
    if isinstance(have, (int, float)) and isinstance(wanted, (int, float)) and have != wanted:
        yield shards.files.optim[0], f"clip_grad is {have:g}, the settings beside it say {wanted:g}", ()


_BY_CHECKPOINT = "silent: a resume goes by the checkpoint, and ignores the settings of the run"
CONTRADICTIONS = (
    Contradiction(
        "Adam's steps of flat ids that differ, in no composite",
        ERROR,
        Code.STEPS_DIFFER,
        "silent: the bias is corrected by the wrong step",
        _steps,
    ),
    Contradiction(
        "masters in another dtype than fp32",
        ERROR,
        Code.STATE_DTYPE,
        "silent: they are copied into fp32 as they are",
        _master_dtype,
    ),
    Contradiction(
        "moments, or the module of ZeRO-1/2, that are not floating-point numbers",
        ERROR,
        Code.STATE_DTYPE,
        "silent: they are cast as they are",
        _not_floats,
    ),
    Contradiction(
        "frozen params in fewer bits than the run has",
        ERROR,
        Code.STATE_DTYPE,
        "silent: they are cast as they are",
        _frozen_dtype,
    ),
    Contradiction(
        "frozen params in another format, or the module of ZeRO-1/2 in another dtype",
        WARNING,
        Code.STATE_DTYPE,
        "resumes: they are cast; what the other dtype can't hold is lost",
        _model_dtype,
    ),
    Contradiction(
        "max_exp_avg_sq with amsgrad off",
        ERROR,
        Code.FIELD_CONFLICT,
        "silent: the optimizer is no longer AMSGrad",
        _amsgrad,
    ),
    Contradiction(
        "maximize in some param groups only",
        ERROR,
        Code.FIELD_CONFLICT,
        "silent: these params move uphill",
        _direction,
    ),
    Contradiction(
        "maximize in all param groups",
        ERROR,
        Code.FIELD_CONFLICT,
        "silent: the loss goes up (neither the Trainer nor DeepSpeed has an option to maximize)",
        _uphill,
    ),
    Contradiction(
        "weight decay on norms and biases alone",
        ERROR,
        Code.FIELD_CONFLICT,
        "silent: a resume decays these instead of the matrices",
        _decay,
    ),
    Contradiction(
        "param groups with different betas, eps, amsgrad or bias_correction",
        WARNING,
        Code.FIELD_CONFLICT,
        "silent: each group trains with its own",
        _unlike_groups,
    ),
    Contradiction(
        "a static loss scaler in a run with a dynamic one",
        ERROR,
        Code.FIELD_CONFLICT,
        "silent: the scale no longer adapts",
        _scaler_kind,
    ),
    Contradiction(
        "a loss scale other than 1 without fp16",
        WARNING,
        Code.FIELD_CONFLICT,
        "resumes; gradients are scaled to no effect",
        _scale_without_fp16,
    ),
    Contradiction(
        "a loss scaler of another step",
        WARNING,
        Code.STEPS_DIFFER,
        "silent: the scale grows earlier or later",
        _scaler_steps,
    ),
    Contradiction(
        "clip_grad other than gradient_clipping of ds_config, ZeRO-1/2",
        WARNING,
        Code.FIELD_CONFLICT,
        f"{_BY_CHECKPOINT}; a run that was resumed with other settings leaves the same",
        _clipping,
    ),
)
