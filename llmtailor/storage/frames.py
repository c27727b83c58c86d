"""Masters of 24 bits as differences from those of an earlier save, ``D24``.

A frame holds up to 131,072 elements. The code of an element is the difference of its ``F24`` pattern from that of the
same element in the other save, modulo 2 ** 24, with the sign in the lowest bit (zigzag). The lowest bytes of all codes
are one plane, the middle and the highest bytes are two more: each by itself compresses better than all together::

    4 bytes         the number of elements
    3 x 4 bytes     the compressed bytes of each plane
    3 planes        the lowest bytes first; each a zstd frame that states the size of its content
    4 bytes         CRC-32 of the above

All integers are little-endian.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from llmtailor.model.dtypes import BLOCKS, D24, F24
from llmtailor.storage import casts, rounding, zstd
from llmtailor.storage.checksums import crc32

ELEMENTS: Final = BLOCKS[D24].elements
_HEAD, _CRC = struct.Struct("<4I"), struct.Struct("<I")


def encode(values: npt.NDArray[Any], older: memoryview) -> bytes:
    """Return the frame of fp32 elements, at most `ELEMENTS`, given those of the other save as ``F24``."""
    newest, before = (casts.widen(data, F24).view("<u4") for data in (rounding.pack(values, F24).data, older))
    octets = casts.subtract_codes(newest, before).view(np.uint8).reshape(-1, 4)
    planes = [zstd.compress(np.ascontiguousarray(octets[:, at])) for at in range(3)]
    frame = b"".join([_HEAD.pack(len(values), *map(len, planes)), *planes])
    return frame + _CRC.pack(crc32(frame))


def decode(frame: bytes | memoryview) -> npt.NDArray[Any]:
    """Return the codes that a frame holds, as `casts.add_codes` takes them. Raises ValueError for a damaged one."""
    view = memoryview(frame)
    if len(view) < _HEAD.size + _CRC.size or crc32(view[: -_CRC.size]) != _CRC.unpack(view[-_CRC.size :])[0]:
        raise ValueError("its checksum is wrong")
    numel, *sizes = _HEAD.unpack(view[: _HEAD.size])
    if not 0 < numel <= ELEMENTS or _HEAD.size + sum(sizes) + _CRC.size != len(view):
        raise ValueError(f"it states {numel} elements in {sum(sizes)} bytes")
    octets, at = np.zeros((numel, 4), np.uint8), _HEAD.size
    for plane, size in enumerate(sizes):
        octets[:, plane] = np.frombuffer(zstd.decompress(view[at : at + size], numel), np.uint8)
        at += size
    return octets.view("<u4").reshape(-1)
