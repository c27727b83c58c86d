"""Damages made from the tables of `llmtailor.formats.field_tables`: each field, in each way that its row speaks of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from llmtailor.formats.field_tables import BEYOND, EACH, MISSING, MISTYPED, UNLIKE, WAYS, Field, Says


@dataclass(frozen=True)
class Damage:
    """One way in which a field is off."""

    field: Field
    way: str
    says: Says | None
    """None: stock does not mind, and `verify` must not either."""
    sample: int = 0

    def __str__(self) -> str:
        return f"{self.field.name}-{self.way}-{self.sample}"

    def apply(self, tree: Any) -> int:
        """Damage a tree, as torch or json have loaded it; return in how many places."""
        places = [*places_of(tree, self.field.path)]
        for parent, key in places:
            if self.way == MISSING:
                remove(parent, key)
            elif self.way == UNLIKE:
                assert self.field.kind.other is not None
                put(parent, key, self.field.kind.other(get(parent, key)))
            else:
                samples = self.field.kind.mistyped if self.way == MISTYPED else self.field.kind.beyond
                put(parent, key, deepcopy(samples[self.sample]))
        return len(places)


def damages_of(field: Field) -> Iterator[Damage]:
    """Yield all damages of a field; where it only lacks a word on being missing, one that is none."""
    for way in WAYS:
        says = field.says(way)
        if says is None and way != MISSING:
            continue
        number = {MISTYPED: len(field.kind.mistyped), BEYOND: len(field.kind.beyond)}.get(way, 1)
        if way == UNLIKE and field.kind.other is None:
            continue
        for sample in range(number):
            yield Damage(field, way, says, sample)


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
