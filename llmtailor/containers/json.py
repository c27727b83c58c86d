"""Checked access to untrusted content: JSON, names, and the object trees of stock files.

Everything is bounded in size, and each missing or malformed value is a SourceError with its location. `Trees` reads the
object trees, from the files themselves or from a partial checkpoint.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from llmtailor.checkpoint.index import TensorEntry
from llmtailor.checkpoint.layout import Copy
from llmtailor.checkpoint.placement import Contiguous, Extent
from llmtailor.codes import Code
from llmtailor.containers.torch_file import TorchFile, Undecoded, open_torch_file, read_torch_file
from llmtailor.containers.unpickle import SmallTensor, TensorView, as_shape, as_tensor
from llmtailor.errors import AnotherOptimizer, UnsupportedCheckpoint, damaged
from llmtailor.model.dtypes import FLOATING, ITEMSIZE
from llmtailor.model.roles import BUFFER, FROZEN, MASTER, MODULE, WEIGHT
from llmtailor.storage.local import open_source, read_source

MAX_BYTES = 64 << 20
"""Enough for a trainer_state.json that logs 400,000 steps. Its Python objects take up to 20 times as much memory."""
_MOST_DIGITS = 300
"""Of integers; a float has up to 308"""


def read_json(path: Path, where: str) -> dict[str, Any]:
    """Return the JSON object in a file. Raises SourceError for anything else."""
    return parse_json(read_source(path, where, MAX_BYTES), where)


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """Return a JSON object. Raises SourceError for anything else.

    As for stock software that resumes from the file, the last of duplicate keys counts, NaN is a number, and the text
    is UTF-8 without a byte order mark.
    """
    try:
        content = decode(data)
    except (ValueError, RecursionError) as error:
        raise damaged(where, f"the file is not JSON ({error})", Code.FILE_DAMAGED) from error
    if not isinstance(content, dict):
        raise damaged(where, "the file is not a JSON object", Code.FILE_DAMAGED)
    return content


def decode(data: str | bytes) -> Any:
    """Return decoded JSON, with infinity for an integer that is too large for a float.

    Raises ValueError or RecursionError.
    """
    return json.loads(data if isinstance(data, str) else data.decode(), parse_int=_integer)


def _integer(text: str) -> int | float:
    return int(text) if len(text) < _MOST_DIGITS else float(text)


def read_strict_json(data: bytes) -> Any:
    """Return decoded JSON; refuse duplicate keys, NaN, and integers as `decode` does not return them.

    Raises ValueError or RecursionError.
    """
    return json.loads(data, object_pairs_hook=_no_twins, parse_constant=_no_constant, parse_int=_no_infinity)


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a duplicate key")
    return found


def _no_infinity(text: str) -> int:
    if len(text) >= _MOST_DIGITS:
        raise ValueError(f"an integer has {len(text)} digits")
    return int(text)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


MAX_NAME = 1000
MAX_COUNT = 1 << 53
"""Counts are below this, so that they are exact as floats, which Adam's steps are."""


def check_name(name: Any, what: str, where: str) -> str:
    """Return a valid name: one without control characters and unpaired surrogates, so that JSON, digests and terminals
    can hold it. Raises SourceError for anything else."""
    if not isinstance(name, str):
        raise damaged(where, f"{what} has a {type(name).__name__} as its name")
    if not is_name(name):
        raise damaged(where, f"{what} has the invalid name {name[:60]!r}")
    return name


def is_name(value: Any) -> bool:
    """Return whether a value is a name that `check_name` accepts."""
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME and value.isprintable()


def is_path_below(path: str) -> bool:
    """Return whether a relative path, with ``/``, stays below its starting folder."""
    words = path.split("/")
    return path.isprintable() and not any(word in ("", ".", "..") for word in words)


def is_count(value: Any) -> bool:
    """Return whether a value is a count; True and False are not, though Python treats them as ints."""
    return type(value) is int and 0 <= value < MAX_COUNT


