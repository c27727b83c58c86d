"""Rounding of states in host memory by numba: the bytes of `storage.rounding_torch`, several times as fast.

Importing this compiles the loops, or loads what an earlier process compiled. All take whole blocks and check no bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import numba
import numpy as np

from llmtailor.model.dtypes import BLOCKS, D16, Q8

Loop = TypeVar("Loop", bound=Callable[..., Any])
_BYTE, _WORD = numba.uint8, numba.uint32
_Q8 = BLOCKS[Q8]
_MOMENTS, _HEAD, _Q8_BYTES = _Q8.elements, _Q8.head, _Q8.num_bytes  # constants, by which the compiler unrolls the loops
_ROW = BLOCKS[D16].elements
_ROUNDING = np.float32(3 << 22)
"""The sum with a number below 2 ** 22 is rounded to an integer, whose lowest bits are the sum's lowest bits"""
_INFINITE = np.uint32(0x7F800000)
_BF16_NAN = np.uint32(0x7FC0)


def _compiled(*types: object, returns: Any = numba.void) -> Callable[[Loop], Loop]:
    def compiled(loop: Loop) -> Loop:
        def compile_loop(cache: bool) -> Loop:
            # a division by zero gives what numpy gives; no lock of the interpreter, which the training needs
            result: Loop = numba.njit(returns(*types), error_model="numpy", nogil=True, cache=cache)(loop)
            return result

        try:
            return compile_loop(True)
        except (RuntimeError, OSError):  # neither the package nor the user's cache folder can be written to
            return compile_loop(False)

    return compiled


def _input(dtype: Any) -> object:
    """Return the type of an input: any part of a file that was read."""
    return numba.types.Array(dtype, 1, "C", readonly=True, aligned=False)


def _output(dtype: Any, ndim: int = 1, layout: Literal["C", "A"] = "C") -> object:
    """Return the type of an output: any part of a file that is written."""
    return numba.types.Array(dtype, ndim, layout, aligned=False)


@_compiled(_WORD, returns=_WORD)
def _kept(bits: Any) -> Any:
    return (bits | ((bits & np.uint32(0xFF)) + np.uint32(0xFF))) >> np.uint32(8)  # bit 8 is set if any lower one was


@_compiled(_input(_WORD), _output(_WORD))
def to_24_bits(bits: Any, room: Any) -> None:
    """Round the patterns of fp32 elements, four to three words."""
    for number in range(len(bits) // 4):
        first, second = _kept(bits[4 * number]), _kept(bits[4 * number + 1])
        third, fourth = _kept(bits[4 * number + 2]), _kept(bits[4 * number + 3])
        room[3 * number] = first | second << np.uint32(24)
        room[3 * number + 1] = second >> np.uint32(8) | third << np.uint32(16)
        room[3 * number + 2] = third >> np.uint32(16) | fourth << np.uint32(8)


@_compiled(_input(numba.float32), _output(_BYTE), numba.boolean)
def to_8_bits(elements: Any, room: Any, is_root: Any) -> None:
    """Round blocks to a unit and codes, of roots or of signed elements."""
    most = np.float32(255 if is_root else 127)
    values, head = np.empty(_MOMENTS, np.float32), np.empty(1, np.float32)
    patterns, octets = values.view(np.uint32), head.view(np.uint8)
    for number in range(len(elements) // _MOMENTS):
        start, to = number * _MOMENTS, number * _Q8_BYTES
        if is_root:
            for at in range(_MOMENTS):
                values[at] = np.sqrt(elements[start + at])
        else:
            for at in range(_MOMENTS):
                values[at] = elements[start + at]
        largest = np.uint32(0)
        for at in range(_MOMENTS):
            largest = max(largest, patterns[at] & np.uint32(0x7FFFFFFF))  # patterns are in the order of the magnitudes
        is_lost = largest >= _INFINITE
        first = patterns[0]
        patterns[0] = largest
        unit = values[0] / most
        patterns[0] = first
        head[0] = np.float32(np.nan) if is_lost else unit
        for at in range(_HEAD):
            room[to + at] = octets[at]
        if is_lost:
            room[to + _HEAD : to + _Q8_BYTES] = 0
            continue
        divisor = unit if unit > 0 else np.float32(1)
        for at in range(_MOMENTS):
            values[at] = min(max(values[at] / divisor, -most), most) + _ROUNDING
        if is_root:
            for at in range(_MOMENTS):
                code = np.uint8(patterns[at])
                room[to + _HEAD + at] = code | np.uint8(code == 0 and elements[start + at] > 0)
        else:
            for at in range(_MOMENTS):
                room[to + _HEAD + at] = np.uint8(patterns[at])


@_compiled(_WORD, returns=numba.int32)
def _number(pattern: Any) -> Any:
    """Return the number of a 24-bit pattern in the order of the values."""
    sign = np.int32(pattern << np.uint32(8)) >> 31
    return (np.int32(pattern & np.uint32(0x7FFFFF)) ^ sign) - sign  # the negative number where the sign is -1


@_compiled(_input(_WORD), _input(_BYTE), _output(_BYTE, 1, "A"), _output(numba.uint64, 2, "A"))
def to_differences(bits: Any, base: Any, fits: Any, room: Any) -> None:
    """Round blocks of patterns to the differences of their numbers from those of ``base``, or to bf16. ``base`` has the
    24-bit patterns in three bytes each; ``room`` has the codes of four elements as an integer."""
    half, most = np.int32(1 << 15), np.uint32((1 << 16) - 2)
    older, codes = np.empty(_ROW, np.uint32), np.empty(_ROW, np.int16)
    octets, eights = older.view(np.uint8), codes.view(np.uint64)
    for number in range(len(fits)):
        start = number * _ROW
        for at in range(_ROW):  # compiled to shuffles of vectors, which takes half the time of shifting words
            octets[4 * at] = base[3 * (start + at)]
            octets[4 * at + 1] = base[3 * (start + at) + 1]
            octets[4 * at + 2] = base[3 * (start + at) + 2]
            octets[4 * at + 3] = 0
        far = np.uint32(0)
        for at in range(_ROW):
            row = bits[start + at]
            off = _number(_kept(row)) - _number(older[at])
            off = half if row == np.uint32(1 << 31) else off  # -0.0 has no number of its own
            codes[at] = np.int16(off)
            far = max(far, np.uint32(off + half - np.int32(1)))
        fits[number] = far <= most
        if far > most:
            for at in range(_ROW):
                row = bits[start + at]
                rounded = (row + np.uint32(0x7FFF) + (row >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
                is_number = row & np.uint32(0x7FFFFFFF) <= _INFINITE
                codes[at] = np.int16(rounded if is_number else _BF16_NAN)
        for at in range(len(eights)):
            room[number, at] = eights[at]
