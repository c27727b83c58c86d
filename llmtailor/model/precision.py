"""How fp32 states may be rounded when a partial checkpoint holds them. Pure."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Literal

from llmtailor.model.dtypes import D16, D24, DIFFERENCES, F24, Q8, Q8_ROOT, size_of
from llmtailor.model.roles import EXP_AVG, EXP_AVG_SQ, MASTER

Masters = Literal["fp32", "24bit", "24bit-delta", "bf16"]
Moments = Literal["fp32", "bf16", "8bit"]
_MASTERS: Mapping[str, tuple[str, str]] = {
    "fp32": ("F32", "F32"),
    "24bit": (F24, F24),
    "24bit-delta": (F24, D24),
    "bf16": (F24, D16),
}
"""The dtypes of masters whose moments are saved with them, and of the others"""
WITHOUT_BASE: Mapping[str, str] = {D16: "BF16", D24: F24}
"""The dtypes of those that would be differences, if there are none that they could differ from"""
_MOMENTS = {"fp32": ("F32", "F32"), "bf16": ("BF16", "BF16"), "8bit": (Q8, Q8_ROOT)}
"""The dtypes of exp_avg and exp_avg_sq"""
_MANY = 1 << 17
"""Elements: whole blocks of every encoding"""
MASTERS, MOMENTS = (*_MASTERS,), (*_MOMENTS,)
ADAMS = (EXP_AVG, EXP_AVG_SQ)
ROUNDED_AS = {MASTER: (F24, "BF16", D16, D24), EXP_AVG: ("BF16", Q8), EXP_AVG_SQ: ("BF16", Q8_ROOT)}
"""Kind of fp32 state -> what it may have been rounded to"""


@dataclass(frozen=True, slots=True)
class Precision:
    """What a save stores of each fp32 state. States of other dtypes and other kinds are stored as they are."""

    masters: Masters = "fp32"
    """``24bit`` drops the last 8 bits; rounding to bf16 or fp16 still gives what the exact master gives. With
    ``24bit-delta``, masters that are saved without their moments are compressed differences from those that were saved
    with them. ``bf16`` keeps 24 bits of the latter. Of the former it keeps 16 bits: differences, or the bf16 weights.
    """
    moments: Moments = "fp32"
    """``8bit`` are blocks of 8-bit codes, see `storage.casts`. Only Adam's two moments together are rounded: alone,
    ``exp_avg`` is the momentum of Lion, whose update is the sign of a sum with it."""

    def dtypes(self, kinds: Container[str] = ADAMS, *, with_moments: bool = True) -> dict[str, str]:
        """Return kind of state -> dtype, of params with states of these kinds, saved with or without their moments."""
        whole, alone = _MASTERS[self.masters]
        mean, square = _MOMENTS[self.moments]
        moments = {EXP_AVG: mean, EXP_AVG_SQ: square} if all(kind in kinds for kind in ADAMS) else {}
        return {MASTER: whole if with_moments else alone, **moments}

    def master_bytes(self, *, with_moments: bool) -> float:
        """Return the bytes per param of a master, at most, if it is compressed."""
        return _per_element(self.dtypes(with_moments=with_moments)[MASTER])

    @property
    def has_differences(self) -> bool:
        """Whether masters refer to those of earlier saves"""
        return self.dtypes(with_moments=False)[MASTER] in DIFFERENCES

    @property
    def moment_bytes(self) -> float:
        """Bytes per param of Adam's two moments"""
        return sum(map(_per_element, _MOMENTS[self.moments]))


EXACT = Precision()


@dataclass(frozen=True, slots=True)
class PrecisionOptions:
    """What a user asks for; None leaves it to the policy."""

    masters: Masters | None = None
    moments: Moments | None = None

    def __bool__(self) -> bool:
        return self.masters is not None or self.moments is not None


AS_POLICY = PrecisionOptions()


def _per_element(dtype: str) -> float:
    return size_of(dtype, _MANY) / _MANY
