"""Masters of 24 bits as differences from those of an earlier save, ``D24``.

A frame holds up to 131,072 elements. The code of an element is the difference of its ``F24`` pattern from that of the
same element in the other save, modulo 2 ** 24, with the sign in the lowest bit (zigzag). The last block of 64 codes is
filled up with zeros. Codes are in classes by their lengths in bits, so that most take few bits::

    4 bytes                 the bytes of the frame
    4 bytes                 the number of elements
    1 byte                  n: the bits of the number of a class, 0 to 3
    2 ** n bytes            the greatest length of a code of each class, ascending
    n x 8 bytes per block   bits 0 to n - 1 of the numbers of the codes' classes: first bit 0 of all codes, then bit 1
    the codes               each with as many bits as its class has; if that is one length only, without the highest
                            bit, which is 1; in each block in the order 0, 16, 32, 48, 1, 17, 33, 49, ..., 63
    4 bytes                 CRC-32 of the above

All integers are little-endian, and what comes first has the lowest bits of a byte. The classes are chosen by a sample
of the codes, so that they take the fewest bits.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from llmtailor.model.dtypes import BLOCKS, D24
from llmtailor.storage.checksums import crc32

ELEMENTS: Final = BLOCKS[D24].elements
BLOCK: Final = 64
LENGTHS: Final = 25
"""Of codes: 0 to 24 bits"""
SAMPLED: Final = 32
"""Of so many blocks, one is sampled."""
MAX_CLASSES: Final = 8

HEAD, CRC = struct.Struct("<IIB"), struct.Struct("<I")
LANES = 16
"""Codes of a block that are beside each other in the vectors that compute them"""


def room_for(numel: int) -> int:
    """Return the bytes that a frame is made in, before one of more than 24 bits for each element is made again."""
    return 27 * (numel + BLOCK) // 8 + 64


def lengths_in(data: memoryview) -> Iterator[tuple[int, int]]:
    """Yield the bytes and the number of elements of each of the frames that follow each other."""
    at = 0
    while at < len(data):
        length, numel, _ = HEAD.unpack(data[at:][: HEAD.size])
        yield length, numel
        at += length


def choose(counts: npt.NDArray[Any], tops: npt.NDArray[Any]) -> int:
    """Fill ``tops`` with the greatest length of each class, given how many codes of each length a sample has; return
    the bits of the number of a class.

    `storage.compiled_frames` compiles it; numba's cache notices changes of that module only.
    """
    longest = 0
    below = np.zeros(LENGTHS + 1, np.int64)  # how many codes are shorter
    for length in range(LENGTHS):
        below[length + 1] = below[length] + counts[length]
        if counts[length] > 0:
            longest = length
    far = below[LENGTHS] * 64
    bits = np.full((MAX_CLASSES + 1, LENGTHS + 1), far, np.int64)  # of the codes below a length, in so many classes
    begins = np.zeros((MAX_CLASSES + 1, LENGTHS + 1), np.int64)
    bits[0, 0] = 0
    for classes in range(1, MAX_CLASSES + 1):
        for end in range(1, longest + 2):
            for begin in range(end):
                width = end - 1 - (begin == end - 1 and begin > 0)
                found = bits[classes - 1, begin] + width * (below[end] - below[begin])
                if found < bits[classes, end]:
                    bits[classes, end] = found
                    begins[classes, end] = begin
    last = longest < LENGTHS - 1  # a class of its own for codes that are longer than all of the sample
    fewest, chosen, num_bits = below[LENGTHS] * (LENGTHS - 1), 0, 0
    for more in range(1, 4):
        for classes in range(1, (1 << more) + 1 - last):
            found = bits[classes, longest + 1] + more * below[LENGTHS]
            if found < fewest:
                fewest, chosen, num_bits = found, classes, more
    tops[:] = LENGTHS - 1
    end = longest + 1
    for at in range(chosen - 1, -1, -1):
        tops[at] = end - 1
        end = begins[at + 1, end]
    return num_bits


def widths_of(tops: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return the bits that a code of each class takes."""
    before = np.concatenate([[-1], tops[:-1].astype(np.int64)])
    widths: npt.NDArray[np.uint8] = tops - ((before == tops.astype(np.int64) - 1) & (tops > 0)).astype(np.uint8)
    return widths


def decode(frame: bytes | memoryview) -> npt.NDArray[Any]:
    """Return the codes that a frame holds, as `casts.add_codes` takes them. Raises ValueError for a damaged one."""
    view = memoryview(frame)
    if len(view) < HEAD.size + 1 + CRC.size or crc32(view[: -CRC.size]) != CRC.unpack(view[-CRC.size :])[0]:
        raise ValueError("its checksum is wrong")
    length, numel, num_bits = HEAD.unpack(view[: HEAD.size])
    blocks = -(-numel // BLOCK)
    tops = np.frombuffer(view[HEAD.size : -CRC.size][: 1 << min(num_bits, 3)], np.uint8)
    planes = HEAD.size + len(tops)
    stream = planes + 8 * num_bits * blocks
    # nothing larger than a frame may be allocated
    if (
        not 0 < numel <= ELEMENTS
        or len(tops) != 1 << num_bits
        or tops.max() >= LENGTHS
        or stream > len(view) - 4
        or length != len(view)
    ):
        raise ValueError(f"it states {numel} elements")
    number = np.zeros(blocks * BLOCK, np.uint8)
    for bit in range(num_bits):
        plane = np.frombuffer(view[planes + 8 * bit * blocks :][: 8 * blocks], np.uint8)
        number |= np.unpackbits(plane, bitorder="little") << np.uint8(bit)
    number = number.reshape(-1, 4, LANES).transpose(0, 2, 1).reshape(-1)
    widths = widths_of(tops)
    taken = widths[number].astype(np.uint32)
    ends = np.cumsum(taken, dtype=np.uint32)
    begins = ends - taken
    data = np.frombuffer(bytes(view[stream : -CRC.size]) + bytes(4), np.uint8)
    if -(-int(ends[-1]) // 8) != len(data) - 4:
        raise ValueError(f"it does not have the bits of {numel} elements")
    words = np.ndarray(len(data) - 3, "<u4", data, 0, 1)[begins >> np.uint32(3)]
    codes = words >> (begins & np.uint32(7))
    codes &= ((np.uint32(1) << widths) - np.uint32(1))[number]
    codes |= np.where(widths < tops, np.uint32(1) << widths, np.uint32(0))[number]
    found: npt.NDArray[Any] = codes.reshape(-1, LANES, 4).transpose(0, 2, 1).reshape(-1)[:numel]
    return found
