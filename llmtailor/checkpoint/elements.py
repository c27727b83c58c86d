"""Reads elements of states from the files of a checkpoint, also of tensors that are cut along columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llmtailor.checkpoint.index import TensorEntry
from llmtailor.checkpoint.placement import Band, Grid, arrange
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


def read_elements(files: OpenFiles, held: TensorEntry, begin: int, end: int, room: memoryview) -> None:
    """Fill ``room`` with elements ``begin``..``end`` of a state; what no file holds is zero.

    Raises Changed, EndsEarly or another OSError, whose ``filename`` is the path in the checkpoint, and LookupError for
    a state that the checkpoint lacks.
    """
    itemsize, path = ITEMSIZE[held.dtype], ""

    def read(band: Band, start: int, some: memoryview) -> None:
        nonlocal path
        path = band.path
        files.read_into(path, start, some)

    if held.is_all_zero:
        room[:] = bytes(len(room))
    try:
        for have in arrange(held.place, begin, end):
            part = room[(have.begin - begin) * itemsize : (have.end - begin) * itemsize]
            if isinstance(have, Grid):
                gather(have.bands, have.rows, part, read)
            else:
                path = have.extent.path
                files.read_elements(*have.extent, have.encoding, part)
    except OSError as error:
        error.filename = path
        raise
