"""Gets ranges of source files into an output: by sharing their blocks where the file system can, else by copying.

A file system with reflinks (XFS, Btrfs, some network ones) lets a file share blocks with another one, *clones* them: no
byte is written, and both files can be changed or deleted independently. Cloned bytes are still read, for the checksums.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from typing import Literal

from llmtailor.checkpoint.layout import Copy, whole_blocks
from llmtailor.engine.streams import BUFFER_BYTES, Output, Sources
from llmtailor.errors import StorageError
from llmtailor.storage.ahead import Ahead
from llmtailor.storage.local import clone_range

Clone = Literal["auto", "never", "require"]
"""Whether an output shares blocks with its sources: where the file system can, never, or fail where it can't"""
MAX_CLONE_BYTES = 256 << 20
"""The kernel first writes those bytes of the source that are not on disk yet, and can't be interrupted meanwhile."""
_ONE_FILE_SYSTEM = "put the output on the same file system, one with reflinks (XFS, Btrfs), or use --clone auto"


class Mover:
    """Moves ranges, and remembers between which file systems it can't clone; for any number of threads."""

    def __init__(self, clone: Clone) -> None:
        self.clone = clone
        self._not_between: set[tuple[int, int]] = set()

    def move(self, piece: Copy, stop: int, sources: Sources, output: Output) -> Iterator[memoryview]:
        """Append the bytes of the piece's file from the start of the piece to ``stop``, which may be behind its end.

        Yield them in parts that are in the output or its buffer; each is valid until the next one.
        """
        start = piece.extent.start
        if sources.is_remote(piece):
            yield from self._fetch(piece, stop, sources, output)
            return
        if self.clone != "never":
            first, last = whole_blocks(start, stop, output.at + output.filled, output.block_bytes)
            yield from _copy(piece, start, first, sources, output)
            start = yield from self._clone(piece, first, last, sources, output)
        yield from _copy(piece, start, stop, sources, output)

    def _clone(
        self, piece: Copy, start: int, stop: int, sources: Sources, output: Output
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

    def _fetch(self, piece: Copy, stop: int, sources: Sources, output: Output) -> Iterator[memoryview]:
        """Get the bytes from an object store."""
        if self.clone == "require":
            what = "its blocks can't be shared with the output: it is in an object store"
            raise StorageError.at(sources.where(piece), what, _ONE_FILE_SYSTEM)
        for data in sources.stream(piece, stop):
            left = memoryview(data)
            while left:
                room = output.room()[: len(left)]
                room[:] = left[: len(room)]
                left = left[len(room) :]
                yield output.commit(len(room))


def _copy(piece: Copy, start: int, stop: int, sources: Sources, output: Output) -> Iterator[memoryview]:
    file = sources.open(piece)  # kept, so that it stays open
    ahead = Ahead(file.fd, start, stop)
    while start < stop:
        ahead.reached(start)
        room = output.room()[: min(stop - start, BUFFER_BYTES)]
        sources.read_into(piece, start, room)
        yield output.commit(len(room))
        start += len(room)
