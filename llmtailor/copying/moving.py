"""Moves ranges of source files into an output, by sharing blocks or copying, and an output into an object store.

A file system with reflinks (XFS, Btrfs, some network ones) lets a file share blocks with another one, *clones* them: no
byte is written, and both files can be changed or deleted independently. Cloned bytes are still read, for the checksums.

A store can't publish a folder by a rename. So a marker is written first and removed last, after everything was read
back and verified: no command takes a folder with the marker for a checkpoint. Each file is uploaded as soon as it is
made, and its local copy removed, so that few files take local space at a time.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Literal

from llmtailor.checkpoint.layout import Copy, whole_blocks
from llmtailor.copying.pool import Stop
from llmtailor.copying.streams import BUFFER_BYTES, Output, SourceFiles
from llmtailor.errors import SourceError, StorageError, TailorError, TargetError, VerificationError
from llmtailor.storage.local import Ahead, clone_range, disk_errors, list_files, read_source
from llmtailor.storage.remote import UPLOADING, RemotePath

Clone = Literal["auto", "never", "require"]
"""Whether an output shares blocks with its sources: where the file system can, never, or fail where it can't"""
MAX_CLONE_BYTES = 256 << 20
"""The kernel first writes those bytes of the source that are not on disk yet, and can't be interrupted meanwhile."""
_ONE_FILE_SYSTEM = "put the output on the same file system, one with reflinks (XFS, Btrfs), or use --clone auto"


class RangeCopier:
    """Moves ranges, and remembers between which file systems it can't clone; for any number of threads."""

    def __init__(self, clone: Clone) -> None:
        self.clone = clone
        self._not_between: set[tuple[int, int]] = set()

    def move(self, piece: Copy, stop: int, sources: SourceFiles, output: Output) -> Iterator[memoryview]:
        """Append the bytes of the piece's file from the start of the piece to ``stop``, which may be behind its end.

        Yield them in parts that are in the output or its buffer; each is valid until the next one.
        """
        start = piece.extent.start
        if sources.open(piece).stored is not None:
            yield from self._fetch(piece, stop, sources, output)
            return
        if self.clone != "never":
            first, last = whole_blocks(start, stop, output.at + output.filled, output.block_bytes)
            yield from _copy(piece, start, first, sources, output)
            start = yield from self._clone(piece, first, last, sources, output)
        yield from _copy(piece, start, stop, sources, output)

    def _clone(
        self, piece: Copy, start: int, stop: int, sources: SourceFiles, output: Output
    ) -> Generator[memoryview, None, int]:
        """Clone as many bytes as possible; return where they end."""
        file = sources.open(piece)
        between = (file.device, output.device)
        if start == stop or between in self._not_between:
            return start
        output.flush()
        ahead = Ahead(file.fd, start, stop)
        while start < stop and between not in self._not_between:
            count = min(stop - start, MAX_CLONE_BYTES)
            try:
                clone_range(file.fd, start, count, output.fd, output.at)
            except OSError as error:
                if self.clone == "require":
                    what = f"its blocks can't be shared with the output: {error.strerror}"
                    raise StorageError.at(sources.where(piece), what, _ONE_FILE_SYSTEM) from error
                self._not_between.add(between)
                break
            os.lseek(output.fd, count, os.SEEK_CUR)
            output.cloned += count
            size = min(BUFFER_BYTES, len(output.buffer))
            for begin in range(start, start + count, size):
                ahead.reached(begin)
                room = output.buffer[: min(size, start + count - begin)]
                sources.read_into(piece, begin, room)
                output.count(room)
                yield room
            start += count
        return start

    def _fetch(self, piece: Copy, stop: int, sources: SourceFiles, output: Output) -> Iterator[memoryview]:
        if self.clone == "require":
            what = "its blocks can't be shared with the output: it is in an object store"
            raise StorageError.at(sources.where(piece), what, _ONE_FILE_SYSTEM)
        for left in sources.stream(piece, stop):
            while left:
                room = output.room()[: len(left)]
                room[:] = left[: len(room)]
                left = left[len(room) :]
                yield output.commit(len(room))


