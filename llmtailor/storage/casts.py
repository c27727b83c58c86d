"""Elementwise casts between floating-point dtypes, on raw little-endian bytes.

Rounding is to nearest, ties to even, as in torch, and so as in DeepSpeed when it rounds its fp32 masters.

Only ``F24``, the first 24 bits of fp32, is rounded to odd: the last of its bits is set if any of the bits left out is.
So a value is never on a tie, or on a value of bf16 or fp16, that the fp32 value was not on, and rounding it to these
dtypes gives what rounding the fp32 value gives (Boldo and Melquiond, 2008). The error is below a unit of its last bit.

``Q8`` are blocks of 128 elements: an fp32 unit, then a signed 8-bit code for each element, its multiple of
the unit, which is the largest magnitude / 127. ``Q8_ROOT``, for elements that are not negative, has unsigned codes of
their square roots, and the unit is the largest root / 255. There only a zero becomes 0, because an optimizer divides by
the root. A block with an infinite element, or one that is not a number, has no numbers afterwards: its unit is NaN, and
its codes are 0.

``D16`` are blocks of 32 elements. After a first byte of 1, each has 16 bits: the signed difference of its ``F24``
pattern, numbered in the order of the values, from that of the same element in an earlier save. If any difference does
not fit, the first byte is 0, and the block has its values rounded to bf16.

A NaN becomes 0x7FC0 in bf16, here and in ``D16``. torch's own casts, which save live tensors as bf16, give 0xFFFF on
some processors. In ``F24`` a NaN keeps its first 24 bits. `storage.rounding` makes these four encodings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from llmtailor.model.dtypes import BLOCKS, D16, D24, DTYPES, F24, PACKED, Q8_ROOT, numel_of
from llmtailor.storage import rounding

_DIFFERENCE: Final = 0x7F81
"""The upper half of a pattern, which is not a number, that stands for a difference from another save: the lower half"""


def cast(data: bytes | bytearray | memoryview, source: str, target: str, scale: float = 1.0) -> bytes:
    """Cast elements of dtype ``source`` to ``target``; both are safetensors names of floating-point dtypes.

    They are first multiplied by ``scale`` in fp64, so there is only one rounding.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # inf and NaN are values like any other
        wide = widen(data, source)
        if scale != 1:
            wide = wide.astype("<f8") * scale
        if target in PACKED:
            return rounding.pack(wide.astype("<f4", copy=False), target).tobytes()
        return _to_bfloat16(wide) if target == "BF16" else wide.astype(DTYPES[target].numpy).tobytes()


def roundings(
    data: bytes | bytearray | memoryview, source: str, target: str, between: Iterable[str] = ()
) -> Iterator[bytes | bytearray | memoryview]:
    """Yield what elements may have become in dtype ``target``: rounded once, then rounded to each of the dtypes
    ``between`` first."""
    yield data if source == target else cast(data, source, target)
    for dtype in between:
        if dtype != target:
            yield cast(cast(data, source, dtype), dtype, target)


