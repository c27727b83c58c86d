"""Reads source files a second time, front to back: for their digests, and to see that they are what was copied."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from llmtailor.checkpoint.layout import Cast, Copy, Plan
from llmtailor.engine.copy import FileResult
from llmtailor.engine.pool import Stop, num_workers, run_all
from llmtailor.engine.streams import cannot_read, changed
from llmtailor.errors import COPY_FILE, SourceError
from llmtailor.model.states import ITEMSIZE
from llmtailor.storage.casts import cast
from llmtailor.storage.checksums import crc32, new_digest
from llmtailor.storage.local import EndsEarly, chunks

CHUNK_BYTES = 1 << 20

SourceFile = tuple[int, str]
"""Position in `Plan.sources`, and path."""


@dataclass(frozen=True, slots=True)
class Stated:
    """A checksum that a source itself states: of a record in a torch file, or of a file in a manifest of ours."""

    what: str
    start: int
    stop: int
    crc: int


def files_read(plan: Plan) -> list[SourceFile]:
    """Return every source file that pieces read from."""
    pieces = (piece for file in plan.files for piece in file.pieces)
    return sorted({(piece.source, piece.extent.path) for piece in pieces if isinstance(piece, (Copy, Cast))})


def read_again(
    plan: Plan,
    results: Sequence[FileResult],
    files: Collection[SourceFile],
    on_progress: Callable[[int], None],
    stop: Stop,
    stated: Mapping[SourceFile, Sequence[Stated]] | None = None,
) -> dict[SourceFile, str]:
    """Read some source files again, whole; return their digests.

    Every range that was copied or converted is compared with what was written, by its CRC-32; so is what an earlier run
    has written and this one kept, and what the sources have ``stated``. Raises SourceError for a file whose content has
    changed or is damaged, or StorageError.
    """
    taken: dict[SourceFile, list[_Range]] = defaultdict(list)
    for name, ranges in (stated or {}).items():
        taken[name] += [_Range(one.start, one.stop, one.crc, one.what) for one in ranges if one.start < one.stop]
    for result in results:
        for piece, crc in zip(result.plan.pieces, result.crcs, strict=True):
            if isinstance(piece, (Copy, Cast)) and piece.num_bytes and (piece.source, piece.extent.path) in files:
                taken[(piece.source, piece.extent.path)].append(_Taken(piece, crc))
    names = sorted(files)
    jobs = [partial(_read, Path(plan.sources[name[0]]) / name[1], taken[name], on_progress, stop) for name in names]
    return dict(zip(names, run_all(jobs, num_workers(), stop), strict=True))


def _read(where: Path, taken: list[_Range], on_progress: Callable[[int], None], stop: Stop) -> str:
    digest, at = new_digest(), 0
    waiting = sorted(taken, key=lambda one: one.at, reverse=True)
    reached: list[_Range] = []
    try:
        fd = os.open(where, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            for data in chunks(fd, memoryview(bytearray(CHUNK_BYTES))):
                stop.check()
                digest.update(data)
                while waiting and waiting[-1].at < at + len(data):
                    reached.append(waiting.pop())
                for one in reached:
                    one.feed(data[one.at - at : one.stop - at])
                wrong = [one.what for one in reached if one.at == one.stop and one.crc != one.wanted]
                if wrong:
                    raise _damaged(where, wrong[-1]) if all(wrong) else changed(where)
                reached = [one for one in reached if one.at < one.stop]
                at += len(data)
                on_progress(len(data))
            if reached or waiting:
                raise EndsEarly(max(one.stop for one in (*reached, *waiting)))
        finally:
            os.close(fd)
    except OSError as error:
        raise cannot_read(where, error) from error
    return digest.hexdigest()


def _damaged(where: Path, what: str) -> SourceError:
    fix = f"llmtailor verify --deep says what is damaged; {COPY_FILE}"
    return SourceError.at(where, f"{what} does not match its checksum", fix)


class _Range:
    """A range of a source file, and its CRC-32 as far as it is known."""

    def __init__(self, start: int, stop: int, wanted: int, what: str = ""):
        self.at, self.stop, self.wanted, self.what = start, stop, wanted, what
        self.crc = 0

    def feed(self, data: memoryview) -> None:
        """Take the next bytes; there may be none of ours behind the stop."""
        self.at += len(data)
        self.crc = crc32(data, self.crc)


class _Taken(_Range):
    """A range that a piece took; the CRC-32 is that of what was made of it."""

    def __init__(self, piece: Copy | Cast, wanted: int):
        self.convert = piece if isinstance(piece, Cast) else None
        super().__init__(piece.extent.start, piece.extent.stop, wanted)
        self.rest = b""
        """The begin of an element that the last chunk cut."""

    def feed(self, data: memoryview) -> None:
        if not self.convert:
            super().feed(data)
            return
        self.at += len(data)
        whole = self.rest + data
        end = len(whole) - len(whole) % ITEMSIZE[self.convert.source_dtype]
        self.rest = whole[end:]
        made = cast(whole[:end], self.convert.source_dtype, self.convert.dtype, self.convert.scale)
        self.crc = crc32(made, self.crc)
