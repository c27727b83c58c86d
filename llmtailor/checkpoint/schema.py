"""What an optimizer keeps of each param: the kinds of its states, and what can be done with each. Pure.

The kinds are read from what is there, in files and in trainings; no list of optimizers decides. Of a param with the
shape ``[m, n]``, optimizers keep (torch 2.13, transformers 5.23, bitsandbytes 0.50, torchao 0.18, CAME 0.1.3)::

    elementwise   [m, n], floating-point       Adam's exp_avg, Muon's momentum_buffer; can be cut like the param
    blockwise     [m, n] integers, with scales of blocks and tables of codes: bitsandbytes' state1, absmax1 and qmap1
    factored      [m], [n], [m, 1] or [1, n]   Adafactor's exp_avg_sq_row and exp_avg_sq_col
    scalar        a number, None, or a tensor without dimensions: step, CAME's RMS, NAdam's mu_product
    opaque        any other tensor             AdEMAMix's state1 [2, m, n], Shampoo's preconditioners

States that are not elementwise stay with their param: they are copied whole, and only a layout that keeps params whole
can hold them. Scalars are the same on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING

from llmtailor.errors import Problem, some
from llmtailor.model.dtypes import FLOATING
from llmtailor.model.roles import is_optimizer_state

if TYPE_CHECKING:
    from llmtailor.checkpoint.index import CheckpointIndex, TensorEntry


class StateKind(Enum):
    """What the elements of a state are of."""

    ELEMENTWISE = "elementwise"
    BLOCKWISE = "blockwise"
    FACTORED = "factored"
    SCALAR = "scalar"
    OPAQUE = "opaque"


def kinds_by_param(index: CheckpointIndex) -> dict[str, dict[str, TensorEntry]]:
    """Return the optimizer's states, besides masters and scalars, by param and kind."""
    kinds: dict[str, dict[str, TensorEntry]] = {}
    for state, held in index.held.items():
        if is_optimizer_state(state.kind):
            kinds.setdefault(state.param, {})[state.kind] = held
    return kinds


def _kinds_of(shape: tuple[int, ...], states: Mapping[str, TensorEntry]) -> dict[str, StateKind]:
    """Return what each state of a param is."""
    dtypes = {name: (held.live_dtype, held.shape) for name, held in states.items()}
    has_codes = any(dtype not in FLOATING and math.prod(held) >= math.prod(shape) for dtype, held in dtypes.values())
    return {name: _kind_of(shape, dtype, held, has_codes) for name, (dtype, held) in dtypes.items()}


def _kind_of(shape: tuple[int, ...], dtype: str, held: tuple[int, ...], has_codes: bool) -> StateKind:
    if held == shape and dtype in FLOATING:
        return StateKind.ELEMENTWISE
    if has_codes:
        return StateKind.BLOCKWISE
    if not held:
        return StateKind.SCALAR
    lines = {(*shape[:-1],), (*shape[:-2], *shape[-1:]), (*shape[:-1], 1), (*shape[:-2], 1, *shape[-1:])}
    return StateKind.FACTORED if len(shape) > 1 and held in lines else StateKind.OPAQUE


def schema_of(index: CheckpointIndex) -> dict[str, StateKind]:
    """Return the optimizer's states by name; of one that params have in several kinds, such as bitsandbytes' state1,
    the first that is not elementwise."""
    found: dict[str, StateKind] = {}
    for param, states in kinds_by_param(index).items():
        for name, kind in _kinds_of(index.params[param].shape, states).items():
            if found.get(name, StateKind.ELEMENTWISE) is StateKind.ELEMENTWISE:
                found[name] = kind
    scalars = (name for one in index.sub_groups for name in one.scalars)
    return dict.fromkeys(scalars, StateKind.SCALAR) | found


def units(index: CheckpointIndex) -> dict[str, dict[str, StateKind]]:
    """Return the params with states that are not elementwise, and what these are."""
    found: dict[str, dict[str, StateKind]] = {}
    for param, states in kinds_by_param(index).items():
        others = _kinds_of(index.params[param].shape, states)
        others = {name: kind for name, kind in others.items() if kind is not StateKind.ELEMENTWISE}
        if others:
            found[param] = others
    return found


def refuse_cuts(index: CheckpointIndex, where: str) -> list[Problem]:
    """Return why a layout that cuts params can't hold the states of a checkpoint: one problem for each kind of state.

    ``where`` is the option that asks for such a layout.
    """
    by_kind: dict[tuple[StateKind, str], list[str]] = {}
    for param, others in units(index).items():
        for name, kind in others.items():
            by_kind.setdefault((kind, name), []).append(param)
    problems = []
    for kind in dict.fromkeys(kind for kind, _ in by_kind):
        names = [name for one, name in by_kind if one is kind]
        some_params = next(params for (one, _), params in by_kind.items() if one is kind)
        what = (
            f"the optimizer of {index.name} keeps {some(sorted(names))} of {some(some_params)}, {_IN_WORDS[kind]}: "
            f"they can't be cut with the params"
        )
        problems.append(Problem(where, what, "keep the format of the base, which holds params whole"))
    return problems


_BY_OPTION = {
    "use_muon": "Muon with Adam",
    "ns_steps": "Muon",
    "weight_lr_power": "schedule-free",
    "d_coef": "Prodigy",
    "dampening": "SGD",
    "lambd": "ASGD",
    "etas": "Rprop",
    "lr_decay": "Adagrad",
    "rho": "Adadelta",
    "centered": "RMSprop",
    "momentum_decay": "NAdam",
    "scale_parameter": "Adafactor (transformers)",
    "d": "Adafactor (torch)",
    "triton": "optimi",
}
_BY_STATE = {
    "exp_avg_res_row": "CAME",
    "vmean": "Adam-mini",
    "exp_inf": "Adamax",
    "exp_avg.codes": "AdamW with low-bit states (torchao)",
    "absmax1": "8-bit optimizer (bitsandbytes)",
    "state1": "optimizer of bitsandbytes",
}


def name_of(index: CheckpointIndex) -> str:
    """Return the likely name of the optimizer, by its states and options, e.g. ``torch AdamW``."""
    options = {option for group in index.groups for option in group.hyper}
    kinds = {state.kind for state in index.held if is_optimizer_state(state.kind)}
    named = [name for kind, name in _BY_STATE.items() if kind in kinds]
    if named := named or [name for option, name in _BY_OPTION.items() if option in options]:
        return named[0]
    if not ({"exp_avg", "exp_avg_sq"} <= kinds or (not kinds and "betas" in options)):
        return "unknown"
    if index.form.has_masters and ("bias_correction" in options or not index.train.step_is_tensor):
        return "DeepSpeed Adam"
    return "torch AdamW" if "betas" in options else "unknown"


_IN_WORDS = {
    StateKind.BLOCKWISE: "in blocks of elements with a scale each",
    StateKind.FACTORED: "one value for each row or column",
    StateKind.SCALAR: "one value for the param",
    StateKind.OPAQUE: "in a shape of its own",
}
