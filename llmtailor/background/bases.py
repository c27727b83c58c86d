"""What masters of later saves are stored as differences from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llmtailor.background.packing import LiveTensors
from llmtailor.codes import Code
from llmtailor.copying.streams import Store, huge_pages
from llmtailor.errors import Problem, StorageError
from llmtailor.live.tensors import bytes_of
from llmtailor.model.dtypes import F24, ITEMSIZE, Q8, Q8_ROOT
from llmtailor.storage import casts

_LARGE = 4 << 20
"""Bytes of two huge pages"""
NOT_ROUNDABLE = Problem(
    "saving",
    "a moment has an element that is infinite, not a number, or a negative second moment, which 8 bits can't hold",
    "the next save holds moments exactly",
    Code.NOT_ROUNDABLE,
)


class DeltaBases:
    """What masters are differences from: their `dtypes.F24` bytes as of the newest save that held them with their
    moments, in host memory.

    1) `of` and `coming`, when a save is laid out. 2) `BaseRecordingStore` fills what `coming` has returned.
    3) `record_outcome`, before the next save is laid out.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], torch.Tensor] = {}
        self._coming: dict[tuple[str, int], torch.Tensor] = {}

    def of(self, name: str, begin: int, numel: int) -> torch.Tensor | None:
        found = self._kept.get((name, begin))
        return found if found is not None and found.numel() == numel * ITEMSIZE[F24] else None

    def coming(self, name: str, begin: int, numel: int) -> torch.Tensor:
        """Return room for those of the save that is being made."""
        size = numel * ITEMSIZE[F24]
        # read at each save: with small pages, looking these up takes a while
        room = (
            torch.frombuffer(huge_pages(size), dtype=torch.uint8)
            if size >= _LARGE
            else torch.empty(size, dtype=torch.uint8)
        )
        self._coming[name, begin] = room
        return room

    def record_outcome(self, is_published: bool) -> None:
        """Keep those of that save, or drop them if it has failed."""
        self._kept |= self._coming if is_published else {}
        self._coming = {}


@dataclass(frozen=True, slots=True)
class BaseRecordingStore:
    """The tensors of a save, as they are read from another store; keeps those that later saves differ from.

    Raises StorageError for moments that 8 bits can't hold.
    """

    live: LiveTensors
    store: Store

    def read(self, path: str, start: int, stop: int) -> memoryview:
        data, live = self.store.read(path, start, stop), self.live.tensors[int(path)]
        if live.packed in (Q8, Q8_ROOT) and casts.has_lost_blocks(data, live.packed, start):
            raise StorageError(NOT_ROUNDABLE)
        if live.packed == F24 and live.base is not None:
            bytes_of(live.base)[start : start + len(data)] = data
        return data
