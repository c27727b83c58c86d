"""Reads elements of states from the files of a checkpoint, also of tensors that are cut along columns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from llmtailor.checkpoint.index import TensorEntry
from llmtailor.checkpoint.placement import Band, Grid, StoredRange, arrange
from llmtailor.model.dtypes import ITEMSIZE
from llmtailor.storage.local import OpenFiles

_MAX_READ_THROUGH, _MAX_STRIDE = 4, 512 << 10
"""How many times the bytes that are needed are read at most, where one read takes less time than one for each row; and
the bytes of a row up to which it does"""


def gather(bands: Sequence[Band], rows: int, room: memoryview, read: Callable[[Band, int, memoryview], None]) -> None:
    """Fill ``room`` with rows of a grid, whose bands lie side by side. ``read`` fills memory with bytes of a band's
    file, from an offset on."""
    import numpy as np  # which takes a while

    cells, left = np.frombuffer(room, np.uint8).reshape(rows, -1), 0
    for band in bands:
        _, start, width, stride = band
        own = cells[:, left : left + width]
        if stride <= _MAX_READ_THROUGH * width and stride < _MAX_STRIDE:
            column = np.empty(rows * stride, np.uint8)
            read(band, start, column.data[: (rows - 1) * stride + width])
            own[:] = column.reshape(rows, stride)[:, :width]
        else:
            for row in range(rows):
                read(band, start + row * stride, own[row].data)
        left += width


class ReadBytes(Protocol):
    def __call__(self, path: str, start: int, room: memoryview, *, is_exact: bool) -> None:
        """Fill ``room`` with bytes of a file from ``start`` on. ``is_exact``: whether no other read takes any of them;
        a frame may be read again, and in the gaps of a column lie other elements."""


def read_stored(stored: StoredRange | Grid, room: memoryview, read: ReadBytes) -> None:
    """Fill ``room`` with all elements of a range or a grid."""
    if isinstance(stored, Grid):

        def read_band(band: Band, start: int, cells: memoryview) -> None:
            read(band.path, start, cells, is_exact=band.width in (band.stride, len(cells)))

        gather(stored.bands, stored.rows, room, read_band)
    elif stored.encoding is None:
        read(stored.extent.path, stored.extent.start, room, is_exact=True)
    else:
        from llmtailor.storage.decoder import Decoder  # numpy takes a while

        data = bytearray(stored.extent.num_bytes)
        read(stored.extent.path, stored.extent.start, memoryview(data), is_exact=False)
        room[:] = Decoder(stored.encoding).feed(data)


class StateReader:
    """Reads elements of a checkpoint's states, in any thread: each has a buffer of its own.

    ``on_progress`` gets the bytes of each read.
    """

    def __init__(self, files: OpenFiles, on_progress: Callable[[int], None] = lambda num_bytes: None) -> None:
        self.files, self._on_progress, self._own = files, on_progress, threading.local()

    def read(self, entry: TensorEntry, *runs: tuple[int, int]) -> memoryview:
        """Return elements of a state, each run from its first to just before its last; what no file holds is zero.

        They are valid until this thread's next call. Raises Changed, EndsEarly or another OSError, whose ``filename``
        is the path in the checkpoint, and LookupError for a state that the checkpoint lacks.
        """
        itemsize, at = ITEMSIZE[entry.dtype], 0
        data = self._buffer(sum(end - begin for begin, end in runs) * itemsize)
        if entry.is_all_zero:
            data[:] = bytes(len(data))
        for begin, end in runs:
            for stored in arrange(entry.place, begin, end):
                low, high = (at + (element - begin) * itemsize for element in (stored.begin, stored.end))
                read_stored(stored, data[low:high], self._read_bytes)
            at += (end - begin) * itemsize
        self._on_progress(len(data))
        return data

    def _read_bytes(self, path: str, start: int, room: memoryview, *, is_exact: bool) -> None:
        try:
            self.files.read_into(path, start, room)
        except OSError as error:
            error.filename = path
            raise

    def _buffer(self, num_bytes: int) -> memoryview:
        """Return this thread's buffer: allocating one for every read would take longer than reading."""
        if len(getattr(self._own, "buffer", b"")) < num_bytes:
            self._own.buffer = bytearray(num_bytes)
        return memoryview(self._own.buffer)[:num_bytes]
