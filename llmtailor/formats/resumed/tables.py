"""Tables of the fields that a resume reads, and the checks that they drive. Pure.

A field is a place in a file's tree, as decoded by `containers.torch_zip` or `containers.json`. Four things can be wrong
with it: it is missing, it has another type, it has a value that no run has, or the ranks' files differ in it. For each
of them, a field says what stock software does; where it says nothing, stock does not mind, or it cannot happen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmtailor.codes import Code
from llmtailor.containers.json import MAX_COUNT
from llmtailor.containers.pickle_nodes import Call, as_tensor
from llmtailor.errors import COPY_OR_ANOTHER
from llmtailor.findings import ERROR, Finding

EACH = "*"
"""In a path: every entry of a list, or every value of a dict."""
MISSING, MISTYPED, BEYOND, UNLIKE = "missing", "of another type", "out of range", "different between ranks"
WAYS = (MISSING, MISTYPED, BEYOND, UNLIKE)
CODES = {
    MISSING: Code.FIELD_MISSING,
    MISTYPED: Code.FIELD_TYPE,
    BEYOND: Code.FIELD_RANGE,
    UNLIKE: Code.RANKS_DIFFER,
}
_ABSENT = object()
_WRAPPERS = ("optimizer_state_dict", "base_optimizer_state")
"""Not spelt out at the beginning of a path"""
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Says:
    """What stock does about a field that is off in one way, and how much that matters."""

    severity: str
    stock: str
    read: bool = False
    """Told from the source only; else a resume was tried."""
    code: Code | None = None
    """Where the finding has another code than `CODES` gives: the reader of the file tells it."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a field may hold."""

    name: str
    is_type: Callable[[Any], bool]
    is_in_range: Callable[[Any], bool]
    mistyped: tuple[Any, ...]
    """Samples of what it may not be, for tests"""
    beyond: tuple[Any, ...] = ()
    """Samples of the right type and out of range, for tests"""
    other: Callable[[Any], Any] | None = None
    """Gives another value that would do, for tests"""


@dataclass(frozen=True, slots=True)
class Field:
    """A field that a stock resume reads."""

    path: tuple[Any, ...]
    """Keys, indexes and attribute names from the root of the tree; `EACH` for every entry."""
    kind: Kind
    read_by: str
    """Where in which package"""
    missing: Says | None = None
    mistyped: Says | None = None
    beyond: Says | None = None
    unlike: Says | None = None
    told_by_reader: frozenset[str] = frozenset()
    """Ways that the file's reader refuses by itself, since without the field nothing can be made of the file"""
    only: str = ""
    """In words: which files have it at all"""
    applies: Callable[[Any], bool] = lambda tree: True
    """The same for a tree"""

    def says(self, way: str) -> Says | None:
        return {MISSING: self.missing, MISTYPED: self.mistyped, BEYOND: self.beyond, UNLIKE: self.unlike}[way]

    @property
    def name(self) -> str:
        return spell(self.path)


@dataclass(frozen=True, slots=True)
class Table:
    """The fields of one kind of file."""

    title: str
    file: str
    """Its name, as docs have it"""
    fields: tuple[Field, ...]
    unchecked: tuple[tuple[str, str], ...] = ()
    """Fields that a resume reads and `verify` does not check, and why; or that look as if they mattered, and don't"""


def check_fields(tree: Any, table: Table, where: str) -> Iterator[Finding]:
    """Yield a finding for every field that is off in a file by itself."""
    for field in table.fields:
        if not field.applies(tree):
            continue
        for path, value in find(tree, field.path):
            way = _way(field, value)
            says = field.says(way) if way is not None and way not in field.told_by_reader else None
            if way is not None and says is not None:
                what = f"{spell(path)} is {_shown(way, value, field.kind)}"
                fix = f"{says.stock}; {COPY_OR_ANOTHER}"
                yield Finding(where, what, fix, says.code or CODES[way], says.severity)


def facts_of_rank(tree: Any, table: Table) -> dict[str, object]:
    """Return what must be alike in the files of all ranks: the field's name -> a value that compares."""
    return {
        spell(path): comparable(value)
        for field in table.fields
        if field.unlike is not None and field.unlike.severity == ERROR and field.applies(tree)
        for path, value in find(tree, field.path)
    }


def find(tree: Any, path: Sequence[Any]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the places that a path stands for, with what is there; where the way leads nowhere, nothing.

    The last step alone may be absent: then a mark that no kind takes for a value is yielded.
    """
    if not path:
        yield (), tree
        return
    key, rest = path[0], path[1:]
    if key is EACH or key == EACH:
        for name, inner in _entries(tree):
            for tail, value in find(inner, rest):
                yield (name, *tail), value
        return
    inner = _step(tree, key)
    if inner is not _ABSENT:
        for tail, value in find(inner, rest):
            yield (key, *tail), value
    elif not rest and _holds(tree):
        yield (key,), _ABSENT


def has(tree: Any, *path: Any) -> bool:
    """Whether there is something at a path."""
    return any(value is not _ABSENT for _, value in find(tree, path))


def spell(path: Iterable[Any]) -> str:
    """Return a path in words: ``param_groups[0].lr``."""
    text, keys = "", [*path]
    while len(keys) > 1 and keys[0] in _WRAPPERS:
        keys.pop(0)
    for key in keys:
        if isinstance(key, int) or key == EACH:
            text += f"[{key}]"
        else:
            text += f".{key}" if text else f"{key}"
    return text


def comparable(value: Any) -> object:
    """Return something that equals the same of an equal value: NaN equals NaN, and where a tensor lies is no matter."""
    if value is _ABSENT:
        return "absent"
    if (view := as_tensor(value)) is not None:
        return "tensor", view.storage.dtype, view.shape
    if isinstance(value, Mapping):
        return {f"{key}": comparable(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [comparable(inner) for inner in value]
    if isinstance(value, Call):
        return f"{value.func}", comparable(value.args), comparable(value.state)
    return "nan" if isinstance(value, float) and value != value else value


def _way(field: Field, value: Any) -> str | None:
    if value is _ABSENT:
        return MISSING
    if not field.kind.is_type(value):
        return MISTYPED
    return None if field.kind.is_in_range(value) else BEYOND


def _shown(way: str, value: Any, kind: Kind) -> str:
    if way == MISSING:
        return "missing"
    if way == MISTYPED:
        return f"a {_type(value)}, and no {kind.name}"
    return f"{value!r:.{_SHOWN}}, and no {kind.name}"


def _type(value: Any) -> str:
    if isinstance(value, Call):
        return "tensor" if as_tensor(value) is not None else f"{value.func}"
    return "None" if value is None else type(value).__name__


def _entries(tree: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(tree, dict):
        return tree.items()
    return enumerate(tree) if isinstance(tree, (list, tuple)) else ()


def _step(tree: Any, key: Any) -> Any:
    if isinstance(tree, Call):
        return tree.state.get(key, _ABSENT) if isinstance(tree.state, dict) else _ABSENT
    if isinstance(tree, dict):
        return tree.get(key, _ABSENT)
    is_index = isinstance(tree, (list, tuple)) and isinstance(key, int) and key < len(tree)
    return tree[key] if is_index else _ABSENT


def _holds(tree: Any) -> bool:
    """Whether a key could be there."""
    return isinstance(tree, dict) or (isinstance(tree, Call) and isinstance(tree.state, dict))


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
