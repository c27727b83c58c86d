"""Lays out one DCP folder: blobs in the files of the ranks, and the ``.metadata`` that says where they are.

As torch saves under FSDP2: a tensor is cut along dimension 0 into ``ceil(rows / ranks)`` rows per rank, so that the
last ranks may have fewer rows or none; what all ranks have alike is saved once, spread over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llmtailor.checkpoint.index import DcpEntry
from llmtailor.checkpoint.layout import Copy, FileLayout, Piece
from llmtailor.containers.dcp import METADATA, Blob, Chunk, Entry, KeyPath, lay_out_metadata
from llmtailor.containers.pickle_nodes import make_tensor
from llmtailor.containers.torch_zip import lay_out_torch_blob
from llmtailor.model.states import ITEMSIZE

Content = Callable[[int, int], tuple[Piece, ...]]
"""What elements ``begin``..``end`` of a tensor consist of"""


def cut_rows(rows: int, ranks: int) -> list[tuple[int, int]]:
    """Return the rows of each rank, as FSDP2 cuts them (``torch.chunk``); the last ones may be empty."""
    size = -(-rows // ranks)
    return [(min(rank * size, rows), min((rank + 1) * size, rows)) for rank in range(ranks)]


class FolderBuilder:
    """A DCP folder being laid out; ``folder`` is relative to the checkpoint, ``""`` for its root."""

    def __init__(self, folder: str, ranks: int):
        self._prefix = f"{folder}/" if folder else ""
        self._pieces: list[list[Piece]] = [[] for _ in range(ranks)]
        self._ends = [0] * ranks
        self._next = 0
        self._entries: dict[str, Entry] = {}

    def add_tensor(self, path: KeyPath, dtype: str, shape: tuple[int, ...], content: Content, *, is_cut: bool) -> None:
        """Add a tensor, cut along dimension 0 or whole on one rank."""
        numel = math.prod(shape)
        chunks = []
        if not (is_cut and shape and numel):
            tree = make_tensor(dtype, shape, content(0, numel) if numel else ())
            chunks.append(Chunk((0,) * len(shape), shape, self._put(self._take_turn(), tree)))
        else:
            row = numel // shape[0]
            for rank, (low, high) in enumerate(cut_rows(shape[0], len(self._ends))):
                if low < high:
                    sizes = (high - low, *shape[1:])
                    blob = self._put(rank, make_tensor(dtype, sizes, content(low * row, high * row)))
                    chunks.append(Chunk((low, *[0] * (len(shape) - 1)), sizes, blob))
        self._entries[_key(path)] = Entry(path, dtype, shape, tuple(chunks))

    def add_object(self, path: KeyPath, value: Any) -> None:
        """Add a value that is not a tensor."""
        blob = self._put(self._take_turn(), value)
        self._entries[_key(path)] = Entry(path, chunks=(Chunk((), (), blob),))

    def add_entry(self, entry: DcpEntry) -> None:
        """Add a value of the base, its tensors cut as they are."""
        if not entry.is_tensor:
            self.add_object(entry.path, entry.content)
            return
        dtype, shape, boxes = entry.content
        chunks = []
        for offsets, sizes, extent in boxes:
            whole = (Copy(extent),) if math.prod(sizes) * ITEMSIZE[dtype] else ()
            chunks.append(Chunk(offsets, sizes, self._put(self._take_turn(), make_tensor(dtype, sizes, whole))))
        self._entries[_key(entry.path)] = Entry(entry.path, dtype, shape, tuple(chunks))

    def finish(self) -> list[FileLayout]:
        """Return the layouts of the folder's files."""
        files = [FileLayout(self._prefix + _file(rank), tuple(pieces)) for rank, pieces in enumerate(self._pieces)]
        return [*files, lay_out_metadata(self._prefix + METADATA, self._entries)]

    def _take_turn(self) -> int:
        self._next += 1
        return (self._next - 1) % len(self._ends)

    def _put(self, rank: int, tree: Any) -> Blob:
        start = self._ends[rank]
        pieces = lay_out_torch_blob(_file(rank), tree, start)
        self._pieces[rank] += pieces
        self._ends[rank] = start + sum(piece.num_bytes for piece in pieces)
        return Blob(_file(rank), start, self._ends[rank])


def _file(rank: int) -> str:
    return f"__{rank}_0.distcp"


def _key(path: KeyPath) -> str:
    return ".".join(map(str, path))
