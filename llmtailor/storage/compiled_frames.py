"""What `encoder.pack_frame` does, compiled by numba: the same bytes, tens of times as fast.

numba's own loops over 64 codes are slowed down by what surrounds them, so two steps are in LLVM's vectors, which it
turns into the instructions of any processor. What one step stores is read after the steps of other blocks, as loads
that span several stores in flight would wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from llmtailor.storage import compiled, frames

_BATCH: Final = 16
"""Blocks whose codes are in a core's first cache"""
_AHEAD: Final = 64
"""Blocks between what is read and what is fetched into the cache: the processor doesn't fetch across pages"""
_MOST: Final = 56
"""Bits that can be added to up to 7 bits of a word"""
_NARROW: Final = _MOST // 4
"""Bits of each of four codes that are joined"""
_OFFSET: Final = 126
"""The exponent of a float from 2 ** (n - 1) to below 2 ** n is n and so much."""
_I8, _I32, _I64 = (ir.IntType(bits) for bits in (8, 32, 64))
_WORDS, _LONG, _LONGS = ir.VectorType(_I32, 16), ir.VectorType(_I64, 8), ir.VectorType(_I64, 16)
_BYTES, _LANES = ir.VectorType(_I8, 64), ir.VectorType(_I8, 16)
_U8, _U64 = np.uint8, np.uint64


def _all(kind: ir.VectorType, number: int) -> ir.Constant:
    return ir.Constant(kind, [number] * kind.count)


def _long(number: int) -> ir.Constant:
    return ir.Constant(_I64, number)


def _spread(builder: Any, scalar: Any, kind: ir.VectorType) -> Any:
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(_I32, 0))
    return _pick(builder, one, one, [0] * kind.count)


def _pick(builder: Any, first: Any, second: Any, which: Sequence[int]) -> Any:
    """Return elements of two vectors, by their numbers."""
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(_I32, len(which)), [*which]))


def _call(builder: Any, name: str, returns: ir.Type, *given: Any) -> Any:
    kind = ir.FunctionType(returns, [one.type for one in given])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), given)


def _places(context: Any, builder: Any, signature: Any, given: Sequence[Any]) -> Callable[..., Any]:
    """Return a call that returns where the element ``at`` of an array, given by its position, is, as a pointer."""

    def place(position: int, at: Any, kind: ir.Type, unit: ir.Type | None = None) -> Any:
        data = context.make_array(signature.args[position])(context, builder, given[position]).data
        if unit is not None:  # in which ``at`` counts, not in elements
            data = builder.bitcast(data, unit.as_pointer())
        return builder.bitcast(builder.gep(data, [at]), kind.as_pointer())

    return place


@intrinsic  # type: ignore[untyped-decorator]
def _store(_: Any, room: Any, at: Any, word: Any) -> Any:
    """Store eight bytes anywhere."""

    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        builder.store(given[2], _places(context, builder, signature, given)(0, given[1], _I64), align=1)
        return context.get_dummy_value()

    return numba.void(room, at, word), code


