"""Elementwise casts between floating-point dtypes, on raw little-endian bytes.

Rounding is to nearest, ties to even: bit for bit as torch, and so as DeepSpeed when it rounds its fp32 masters.

Only ``F24``, the first 24 bits of fp32, is rounded to odd: the last of its bits is set if any of the bits left out is.
So a value is never on a tie, or on a value of bf16 or fp16, that the fp32 value was not on, and rounding it to these
dtypes gives what rounding the fp32 value gives (Boldo and Melquiond, 2008). The error is below a unit of its last bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from llmtailor.model.roles import F24

_NUMPY: Final[dict[str, str]] = {"F32": "<f4", "F16": "<f2", "F64": "<f8"}


def cast(data: bytes | bytearray | memoryview, source: str, target: str, scale: float = 1.0) -> bytes:
    """Cast elements of dtype ``source`` to ``target``; both are safetensors names of floating-point dtypes.

    They are first multiplied by ``scale`` in fp64, so there is only one rounding.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # inf and NaN are values like any other
        wide = widen(data, source)
        if scale != 1:
            wide = wide.astype("<f8") * scale
        if target == F24:
            return _to_24_bits(wide)
        return _to_bfloat16(wide) if target == "BF16" else wide.astype(_NUMPY[target]).tobytes()


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


def widen(data: bytes | bytearray | memoryview, source: str) -> npt.NDArray[Any]:
    """Return elements of a floating-point dtype as numpy's, bf16 and 24 bits as fp32."""
    if source == F24:
        octets = np.zeros((len(data) // 3, 4), np.uint8)
        octets[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        return octets.reshape(-1).view("<f4")
    if source != "BF16":
        return np.frombuffer(data, _NUMPY[source])
    bits = np.frombuffer(data, "<u2").astype("<u4") << np.uint32(16)
    return bits.view("<f4")


def _to_24_bits(values: npt.NDArray[Any]) -> bytes:
    octets = values.astype("<f4").view(np.uint8).reshape(-1, 4)
    octets[:, 1] |= octets[:, 0] != 0
    return octets[:, 1:].tobytes()


def _to_bfloat16(values: npt.NDArray[Any]) -> bytes:
    bits = values.astype("<f4", copy=False).view("<u4")
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype("<u2").tobytes()
