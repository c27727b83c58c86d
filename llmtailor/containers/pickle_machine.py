"""A safe pickle machine: opcodes build plain values and symbolic nodes, nothing else.

It understands a closed set of opcodes, those that ``torch.save`` and pickle's protocols 2 to 5 write for data;
``pickletools`` reads their arguments. No bytes can make it import, access an attribute or call anything. The number of
bytes and `MAX_OPCODES` bound time and memory.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import pickletools
from collections.abc import Callable
from typing import Any

from llmtailor.containers.pickle_nodes import STORAGE_DTYPES, Call, Global, Ordered, Storage

MAX_OPCODES = 4_000_000
"""A pickle with more is refused. A tensor takes about 25, so this is enough for 160,000; an opcode's result takes a few
hundred bytes at most."""
MAX_INT_BYTES = 64
"""Integers in a checkpoint are counters and seeds. Longer ones only make arithmetic slow."""
MAX_KEY = 1 << 60
"""Keys are texts or integers below this, because others can be crafted to all have the same hash."""

_LOOKED_AT = 10_000
FindStorage = Callable[[str, str, int, str], Storage]
_ORDERED_DICT = Global("collections", "OrderedDict")
_ENCODE = Global("_codecs", "encode")
GETATTR = (Global("builtins", "getattr"), Global("__builtin__", "getattr"))
"""Seen with Python 3.11.2: an enum's member is pickled as ``getattr(Class, name)``; 3.11.7 writes ``Class(value)``."""
_SPECIAL = {one.name for one in (_ORDERED_DICT, _ENCODE, *GETATTR)}
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

    def __init__(
        self,
        data: bytes,
        find_storage: FindStorage | None,
        object_keys: bool = False,
        max_opcodes: int = MAX_OPCODES,
    ):
        """``object_keys`` permits objects as keys; these nodes compare by identity, so equal ones stay apart."""
        self.object_keys = object_keys
        self.max_opcodes = max_opcodes
        self.file = io.BytesIO(data)
        self.find_storage = find_storage
        self.stack: list[Any] = []
        self.marked: list[list[Any]] = []
        """The stack below each open mark, as in CPython: nothing can reach through a mark."""
        self.memo: dict[int, Any] = {}
        self.globals: dict[Global, None] = {}

    def run(self) -> Any:
        """Return the object. Raises ValueError and the like for anything but a complete pickle of data."""
        read, opcodes, stop = self.file.read, _OPCODES, _CODES["STOP"]
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
        """Raise ValueError after recording the names in the rest, as far as it is a pickle."""
        if not code:
            raise ValueError("it ends in the middle of an object")
        with contextlib.suppress(ValueError, AttributeError, OverflowError):  # the rest may be damaged as well
            for opcode, arg, _ in itertools.islice(pickletools.genops(code + self.file.read()), _LOOKED_AT):
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
        else:
            self.push(Call(func, args))

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
        if not (isinstance(kind, Global) and kind.module == "torch" and kind.name in STORAGE_DTYPES):
            raise ValueError("a storage of unknown type")
        if type(numel) is not int:
            raise ValueError("a storage without a number of elements")
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
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), Machine.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda self, index: self.push(self.memo[index])),
}
_WITHOUT: dict[str, Callable[[Machine], object]] = {
    "NONE": lambda self: self.push(None),
    "NEWTRUE": lambda self: self.push(True),
    "NEWFALSE": lambda self: self.push(False),
    "MEMOIZE": lambda self: self.put(len(self.memo)),
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


def _get(size: int) -> Callable[[Machine], None]:
    def get(self: Machine) -> None:
        data = self.file.read(size)
        if len(data) < size:
            raise ValueError(f"not enough data in stream to read uint{size}")
        self.stack.append(self.memo[int.from_bytes(data, "little")])

    return get


def _put(size: int) -> Callable[[Machine], None]:
    def put(self: Machine) -> None:
        data = self.file.read(size)
        if len(data) < size:
            raise ValueError(f"not enough data in stream to read uint{size}")
        self.memo[int.from_bytes(data, "little")] = self.stack[-1]

    return put


# half of all opcodes of large pickles, at a third of the time
_OPCODES |= {_CODES["BINGET"]: _get(1), _CODES["LONG_BINGET"]: _get(4)}
_OPCODES |= {_CODES["BINPUT"]: _put(1), _CODES["LONG_BINPUT"]: _put(4)}
