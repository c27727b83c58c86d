"""Layout of one folder of torch.distributed.checkpoint, as `folder` reads it.

As torch saves under FSDP2, a tensor is cut along dimension 0 into ``ceil(rows / ranks)`` rows per rank, so that the
last ranks may have fewer rows or none; what all ranks have alike is saved once, spread over the ranks. For as many
ranks as the base has, its boxes are kept, as by tensor parallelism: each rank then reads the blobs that it needs.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, product
from operator import sub
from types import NoneType
from typing import Any, NamedTuple, Protocol

from llmtailor.checkpoint.index import DcpEntry
from llmtailor.checkpoint.layout import Bytes, Copy, Crc, FileLayout, Fill, Segment, Slot, Zeros
from llmtailor.checkpoint.placement import Box, Boxes, Cells, Extent, Placement, last_cut
from llmtailor.containers.dcp import (
    DATA_FILE,
    METADATA,
    Blob,
    Chunk,
    Chunks,
    Entry,
    KeyPath,
    cut_rows,
    lay_out_metadata,
)
from llmtailor.containers.torch_file import lay_out_torch_blob
from llmtailor.containers.unpickle import as_tensor, make_tensor, state_tensor
from llmtailor.model.roles import State

Pieces = tuple[Segment, ...]
_MADE = (Bytes, Zeros, Crc)
"""Pieces that read no source"""


class Finder(Protocol):
    """Finds tensors that are in linked files."""

    def find(
        self, folder: str, name: str, state: State, dtype: str, shape: tuple[int, ...]
    ) -> Sequence[Chunk] | None: ...


@dataclass(frozen=True)
class _Blob:
    """A blob of one rank, or one of each of several, with boxes of the same sizes of a state."""

    ranks: Sequence[int]
    """Ascending"""
    pieces: Pieces
    """Of the first rank's, at byte 0"""
    num_bytes: int
    elements: Pieces
    """What all ranks read, for a plan's digest; the first of a state's blobs has the whole state, others nothing"""
    skips: Sequence[int] = (0,)
    """Of each rank, the elements between the begin of the first rank's box and of its own"""

    def number(self, rank: int) -> int | None:
        """Return which of the ranks it is; None if the rank has none."""
        if isinstance(self.ranks, range):
            return rank - self.ranks.start if rank in self.ranks else None
        at = bisect_left(self.ranks, rank)
        return at if at < len(self.ranks) and self.ranks[at] == rank else None

    def brief(self) -> Iterator[Segment]:
        """Yield `elements`, and a digest of all else. The folder's ``.metadata`` says which of them each rank has."""
        kept = (piece if type(piece) in _MADE else piece.num_bytes for piece in self.pieces)
        yield Bytes(hashlib.sha256(repr((*kept,)).encode()).digest(), "outline of a blob")
        yield from self.elements

    def placed(self, number: int, at: int) -> Iterator[Segment]:
        """Yield the pieces of a rank's at byte ``at`` of its file."""
        for piece in self.pieces:
            yield Crc(at + piece.start, at + piece.stop) if type(piece) is Crc else self._of(number, piece)

    def _of(self, number: int, piece: Segment) -> Segment:
        if type(piece) is not Slot or not (skipped := self.skips[number]):
            return piece
        state, dtype, begin, end, rows, stride = piece
        return Slot(state, dtype, begin + skipped, end + skipped, rows, stride)


class _RankFile(FileLayout):
    """A file with blobs of a rank. A plan's digest has each blob once, in the file of the first rank that has one."""

    def __init__(
        self, path: str, blobs: Callable[[], Iterable[tuple[_Blob, int]]], num_bytes: int, fill: Fill | None = None
    ):
        super().__init__(path, self._filled)
        self._blobs, self._fill, self._num_bytes = blobs, fill, num_bytes

    def _filled(self) -> Iterator[Segment]:
        at = 0
        for blob, number in self._blobs():
            for piece in blob.placed(number, at):
                yield from (piece,) if self._fill is None else self._fill(piece)
            at += blob.num_bytes

    def brief(self) -> Iterator[Segment]:
        first = (blob for blob, number in self._blobs() if not number)
        for piece in chain.from_iterable(blob.brief() for blob in first):
            yield from (piece,) if self._fill is None else self._fill(piece)

    def filled(self, fill: Fill) -> FileLayout:
        return _RankFile(self.path, self._blobs, self.num_bytes, fill)


