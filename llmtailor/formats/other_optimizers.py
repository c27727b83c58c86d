"""Optimizers other than Adam, recognized by what they keep: in files, or in a training before their first step. Pure.

The rule: a state that some params have and others lack is damage. A state that no param has means another optimizer.
Its checkpoint may be healthy, so it is refused once, by its likely name. Seen in torch 2.13, transformers 5.23,
bitsandbytes 0.50, torchao 0.18, schedulefree 1.4.1, grokadamw 0.1.2, galore_torch 1.0, apollo_torch 1.0.3, came_pytorch
0.1.3, adam-mini 1.1.1, torch-optimi 0.3.3, lomo-optim 0.1.

In a training, an optimizer that is not named here is judged by its states after the first step: `Training.has_state`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llmtailor.errors import AnotherOptimizer, ObjectKeys, Problem, UnsafePickle, some
from llmtailor.loaders.stock_fields import has_adams_options, keeps_as_adam

_RULE = (
    "its checkpoints can be neither judged nor composed; only optimizers like Adam can, with a step and one element of "
    "state per element of the params"
)
_FIX = "resume with the training itself; to compose checkpoints, train with AdamW"
_NOT_RESUMED = "no stock resume loads its states; to resume, and to compose checkpoints, train with AdamW"
BITSANDBYTES = "__bnb_optimizer_quant_state__"
"""bitsandbytes nests its tensors under this key of a param's state in files, not in memory."""

_LOW_BIT = "a low-bit optimizer of torchao"
_PROJECTING = {"galore_torch": "GaLore", "apollo_torch": "APOLLO"}
_BY_PACKAGE = {"torchao": _LOW_BIT, **_PROJECTING}
"""Package of a class that a pickle names -> optimizer"""
_BESIDE = {
    *(("torch.serialization", "_get_layout"), ("torch.storage", "UntypedStorage")),
    *(("torch._utils", "_rebuild_wrapper_subclass"), ("torch._utils", "_rebuild_tensor_v3")),
}
"""What torch names for tensors of such classes"""

_BY_STATE = {
    BITSANDBYTES: "an optimizer of bitsandbytes",
    "qmap1": "an 8-bit optimizer of bitsandbytes",
    "exp_avg_res_row": "CAME",
    "exp_avg_sq_row": "Adafactor",
    "row_var": "torch's Adafactor",
    "vmean": "Adam-mini",
    "mu_product": "NAdam",
    "ax": "ASGD",
    "kahan_comp": "an optimizer of optimi",
    "scaled_grad": "APOLLO",
    "projector": "GaLore",
}
"""States that only optimizers have whose states can't be composed -> optimizer"""
_BY_OPTION = {
    "grokking_signal_fns": "GrokAdamW",
    "weight_lr_power": "a schedule-free optimizer",
    "use_muon": "Muon with Adam for some params",
    "ns_steps": "Muon",
    "nesterov": "SGD",
    "t_beta3": "an optimizer of bitsandbytes",
}
"""Options of param groups -> optimizer. Some of them may also have states that can be composed."""


def refuse_others(
    states: Collection[Collection[str]], options: Collection[str], where: str, *, has_objects: bool = False
) -> None:
    """Raise AnotherOptimizer for an optimizer whose states can't be composed, and not for a damaged Adam.

    ``states`` are the kinds of state of each param, ``step`` among them, ``options`` those of all param groups,
    ``has_objects`` whether some state is neither a tensor nor a number.
    """
    unlike = {frozenset(one) for one in states if one}
    every: frozenset[str] = frozenset().union(*unlike)
    if not every:
        is_known = has_adams_options(options)
    elif keeps_as_adam(every, options):
        is_known = True
    else:
        is_nested = all(one <= other or other <= one for one in unlike for other in unlike)
        is_known = is_nested and {"step"} < every and not (has_objects or every & _BY_STATE.keys())
    if not is_known:
        raise another(every, options, where)


