"""How one run of elements differs from another, from raw little-endian bytes. Pure.

Sums are in fp64 and added up in a fixed order, so a comparison repeats to the last digit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from llmtailor.model.states import ITEMSIZE
from llmtailor.storage.casts import FLOATING, cast, widen

BLOCK_ELEMENTS = 1 << 16
"""Elements that are compared at once, so that intermediate results stay in the processor's cache"""
_UNSIGNED: Final[dict[int, str]] = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8"}


@dataclass(frozen=True, slots=True)
class Change:
    """How elements of B differ from those of A. Sums run over the elements that are finite in both."""

    numel: int = 0
    changed: int = 0
    """Elements that differ in any bit"""
    not_finite: int = 0
    """Elements that are NaN or infinite in A or B"""
    largest: float = 0.0
    """The largest \\|b - a\\|"""
    of_a: float = 0.0
    """Sum of a^2"""
    of_b: float = 0.0
    """Sum of b^2"""
    of_difference: float = 0.0
    """Sum of (b - a)^2"""
    product: float = 0.0
    """Sum of a * b"""

    def __add__(self, other: Change) -> Change:
        return Change(
            self.numel + other.numel,
            self.changed + other.changed,
            self.not_finite + other.not_finite,
            max(self.largest, other.largest),
            self.of_a + other.of_a,
            self.of_b + other.of_b,
            self.of_difference + other.of_difference,
            self.product + other.product,
        )

    @property
    def relative(self) -> float:
        """\\|B - A\\| / \\|A\\|, in the L2 norm: 0 if nothing changed, infinite if A is zero and B is not"""
        if self.of_difference == 0:
            return 0.0
        return math.sqrt(self.of_difference / self.of_a) if self.of_a else math.inf

    @property
    def cosine(self) -> float | None:
        """The cosine of the angle between A and B; None if one is zero"""
        norms = math.sqrt(self.of_a) * math.sqrt(self.of_b)
        return max(-1.0, min(1.0, self.product / norms)) if norms else None

    @property
    def share(self) -> float:
        """The share of elements that differ, 0..1"""
        return self.changed / self.numel if self.numel else 0.0


def compare(a: memoryview, dtype_a: str, b: memoryview, dtype_b: str) -> Change:
    """Compare as many elements of A and B.

    Of two floating-point dtypes, the wider is rounded to the narrower first, as a training rounds its masters. Values
    of other dtypes are only compared for equality, and must have the same dtype.
    """
    dtype = min(dtype_a, dtype_b, key=lambda dtype: ITEMSIZE[dtype])
    found = Change()
    numel = len(a) // ITEMSIZE[dtype_a]
    for begin in range(0, numel, BLOCK_ELEMENTS):
        end = min(begin + BLOCK_ELEMENTS, numel)
        one, two = (
            _rounded(data[begin * ITEMSIZE[own] : end * ITEMSIZE[own]], own, dtype)
            for data, own in ((a, dtype_a), (b, dtype_b))
        )
        found += _compare_block(one, two, dtype)
    return found


def _rounded(data: memoryview, own: str, dtype: str) -> memoryview | bytes:
    return data if own == dtype else cast(data, own, dtype)


def _compare_block(a: memoryview | bytes, b: memoryview | bytes, dtype: str) -> Change:
    kind = _UNSIGNED[ITEMSIZE[dtype]]
    bits_a, bits_b = np.frombuffer(a, kind), np.frombuffer(b, kind)
    changed = int(np.count_nonzero(bits_a != bits_b))
    is_equal = not changed
    if dtype not in FLOATING:
        return Change(len(bits_a), changed)
    with np.errstate(invalid="ignore", over="ignore"):
        one = widen(a, dtype).astype("<f8")
        two = one if is_equal else widen(b, dtype).astype("<f8")
        of_a = _dot(one, one)
        of_b = of_a if is_equal else _dot(two, two)
    not_finite = 0
    if not math.isfinite(of_a + of_b):
        finite = np.isfinite(one) & np.isfinite(two)
        not_finite = len(finite) - int(np.count_nonzero(finite))
        one, two = one[finite], two[finite]
        of_a, of_b = _dot(one, one), _dot(two, two)
    if is_equal:
        return Change(len(bits_a), 0, not_finite, 0.0, of_a, of_b, 0.0, of_a)
    difference = two - one
    largest = float(np.abs(difference).max()) if len(difference) else 0.0
    of_difference, product = _dot(difference, difference), _dot(one, two)
    return Change(len(bits_a), changed, not_finite, largest, of_a, of_b, of_difference, product)


def _dot(one: npt.NDArray[np.float64], two: npt.NDArray[np.float64]) -> float:
    """Return the sum of products. Unlike BLAS, it does not depend on the number of threads."""
    return float(np.einsum("i,i->", one, two))
