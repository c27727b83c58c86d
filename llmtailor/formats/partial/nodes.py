"""Decoded pickles as JSON, in the form of `encoding`: for object trees that come from files, not from a live run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llmtailor.formats.partial.encoding import encode
from llmtailor.formats.pickle_nodes import Call, Global, Ordered, TensorView, as_tensor


@dataclass(frozen=True, slots=True)
class Known:
    """Stands in a tree for a value whose JSON is known: a tensor that lies elsewhere, or nowhere."""

    json: Mapping[str, Any]


def encode_nodes(tree: Any, place: Callable[[TensorView], Mapping[str, Any]]) -> Any:
    """Turn a tree as `pickle_reader.read_pickle` yields it into JSON values.

    ``place`` says where a tensor is to be found, as JSON: `encoding.stored` or `encoding.placeholder`.
    """
    return encode(tree, _Nodes(place))


class _Nodes:
    def __init__(self, place: Callable[[TensorView], Mapping[str, Any]]) -> None:
        self.place = place

    def __call__(self, value: Any) -> dict[str, Any] | None:
        if isinstance(value, Known):
            return dict(value.json)
        if isinstance(value, Global):
            return {"$": "global", "module": value.module, "name": value.name}
        if isinstance(value, Ordered):
            return {"$": "ordered", "items": self._pairs(value.items()), "attributes": self._below(value.attributes)}
        if isinstance(value, Call):
            view = as_tensor(value)
            return self._call(value) if view is None else dict(self.place(view))
        return None

    def _call(self, value: Call) -> dict[str, Any]:
        return {
            "$": "call",
            "func": self._below(value.func),
            "args": [self._below(inner) for inner in value.args],
            "new": value.new,
            **({"state": self._below(value.state)} if value.has_state else {}),
            "appends": [self._below(inner) for inner in value.appends],
            "items": self._pairs(value.items),
        }

    def _pairs(self, items: Any) -> list[list[Any]]:
        return [[self._below(key), self._below(inner)] for key, inner in items]

    def _below(self, value: Any) -> Any:
        return encode(value, self)
