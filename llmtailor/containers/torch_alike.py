"""Which torch files are alike? Tells it by their bytes, without decoding them.

The ranks of a training write thousands of files that differ in nothing but the archive's name, which is in the header
of every record, and in tensors.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

from llmtailor.containers.torch_zip import MAX_PICKLE_BYTES, TorchFile, decode_torch_file, parse_torch_file
from llmtailor.containers.views import Buffered, Held, Window
from llmtailor.containers.zip import BadZip, find_directory, read_records
from llmtailor.storage.local import SourceFile, open_source

T = TypeVar("T")
_HEADERS_ONLY = 512
"""A file with at most so many bytes per record consists of headers."""
_AHEAD = 2048
"""Enough for what precedes the elements in a blob"""
_HASH = "/.data/serialization_id"
_CRC_IN_DESCRIPTOR = 4
"""Where the checksum is in the data descriptor, which follows the elements"""
_NAME_AT = 30
"""Where the name of the first record is: after the fixed part of a zip's local header, whose bytes 26 and 27 have its
length"""


@dataclass(frozen=True, slots=True)
class Undecoded:
    """A file that is open no longer, and whose pickle is not decoded yet."""

    archive: str
    """See `TorchFile.archive`"""
    key: bytes | None
    """Equal for files that differ in their names only, or in tensors of more than 8 bytes; None if that is unknown"""
    decode: Callable[[], TorchFile]
    """Raises what `read_torch_file` raises"""


def open_torch_file(root: Path, path: str, where: str) -> Undecoded:
    """Read ``root/path`` as far as needed to tell whether it is like another file. Raises as `read_torch_file`."""
    with open_source(root / path, where) as source:
        whole = _read_headers_only(Buffered(source))
        if whole is None:
            return open_torch_blob(source, path, where)
    archive, key = _key_of(*whole)
    return Undecoded(archive, key, lambda: decode_torch_file(Held(whole[0], where), path, where))


def open_torch_blob(file: SourceFile, path: str, where: str) -> Undecoded:
    """Do the same for an open file, or a `Window` of one; what comes before the window does not count for the key."""
    parsed, first = parse_torch_file(Buffered(file), where), file.start if isinstance(file, Window) else 0
    return Undecoded(parsed.archive, parsed.key(), lambda: parsed.decode(path, first, where))


@dataclass(frozen=True, slots=True)
class _Form(Generic[T]):
    """What is equal in blobs that are alike."""

    head: bytes
    """What precedes the elements"""
    tail: bytes
    """What follows them, with zeros for what differs"""
    differing: tuple[tuple[int, int], ...]
    """The spans of the tail that differ: checksums, and what is in `hashes`"""
    hashes: tuple[tuple[int, int, int], ...]
    """Records that state a hash of the whole blob: begin, end, and where their own CRC-32 is"""
    found: T

    def is_like(self, tail: bytes) -> bool:
        blank = bytearray(tail)
        for begin, end in self.differing:
            blank[begin:end] = bytes(end - begin)
        return blank == self.tail and all(
            zlib.crc32(tail[begin:end]) == int.from_bytes(tail[at : at + 4], "little") for begin, end, at in self.hashes
        )


class AlikeBlobs(Generic[T]):
    """What was found in blobs of one tensor each, by all of their bytes but the elements and their checksums.

    The ranks of FSDP write hundreds of thousands of blobs, of a few hundred forms.
    """

    def __init__(self) -> None:
        self._forms: dict[int, list[_Form[T]]] = {}
        """By the size of the blobs"""
        self._file: SourceFile | None = None
        self._read: tuple[int, bytes] = (0, b"")
        """The last bytes read of it, and where they begin"""

    def find(self, blob: Window, file: SourceFile) -> T | None:
        """Return what was added for a blob that is alike; this one is a window of ``file``."""
        stop = blob.start + blob.num_bytes
        for form in self._forms.get(blob.num_bytes, ()):
            has_head = self._bytes(file, blob.start, blob.start + len(form.head)) == form.head
            if has_head and form.is_like(self._bytes(file, stop - len(form.tail), stop)):
                return form.found
        return None

    def add(self, blob: Window, found: T) -> None:
        """Add what was found in a blob; one with several tensors is not like any other."""
        records = read_records(Buffered(blob))
        storages = [one for name, one in records.items() if name.partition("/")[2].startswith("data/")]
        if len(storages) != 1:
            return
        [elements] = storages
        first = elements.stop
        hashes = [one for name, one in records.items() if name.endswith(_HASH) and one.start > first]
        spans = [(one.start, one.stop) for one in hashes]
        for one in (elements, *hashes):
            spans += [(one.stop + _CRC_IN_DESCRIPTOR, one.stop + _CRC_IN_DESCRIPTOR + 4), (one.crc_at, one.crc_at + 4)]
        form = _Form(
            blob.read(0, elements.start),
            b"",
            tuple((begin - first, end - first) for begin, end in spans),
            tuple((one.start - first, one.stop - first, one.crc_at - first) for one in hashes),
            found,
        )
        tail = bytearray(blob.read(first, blob.num_bytes))
        for begin, end in form.differing:
            tail[begin:end] = bytes(end - begin)
        self._forms.setdefault(blob.num_bytes, []).append(replace(form, tail=bytes(tail)))

    def _bytes(self, file: SourceFile, start: int, stop: int) -> bytes:
        """Read bytes, with some more: after a blob's end the next one begins."""
        at, data = self._read
        if self._file is not file or start < at or stop > at + len(data):
            at, data = self._read = start, file.read(start, min(stop + _AHEAD, file.num_bytes))
            self._file = file
        return data[start - at : stop - at]


def _read_headers_only(file: SourceFile) -> tuple[bytes, int] | None:
    """Return all bytes of a file, and its number of records, if most of it is headers."""
    try:
        start, _, count = find_directory(file)
    except BadZip:
        return None
    if start > min(count * _HEADERS_ONLY, MAX_PICKLE_BYTES):
        return None
    return file.read(0, file.num_bytes), count


def _key_of(data: bytes, count: int) -> tuple[str, bytes | None]:
    """Return the archive's name, and what identifies the bytes apart from it; None if they hold it elsewhere, too."""
    length = int.from_bytes(data[26:28], "little")
    name = data[_NAME_AT : _NAME_AT + length].partition(b"/")[0] + b"/"
    nameless = b"\xff" * len(name)
    if data.count(name) != 2 * count or nameless in data:
        return name[:-1].decode(errors="replace"), None
    return name[:-1].decode(errors="replace"), hashlib.sha256(data.replace(name, nameless)).digest()
