"""Optimizers that can't be saved in parts, recognised before their first step, without importing their packages.

All others are judged by the states that they have after it: `Training.has_state`. Verified with the versions in
transformers 5.23, lomo-optim 0.1, galore-torch 1.0, apollo-torch 1.0 and grokadamw 0.1.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from llmtailor.errors import Problem

FIX = "use AdamW, for example optim=adamw_torch, or another optimizer with elementwise state"


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of optimizer that can't be saved in parts."""

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
        "it is a placeholder: the optimizers of the layers make their steps during the backward pass",
        ("layerwisedummyoptimizer",),
    ),
    _Kind(
        "LOMO makes its steps during the backward pass", ("lomo", "adalomo"), ("lomo_optim",), "", ("lomo", "adalomo")
    ),
    _Kind("GrokAdamW keeps its states in its param groups", ("grokadamw",), ("grokadamw",), "", ("grokadamw",)),
    _Kind(_PROJECTED, (), ("galore_torch", "apollo_torch"), "update_proj_gap", ("galore_", "apollo_")),
)


def unsupported(kind: type, groups: Collection[Mapping[str, Any]] = ()) -> Problem | None:
    """Return why an optimizer of a class can't be saved in parts; None if that is not known before its first step.

    ``groups`` are its param groups, if it has been made.
    """
    package, name = kind.__module__.partition(".")[0], kind.__name__
    for one in _KINDS:
        has_key = one.group_key and any(one.group_key in group for group in groups)
        if package in one.packages or name.lower() in one.classes or has_key:
            return Problem(f"the optimizer {name}", one.what, FIX)
    return None


def unsupported_name(optim: str) -> Problem | None:
    """Return the same for ``optim`` of the Trainer's arguments, before the optimizer exists."""
    found = next((one.what for one in _KINDS if one.optim and optim.startswith(one.optim)), None)
    return Problem(f"the optimizer {optim}", found, FIX) if found is not None else None


def is_elementwise(value: Any) -> bool:
    """Return whether a state is a tensor whose elements are what it stores.

    A quantized state, such as torchao's, is a tensor subclass with codes and scales inside, which claims the param's
    shape and dtype.
    """
    local = value.to_local() if hasattr(value, "to_local") else value
    return type(local) in (torch.Tensor, torch.nn.Parameter)