def another(kinds: Collection[str], options: Collection[str], where: str, why: str = "") -> AnotherOptimizer:
    """Return the error for another optimizer than Adam, with its likely name, and ``why`` it is one."""
    named = [name for key, name in _BY_STATE.items() if key in kinds]
    named += [name for key, name in _BY_OPTION.items() if key in options]
    shown = [*kinds] or {*options} - {"params", "lr", "initial_lr", "weight_decay"}
    keeps = f"it keeps {some(sorted(shown))}" if kinds else f"it keeps no states, and has {some(sorted(shown))}"
    what = f"its optimizer is {[*named, 'unlike Adam'][0]} ({why or keeps}): {_RULE}"
    return AnotherOptimizer.at(where, what, _FIX)


@contextmanager
def naming_others(where: str) -> Iterator[None]:
    """Raise AnotherOptimizer, with its name, for a file that can't be decoded because of its classes."""
    try:
        yield
    except ObjectKeys as error:
        what = f"its optimizer is GrokAdamW (the keys of its states are the params themselves): {_RULE}"
        raise AnotherOptimizer.at(where, what, _NOT_RESUMED) from error
    except UnsafePickle as error:
        classes = {*error.names} - _BESIDE
        found = {_BY_PACKAGE.get(module.partition(".")[0]) for module, _ in classes}
        if None in found or len(found) != 1:
            raise
        [optimizer] = found
        fix = _FIX if optimizer == _LOW_BIT else _NOT_RESUMED  # weights_only=True refuses the others' classes
        what = f"its optimizer is {optimizer} (it keeps {some(sorted(map('.'.join, classes)))}): {_RULE}"
        raise AnotherOptimizer.at(where, what, fix) from error


def flattened(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the states of a param as bitsandbytes has them in memory; it loads them in either form."""
    inner = state.get(BITSANDBYTES)
    outer = {kind: value for kind, value in state.items() if kind != BITSANDBYTES}
    return {**outer, **inner} if isinstance(inner, dict) else dict(state)


UNSAVED_FIX = "use AdamW, for example optim=adamw_torch, or another optimizer with elementwise state"


@dataclass(frozen=True, slots=True)
class _Kind:
    what: str
    """What it is, and why"""
    classes: tuple[str, ...] = ()
    """Names of its classes, in lower case"""
    packages: tuple[str, ...] = ()
    """Packages whose optimizers are all of this kind"""
    group_key: str = ""
    """A key that only its param groups have"""
    optim: tuple[str, ...] = ()
    """How its names in the Trainer's ``optim`` begin"""


_PROJECTED = "GaLore and APOLLO can't be saved in parts: their states are projections, with objects that make them"
_KINDS = (
    _Kind(
        "it is a placeholder: per-layer optimizers update params during the backward pass",
        ("layerwisedummyoptimizer",),
    ),
    _Kind(
        "LOMO updates params during the backward pass", ("lomo", "adalomo"), ("lomo_optim",), "", ("lomo", "adalomo")
    ),
    _Kind("GrokAdamW keeps its states in its param groups", ("grokadamw",), ("grokadamw",), "", ("grokadamw",)),
    _Kind(_PROJECTED, (), tuple(_PROJECTING), "update_proj_gap", ("galore_", "apollo_")),
)


def unsupported(kind: type, groups: Collection[Mapping[str, Any]] = ()) -> Problem | None:
    """Return why an optimizer of a class can't be saved in parts; None if that is not known before its first step.

    ``groups`` are its param groups, if it has been made.
    """
    package, name = kind.__module__.partition(".")[0], kind.__name__
    for one in _KINDS:
        has_key = one.group_key and any(one.group_key in group for group in groups)
        if package in one.packages or name.lower() in one.classes or has_key:
            return Problem(f"the optimizer {name}", one.what, UNSAVED_FIX)
    return None


def unsupported_name(optim: str) -> Problem | None:
    """Return the same for ``optim`` of the Trainer's arguments, before the optimizer exists."""
    found = next((one.what for one in _KINDS if one.optim and optim.startswith(one.optim)), None)
    return Problem(f"the optimizer {optim}", found, UNSAVED_FIX) if found is not None else None
