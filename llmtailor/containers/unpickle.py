"""The only reader of pickles: it decodes them as data, runs nothing, and refuses what no checkpoint needs.

`Machine` understands a closed set of opcodes, those that ``torch.save`` and pickle's protocols 2 to 5 write for data;
``pickletools`` reads their arguments. They build plain values (None, bool, int, float, str, bytes, list, tuple, dict),
which represent themselves, and symbolic nodes. No bytes can make it import, access an attribute or call anything. The
number of bytes and `MAX_OPCODES` bound time and memory.

Names that are not on the list `ALLOWED` are still refused, because what we read is written into checkpoints that stock
``torch.load`` opens without protection.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import pickletools
import struct
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Any, BinaryIO

from llmtailor.checkpoint.layout import Bytes, Segment, Slot
from llmtailor.codes import Code
from llmtailor.errors import ObjectKeys, Problem, UnsafePickle, damaged
from llmtailor.model.dtypes import DTYPES, ITEMSIZE, OF_TORCH
from llmtailor.model.roles import State

STORAGE_CLASSES = {dtype.name: dtype.pickled for dtype in DTYPES.values() if dtype.pickled}
STORAGE_DTYPES = {storage: dtype for dtype, storage in STORAGE_CLASSES.items()}

MAX_DIMENSIONS = 64
"""torch's limit"""
MAX_NUMEL = 1 << 62
"""About torch's own limit: it counts bytes in 63 bits."""


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
    content: tuple[Segment, ...]
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
REBUILD_UNTYPED = Global("torch._utils", "_rebuild_tensor_v3")
UNTYPED_STORAGE = Global("torch.storage", "UntypedStorage")
REBUILD_TYPED = Global("torch._tensor", "_rebuild_from_type_v2")
_REBUILD_PARAMETERS = (
    Global("torch._utils", "_rebuild_parameter"),
    Global("torch._utils", "_rebuild_parameter_with_state"),
)


def as_tensor(node: object) -> TensorView | None:
    """Return the tensor that a node represents, or None if it is not a tensor.

    Parameters, and tensors with attributes (DeepSpeed's flat tensors have a ``ds_id``), wrap the plain form
    ``_rebuild_tensor_v2(storage, offset, shape, stride, requires_grad, hooks)``.
    """
    while isinstance(node, Call) and isinstance(node.args, tuple):
        if node.func == REBUILD_TYPED and len(node.args) == 4:
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
    """Return a list or tuple of non-negative ints, or a ``torch.Size``, as a tuple; None for anything else."""
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


def make_tensor(dtype: str, shape: tuple[int, ...], content: tuple[Segment, ...]) -> Call:
    """Return the node of a contiguous tensor with its own storage."""
    numel, strides = 1, []
    for extent in reversed(shape):
        strides.append(numel)
        numel *= extent
    storage = Storage(dtype, numel, content)
    return Call(REBUILD_TENSOR, (storage, 0, shape, tuple(reversed(strides)), False, Ordered()))


def state_tensor(state: State, dtype: str, shape: tuple[int, ...], begin: int = 0) -> Call:
    """Return the node of a tensor whose elements are those of a state, from ``begin`` on."""
    numel = math.prod(shape)
    return make_tensor(dtype, shape, (Slot(state, dtype, begin, begin + numel),) if numel else ())


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
    def content(self) -> tuple[Segment, ...]:
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


QUANTIZED = {
    "torchao.optim.subclass_8bit": {"OptimState8bit"},
    "torchao.optim.subclass_4bit": {"OptimState4bit"},
    "torchao.optim.subclass_fp8": {"OptimStateFp8"},
}
"""Classes of tensors that have the param's shape and consist of inner tensors (codes, scales), as torchao 0.18 pickles
them: ``_rebuild_from_type_v2(_rebuild_wrapper_subclass, class, (class, dtype, shape, ...), {name: inner tensor})``"""
REBUILD_WRAPPER = Global("torch._utils", "_rebuild_wrapper_subclass")


