"""Where the elements of a state are stored: byte ranges of files. Pure.

Ranges are half-open: bytes run ``start``..``stop``, elements ``begin``..``end``. A *placement* answers one question:
which file holds elements begin..end, and where. It computes the answer, so an index stays small for any number of
ranks. Sets of elements are ascending runs that do not touch.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, overload

from llmtailor.model.dtypes import BLOCKS, Encoding, size_of

Runs = tuple[tuple[int, int], ...]


class _Extent(NamedTuple):  # made by the million, at half the cost of a dataclass
    path: str
    start: int
    stop: int


class Extent(_Extent):
    """Bytes ``start``..``stop`` of a file; ``path`` is relative to the checkpoint's root, with ``/``."""

    __slots__ = ()

    def __new__(cls, path: str, start: int, stop: int) -> Extent:
        if not 0 <= start <= stop:
            raise ValueError(f"not a byte range: bytes {start} to {stop} of {path!r}")
        return tuple.__new__(cls, (path, start, stop))

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


class StoredRange(NamedTuple):
    """Elements ``begin``..``end`` of a state, stored in ``extent``."""

    begin: int
    end: int
    extent: Extent
    encoding: Encoding | None = None
    """How to decode them; None if the file has the elements themselves"""


class Band(NamedTuple):
    """Runs of bytes of a file: ``width`` from ``start`` on, as many ``stride`` after that, and so on."""

    path: str
    start: int
    width: int
    stride: int


class Grid(NamedTuple):
    """Rows of elements from ``begin`` on, in the order of the tensor. A row is one run of each band, side by side.

    ::

        tensor                    bands, in two files            2 rows
         0  1  2  3 |  4  5       0 1 2 3 6 7 8 9                width and stride: 4 elements
         6  7  8  9 | 10 11       4 5 10 11                      width and stride: 2 elements
    """

    begin: int
    rows: int
    width: int
    """Elements of a row"""
    bands: tuple[Band, ...]

    @property
    def end(self) -> int:
        return self.begin + self.rows * self.width

    @property
    def extents(self) -> tuple[Extent, ...]:
        """The bytes of each band, with those between its runs"""
        last = self.rows - 1
        return tuple(Extent(path, start, start + last * stride + width) for path, start, width, stride in self.bands)


SHORT_BYTES = 64 << 10
"""Longer runs take as little time one by one, and file systems can share their blocks"""


class Placement(Protocol):
    """Where the elements of one state are stored."""

    def cover(self, begin: int, end: int) -> Iterable[StoredRange]:
        """Return fragments that tile ``begin``..``end`` in order."""


@dataclass(frozen=True, slots=True)
class Contiguous:
    """All elements in one run: a safetensors tensor, a buffer."""

    extent: Extent
    itemsize: int

    def cover(self, begin: int, end: int) -> Iterable[StoredRange]:
        path, start, _ = self.extent
        extent = Extent(path, start + begin * self.itemsize, start + end * self.itemsize)
        return (StoredRange(begin, end, extent),) if begin < end else ()


@dataclass(frozen=True, slots=True)
class Sliced:
    """Cut into slices of ``part`` elements, one per shard: each param on its own (ZeRO-3), or a vector of several
    (ZeRO-1/2), where params cross the cuts anywhere.

    ::

        param (8 elements, 3 ranks, part 3)     0 1 2 | 3 4 5 | 6 7 x     x: padding, never addressed
        rank 1's flat tensor                    [other params ...| 3 4 5 | other params ...]
                                                                 ^ offset

        vector      | q_proj       | k_proj | gap | ... | norm | padding |
        on disk     | rank 0    | rank 1    | ...         | rank n       |
    """

    shards: tuple[Extent, ...]
    """The flat tensor that a slice is in, rank by rank. A vector's last ones may end early, where the padding begins.
    """
    offset: int
    """Elements before the slice, the same in every shard"""
    part: int
    itemsize: int
    before: int = 0
    """Elements of the vector before this param"""

    def cover(self, begin: int, end: int) -> list[StoredRange]:
        found, part, before, itemsize = [], self.part, self.before, self.itemsize
        while begin < end:
            rank, inside = divmod(before + begin, part)
            until = (rank + 1) * part - before
            if until > end:
                until = end
            path, start, _ = self.shards[rank]
            start += (self.offset + inside) * itemsize
            found.append(StoredRange(begin, until, Extent(path, start, start + (until - begin) * itemsize)))
            begin = until
        return found