STEP_FORMATS = {"F32": "<f", "F64": "<d", "I64": "<q", "I32": "<i"}
"""Dtypes of a step -> `struct` format. torch writes the first; a resume also accepts the others."""
_OF_ADAM = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
_OUR_KINDS = (WEIGHT, MASTER, FROZEN, MODULE, BUFFER)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A contiguous tensor in a file."""

    dtype: str
    shape: tuple[int, ...]
    extent: Extent

    @property
    def numel(self) -> int:
        return self.extent.num_bytes // ITEMSIZE[self.dtype]

    @property
    def entry(self) -> TensorEntry:
        return TensorEntry(self.dtype, self.shape, Contiguous(self.extent, ITEMSIZE[self.dtype]))


def read_shapes(node: Any, what: str, where: str) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for name, size in as_dict(node, what, where).items():
        shape = as_shape(size)
        if shape is None:
            raise damaged(where, f"{what} gives no shape for {name}", Code.FIELD_TYPE)
        shapes[check_name(name, what, where)] = shape
    return shapes


def read_tied(node: Any, where: str) -> dict[str, str]:
    """Return ``shared_params``: tied names, and the names their values are stored under."""
    tied = as_dict(node or {}, "shared_params", where)
    for name in (*tied, *tied.values()):
        check_name(name, "shared_params", where)
    if both := tied.keys() & set(tied.values()):
        raise damaged(where, f"shared_params ties {min(both)}, and ties others to it", Code.TIED)
    return tied


def read_names(node: Any, what: str, where: str) -> frozenset[str]:
    if not isinstance(node or [], (list, tuple)):
        raise damaged(where, f"{what} is a {type(node).__name__}, not a list", Code.FIELD_TYPE)
    return frozenset(check_name(name, what, where) for name in node or ())


def extent_of(view: TensorView, what: str, where: str) -> Extent:
    """Return the extent of a contiguous view's elements. Raises SourceError or UnsupportedCheckpoint."""
    carried = view.storage.content[0]
    if not view.is_contiguous:  # torch reads it; here bytes are copied without rearranging them
        fix = "save it again with contiguous tensors"
        raise UnsupportedCheckpoint.at(where, f"{what} is not contiguous", fix, Code.STATE_LAYOUT)
    if not isinstance(carried, Copy) or view.offset + view.numel > view.storage.numel:
        raise damaged(where, f"{what} extends beyond its storage", Code.STATE_SIZE)
    itemsize = ITEMSIZE[view.storage.dtype]
    start = carried.extent.start + view.offset * itemsize
    return Extent(carried.extent.path, start, start + view.numel * itemsize)


def read_tensor(node: Any, what: str, where: str) -> Tensor:
    view = as_tensor(node)
    if view is None:
        raise damaged(where, f"{what} is not a tensor", Code.FIELD_TYPE)
    return Tensor(view.storage.dtype, view.shape, extent_of(view, what, where))


def get(tree: Any, key: str, kind: type, where: str) -> Any:
    value = as_dict(tree, "the file", where).get(key)
    if not isinstance(value, kind):
        if value is None:
            raise damaged(where, f"{key} is missing", Code.FIELD_MISSING)
        raise damaged(where, f"{key} is a {type(value).__name__}, not a {kind.__name__}", Code.FIELD_TYPE)
    return value


def get_count(tree: Any, key: str, where: str) -> int:
    """Return a counter, a non-negative int. Raises SourceError for anything else."""
    value: int = get(tree, key, int, where)
    if not is_count(value):
        raise damaged(where, f"{key} is {value}, not a valid count", Code.FIELD_RANGE)
    return value