class _Alike(NamedTuple):
    """Boxes of a tensor of the same sizes, one of each rank that has any, in columns."""

    sizes: tuple[int, ...]
    run: tuple[int, int, int, int]
    """Of the first: see `run_of_box`"""
    ranks: Sequence[int]
    skips: Sequence[int]
    """See `_Blob`"""
    offsets: array[int]


class FolderBuilder:
    """A DCP folder being laid out; ``folder`` is relative to the checkpoint, ``""`` for its root."""

    def __init__(self, folder: str, ranks: int, links: Finder | None = None):
        self._folder, self._links = folder, links
        self._prefix = f"{folder}/" if folder else ""
        self.counter = 0
        """Ends the names of the files that are written to"""
        self._ranks = ranks
        self._blobs: dict[int, list[_Blob]] = {0: []}
        """Of the files with each counter, in the order of their bytes"""
        self._ends: dict[int, array[int]] = {0: array("q", (0,)) * ranks}
        """Where the files with each counter end so far, by rank"""
        self._next = 0
        self._alike: dict[tuple[object, ...], Blob] = {}
        """Number -> the blob that all that are alike share, such as Adam's steps"""
        self._entries: dict[str, Entry] = {}
        self._names = cache(lambda counter: tuple(_file(rank, counter) for rank in range(ranks)))
        self._cut, self._cut_like = cache(self._in_rows), cache(self._in_boxes)
        """Many tensors have the same shape."""

    def add_state(
        self,
        path: KeyPath,
        state: State,
        dtype: str,
        shape: tuple[int, ...],
        *,
        name: str = "",
        is_cut: bool = True,
        like: Placement | None = None,
    ) -> None:
        """Add a state unless it is in a linked file; ``name`` is that of a weight.

        It is cut ``like`` the base's boxes, if that is given, or else along dimension 0.
        """
        linked = self._links.find(self._folder, name, state, dtype, shape) if self._links is not None else None
        if linked is not None:
            self._entries[join_key(path)] = Entry(path, dtype, shape, linked)
            return
        if not is_cut or not math.prod(shape) or not shape:
            self.add(path, state_tensor(state, dtype, shape))
            return
        groups: Sequence[_Alike] = ()
        row = numel = math.prod(shape)
        if isinstance(like, Boxes) and isinstance(like.cells, Cells):
            groups = self._cut_like(shape, like.cuts, tuple(like.cells.paths))
            row = math.prod(shape[last_cut(like.cuts) :]) if groups else numel
        elements: Pieces = (Slot(state, dtype, 0, row, numel // row, row if row < numel else 0),)
        offsets, sizes, ranks, starts, lengths = (array("q") for _ in range(5))
        for one in groups or self._cut(shape):
            begin, width, rows, stride = one.run
            content = Slot(state, dtype, begin, begin + width, rows, stride)
            tensor = make_tensor(dtype, one.sizes, (content,))
            pieces = lay_out_torch_blob(_file(one.ranks[0], self.counter), tensor)
            blob = _Blob(one.ranks, pieces, sum(piece.num_bytes for piece in pieces), elements, one.skips)
            elements = ()
            starts += self._append(blob)
            lengths += array("q", (blob.num_bytes,)) * len(one.ranks)
            offsets += one.offsets
            sizes += array("q", one.sizes) * len(one.ranks)
            ranks += array("q", one.ranks)
        chunks = Chunks(self._names(self.counter), len(shape), offsets, sizes, ranks, starts, lengths)
        self._entries[join_key(path)] = Entry(path, dtype, shape, chunks)

    def _in_rows(self, shape: tuple[int, ...]) -> list[_Alike]:
        """Return the boxes of a tensor that is cut along dimension 0: most are alike, the last one may be smaller."""
        cuts, rest = cut_rows(shape[0], self._ranks), (0,) * (len(shape) - 1)
        boxes = ((rank, (low, *rest), (high - low, *shape[1:])) for rank, (low, high) in enumerate(cuts) if low < high)
        return _alike(shape, boxes)

    def _in_boxes(
        self, shape: tuple[int, ...], cuts: tuple[tuple[int, ...], ...], paths: tuple[str, ...]
    ) -> list[_Alike]:
        """Return the boxes of the base, each on the rank whose file it is in; none if they can't be kept."""
        files = [DATA_FILE.fullmatch(path.rpartition("/")[2]) for path in paths]
        ranks = [int(file[1]) for file in files if file]
        if len(ranks) < len(paths) or max(ranks) >= self._ranks:
            return []
        lows, highs = (product(*(cut[at : len(cut) - 1 + at] for cut in cuts)) for at in (0, 1))
        boxes = ((rank, low, tuple(map(sub, high, low))) for rank, low, high in zip(ranks, lows, highs, strict=True))
        return _alike(shape, boxes)

    def add_tensor(
        self, path: KeyPath, dtype: str, shape: tuple[int, ...], boxes: Iterable[tuple[Box, Pieces]]
    ) -> None:
        """Add a tensor in boxes, spread over the ranks, each with its content."""
        chunks = []
        for box, content in boxes:
            blob = self._put(self._take_turn(), make_tensor(dtype, box.sizes, content))
            chunks.append(Chunk(box.offsets, box.sizes, blob))
        self._entries[join_key(path)] = Entry(path, dtype, shape, tuple(chunks))

    def add_pickle(self, path: KeyPath, extent: Extent) -> None:
        """Add the pickle of an object of the base, as it is."""
        blob = self._put_pieces(self._take_turn(), (Copy(extent),))
        self._entries[join_key(path)] = Entry(path, chunks=(Chunk((), (), blob),))

    def add(self, path: KeyPath, value: Any) -> None:
        """Add a value on one rank: a tensor with its own storage as a tensor, anything else as a pickle."""
        view = as_tensor(value)
        if view is None:
            self.add_object(path, value)
            return
        dtype, shape, content = view.storage.dtype, view.shape, view.storage.content
        data = [piece.data for piece in content if type(piece) is Bytes]
        is_number = math.prod(shape) == 1 and len(data) == len(content)
        blob = self._put_once((dtype, shape, *data), make_tensor(dtype, shape, content), is_number)
        self._entries[join_key(path)] = Entry(path, dtype, shape, (Chunk((0,) * len(shape), shape, blob),))

    def add_object(self, path: KeyPath, value: Any) -> None:
        """Add a value as a pickle, whatever it is."""
        blob = self._put_once((type(value), repr(value)), value, isinstance(value, (bool, int, float, str, NoneType)))
        self._entries[join_key(path)] = Entry(path, chunks=(Chunk((), (), blob),))

    def add_entry(self, entry: DcpEntry) -> None:
        """Add a value of the base; a tensor keeps its chunks."""
        if not entry.is_tensor:
            self.add_object(entry.path, entry.content)
            return
        dtype, shape, boxes = entry.content
        copied = ((Box(at, sizes), (Copy(extent),) if math.prod(sizes) else ()) for at, sizes, extent in boxes)
        self.add_tensor(entry.path, dtype, shape, copied)

    def finish(self) -> list[FileLayout]:
        """Return the layouts of the folder's files; the pieces of each are made when they are asked for."""
        files = [
            _RankFile(self._prefix + name, partial(self._of_rank, counter, rank), ends[rank])
            for counter, ends in self._ends.items()
            for rank, name in enumerate(self._names(counter))
            if ends[rank] or not counter
        ]
        return [*files, lay_out_metadata(self._prefix + METADATA, self._entries)]

    def _of_rank(self, counter: int, rank: int) -> Iterator[tuple[_Blob, int]]:
        """Yield the blobs in a file, each with the number of the rank among those that have one."""
        for blob in self._blobs[counter]:
            if (number := blob.number(rank)) is not None:
                yield blob, number

    def _take_turn(self) -> int:
        self._next += 1
        return (self._next - 1) % self._ranks

    def _put_once(self, key: tuple[object, ...], tree: Any, is_number: bool) -> Blob:
        """Return the blob of a value, the same one for numbers, or texts, that are alike."""
        blob = self._alike.get(key) if is_number else None
        if blob is None:
            blob = self._put(self._take_turn(), tree)
            if is_number:
                self._alike[key] = blob
        return blob

    def _put(self, rank: int, tree: Any) -> Blob:
        return self._put_pieces(rank, lay_out_torch_blob(_file(rank, self.counter), tree))

    def _put_pieces(self, rank: int, pieces: Pieces) -> Blob:
        elements = tuple(piece for piece in pieces if type(piece) not in _MADE)
        blob = _Blob(range(rank, rank + 1), pieces, sum(piece.num_bytes for piece in pieces), elements)
        [start] = self._append(blob)
        return Blob(_file(rank, self.counter), start, start + blob.num_bytes)

    def _append(self, blob: _Blob) -> array[int]:
        """Return where the blob begins in the file of each of its ranks."""
        ends = self._ends.setdefault(self.counter, array("q", (0,)) * self._ranks)
        self._blobs.setdefault(self.counter, []).append(blob)
        starts = array("q", map(ends.__getitem__, blob.ranks))
        for rank, start in zip(blob.ranks, starts, strict=True):
            ends[rank] = start + blob.num_bytes
        return starts


def run_of_box(
    shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> tuple[int, int, int, int] | None:
    """Return a box of a tensor as begin, length and number of equal runs of elements, and the elements from one to the
    next; None if they are not at equal distances."""
    cut = [at for at, size in enumerate(sizes) if at and size < shape[at]]
    if len(cut) > 1:
        return None
    row = math.prod(shape[1:])
    if not cut:
        return offsets[0] * row, sizes[0] * row, 1, 0
    [at] = cut
    tail = math.prod(shape[at + 1 :])
    return offsets[0] * row + offsets[at] * tail, sizes[at] * tail, math.prod(sizes[:at]), shape[at] * tail


def _alike(shape: tuple[int, ...], boxes: Iterable[tuple[int, tuple[int, ...], tuple[int, ...]]]) -> list[_Alike]:
    """Return boxes, given as rank, offsets and sizes, by their sizes; none if one is not equal runs."""
    groups: dict[tuple[tuple[int, ...], int], list[tuple[int, tuple[int, ...], tuple[int, int, int, int]]]] = {}
    seen: Counter[int] = Counter()
    for rank, offsets, sizes in boxes:
        if (run := run_of_box(shape, offsets, sizes)) is None:
            return []
        groups.setdefault((sizes, seen[rank]), []).append((rank, offsets, run))  # a rank may have several
        seen[rank] += 1
    found = []
    for (sizes, _), rows in groups.items():
        ranks, corners, runs = zip(*sorted(rows), strict=True)
        every = range(ranks[0], ranks[0] + len(ranks))
        skips = array("q", (begin - runs[0][0] for begin, *_ in runs))
        own = every if ranks == (*every,) else array("q", ranks)
        found.append(_Alike(sizes, runs[0], own, skips, array("q", chain.from_iterable(corners))))
    return found


def _file(rank: int, counter: int) -> str:
    return f"__{rank}_{counter}.distcp"


def join_key(path: KeyPath) -> str:
    return ".".join(map(str, path))
