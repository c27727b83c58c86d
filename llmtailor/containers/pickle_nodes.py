"""A pickle as data: what the reader returns and the writer takes.

Plain values (None, bool, int, float, str, bytes, list, tuple, dict) represent themselves. Everything else stays
symbolic: nothing is imported, looked up or called.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from llmtailor.checkpoint.layout import Bytes, Piece

STORAGE_DTYPES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
    "Float8_e4m3fnStorage": "F8_E4M3",
    "Float8_e5m2Storage": "F8_E5M2",
    "ComplexFloatStorage": "C64",
}
"""torch's storage classes, as pickles name them, and the safetensors dtype of their elements."""

MAX_DIMENSIONS = 64
MAX_NUMEL = 1 << 62
"""About torch's own limit: it counts bytes in 63 bits."""

STORAGE_CLASSES = {dtype: name for name, dtype in STORAGE_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function that a pickle names; only ever a name."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Ordered(dict[Any, Any]):
    """A ``collections.OrderedDict`` with its attributes (``_metadata`` of a module's state dict)."""

    __slots__ = ("attributes",)

    def __init__(self, items: Iterable[tuple[Any, Any]] = (), attributes: Any = None):
        super().__init__(items)
        self.attributes = attributes


@dataclass(slots=True, eq=False)
class Call:
    """An object that unpickling would create by calling ``func`` with ``args``, then set up."""

    func: Any
    args: Any
    new: bool = False
    """Whether it is created by ``cls.__new__`` (NEWOBJ) rather than a call (REDUCE)"""
    state: Any = None
    has_state: bool = False
    items: list[tuple[Any, Any]] = field(default_factory=list)
    appends: list[Any] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Storage:
    """A tensor's storage: a record of the zip file. ``content`` says where its bytes come from."""

    dtype: str
    numel: int
    content: tuple[Piece, ...]
    location: str = "cpu"


@dataclass(frozen=True, slots=True)
class TensorView:
    """A tensor as a pickle describes it: a view of a storage. Offset and strides count elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def fits(self) -> bool:
        """Whether all elements lie within the storage"""
        if self.numel == 0:
            return True
        last = sum((extent - 1) * stride for extent, stride in zip(self.shape, self.stride, strict=True))
        return self.offset + last < self.storage.numel

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for extent, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if extent != 1 and stride != expected:
                return self.numel == 0
            expected *= extent
        return True


REBUILD_TENSOR = Global("torch._utils", "_rebuild_tensor_v2")
_REBUILD_TYPED = Global("torch._tensor", "_rebuild_from_type_v2")
_REBUILD_PARAMETERS = (
    Global("torch._utils", "_rebuild_parameter"),
    Global("torch._utils", "_rebuild_parameter_with_state"),
)


def as_tensor(node: object) -> TensorView | None:
    """Return the tensor that a node represents, or None if it is not a tensor.

    Tensors with attributes (DeepSpeed hangs a ``ds_id`` on its flat tensors) and Parameters wrap the plain
    form, ``_rebuild_tensor_v2(storage, offset, shape, stride, requires_grad, hooks)``.
    """
    while isinstance(node, Call) and isinstance(node.args, tuple):
        if node.func == _REBUILD_TYPED and len(node.args) == 4:
            node = Call(node.args[0], node.args[2])
        elif node.func in _REBUILD_PARAMETERS and node.args:
            node = node.args[0]
        else:
            break
    if not (isinstance(node, Call) and node.func == REBUILD_TENSOR and isinstance(node.args, tuple)):
        return None
    if len(node.args) < 4 or not isinstance(node.args[0], Storage):
        return None
    storage, offset = node.args[:2]
    shape, stride = as_shape(node.args[2]), as_ints(node.args[3])
    if type(offset) is not int or offset < 0 or shape is None or stride is None or len(shape) != len(stride):
        return None
    return TensorView(storage, offset, shape, stride)


def as_ints(node: object) -> tuple[int, ...] | None:
    """Return a tuple of non-negative ints or a ``torch.Size`` as a tuple, or None for anything else."""
    if isinstance(node, Call) and node.func == Global("torch", "Size") and isinstance(node.args, tuple):
        node = node.args[0] if len(node.args) == 1 else None
    if isinstance(node, (tuple, list)) and all(type(item) is int and item >= 0 for item in node):
        return tuple(node)
    return None


def as_shape(node: object) -> tuple[int, ...] | None:
    """Return a shape as a tuple, or None if it is not a shape, or one of a tensor too large for any memory."""
    shape = as_ints(node)
    if shape is None or len(shape) > MAX_DIMENSIONS or math.prod(extent for extent in shape if extent) > MAX_NUMEL:
        return None
    return shape


def make_tensor(dtype: str, shape: tuple[int, ...], content: tuple[Piece, ...]) -> Call:
    """Return the node of a contiguous tensor with its own storage."""
    numel, strides = 1, []
    for extent in reversed(shape):
        strides.append(numel)
        numel *= extent
    storage = Storage(dtype, numel, content)
    return Call(REBUILD_TENSOR, (storage, 0, shape, tuple(reversed(strides)), False, Ordered()))


_NUMBERS = {"F64": "<d", "F32": "<f", "F16": "<e", "I64": "<q", "I32": "<i", "I16": "<h", "I8": "<b", "U8": "<B"}


class SmallTensor(Call):
    """The node of a tensor whose bytes are known: it equals every other one with the same elements."""

    __slots__ = ("data", "dtype", "shape")

    def __init__(self, dtype: str, shape: tuple[int, ...], data: bytes, location: str = "cpu"):
        self.dtype, self.shape, self.data = dtype, shape, data
        made = make_tensor(dtype, shape, self.content)
        made.args[0].location = location  # the device that torch.load puts it on
        super().__init__(made.func, made.args)

    @property
    def content(self) -> tuple[Piece, ...]:
        return (Bytes(self.data, "an option of a param group"),) if self.data else ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SmallTensor) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        number = as_number(self)
        return f"tensor({self.data.hex() if number is None else f'{number:.7g}'})"

    def _key(self) -> tuple[object, ...]:
        return self.dtype, self.shape, self.data


def as_number(node: object) -> float | None:
    """Return a number, or that of a tensor of one element with known bytes; None for anything else."""
    if isinstance(node, SmallTensor):
        if node.dtype == "BF16" and len(node.data) == 2:
            return float(struct.unpack("<f", b"\0\0" + node.data)[0])
        form = _NUMBERS.get(node.dtype)
        return float(struct.unpack(form, node.data)[0]) if form and struct.calcsize(form) == len(node.data) else None
    return node if isinstance(node, (int, float)) and not isinstance(node, bool) else None


def children(node: object) -> Iterable[Any]:
    """Return the nodes that a node holds directly."""
    if isinstance(node, dict):
        return chain(node, node.values(), (node.attributes,) if isinstance(node, Ordered) else ())
    if isinstance(node, (list, tuple, set)):
        return node
    if isinstance(node, Call):
        of_call = (node.func, node.args, node.state)
        return of_call if not (node.items or node.appends) else chain(of_call, chain(*node.items), node.appends)
    return ()
