"""Masters of 24 bits as compressed differences from those of an earlier save, ``D24``.

Each block of elements is a frame of zstd. It holds the difference of each element's ``F24`` pattern, numbered in the
order of the values, from that of the same element in the other save: modulo 2 ** 24, with the sign in the lowest bit
(zigzag), first the low bytes of all elements, then the middle ones, then the high ones. -0.0 has a number of its own,
so that every pattern comes back, also that of a NaN.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from llmtailor.model.roles import BLOCKS, D24, F24
from llmtailor.storage.casts import loops, widen

ELEMENTS: Final = BLOCKS[D24].elements
LEVEL: Final = 1
"""Of zstd: higher ones take more time, for at most one percent fewer bytes"""
_ORDER: Final = np.uint32(0x7FFFFF00)
"""Bits of an fp32 pattern that are turned over in negative numbers; then patterns are in the order of the values"""


class Compressor:
    """Makes frames, for one thread."""

    def __init__(self) -> None:
        import zstandard

        self._zstd = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)

    def frame(self, newest: memoryview, older: memoryview) -> bytes:
        """Return the frame of at most `ELEMENTS` elements, given as ``F24`` of both saves."""
        planes = np.empty((3, len(newest) // 3), np.uint8)
        now, before = (np.frombuffer(one, np.uint8).reshape(-1, 3) for one in (newest, older))
        if (compiled := loops()) is not None:
            compiled.to_planes(now, before, planes)
        else:
            _to_planes(now, before, planes)
        made: bytes = self._zstd.compress(planes.data)
        return made


def _to_planes(newest: npt.NDArray[Any], older: npt.NDArray[Any], planes: npt.NDArray[Any]) -> None:
    codes = _numbers(widen(newest.tobytes(), F24).view("<u4"))
    codes -= _numbers(widen(older.tobytes(), F24).view("<u4"))
    sign = (codes.view("<i4") >> 31).view("<u4")
    codes <<= np.uint32(1)
    codes ^= sign
    for at, plane in enumerate(planes):
        plane[:] = (codes >> np.uint32(8 * (at + 1))).astype(np.uint8)


def _numbers(bits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the numbers of patterns in the order of the values, or the patterns of numbers, times 256."""
    numbers: npt.NDArray[Any] = bits ^ (bits >> np.uint32(31)) * _ORDER
    return numbers


def codes_of(frame: bytes | memoryview) -> npt.NDArray[Any]:
    """Return the differences that a frame holds, as `add` takes them. Raises ValueError for a damaged one."""
    import zstandard

    try:
        num_bytes = zstandard.frame_content_size(frame)  # as the file says: nothing larger may be allocated
        if num_bytes % 3 or not 0 < num_bytes <= 3 * ELEMENTS:
            raise ValueError(f"it states {num_bytes} bytes of content")
        content = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"{error}") from error
    codes = np.zeros((num_bytes // 3, 4), np.uint8)
    codes[:, :3] = np.frombuffer(content, np.uint8).reshape(3, -1).T
    return codes.reshape(-1).view("<u4")


def add(codes: npt.NDArray[Any], older: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the patterns of fp32 masters, given the differences and the patterns of the other save."""
    off = codes >> np.uint32(1)
    off ^= -(codes & np.uint32(1))
    off <<= np.uint32(8)
    off += _numbers(older & np.uint32(0xFFFFFF00))
    return _numbers(off)
