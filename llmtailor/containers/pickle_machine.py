"""A safe pickle machine: opcodes build plain values and symbolic nodes, nothing else.

It understands a closed set of opcodes, those that ``torch.save`` and pickle's protocols 2 to 5 write for data. No bytes
can make it import, access an attribute or call anything. The number of bytes and `MAX_OPCODES` bound time and memory.
"""

from __future__ import annotations

import contextlib
import itertools
import pickletools
import struct
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
_MEMBERS = {
    Global("deepspeed.runtime.zero.config", "ZeroStageEnum"): {
        "disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3,
    },
}  # fmt: skip
"""The enums of checkpoints: class -> name of each member -> value"""


class Machine:
    """A decoder of one pickle; afterwards ``globals`` holds every global that the pickle names, in order."""

    def __init__(self, data: bytes, find_storage: FindStorage | None):
        self.data = data
        self.at = 0
        self.find_storage = find_storage
        self.stack: list[Any] = []
        self.marked: list[list[Any]] = []
        """The stack below each open mark, as in CPython: nothing can reach through a mark."""
        self.memo: dict[int, Any] = {}
        self.globals: dict[Global, None] = {}

    def run(self) -> Any:
        """Return the object. Raises ValueError and the like for anything but a complete pickle of data."""
        data = self.data
        for _ in range(MAX_OPCODES):
            code = data[self.at]
            self.at += 1
            if code == _STOP:
                if len(self.stack) != 1 or self.marked:
                    raise ValueError("it ends in the middle of an object")
                return self.stack[0]
            do = _OPCODES.get(code)
            if do is None:
                self.refuse(code)
            else:
                do(self)
        raise ValueError(f"it has more than {MAX_OPCODES:,} opcodes")

    def refuse(self, code: int) -> None:
        """Raise ValueError after recording the names in the rest; pickletools splits opcodes unknown here."""
        with contextlib.suppress(ValueError, AttributeError, OverflowError):  # the rest may be damaged as well
            for opcode, arg, _ in itertools.islice(pickletools.genops(self.data[self.at - 1 :]), _LOOKED_AT):
                if opcode.name in ("GLOBAL", "INST"):
                    self.name(*str(arg).split(" ", 1))
        raise ValueError(f"opcode {code:#04x} does not belong in a checkpoint")

    # --- bytes ---

    def take(self, length: int) -> bytes:
        at = self.at
        self.at = at + length
        chunk = self.data[at : self.at]
        if len(chunk) != length:
            raise ValueError("it ends in the middle of a value")
        return chunk

    def number(self, length: int) -> int:
        return int.from_bytes(self.take(length), "little")

    def line(self) -> str:
        end = self.data.index(b"\n", self.at)
        text = self.data[self.at : end].decode()
        self.at = end + 1
        return text

    def proto(self) -> None:
        if (version := self.number(1)) > 5:
            raise ValueError(f"protocol {version} is unknown")

    def int1(self) -> None:
        self.stack.append(self.data[self.at])
        self.at += 1

    def int4(self) -> None:
        self.stack.append(int.from_bytes(self.take(4), "little", signed=True))

    def long(self, length_bytes: int) -> None:
        length = self.number(length_bytes)
        if length > MAX_INT_BYTES:
            raise ValueError(f"an integer of {length} bytes")
        self.stack.append(int.from_bytes(self.take(length), "little", signed=True))

    def real(self) -> None:
        self.stack.append(struct.unpack(">d", self.take(8))[0])

    def text(self, length_bytes: int) -> None:
        self.stack.append(self.take(self.number(length_bytes)).decode())  # strict: refuses unpaired surrogates

    def raw(self, length_bytes: int) -> None:
        self.stack.append(self.take(self.number(length_bytes)))

    # --- memo and marks ---

    def put1(self) -> None:
        self.memo[self.data[self.at]] = self.stack[-1]
        self.at += 1

    def put4(self) -> None:
        self.memo[self.number(4)] = self.stack[-1]

    def get1(self) -> None:
        self.stack.append(self.memo[self.data[self.at]])
        self.at += 1

    def get4(self) -> None:
        self.stack.append(self.memo[self.number(4)])

    def memoize(self) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def mark(self) -> None:
        self.marked.append(self.stack)
        self.stack = []

    def pop_mark(self) -> list[Any]:
        items = self.stack
        if not self.marked:
            raise ValueError("a mark is missing")
        self.stack = self.marked.pop()
        return items

    # --- containers ---

    def to_tuple(self, count: int) -> None:
        stack = self.stack
        if len(stack) < count:
            raise ValueError("a tuple lacks items")
        stack[-count:] = [tuple(stack[-count:])]

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items([key, value])

    def set_items(self, flat: list[Any]) -> None:
        target = expect(self.stack[-1], dict, Call)
        if len(flat) % 2:
            raise ValueError("a key without a value")
        keys = check_keys(flat[::2])
        if isinstance(target, Call):
            target.items.extend(zip(keys, flat[1::2], strict=True))
        else:
            target.update(zip(keys, flat[1::2], strict=True))

    def mark_to_tuple(self) -> None:
        items = self.pop_mark()
        self.stack.append(tuple(items))

    def mark_to_list(self) -> None:
        items = self.pop_mark()
        self.stack.append(items)

    def mark_to_dict(self) -> None:
        items = self.pop_mark()
        self.stack.append({})
        self.set_items(items)

    def append(self, items: list[Any]) -> None:
        target = expect(self.stack[-1], list, Call)
        (target.appends if isinstance(target, Call) else target).extend(items)

    def add_items(self) -> None:
        items = check_keys(self.pop_mark())
        expect(self.stack[-1], set).update(items)

    # --- names and objects ---

    def name(self, module: str, attribute: str) -> None:
        named = Global(module, attribute)
        self.globals[named] = None
        self.stack.append(named)

    def stack_global(self) -> None:
        attribute, module = self.stack.pop(), self.stack.pop()
        self.name(expect(module, str), expect(attribute, str))

    def reduce(self) -> None:
        args, func = expect(self.stack.pop(), tuple), expect(self.stack.pop(), Global)
        if func == _ORDERED_DICT and not args:
            self.stack.append(Ordered())
        elif func == _ENCODE:  # how protocol 2 writes bytes
            if len(args) != 2 or not isinstance(args[0], str) or args[1] != "latin1":
                raise ValueError("_codecs.encode of something other than latin1 text")
            self.stack.append(args[0].encode("latin1"))
        elif func in GETATTR and len(args) == 2 and isinstance(args[1], str) and args[1] in _MEMBERS.get(args[0], ()):
            self.stack.append(Call(args[0], (_MEMBERS[args[0]][args[1]],)))
        else:
            self.stack.append(Call(func, args))

    def new_object(self) -> None:
        args, func = expect(self.stack.pop(), tuple), expect(self.stack.pop(), Global)
        self.stack.append(Call(func, args, new=True))

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
        self.stack.append(self.find_storage(dtype, expect(key, str), numel, expect(location, str)))


