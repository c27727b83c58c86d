"""Reading source files, which must not have changed, and writing an output file front to back."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from llmtailor.checkpoint.layout import Cast, Copy, Term
from llmtailor.engine.pool import Stop
from llmtailor.errors import SourceError, StorageError
from llmtailor.storage.checksums import crc32
from llmtailor.storage.listing import FileFact
from llmtailor.storage.local import Changed, EndsEarly, Files, OpenFile, chunks, write_all

BUFFER_BYTES = 512 << 10
"""Small enough for a core's cache, so that a chunk is read, summed and written without going to memory in between"""


class Digest(Protocol):
    """The methods of a hash that are used here."""

    def update(self, data: bytes | memoryview, /) -> object: ...
    def hexdigest(self) -> str: ...


class Store(Protocol):
    """A source of bytes that is not a folder."""

    def read(self, path: str, start: int, stop: int) -> memoryview:
        """Return the bytes from ``start`` on, at least one and at most up to ``stop``.

        They stay unchanged at least until the next call.
        """
        ...


class Sources:
    """The sources of a plan: folders, whose files are opened when first needed, and ``stores`` by name.

    ``facts`` describe files as indexed, by full name; other files are not checked.
    """

    def __init__(self, roots: Sequence[str], facts: Mapping[str, FileFact], stores: Mapping[str, Store]):
        self.roots = roots
        self.files = Files(facts=facts)
        self.stores = stores

    def store_of(self, piece: Copy | Cast) -> Store | None:
        """Return the store that a piece is read from; None for a folder."""
        return self.stores.get(self.roots[piece.source])

    def where(self, piece: Copy | Cast | Term) -> str:
        """Return the full name of the piece's file."""
        return f"{self.roots[piece.source]}/{piece.extent.path}"

    def open(self, piece: Copy) -> OpenFile:
        """Return the piece's file, open. Raises SourceError for a missing or changed file, else StorageError."""
        try:
            return self.files.open(self.where(piece))
        except OSError as error:
            raise cannot_read(self.where(piece), error) from error

    def is_remote(self, piece: Copy) -> bool:
        """Return whether the piece's file is in an object store."""
        return "://" in self.roots[piece.source]

    def stream(self, piece: Copy, stop: int) -> Iterator[bytes]:
        """Yield bytes of the piece's file in an object store, from its start to ``stop``. Raises as `read_into`."""
        file = self.open(piece)
        assert file.remote is not None, "a URL has a stand-in"
        try:
            yield from file.remote.stream(file.name, piece.extent.start, stop)
        except OSError as error:
            raise cannot_read(self.where(piece), error) from error

    def read_into(self, piece: Copy | Cast | Term, offset: int, room: memoryview) -> None:
        """Fill ``room`` from the piece's file.

        Raises SourceError for a missing, too short or changed file, else StorageError.
        """
        where = self.where(piece)
        try:
            self.files.read_into(where, offset, room)
        except OSError as error:
            raise cannot_read(where, error) from error


def cannot_read(where: object, error: OSError) -> SourceError | StorageError:
    """Return a SourceError for a missing or forbidden source, a StorageError for a failing (maybe recovering) disk."""
    if isinstance(error, Changed):
        return changed(where)
    what = f"can't read: {error.strerror or error}"
    if isinstance(error, EndsEarly):
        return SourceError.at(where, what, "it changed while it was read; stop the process that writes to it")
    if isinstance(error, (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)):
        return SourceError.at(where, what, "copy the file again, or fix its permissions")
    return StorageError.at(where, what, "check the disk")


def changed(where: object) -> SourceError:
    fix = "stop the process that writes to it, and run this again"
    return SourceError.at(where, "the file changed while it was read", fix)


def cannot_write(where: Path, error: OSError) -> StorageError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    fix = "free some space, or choose another place for the output" if full else "check the disk and permissions"
    return StorageError.at(where, f"can't write: {error.strerror or error}", fix)


class Output:
    """Gathers bytes in one buffer and writes it when full; it may first keep what the file already has."""

    def __init__(self, fd: int, on_progress: Callable[[int], None], digest: Digest | None):
        self.fd = fd
        self.on_progress = on_progress
        self.digest = digest
        self.buffer = memoryview(bytearray(BUFFER_BYTES))
        self.filled = 0
        self.at = 0
        """Valid bytes in the file"""
        self.cloned = 0
        """Of these, bytes in blocks shared with sources"""
        self.device = os.fstat(fd).st_dev
        self.block_bytes = os.fstatvfs(fd).f_bsize

    def take_over(self, length: int, stop: Stop) -> int:
        """Read back the next bytes and keep them; return their CRC-32. Raises OSError, also if there are fewer."""
        crc = 0
        for data in chunks(self.fd, self.buffer, self.at, self.at + length):
            stop.check()
            crc = crc32(data, crc)
            self.count(data)
        return crc

    def begin(self) -> None:
        """Cut off what was not kept, and continue writing there."""
        os.ftruncate(self.fd, self.at)
        os.lseek(self.fd, self.at, os.SEEK_SET)

    def room(self) -> memoryview:
        """Return the free part of the buffer, never empty; fill it from the start, then `commit`."""
        if self.filled == len(self.buffer):
            self.flush()
        return self.buffer[self.filled :]

    def commit(self, length: int) -> memoryview:
        """Accept and return the bytes filled into `room`."""
        self.filled += length
        return self.buffer[self.filled - length : self.filled]

    def put(self, data: bytes | memoryview, crc: int = 0) -> int:
        """Write bytes; return the CRC-32 continued from ``crc``. Long ones do not pass through the buffer."""
        data = memoryview(data)
        while data:
            if len(data) < len(self.buffer):
                room = self.room()[: len(data)]
                room[:] = data[: len(room)]
                crc = crc32(self.commit(len(room)), crc)
            else:
                self.flush()
                room = data[: len(self.buffer)]
                crc = crc32(room, crc)
                write_all(self.fd, room)
                self.count(room)
            data = data[len(room) :]
        return crc

    def flush(self) -> None:
        write_all(self.fd, self.buffer[: self.filled])
        self.count(self.buffer[: self.filled])
        self.filled = 0

    def count(self, data: memoryview) -> None:
        """Take note of the next bytes of the file, which are written."""
        if self.digest is not None:
            self.digest.update(data)
        self.at += len(data)
        self.on_progress(len(data))
