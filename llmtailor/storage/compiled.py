"""The loops of `storage.casts` that round, compiled by numba: one pass over memory instead of numpy's five or more.

Importing this compiles them, or loads what an earlier process compiled. They give the same bytes as numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from llmtailor.model.dtypes import BLOCKS, D16

Loop = TypeVar("Loop", bound=Callable[..., Any])
_BYTE, _FLAG, _FLOAT, _INTEGER = numba.uint8, numba.boolean, numba.float32, numba.int32
_WORD, _EIGHT = numba.uint32, numba.uint64
_ROW = BLOCKS[D16].elements  # a constant to the compiler, which unrolls the loops over a row
RUN = 128
"""The elements that `to_24_bits` takes at once: they become six lines of a cache"""
_ROUNDING = np.float32(3 << 22)
"""The sum with a number below 2 ** 22 is rounded to an integer, whose lowest bits are the sum's lowest bits"""
_INFINITE = np.uint32(0x7F800000)


def compiled(*types: object, returns: Any = numba.void) -> Callable[[Loop], Loop]:
    def compiled(loop: Loop) -> Loop:
        def made(cache: bool) -> Loop:
            # a division by zero gives what numpy gives; no lock of the interpreter, which the training needs
            found: Loop = numba.njit(returns(*types), error_model="numpy", nogil=True, cache=cache)(loop)
            return found

        try:
            return made(True)
        except (RuntimeError, OSError):  # neither the package nor the user's cache folder can be written to
            return made(False)

    return compiled


def given(dtype: Any, ndim: int) -> object:
    """Return the type of an input: any part of a file that was read."""
    return numba.types.Array(dtype, ndim, "C", readonly=True, aligned=False)


def taken(dtype: Any, ndim: int, layout: Literal["C", "A"] = "C") -> object:
    """Return the type of an output: any part of a file that is written."""
    return numba.types.Array(dtype, ndim, layout, aligned=False)


@compiled(_WORD, returns=_WORD)
def _kept(bits: Any) -> Any:
    return (bits | ((bits & np.uint32(0xFF)) + np.uint32(0xFF))) >> np.uint32(8)  # bit 8 is set if any lower one was


@intrinsic  # type: ignore[untyped-decorator]
def _stream(_: Any, words: Any, at: Any, word: Any) -> Any:
    """Store a word past the cache, which then doesn't read its line first. `_streamed` must follow."""

    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        array = context.make_array(words)(context, builder, given[0])
        stored = builder.store(given[2], cgutils.get_item_pointer(context, builder, words, array, [given[1]]), align=1)
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return numba.void(words, at, word), code


@intrinsic  # type: ignore[untyped-decorator]
def _streamed(_: Any) -> Any:
    """Make what was streamed visible to other threads before anything that this one stores next."""

    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return numba.void(), code


@compiled(given(_EIGHT, 1), taken(_EIGHT, 1))
def copy(data: Any, room: Any) -> None:
    for at in range(len(data)):
        _stream(room, at, data[at])
    _streamed()


@compiled(given(_WORD, 1), taken(_EIGHT, 1))
def to_24_bits(bits: Any, eights: Any) -> None:
    """Round the patterns of whole runs; ``eights`` has eight bytes each."""
    made = np.empty(3 * RUN // 4, np.uint32)
    pairs = made.view(np.uint64)
    for number in range(len(bits) // RUN):
        for at in range(RUN // 4):
            row = RUN * number + 4 * at
            first, second = _kept(bits[row]), _kept(bits[row + 1])
            third, fourth = _kept(bits[row + 2]), _kept(bits[row + 3])
            made[3 * at] = first | second << np.uint32(24)
            made[3 * at + 1] = second >> np.uint32(8) | third << np.uint32(16)
            made[3 * at + 2] = third >> np.uint32(16) | fourth << np.uint32(8)
        for at in range(len(pairs)):
            _stream(eights, len(pairs) * number + at, pairs[at])
    _streamed()


@compiled(given(_FLOAT, 2), taken(_FLOAT, 1, "A"), _BYTE[:, :], _FLOAT, _FLAG)
def to_blocks(rows: Any, units: Any, codes: Any, most: Any, is_root: Any) -> None:
    """Round rows to their units and codes, of their roots or of signed elements; ``most`` is the largest code.

    Rows with elements that are not finite, or negative ones under a root, get a unit that is not a number, and codes
    that must be made otherwise.
    """
    size = rows.shape[1]
    values = np.empty(size, np.float32)
    patterns = values.view(np.uint32)
    for number in range(len(rows)):
        row, room = rows[number], codes[number]
        if is_root:
            for at in range(size):
                values[at] = np.sqrt(row[at])
        else:
            for at in range(size):
                values[at] = row[at]
        largest = np.uint32(0)
        for at in range(size):
            largest = max(largest, patterns[at] & np.uint32(0x7FFFFFFF))  # patterns are in the order of the magnitudes
        if largest >= _INFINITE:
            units[number] = np.nan
            continue
        first = patterns[0]
        patterns[0] = largest
        unit = values[0] / most
        patterns[0] = first
        units[number] = unit
        divisor = unit if unit > 0 else np.float32(1)
        for at in range(size):
            values[at] = min(max(values[at] / divisor, -most), most) + _ROUNDING
        if is_root:
            for at in range(size):
                room[at] = np.uint8(patterns[at]) | np.uint8(np.uint8(patterns[at]) == 0 and row[at] > 0)
        else:
            for at in range(size):
                room[at] = np.uint8(patterns[at])


@compiled(_WORD, returns=_INTEGER)
def _number(pattern: Any) -> Any:
    """Return the number of a 24-bit pattern in the order of the values."""
    sign = np.int32(pattern << np.uint32(8)) >> 31
    return (np.int32(pattern & np.uint32(0x7FFFFF)) ^ sign) - sign  # the negative number where the sign is -1


@compiled(given(_WORD, 1), given(_BYTE, 1), _BYTE[:], taken(_EIGHT, 2, "A"))
def to_differences(bits: Any, base: Any, fits: Any, room: Any) -> None:
    """Round blocks of patterns to the differences of their numbers from those of ``base``, in two bytes, or to bf16.

    ``base`` has the 24-bit patterns in three bytes each; ``room`` has the two bytes of four elements as an integer.
    """
    half, most = np.int32(1 << 15), np.uint32((1 << 16) - 2)
    older = np.empty(_ROW, np.uint32)
    octets = older.view(np.uint8)
    codes = np.empty(_ROW, np.int16)
    eights = codes.view(np.uint64)
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
                codes[at] = np.int16(rounded if is_number else np.uint32(0x7FC0))
        for at in range(len(eights)):
            room[number, at] = eights[at]
