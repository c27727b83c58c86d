"""The pickle of a ``.metadata``, with each chunk and place as a few numbers instead of a tree of objects.

A training of a thousand ranks saves a million chunks. Each takes about 100 opcodes, always the same ones, as torch's
pickler writes them: `MetadataMachine` recognizes them by their bytes, as they come in, and any other form is decoded
opcode by opcode. Both give the same, apart from that. What a chunk leaves in the memo is not kept; a pickle that refers
to it has that chunk decoded again.
"""

from __future__ import annotations

import io
import re
from array import array
from bisect import bisect_right
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

from llmtailor.containers.unpickle import Call, Global, Machine, as_shape
from llmtailor.storage.local import SourceFile

MODULE = "torch.distributed.checkpoint.metadata"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"
SIZE = Global("torch", "Size")
_CHUNK, _PLACE = Global(MODULE, "ChunkStorageMetadata"), Global(MODULE, "MetadataIndex")
_BUFFER = 64 << 10
_MAX_BYTES = 1 << 59
"""No file is as large, so sums of such numbers fit into 64 bits."""
_MAX_KNOWN = 1 << 16
"""Sizes that are remembered by their bytes"""

_MEMOIZE = b"\x94"
_INT = rb"(?:K.|M..|J...[\x00-\x7f]|\x8a(?:\x05.{4}|\x06.{5}|\x07.{6}|\x08.{7})[\x00-\x7f])"
"""An integer that is not negative"""
_INTS = rb"(\(?" + _INT + rb"*[)\x85-\x87t])"
"""The tuple of a size"""
_TEXT = rb"(?:\x8c(.[^\x94]*)\x94|(h.|j.{4}))"
"""A text, or a reference to it. No text in ASCII has the byte of MEMOIZE."""
_EACH_INT = re.compile(_INT, re.DOTALL)
_ENDS = {0: (b"", b")"), 1: (b"", b"\x85"), 2: (b"", b"\x86"), 3: (b"", b"\x87")}


