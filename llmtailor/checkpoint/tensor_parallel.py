"""How tensor parallelism has cut the params of a checkpoint: each rank of it has a smaller model. Pure.

A *shard* is what one tensor-parallel rank holds of a param: boxes of the full tensor, one for most params, several for
fused weights. Several ranks may hold the same box; a param that is not cut is one box, whole on each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from llmtailor.checkpoint.placement import Box, Boxes, Contiguous, Extent, Inside, Placement, find_grid
from llmtailor.model.roles import State

_NOWHERE = Contiguous(Extent("", 0, 0), 1)
"""Where element N is at byte N"""


@dataclass(frozen=True, slots=True)
class Shard:
    """What one tensor-parallel rank holds of a param."""

    shape: tuple[int, ...]
    pieces: tuple[tuple[Box, Box], ...]
    """Boxes of the full tensor, and where each is in the shard; none of them is empty."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Cut:
    """How a param is spread over the tensor-parallel ranks."""

    shape: tuple[int, ...]
    """Of the full tensor"""
    shards: tuple[Shard, ...]
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
        cuts, order = find_grid(self.shape, [*holders])
        found = [[*holders.values()][number] for number in order] or [[places[0]]]
        if len(found) == 1:
            return tuple(found[0])
        rows = (tuple(held[min(number, len(held) - 1)] for held in found) for number in range(max(map(len, found))))
        return tuple(Boxes(self.shape, cuts, row) for row in rows)

    def place_on(self, rank: int, whole: Placement) -> Placement | None:
        """Return where a rank's shard is in a checkpoint that has the full tensor there.

        None if it is not cut so there, or the shard is in no single place: fused weights of which other ranks have some
        boxes, too.
        """
        boxes = self.shards[rank].pieces
        cells = [whole.at(box) if isinstance(whole, Boxes) else None for box, _ in boxes]
        if len(cells) == 1:
            return cells[0]
        places = {cell.place for cell in cells if isinstance(cell, Inside)}
        are_own = all(isinstance(cell, Inside) and cell.box == own for cell, (_, own) in zip(cells, boxes, strict=True))
        return places.pop() if len(places) == 1 and are_own else None

    def check(self) -> None:
        """Raise ValueError unless the ranks hold every element, and each of a shard's elements is one of the tensor."""
        self.join([_NOWHERE] * len(self.shards))
        for shard in self.shards:
            find_grid(shard.shape, [own for _, own in shard.pieces])

    def is_whole(self, rank: int) -> bool:
        """Return whether a rank has the full tensor."""
        return [box.sizes for box, _ in self.shards[rank].pieces] == [self.shape]

    def runs(self, rank: int, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield which elements of the full tensor a rank's elements ``begin``..``end`` are, in their order."""
        shard = self.shards[rank]
        if self.is_whole(rank):
            yield begin, end
            return
        cuts, order = find_grid(shard.shape, [own for _, own in shard.pieces])
        cells = tuple(Inside(_NOWHERE, self.shape, shard.pieces[number][0]) for number in order)
        for *_, extent, _ in Boxes(shard.shape, cuts, cells).cover(begin, end):
            yield extent.start, extent.stop


def cut_as(grid: Boxes) -> Cut:
    """Return the cut of which each box of a grid is a shard."""
    none = (0,) * len(grid.shape)
    return Cut(grid.shape, tuple(Shard(box.sizes, ((box, Box(none, box.sizes)),)) for box in grid.boxes))


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """The tensor parallelism of a checkpoint."""

    degree: int
    cuts: Mapping[str, Cut]
    """By param; others, such as buffers, are whole on each rank."""
    copies: Mapping[State, tuple[Placement, ...]] = field(default_factory=dict)
    """Where second holders have a state that is not cut, or of which some boxes have several holders"""

    def shape_on(self, rank: int, param: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a rank's shard of a param, which has this shape."""
        return self.cuts[param].shards[rank].shape if param in self.cuts else shape
