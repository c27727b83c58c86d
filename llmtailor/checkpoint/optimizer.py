"""The optimizer's layout: its param groups, and the flat tensors that DeepSpeed keeps their states in. Pure.

A composite with the stage, world size and groups of its base has the base's own layout. Any other layout is what stock
DeepSpeed would create on that number of ranks from the settings of the base's run.

ZeRO-1/2, checked against DeepSpeed 0.19.8: a group's params are flattened and concatenated, with an optional gap after
each but the last (``parameter_alignment``). The vector is padded at its end to a multiple of twice the world size and
cut into equal partitions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from llmtailor.checkpoint.placement import Contiguous, Extent, Placement, Sliced
from llmtailor.errors import counted
from llmtailor.model.dtypes import ITEMSIZE

NAMES_KEY = "lt_params"
"""The names of its params, in a param group that `llmtailor.param_groups` or a writer made: torch itself saves none"""
NAME_KEYS = (NAMES_KEY, "param_names")
"""Keys that list these names and survive a resume; the second is torch's own, for optimizers made of named params"""
SAVED_NAMES = "llmtailor_names"
"""The same in a partial checkpoint, which always has them"""

COUNTERS = ("step", "k", "weight_sum", "lr_max", "d", "d_max")
"""What optimi, schedule-free and Prodigy count per param group"""


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """A param group of the optimizer: its params in the optimizer's order, and its hyperparameters."""

    params: tuple[str, ...]
    hyper: Mapping[str, Any]
    """Everything else in the group, lists of names included"""


