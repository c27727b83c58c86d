"""A reader of stock files as object trees, from the files themselves or from a partial checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from llmtailor.containers.torch_alike import open_torch_file
from llmtailor.containers.torch_zip import read_torch_file


@dataclass(frozen=True, slots=True)
class Decoded:
    """A stock file's object tree, as data."""

    tree: Any
    archive: str | None = None
    """The stem of the file's name when it was saved; None if unknown"""


@dataclass(frozen=True, slots=True)
class Opened:
    """A stock file that is not decoded yet."""

    decode: Callable[[], Decoded]
    """Raises what `Trees.read` raises"""
    archive: str | None = None
    """See `Decoded.archive`"""
    key: bytes | None = None
    """Equal for files that differ in their names only, or in tensors of more than 8 bytes; None if that is unknown"""


class Trees(Protocol):
    """A reader of one checkpoint's stock files."""

    @property
    def root(self) -> Path: ...

    @property
    def inside(self) -> Collection[str]:
        """Stock files, by relative path, that are not files of the folder"""
        ...

    def read(self, path: str, where: str) -> Decoded:
        """Decode a stock file; no tensor byte is read. Messages call it ``where``.

        Raises SourceError for missing or damaged files, and UnsafePickle for names that are not on the allow-list.
        """
        ...

    def open(self, path: str, where: str) -> Opened:
        """Read a stock file as far as needed to tell whether it is like another one. Raises what `read` raises."""
        ...


@dataclass(frozen=True, slots=True)
class FileTrees:
    """A reader of stock files as stock software writes them."""

    root: Path
    inside: Collection[str] = ()

    def read(self, path: str, where: str) -> Decoded:
        file = read_torch_file(self.root, path, where)
        return Decoded(file.tree, file.archive)

    def open(self, path: str, where: str) -> Opened:
        file = open_torch_file(self.root, path, where)

        def decode() -> Decoded:
            decoded = file.decode()
            return Decoded(decoded.tree, decoded.archive)

        return Opened(decode, file.archive, file.key)
