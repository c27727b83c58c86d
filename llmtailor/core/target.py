"""What a composite shall be: ZeRO stage, world size, param groups, and how those lie in flat tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TargetGroup:
    """A param group of the optimizer: its params in the optimizer's order, and its hyperparameters."""

    params: tuple[str, ...]
    hyper: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TargetFlat:
    """A flat tensor (ZeRO-3: a sub-group) or a vector (ZeRO-1/2: a whole group), with its params in order."""

    group: int
    params: tuple[str, ...]
    gaps: tuple[int, ...] = ()
    """ZeRO-1/2: elements of alignment behind each param; empty for none."""


@dataclass(frozen=True, slots=True)
class Target:
    """The optimizer's layout in a composite."""

    stage: int
    """1, 2 or 3; 0 for a checkpoint of the plain Trainer, without DeepSpeed"""
    world_size: int
    groups: tuple[TargetGroup, ...]
    flats: tuple[TargetFlat, ...]
    """By flat id (ZeRO-3), by group (ZeRO-1/2) or by param (no ZeRO)."""
