"""Reads source files again, front to back: for their digests, and to compare them with the copies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from llmtailor.checkpoint.layout import Blend, Cast, Copy, Plan, Strided
from llmtailor.copying.copy import FileResult, gather_again
from llmtailor.copying.pool import Stop, num_workers, run_all
from llmtailor.copying.streams import cannot_read, changed
from llmtailor.errors import COPY_FILE, SourceError
from llmtailor.model.dtypes import ITEMSIZE
from llmtailor.storage.checksums import crc32, new_digest
from llmtailor.storage.local import OpenFile, OpenFiles
from llmtailor.storage.remote import EndsEarly

CHUNK_BYTES = 1 << 20

SourcePath = tuple[int, str]
"""Position in `Plan.sources`, and path"""


@dataclass(frozen=True, slots=True)
class Stated:
    """A checksum stated by a source: of a record in a torch file, or of a file in a llmtailor manifest."""

    what: str
    start: int
    stop: int
    crc: int


def read_again(
    plan: Plan,
    results: Sequence[FileResult],
    files: Collection[SourcePath],
    on_progress: Callable[[int], None],
    stop: Stop,
    *,
    stated: Mapping[SourcePath, Sequence[Stated]] | None = None,
    of_all: Collection[SourcePath] | None = None,
) -> dict[SourcePath, str]:
    """Read whole source files again; return their digests.

    Every range that was copied or converted is compared by CRC-32 with the written bytes, including those of an earlier
    run that this one kept, and with the checksums that the sources state (``stated``). Pieces that are made from
    several places are read and made once more. If several ranks share the files, ``of_all`` are those of all ranks, and
    one rank makes each piece. Raises SourceError for a changed or damaged file, or StorageError.
    """
    asked = files if of_all is None else of_all
    taken: dict[SourcePath, list[_Range]] = defaultdict(list)
    for name, ranges in (stated or {}).items():
        taken[name] += [_Range(span.start, span.stop, span.crc, span.what) for span in ranges if span.start < span.stop]
    gathered: list[list[tuple[Strided | Blend, int]]] = []
    for result in results:
        gathered.append([])
        for piece, crc in result.checked:
            if isinstance(piece, (Copy, Cast)) and piece.num_bytes and (piece.source, piece.extent.path) in files:
                taken[(piece.source, piece.extent.path)].append(_Taken(piece, crc))
            elif isinstance(piece, (Strided, Blend)):
                read = [name for term in piece.reads if (name := (term.source, term.extent.path)) in asked]
                if read and min(read) in files:
                    gathered[-1].append((piece, crc))
    names = sorted(files)
    jobs = [partial(_read, plan.path(*name), taken[name], on_progress, stop) for name in names]
    digests = dict(zip(names, run_all(jobs, num_workers(), stop), strict=True))
    gather_again(plan, gathered, asked, stop)
    return digests


def differing_files(root: Path, wanted: Mapping[str, int], on_progress: Callable[[int], None], stop: Stop) -> list[str]:
    """Return the files below ``root`` that have another CRC-32 on the disk than the one that is wanted.

    Raises OSError, or Interrupted.
    """

    def watch(num_bytes: int) -> None:
        stop.check()
        on_progress(num_bytes)

    with OpenFiles(root) as files:
        for path in wanted:
            files.forget(path)
        jobs = [partial(files.crc_of, path, 0, files.open(path).num_bytes, watch) for path in wanted]
        crcs = run_all(jobs, num_workers(), stop)
    return [path for path, crc in zip(wanted, crcs, strict=True) if crc != wanted[path]]


def _read(where: Path, taken: list[_Range], on_progress: Callable[[int], None], stop: Stop) -> str:
    digest, at = new_digest(), 0
    waiting = sorted(taken, key=lambda span: span.at, reverse=True)
    reached: list[_Range] = []
    try:
        file = OpenFile(where)
        for data in file.stream(0, file.num_bytes, CHUNK_BYTES):
            stop.check()
            digest.update(data)
            while waiting and waiting[-1].at < at + len(data):
                reached.append(waiting.pop())
            for span in reached:
                span.feed(data[span.at - at : span.stop - at])
            wrong = [span.what for span in reached if span.at == span.stop and span.crc != span.wanted]
            if wrong:
                if not all(wrong):
                    raise changed(where)
                fix = f"llmtailor verify --deep lists the damage; {COPY_FILE}"
                raise SourceError.at(where, f"{wrong[-1]} does not match its checksum", fix)
            reached = [span for span in reached if span.at < span.stop]
            at += len(data)
            on_progress(len(data))
        if reached or waiting:
            raise EndsEarly(max(span.stop for span in (*reached, *waiting)))
    except OSError as error:
        raise cannot_read(where, error) from error
    return digest.hexdigest()


class _Range:
    """A range of a source file, and its CRC-32 so far."""

    def __init__(self, start: int, stop: int, wanted: int, what: str = ""):
        self.at, self.stop, self.wanted, self.what = start, stop, wanted, what
        self.crc = 0

    def feed(self, data: memoryview) -> None:
        """Add the next bytes of the file; those after ``stop`` are ignored."""
        self.at += len(data)
        self.crc = crc32(data, self.crc)


class _Taken(_Range):
    """A range that a piece read; the CRC-32 is that of the result."""

    def __init__(self, piece: Copy | Cast, wanted: int):
        self.convert = piece if isinstance(piece, Cast) else None
        super().__init__(piece.extent.start, piece.extent.stop, wanted)
        self.rest = b""
        """The start of an element that the last chunk cut"""
        self.decoder = None
        if self.convert and self.convert.encoding:
            from llmtailor.storage.decoder import Decoder

            self.decoder = Decoder(self.convert.encoding)

    def feed(self, data: memoryview) -> None:
        if not self.convert:
            super().feed(data)
            return
        self.at += len(data)
        whole = self.rest + (self.decoder.feed(data) if self.decoder else data)
        end = len(whole) - len(whole) % ITEMSIZE[self.convert.source_dtype]
        self.rest = whole[end:]
        from llmtailor.storage.casts import cast  # numpy takes a while

        converted = cast(whole[:end], self.convert.source_dtype, self.convert.dtype, self.convert.scale)
        self.crc = crc32(converted, self.crc)
