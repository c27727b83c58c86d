"""Object trees as JSON instead of pickles, and the layout of the safetensors files that they refer to.

JSON's own values represent themselves; everything else is an object whose key ``$`` states its kind. Classes and
functions are written by name, and only those that a checkpoint's pickle may name. Tensors are references into
safetensors files, or placeholders that only describe them. Trees come from a live training, or from the decoded
pickles of files. The tensors have an order and a padding that let the files share blocks with those they come from.
"""

from __future__ import annotations

import base64
import copyreg
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain
from typing import Any

from llmtailor.checkpoint.layout import (
    BLOCK_BYTES,
    Copy,
    FileLayout,
    Fill,
    Segment,
    Zeros,
    consecutive,
    fill_all,
    in_runs,
    shareable_start,
)
from llmtailor.checkpoint.placement import Extent
from llmtailor.containers.safetensors import lay_out_header
from llmtailor.containers.unpickle import (
    ALLOWED,
    Call,
    Global,
    Ordered,
    TensorView,
    as_shape,
    as_tensor,
    check_keys,
    make_tensor,
)
from llmtailor.model.dtypes import ITEMSIZE, PACKED

PLACEHOLDER = "flat"
STORED = "tensor"
MAX_DEPTH = 200


def placeholder(dtype: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the JSON of an absent tensor; its elements are in fragments, or follow from them."""
    return {"$": PLACEHOLDER, "dtype": dtype, "shape": list(shape)}


def stored(file: str, key: str) -> dict[str, Any]:
    """Return the JSON of a tensor that is ``key`` of a safetensors file in the same folder."""
    return {"$": STORED, "file": file, "key": key}


@dataclass(frozen=True, slots=True)
class Known:
    """A value whose JSON is known, in a tree: a tensor stored elsewhere, or nowhere."""

    json: Mapping[str, Any]


def encode_nodes(tree: Any, place: Callable[[TensorView], Mapping[str, Any]]) -> Any:
    """Return a tree as `unpickle.read_pickle` yields it as JSON values.

    ``place`` returns the JSON of a tensor: that of `stored` or `placeholder`.
    """

    def special(value: Any) -> dict[str, Any] | None:
        if isinstance(value, Known):
            return dict(value.json)
        view = as_tensor(value)
        return None if view is None else dict(place(view))

    return encode(tree, special)


def encode(value: Any, special: Callable[[Any], dict[str, Any] | None]) -> Any:
    """Return live objects, or nodes, as JSON values.

    ``special`` is called first for everything that is not a plain value, and returns its JSON or None. Raises
    TypeError for an object that a checkpoint may not hold; below the root, with two arguments: its path, and why.
    """
    if type(value) in _AS_IS:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$": "float", "value": repr(value)}
    if (done := special(value)) is not None:
        return done

    def below(inner: Any, key: object) -> Any:
        if type(inner) in _AS_IS:  # most values, such as the hundreds of numbers of a generator's state
            return inner
        try:
            return encode(inner, special)
        except TypeError as error:
            path, what = error.args if len(error.args) == 2 else ("", error)
            raise TypeError(f"[{key!r}]{path}", what) from error

    def listed(values: Iterable[Any]) -> list[Any]:
        return [below(inner, number) for number, inner in enumerate(values)]

    def pairs(items: Iterable[tuple[Any, Any]]) -> list[list[Any]]:
        return [[below(key, "key"), below(inner, key)] for key, inner in items]

    if type(value) is list:
        return listed(value)
    if type(value) in (tuple, set):
        return {"$": type(value).__name__, "items": listed(sorted(value) if type(value) is set else value)}
    if type(value) is bytes:
        return {"$": "bytes", "base64": base64.b64encode(value).decode()}
    if type(value) is dict:
        if all(type(key) is str for key in value) and "$" not in value:
            return {key: below(inner, key) for key, inner in value.items()}
        return {"$": "dict", "items": pairs(value.items())}
    if type(value) in (OrderedDict, Ordered):
        attributes = value.attributes if type(value) is Ordered else value.__dict__ or None
        return {"$": "ordered", "items": pairs(value.items()), "attributes": below(attributes, "attributes")}
    node = value if isinstance(value, (Global, Call)) else _node_of(value)
    if isinstance(node, Global):
        return {"$": "global", "module": node.module, "name": node.name}
    return {
        "$": "call",
        "func": below(node.func, "func"),
        "args": listed(node.args),
        "new": node.new,
        **({"state": below(node.state, "state")} if node.has_state else {}),
        "appends": listed(node.appends),
        "items": pairs(node.items),
    }


_AS_IS = frozenset((type(None), bool, int, str))


def _node_of(value: Any) -> Global | Call:
    """Return a live object as the name, or the call, by which pickle would recreate it."""
    if isinstance(value, type) or callable(value):
        return _allowed(getattr(value, "__module__", None), getattr(value, "__qualname__", None))
    # as Python 3.11.7 does; 3.11.2 names getattr
    registered = copyreg.dispatch_table.get(type(value))  # e.g. for torch.layout
    reduced: Any = registered(value) if registered else value.__reduce_ex__(2)
    if isinstance(value, Enum):
        reduced = (type(value), (value.value,))
    if isinstance(reduced, str):  # the name of a constant in its module, e.g. a torch.dtype
        return _allowed(type(value).__module__, reduced)
    func, args, state, appends, items = (*reduced, None, None, None)[:5]
    new = func is copyreg.__newobj__  # type: ignore[attr-defined]
    if new:
        func, args = args[0], args[1:]
    return Call(func, args, new, state, state is not None, list(items or ()), list(appends or ()))


def _allowed(module: Any, name: Any) -> Global:
    if name not in ALLOWED.get(str(module), ()):
        raise TypeError(f"{module}.{name} can't be written into a checkpoint")
    return Global(module, name)


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

    def pairs(items: Any) -> list[tuple[Any, Any]]:
        found = [(below(key), below(inner)) for key, inner in items]
        check_keys([key for key, _ in found])
        return found

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
        return dict(pairs(data["items"]))
    if kind == "ordered":
        return Ordered(pairs(data["items"]), below(data["attributes"]))
    if kind == "global":
        return _global(data)
    if kind == "call":
        return Call(
            _global(data["func"]),
            tuple(below(inner) for inner in data["args"]),
            new=bool(data["new"]),
            state=below(data.get("state")),
            has_state="state" in data,
            items=pairs(data["items"]),
            appends=[below(inner) for inner in data["appends"]],
        )
    if kind == STORED:
        dtype, shape, extent = find(data["file"], data["key"])
        return make_tensor(dtype, shape, (Copy(extent),))
    if kind == PLACEHOLDER:
        dtype, shape = data["dtype"], tuple(data["shape"])
        if as_shape(shape) is None:
            raise ValueError("a placeholder has no shape")
        return make_tensor(dtype, shape, (Copy(Extent("", 0, math.prod(shape) * ITEMSIZE[dtype])),))
    raise ValueError(f"{kind!r} is not a kind of node")


def _global(data: dict[str, Any]) -> Global:
    module, name = data["module"], data["name"]
    if name not in ALLOWED.get(module, ()):
        raise ValueError(f"it names {module}.{name}, which no checkpoint needs")
    return Global(module, name)


PADDING = "pad"
"""``pad/N`` are bytes between tensors, which safetensors files can't have otherwise"""


@dataclass(frozen=True, slots=True)
class BundleEntry:
    """A tensor of the file, and its content."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    content: tuple[Segment, ...]
    lies: Extent | None = None
    """The storage and bytes where the optimizer keeps a live tensor"""

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.content)


def to_text(data: Any) -> str:
    """Return the JSON text used in the headers of rank shards."""
    return json.dumps(data, separators=(",", ":"))


def lay_out_tensors(path: str, entries: Iterable[BundleEntry], metadata: Mapping[str, str]) -> FileLayout:
    """Return the layout of a safetensors file; larger items first, so that every tensor is aligned."""
    return FileLayout(path, tuple(_pieces(sorted(entries, key=_alignment, reverse=True), metadata, None)))


class BundleLayout(FileLayout):
    """A rank shard. When it is filled, tensors keep the order and the offsets that they have in a source file, so that
    they can share blocks with it. Live tensors are in the optimizer's order, which is that of a composite's files."""

    def __init__(self, path: str, entries: Sequence[BundleEntry], metadata: Mapping[str, str]):
        self._entries, self._metadata = entries, metadata
        is_live = any(one.lies for one in entries)
        ordered, is_padded = _in_order(entries) if is_live else (sorted(entries, key=_alignment, reverse=True), False)
        super().__init__(path, tuple(_pieces(ordered, metadata, 0 if is_padded else None)))

    def filled(self, fill: Fill) -> FileLayout:
        return FileLayout(self.path, lambda: tuple(self._filled(fill)))

    def _filled(self, fill: Fill) -> Iterator[Segment]:
        entries = [replace(entry, content=fill_all(entry.content, fill)) for entry in self._entries]
        padded, is_padded = _in_order(entries)
        return _pieces(padded, self._metadata, 0 if is_padded else None)


def _alignment(entry: BundleEntry) -> int:
    return 1 if entry.dtype in PACKED else ITEMSIZE[entry.dtype]


def _place(entry: BundleEntry) -> tuple[str, int]:
    if entry.lies is not None:
        return entry.lies.path, entry.lies.start
    first = next(iter(entry.content), None)
    return (first.extent.path, first.extent.start) if isinstance(first, Copy) else ("", 0)


def _in_order(entries: Iterable[BundleEntry]) -> tuple[list[BundleEntry], bool]:
    """Return the entries as they follow each other where they come from, with padding; see `_padded`."""
    return _padded(sorted(entries, key=lambda entry: (-_alignment(entry), _place(entry))))


def _padded(entries: Iterable[BundleEntry]) -> tuple[list[BundleEntry], bool]:
    """Return the entries with padding before those that could share blocks, and whether there are any of these."""
    found: list[BundleEntry] = []
    at, is_padded = 0, False
    for run in in_runs(entries, _continues):
        start = shareable_start(chain.from_iterable(map(_origin, run)), _alignment(run[0]))
        is_padded |= start is not None
        if start is not None and (missing := (start - at) % BLOCK_BYTES):
            found.append(
                BundleEntry(f"{PADDING}/{len(found)}", "U8", (missing,), (Zeros(missing, "alignment for clones"),))
            )
            at += missing
        found += run
        at += sum(entry.num_bytes for entry in run)
    return found, is_padded


def _origin(entry: BundleEntry) -> tuple[Segment, ...]:
    """Return a tensor's content as copied from where it lies."""
    return entry.content if entry.lies is None else (Copy(entry.lies),)


def _continues(before: BundleEntry, entry: BundleEntry) -> bool:
    if before.lies is not None and entry.lies is not None:
        return (before.lies.path, before.lies.stop) == (entry.lies.path, entry.lies.start)
    ends = [*_origin(before)[-1:], *_origin(entry)[:1]]
    return len(ends) == 2 and len(list(consecutive(ends))) == 1


def _pieces(entries: Iterable[BundleEntry], metadata: Mapping[str, str], stop: int | None) -> Iterator[Segment]:
    """Yield the pieces of a file, whose header ends at ``stop`` modulo `BLOCK_BYTES`."""
    entries, at = list(entries), 0
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for entry in entries:
        end = at + entry.num_bytes
        dtype, shape = ("U8", (entry.num_bytes,)) if entry.dtype in PACKED else (entry.dtype, entry.shape)
        header[entry.key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    yield lay_out_header(to_text(header).encode(), stop)
    yield from chain.from_iterable(entry.content for entry in entries)