class Quantized(Call):
    """The node of a quantized tensor without its inner tensors: it equals every other one of the same form."""

    __slots__ = ()

    @classmethod
    def of(cls, node: object) -> tuple[Quantized, dict[str, Any]] | None:
        """Return a quantized tensor's node without inner tensors, and these by name; None for another node."""
        if not (isinstance(node, Call) and node.func == REBUILD_TYPED and isinstance(node.args, tuple)):
            return None
        match node.args:
            case (func, Global() as kind, tuple() as args, dict() as state) if func == REBUILD_WRAPPER:
                if kind.name not in QUANTIZED.get(kind.module, ()):
                    return None
                inner = {str(name): one for name, one in state.items() if as_tensor(one) is not None}
                return cls(node.func, (func, kind, args, {**state, **dict.fromkeys(inner)})), inner
        return None

    def filled(self, inner: Mapping[str, Any]) -> Call:
        """Return the node with these inner tensors."""
        *before, state = self.args
        return Call(self.func, (*before, {**state, **inner}))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Quantized) and _as_values(self.args) == _as_values(other.args)

    def __hash__(self) -> int:
        return hash(self.args[1])


def _as_values(node: object) -> object:
    """Return a node as something that compares by value."""
    if isinstance(node, Call):
        return node.func, _as_values(node.args), _as_values(node.state)
    if isinstance(node, dict):
        return {key: _as_values(one) for key, one in node.items()}
    return [*map(_as_values, node)] if isinstance(node, (list, tuple)) else node


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


MAX_OPCODES = 4_000_000
"""A pickle with more is refused. A tensor takes about 25, so this is enough for 160,000; an opcode's result takes a few
hundred bytes at most."""
MAX_INT_BYTES = 64
"""Integers in a checkpoint are counters and seeds. Longer ones only make arithmetic slow."""
MAX_KEY = 1 << 60
"""Keys are texts or integers below this, because others can be crafted to all have the same hash."""

_LOOKED_AT, _LOOKED_INTO = 10_000, 1 << 20
FindStorage = Callable[[str, str, int, str], Storage]
_ORDERED_DICT = Global("collections", "OrderedDict")
_ENCODE = Global("_codecs", "encode")
GETATTR = (Global("builtins", "getattr"), Global("__builtin__", "getattr"))
"""Seen with Python 3.11.2: an enum's member is pickled as ``getattr(Class, name)``; 3.11.7 writes ``Class(value)``."""
_SPECIAL = {one.name for one in (_ORDERED_DICT, _ENCODE, *GETATTR, REBUILD_UNTYPED)}
_MEMBERS = {
    Global("deepspeed.runtime.zero.config", "ZeroStageEnum"): {
        "disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3,
    },
    Global("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): {
        "TORCH_CONTIGUOUS_FORMAT": 0, "TORCH_CHANNELS_LAST": 1, "TORCH_PRESERVE_FORMAT": 2,
    },
}  # fmt: skip
"""The enums of checkpoints: class -> name of each member -> value"""


