"""Reading source files, which must not have changed, and writing an output file front to back."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from llmtailor.checkpoint.layout import BLOCK_BYTES, Cast, Copy, Plan, Term
from llmtailor.copying.pool import Stop
from llmtailor.errors import COPY_FILE, SourceError, StorageError
from llmtailor.storage.checksums import Taken, crc32
from llmtailor.storage.local import Changed, FileFact, OpenFile, OpenFiles, bypass_cache, chunks, write_all
from llmtailor.storage.remote import EndsEarly

BUFFER_BYTES = 512 << 10
"""Small enough for a core's cache, so that a chunk stays there while it is read, summed and written"""
DIRECT_BYTES = 16 << 20
"""The buffers of all files that bypass the page cache, in total. Each write waits for the disk, so this is also how
much the disk has to do at once."""
MAX_DIRECT_BYTES = 8 << 20
"""The largest buffer of one file; the kernel splits such a write into several requests. An interrupt waits for it."""
_HUGE_PAGE_BYTES = 2 << 20


class Digest(Protocol):
    def update(self, data: bytes | memoryview, /) -> object: ...
    def hexdigest(self) -> str: ...


class Store(Protocol):
    """A source of bytes that is not a folder."""

    def read(self, path: str, start: int, stop: int) -> memoryview:
        """Return the bytes from ``start`` on, at least one and at most up to ``stop``.

        They stay unchanged at least until the next call.
        """


class SourceFiles:
    """The sources of a plan: folders, whose files are opened when first needed, and ``stores`` by name.

    ``facts`` describe the files of each source as indexed; other files are not checked. ``taken`` gets the checksums of
    what is read to be converted, by position in `Plan.sources` and path.
    """

    def __init__(
        self,
        plan: Plan,
        facts: Sequence[Mapping[str, FileFact]],
        stores: Mapping[str, Store],
        taken: Taken[tuple[int, str]] | None = None,
    ):
        self.plan = plan
        self.stores = stores
        self.taken = taken

        def open_file(source: int, name: str) -> OpenFile:
            return OpenFile(plan.path(source, name), facts[source].get(name) if source < len(facts) else None)

        self._open = lru_cache(OpenFiles.MAX_OPEN)(open_file)

    def where(self, piece: Copy | Cast | Term) -> str:
        return f"{self.plan.sources[piece.source]}/{piece.extent.path}"

    def open(self, piece: Copy | Cast | Term) -> OpenFile:
        """Return the piece's file, open. Raises SourceError for a missing or changed file, else StorageError."""
        try:
            return self._open(piece.source, piece.extent.path)
        except OSError as error:
            raise cannot_read(self.where(piece), error) from error

    def chunks(self, piece: Cast | Term, size: int) -> Iterator[memoryview]:
        """Yield the bytes of a piece in order, ``size`` at a time. Raises as `read_into`."""
        unread = memoryview(b"")
        for some in self._decoded(piece, size):
            # what comes next overwrites it
            unread = memoryview(bytes(unread) + some) if unread or len(some) < size else some
            while len(unread) >= size:
                yield unread[:size]
                unread = unread[size:]
        if unread:
            yield unread

    def _decoded(self, piece: Cast | Term, size: int) -> Iterator[memoryview]:
        read = self.stream(piece, piece.extent.stop, size)
        if self.taken is not None:
            read = self.taken.watch((piece.source, piece.extent.path), piece.extent.start, read)
        if piece.encoding is None:
            yield from read
            return
        from llmtailor.storage.decoder import Decoder  # numpy takes a while

        decoder = Decoder(piece.encoding)
        try:
            for some in read:
                yield memoryview(decoder.feed(some))
        except ValueError as error:
            fix = f"llmtailor verify lists damaged files; {COPY_FILE}"
            raise SourceError.at(self.where(piece), f"a frame is damaged: {error}", fix) from error

    def stream(self, piece: Copy | Cast | Term, stop: int, size: int = 0) -> Iterator[memoryview]:
        """Yield the bytes of the piece's file from the piece's start to ``stop``; see `OpenFile.stream`."""
        try:
            yield from self.open(piece).stream(piece.extent.start, stop, size)
        except OSError as error:
            raise cannot_read(self.where(piece), error) from error

    def read_into(self, piece: Copy | Cast | Term, offset: int, room: memoryview) -> None:
        """Fill ``room`` from the piece's file.

        Raises SourceError for a missing, too short or changed file, else StorageError.
        """
        file = self.open(piece)
        try:
            file.read_into(offset, room)
        except OSError as error:
            raise cannot_read(self.where(piece), error) from error


def cannot_read(where: object, error: OSError) -> SourceError | StorageError:
    """Return a SourceError for a missing or forbidden source, a StorageError for a failing disk, which may recover."""
    if isinstance(error, Changed):
        return changed(where)
    what = f"can't read: {error.strerror or error}"
    if isinstance(error, EndsEarly):
        return SourceError.at(where, what, "it changed while it was read; stop the process that writes to it")
    if isinstance(error, (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)):
        return SourceError.at(where, what, "copy the file again, or fix its permissions")
    return StorageError.at(where, what, "check the disk")


