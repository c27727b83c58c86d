"""Proves that a planned composite reads back, before any state is moved."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.layout import Bytes, Copy, FileLayout, Piece
from llmtailor.compose.manifest import make_manifest
from llmtailor.compose.plan import Composition
from llmtailor.compose.write import check_written
from llmtailor.containers.json import MAX_BYTES
from llmtailor.errors import PathIn
from llmtailor.loaders.files import MANIFEST
from llmtailor.storage.local import open_source


def prove(composition: Composition) -> None:
    """Write the outline of a composite into a temporary folder, and read it back like the composite.

    The files have their full size, with holes where states will be, so they take as much space as headers and pickles
    do. Raises what `write` raises if the output does not read back, and OSError if the folder can't be written.
    """
    with tempfile.TemporaryDirectory(prefix="llmtailor-") as name:
        folder = Path(name)
        for file in composition.plan.files:
            _outline(folder / file.path, file, composition.indexes)
        manifest = make_manifest(composition, (), {}, b"", "", "")
        (folder / MANIFEST).write_text(json.dumps(manifest))
        check_written(composition, folder)


def _outline(path: Path, file: FileLayout, sources: Sequence[CheckpointIndex]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    at = 0
    with path.open("wb") as out:
        for piece in file.pieces:
            if known := _known(piece, sources):
                out.seek(at)
                out.write(known)
            at += piece.num_bytes
        out.truncate(at)


def _known(piece: Piece, sources: Sequence[CheckpointIndex]) -> bytes:
    """Return the bytes of a piece, nothing for those of states, which a reader does not look at."""
    if isinstance(piece, Bytes):
        return piece.data
    if isinstance(piece, Copy) and piece.state is None and piece.num_bytes <= MAX_BYTES:  # files beside the states
        index, extent = sources[piece.source], piece.extent
        with open_source(index.root / extent.path, PathIn(index.name, extent.path)) as source:
            return bytes(source.read(extent.start, extent.stop))
    return b""