def as_dict(value: Any, what: str, where: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise damaged(where, f"{what} is a {type(value).__name__}, not a dict", Code.FIELD_TYPE)
    return value


def read_elementwise(state: dict[Any, Any], numel: int | None, flat_id: int, where: str) -> dict[str, Tensor]:
    """Return the flat tensors of a sub-group's state, all with ``numel`` elements if that is given.

    Left out are the step, and what is no tensor or has no dimensions. Raises AnotherOptimizer for states that are
    not elementwise: in a flat tensor of several params, which is cut anywhere, they belong to none of them.
    """
    kinds = {}
    for kind, node in state.items():
        name, view = f"{kind} of sub-group {flat_id}", as_tensor(node)
        if kind in _OF_ADAM and view is None:
            raise damaged(where, f"{name} is not a tensor", Code.FIELD_TYPE)
        if kind == "step" or view is None or not (view.shape or kind in _OF_ADAM):
            continue
        is_flat = len(view.shape) == 1 and view.storage.dtype in FLOATING
        if kind not in _OF_ADAM and (not is_flat or numel not in (None, view.numel)):  # those are, whatever their shape
            have = f"is {view.storage.dtype} with shape {list(view.shape)}"
            raise AnotherOptimizer.at(
                where,
                f"optimizer state {kind} {have}, which is not one value for each element of the params: it can't be "
                "assigned to params, whose elements DeepSpeed joins and cuts anywhere",
                "resume on as many ranks with the training itself; to compose checkpoints, train without DeepSpeed, or "
                "with an optimizer with elementwise states",
            )
        if numel not in (None, view.numel):
            raise damaged(where, f"{name} has {view.numel} elements instead of {numel}", Code.STATE_SIZE)
        kinds[check_kind(kind, where)] = read_tensor(node, f"state[{flat_id}][{kind}]", where)
    return kinds


_OPTION_BYTES = 1024
"""Larger tensors are not hyperparameters, and are not read"""


def read_option(root: Path, value: Any, where: str) -> Any:
    """Return an option of a param group. Small tensors in it, such as ``lr`` and ``betas``, get their bytes, so that
    options can be compared, and written in every layout. Raises SourceError for a file that can't be read."""
    if type(value) in (list, tuple):
        return type(value)(read_option(root, one, where) for one in value)
    view = as_tensor(value)
    if view is None or view.numel * ITEMSIZE[view.storage.dtype] > _OPTION_BYTES:
        return value
    tensor, data = read_tensor(value, "an option of a param group", where), b""
    if tensor.numel:
        with open_source(root / tensor.extent.path, where) as file:
            data = bytes(file.read(tensor.extent.start, tensor.extent.stop))
    return SmallTensor(tensor.dtype, tensor.shape, data, view.storage.location)


def check_kind(kind: Any, where: str) -> str:
    """Return the name of an elementwise state. Raises SourceError for a name that is reserved here."""
    if kind in _OUR_KINDS:
        raise damaged(where, f"an optimizer state is called {kind!r}, which no optimizer uses", Code.FIELD_UNKNOWN)
    return check_name(kind, "an optimizer state", where)


def read_step(root: Path, node: Any, flat_id: int, where: str) -> float:
    """Return Adam's step, an int or a tensor of one element. Raises SourceError if it is not a number of steps."""
    if isinstance(node, (int, float)):
        step: float = node
    else:
        tensor = node if isinstance(node, Tensor) else read_tensor(node, f"state[{flat_id}][step]", where)
        if tensor.dtype not in STEP_FORMATS or tensor.numel != 1:
            raise damaged(where, f"the step of sub-group {flat_id} is not a number", Code.FIELD_TYPE)
        with open_source(root / tensor.extent.path, where) as file:
            step = struct.unpack(STEP_FORMATS[tensor.dtype], file.read(tensor.extent.start, tensor.extent.stop))[0]
    if isinstance(step, bool) or not 0 <= step < MAX_COUNT or step != int(step):
        raise damaged(where, f"the step of sub-group {flat_id} is {step}, not a number of steps", Code.FIELD_RANGE)
    return float(step)


class Trees(Protocol):
    """A reader of one checkpoint's stock files."""

    @property
    def root(self) -> Path: ...

    @property
    def inside(self) -> Collection[str]:
        """Stock files, by relative path, whose trees are inside other files"""

    def read(self, path: str, where: str) -> TorchFile:
        """Decode a stock file; no tensor byte is read. Messages call it ``where``.

        Raises SourceError for missing or damaged files, and UnsafePickle for names that are not on the allow-list.
        """

    def open(self, path: str, where: str) -> Undecoded:
        """Read enough of a stock file to compare it with others, without decoding it. Raises what `read` raises."""


@dataclass(frozen=True, slots=True)
class FileTrees:
    """A reader of stock files as stock software writes them."""

    root: Path
    inside: Collection[str] = ()

    def read(self, path: str, where: str) -> TorchFile:
        return read_torch_file(self.root, path, where)

    def open(self, path: str, where: str) -> Undecoded:
        return open_torch_file(self.root, path, where)