def add(terms: Iterable[tuple[bytes | bytearray | memoryview, str, float]], target: str) -> bytes:
    """Return the weighted sum of equally many elements of each term (data, dtype, factor), as dtype ``target``.

    The sum is computed in fp64 in the order of the terms, rounded to fp32, then to ``target``. Raises ValueError
    without terms.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        scaled = (widen(data, dtype).astype("<f8") * factor for data, dtype, factor in terms)
        total = next(scaled, None)  # not a zero, which would turn a sum of -0.0 into 0.0
        if total is None:
            raise ValueError("a sum without terms")
        for one in scaled:
            total += one
        return cast(total.astype("<f4").tobytes(), "F32", target)


def refine(
    newest: bytes | bytearray | memoryview,
    newest_dtype: str,
    older: bytes | bytearray | memoryview,
    older_dtype: str,
    target: str,
) -> bytes:
    """Return elements that round to the ``newest`` bf16 values, as dtype ``target``.

    Each is the ``older``, more exact element, moved into the range that rounds to the newest value if it rounded to a
    neighbor of that; else the newest value itself. Where both are of one value of bf16, that is the older element.
    Where `D16` or `D24`, the ``newest_dtype``, has a difference from the older element, it is the exact sum; these are
    given as a `decoder.Decoder` returns them.
    """
    if newest_dtype == D24:
        sums = add_codes(np.frombuffer(newest, "<u4"), widen(older, older_dtype).view("<u4"))
        return cast(sums.tobytes(), "F32", target)
    now = widen(newest, "F32" if newest_dtype == D16 else newest_dtype).view("<u4")
    before = widen(older, older_dtype).view("<u4")
    rounded = np.frombuffer(_to_bfloat16(before.view("<f4")), "<u2").astype(np.int64)
    is_difference = (now >> np.uint32(16) == _DIFFERENCE) & (newest_dtype == D16)  # else it is not a number
    now, before = now.astype(np.int64), before.astype(np.int64)
    odd = now >> 16 & 1  # a tie goes to the even neighbor
    inside = np.clip(before, now - (1 << 15) + odd, now + (1 << 15) - odd)  # patterns of one sign are in order of size
    is_near = (np.abs(rounded - (now >> 16)) <= 1) & (now >> 31 == before >> 31) & (now & 0x7FFFFFFF < 0x7F800000)
    found = np.where(is_near, inside, now)
    if is_difference.any():
        ordered = np.where(before >> 31, -(before >> 8 & 0x7FFFFF), before >> 8)
        ordered += (now & 0xFFFF ^ 0x8000) - 0x8000
        found = np.where(is_difference, np.where(ordered < 0, 1 << 31 | -ordered << 8, ordered << 8), found)
    return cast(found.astype("<u4").tobytes(), "F32", target)


def widen(data: bytes | bytearray | memoryview, source: str) -> npt.NDArray[Any]:
    """Return elements of a floating-point dtype as numpy's; those that numpy does not know as fp32."""
    if source == F24:
        bits = np.empty(len(data) // 3, "<u4")
        # four bytes each, the last of which is the next element's, are read faster than three
        bits[:-1] = np.ndarray(max(len(bits) - 1, 0), "<u4", data, 0, 3)
        bits[-1:] = int.from_bytes(data[-3:], "little")
        bits <<= np.uint32(8)
        return bits.view("<f4")
    if source in BLOCKS:
        return from_blocks(data, source)
    if source != "BF16":
        return np.frombuffer(data, DTYPES[source].numpy)
    bits = np.frombuffer(data, "<u2").astype("<u4") << np.uint32(16)
    return bits.view("<f4")


def has_lost_blocks(data: bytes | bytearray | memoryview, dtype: str, start: int = 0) -> bool:
    """Return whether a block of `dtypes.Q8` or `dtypes.Q8_ROOT` has no numbers. ``data`` begins at byte ``start``.

    An element of it was infinite, not a number, or in ``Q8_ROOT`` negative.
    """
    size = BLOCKS[dtype].num_bytes
    first = -start % size
    units = np.ndarray(max(0, -(-(len(data) - first - 3) // size)), "<f4", data, first, (size,))
    return bool(np.isnan(units).any())


def subtract_codes(newest: npt.NDArray[Any], older: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the codes of the differences of patterns of ``F24``, in the upper bits, from those of another save: modulo
    2 ** 24, with the sign in the lowest bit."""
    difference = newest - older
    codes: npt.NDArray[Any] = (difference << np.uint32(1) ^ (difference.view("<i4") >> 31).view("<u4")) >> np.uint32(8)
    return codes


def add_codes(codes: npt.NDArray[Any], older: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the patterns that `subtract_codes` was given, as of fp32, from the codes and the patterns of the other
    save."""
    difference = codes >> np.uint32(1)
    difference ^= -(codes & np.uint32(1))
    difference <<= np.uint32(8)
    difference += older & np.uint32(0xFFFFFF00)
    return difference


def from_blocks(data: bytes | bytearray | memoryview, source: str) -> npt.NDArray[Any]:
    block, numel = BLOCKS[source], numel_of(source, len(data))
    records = np.zeros((-(-len(data) // block.num_bytes), block.num_bytes), np.uint8)
    records.reshape(-1)[: len(data)] = np.frombuffer(data, np.uint8)
    codes = np.ascontiguousarray(records[:, block.head :])
    if source == D16:
        words = codes.view("<u2").astype("<u4")
        is_difference = records[:, :1] != 0
        found = np.where(is_difference, words | np.uint32(_DIFFERENCE << 16), words << np.uint32(16)).view("<f4")
    else:
        found = codes.view(np.uint8 if source == Q8_ROOT else np.int8).astype("<f4")
        found *= np.ascontiguousarray(records[:, :4]).view("<f4")
        found = found * found if source == Q8_ROOT else found
    return found.reshape(-1)[:numel]


def _to_bfloat16(values: npt.NDArray[Any]) -> bytes:
    bits = values.astype("<f4", copy=False).view("<u4")
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype("<u2").tobytes()
