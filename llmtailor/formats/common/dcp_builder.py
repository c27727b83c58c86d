"""Layout of one folder of torch.distributed.checkpoint, as `dcp_folder` reads it.

As torch saves under FSDP2, a tensor is cut along dimension 0 into ``ceil(rows / ranks)`` rows per rank, so that the
last ranks may have fewer rows or none; what all ranks have alike is saved once, spread over the ranks.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

from llmtailor.checkpoint.index import DcpEntry
from llmtailor.checkpoint.layout import Copy, Crc, FileLayout, Piece, Slot
from llmtailor.checkpoint.placement import Box, Extent
from llmtailor.containers.dcp import METADATA, Blob, Chunk, Chunks, Entry, KeyPath, cut_rows, lay_out_metadata
from llmtailor.containers.torch_file import lay_out_torch_blob
from llmtailor.containers.unpickle import as_tensor, make_tensor, state_tensor
from llmtailor.model.roles import State

Pieces = tuple[Piece, ...]


class Finder(Protocol):
    """Finds tensors that are in linked files."""

    def find(
        self, folder: str, name: str, state: State, dtype: str, shape: tuple[int, ...]
    ) -> Sequence[Chunk] | None: ...


@dataclass(frozen=True, slots=True)
class _Blob:
    """A blob of one rank, or one of each rank from ``first`` on, with as many elements of a state."""

    first: int
    count: int
    pieces: Pieces
    """Of the first rank's, at byte 0"""
    num_bytes: int
    step: int = 0
    """Elements from one rank's to the next one's"""

    def placed(self, rank: int, at: int) -> Iterator[Piece]:
        """Yield the pieces of a rank's at byte ``at`` of its file."""
        skipped = (rank - self.first) * self.step
        for piece in self.pieces:
            if type(piece) is Crc:
                yield Crc(at + piece.start, at + piece.stop)
            elif skipped and type(piece) is Slot:
                state, dtype, begin, end, *_ = piece
                yield Slot(state, dtype, begin + skipped, end + skipped)
            else:
                yield piece


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
        self._entries: dict[str, Entry] = {}
        self._names = cache(lambda counter: tuple(_file(rank, counter) for rank in range(ranks)))
        self._columns = cache(self._cut)

    def add_state(
        self, path: KeyPath, state: State, dtype: str, shape: tuple[int, ...], *, name: str = "", is_cut: bool = True
    ) -> None:
        """Add a state, cut along dimension 0 unless it is in a linked file; ``name`` is that of a weight."""
        linked = self._links.find(self._folder, name, state, dtype, shape) if self._links is not None else None
        if linked is not None:
            self._entries[join_key(path)] = Entry(path, dtype, shape, linked)
            return
        if not is_cut or not math.prod(shape) or not shape:
            self.add(path, state_tensor(state, dtype, shape))
            return
        row, first, starts, lengths = math.prod(shape[1:]), 0, array("q"), array("q")
        for count, low, rows in self._runs(shape[0]):
            node = state_tensor(state, dtype, (rows, *shape[1:]), low * row)
            pieces = lay_out_torch_blob(_file(first, self.counter), node)
            blob = _Blob(first, count, pieces, sum(piece.num_bytes for piece in pieces), rows * row)
            starts += self._append(blob)
            lengths += array("q", (blob.num_bytes,)) * count
            first += count
        columns = self._columns(shape)
        chunks = Chunks(self._names(self.counter), len(shape), *columns, starts, lengths)
        self._entries[join_key(path)] = Entry(path, dtype, shape, chunks)

    def _runs(self, rows: int) -> Iterator[tuple[int, int, int]]:
        """Yield how many ranks have as many rows, the first of them, and how many each has."""
        cuts = [high - low for low, high in cut_rows(rows, self._ranks) if low < high]
        whole = cuts.count(cuts[0])
        yield whole, 0, cuts[0]
        if whole < len(cuts):
            yield 1, whole * cuts[0], cuts[-1]

    def _cut(self, shape: tuple[int, ...]) -> tuple[array[int], array[int], array[int]]:
        """Return offsets, sizes and file of each chunk of a tensor; many have the same shape."""
        cuts = [(low, high - low) for low, high in cut_rows(shape[0], self._ranks) if low < high]
        rest = array("q", shape[1:])
        offsets, sizes = array("q"), array("q")
        for low, rows in cuts:
            offsets += array("q", (low,)) + array("q", (0,)) * len(rest)
            sizes += array("q", (rows,)) + rest
        return offsets, sizes, array("q", range(len(cuts)))

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
        tensor = make_tensor(view.storage.dtype, view.shape, view.storage.content)
        chunk = Chunk((0,) * len(view.shape), view.shape, self._put(self._take_turn(), tensor))
        self._entries[join_key(path)] = Entry(path, view.storage.dtype, view.shape, (chunk,))

    def add_object(self, path: KeyPath, value: Any) -> None:
        """Add a value as a pickle, whatever it is."""
        self._entries[join_key(path)] = Entry(path, chunks=(Chunk((), (), self._put(self._take_turn(), value)),))

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
            FileLayout(self._prefix + name, partial(self._pieces, counter, rank))
            for counter, ends in self._ends.items()
            for rank, name in enumerate(self._names(counter))
            if ends[rank] or not counter
        ]
        return [*files, lay_out_metadata(self._prefix + METADATA, self._entries)]

    def _pieces(self, counter: int, rank: int) -> Iterator[Piece]:
        at = 0
        for blob in self._blobs[counter]:
            if blob.first <= rank < blob.first + blob.count:
                yield from blob.placed(rank, at)
                at += blob.num_bytes

    def _take_turn(self) -> int:
        self._next += 1
        return (self._next - 1) % self._ranks

    def _put(self, rank: int, tree: Any) -> Blob:
        return self._put_pieces(rank, lay_out_torch_blob(_file(rank, self.counter), tree))

    def _put_pieces(self, rank: int, pieces: Pieces) -> Blob:
        blob = _Blob(rank, 1, pieces, sum(piece.num_bytes for piece in pieces))
        [start] = self._append(blob)
        return Blob(_file(rank, self.counter), start, start + blob.num_bytes)

    def _append(self, blob: _Blob) -> array[int]:
        """Return where the blob begins in the file of each of its ranks."""
        ends = self._ends.setdefault(self.counter, array("q", (0,)) * self._ranks)
        self._blobs.setdefault(self.counter, []).append(blob)
        own = slice(blob.first, blob.first + blob.count)
        starts = ends[own]
        ends[own] = array("q", [start + blob.num_bytes for start in starts])
        return starts


def _file(rank: int, counter: int) -> str:
    return f"__{rank}_{counter}.distcp"


def join_key(path: KeyPath) -> str:
    return ".".join(map(str, path))
