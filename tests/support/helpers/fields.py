"""Damages made from the tables of `llmtailor.frameworks.stock_fields`: each field in each way that its row names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from llmtailor.codes import Code
from llmtailor.frameworks.stock_fields import EACH, Field

NAN, INF = math.nan, math.inf
WORDS = tuple(range(1, 625))
MISTYPED: dict[str, tuple[Any, ...]] = {
    "value": (),
    "dict": (None, "x"),
    "flag": ("no", [0.1]),
    "list of entries": ({}, "x", [1]),
    "state of Python's generator": (None, (), (4, (*WORDS, 624), None), (3, WORDS, None)),
    "state of numpy's generator": (None, {}, ("PCG64", [*WORDS], 624, 0, 0.0), ("MT19937", [*WORDS][:-1], 624, 0, 0.0)),
    "version": (None, 7),
}
"""What a field of a type may not hold; of all others ``"x"`` and None"""
BEYOND: dict[str, tuple[Any, ...]] = {
    "number": (NAN, INF),
    "number >= 0": (NAN, INF, -1.0),
    "number > 0": (NAN, 0.0, -1.0),
    "number > 0, up to 1.84467e+19": (NAN, 0.0, 1e30),
    "number > 1": (NAN, 1.0),
    "number between 0 and 1": (NAN, 0.0, 1.0),
    "count": (-1, 10**30),
    "count from 1 up": (0,),
    "step": (-2,),
    "pair of numbers from 0 to below 1": ((NAN, 0.999), (0.9, 1.0), (-0.1, 0.999)),
    "list of learning rates": ([NAN, NAN], [-1.0, -1.0]),
}
"""What is of the right type, and out of range"""


@dataclass(frozen=True)
class Damage:
    """One way in which a field is off."""

    field: Field
    code: Code
    change: Callable[[Any, Any], None]
    """Given what holds the field, and its key"""

    def __str__(self) -> str:
        return f"{self.field.name}: {self.code.value}"

    def apply(self, tree: Any) -> int:
        """Damage a tree, as torch or json have loaded it; return in how many places."""
        places = [*places_of(tree, self.field.path)]
        for parent, key in places:
            self.change(parent, key)
        return len(places)


def damages_of(field: Field) -> Iterator[Damage]:
    """Yield all damages of a field that verify sees in a file alone."""
    if field.if_missing is not None and field.path[-1] != EACH:
        yield Damage(field, field.if_missing, remove)
    for code, samples in (
        (Code.FIELD_TYPE, MISTYPED.get(field.type.name, ("x", None))),
        (Code.FIELD_RANGE, () if field.path[-1] == "step" else BEYOND.get(field.type.name, ())),
    ):
        for sample in samples:
            yield Damage(field, code, lambda parent, key, sample=sample: put(parent, key, deepcopy(sample)))


def unlike(field: Field) -> Damage:
    """Return the damage of a field that has another value than in the file of another rank."""

    def change(parent: Any, key: Any) -> None:
        value = get(parent, key)
        if isinstance(value, (dict, tuple)):
            put(parent, key, {} if isinstance(value, dict) else value[::-1])
        elif key != "params":
            put(parent, key, not value if value is None or isinstance(value, bool) else value + 1)

    return Damage(field, Code.RANKS_DIFFER, change)


def places_of(tree: Any, path: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the parent and the last key of every place that a path stands for and where something is."""
    key, rest = path[0], path[1:]
    for name in keys_of(tree) if key == EACH else [key]:
        inner = get(tree, name)
        if inner is _ABSENT:
            continue
        if rest:
            yield from places_of(inner, rest)
        else:
            yield tree, name


_ABSENT = object()


def keys_of(tree: Any) -> list[Any]:
    return list(tree) if isinstance(tree, dict) else [*range(len(tree))] if isinstance(tree, (list, tuple)) else []


def get(tree: Any, key: Any) -> Any:
    if isinstance(tree, dict):
        return tree.get(key, _ABSENT)
    if isinstance(tree, (list, tuple)):
        return tree[key] if isinstance(key, int) and key < len(tree) else _ABSENT
    return vars(tree).get(key, _ABSENT) if hasattr(tree, "__dict__") else _ABSENT


def put(tree: Any, key: Any, value: Any) -> None:
    if isinstance(tree, (dict, list)):
        tree[key] = value
    else:
        setattr(tree, key, value)


def remove(tree: Any, key: Any) -> None:
    if isinstance(tree, (dict, list)):
        del tree[key]
    else:
        delattr(tree, key)
