"""The object trees of a checkpoint's stock files, whichever container holds them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from llmtailor.containers.torch_zip import read_torch_file


@dataclass(frozen=True, slots=True)
class Decoded:
    """A stock file's object tree, as data."""

    tree: Any
    archive: str | None = None
    """The stem of the name that the file was saved under; None where that is not known"""


class Trees(Protocol):
    """Reads the stock files of one checkpoint."""

    @property
    def root(self) -> Path: ...

    @property
    def inside(self) -> Collection[str]:
        """Stock files, by relative path, that are no files of the folder."""
        ...

    def read(self, path: str, where: str) -> Decoded:
        """Decode a stock file; no tensor byte is read. Messages call it ``where``.

        Raises SourceError for what is missing or damaged, and UnsafePickle for names that are not on the allow-list.
        """
        ...


@dataclass(frozen=True, slots=True)
class FileTrees:
    """Stock files as stock software writes them."""

    root: Path
    inside: Collection[str] = ()

    def read(self, path: str, where: str) -> Decoded:
        file = read_torch_file(self.root, path, where)
        return Decoded(file.tree, file.archive)
