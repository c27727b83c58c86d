"""The safetensors files of a partial checkpoint, in an order and with padding that let them share blocks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from llmtailor.checkpoint.layout import (
    BLOCK_BYTES,
    Copy,
    FileLayout,
    Fill,
    Piece,
    Zeros,
    consecutive,
    fill_all,
    shareable_start,
)
from llmtailor.checkpoint.placement import Extent
from llmtailor.containers.safetensors import lay_out_header
from llmtailor.model.states import ITEMSIZE

PADDING = "pad"
"""``pad/N`` are bytes between tensors, which safetensors files can't have otherwise"""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of the file, and its content."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    content: tuple[Piece, ...]
    lies: Extent | None = None
    """Where the optimizer has a live tensor: in which of its storages, and in which bytes of that"""

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.content)


def to_text(data: Any) -> str:
    """Return the JSON text used in the headers of rank shards."""
    return json.dumps(data, separators=(",", ":"))


def lay_out_tensors(path: str, entries: Iterable[Entry], metadata: Mapping[str, str]) -> FileLayout:
    """Return the layout of a safetensors file; larger items first, so that every tensor is aligned."""
    return FileLayout(path, tuple(_pieces(sorted(entries, key=_itemsize), metadata, None)))


class BundleLayout(FileLayout):
    """A rank shard. When it is filled, tensors that continue each other in a source do so here, and start where they do
    there, so that they can share blocks with it. Live tensors lie here as the optimizer has them, and so as the files
    of a composite do."""

    def __init__(self, path: str, entries: Sequence[Entry], metadata: Mapping[str, str]):
        self._entries, self._metadata = entries, metadata
        ordered, is_padded = sorted(entries, key=_itemsize), False
        if any(one.lies for one in entries):
            ordered, is_padded = _in_order(entries)
        super().__init__(path, tuple(_pieces(ordered, metadata, 0 if is_padded else None)))

    def filled(self, fill: Fill) -> FileLayout:
        return FileLayout(self.path, lambda: tuple(self._filled(fill)))

    def _filled(self, fill: Fill) -> Iterator[Piece]:
        entries = [replace(entry, content=fill_all(entry.content, fill)) for entry in self._entries]
        padded, is_padded = _in_order(entries)
        return _pieces(padded, self._metadata, 0 if is_padded else None)


def _itemsize(entry: Entry) -> int:
    return -ITEMSIZE[entry.dtype]


def _place(entry: Entry) -> tuple[str, int]:
    if entry.lies is not None:
        return entry.lies.path, entry.lies.start
    first = next(iter(entry.content), None)
    return (first.extent.path, first.extent.start) if isinstance(first, Copy) else ("", 0)


def _in_order(entries: Iterable[Entry]) -> tuple[list[Entry], bool]:
    """Return the entries as they follow each other where they come from, with padding; see `_padded`."""
    return _padded(sorted(entries, key=lambda entry: (_itemsize(entry), _place(entry))))


def _padded(entries: Iterable[Entry]) -> tuple[list[Entry], bool]:
    """Return the entries with padding before those that could share blocks, and whether there are any of these."""
    found: list[Entry] = []
    at, is_padded = 0, False
    for run in _runs(entries):
        start = shareable_start(chain.from_iterable(map(_origin, run)), ITEMSIZE[run[0].dtype])
        is_padded |= start is not None
        if start is not None and (missing := (start - at) % BLOCK_BYTES):
            found.append(Entry(f"{PADDING}/{len(found)}", "U8", (missing,), (Zeros(missing, "alignment for clones"),)))
            at += missing
        found += run
        at += sum(entry.num_bytes for entry in run)
    return found, is_padded


def _runs(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Yield the entries in runs of those that continue each other in one source file."""
    run: list[Entry] = []
    for entry in entries:
        if run and _continues(run[-1], entry):
            run.append(entry)
        else:
            if run:
                yield run
            run = [entry]
    if run:
        yield run


def _origin(entry: Entry) -> tuple[Piece, ...]:
    """Return a tensor's content as copied from where it lies."""
    return entry.content if entry.lies is None else (Copy(entry.lies),)


def _continues(before: Entry, entry: Entry) -> bool:
    if before.lies is not None and entry.lies is not None:
        return (before.lies.path, before.lies.stop) == (entry.lies.path, entry.lies.start)
    ends = [*_origin(before)[-1:], *_origin(entry)[:1]]
    return len(ends) == 2 and len(list(consecutive(ends))) == 1


def _pieces(entries: Iterable[Entry], metadata: Mapping[str, str], stop: int | None) -> Iterator[Piece]:
    """Yield the pieces of a file, whose header ends at ``stop`` modulo `BLOCK_BYTES`."""
    entries, at = list(entries), 0
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    for entry in entries:
        end = at + entry.num_bytes
        header[entry.key] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [at, end]}
        at = end
    yield lay_out_header(to_text(header).encode(), stop)
    yield from chain.from_iterable(entry.content for entry in entries)
