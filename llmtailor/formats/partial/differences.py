"""A rank's masters that are compressed differences from those of an earlier save: a file of their own.

Its size is known only once it is written, so its index comes last. It is in the seekable format of zstd
(contrib/seekable_format in zstd's repository), which ``zstd -d`` decompresses::

    skippable frame 0     JSON: facts like those of a rank shard, and ``masters``: which elements, in order
    frames                see `storage.frames`; those of each of ``masters`` begin with a new one
    seek table            the size and the content's size of all of these, then their number
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.placement import Box, Bundled
from llmtailor.codes import Code
from llmtailor.containers.json import is_count, is_name, read_strict_json
from llmtailor.containers.safetensors import MAX_HEADER_BYTES
from llmtailor.errors import damaged
from llmtailor.formats.partial.json_trees import to_text
from llmtailor.model.roles import BLOCKS, D24
from llmtailor.storage.local import open_source

_HEAD, _TABLE, _SEEKABLE = 0x184D2A50, 0x184D2A5E, 0x8F92EAB1
"""What the two skippable frames begin with, and what a seek table ends with"""
_BEGIN, _ENTRY, _END = struct.Struct("<II"), struct.Struct("<II"), struct.Struct("<IBI")
Elements = Box | tuple[int, int]
"""Of a param: a box, or the first and the last + 1"""


@dataclass(frozen=True, slots=True)
class DifferencesFile:
    """What a file of differences says of itself."""

    path: str
    metadata: Mapping[str, Any]
    masters: tuple[tuple[str, Elements, Bundled], ...]
    """Params, and where which of their elements are; each placement counts from ``begin``, or the box's elements"""


FIX = "pip install 'llmtailor[zstd]'"


def is_installed() -> bool:
    """Return whether frames can be written and read here."""
    return find_spec("zstandard") is not None


def head_of(facts: Mapping[str, str], masters: Iterable[tuple[str, Elements]]) -> bytes:
    """Return the beginning of the file."""
    rows = [
        {"param": param, "offsets": one.offsets, "sizes": one.sizes}
        if isinstance(one, Box)
        else {"param": param, "begin": one[0], "end": one[1]}
        for param, one in masters
    ]
    text = to_text({**facts, "masters": rows}).encode()
    return _BEGIN.pack(_HEAD, len(text)) + text


def table_of(sizes: Sequence[tuple[int, int]]) -> bytes:
    """Return the end of the file, given the bytes of each frame, with `head_of` as the first, and of its content."""
    entries = b"".join(_ENTRY.pack(*one) for one in sizes)
    return _BEGIN.pack(_TABLE, len(entries) + _END.size) + entries + _END.pack(len(sizes), 0, _SEEKABLE)


def read_differences(root: Path, path: str, where: str) -> DifferencesFile:
    """Return what the file says of itself, checked against its size; no frame is read. Raises SourceError."""
    try:
        with open_source(root / path, where) as file:
            size = file.num_bytes
            magic, length = _BEGIN.unpack(file.read(0, min(_BEGIN.size, size)))
            if magic != _HEAD or length > min(size, MAX_HEADER_BYTES):
                raise ValueError("it does not begin with what it holds")
            head = read_strict_json(file.read(_BEGIN.size, min(_BEGIN.size + length, size)))
            count, _, magic = _END.unpack(file.read(max(size - _END.size, 0), size))
            table = _BEGIN.size + count * _ENTRY.size + _END.size
            if magic != _SEEKABLE or table > min(size, MAX_HEADER_BYTES):
                raise ValueError("it does not end with a seek table")
            text = file.read(size - table, size)
    except (ValueError, struct.error, RecursionError) as error:
        raise damaged(where, f"the file is damaged ({error})", Code.FILE_DAMAGED) from error
    try:
        listed = [_elements(row) for row in head.pop("masters")]
        entries = [*_ENTRY.iter_unpack(text[_BEGIN.size : -_END.size])]
        contents = [0, *chain.from_iterable(_contents(numel) for _, _, numel in listed)]
        edges = [*accumulate((one for one, _ in entries), initial=0)]
        if _BEGIN.unpack(text[: _BEGIN.size]) != (_TABLE, table - _BEGIN.size) or edges[-1] != size - table:
            raise ValueError("its seek table does not fit")
        if [one for _, one in entries] != contents or edges[1] != _BEGIN.size + length:
            raise ValueError("its seek table lists other frames than it holds")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        raise damaged(where, f"the file is damaged ({error})", Code.FILE_DAMAGED) from error
    at, masters = 1, []
    for param, elements, numel in listed:
        last = at + -(-numel // BLOCKS[D24].elements)
        begin = 0 if isinstance(elements, Box) else elements[0]
        own = edges[at : last + 1]
        masters.append((param, elements, Bundled((path,), (own[0],), (begin, begin + numel), 4, (), D24, (own,))))
        at = last
    return DifferencesFile(path, head, tuple(masters))


def _contents(numel: int) -> Iterable[int]:
    """Yield the bytes of the content of each frame of so many elements."""
    whole, rest = divmod(numel, BLOCKS[D24].elements)
    if whole > MAX_HEADER_BYTES:
        raise ValueError("it states more elements than a seek table has room for")
    return [3 * BLOCKS[D24].elements] * whole + [3 * rest] * bool(rest)


def _elements(row: Mapping[str, Any]) -> tuple[str, Elements, int]:
    param = row["param"]
    if not is_name(param):
        raise ValueError("a param has no name")
    if "sizes" in row:
        box = Box(tuple(row["offsets"]), tuple(row["sizes"]))
        if len(box.offsets) != len(box.sizes) or not all(map(is_count, (*box.offsets, *box.sizes))):
            raise ValueError(f"a box of {param} is none")
        return param, box, math.prod(box.sizes)
    begin, end = row["begin"], row["end"]
    if not is_count(begin) or not is_count(end) or not begin < end:
        raise ValueError(f"the elements of {param} are none")
    return param, (begin, end), end - begin
