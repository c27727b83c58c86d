"""Where saves are copied to: a folder that all nodes see, or any file system that fsspec knows.

Every copy is read back and compared with the checksum of what was saved.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

from llmtailor.checkpoint.layout import Copy, FileLayout, Plan
from llmtailor.checkpoint.placement import Extent
from llmtailor.engine.copy import Context, execute
from llmtailor.errors import StorageError, UsageError
from llmtailor.formats.partial.manifest import BundleFact
from llmtailor.loaders.files import PARTIAL_MANIFEST
from llmtailor.runs.folder import RunFolder
from llmtailor.storage.checksums import crc32
from llmtailor.storage.local import fsync_folder, replace_durably

CHUNK_BYTES = 8 << 20


class Level(Protocol):
    """Where saves are copied to. Raises OSError or StorageError; a remote one, whatever its library raises."""

    def has(self, step: int) -> bool:
        """Return whether a save is there."""
        ...

    def begin(self, step: int) -> None:
        """Make room for a save, which is not there yet."""
        ...

    def put(self, step: int, source: Path, fact: BundleFact) -> None:
        """Copy a file, and read it back."""
        ...

    def complete(self, step: int, manifest: bytes) -> None:
        """Make all of the save durable, and then its manifest."""
        ...

    def remove(self, step: int) -> None:
        """Remove a save, its manifest first."""
        ...


class SharedFolder:
    """A run's folder that all nodes see."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run

    def has(self, step: int) -> bool:
        return step in self.run.complete()

    def begin(self, step: int) -> None:
        self.run.begin(step)

    def put(self, step: int, source: Path, fact: BundleFact) -> None:
        folder = self.run.at(step)
        folder.mkdir(parents=True, exist_ok=True)
        beside = folder / f".{source.name}.llmtailor-new"
        beside.unlink(missing_ok=True)
        pieces = (Copy(Extent(source.name, 0, fact.num_bytes)),) if fact.num_bytes else ()
        plan = Plan((str(source.parent),), (FileLayout(beside.name, pieces),))
        (result,) = execute(plan, folder, Context(inline=True))
        with beside.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            check(beside, fact, result.crc, crc_of(file))
        beside.rename(folder / source.name)

    def complete(self, step: int, manifest: bytes) -> None:
        folder = self.run.at(step)
        fsync_folder(folder)
        replace_durably(folder / PARTIAL_MANIFEST, manifest)
        fsync_folder(folder)
        fsync_folder(folder.parent)

    def remove(self, step: int) -> None:
        """Nothing: this is the run's own folder, from which the saver has removed it."""


class Mirror:
    """A folder of any file system that fsspec knows, by its URL."""

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]

            self.fs, self.root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            fix = "pip install fsspec and the package that it names for this kind of URL, such as s3fs"
            raise UsageError.at("mirror", f"{url!r} can't be used: {error}", fix) from error

    def has(self, step: int) -> bool:
        return bool(self.fs.exists(f"{self._at(step)}/{PARTIAL_MANIFEST}"))

    def begin(self, step: int) -> None:
        self.fs.makedirs(self._at(step), exist_ok=True)

    def put(self, step: int, source: Path, fact: BundleFact) -> None:
        path = f"{self._at(step)}/{source.name}"
        self.fs.put_file(str(source), path)
        with self.fs.open(path, "rb") as file:
            check(path, fact, crc_of(file))

    def complete(self, step: int, manifest: bytes) -> None:
        self.fs.pipe_file(f"{self._at(step)}/{PARTIAL_MANIFEST}", manifest)

    def remove(self, step: int) -> None:
        if self.fs.exists(path := f"{self._at(step)}/{PARTIAL_MANIFEST}"):
            self.fs.rm_file(path)
            self.fs.rm(self._at(step), recursive=True)

    def _at(self, step: int) -> str:
        return f"{self.root}/partial/{RunFolder(Path()).at(step).name}"


def crc_of(file: Any) -> int:
    crc = 0
    while data := file.read(CHUNK_BYTES):
        crc = crc32(data, crc)
    return crc


def check(where: object, fact: BundleFact, *crcs: int) -> None:
    """Raise StorageError unless all checksums are those of the file."""
    if any(crc != fact.crc32 for crc in crcs):
        raise StorageError.at(where, "the copy differs from what was saved", "check both disks")