class ChunkBox(NamedTuple):
    """What a chunk is decoded into."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Places:
    """Where chunks are stored, in columns: of each key rows of offsets, number of the file, start and length."""

    def __init__(self) -> None:
        self.files: dict[str, int] = {}
        self.of_key: dict[str, array[int]] = {}
        self.dimensions: dict[str, int] = {}

    def add(self, key: str, offsets: tuple[int, ...], path: str, start: int, length: int) -> None:
        """Raises ValueError if the offsets have another number of dimensions than others of the key."""
        if (rows := self.of_key.get(key)) is None:
            rows = self.of_key[key] = array("q")
            self.dimensions[key] = len(offsets)
        if len(offsets) != self.dimensions[key] or start + length >= _MAX_BYTES:
            raise ValueError(f"{key} has places that no tensor has")
        rows.extend((*offsets, self.files.setdefault(path, len(self.files)), start, length))


class _Memo(dict[int, Any]):
    """A memo that asks for what it does not hold."""

    def __init__(self, find: Callable[[int], Any]):
        super().__init__()
        self._find = find

    def __missing__(self, index: int) -> Any:
        return self._find(index)


class MetadataMachine(Machine):
    """A decoder of a ``.metadata``; ``pack`` replaces a tensor's chunks, given as `ChunkBox` or generic objects."""

    def __init__(self, source: SourceFile, max_opcodes: int, pack: Callable[[list[Any]], list[Any]]):
        self.stream = io.BufferedReader(_Raw(source), _BUFFER)
        super().__init__(self.stream, None, True, max_opcodes)
        self.source, self.pack = source, pack
        self.memo = _Memo(self._recall)
        self.places = Places()
        self.stored: Any = None
        """The dict that the places belong to"""
        self._forms: dict[Global, list[re.Pattern[bytes]]] = {}
        self._sizes: dict[bytes, tuple[int, ...] | None] = {}
        self._firsts, self._starts, self._lengths = array("q"), array("q"), array("I")
        """Of each chunk or place that was recognized, its first number in the memo, and where its bytes are"""

    def got(self, size: int) -> None:
        data = self.file.read(size)
        value = self.memo[int.from_bytes(data, "little")] if len(data) == size else None
        if type(value) is Global and value in (_CHUNK, _PLACE):
            self._take(value, 1 + size)
            return
        if len(data) < size:
            raise ValueError(f"not enough data in stream to read uint{size}")
        self.stack.append(value)

    def numbered(self, size: int) -> None:
        """Put an item into the memo under a number that the pickle gives, as protocols before 4 do."""
        if self.not_kept:
            raise ValueError("it numbers the items of its memo in two ways")
        data = self.file.read(size)
        if len(data) < size:
            raise ValueError(f"not enough data in stream to read uint{size}")
        self.put(int.from_bytes(data, "little"))

    def build(self) -> None:
        super().build()
        node = self.stack[-1]
        if isinstance(node, Call) and node.func == Global(MODULE, "TensorStorageMetadata"):
            chunks = node.state.get("chunks") if isinstance(node.state, dict) else None
            if isinstance(chunks, list):
                chunks[:] = self.pack(chunks)

    # --- what is recognized ---

    def _take(self, kind: Global, before: int) -> None:
        """Decode the chunks or places that follow, the first of which has been read up to its class."""
        forms, window = self._form(kind), self.stream.peek()
        at = start = self.stream.tell()
        stop = 0
        take = self._take_chunk if kind == _CHUNK else self._take_place if self._is_in_storage() else None
        while forms and take is not None:
            is_memoized = window[stop + 2 : stop + 3] == _MEMOIZE
            match, first = forms[is_memoized].match(window, stop), len(self.memo) + self.not_kept
            if match is None or (count := take(match, first)) is None:
                break
            stop = match.end("record")
            if is_memoized:
                self.not_kept = first + count - len(self.memo)
                self._firsts.append(first)
                self._starts.append(at - before)
                self._lengths.append(start + stop - at + before)
            following = match["next"]
            if following is None:
                self.file.read(stop)
                return
            stop, before = match.end(), len(match["class"])
            at = start + stop
        self.file.read(stop)
        self.stack.append(kind)

    def _is_in_storage(self) -> bool:
        """Whether the next item is a key of ``storage_data``."""
        outer = self.marked[-1] if self.marked else []
        if len(outer) < 2 or outer[-2] != "storage_data" or type(outer[-1]) is not dict or len(self.stack) % 2:
            return False
        self.stored = outer[-1] if self.stored is None else self.stored
        return self.stored is outer[-1]

    def _take_chunk(self, match: re.Match[bytes], first: int) -> int | None:
        """Return how many items the memo would get; None if it has to be decoded by opcodes."""
        offsets, sizes = self._size(match[2]), self._size(match[3])
        if offsets is None or sizes is None:
            return None
        self.stack.append(ChunkBox(offsets, sizes))
        return 2 + (3 if offsets else 2) + (3 if sizes else 2)

    def _take_place(self, match: re.Match[bytes], first: int) -> int | None:
        key_text, key_get, offset, path_text, path_get, start, length = match.groups()[1:8]
        key = self._text(key_text, key_get)
        offsets, path = self._size(offset), self._text(path_text, path_get)
        if key is None or offsets is None or path is None:
            return None
        at_path = first + 2 + (key_get is None) + (3 if offsets else 2) + 2
        self.places.add(key, offsets, path, _number(start), _number(length))
        if path_get is None:  # others refer to it
            self.memo[at_path] = path
        return at_path - first + (path_get is None)

    def _text(self, text: bytes | None, got: bytes | None) -> str | None:
        if got is not None:
            value = self.memo[int.from_bytes(got[1:], "little")]
            return value if type(value) is str else None
        assert text is not None, "one or the other matches"
        return text[1:].decode() if text[0] == len(text) - 1 and text.isascii() else None

    def _size(self, data: bytes) -> tuple[int, ...] | None:
        try:
            return self._sizes[data]
        except KeyError:
            pass
        ints = tuple(map(_number, _EACH_INT.findall(data)))
        begin, end = _ENDS.get(len(ints), (b"(", b"t"))
        is_whole = data.startswith(b"(") == bool(begin) and data.endswith(end)
        found = as_shape(ints) if is_whole else None
        if len(self._sizes) >= _MAX_KNOWN:
            self._sizes.clear()
        self._sizes[data] = found
        return found

    def _form(self, kind: Global) -> list[re.Pattern[bytes]]:
        """Return what matches objects of a class, up to the class of the next; nothing while parts are unknown.

        First if nothing of them gets into the memo, as llmtailor writes them, then as torch does.
        """
        if not self._forms.get(kind):
            self._forms[kind] = self._compile(kind)
        return self._forms[kind]

    def _compile(self, kind: Global) -> list[re.Pattern[bytes]]:
        words = ["offsets", "sizes"] if kind == _CHUNK else ["fqn", "index", "offset", "relative_path", "length"]
        classes = [SIZE, kind, *([] if kind == _CHUNK else [Global(FILESYSTEM, "_StorageInfo")])]
        numbers: dict[Any, list[bytes]] = {value: [] for value in (*words, *classes)}
        for number, value in self.memo.items():
            if type(value) in (str, Global) and value in numbers:
                code = b"h" + number.to_bytes(1, "little") if number < 256 else b"j" + number.to_bytes(4, "little")
                numbers[value].append(re.escape(code))
        if not all(numbers.values()):
            return []
        get = {value: b"(?:" + b"|".join(codes) + b")" for value, codes in numbers.items()}
        following = rb"(?P<next>(?:\x95.{8})?(?P<class>" + get[kind] + b"))?"
        forms, size = [], get[SIZE] + _INTS
        for put in (b"", _MEMOIZE):
            new = rb"\)\x81" + put + b"}" + put + rb"\("
            end = (rb"(?:(?<=\))|(?<!\))\x94)" if put else b"") + rb"\x85" + put + b"R" + put
            if kind == _CHUNK:
                record = new + get["offsets"] + size + end + get["sizes"] + size + end + b"ub"
            else:
                record = new + get["fqn"] + _TEXT + get["index"] + b"(?:N|" + _INT + b")" + get["offset"] + size + end
                record += b"ub" + get[classes[2]] + new + get["relative_path"] + _TEXT + get["offset"]
                record += b"(" + _INT + b")" + get["length"] + b"(" + _INT + b")ub"
            forms.append(re.compile(b"(?P<record>" + record + b")" + following, re.DOTALL))
        return forms

    # --- what is not kept ---

    def _recall(self, index: int) -> Any:
        """Decode the chunk or place that the item belongs to, keep what it leaves in the memo, and return the item."""
        at = bisect_right(self._firsts, index) - 1
        if at < 0:
            raise KeyError(index)
        memo, not_kept, file, stack, marked = self.memo, self.not_kept, self.file, self.stack, self.marked
        found = _Memo(memo.__getitem__)
        try:
            data = self.source.read(self._starts[at], self._starts[at] + self._lengths[at])
            self.memo, self.not_kept, self.stack, self.marked = found, self._firsts[at], [], []
            self.file = io.BytesIO(data)
            while code := self.file.read(1):
                Machine.opcodes[code](self)
        finally:
            self.memo, self.file, self.stack, self.marked = memo, file, stack, marked
            self.not_kept = not_kept - len(found.keys() - memo.keys())
            memo.update(found)
        return found[index] if index in found else _missing(index)


MetadataMachine.opcodes = MappingProxyType(
    {
        **Machine.opcodes,
        b"h": lambda self: self.got(1),
        b"j": lambda self: self.got(4),
        b"q": lambda self: self.numbered(1),
        b"r": lambda self: self.numbered(4),
        b"b": lambda self: self.build(),
    }
)


def _missing(index: int) -> Any:
    raise KeyError(index)


def _number(data: bytes) -> int:
    return int.from_bytes(data[2:] if data[0] == 0x8A else data[1:], "little")


class _Raw(io.RawIOBase):
    """A file as `io.BufferedReader` reads it."""

    def __init__(self, source: SourceFile):
        self._source, self._at = source, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = (0, self._at, self._source.num_bytes)[whence] + offset
        return self._at

    def readinto(self, room: Any) -> int:
        data = self._source.read(self._at, min(self._at + len(room), self._source.num_bytes))
        room[: len(data)] = data
        self._at += len(data)
        return len(data)