def without_names(hyper: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's hyperparameters without the names of its params."""
    return {key: value for key, value in hyper.items() if key not in NAME_KEYS}


def differing(hypers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the hyperparameters in which groups differ, also those that some lack."""
    keys = dict.fromkeys(key for hyper in hypers for key in hyper)
    return [key for key in keys if any(key not in hyper or hyper[key] != hypers[0].get(key) for hyper in hypers)]


def as_option(value: Any) -> Any:
    """Return an option of a param group in one form: JSON makes lists of tuples."""
    return tuple(value) if isinstance(value, list) else value


def with_names(group: Mapping[str, Any], params: Sequence[str]) -> dict[str, Any]:
    """Return a param group that lists the names of its params: as it does, or else under `NAMES_KEY`."""
    lists = [group.get(key) for key in NAME_KEYS]
    is_there = any(isinstance(names, (list, tuple)) and [*names] == [*params] for names in lists)
    return dict(group) if is_there else {**group, NAMES_KEY: list(params)}


@dataclass(frozen=True, slots=True)
class SubGroup:
    """Params whose states are stored together, in storage order, and the optimizer's ``step`` for all of them.

    ZeRO-3: a sub-group, one flat tensor per rank. ZeRO-1/2: a whole param group, one vector. No ZeRO: one param.
    """

    group: int
    params: tuple[str, ...]
    step: float | None = 0.0
    """None for an optimizer that counts no steps of them, such as SGD or Muon"""
    gaps: tuple[int, ...] = ()
    """ZeRO-1/2 with ``parameter_alignment``: elements of the gap after each param; empty for none."""
    scalars: Mapping[str, Any] = field(default_factory=dict)
    """States that are no tensors with dimensions, but for ``step``: name -> a number, None, or a tensor's node
    with its bytes"""


@dataclass(frozen=True, slots=True)
class OptimizerLayout:
    """How the optimizer states of a checkpoint, existing or planned, are grouped and cut."""

    stage: int
    """ZeRO stage: 1, 2 or 3; 0 for a checkpoint of the plain Trainer, without DeepSpeed"""
    world_size: int
    groups: tuple[ParamGroup, ...]
    sub_groups: tuple[SubGroup, ...]
    tp: int = 1
    """How many of the ranks share a model by tensor parallelism; the states are cut over ``world_size / tp`` ranks"""

    @property
    def has_masters(self) -> bool:
        """Whether the weights are rounded copies of masters. Without DeepSpeed, the optimizer updates the weights."""
        return self.stage > 0

    @property
    def mesh(self) -> dict[str, int]:
        """The ranks by kind of parallelism, ``tp`` only under AutoTP"""
        return {**({"tp": self.tp} if self.tp > 1 else {}), "dp": self.world_size // self.tp}

    def of_group(self, group: int) -> list[int]:
        """Return the numbers of the sub-groups that a param group consists of."""
        return [number for number, one in enumerate(self.sub_groups) if one.group == group]


class Mesh(NamedTuple):
    """A wanted number of ranks, by kind of parallelism; None keeps the base's."""

    tp: int | None = None
    """Tensor-parallel ranks, which share a model"""
    dp: int | None = None
    """Data-parallel ranks, over which the states of each tensor-parallel rank are cut"""
    dp_replicate: int | None = None
    """Replicas of all these ranks, as under HSDP; of a training, not of an output"""


def count_ranks(mesh: Mapping[str, int]) -> str:
    """Return the number of ranks of a mesh as text: ``8 ranks (tp 2 x dp 4)``."""
    ranks = counted(math.prod(mesh.values()), "rank")
    return ranks if len(mesh) == 1 else f"{ranks} ({' x '.join(f'{axis} {size}' for axis, size in mesh.items())})"


@dataclass(frozen=True, slots=True)
class ZeroSettings:
    """Settings of the run that decide how ZeRO lays out the optimizer's states."""

    sub_group_size: int = 1_000_000_000
    """ZeRO-3: elements per rank beyond which a param group is cut into several sub-groups."""
    round_robin: bool = False
    """ZeRO-1/2: ``round_robin_gradients`` distributes a group's params over the ranks."""
    parameter_alignment: bool = False
    """ZeRO-1/2: params begin at multiples of 16 bytes in the model's dtype."""
    fp32_gradients: bool = False
    """bf16 with gradients accumulated in fp32: ZeRO-1 is then BF16_Optimizer, which supports neither setting above."""


def lay_out_optimizer(
    base: OptimizerLayout,
    numels: Mapping[str, int],
    settings: ZeroSettings,
    precision: str,
    *,
    world_size: int,
    stage: int,
    groups: Sequence[ParamGroup] | None,
) -> OptimizerLayout:
    """Return the optimizer layout of a composite; None keeps the base's param groups.

    ``numels`` are the params' elements, ``settings`` and ``precision`` (a safetensors dtype) those of the base's run.
    """
    wanted = base.groups if groups is None else tuple(groups)
    if stage == 0:  # torch's optimizer stores each param separately
        cut = [SubGroup(number, (param,)) for number, group in enumerate(wanted) for param in group.params]
    elif groups is None and (stage, world_size) == (base.stage, base.world_size):
        cut = list(base.sub_groups)
    elif stage == 3:
        cut = _cut_sub_groups(wanted, numels, world_size, settings.sub_group_size)
    else:
        if stage == 1 and settings.fp32_gradients:  # BF16_Optimizer supports neither of these settings
            settings = ZeroSettings()
        cut = []
        for number, group in enumerate(wanted):
            params, gaps = group.params, tuple[int, ...]()
            if settings.round_robin:
                params = tuple(params[at] for at in round_robin(len(params), world_size))
            if settings.parameter_alignment:
                gaps = alignment_gaps([numels[param] for param in params], ITEMSIZE[precision])
            cut.append(SubGroup(number, params, gaps=gaps))
    return OptimizerLayout(stage, world_size, wanted, tuple(cut))


def _cut_sub_groups(
    groups: Sequence[ParamGroup], numels: Mapping[str, int], world_size: int, sub_group_size: int
) -> list[SubGroup]:
    """Return the ZeRO-3 sub-groups: one per group, unless its slices exceed ``sub_group_size`` elements per rank; then
    params are collected until they reach it. A param is never split."""
    cut: list[SubGroup] = []
    for number, group in enumerate(groups):
        parts = {param: part_size(numels[param], world_size) for param in group.params}
        is_whole = sum(parts.values()) <= sub_group_size
        collected: list[str] = []
        size = 0
        for param in group.params:
            collected.append(param)
            size += parts[param]
            if size >= sub_group_size and not is_whole:
                cut.append(SubGroup(number, tuple(collected)))
                collected, size = [], 0
        if collected:
            cut.append(SubGroup(number, tuple(collected)))
    return cut


@dataclass(frozen=True, slots=True)
class Slices:
    """ZeRO-3: each param is cut on its own."""

    numels: Mapping[str, int]
    world_size: int

    @property
    def offsets(self) -> list[int]:
        """Where each slice begins in a rank's tensor, and where the last one ends"""
        return [*accumulate((part_size(numel, self.world_size) for numel in self.numels.values()), initial=0)]

    def on_rank(self, rank: int) -> Iterator[tuple[str, int, int, int]]:
        for (param, numel), offset in zip(self.numels.items(), self.offsets, strict=False):
            begin, end = slice_on(rank, numel, self.world_size)
            if begin < end:
                yield param, begin, end, offset

    def length(self, rank: int, is_stripped: bool = False) -> int:
        return self.offsets[-1]

    def places(self, extents: tuple[Extent, ...], itemsize: int) -> Iterator[Placement]:
        for offset, after in pairwise(self.offsets):
            yield Sliced(extents, offset, after - offset, itemsize)


@dataclass(frozen=True, slots=True)
class Vector:
    """ZeRO-1/2: one vector per group is cut into equal partitions."""

    numels: Mapping[str, int]
    offsets: tuple[int, ...]
    """Where each param begins."""
    total: int
    """Elements of params and gaps, without the padding at the end."""
    partition: int
    """Elements per rank, the same on all; the last ranks may hold padding."""

    @classmethod
    def of(cls, numels: Mapping[str, int], gaps: Sequence[int], world_size: int) -> Vector:
        """Return the vector of a group's params; empty ``gaps`` means none."""
        steps = map(sum, zip(numels.values(), gaps or [0] * len(numels), strict=True))
        *offsets, total = accumulate(steps, initial=0)
        return cls(numels, tuple(offsets), total, -(-total // (2 * world_size)) * 2)

    def padding(self, rank: int) -> int:
        """Return the number of padding elements at the end of a rank's partition."""
        return min(self.partition, max(0, (rank + 1) * self.partition - self.total))

    def on_rank(self, rank: int) -> Iterator[tuple[str, int, int, int]]:
        low, high = rank * self.partition, (rank + 1) * self.partition
        for (param, numel), offset in zip(self.numels.items(), self.offsets, strict=True):
            begin, end = max(low, offset), min(high, offset + numel)
            if begin < end:
                yield param, begin - offset, end - offset, begin - low

    def length(self, rank: int, is_stripped: bool = False) -> int:
        return self.partition - (self.padding(rank) if is_stripped else 0)

    def places(self, extents: tuple[Extent, ...], itemsize: int) -> Iterator[Placement]:
        return (Sliced(extents, 0, self.partition, itemsize, before=offset) for offset in self.offsets)


@dataclass(frozen=True, slots=True)
class OverlappingParams:
    """ZeRO-1/2: a rank has the params that overlap its partition whole, as DeepSpeed's Muon keeps its momentum."""

    vector: Vector

    @property
    def numels(self) -> Mapping[str, int]:
        return self.vector.numels

    def on_rank(self, rank: int) -> Iterator[tuple[str, int, int, int]]:
        offset = 0
        for param, *_ in self.vector.on_rank(rank):
            yield param, 0, self.numels[param], offset
            offset += self.numels[param]

    def length(self, rank: int, is_stripped: bool = False) -> int:
        return sum(end for _, _, end, _ in self.on_rank(rank))

    def places(self, extents: tuple[Extent, ...], itemsize: int) -> Iterable[Placement]:
        """Return the places; of a param on several ranks that in the first file that can be read."""
        places = dict.fromkeys(self.numels, Contiguous(extents[0], itemsize))
        for rank in sorted(range(len(extents)), key=lambda rank: (not extents[rank].num_bytes, rank), reverse=True):
            path, first, _ = extents[rank]
            for param, _, numel, offset in self.on_rank(rank):
                start = first + offset * itemsize
                places[param] = Contiguous(Extent(path, start, start + numel * itemsize), itemsize)
        return places.values()


FlatLayout = Slices | Vector | OverlappingParams
"""How the params of a sub-group lie in the flat tensors of the ranks. ``on_rank`` yields (param, begin, end, offset in
the flat tensor) of what a rank has, ``length`` is that of its tensor, without padding at the vector's end if that is
stripped, and ``places`` are those of the params, given those of the ranks' tensors; an unreadable one is empty."""


def alignment_gaps(numels: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the gaps of ``parameter_alignment``: each param but the last is followed by the number of elements that
    aligns the next one to 16 bytes in the model's dtype."""
    unit, at, gaps = 16 // itemsize, 0, []
    for number, numel in enumerate(numels):
        gap = -(at + numel) % unit if number < len(numels) - 1 else 0
        gaps.append(gap)
        at += numel + gap
    return tuple(gaps)


def round_robin(count: int, world_size: int) -> list[int]:
    """Return the order of a group's params under ``round_robin_gradients``: 0, W, 2W, .. then 1, W+1, .."""
    return [number for start in range(world_size) for number in range(start, count, world_size)]


def part_size(numel: int, world_size: int) -> int:
    """Return the size of each rank's slice of a ZeRO-3 param, in elements, padding included."""
    return -(-numel // world_size)


def slice_on(rank: int, numel: int, world_size: int) -> tuple[int, int]:
    """Return the elements of a rank's slice, without padding."""
    part = part_size(numel, world_size)
    return min(rank * part, numel), min((rank + 1) * part, numel)
