"""Lays out a bundle, or a file of frozen params: a safetensors file whose tensors are filled by segments."""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llmtailor.core.extents import Extent
from llmtailor.core.layout import Carry, FileLayout, Literal, Segment
from llmtailor.core.states import ITEMSIZE
from llmtailor.formats.deepspeed.fields import extent_of
from llmtailor.formats.partial.encoding import placeholder, stored
from llmtailor.formats.partial.manifest import SCHEMA_BUNDLE, TREE
from llmtailor.formats.partial.nodes import encode_nodes
from llmtailor.formats.pickle_nodes import TensorView


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of the file, and what it consists of."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    content: tuple[Segment, ...]


@dataclass(slots=True)
class Bundle:
    """A rank's bundle while it is put together."""

    path: str
    entries: list[Entry] = field(default_factory=list)
    begin: dict[str, int] = field(default_factory=dict)
    trees: dict[str, str] = field(default_factory=dict)

    def add_tree(self, stock: str, tree: Any, flats: Collection[Extent], where: str) -> None:
        """Take the object tree of a stock file inside, with its tensors but those of ``flats``, whose elements are
        fragments. Raises SourceError for a tensor that is not contiguous."""

        def place(view: TensorView) -> Mapping[str, Any]:
            key = f"tree/{len(self.entries)}"
            extent = extent_of(view, key, where)
            if extent in flats:
                return placeholder(view.storage.dtype, view.shape)
            content = (Carry(extent),) if extent.num_bytes else ()
            self.entries.append(Entry(key, view.storage.dtype, view.shape, content))
            return stored(self.path, key)

        self.trees[stock] = _json(encode_nodes(tree, place))

    def lay_out(self, facts: Mapping[str, str]) -> FileLayout:
        metadata = {
            "schema": SCHEMA_BUNDLE,
            **facts,
            "begin": _json(self.begin),
            **{TREE + stock: text for stock, text in self.trees.items()},
        }
        return lay_out_tensors(self.path, self.entries, metadata)


def lay_out_tensors(path: str, entries: Iterable[Entry], metadata: Mapping[str, str]) -> FileLayout:
    """Lay out a safetensors file; by falling item size, so that every tensor is aligned."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    segments: list[Segment] = []
    at = 0
    for entry in sorted(entries, key=lambda entry: -ITEMSIZE[entry.dtype]):
        stop = at + sum(segment.num_bytes for segment in entry.content)
        header[entry.key] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [at, stop]}
        segments += entry.content
        at = stop
    text = _json(header).encode()
    text += b" " * (-len(text) % 8)
    return FileLayout(path, (Literal(struct.pack("<Q", len(text)) + text, "safetensors header"), *segments))


def _json(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"))