@intrinsic  # type: ignore[untyped-decorator]
def _to_codes(_: Any, newest: Any, older: Any, codes: Any, lengths: Any, block: Any, to: Any) -> Any:
    """Compute the codes of a block and their lengths, `_OFFSET` more if not 0; store them as block ``to``."""

    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        place = _places(context, builder, signature, given)
        first = builder.mul(given[4], _long(frames.BLOCK))
        start = builder.mul(first, _long(3))
        room = builder.mul(given[5], _long(frames.BLOCK))

        def fetch(position: int, at: Any, num_bytes: int) -> None:
            """Fetch what will be read of an array in a while, from this byte on now."""
            hints = [ir.Constant(_I32, hint) for hint in (0, 2, 1)]  # to read, into the second cache, data
            for line in range(0, num_bytes, 64):
                here = place(position, builder.add(at, _long(num_bytes * _AHEAD + line)), _I8, _I8)
                _call(builder, "llvm.prefetch.p0i8", ir.VoidType(), here, *hints)

        def now(lane: int) -> Any:
            """Return 16 patterns, rounded to 24 bits, which are the upper ones."""
            here = builder.load(place(0, builder.add(first, _long(16 * lane)), _WORDS), align=1)
            rest = builder.add(builder.and_(here, _all(_WORDS, 0xFF)), _all(_WORDS, 0xFF))  # has bit 8 if any was set
            return builder.and_(builder.or_(here, rest), _all(_WORDS, 0xFFFFFF00))

        def before(lane: int) -> Any:
            begin = min(48 * lane, 3 * frames.BLOCK - 64)  # not beyond the block
            octets = builder.load(place(1, builder.add(start, _long(begin)), _BYTES), align=1)
            which = [64 if at % 4 == 0 else 48 * lane - begin + at // 4 * 3 + at % 4 - 1 for at in range(64)]
            return builder.bitcast(_pick(builder, octets, _all(_BYTES, 0), which), _WORDS)

        fetch(0, builder.mul(first, _long(4)), 4 * frames.BLOCK)
        fetch(1, start, 3 * frames.BLOCK)
        for lane in range(4):
            off = builder.sub(now(lane), before(lane))
            sign = builder.ashr(off, _all(_WORDS, 31))
            made = builder.lshr(builder.xor(builder.shl(off, _all(_WORDS, 1)), sign), _all(_WORDS, 8))
            here = builder.add(room, _long(16 * lane))
            builder.store(made, place(2, here, _WORDS), align=1)
            exact = builder.bitcast(builder.sitofp(made, ir.VectorType(ir.FloatType(), 16)), _WORDS)
            exponent = builder.trunc(builder.lshr(exact, _all(_WORDS, 23)), _LANES)
            builder.store(exponent, place(3, here, _LANES), align=1)
        return context.get_dummy_value()

    return numba.void(newest, older, codes, lengths, block, to), code


@intrinsic  # type: ignore[untyped-decorator]
def _to_fields(
    _: Any,
    codes: Any,
    lengths: Any,
    tops: Any,
    widths: Any,
    planes: Any,
    fields: Any,
    sizes: Any,
    block: Any,
    to: Any,
    blocks: Any,
    at: Any,
) -> Any:
    """Store the planes of the classes of a block of ``codes`` as block ``to`` of so many, and its bits from ``at`` on:
    8, 16 or 32 fields and their sizes, at most 56. Return how many."""

    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        place = _places(context, builder, signature, given)
        start = builder.mul(given[7], _long(frames.BLOCK))

        def scalar(position: int, index: int) -> Any:
            return _spread(builder, builder.load(place(position, _long(index), _I8)), _BYTES)

        length = builder.load(place(1, start, _BYTES), align=1)
        width, above = scalar(3, 0), []
        for one in range(1, frames.MAX_CLASSES):
            is_above = builder.icmp_unsigned(">", length, scalar(2, one - 1))
            width = builder.select(is_above, scalar(3, one), width)
            above.append(builder.bitcast(is_above, _I64))
        for bit in range(3):  # of the number of a class, which is how many tops the length is above
            plane = above[(1 << bit) - 1]
            for edge in above[(2 << bit) - 1 :: 1 << bit]:
                plane = builder.xor(plane, edge)
            builder.store(plane, place(4, builder.add(builder.mul(given[9], _long(bit)), given[8]), _I64))
        is_wide = builder.bitcast(builder.icmp_unsigned(">", width, _all(_BYTES, _NARROW)), _I64)
        lanes, size = [], []
        for lane in range(4):
            quarter = builder.zext(_pick(builder, width, width, range(16 * lane, 16 * lane + 16)), _WORDS)
            loaded = builder.load(place(0, builder.add(start, _long(16 * lane)), _WORDS), align=1)
            too_high = builder.shl(_all(_WORDS, 0xFFFFFFFF), quarter)
            lanes.append(builder.and_(loaded, builder.not_(too_high)))
            size.append(quarter)

        def put(fields: Any, sizes: Any) -> None:
            wide = ir.VectorType(_I64, fields.type.count)
            builder.store(fields, place(5, given[10], wide), align=1)
            if sizes.type != wide:
                sizes = builder.zext(sizes, wide)
            builder.store(sizes, place(6, given[10], wide), align=1)

        def join(first: Any, second: Any, by: Any) -> Any:
            return builder.or_(first, builder.shl(second, by))

        ends = [builder.add(size[0], size[1]), builder.add(size[2], size[3])]
        result = cgutils.alloca_once(builder, _I64)
        with builder.if_else(builder.icmp_unsigned("!=", is_wide, _long(0)), likely=False) as (yes, no):
            with yes:
                lanes64 = [builder.zext(lane, _LONGS) for lane in lanes]
                pairs = [join(lanes64[at], lanes64[at + 1], builder.zext(size[at], _LONGS)) for at in (0, 2)]
                in_turn = [at for pair in zip(range(16), range(16, 32), strict=True) for at in pair]
                put(_pick(builder, pairs[0], pairs[1], in_turn), _pick(builder, ends[0], ends[1], in_turn))
                builder.store(_long(32), result)
            with no:
                pairs = [builder.zext(join(lanes[at], lanes[at + 1], size[at]), _LONGS) for at in (0, 2)]
                fours, end = join(pairs[0], pairs[1], builder.zext(ends[0], _LONGS)), builder.add(ends[0], ends[1])
                even, odd = range(0, 16, 2), range(1, 16, 2)
                first = _pick(builder, end, end, even)
                both = builder.add(first, _pick(builder, end, end, odd))
                largest = _call(builder, "llvm.vector.reduce.umax.v8i32", _I32, both)
                fits = builder.icmp_unsigned("<=", largest, ir.Constant(_I32, _MOST))
                with builder.if_else(fits) as (eight, sixteen):
                    with eight:
                        second = _pick(builder, fours, fours, odd)
                        put(join(_pick(builder, fours, fours, even), second, builder.zext(first, _LONG)), both)
                        builder.store(_long(8), result)
                    with sixteen:
                        put(fours, end)
                        builder.store(_long(16), result)
        return builder.load(result)

    kinds = codes, lengths, tops, widths, planes, fields, sizes, block, to, blocks, at
    return numba.uint64(*kinds), code


_choose = numba.njit(nogil=True)(frames.choose)


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _sample(newest: Any, older: Any, blocks: Any, tops: Any) -> Any:
    """Choose the classes, and return the bits of their numbers."""
    codes, lengths = np.empty(frames.BLOCK, np.uint32), np.empty(frames.BLOCK, np.uint8)
    counts = np.zeros(frames.LENGTHS, np.int64)
    for block in range(_U64(0), blocks, _U64(frames.SAMPLED)):
        _to_codes(newest, older, codes, lengths, block, _U64(0))
        for length in lengths:
            counts[length - _OFFSET if length else 0] += 1
    if counts[0] == counts.sum():
        longest = _U8(0)
        for block in range(_U64(0), blocks):
            _to_codes(newest, older, codes, lengths, block, _U64(0))
            for length in lengths:
                longest = max(longest, length)
        if longest == 0:
            tops[:] = 0
            return 0
    return _choose(counts, tops)


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _write(newest: Any, older: Any, blocks: Any, tops: Any, num_bits: Any, room: Any) -> Any:
    """Write a frame without its head and its checksum; return its bytes."""
    codes, lengths = np.empty(frames.BLOCK * _BATCH, np.uint32), np.empty(frames.BLOCK * _BATCH, np.uint8)
    fields, sizes = np.empty(32 * _BATCH, np.uint64), np.empty(32 * _BATCH, np.uint64)
    planes = np.empty(3 * blocks, np.uint64)
    widths, exponents = np.empty(frames.MAX_CLASSES, np.uint8), np.empty(frames.MAX_CLASSES, np.uint8)
    for one in range(frames.MAX_CLASSES):
        is_single = one > 0 and tops[one] == tops[one - 1] + 1  # all codes of the class have the same length
        widths[one] = tops[one] - is_single
        exponents[one] = tops[one] + _OFFSET
    start = _U64(1 << num_bits)
    word, filled = _U64(0), _U64(0)
    at = start + _U64(8 * num_bits) * blocks
    for first in range(_U64(0), blocks, _U64(_BATCH)):
        batch = min(_U64(_BATCH), blocks - first)
        for block in range(batch):
            _to_codes(newest, older, codes, lengths, first + block, block)
        count = _U64(0)
        for block in range(batch):
            count += _to_fields(
                codes, lengths, exponents, widths, planes, fields, sizes, block, first + block, blocks, count
            )
        for one in range(count):
            word |= fields[one] << filled
            filled += sizes[one]
            _store(room, at, word)
            at += filled >> _U64(3)
            word >>= filled & _U64(0x38)
            filled &= _U64(7)
    _store(room, at, word)
    for one in range(_U64(1 << num_bits)):
        room[one] = tops[one]
    for one in range(_U64(num_bits) * blocks):
        _store(room, start + _U64(8) * one, planes[one])
    return at + (filled + _U64(7) >> _U64(3))


@compiled.compiled(
    compiled.given(numba.uint32, 1),
    compiled.given(numba.uint8, 1),
    compiled.taken(numba.uint8, 1),
    returns=numba.int64,
)
def pack(newest: Any, older: Any, room: Any) -> Any:
    """Pack whole blocks, given the patterns of fp32 elements and the bytes of those that they differ from, into
    ``room``; see `frames.room_for`. Return the bytes and, in the lowest two bits, the bits of the number of a class.
    """
    blocks = _U64(len(newest) // frames.BLOCK)
    tops = np.empty(frames.MAX_CLASSES, np.uint8)
    num_bits = _sample(newest, older, blocks, tops)
    size = _write(newest, older, blocks, tops, num_bits, room)
    if size > _U64(192) * blocks + _U64(1 << num_bits):
        tops[:] = frames.LENGTHS - 1
        num_bits = 0
        size = _write(newest, older, blocks, tops, num_bits, room)
    return np.int64(size) << 2 | num_bits