@dataclass(frozen=True, slots=True)
class Bundled:
    """A partial checkpoint: each rank's fragments of the param are one tensor in that rank's bundle.

    Between fragments, elements may be left out: those of experts that the save does not hold.
    """

    paths: Sequence[str]
    """The file of each fragment, in the order of the elements."""
    starts: Sequence[int]
    """Where each fragment begins in its file, in bytes."""
    cuts: Sequence[int]
    """The first element of each fragment, ascending, and where the last one ends."""
    itemsize: int
    ends: tuple[int, ...] = ()
    """Where each fragment ends; empty if each ends where the next one begins"""
    encoded: str = ""
    """The dtype of `Encoding`, if the elements are stored so: each fragment begins with a new block"""
    frames: tuple[Sequence[int], ...] = ()
    """Of `dtypes.D24`: where each block of each fragment begins in its file, and where the last one ends"""

    @property
    def framed_bytes(self) -> int:
        """The size of the elements that the checkpoint holds, if they are in `frames`"""
        return sum(one[-1] - one[0] for one in self.frames)

    @property
    def runs(self) -> Runs:
        """The elements that the checkpoint holds"""
        return union(tuple(zip(self.cuts, self.ends or self.cuts[1:], strict=False)))

    def cover(self, begin: int, end: int) -> Iterable[StoredRange]:
        at = bisect_right(self.cuts, begin) - 1
        while begin < end:
            until = min(end, self.ends[at] if self.ends else self.cuts[at + 1])
            if not self.cuts[at] <= begin < until:
                raise LookupError("the checkpoint does not hold these elements")
            if self.encoded:
                yield self._blocks(at, begin, until)
            else:
                start = self.starts[at] + (begin - self.cuts[at]) * self.itemsize
                stop = start + (until - begin) * self.itemsize
                yield StoredRange(begin, until, Extent(self.paths[at], start, stop))
            begin, at = until, at + 1

    def _blocks(self, at: int, begin: int, end: int) -> StoredRange:
        """Return elements of a fragment, with the blocks that they are in."""
        numel = (self.ends[at] if self.ends else self.cuts[at + 1]) - self.cuts[at]
        block, start, size = BLOCKS[self.encoded], self.starts[at], size_of(self.encoded, numel)
        first, skip = divmod(begin - self.cuts[at], block.elements)
        last = -(-(end - self.cuts[at]) // block.elements)
        if self.frames:
            edges = self.frames[at][first : last + 1]
            sizes = tuple(stop - start for start, stop in itertools.pairwise(edges))
            extent = Extent(self.paths[at], edges[0], edges[-1])
            return StoredRange(begin, end, extent, Encoding(self.encoded, skip, end - begin, sizes))
        extent = Extent(self.paths[at], start + first * block.num_bytes, start + min(last * block.num_bytes, size))
        return StoredRange(begin, end, extent, Encoding(self.encoded, skip, end - begin))


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor: where it begins and how large it is, in elements along each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def corners(boxes: Iterable[Box]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return the offsets and the sizes of boxes."""
    listed = [*boxes]
    return [box.offsets for box in listed], [box.sizes for box in listed]


def find_grid(
    shape: tuple[int, ...], offsets: Sequence[Any], sizes: Sequence[Any]
) -> tuple[tuple[tuple[int, ...], ...], list[int]]:
    """Return the cuts along each dimension, and the numbers of boxes in the order of the cells.

    Boxes without elements are left out. Raises ValueError unless the others tile the tensor as a grid.
    """
    import numpy as np  # takes a while, and most checkpoints have no boxes

    if 0 in shape:
        return (), []
    lows, lengths = (np.asarray(one, np.int64).reshape(len(offsets), len(shape)) for one in (offsets, sizes))
    numbers = np.flatnonzero((lengths > 0).all(axis=1))
    lows, lengths = lows[numbers], lengths[numbers]
    edges = [np.unique(np.append(lows[:, at], size)) for at, size in enumerate(shape)]
    counts = [len(one) - 1 for one in edges]
    if len(lows) != math.prod(counts) or any(one[0] for one in edges):
        raise ValueError(f"the {len(lows)} boxes do not tile it")
    cell, is_in_grid = np.zeros(len(lows), np.int64), np.full(len(lows), True)
    for at, edge in enumerate(edges):
        number = np.minimum(np.searchsorted(edge, lows[:, at]), counts[at] - 1)
        is_in_grid &= (edge[number] == lows[:, at]) & (edge[number + 1] == lows[:, at] + lengths[:, at])
        cell = cell * counts[at] + number
    order = np.argsort(cell)
    if not is_in_grid.all() or (cell[order] != np.arange(len(lows))).any():
        raise ValueError("its boxes leave elements out or overlap")
    return tuple(tuple(one.tolist()) for one in edges), numbers[order].tolist()


@dataclass(frozen=True, slots=True, eq=False)
class Cells(Sequence[Contiguous]):
    """The cells of `Boxes` in columns, for a thousand boxes of a thousand tensors."""

    paths: Sequence[str]
    starts: Sequence[int]
    stops: Sequence[int]
    itemsize: int

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, at: int) -> Contiguous: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Contiguous]: ...
    def __getitem__(self, at: int | slice) -> Contiguous | Sequence[Contiguous]:
        if isinstance(at, slice):
            return tuple(self[each] for each in range(*at.indices(len(self))))
        return Contiguous(Extent(self.paths[at], self.starts[at], self.stops[at]), self.itemsize)


@dataclass(frozen=True, slots=True)
class Boxes:
    """A tensor that is cut into a grid of boxes, as by tensor parallelism, each stored row by row.

    ::

        shape (4, 6), cuts ((0, 2, 4), (0, 4, 6))       0  1  2  3 |  4  5
                                                        6  7  8  9 | 10 11
                                                       ------------+------
                                                       12 13 14 15 | 16 17
                                                       18 19 20 21 | 22 23
    """

    shape: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...]
    """For each dimension, where its boxes begin, ascending from 0, and the size at the end"""
    cells: Sequence[Placement]
    """The boxes, the last dimension counting fastest; the elements of each count from 0"""

    @property
    def encoded(self) -> str:
        """The dtype of `Encoding`, if the elements are stored so"""
        cells = () if isinstance(self.cells, Cells) else self.cells
        return next((one.encoded for one in cells if isinstance(one, Bundled)), "")

    @property
    def framed_bytes(self) -> int:
        return sum(one.framed_bytes for one in self.cells if isinstance(one, Bundled))

    def cover(self, begin: int, end: int) -> Iterable[StoredRange]:
        for box, inside, count in in_boxes(self.shape, self.cuts, begin, end):
            shift = begin - inside
            for low, high, extent, encoding in self.cells[box].cover(inside, inside + count):
                yield StoredRange(low + shift, high + shift, extent, encoding)
            begin += count

    def arrange(self, begin: int, end: int) -> Iterator[StoredRange | Grid]:
        """Yield what `cover` yields, but rows of short fragments as a grid."""
        last = last_cut(self.cuts)
        width = math.prod(self.shape[last:])
        first, after = -(-begin // width), end // width
        if not last or self.encoded or after - first < 2:
            yield from self.cover(begin, end)
            return
        if begin < first * width:
            yield from self.cover(begin, first * width)
        for grid in self.grids(first * width, after - first):
            is_short = sum(band.width for band in grid.bands) < SHORT_BYTES * len(grid.bands)
            yield from (grid,) if grid.rows > 1 and is_short else _runs_of(grid)
        if after * width < end:
            yield from self.cover(after * width, end)

    def grids(self, begin: int, count: int, low: int = 0, high: int = 0) -> Iterator[Grid]:
        """Yield grids that tile whole rows of the last dimension that is cut, and all after it; of each row the
        elements ``low``..``high`` if they are given."""
        last = last_cut(self.cuts)
        width, edges = math.prod(self.shape[last:]), self.cuts[last]
        high, tail, first = high or width, width // self.shape[last], begin // width
        columns = bisect_right(edges, low // tail) - 1, bisect_left(edges, -(-high // tail))
        for box, inside, number in in_boxes(self.shape[:last], self.cuts[:last], first, first + count):
            found = []
            for column in range(*columns):
                start, stop = edges[column] * tail, edges[column + 1] * tail
                cell, own = self.cells[box * (len(edges) - 1) + column], stop - start
                if low <= start and stop <= high:
                    found.append(_grids(cell, inside * own, own, number))
                else:
                    part = max(low - start, 0), min(high, stop) - start
                    found.append(_parts(cell, inside * own + part[0], part[1] - part[0], number, own))
            for rows, bands in _side_by_side(found):
                yield Grid(begin + low, rows, high - low, bands)
                begin += rows * width


def _runs_of(grid: Grid) -> Iterator[StoredRange]:
    """Yield each run of each row."""
    itemsize, begin = sum(band.width for band in grid.bands) // grid.width, grid.begin
    for row in range(grid.rows):
        for path, start, width, stride in grid.bands:
            end = begin + width // itemsize
            yield StoredRange(begin, end, Extent(path, start + row * stride, start + row * stride + width))
            begin = end


def last_cut(cuts: tuple[tuple[int, ...], ...]) -> int:
    """Return the last dimension with several boxes; 0 if there is none."""
    at = len(cuts) - 1
    while at > 0 and len(cuts[at]) == 2:
        at -= 1
    return max(at, 0)


def in_boxes(
    shape: tuple[int, ...], cuts: tuple[tuple[int, ...], ...], begin: int, end: int
) -> Iterator[tuple[int, int, int]]:
    """Yield runs of elements: the box they are in, the first element's number in it, and how many there are."""
    last = last_cut(cuts)
    if not last and (not cuts or len(cuts[0]) == 2) and begin < end:  # one box
        yield 0, begin, end - begin
        return
    while begin < end:
        box = inside = run = 0
        rest, stride = begin, math.prod(shape)
        for dimension, (size, edges) in enumerate(zip(shape, cuts, strict=True)):
            stride //= size
            at, rest = divmod(rest, stride)
            number = bisect_right(edges, at) - 1
            low, high = edges[number], edges[number + 1]
            box, inside = box * (len(edges) - 1) + number, inside * (high - low) + at - low
            if dimension == last:  # boxes have all of each dimension after it
                run = (high - at) * stride - rest
        count = min(end - begin, run)
        yield box, inside, count
        begin += count


def _grids(place: Placement, begin: int, width: int, count: int) -> Iterator[Grid]:
    """Yield grids that tile ``count`` rows of ``width`` elements."""
    if isinstance(place, Boxes) and (last := last_cut(place.cuts)) and math.prod(place.shape[last:]) == width:
        yield from place.grids(begin, count)
        return
    row: list[Band] = []
    missing = 0
    for low, high, (path, start, stop), _ in place.cover(begin, begin + count * width):
        itemsize = (stop - start) // (high - low)
        if missing:  # the rest of a row that another fragment begins
            taken = min(missing, high - low)
            row.append(Band(path, start, taken * itemsize, taken * itemsize))
            low, start, missing = low + taken, start + taken * itemsize, missing - taken
            if not missing:
                yield Grid(low - width, 1, width, tuple(row))
        whole = (high - low) // width
        if whole:
            yield Grid(low, whole, width, (Band(path, start, width * itemsize, width * itemsize),))
            low, start = low + whole * width, start + whole * width * itemsize
        if low < high:
            row, missing = [Band(path, start, (high - low) * itemsize, (high - low) * itemsize)], width - (high - low)


def _side_by_side(columns: Sequence[Iterator[Grid]]) -> Iterator[tuple[int, tuple[Band, ...]]]:
    """Yield numbers of rows, and the bands of all columns in them."""
    if len(columns) == 1:
        yield from ((grid.rows, grid.bands) for grid in columns[0])
        return
    grids = [next(column) for column in columns]
    while True:
        rows = min(grid.rows for grid in grids)
        yield rows, tuple(band for grid in grids for band in grid.bands)
        for at, (begin, own, width, bands) in enumerate(grids):
            if own > rows:
                after = tuple(band._replace(start=band.start + rows * band.stride) for band in bands)
                grids[at] = Grid(begin + rows * width, own - rows, width, after)
            elif (following := next(columns[at], None)) is not None:
                grids[at] = following
            else:
                return


@dataclass(frozen=True, slots=True)
class Inside:
    """A box of a tensor, whose elements count from 0: the inverse of `Boxes`."""

    place: Placement
    """Of the whole tensor"""
    shape: tuple[int, ...]
    """Of the whole tensor"""
    box: Box

    def cover(self, begin: int, end: int) -> Iterable[StoredRange]:
        while begin < end:
            first, run = self._run(begin, end)
            shift = begin - first
            for low, high, extent, encoding in self.place.cover(first, first + run):
                yield StoredRange(low + shift, high + shift, extent, encoding)
            begin += run

    def runs(self, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield which elements of the whole tensor they are: the first one, how many, in how many such runs, and how
        many elements from one run to the next."""
        last = self._last
        width, stride = (math.prod(sizes[last:]) for sizes in (self.box.sizes, self.shape))
        is_even = last > 0 and self.box.sizes[1:last] == self.shape[1:last]
        while begin < end:
            first, run = self._run(begin, end)
            rows = (end - begin) // width if is_even and not begin % width else 0
            yield first, run, max(rows, 1), stride if rows > 1 else 0
            begin += run * max(rows, 1)

    @property
    def _last(self) -> int:
        """The last dimension that the box has only a part of"""
        at = len(self.shape) - 1
        while at > 0 and self.box.sizes[at] == self.shape[at]:
            at -= 1
        return max(at, 0)

    def _run(self, begin: int, end: int) -> tuple[int, int]:
        """Return which element of the whole tensor ``begin`` is, and how many follow it there as well."""
        sizes, last = self.box.sizes, self._last
        tail = math.prod(sizes[last + 1 :])
        rest, at = divmod(begin // tail, sizes[last])
        run = min(end - begin, (sizes[last] - at) * tail - begin % tail)
        first, stride = (self.box.offsets[last] + at) * tail + begin % tail, self.shape[last] * tail
        for dimension in range(last - 1, -1, -1):
            rest, at = divmod(rest, sizes[dimension])
            first += (self.box.offsets[dimension] + at) * stride
            stride *= self.shape[dimension]
        return first, run


@dataclass(frozen=True, slots=True)
class StridedRuns:
    """Runs of elements of a larger tensor, in order: one layer of stacked ones, the queries of a fused qkv.

    ::

        tensor                  q0 q1 k0 v0 q2 q3 k1 v1         the rows of two groups
        queries                 q0 q1 q2 q3                     cuts (0, 2, 4), offsets (0, 4)
    """

    place: Placement
    """Of the larger tensor"""
    cuts: tuple[int, ...]
    """The first element of each run, ascending from 0, and where the last one ends"""
    offsets: tuple[int, ...]
    """Where each run begins in the larger tensor"""

    def cover(self, begin: int, end: int) -> Iterable[StoredRange]:
        for low, high, shift in self._runs(begin, end):
            for have in self.place.cover(low, high):
                yield have._replace(begin=have.begin + shift, end=have.end + shift)

    def arrange(self, begin: int, end: int) -> Iterator[StoredRange | Grid]:
        """Yield what `cover` yields, but rows of short fragments as a grid."""
        for low, high, shift in self._runs(begin, end):
            for have in arrange(self.place, low, high):
                if isinstance(have, Grid):
                    yield have._replace(begin=have.begin + shift)
                else:
                    yield have._replace(begin=have.begin + shift, end=have.end + shift)

    def _runs(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield which elements of the larger tensor they are, and what to add to these numbers to return."""
        at = bisect_right(self.cuts, begin) - 1
        while begin < end:
            until, shift = min(end, self.cuts[at + 1]), self.cuts[at] - self.offsets[at]
            yield begin - shift, until - shift, shift
            begin, at = until, at + 1


@dataclass(frozen=True, slots=True)
class Absent:
    """Nowhere: a partial checkpoint records the state's dtype and shape, but does not hold it."""

    def cover(self, begin: int, end: int) -> Iterable[StoredRange]:
        raise LookupError("the checkpoint does not hold this state")


@dataclass(frozen=True, slots=True)
class AllZero:
    """In no file, because all elements are zero: moments of a param that has had no gradient yet."""

    def cover(self, begin: int, end: int) -> Iterable[StoredRange]:
        return ()


def arrange(place: Placement, begin: int, end: int) -> Iterable[StoredRange | Grid]:
    """Return what `Placement.cover` returns, but rows of short fragments as a grid.

    A tensor that is cut along columns, as by tensor parallelism, has more fragments than rows, but few grids. What is
    encoded is in no grid.
    """
    return place.arrange(begin, end) if isinstance(place, (Boxes, StridedRuns)) else place.cover(begin, end)


def columns(place: Placement, begin: int, width: int, rows: int, stride: int) -> Iterator[Grid]:
    """Return grids of ``rows`` runs of ``width`` elements, each ``stride`` elements after the one before it.

    ``stride`` is the size of a tensor's rows, and no run is in two of them. Each grid begins with one of the runs.
    """
    if isinstance(place, Boxes) and (last := last_cut(place.cuts)) and math.prod(place.shape[last:]) == stride:
        skip = begin % stride
        return place.grids(begin - skip, rows, skip, skip + width)
    return _parts(place, begin, width, rows, stride)


def _parts(place: Placement, begin: int, width: int, rows: int, stride: int) -> Iterator[Grid]:
    """Yield what `columns` returns, from the grids of whole rows."""
    skip = begin % stride
    for first, count, _, bands in _grids(place, begin - skip, stride, rows):
        itemsize, at, found = sum(band.width for band in bands) // stride, 0, []
        for band in bands:
            low, high = (min(max(edge * itemsize - at, 0), band.width) for edge in (skip, skip + width))
            if low < high:
                found.append(band._replace(start=band.start + low, width=high - low))
            at += band.width
        yield Grid(first + skip, count, width, tuple(found))


def union(*sets: Runs) -> Runs:
    """Return the elements that are in any of the sets."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(run for runs in sets for run in runs if run[0] < run[1]):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return tuple(joined)


def without(runs: Runs, taken: Runs) -> Runs:
    """Return the elements of ``runs`` that are not in ``taken``."""
    left: list[tuple[int, int]] = []
    for begin, end in runs:
        for low, high in taken:
            if low >= end:
                break
            if high > begin:
                left.append((begin, low))
                begin = high
        left.append((begin, end))
    return tuple(run for run in left if run[0] < run[1])


def common(runs: Runs, others: Runs) -> Runs:
    """Return the elements that are in both sets."""
    return without(runs, without(runs, others))


def count(runs: Iterable[tuple[int, int]]) -> int:
    return sum(end - begin for begin, end in runs)
