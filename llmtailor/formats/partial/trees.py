"""Object trees as JSON: what stock files pickle, without a pickle.

JSON's own values represent themselves; everything else is an object whose key ``$`` states its kind. Classes and
functions are written by name, and only those that a checkpoint's pickle may name. Tensors are references into
safetensors files, or placeholders that only describe them. Trees come from a live training, or from the decoded
pickles of files.
"""

from __future__ import annotations

import base64
import copyreg
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from llmtailor.checkpoint.layout import Copy
from llmtailor.checkpoint.placement import Extent
from llmtailor.containers.pickle_machine import check_keys
from llmtailor.containers.pickle_nodes import Call, Global, Ordered, TensorView, as_shape, as_tensor, make_tensor
from llmtailor.containers.unpickle import ALLOWED
from llmtailor.model.states import ITEMSIZE

PLACEHOLDER = "flat"
STORED = "tensor"
MAX_DEPTH = 200


def placeholder(dtype: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the JSON of an absent tensor; its elements are in fragments, or follow from them."""
    return {"$": PLACEHOLDER, "dtype": dtype, "shape": list(shape)}


def stored(file: str, key: str) -> dict[str, Any]:
    """Return the JSON of a tensor that is ``key`` of a safetensors file in the same folder."""
    return {"$": STORED, "file": file, "key": key}


def encode(value: Any, special: Callable[[Any], dict[str, Any] | None], at: str = "") -> Any:
    """Return live objects as JSON values.

    ``special`` is called first for everything that is not a plain value, and returns its JSON or None. Raises
    TypeError, with the path in the tree, for an object that a checkpoint may not hold.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$": "float", "value": repr(value)}
    if (done := special(value)) is not None:
        return done

    def below(inner: Any, key: object) -> Any:
        return encode(inner, special, f"{at}[{key!r}]")

    if type(value) is list:
        return [below(inner, number) for number, inner in enumerate(value)]
    if type(value) is tuple:
        return {"$": "tuple", "items": [below(inner, number) for number, inner in enumerate(value)]}
    if type(value) is set:
        return {"$": "set", "items": [below(inner, number) for number, inner in enumerate(sorted(value))]}
    if type(value) is bytes:
        return {"$": "bytes", "base64": base64.b64encode(value).decode()}
    if type(value) is dict:
        if all(type(key) is str for key in value) and "$" not in value:
            return {key: below(inner, key) for key, inner in value.items()}
        return {"$": "dict", "items": [[below(key, "key"), below(inner, key)] for key, inner in value.items()]}
    if type(value) is OrderedDict:
        items = [[below(key, "key"), below(inner, key)] for key, inner in value.items()]
        return {"$": "ordered", "items": items, "attributes": below(value.__dict__ or None, "attributes")}
    if isinstance(value, type) or callable(value):
        return _name(value, at)
    return _reduced(value, below, at)


def _name(value: Any, at: str) -> dict[str, Any]:
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if name not in ALLOWED.get(str(module), ()):
        raise TypeError(f"{at}: {module}.{name} can't be written into a checkpoint")
    return {"$": "global", "module": module, "name": name}


def _reduced(value: Any, below: Callable[[Any, object], Any], at: str) -> dict[str, Any]:
    """Return an object as the call by which pickle would recreate it."""
    # as Python 3.11.7 does; 3.11.2 names getattr
    reduced = (type(value), (value.value,)) if isinstance(value, Enum) else value.__reduce_ex__(2)
    if isinstance(reduced, str):  # the name of a constant in its module, e.g. a torch.dtype
        module = type(value).__module__
        if reduced not in ALLOWED.get(module, ()):
            raise TypeError(f"{at}: {module}.{reduced} can't be written into a checkpoint")
        return {"$": "global", "module": module, "name": reduced}
    func, args, state, appends, items = (*reduced, None, None, None)[:5]
    new = func is copyreg.__newobj__  # type: ignore[attr-defined]
    if new:
        func, args = args[0], args[1:]
    return {
        "$": "call",
        "func": _name(func, at),
        "args": [below(inner, number) for number, inner in enumerate(args)],
        "new": new,
        **({} if state is None else {"state": below(state, "state")}),
        "appends": [below(inner, number) for number, inner in enumerate(appends or ())],
        "items": [[below(key, "key"), below(inner, key)] for key, inner in items or ()],
    }


Find = Callable[[str, str], tuple[str, tuple[int, ...], Extent]]
"""(file, key) -> dtype, shape and place of a stored tensor; raises KeyError"""


def decode(data: Any, find: Find, depth: int = 0) -> Any:
    """Return JSON values as plain values and nodes, like `unpickle.read_pickle`.

    Raises ValueError, KeyError or TypeError for JSON that `encode` did not write.
    """
    if depth > MAX_DEPTH:
        raise ValueError("it is nested too deeply")

    def below(inner: Any) -> Any:
        return decode(inner, find, depth + 1)

    if isinstance(data, list):
        return [below(inner) for inner in data]
    if isinstance(data, str):
        data.encode()  # refuses unpaired surrogates
    if not isinstance(data, dict):
        return data
    kind = data.get("$")
    if kind is None:
        return {below(key): below(inner) for key, inner in data.items()}
    if kind == "float":
        return float(data["value"])
    if kind == "tuple":
        return tuple(below(inner) for inner in data["items"])
    if kind == "set":
        return set(check_keys([below(inner) for inner in data["items"]]))
    if kind == "bytes":
        return base64.b64decode(data["base64"], validate=True)
    if kind == "dict":
        return dict(_pairs(data["items"], below))
    if kind == "ordered":
        ordered = Ordered(_pairs(data["items"], below))
        ordered.attributes = below(data["attributes"])
        return ordered
    if kind == "global":
        return _global(data)
    if kind == "call":
        return Call(
            _global(data["func"]),
            tuple(below(inner) for inner in data["args"]),
            new=bool(data["new"]),
            state=below(data.get("state")),
            has_state="state" in data,
            items=_pairs(data["items"], below),
            appends=[below(inner) for inner in data["appends"]],
        )
    if kind == STORED:
        dtype, shape, extent = find(data["file"], data["key"])
        return make_tensor(dtype, shape, (Copy(extent),))
    if kind == PLACEHOLDER:
        return _nowhere(data["dtype"], tuple(data["shape"]))
    raise ValueError(f"{kind!r} is not a kind of node")


def _pairs(items: Any, below: Callable[[Any], Any]) -> list[tuple[Any, Any]]:
    pairs = [(below(key), below(inner)) for key, inner in items]
    check_keys([key for key, _ in pairs])
    return pairs


def _global(data: dict[str, Any]) -> Global:
    module, name = data["module"], data["name"]
    if name not in ALLOWED.get(module, ()):
        raise ValueError(f"it names {module}.{name}, which no checkpoint needs")
    return Global(module, name)


def _nowhere(dtype: str, shape: tuple[int, ...]) -> Call:
    if as_shape(shape) is None:
        raise ValueError("a placeholder has no shape")
    num_bytes = math.prod(shape) * ITEMSIZE[dtype]
    return make_tensor(dtype, shape, (Copy(Extent("", 0, num_bytes)),))


@dataclass(frozen=True, slots=True)
class Known:
    """A value whose JSON is known, in a tree: a tensor stored elsewhere, or nowhere."""

    json: Mapping[str, Any]


def encode_nodes(tree: Any, place: Callable[[TensorView], Mapping[str, Any]]) -> Any:
    """Return a tree as `unpickle.read_pickle` yields it as JSON values.

    ``place`` returns the JSON of a tensor: that of `stored` or `placeholder`.
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
