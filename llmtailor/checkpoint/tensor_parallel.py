"""How tensor parallelism has cut the params of a checkpoint: each rank of it has a smaller model. Pure.

A *shard* is what one tensor-parallel rank holds of a param: boxes of the full tensor, one for most params, several for
fused weights. Several ranks may hold the same box; a param that is not cut is one box, whole on each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from llmtailor.checkpoint.placement import (
    Box,
    Boxes,
    Contiguous,
    Extent,
    Inside,
    Placement,
    corners,
    find_grid,
    in_boxes,
)
from llmtailor.model.roles import State

_NOWHERE = Contiguous(Extent("", 0, 0), 1)
"""Where element N is at byte N"""


@dataclass(frozen=True, slots=True)
class TpShard:
    """What one tensor-parallel rank holds of a param."""

    shape: tuple[int, ...]
    pieces: tuple[tuple[Box, Box], ...]
    """Boxes of the full tensor, and where each is in the shard; none of them is empty."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class TpSplit:
    """How a param is spread over the tensor-parallel ranks."""

    shape: tuple[int, ...]
    """Of the full tensor"""
    shards: tuple[TpShard, ...]
    """Of each rank"""

    def join(self, places: Sequence[Placement]) -> tuple[Placement, ...]:
        """Return where the full tensor is, given the place of each rank's shard; and where its copies are, if any.

        Raises ValueError unless the boxes tile the tensor.
        """
        holders: dict[Box, list[Placement]] = {}
        for shard, place in zip(self.shards, places, strict=True):
            for box, own in shard.pieces:
                is_all = own.sizes == shard.shape
                holders.setdefault(box, []).append(place if is_all else Inside(place, shard.shape, own))
        cuts, order = find_grid(self.shape, *corners(holders))
        found = [[*holders.values()][number] for number in order] or [[places[0]]]
        if len(found) == 1:
            return tuple(found[0])
        rows = (tuple(held[min(number, len(held) - 1)] for held in found) for number in range(max(map(len, found))))
        return tuple(Boxes(self.shape, cuts, row) for row in rows)

    def check(self) -> None:
        """Raise ValueError unless the ranks hold every element, and each of a shard's elements is one of the tensor."""
        self.join([_NOWHERE] * len(self.shards))
        for shard in self.shards:
            find_grid(shard.shape, *corners(own for _, own in shard.pieces))

    def runs(self, rank: int) -> Callable[[int, int], Iterator[tuple[int, int, int, int]]] | None:
        """Return a function that yields which elements of the full tensor a rank's elements ``begin``..``end`` are; see
        `Inside.runs`. None if the rank has the full tensor.
        """
        shard = self.shards[rank]
        if [box.sizes for box, _ in shard.pieces] == [self.shape]:
            return None
        cuts, order = find_grid(shard.shape, *corners(own for _, own in shard.pieces))
        cells = [Inside(_NOWHERE, self.shape, shard.pieces[number][0]) for number in order]
        if len(cells) == 1 and shard.shape[1:] == self.shape[1:]:  # rows, as of most params
            before = cells[0].box.offsets[0] * math.prod(self.shape[1:])
            return lambda begin, end: iter([(before + begin, end - begin, 1, 0)])

        def runs(begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
            for box, inside, count in in_boxes(shard.shape, cuts, begin, end):
                yield from cells[box].runs(inside, inside + count)

        return runs


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """The tensor parallelism of a checkpoint."""

    degree: int
    cuts: Mapping[str, TpSplit]
    """By param; others, such as buffers, are whole on each rank."""
    copies: Mapping[State, tuple[Placement, ...]] = field(default_factory=dict)
    """Where second holders have a state that is not cut, or of which some boxes have several holders"""

    def shape_on(self, rank: int, param: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a rank's shard of a param, which has this shape."""
        return self.cuts[param].shards[rank].shape if param in self.cuts else shape