def expect(value: Any, *kinds: type) -> Any:
    if not isinstance(value, kinds):
        raise TypeError(f"a {type(value).__name__} instead of a {kinds[0].__name__}")
    return value


def check_keys(keys: list[Any]) -> list[Any]:
    for key in keys:
        if type(key) is not str and not (isinstance(key, int) and -MAX_KEY < key < MAX_KEY):
            raise ValueError(f"a key that is neither a text nor a small integer but a {type(key).__name__}")
    return keys


_STOP = ord(".")
_OPCODES: dict[int, Callable[[Machine], object]] = {
    0x80: Machine.proto,
    0x95: lambda self: self.take(8),
    ord("K"): Machine.int1,
    ord("M"): lambda self: self.stack.append(self.number(2)),
    ord("J"): Machine.int4,
    0x8A: lambda self: self.long(1),
    0x8B: lambda self: self.long(4),
    ord("G"): Machine.real,
    0x8C: lambda self: self.text(1),
    ord("X"): lambda self: self.text(4),
    0x8D: lambda self: self.text(8),
    ord("C"): lambda self: self.raw(1),
    ord("B"): lambda self: self.raw(4),
    0x8E: lambda self: self.raw(8),
    ord("N"): lambda self: self.stack.append(None),
    0x88: lambda self: self.stack.append(True),
    0x89: lambda self: self.stack.append(False),
    ord("q"): Machine.put1,
    ord("r"): Machine.put4,
    ord("h"): Machine.get1,
    ord("j"): Machine.get4,
    0x94: Machine.memoize,
    ord("("): Machine.mark,
    ord("}"): lambda self: self.stack.append({}),
    ord("]"): lambda self: self.stack.append([]),
    ord(")"): lambda self: self.stack.append(()),
    0x8F: lambda self: self.stack.append(set()),
    ord("t"): Machine.mark_to_tuple,
    0x85: lambda self: self.to_tuple(1),
    0x86: lambda self: self.to_tuple(2),
    0x87: lambda self: self.to_tuple(3),
    ord("l"): Machine.mark_to_list,
    ord("d"): Machine.mark_to_dict,
    ord("s"): Machine.set_item,
    ord("u"): lambda self: self.set_items(self.pop_mark()),
    ord("a"): lambda self: self.append([self.stack.pop()]),
    ord("e"): lambda self: self.append(self.pop_mark()),
    0x90: Machine.add_items,
    ord("c"): lambda self: self.name(self.line(), self.line()),
    0x93: Machine.stack_global,
    ord("R"): Machine.reduce,
    0x81: Machine.new_object,
    ord("b"): Machine.build,
    ord("Q"): Machine.persistent,
}
