"""What fields may hold. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llmtailor.formats.names import MAX_COUNT
from llmtailor.formats.pickle_nodes import Call
from llmtailor.formats.resumed.model import Kind

NAN, INF = math.nan, math.inf


def is_number(value: Any) -> bool:
    """Whether this computes as a number; what a tensor or a numpy scalar holds can't be told without reading it."""
    return (isinstance(value, (int, float)) and not isinstance(value, bool)) or _is_opaque(value)


def _is_opaque(value: Any) -> bool:
    """A tensor of one element, or a numpy scalar"""
    return isinstance(value, Call)


def number(
    name: str, accepts: Callable[[float], bool], beyond: tuple[float, ...], other: Callable[[Any], Any] | None = None
) -> Kind:
    """A finite number in some range."""
    return Kind(
        name,
        is_number,
        lambda value: _is_opaque(value) or (math.isfinite(value) and accepts(value)),
        mistyped=("0.1", None, [0.1]),
        beyond=(NAN, INF, *beyond),
        other=other or (lambda value: value * 3 + 1),
    )


def count(name: str = "count", least: int = 0) -> Kind:
    """An int that counts something."""
    return Kind(
        name,
        lambda value: type(value) is int,
        lambda value: least <= value < MAX_COUNT,
        mistyped=("4", None, 4.5),
        beyond=(least - 1, MAX_COUNT),
        other=lambda value: value + 1,
    )


def optional(kind: Kind) -> Kind:
    """The same, or None."""
    return Kind(
        f"{kind.name} or null",
        lambda value: value is None or kind.is_type(value),
        lambda value: value is None or kind.is_in_range(value),
        tuple(value for value in kind.mistyped if value is not None),
        kind.beyond,
        kind.other,
    )


FINITE = number("finite number", lambda value: True, ())
RATE = number("number from 0 up", lambda value: value >= 0, (-1.0,), lambda value: value * 3 + 0.1)
POSITIVE = number("number above 0", lambda value: value > 0, (0.0, -1.0))
FLAG = Kind(
    "flag",
    lambda value: isinstance(value, (bool, int)) or value is None,
    lambda value: True,
    mistyped=("no", [0.1]),
    other=lambda value: not value,
)
TEXT = Kind("text", lambda value: isinstance(value, str), bool, mistyped=(None, 7), beyond=("",))
DICT = Kind("dict", lambda value: isinstance(value, dict), lambda value: True, mistyped=(None, [], "x"))
LIST = Kind("list", lambda value: isinstance(value, (list, tuple)), lambda value: True, mistyped=(None, {}, "x"))
ANYTHING = Kind("value", lambda value: True, lambda value: True, mistyped=())
BETAS = Kind(
    "pair of numbers from 0 to below 1, the first squared not above the second",
    lambda value: isinstance(value, (list, tuple)) and len(value) == 2 and all(map(is_number, value)),
    lambda value: any(map(_is_opaque, value)) or (all(0 <= beta < 1 for beta in value) and value[0] ** 2 <= value[1]),
    mistyped=(None, 0.9, (0.9,), (0.9, "0.999")),
    beyond=((NAN, 0.999), (0.999, 0.9), (0.9, 1.0), (-0.1, 0.999), (0.9, INF)),
    other=lambda value: (value[0] / 2, value[1]),
)
