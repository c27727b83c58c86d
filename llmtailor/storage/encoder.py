"""Making the frames of masters that are compressed differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from llmtailor.model.dtypes import F24
from llmtailor.storage import casts
from llmtailor.storage.checksums import crc32
from llmtailor.storage.frames import (
    BLOCK,
    CRC,
    ELEMENTS,
    HEAD,
    LANES,
    LENGTHS,
    MAX_CLASSES,
    SAMPLED,
    choose,
    room_for,
    widths_of,
)


def packer() -> Callable[..., int] | None:
    """Return what numba compiles, if it is installed; the first call takes some seconds. numpy takes tens of times as
    long."""
    if casts.loops() is None:
        return None
    from llmtailor.storage import compiled_frames

    found: Callable[..., int] = compiled_frames.pack
    return found


def pack_frame(values: npt.NDArray[Any], older: memoryview, room: memoryview) -> int:
    """Fill ``room``, which has at least `frames.room_for` bytes, with the frame of fp32 elements, at most
    `frames.ELEMENTS`, given those of the other save as ``F24``. Return the bytes of the frame."""
    numel, data = len(values), np.frombuffer(older, np.uint8)
    fits = len(data) == 3 * numel and len(room) >= room_for(numel) and numel <= ELEMENTS
    assert fits, "compiled loops check no bounds"
    if rest := -numel % BLOCK:
        values, data = np.pad(values, (0, rest)), np.pad(data, (0, 3 * rest))
    content = np.frombuffer(room, np.uint8)[HEAD.size :]
    if (pack := packer()) is not None:
        size, num_bits = divmod(pack(values.view("<u4"), data, content), 4)
    else:
        newest = casts.widen(casts.pack(values, F24).data, F24)
        made, num_bits = _pack(newest.view("<u4"), casts.widen(data.data, F24).view("<u4"))
        size = len(made)
        content[:size] = np.frombuffer(made, np.uint8)
    end = HEAD.size + size
    HEAD.pack_into(room, 0, end + CRC.size, numel, num_bits)
    CRC.pack_into(room, end, crc32(room[:end]))
    return end + CRC.size


def _pack(newest: npt.NDArray[Any], older: npt.NDArray[Any]) -> tuple[bytes, int]:
    """Return a frame of whole blocks without its head and checksum, and the bits of the number of a class."""
    off = newest - older
    codes = ((off << np.uint32(1)) ^ (off.view("<i4") >> 31).view("<u4")) >> np.uint32(8)
    lengths = _lengths(codes)
    tops = np.zeros(MAX_CLASSES, np.uint8)
    num_bits = 0
    if codes.any():
        sample = lengths.reshape(-1, BLOCK)[::SAMPLED]
        num_bits = choose(np.bincount(sample.reshape(-1), minlength=LENGTHS), tops)
    made = _in_classes(codes, lengths, tops, num_bits)
    if len(made) > 3 * len(codes) + (1 << num_bits):
        tops[:] = LENGTHS - 1
        return _in_classes(codes, lengths, tops, 0), 0
    return made, num_bits


def _lengths(codes: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    exponents = codes.astype("<f4").view("<u4") >> np.uint32(23)  # exact: they are below 2 ** 24
    lengths: npt.NDArray[np.uint8] = (np.maximum(exponents, 126) - 126).astype(np.uint8)
    return lengths


def _in_classes(
    codes: npt.NDArray[Any], lengths: npt.NDArray[np.uint8], tops: npt.NDArray[np.uint8], num_bits: int
) -> bytes:
    class_of = np.searchsorted(tops[: 1 << num_bits], np.arange(LENGTHS)).astype(np.uint8)
    number = class_of[lengths]
    widths = widths_of(tops)[class_of].astype("<u8")[lengths]
    fields = codes.astype("<u8") & ((np.uint64(1) << widths) - np.uint64(1))
    fields, widths = (one.reshape(-1, 4, LANES).transpose(0, 2, 1).reshape(-1) for one in (fields, widths))
    fields, widths = fields[::2] | fields[1::2] << widths[::2], widths[::2] + widths[1::2]
    ends = np.cumsum(widths)
    begins = ends - widths
    at = (begins >> np.uint64(6)).astype(np.int64)
    lasts = np.append(np.flatnonzero(np.diff(at)), len(at) - 1)  # of those that begin in each word; in all, some do
    words = np.zeros(len(lasts) + 1, "<u8")
    words[:-1] = np.bitwise_or.reduceat(fields << (begins & np.uint64(63)), np.append(0, lasts[:-1] + 1))
    free = np.uint64(63) - (begins[lasts] & np.uint64(63))
    words[1:] |= fields[lasts] >> free >> np.uint64(1)
    stream = words.tobytes()[: -(-int(ends[-1]) // 8)]
    planes = [np.packbits(number >> bit & 1, bitorder="little").tobytes() for bit in range(num_bits)]
    return b"".join([tops[: 1 << num_bits].tobytes(), *planes, stream])
