"""Data files of sources that a composite in DCP folders holds as hard links.

Nothing in a data file says which tensor it holds, and `.metadata` may refer to any part of it. So a composite needs no
copy of a tensor that a source stores as the composite would: a hard link to the source's data file, and its place in
the composite's own `.metadata`. A stock loader sees an ordinary folder, with files that hold more than it asks for. A
link keeps the data when the source is removed, and takes no space while it is there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from llmtailor.checkpoint.index import DCP, FOLDERS, FSDP, SHARDS, CheckpointIndex
from llmtailor.checkpoint.layout import Copy, LinkLayout, Segment
from llmtailor.checkpoint.placement import Extent
from llmtailor.checkpoint.sources import Linkable
from llmtailor.containers.dcp import DATA_FILE, METADATA, Blob, Chunk, Entry, KeyPath, checksum_of_save, read_metadata
from llmtailor.errors import PathIn
from llmtailor.formats.dcp.builder import join_key
from llmtailor.formats.dcp.folder import MODEL_FOLDER, OPTIMIZER_FOLDER
from llmtailor.formats.dcp.keys import STATE
from llmtailor.model.roles import State
from llmtailor.storage.local import open_source

_IN_FOLDERS = {True: (FOLDERS,), False: (FOLDERS, SHARDS)}
"""Whether weights are meant -> the forms of checkpoints that have them in a DCP folder, or the optimizer's states"""


def has_linkable_files(index: CheckpointIndex, *, is_model: bool = False) -> bool:
    """Return whether composites can link to a checkpoint's files with the optimizer's states, or with weights."""
    is_dcp = index.form.format in (FSDP, DCP) and not index.form.is_partial
    return is_dcp and index.dcp is not None and index.dcp.form in _IN_FOLDERS[is_model]


@dataclass(slots=True)
class _Linked:
    """A data file of a source."""

    path: str
    """In the composite"""
    source: int
    source_path: str
    copies: list[Copy] = field(default_factory=list)
    """The elements of states that the composite has there"""
    blobs: list[tuple[int, int]] = field(default_factory=list)
    """What the composite's `.metadata` refers to"""


@dataclass(slots=True)
class Links:
    """Finds tensors in the data files of sources, and lists the files that were found to be needed."""

    linkable: Linkable
    ranks: int
    """Of the composite. A file name begins with a rank, and readers take the highest for the number of ranks."""
    _known: dict[tuple[int, str], dict[str, Entry]] = field(default_factory=dict)
    _files: dict[tuple[str, int, str], _Linked] = field(default_factory=dict)
    """(Folder of the composite, source, path in the source) -> the file"""
    _counts: dict[tuple[str, int], int] = field(default_factory=dict)

    def find(
        self, folder: str, name: str, state: State, dtype: str, shape: tuple[int, ...]
    ) -> tuple[Chunk, ...] | None:
        """Return where a tensor is in linked files of a composite's folder; None if it has to be written.

        ``name`` is that of the weight, also a tied one, for states of the model.
        """
        source = self.linkable.source_of(state)
        if source is None or not math.prod(shape):
            return None
        index = self.linkable.indexes[source]
        layout = index.dcp
        if layout is None or not has_linkable_files(index, is_model=bool(name)):
            return None
        path: KeyPath = (*layout.model, name) if name else (*layout.optimizer, STATE, state.param, state.kind)
        inside = MODEL_FOLDER if name else OPTIMIZER_FOLDER
        prefix = f"{inside}/" if index.form.format == FSDP else ""
        entry = self._entries(source, prefix).get(join_key(path))
        if entry is None or (entry.dtype, entry.shape) != (dtype, shape):
            return None
        found = tuple(replace(one, blob=self._link(folder, source, prefix, one.blob)) for one in entry.chunks)
        held = index.held.get(state)
        if held is not None and held.shape == shape and state.param == (name or state.param):
            for one in held.place.cover(0, held.numel):
                self._files[folder, source, one.extent.path].copies.append(Copy(one.extent, source, state, one.begin))
        return found

    def _entries(self, source: int, prefix: str) -> dict[str, Entry]:
        if (source, prefix) not in self._known:
            index = self.linkable.indexes[source]
            where = PathIn(index.name, prefix + METADATA)
            self._known[source, prefix] = read_metadata(index.root, prefix + METADATA, where)
        return self._known[source, prefix]

    def _link(self, folder: str, source: int, prefix: str, blob: Blob) -> Blob:
        key = folder, source, prefix + blob.path
        if key not in self._files:
            match = DATA_FILE.fullmatch(blob.path.rpartition("/")[2])
            assert match is not None, "read_metadata accepts no other names"
            rank = int(match[1]) % self.ranks
            number = self._counts[folder, rank] = self._counts.get((folder, rank), 1) + 1  # 0 and 1 are what is written
            path = f"{folder}/__{rank}_{number}.distcp" if folder else f"__{rank}_{number}.distcp"
            self._files[key] = _Linked(path, source, prefix + blob.path)
        self._files[key].blobs.append((blob.start, blob.stop))
        return Blob(self._files[key].path.rpartition("/")[2], blob.start, blob.stop)

    def files(self) -> list[LinkLayout]:
        """Return the linked files that were found."""
        return [LinkLayout(one.path, tuple(self._pieces(one)), self._checksum(one)) for one in self._files.values()]

    def _checksum(self, file: _Linked) -> int:
        index = self.linkable.indexes[file.source]
        with open_source(index.root / file.source_path, PathIn(index.name, file.source_path)) as source:
            return checksum_of_save(source, file.blobs)

    def _pieces(self, file: _Linked) -> Iterator[Segment]:
        path, at = file.source_path, 0
        for copy in sorted(file.copies, key=lambda one: one.extent.start):
            if at < copy.extent.start:
                yield Copy(Extent(path, at, copy.extent.start), file.source)
            yield copy
            at = copy.extent.stop
        if at < (end := self.linkable.indexes[file.source].files[path].num_bytes):
            yield Copy(Extent(path, at, end), file.source)
