"""Layout of one folder of torch.distributed.checkpoint, as `dcp_folder` reads it.

As torch saves under FSDP2, a tensor is cut along dimension 0 into ``ceil(rows / ranks)`` rows per rank, so that the
last ranks may have fewer rows or none; what all ranks have alike is saved once, spread over the ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from llmtailor.checkpoint.index import DcpEntry
from llmtailor.checkpoint.layout import Copy, FileLayout, Piece
from llmtailor.checkpoint.placement import Box, Extent
from llmtailor.containers.dcp import METADATA, Blob, Chunk, Entry, KeyPath, cut_rows, lay_out_metadata
from llmtailor.containers.torch_file import lay_out_torch_blob
from llmtailor.containers.unpickle import as_tensor, make_tensor, state_tensor
from llmtailor.model.roles import State

Pieces = tuple[Piece, ...]


class Finder(Protocol):
    """Finds tensors that are in linked files."""

    def find(
        self, folder: str, name: str, state: State, dtype: str, shape: tuple[int, ...]
    ) -> tuple[Chunk, ...] | None: ...


class FolderBuilder:
    """A DCP folder being laid out; ``folder`` is relative to the checkpoint, ``""`` for its root."""

    def __init__(self, folder: str, ranks: int, links: Finder | None = None):
        self._folder, self._links = folder, links
        self._prefix = f"{folder}/" if folder else ""
        self.counter = 0
        """Ends the names of the files that are written to"""
        self._ranks = ranks
        self._pieces: dict[str, list[Piece]] = {_file(rank, 0): [] for rank in range(ranks)}
        self._ends: Counter[str] = Counter()
        self._next = 0
        self._entries: dict[str, Entry] = {}

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
        chunks, row = [], math.prod(shape[1:])
        for rank, (low, high) in enumerate(cut_rows(shape[0], self._ranks)):
            if low < high:
                sizes = (high - low, *shape[1:])
                blob = self._put(rank, state_tensor(state, dtype, sizes, low * row))
                chunks.append(Chunk((low, *[0] * (len(shape) - 1)), sizes, blob))
        self._entries[join_key(path)] = Entry(path, dtype, shape, tuple(chunks))

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
        blob = self._append(_file(self._take_turn(), self.counter), [Copy(extent)])
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
        """Return the layouts of the folder's files."""
        files = [FileLayout(self._prefix + path, tuple(pieces)) for path, pieces in self._pieces.items()]
        return [*files, lay_out_metadata(self._prefix + METADATA, self._entries)]

    def _take_turn(self) -> int:
        self._next += 1
        return (self._next - 1) % self._ranks

    def _put(self, rank: int, tree: Any) -> Blob:
        path = _file(rank, self.counter)
        return self._append(path, lay_out_torch_blob(path, tree, self._ends[path]))

    def _append(self, path: str, pieces: Sequence[Piece]) -> Blob:
        start = self._ends[path]
        self._pieces.setdefault(path, []).extend(pieces)
        self._ends[path] += sum(piece.num_bytes for piece in pieces)
        return Blob(path, start, self._ends[path])


def _file(rank: int, counter: int) -> str:
    return f"__{rank}_{counter}.distcp"


def join_key(path: KeyPath) -> str:
    return ".".join(map(str, path))