class Machine:
    """A decoder of one pickle; afterwards ``globals`` holds every global that the pickle names, in order."""

    opcodes: Mapping[bytes, Callable[[Any], object]] = MappingProxyType({})
    """What each opcode does; set below"""

    def __init__(
        self,
        data: bytes | BinaryIO,
        find_storage: FindStorage | None = None,
        object_keys: bool = False,
        max_opcodes: int = MAX_OPCODES,
    ):
        """``object_keys`` permits objects as keys; these nodes compare by identity, so equal ones stay apart."""
        self.object_keys = object_keys
        self.max_opcodes = max_opcodes
        self.file = io.BytesIO(data) if isinstance(data, bytes) else data
        self.find_storage = find_storage
        self.stack: list[Any] = []
        self.marked: list[list[Any]] = []
        """The stack below each open mark, as in CPython: nothing can reach through a mark."""
        self.memo: dict[int, Any] = {}
        self.not_kept = 0
        """Items that the memo has numbers for, and does not hold"""
        self.globals: dict[Global, None] = {}

    def run(self) -> Any:
        """Return the object. Raises ValueError and the like for anything but a complete pickle of data."""
        read, opcodes, stop = self.file.read, self.opcodes, _CODES["STOP"]
        for _ in range(self.max_opcodes):
            code = read(1)
            if (do := opcodes.get(code)) is not None:
                do(self)
            elif code != stop:
                self.refuse(code)
            elif len(self.stack) != 1 or self.marked:
                raise ValueError("it ends in the middle of an object")
            else:
                return self.stack[0]
        raise ValueError(f"it has more than {self.max_opcodes:,} opcodes")

    def refuse(self, code: bytes) -> None:
        """Raise ValueError after recording the names in the rest, up to the first damage."""
        if not code:
            raise ValueError("it ends in the middle of an object")
        with contextlib.suppress(ValueError, AttributeError, OverflowError):  # the rest may be damaged as well
            for opcode, arg, _ in itertools.islice(pickletools.genops(code + self.file.read(_LOOKED_INTO)), _LOOKED_AT):
                if opcode.name in ("GLOBAL", "INST"):
                    self.name(*str(arg).split(" ", 1))
        raise ValueError(f"opcode {code[0]:#04x} does not belong in a checkpoint")

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop_mark(self) -> list[Any]:
        items = self.stack
        if not self.marked:
            raise ValueError("a mark is missing")
        self.stack = self.marked.pop()
        return items

    # --- opcodes with an argument ---

    def proto(self, version: int) -> None:
        if version > 5:
            raise ValueError(f"protocol {version} is unknown")

    def long(self, value: int) -> None:
        if value.bit_length() >= 8 * MAX_INT_BYTES:
            raise ValueError(f"an integer of {value.bit_length() // 8 + 1} bytes")
        self.push(value)

    def text(self, value: str) -> None:
        value.encode()  # refuses unpaired surrogates
        self.push(value)

    def put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    # --- containers ---

    def mark(self) -> None:
        self.marked.append(self.stack)
        self.stack = []

    def to_tuple(self, count: int) -> None:
        stack = self.stack
        if len(stack) < count:
            raise ValueError("a tuple lacks items")
        stack[-count:] = [tuple(stack[-count:])]

    def set_items(self, flat: list[Any]) -> None:
        target = expect(self.stack[-1], dict, Call)
        if len(flat) % 2:
            raise ValueError("a key without a value")
        items = zip(check_keys(flat[::2], self.object_keys), flat[1::2], strict=True)
        (target.items.extend if isinstance(target, Call) else target.update)(items)

    def to_dict(self) -> None:
        items = self.pop_mark()
        self.push({})
        self.set_items(items)

    def extend(self, items: list[Any]) -> None:
        target = expect(self.stack[-1], list, Call)
        (target.appends if isinstance(target, Call) else target).extend(items)

    def add_items(self) -> None:
        items = check_keys(self.pop_mark())
        expect(self.stack[-1], set).update(items)

    # --- names and objects ---

    def name(self, module: str, attribute: str) -> None:
        named = Global(module, attribute)
        self.globals[named] = None
        self.push(named)

    def named_in_lines(self) -> None:
        module, attribute = self.file.readline(), self.file.readline()  # pickletools would resolve escapes in them
        if not attribute.endswith(b"\n"):
            raise ValueError("it ends in the middle of a name")
        self.name(module[:-1].decode(), attribute[:-1].decode())

    def named_on_stack(self) -> None:
        attribute, module = self.stack.pop(), self.stack.pop()
        self.name(expect(module, str), expect(attribute, str))

    def reduce(self) -> None:
        args, func = expect(self.stack.pop(), tuple), expect(self.stack.pop(), Global)
        if func.name not in _SPECIAL:  # to compare whole names takes longer
            self.push(Call(func, args))
        elif func == _ORDERED_DICT and not args:
            self.push(Ordered())
        elif func == _ENCODE:  # how protocol 2 writes bytes
            if len(args) != 2 or not isinstance(args[0], str) or args[1] != "latin1":
                raise ValueError("_codecs.encode of something other than latin1 text")
            self.push(args[0].encode("latin1"))
        elif func in GETATTR and len(args) == 2 and isinstance(args[1], str) and args[1] in _MEMBERS.get(args[0], ()):
            self.push(Call(args[0], (_MEMBERS[args[0]][args[1]],)))
        elif func == REBUILD_UNTYPED:
            self.push(Call(REBUILD_TENSOR, self.typed(args)))
        else:
            self.push(Call(func, args))

    def typed(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of ``_rebuild_tensor_v3`` as those of ``_rebuild_tensor_v2``."""
        match args:
            case (Call() as storage, *rest, Global("torch", str(name))) if storage.func == UNTYPED_STORAGE:
                dtype = OF_TORCH.get(name)
                if dtype is None or dtype in STORAGE_CLASSES or self.find_storage is None:
                    raise ValueError(f"an untyped storage of {name}")
                key, numel, location = storage.args
                return self.find_storage(dtype, key, numel // ITEMSIZE[dtype], location), *rest
        raise ValueError("a tensor in something other than an untyped storage")

    def new_object(self) -> None:
        args, func = expect(self.stack.pop(), tuple), expect(self.stack.pop(), Global)
        self.push(Call(func, args, new=True))

    def build(self) -> None:
        state = self.stack.pop()
        target = expect(self.stack[-1], Call, Ordered)
        if isinstance(target, Ordered):
            known, target.attributes = target.attributes, state
        else:
            known, target.state, target.has_state = target.state, state, True
        if known is not None:
            raise ValueError("an object gets its state twice")

    def persistent(self) -> None:
        pid = self.stack.pop()
        if self.find_storage is None or not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
            raise ValueError("a persistent id that is not a storage")
        _, kind, key, location, numel = pid
        if type(numel) is not int:
            raise ValueError("a storage without a number of elements")
        if kind == UNTYPED_STORAGE:  # typed by the call that makes a tensor of it; a call of its own is refused
            self.push(Call(kind, (expect(key, str), numel, expect(location, str))))
            return
        if not (isinstance(kind, Global) and kind.module == "torch" and kind.name in STORAGE_DTYPES):
            raise ValueError("a storage of unknown type")
        dtype = STORAGE_DTYPES[kind.name]
        self.push(self.find_storage(dtype, expect(key, str), numel, expect(location, str)))


def expect(value: Any, *kinds: type) -> Any:
    if not isinstance(value, kinds):
        raise TypeError(f"a {type(value).__name__} instead of a {kinds[0].__name__}")
    return value


class ObjectKey(ValueError):
    """A dict has an object as key."""


def check_keys(keys: list[Any], objects: bool = False) -> list[Any]:
    for key in keys:
        if objects and isinstance(key, Call):
            continue
        if type(key) is not str and not (isinstance(key, int) and -MAX_KEY < key < MAX_KEY):
            what = f"a key that is neither a text nor a small integer but a {type(key).__name__}"
            raise ObjectKey(what) if isinstance(key, Call) else ValueError(what)
    return keys


_WITH_ARGUMENT: dict[str, Callable[[Machine, Any], object]] = {
    "PROTO": Machine.proto,
    "FRAME": lambda self, length: None,
    **dict.fromkeys(("BININT1", "BININT2", "BININT", "BINFLOAT"), Machine.push),
    **dict.fromkeys(("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"), Machine.push),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), Machine.text),
    **dict.fromkeys(("LONG1", "LONG4"), Machine.long),
}
_WITHOUT: dict[str, Callable[[Machine], object]] = {
    "NONE": lambda self: self.push(None),
    "NEWTRUE": lambda self: self.push(True),
    "NEWFALSE": lambda self: self.push(False),
    "MEMOIZE": lambda self: self.put(len(self.memo) + self.not_kept),
    "MARK": Machine.mark,
    "EMPTY_DICT": lambda self: self.push({}),
    "EMPTY_LIST": lambda self: self.push([]),
    "EMPTY_TUPLE": lambda self: self.push(()),
    "EMPTY_SET": lambda self: self.push(set()),
    "TUPLE": lambda self: self.push(tuple(self.pop_mark())),
    "TUPLE1": lambda self: self.to_tuple(1),
    "TUPLE2": lambda self: self.to_tuple(2),
    "TUPLE3": lambda self: self.to_tuple(3),
    "LIST": lambda self: self.push(self.pop_mark()),
    "DICT": Machine.to_dict,
    "SETITEM": lambda self: self.set_items([self.stack.pop(), self.stack.pop()][::-1]),
    "SETITEMS": lambda self: self.set_items(self.pop_mark()),
    "APPEND": lambda self: self.extend([self.stack.pop()]),
    "APPENDS": lambda self: self.extend(self.pop_mark()),
    "ADDITEMS": Machine.add_items,
    "GLOBAL": Machine.named_in_lines,
    "STACK_GLOBAL": Machine.named_on_stack,
    "REDUCE": Machine.reduce,
    "NEWOBJ": Machine.new_object,
    "BUILD": Machine.build,
    "BINPERSID": Machine.persistent,
}
_CODES = {opcode.name: opcode.code.encode("latin1") for opcode in pickletools.opcodes}
_ARGUMENTS = {opcode.name: opcode.arg for opcode in pickletools.opcodes}


def _reading(name: str, do: Callable[[Machine, Any], object]) -> Callable[[Machine], object]:
    argument = _ARGUMENTS[name]
    assert argument is not None, "listed above as an opcode with an argument"
    read = argument.reader
    return lambda self: do(self, read(self.file))


_OPCODES = {_CODES[name]: do for name, do in _WITHOUT.items()}
_OPCODES |= {_CODES[name]: _reading(name, do) for name, do in _WITH_ARGUMENT.items()}


def _memo(size: int, is_get: bool) -> Callable[[Machine], None]:
    def run(self: Machine) -> None:
        data = self.file.read(size)
        if len(data) < size:
            raise ValueError(f"not enough data in stream to read uint{size}")
        if is_get:
            self.stack.append(self.memo[int.from_bytes(data, "little")])
        else:
            self.memo[int.from_bytes(data, "little")] = self.stack[-1]

    return run


# half of all opcodes of large pickles, at a third of the time
_OPCODES |= {_CODES["BINGET"]: _memo(1, True), _CODES["LONG_BINGET"]: _memo(4, True)}
_OPCODES |= {_CODES["BINPUT"]: _memo(1, False), _CODES["LONG_BINPUT"]: _memo(4, False)}
Machine.opcodes = MappingProxyType(_OPCODES)


_NUMPY = {
    "numpy": {"ndarray", "dtype"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
}
ALLOWED: dict[str, set[str]] = {
    "collections": {"OrderedDict", "Counter"},  # the milestones of MultiStepLR
    "builtins": {"set"},
    "__builtin__": {"set"},
    "_codecs": {"encode"},
    "torch": {"Size", "Tensor", "device", *OF_TORCH, *STORAGE_DTYPES},
    "torch.nn.parameter": {"Parameter"},
    "torch._utils": {
        "_rebuild_tensor_v2",
        "_rebuild_tensor_v3",
        "_rebuild_parameter",
        "_rebuild_parameter_with_state",
        "_rebuild_wrapper_subclass",
    },
    "torch.serialization": {"_get_layout"},
    "torch.storage": {"UntypedStorage"},
    **QUANTIZED,
    "torch._tensor": {"_rebuild_from_type_v2"},
    **_NUMPY,
    # DeepSpeed's own, under their paths since 0.14; written back by name
    "deepspeed.runtime.zero.config": {"ZeroStageEnum"},
    "deepspeed.runtime.fp16.loss_scaler": {"LossScaler", "DynamicLossScaler"},
    "deepspeed.utils.tensor_fragment": {"fragment_address"},
}
"""Every global that a checkpoint's pickle may name: module -> names."""

_ONLY_NAMED = {
    "torch": ALLOWED["torch"] - {"Size", "device"},
    "torch.nn.parameter": {"Parameter"},
    "torch.storage": {"UntypedStorage"},
    "numpy": {"ndarray"},
}
"""Globals that no checkpoint's pickle calls: ``torch.FloatStorage(10**12)`` would exhaust memory."""

MAX_DEPTH = 100
"""Deeper nesting is refused. Real checkpoints nest about ten levels."""
MAX_NODES = 32_000_000
"""Nodes of the tree, a shared one counted each time it is reached: all later code may walk the tree freely."""
_CONTAINERS = (dict, list, tuple, set, Call)
_LEAVES = {str, int, Global}
"""Most of what is not a container"""
_SHOWN = 20
_DO_NOT_LOAD = (
    "do not load this file with torch.load unless you trust it; leave this checkpoint out, or save it again without "
    "that object"
)


def read_pickle(
    data: bytes | Machine,
    where: str,
    find_storage: FindStorage | None = None,
    any_names: bool = False,
    *,
    allowed: Mapping[str, Collection[str]] = ALLOWED,
) -> Any:
    """Return a pickle, or what a machine makes of it, decoded into plain values and nodes.

    ``find_storage(dtype, key, numel, location)`` turns a torch persistent id into a `Storage`; without it
    persistent ids are refused. ``any_names`` accepts globals that are not on the list ``allowed``, as names.
    Raises UnsafePickle, with every name, for globals not on the allow-list, ObjectKeys for a dict with objects as
    keys, and SourceError for a pickle that is incomplete, damaged or crafted to exhaust memory or time.
    """
    machine = data if isinstance(data, Machine) else Machine(data, find_storage)
    damage = None
    try:
        tree = machine.run()
        check_tree(tree)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, struct.error) as error:
        damage = error
    refused = [name for name in machine.globals if name.name not in allowed.get(name.module, ())]
    if damage is None and any(name in GETATTR for name in refused):  # fine for members of enums, which are decoded
        named = globals_in(tree)
        refused = [name for name in refused if name not in GETATTR or name in named]
    if refused and not any_names:
        texts = (f"the pickle names {name}, which no checkpoint needs" for name in refused[:_SHOWN])
        unsafe = UnsafePickle([Problem(where, what, _DO_NOT_LOAD, Code.UNSAFE_PICKLE) for what in texts])
        unsafe.names = tuple((name.module, name.name) for name in refused)
        raise unsafe from damage
    if isinstance(damage, ObjectKey):
        fix = "leave this checkpoint out, or save it again without that dict"
        raise ObjectKeys.at(where, f"a dict can't be read: it has {damage}", fix) from damage
    if damage is not None:
        missing = isinstance(damage, (IndexError, KeyError))
        what = f"the pickle is damaged ({'it refers to missing items' if missing else damage})"
        raise damaged(where, what, Code.FILE_DAMAGED) from damage
    return tree