def changed(where: object) -> SourceError:
    fix = "stop the process that writes to it, and rerun the command"
    return SourceError.at(where, "the file changed while it was read", fix)


def cannot_write(where: Path, error: OSError) -> StorageError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    fix = "free some space, or choose another place for the output" if full else "check the disk and permissions"
    return StorageError.at(where, f"can't write: {error.strerror or error}", fix)


class Output:
    """Gathers bytes in one buffer and writes it when full; it may first keep what the file already has.

    With ``direct``, writes bypass the page cache where they can. That saves a copy of every byte, and what others have
    in the cache stays there. ``direct`` is the size of the buffer for them, 0 for none.
    """

    def __init__(self, fd: int, on_progress: Callable[[int], None], digest: Digest | None, direct: int = 0):
        self.fd = fd
        self.on_progress = on_progress
        self.digest = digest
        self.is_direct = bool(direct) and bypass_cache(fd)
        self.buffer = huge_pages(direct) if self.is_direct else memoryview(bytearray(BUFFER_BYTES))
        self.filled = 0
        self.at = 0
        """Valid bytes in the file"""
        self.cloned = 0
        """Of these, bytes in blocks shared with sources"""
        self.device = os.fstat(fd).st_dev
        self.block_bytes = os.fstatvfs(fd).f_bsize

    def keep_prefix(self, length: int, stop: Stop) -> int:
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
        """Write bytes; return the CRC-32 continued from ``crc``. Long ones need not pass through the buffer."""
        data = memoryview(data)
        while data:
            is_straight, length = self._next(data)
            if is_straight:
                self.flush()
                room = data[:length]
                crc = crc32(room, crc)
                self._write(room)
            else:
                room = self.room()[: min(length, len(data))]
                room[:] = data[: len(room)]
                crc = crc32(self.commit(len(room)), crc)
            data = data[len(room) :]
        return crc

    def put_all(self, data: Iterable[bytes | memoryview]) -> int:
        """Write all of it; return the CRC-32."""
        crc = 0
        for some in data:
            crc = self.put(some, crc)
        return crc

    def _next(self, data: memoryview) -> tuple[bool, int]:
        """Return whether the next bytes are written from where they are, and at most how many of them."""
        if not self.is_direct:
            return len(data) >= len(self.buffer), len(self.buffer)
        position = self.at + self.filled
        if (position - _address(data)) % BLOCK_BYTES:
            return False, len(data)
        if before := -position % BLOCK_BYTES:
            return False, before
        whole = len(data) // BLOCK_BYTES * BLOCK_BYTES
        return (True, min(whole, len(self.buffer))) if whole else (False, len(data))

    def hexdigest(self) -> str | None:
        return None if self.digest is None else self.digest.hexdigest()

    def flush(self) -> None:
        if self.filled:
            self._write(self.buffer[: self.filled])
            self.filled = 0

    def end(self) -> None:
        """Write and release the buffer: making the file durable needs none."""
        self.flush()
        self.buffer = memoryview(b"")

    def _write(self, data: memoryview) -> None:
        """Write bytes at the end of the file: whole blocks straight to the disk, if possible. Others end that."""
        whole = len(data) // BLOCK_BYTES * BLOCK_BYTES if self.is_direct else 0
        if whole:
            try:
                write_all(self.fd, data[:whole])
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                os.lseek(self.fd, self.at, os.SEEK_SET)  # the file system wants larger blocks, or takes none
                whole = 0
        if whole < len(data):
            self.is_direct = self.is_direct and bypass_cache(self.fd, False)
            write_all(self.fd, data[whole:])
        self.count(data)

    def count(self, data: memoryview) -> None:
        """Count the next bytes of the file, which are written."""
        if self.digest is not None:
            self.digest.update(data)
        self.at += len(data)
        self.on_progress(len(data))


def direct_bytes(num_files: int) -> int:
    """Return the buffer size of a file if so many bypass the page cache at once: whole huge pages, at least one."""
    each = min(MAX_DIRECT_BYTES, DIRECT_BYTES // max(num_files, 1))
    return max(each // _HUGE_PAGE_BYTES, 1) * _HUGE_PAGE_BYTES


def huge_pages(num_bytes: int) -> memoryview:
    """Return memory in pages of 2 MiB, where the system has some.

    A request to a disk may refer to a limited number of places in memory, and pages of 4 KiB are scattered: without
    huge pages, the same bytes took two to five times as many requests, which some disks limit.
    """
    whole = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # it is only a hint
        whole.madvise(mmap.MADV_HUGEPAGE)
    memory = memoryview(whole)
    start = -_address(memory) % _HUGE_PAGE_BYTES  # untouched pages before and after it take no memory
    return memory[start : start + num_bytes]


def _address(data: memoryview) -> int:
    """Return where bytes lie in memory; an odd number if that is not known."""
    return 1 if data.readonly else ctypes.addressof(ctypes.c_char.from_buffer(data))
