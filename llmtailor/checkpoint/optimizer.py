"""What a composite shall be: ZeRO stage, world size, param groups, and how those lie in flat tensors.

Decides the optimizer's layout in a composite. Pure.

With the base's stage, world size and groups, that is the base's own layout. Otherwise it is what stock DeepSpeed
would have made on so many ranks, from the settings that the base was trained with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.sharding import alignment_gaps, round_robin
from llmtailor.model.states import ITEMSIZE


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


def make_target(
    base: CheckpointIndex,
    *,
    world_size: int | None = None,
    stage: int | None = None,
    groups: Sequence[TargetGroup] | None = None,
) -> Target:
    """Lay out the optimizer for a composite; None keeps what the base has."""
    world_size = world_size or base.world_size
    stage = base.stage if stage is None else stage
    kept = groups is None
    groups = (
        tuple(TargetGroup(params, group.hyper) for params, group in zip(base.group_params, base.groups, strict=True))
        if groups is None
        else tuple(groups)
    )
    numels = {name: param.numel for name, param in base.params.items()}
    if stage == 0:  # torch's optimizer keeps each param by itself
        flats = [TargetFlat(number, (param,)) for number, group in enumerate(groups) for param in group.params]
    elif kept and stage == base.stage and world_size == base.world_size:
        owner = {flat_id: number for number, group in enumerate(base.groups) for flat_id in group.flat_ids}
        flats = [TargetFlat(owner[flat_id], flat.params, flat.gaps) for flat_id, flat in enumerate(base.flat_ids)]
    elif stage == 3:
        flats = _cut_sub_groups(groups, numels, world_size, base.settings.sub_group_size)
    else:
        flats = [_vector(number, group, numels, stage, world_size, base) for number, group in enumerate(groups)]
    return Target(stage, world_size, groups, tuple(flats))


def _cut_sub_groups(
    groups: Sequence[TargetGroup], numels: Mapping[str, int], world_size: int, sub_group_size: int
) -> list[TargetFlat]:
    """ZeRO-3: a group is one flat id unless its slices exceed ``sub_group_size`` elements per rank; then params are
    collected until they reach it. A param is never split."""
    flats: list[TargetFlat] = []
    for number, group in enumerate(groups):
        parts = {param: -(-numels[param] // world_size) for param in group.params}
        if sum(parts.values()) <= sub_group_size:
            if group.params:
                flats.append(TargetFlat(number, group.params))
            continue
        collected: list[str] = []
        size = 0
        for param in group.params:
            collected.append(param)
            size += parts[param]
            if size >= sub_group_size:
                flats.append(TargetFlat(number, tuple(collected)))
                collected, size = [], 0
        if collected:
            flats.append(TargetFlat(number, tuple(collected)))
    return flats


def _vector(
    number: int, group: TargetGroup, numels: Mapping[str, int], stage: int, world_size: int, base: CheckpointIndex
) -> TargetFlat:
    """ZeRO-1/2: a group is one vector, in the optimizer's order or dealt out in turn over the ranks."""
    params = group.params
    if stage == 1 and base.settings.fp32_gradients:  # BF16_Optimizer
        return TargetFlat(number, params)
    if base.settings.round_robin:
        params = tuple(params[at] for at in round_robin(len(params), world_size))
    gaps: tuple[int, ...] = ()
    if base.settings.parameter_alignment:
        gaps = alignment_gaps([numels[param] for param in params], ITEMSIZE[base.precision])
    return TargetFlat(number, params, gaps)