def _copy(piece: Copy, start: int, stop: int, sources: SourceFiles, output: Output) -> Iterator[memoryview]:
    file = sources.open(piece)  # kept, so that it stays open
    ahead = Ahead(file.fd, start, stop)
    while start < stop:
        ahead.reached(start)
        room = output.room()[: min(stop - start, BUFFER_BYTES)]
        sources.read_into(piece, start, room)
        yield output.commit(len(room))
        start += len(room)


_FILES = "files"
_MAX_MARKER_BYTES = 64 << 20
_POLL_S = 0.5


def is_unfinished(out: Path) -> bool:
    """Return whether a folder in a store was left by an interrupted upload."""
    return isinstance(out, RemotePath) and (out / UPLOADING).is_file()


def clear(out: Path) -> None:
    """Remove what an interrupted upload left. Raises TargetError for anything else there, StorageError, SourceError."""
    assert isinstance(out, RemotePath)
    try:
        marker = json.loads(read_source(out / UPLOADING, f"{out / UPLOADING}", _MAX_MARKER_BYTES))
        begun = {UPLOADING, *map(str, marker[_FILES])}
    except (ValueError, TypeError, KeyError) as error:
        raise TargetError.at(out, f"{UPLOADING} in it is not llmtailor's", "choose another output") from error
    if others := sorted(list_files(out).keys() - begun):
        what = f"an upload to it was interrupted, and other files were added since: {', '.join(others[:3])}"
        raise TargetError.at(out, what, "choose another output")
    names = sorted(list_files(out), key=lambda name: name == UPLOADING)
    out.remote.remove((out / name).key for name in names)
    out.remote.list()
    shutil.rmtree(out)  # empty folders in the cache


def room_to_upload(num_bytes: Iterable[int]) -> int:
    """Return the local space that the upload of files of these sizes takes: while one is uploaded, another is made."""
    return sum(sorted(num_bytes)[-2:])


class Upload:
    """The upload of an output, file by file, as they are made; a context manager around making them.

    After an error in the block the marker stays, so that the next upload starts over; but an output that was refused
    is removed.

    Args:
        out: a folder in a store, with nothing in it.
        num_bytes: the size of each file that will be uploaded.
        on_progress: called with numbers of bytes, from several threads.
        stop: checked between requests.
    """

    def __init__(
        self, out: RemotePath, num_bytes: Mapping[str, int], on_progress: Callable[[int], None], stop: Stop
    ) -> None:
        self.out = out
        self._names, self._on_progress, self._stop = sorted(num_bytes), on_progress, stop
        self._room, self._used = room_to_upload(num_bytes.values()), 0
        self._freed = threading.Condition()

    def __enter__(self) -> Upload:
        with self._faults():
            self.out.remote.put_bytes((self.out / UPLOADING).key, json.dumps({_FILES: self._names}).encode())
        return self

    @contextmanager
    def room_for(self, num_bytes: int) -> Iterator[None]:
        """Wait until the files that are made or uploaded now leave local space for another one."""
        with self._freed:
            while self._used and self._used + num_bytes > self._room:
                self._freed.wait(_POLL_S)
                self._stop.check()
            self._used += num_bytes
        try:
            yield
        finally:
            with self._freed:
                self._used -= num_bytes
                self._freed.notify_all()

    def take(self, path: Path, name: str, crc: int) -> None:
        """Upload a local file, read it back from the store, and remove the local one.

        Raises StorageError if the store refuses, or returns something else than bytes of this CRC-32, and Interrupted.
        """
        self._stop.check()

        def on_read(num_bytes: int) -> None:
            self._stop.check()
            self._on_progress(num_bytes)

        with self._faults():
            self.out.remote.put((self.out / name).key, path, crc, on_read)
            path.unlink()

    def show(self) -> None:
        """List the files that were uploaded, without the marker."""
        with self._faults():
            self.out.remote.list()
            (self.out / UPLOADING).unlink(missing_ok=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            with self._faults():
                self.out.remote.remove([(self.out / UPLOADING).key])
            return
        shutil.rmtree(self.out, ignore_errors=True)
        with suppress(OSError, TailorError):
            self.out.remote.list()  # so that the same call starts over
            if isinstance(error, (SourceError, VerificationError)):
                clear(self.out)

    def _faults(self) -> AbstractContextManager[None]:
        return disk_errors(self.out.remote.url, "can't upload", "check the store, and rerun the same command")
