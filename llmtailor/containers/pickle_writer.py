"""Writing pickles that name classes without importing them.

The bytes are protocol 2, as ``torch.save`` writes. Strings and containers that occur twice are written once
and fetched from the memo, so that sharing survives.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from types import NoneType
from typing import Any

from llmtailor.containers.unpickle import (
    REBUILD_TENSOR,
    REBUILD_UNTYPED,
    STORAGE_CLASSES,
    UNTYPED_STORAGE,
    Call,
    Global,
    Ordered,
    Storage,
)
from llmtailor.model.dtypes import DTYPES, ITEMSIZE

_M, _J = struct.Struct("<cH").pack, struct.Struct("<ci").pack
_PROTO, STOP = b"\x80\x02", b"."


def write_pickle(tree: Any) -> tuple[bytes, list[Storage]]:
    """Return the pickle of a tree as `unpickle.read_pickle` returns it, and its storages in the order of their keys.

    Storage number n is written with the key ``str(n)``, so its record is ``data/n``.
    """
    writer = PickleWriter()
    writer.save(tree)
    return writer.taken() + STOP, writer.storages


class PickleWriter:
    """A pickle being written, piece by piece."""

    def __init__(self) -> None:
        self.out = bytearray(_PROTO)
        self.memo: dict[Any, int] = {}
        self.alive: list[Any] = []  # temporaries whose id() is in the memo must not be collected
        self.storages: list[Storage] = []
        self.keys: dict[int, str] = {}

    def taken(self) -> bytes:
        """Return what has been written since the last call."""
        data, self.out = bytes(self.out), bytearray()
        return data

    def got(self, key: Any) -> bytes:
        """Return the reference to what has been written: by a text or name, or the ``id`` of anything else."""
        index = self.memo[key]
        return b"h%c" % index if index < 256 else b"j" + struct.pack("<I", index)

    def save(self, node: Any) -> None:
        if type(node) is int and 0 <= node < 1 << 31:  # by the million, where tensor-parallel shards are described
            self.out += b"K%c" % node if node < 1 << 8 else _M(b"M", node) if node < 1 << 16 else _J(b"J", node)
            return
        key = node if isinstance(node, (str, Global)) else id(node)
        if not isinstance(node, _NUMBERS) and key in self.memo:
            self.out += self.got(key)
            return
        save = next((_SAVERS[kind] for kind in type(node).__mro__ if kind in _SAVERS), None)
        if save is None:
            raise TypeError(f"{type(node).__name__} has no pickle form")
        save(self, node, key)

    def save_number(self, node: bool | int | float | None, key: Any) -> None:
        plain = node if node is None or isinstance(node, bool) else (int if isinstance(node, int) else float)(node)
        self.out += pickle.dumps(plain, 2)[len(_PROTO) : -len(STOP)]

    def save_text(self, node: str, key: Any) -> None:
        data = node.encode("utf-8", "surrogatepass")
        self.out += b"X" + struct.pack("<I", len(data)) + data
        self.put(key)

    def save_global(self, node: Global, key: Any) -> None:
        self.out += f"c{node.module}\n{node.name}\n".encode()
        self.put(key)

    def save_bytes(self, node: bytes, key: Any) -> None:  # protocol 2 has no opcode for bytes or sets
        self.save(self.keep(Call(Global("_codecs", "encode"), (node.decode("latin1"), "latin1"))))

    def save_set(self, node: set[Any], key: Any) -> None:
        self.save(self.keep(Call(Global("__builtin__", "set"), (list(node),))))

    def save_ordered(self, node: Ordered, key: Any) -> None:
        self.save_call(Call(Global("collections", "OrderedDict"), (), items=list(node.items())), key)
        if node.attributes is not None:
            self.save(node.attributes)
            self.out += b"b"

    def save_dict(self, node: dict[Any, Any], key: Any) -> None:
        self.out += b"}"
        self.put(key)
        self.set_items(list(node.items()))

    def save_list(self, node: list[Any], key: Any) -> None:
        self.out += b"]"
        self.put(key)
        self.append(node)

    def keep(self, node: Any) -> Any:
        self.alive.append(node)
        return node

    def put(self, key: Any) -> None:
        index = self.memo[key] = len(self.memo)
        self.out += b"q" + bytes([index]) if index < 256 else b"r" + struct.pack("<I", index)

    def save_tuple(self, node: tuple[Any, ...], key: Any) -> None:
        if not node:
            self.out += b")"
            return
        if len(node) > 3:
            self.out += b"("
        for item in node:
            self.save(item)
        self.out += (b"\x85", b"\x86", b"\x87")[len(node) - 1] if len(node) <= 3 else b"t"
        self.put(key)

    def save_call(self, node: Call, key: Any) -> None:
        if node.func == REBUILD_TENSOR and node.args[0].dtype not in STORAGE_CLASSES:
            args = (*node.args, Global("torch", DTYPES[node.args[0].dtype].torch))
            node = self.keep(Call(REBUILD_UNTYPED, self.keep(args)))
        self.save(node.func)
        self.save(node.args)
        self.out += b"\x81" if node.new else b"R"
        self.put(key)
        self.append(node.appends)
        self.set_items(node.items)
        if node.has_state:
            self.save(node.state)
            self.out += b"b"

    def set_items(self, items: list[tuple[Any, Any]]) -> None:
        if items:
            self.out += b"("
            for key, value in items:
                self.save(key)
                self.save(value)
            self.out += b"u"

    def append(self, items: list[Any]) -> None:
        if items:
            self.out += b"("
            for item in items:
                self.save(item)
            self.out += b"e"

    def save_storage(self, node: Storage, _key: Any) -> None:
        key = self.keys.get(id(node))
        if key is None:
            key = self.keys[id(node)] = str(len(self.storages))
            self.storages.append(node)
        named = STORAGE_CLASSES.get(node.dtype)
        kind, size = (Global("torch", named), 1) if named else (UNTYPED_STORAGE, ITEMSIZE[node.dtype])
        pid = ("storage", kind, key, node.location, node.numel * size)
        self.save_tuple(self.keep(pid), id(pid))
        self.out += b"Q"


_NUMBERS = (bool, int, float, NoneType)
_SAVERS: dict[type, Callable[[PickleWriter, Any, Any], None]] = {
    **dict.fromkeys(_NUMBERS, PickleWriter.save_number),
    str: PickleWriter.save_text,
    Global: PickleWriter.save_global,
    Storage: PickleWriter.save_storage,
    bytes: PickleWriter.save_bytes,
    set: PickleWriter.save_set,
    Ordered: PickleWriter.save_ordered,
    Call: PickleWriter.save_call,
    dict: PickleWriter.save_dict,
    list: PickleWriter.save_list,
    tuple: PickleWriter.save_tuple,
}
"""Type of a node -> what writes it"""