def check_tree(tree: Any) -> None:
    """Raise ValueError for a tree crafted to exhaust the memory or time of code that walks or loads it."""
    _measure(tree, 0, {})


def globals_in(node: Any) -> set[Global]:
    """Return every global that a tree names."""
    return _named(node, set())


def _named(node: Any, done: set[int]) -> set[Global]:
    if isinstance(node, Global):
        return {node}
    if not isinstance(node, _CONTAINERS) or id(node) in done:
        return set()
    done.add(id(node))
    return set().union(*(_named(child, done) for child in children(node)))


def _measure(node: Any, depth: int, done: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Return a container's depth and size. Raises ValueError for cycles, excess or forbidden calls."""
    known = done.get(id(node))
    if known is not None:
        if known[0] == 0:
            raise ValueError("it contains itself")
        return known
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    done[id(node)] = (0, 0)
    if isinstance(node, Call):
        _check_call(node)
    height, size = 1, 1
    for child in children(node):
        size += 1
        if type(child) not in _LEAVES and isinstance(child, _CONTAINERS) and (child or isinstance(child, Ordered)):
            below, inside = _measure(child, depth + 1, done)
            height, size = max(height, below + 1), size + inside
    if height > MAX_DEPTH:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    if size > MAX_NODES:
        raise ValueError(f"it expands to more than {MAX_NODES:,} values")
    done[id(node)] = (height, size)
    return height, size


def _check_call(node: Call) -> None:
    if node.func.name in _ONLY_NAMED.get(node.func.module, ()):
        raise ValueError(f"it calls {node.func}, which checkpoints only name")
    if node.func.name == REBUILD_TENSOR.name and node.func == REBUILD_TENSOR:  # to compare whole names takes longer
        view = as_tensor(node)
        if view is None or not view.fits:
            raise ValueError("a tensor extends beyond its storage")
    if node.func.name == REBUILD_TYPED.name and node.func == REBUILD_TYPED:  # which calls its first argument
        inner = node.args[0] if node.args else None
        if not isinstance(inner, Global) or inner.module != "torch._utils":
            raise ValueError(f"it calls {node.func} for something other than a tensor")
