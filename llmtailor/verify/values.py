"""Checks of some million elements at a time. Pure arithmetic on raw little-endian bytes.

All go through the elements block by block, so that what they compute stays in the cache of the processor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from llmtailor.core.states import ITEMSIZE
from llmtailor.io.casts import cast

BLOCK_ELEMENTS = 1 << 16
_UNSIGNED: Final[dict[int, str]] = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8"}
_EXPONENT: Final[dict[str, int]] = {"F64": 0x7FF << 52, "F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}
"""The bits that are all set in infinities and NaNs."""

Mask = npt.NDArray[np.bool_]
Bytes = bytes | bytearray | memoryview


def any_bit(data: Bytes) -> bool:
    """Whether any bit is set: zeros have none."""
    return bool(np.frombuffer(data, np.uint8).any())


def not_finite(data: Bytes, dtype: str, may_be_infinite: bool) -> Mask | None:
    """Return which elements are NaN, or infinite unless they may be; None if there are none."""
    if dtype not in _EXPONENT:
        return None
    bits, exponent = _bits(data, dtype), _EXPONENT[dtype]
    kind = bits.dtype.type
    without_sign, special = kind(_sign(dtype) - 1), kind(exponent)
    if may_be_infinite:
        return _blockwise(len(bits), lambda block: (bits[block] & without_sign) > special)
    return _blockwise(len(bits), lambda block: (bits[block] & special) == special)


def negative(data: Bytes, dtype: str) -> Mask | None:
    """Return which elements are below zero; None if there are none."""
    if dtype not in _EXPONENT:
        return None
    bits = _bits(data, dtype)
    minus_zero = bits.dtype.type(_sign(dtype))
    return _blockwise(len(bits), lambda block: bits[block] > minus_zero)


def differing(original: Bytes, dtype: str, copy: Bytes, copy_dtype: str, precision: str) -> Mask | None:
    """Return which elements of a copy are not the rounded original, bit for bit; None if there are none.

    A copy in another dtype than ``precision``, that of the weights in training, was made from these weights, or, if
    there were none, from the original itself. Either will do. What is not floating-point is compared if it is alike.
    """
    have, source = _bits(copy, copy_dtype), memoryview(original)
    castable = dtype in _EXPONENT and copy_dtype in _EXPONENT
    if not castable and dtype != copy_dtype:
        return None
    itemsize = ITEMSIZE[dtype]

    def check(block: slice) -> Mask:
        part = source[block.start * itemsize : block.stop * itemsize]
        if not castable:
            plain: Mask = have[block] != _bits(part, dtype)
            return plain
        wrong: Mask = have[block] != _bits(cast(part, dtype, copy_dtype), copy_dtype)
        if precision != copy_dtype and wrong.any():
            rounded_twice = cast(cast(part, dtype, precision), precision, copy_dtype)
            wrong &= have[block] != _bits(rounded_twice, copy_dtype)
        return wrong

    return _blockwise(len(have), check)


def _blockwise(numel: int, check: Callable[[slice], Mask]) -> Mask | None:
    found: Mask | None = None
    for start in range(0, numel, BLOCK_ELEMENTS):
        block = slice(start, min(start + BLOCK_ELEMENTS, numel))
        mask = check(block)
        if mask.any():
            found = np.zeros(numel, np.bool_) if found is None else found
            found[block] = mask
    return found


def _sign(dtype: str) -> int:
    return 1 << (8 * ITEMSIZE[dtype] - 1)


def _bits(data: Bytes, dtype: str) -> npt.NDArray[Any]:
    return np.frombuffer(data, _UNSIGNED[ITEMSIZE[dtype]])
