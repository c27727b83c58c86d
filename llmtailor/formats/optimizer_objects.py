"""Optimizers whose states can't be composed: recognized in files, and in a training before their first step. Pure.

Any optimizer is read whose state dict holds tensors and numbers for each param, see `checkpoint.schema`. What remains
holds objects, or has its states elsewhere. Seen in torch 2.13, transformers 5.23, bitsandbytes 0.50, torchao 0.18,
grokadamw 0.1.2, galore_torch 1.0, apollo_torch 1.0.3, lomo-optim 0.1.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llmtailor.containers.unpickle import Quantized, as_tensor
from llmtailor.errors import AnotherOptimizer, ObjectKeys, Problem, UnsafePickle, UnsupportedCheckpoint, some

_RULE = "its checkpoints can be neither judged nor composed; the states of each param must be tensors and numbers"
_FIX = "resume with the training itself; to compose checkpoints, train with another optimizer"
_NOT_RESUMED = "no stock resume loads its states; to resume, and to compose checkpoints, train with AdamW"
BITSANDBYTES = "__bnb_optimizer_quant_state__"
"""bitsandbytes nests its tensors under this key of a param's state in files, not in memory."""

_PROJECTING = {"galore_torch": "GaLore", "apollo_torch": "APOLLO"}
_BY_PACKAGE = {"torchao": "of another version of torchao", **_PROJECTING}
"""Package of a class that a pickle names -> optimizer"""

_BY_STATE = {"scaled_grad": "APOLLO", "projector": "GaLore", "GG": "SOAP"}
"""State that only one optimizer keeps -> optimizer"""


def refuse_objects(state: Mapping[Any, Any], where: str) -> None:
    """Raise AnotherOptimizer for states that are neither tensors nor numbers. ``state`` has those of each param."""
    states = [one for one in state.values() if isinstance(one, dict)]
    objects = {f"{kind}" for one in states for kind, value in one.items() if not (kind == "step" or is_storable(value))}
    if objects:
        named = [name for key, name in _BY_STATE.items() if any(key in one for one in states)]
        keeps = f"it keeps objects or lists of tensors in {some(sorted(objects))}"
        what = f"its optimizer is {[*named, 'of an unknown kind'][0]} ({keeps}): {_RULE}"
        raise AnotherOptimizer.at(where, what, _FIX)


def is_storable(value: Any) -> bool:
    """Return whether a state is a tensor, perhaps quantized, a number, None, or a few numbers."""
    if isinstance(value, (list, tuple)):
        return all(isinstance(one, (int, float)) for one in value)
    is_tensor = as_tensor(value) is not None or Quantized.of(value) is not None
    return is_tensor or isinstance(value, (int, float, type(None)))


@contextmanager
def naming_others(where: str) -> Iterator[None]:
    """Raise AnotherOptimizer, with its name, for a file that can't be decoded because of its classes."""
    try:
        yield
    except ObjectKeys as error:
        what = f"its optimizer is GrokAdamW (the keys of its states are the params themselves): {_RULE}"
        raise AnotherOptimizer.at(where, what, _NOT_RESUMED) from error
    except UnsafePickle as error:
        classes = {*error.names}
        if ("torch.distributed.tensor", "DTensor") in classes:
            what = "it holds DTensors: one rank's pieces of the optimizer's states, as if they were whole"
            fix = "leave it out: no file has the pieces of the other ranks; save sharded, with FSDP2 through accelerate"
            raise UnsupportedCheckpoint.at(where, what, fix) from error
        found = {_BY_PACKAGE.get(module.partition(".")[0]) for module, _ in classes}
        if None in found or len(found) != 1:
            raise
        [optimizer] = found
        fix = _NOT_RESUMED if optimizer in _PROJECTING.values() else _FIX  # whose classes weights_only=True refuses
        what = f"its optimizer is {optimizer} (it keeps {some(sorted(map('.'.join, classes)))}): {_RULE}"
        raise AnotherOptimizer.at(where, what, fix) from error


def flattened(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the states of a param as bitsandbytes has them in memory; it loads them in either form."""
    inner = state.get(BITSANDBYTES)
    outer = {kind: value for kind, value in state.items() if kind != BITSANDBYTES}
    return {**outer, **inner} if isinstance(inner, dict) else dict(state)


UNSAVED_FIX = "use AdamW, for example optim=adamw_torch, or another optimizer that docs/optimizers.md lists"


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
    _Kind("LBFGS keeps lists of tensors that are of all params together", ("lbfgs",)),
    _Kind("GrokAdamW keeps its states in its param groups", ("grokadamw",), ("grokadamw",), "", ("grokadamw",)),
    _Kind(
        "tensors on XLA devices can't be copied while training continues", (), ("torch_xla",), "", ("adamw_torch_xla",)
    ),
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
