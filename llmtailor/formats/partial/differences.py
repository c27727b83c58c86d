"""A rank's masters that are compressed differences from those of an earlier save: a file of their own.

Its size is known only once it is written, so its index comes last::

    8 bytes     ``llmt-z24``
    8 bytes     the length of the JSON
    JSON        facts like those of a rank shard, and ``masters``: which elements, in order. Spaces follow, up to a
                multiple of 8 bytes of the file
    frames      see `storage.frames`; those of each of ``masters`` begin with a new one
    4 bytes for each frame: its length
    8 bytes     the number of frames
    8 bytes     ``llmt-z24``

All integers are little-endian.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.placement import Box, Bundled
from llmtailor.codes import Code
from llmtailor.containers.json import is_count, is_name, read_strict_json
from llmtailor.containers.safetensors import MAX_HEADER_BYTES
from llmtailor.errors import UnsupportedCheckpoint, damaged
from llmtailor.formats.partial.json_trees import to_text
from llmtailor.model.dtypes import BLOCKS, D24
from llmtailor.storage.local import open_source

_MAGIC, _OLD_MAGIC = b"llmt-z24", b"llmt-d24"
_BEGIN, _LENGTH, _END = struct.Struct("<8sQ"), struct.Struct("<I"), struct.Struct("<Q8s")
_OLD_CODER = "its masters are compressed by the coder of an earlier development version, which is gone"
_WITH_OLD = "compose the run with the llmtailor that saved it, and resume the training from the composite"
Elements = Box | tuple[int, int]
"""Of a param: a box, or the first and the last + 1"""


@dataclass(frozen=True, slots=True)
class DifferencesFile:
    """What a file of differences says of itself."""

    path: str
    metadata: Mapping[str, Any]
    masters: tuple[tuple[str, Elements, Bundled], ...]
    """Params, and where which of their elements are; each placement counts from ``begin``, or the box's elements"""


def head_of(facts: Mapping[str, str], masters: Iterable[tuple[str, Elements]]) -> bytes:
    """Return the beginning of the file."""
    rows = [
        {"param": param, "offsets": one.offsets, "sizes": one.sizes}
        if isinstance(one, Box)
        else {"param": param, "begin": one[0], "end": one[1]}
        for param, one in masters
    ]
    text = to_text({**facts, "masters": rows}).encode()
    text += b" " * (-(_BEGIN.size + len(text)) % 8)  # so that a buffer that is cut into blocks cuts no element
    return _BEGIN.pack(_MAGIC, len(text)) + text


def index_of(lengths: Sequence[int]) -> bytes:
    """Return the end of the file, given the length of each frame."""
    return b"".join([*map(_LENGTH.pack, lengths), _END.pack(len(lengths), _MAGIC)])


def read_differences(root: Path, path: str, where: str) -> DifferencesFile:
    """Return what the file says of itself, checked against its size; no frame is read. Raises SourceError."""
    try:
        with open_source(root / path, where) as file:
            size = file.num_bytes
            magic, length = _BEGIN.unpack(file.read(0, min(_BEGIN.size, size)))
            if magic == _OLD_MAGIC:
                raise UnsupportedCheckpoint.at(where, _OLD_CODER, _WITH_OLD)
            if magic != _MAGIC or length > min(size, MAX_HEADER_BYTES):
                raise ValueError("it does not begin with what it holds")
            first = _BEGIN.size + length
            head = read_strict_json(file.read(_BEGIN.size, min(first, size)))
            count, magic = _END.unpack(file.read(max(size - _END.size, 0), size))
            index = count * _LENGTH.size + _END.size
            if magic != _MAGIC or index > min(size, MAX_HEADER_BYTES):
                raise ValueError("it does not end with an index")
            text = file.read(size - index, size - _END.size)
    except (ValueError, struct.error, RecursionError) as error:
        raise damaged(where, f"the file is damaged ({error})", Code.FILE_DAMAGED) from error
    try:
        listed = [_elements(row) for row in head.pop("masters")]
        lengths = [length for (length,) in _LENGTH.iter_unpack(text)]
        if max(lengths, default=0) > BLOCKS[D24].num_bytes:
            raise ValueError("its index lists a frame that is too large")
        edges = [*accumulate(lengths, initial=first)]
        if edges[-1] != size - index or sum(-(-numel // BLOCKS[D24].elements) for *_, numel in listed) != count:
            raise ValueError("its index lists other frames than it holds")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise damaged(where, f"the file is damaged ({error})", Code.FILE_DAMAGED) from error
    at, masters = 0, []
    for param, elements, numel in listed:
        last = at + -(-numel // BLOCKS[D24].elements)
        begin = 0 if isinstance(elements, Box) else elements[0]
        own = edges[at : last + 1]
        masters.append((param, elements, Bundled((path,), (own[0],), (begin, begin + numel), 4, (), D24, (own,))))
        at = last
    return DifferencesFile(path, head, tuple(masters))


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
