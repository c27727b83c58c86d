"""Layout of one folder of torch.distributed.checkpoint, as `dcp_folder` reads it.

As torch saves under FSDP2, a tensor is cut along dimension 0 into ``ceil(rows / ranks)`` rows per rank, so that the
last ranks may have fewer rows or none; or into the boxes that the base has, dealt to the ranks in their order. What all
ranks have alike is saved once, spread over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Protocol

from llmtailor.checkpoint.index import DcpEntry
from llmtailor.checkpoint.layout import Copy, FileLayout, Piece, ShardSlot, Slot
from llmtailor.checkpoint.placement import Box, Boxes, Extent, Placement
from llmtailor.checkpoint.tensor_parallel import cut_as
from llmtailor.containers.dcp import METADATA, Blob, Chunk, Entry, KeyPath, cut_rows, lay_out_metadata
from llmtailor.containers.torch_file import lay_out_torch_blob, move_torch_blob
from llmtailor.containers.unpickle import as_tensor, make_tensor, state_tensor
from llmtailor.model.roles import MASTER, State

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
        self._pieces: list[list[Piece]] = [[] for _ in range(ranks)]
        self._ends = [0] * ranks
        self._next = 0
        self._entries: dict[str, Entry] = {}

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
        """Add a state, cut along dimension 0 unless it is in a linked file; ``name`` is that of a weight.

        If the place ``like`` is a grid of boxes, as of tensor parallelism, it is cut into the same.
        """
        linked = self._links.find(self._folder, name, state, dtype, shape) if self._links is not None else None
        if linked is not None:
            self._entries[join_key(path)] = Entry(path, dtype, shape, linked)
            return
        if not is_cut or not math.prod(shape) or not shape:
            self.add(path, state_tensor(state, dtype, shape))
            return
        chunks, row = [], math.prod(shape[1:])
        if isinstance(like, Boxes) and like.shape == shape:
            cut, ranks = cut_as(like), len(self._ends)
            for number, box in enumerate(like.boxes):
                slot = ShardSlot(state, dtype, 0, math.prod(box.sizes), cut, number)
                blob = self._put_slot(number * ranks // len(like.cells), box.sizes, slot)
                chunks.append(Chunk(box.offsets, box.sizes, blob))
            self._entries[join_key(path)] = Entry(path, dtype, shape, tuple(chunks))
            return
        for rank, (low, high) in enumerate(cut_rows(shape[0], len(self._ends))):
            if low < high:
                sizes = (high - low, *shape[1:])
                blob = self._put_slot(rank, sizes, Slot(state, dtype, low * row, high * row))
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
        rank = self._take_turn()
        start, self._ends[rank] = self._ends[rank], self._ends[rank] + extent.num_bytes
        self._pieces[rank].append(Copy(extent))
        self._entries[join_key(path)] = Entry(path, chunks=(Chunk((), (), Blob(_file(rank), start, self._ends[rank])),))

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
        files = [FileLayout(self._prefix + _file(rank), tuple(pieces)) for rank, pieces in enumerate(self._pieces)]
        return [*files, lay_out_metadata(self._prefix + METADATA, self._entries)]

    def _take_turn(self) -> int:
        self._next += 1
        return (self._next - 1) % len(self._ends)

    def _put(self, rank: int, tree: Any) -> Blob:
        return self._place(rank, lay_out_torch_blob(_file(rank), tree, self._ends[rank]))

    def _put_slot(self, rank: int, sizes: tuple[int, ...], slot: Slot | ShardSlot) -> Blob:
        """Append the blob of a tensor of these sizes."""
        around = _blob_around_slot(slot.dtype, sizes)
        return self._place(
            rank, move_torch_blob([slot if type(one) is Slot else one for one in around], self._ends[rank])
        )

    def _place(self, rank: int, pieces: list[Piece]) -> Blob:
        start = self._ends[rank]
        self._pieces[rank] += pieces
        self._ends[rank] = start + sum(piece.num_bytes for piece in pieces)
        return Blob(_file(rank), start, self._ends[rank])


@lru_cache(256)
def _blob_around_slot(dtype: str, sizes: tuple[int, ...]) -> list[Piece]:
    """Return the blob of a tensor, of which a thousand ranks have hundreds of each size, with any slot in it."""
    return lay_out_torch_blob("", state_tensor(State("", MASTER), dtype, sizes), 0)


def _file(rank: int) -> str:
    return f"__{rank}_0.distcp"


def join_key(path: KeyPath) -> str:
    return ".".join(map(str, path))
