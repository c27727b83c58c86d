"""Which torch files are alike? Tells it by their bytes, without decoding them.

The ranks of a training write thousands of files that differ in nothing but the archive's name, which is in the header
of every record, and in tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmtailor.containers.torch_zip import MAX_PICKLE_BYTES, TorchFile, decode_torch_file, parse_torch_file
from llmtailor.containers.views import Buffered, Held, Window
from llmtailor.containers.zip import BadZip, find_directory
from llmtailor.storage.local import SourceFile, open_source

_HEADERS_ONLY = 512
"""A file with at most so many bytes per record consists of headers."""
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
