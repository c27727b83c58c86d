"""Gets long ranges of source files into an output without passing them through this process.

The file system shares their blocks with the output where it can (clones them), else the kernel copies them, else they
are read and written. Their bytes are still looked at, once, for the checksums.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Literal

from llmtailor.checkpoint.layout import BLOCK_BYTES, Copy
from llmtailor.engine.streams import Output, Sources
from llmtailor.errors import StorageError
from llmtailor.storage.local import OpenFile, clone_range

Clone = Literal["auto", "never", "require"]
"""Whether an output shares blocks with its sources: where the file system can; never; or fail where it can't"""
DIRECT_BYTES = 128 << 10
"""Shorter ranges are faster to gather in a buffer, and clones of them would fragment the file."""
WINDOW_BYTES = 1 << 20
"""Mapped, and in memory, at once"""
MAX_CLONE_BYTES = 256 << 20
"""The kernel first writes what of it is not on disk yet, and can't be interrupted meanwhile."""


class Mover:
    """Moves ranges, and remembers between which file systems that failed; for any number of threads."""

    def __init__(self, clone: Clone) -> None:
        self.mode = clone
        self._failed: set[tuple[str, int, int]] = set()

    def move(self, piece: Copy, stop: int, sources: Sources, output: Output) -> Iterator[memoryview]:
        """Append the bytes of the piece's file from its start to ``stop``, which may lie behind its end.

        Yield them, each part after it is in the output or its buffer, valid until the next one.
        """
        start = piece.extent.start
        if self.mode == "never" or stop - start < DIRECT_BYTES:
            yield from _through_buffer(piece, start, stop, sources, output)
            return
        output.flush()
        file, shift = sources.open(piece), output.at - start
        first = -(-output.at // output.block_bytes) * output.block_bytes - shift
        last = (stop + shift) // output.block_bytes * output.block_bytes - shift
        if shift % output.block_bytes == 0 and last - first >= min(DIRECT_BYTES, BLOCK_BYTES):
            yield from self._copy(file, piece, start, first, sources, output)
            yield from self._clone(file, piece, first, last, sources, output)
            start = last
        yield from self._copy(file, piece, start, stop, sources, output)

    def _clone(
        self, file: OpenFile, piece: Copy, start: int, stop: int, sources: Sources, output: Output
    ) -> Iterator[memoryview]:
        pair = ("clone", file.device, output.device)
        while start < stop and pair not in self._failed:
            count = min(stop - start, MAX_CLONE_BYTES)
            try:
                clone_range(file.fd, start, count, output.fd, output.at)
            except OSError as error:
                if self.mode == "require":
                    what = f"the file system can't share its blocks with the output: {error.strerror}"
                    fix = "put the output on the same file system, one with reflinks (XFS, Btrfs), or use --clone auto"
                    raise StorageError.at(sources.where(piece), what, fix) from error
                self._failed.add(pair)
                break
            os.lseek(output.fd, count, os.SEEK_CUR)
            output.cloned += count
            for begin in range(start, start + count, len(output.buffer)):
                room = output.buffer[: start + count - begin]
                sources.read_into(piece, begin, room)
                output.count(room)
                yield room
            start += count
        yield from self._copy(file, piece, start, stop, sources, output)

    def _copy(
        self, file: OpenFile, piece: Copy, start: int, stop: int, sources: Sources, output: Output
    ) -> Iterator[memoryview]:
        pair = ("copy", file.device, output.device)
        while start < stop and pair not in self._failed:
            try:
                count = os.copy_file_range(file.fd, output.fd, min(stop - start, WINDOW_BYTES), start)
            except (OSError, AttributeError):  # not between these file systems, or not on this system
                self._failed.add(pair)
                break
            if not count:  # the source ends here, which reading it will find out
                break
            view = output.map(count)
            output.count(view)
            yield view
            del view
            start += count
        yield from _through_buffer(piece, start, stop, sources, output)


def _through_buffer(piece: Copy, start: int, stop: int, sources: Sources, output: Output) -> Iterator[memoryview]:
    while start < stop:
        room = output.room()[: stop - start]
        sources.read_into(piece, start, room)
        yield output.commit(len(room))
        start += len(room)
