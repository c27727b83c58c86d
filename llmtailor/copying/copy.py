"""Carries out a plan: fills every file with its pieces, several files at once, in flat memory.

Small pieces are gathered in a buffer and written together. Pieces that continue each other in one source file are
moved as one range, and a long range does not pass through the buffer (`copying.moving`). While the disk makes one file
durable, its worker continues with the next. The CRC-32 of every byte is computed on the way: for the zip records, the
files and the states. What an earlier run wrote is read back by the same pieces, so only its size and CRC need be
recorded.
"""

from __future__ import annotations

import logging
import math
import operator
import os
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import astuple, dataclass, field
from functools import partial
from pathlib import Path
from threading import BoundedSemaphore

from llmtailor.checkpoint.elements import gather
from llmtailor.checkpoint.layout import (
    Blend,
    Bytes,
    Cast,
    Copy,
    Crc,
    FileLayout,
    LinkLayout,
    Plan,
    Segment,
    Slot,
    Strided,
    Zeros,
    consecutive,
    summed_parts,
)
from llmtailor.codes import Code
from llmtailor.copying import streams
from llmtailor.copying.journal import Mark
from llmtailor.copying.moving import Clone, RangeCopier, Upload
from llmtailor.copying.pool import Inline, Stop, num_workers, num_writers, run_all
from llmtailor.copying.streams import BUFFER_BYTES, Output, SourceFiles, Store, cannot_write, changed, direct_bytes
from llmtailor.errors import SourceError, StorageError
from llmtailor.model.dtypes import BLOCKS, DIFFERENCES, ITEMSIZE, Q8, Q8_ROOT, size_of
from llmtailor.model.roles import State
from llmtailor.storage.checksums import Taken, combine, crc32, new_digest
from llmtailor.storage.local import FileFact
from llmtailor.storage.remote import STORE_WORKERS, RemotePath
from llmtailor.storage.threads import Threads
from llmtailor.timing import Stopwatch

logger = logging.getLogger(__name__)
MARK_BYTES = 256 << 20
"""A long file is made durable, and marked in the journal, each time it grows by this much. This runs in parallel with
the writing and costs no time: the disk has less to do at the end."""
MIN_DIRECT_BYTES = 4 << 20
"""Smaller files gain nothing by bypassing the page cache"""
CHUNK_ELEMENTS = BUFFER_BYTES // 16
"""So that the fp64 sum and a term fit into a core's cache"""
_ZEROS = memoryview(bytes(1 << 20))


class WriteProgress:
    def __init__(self, plan: FileLayout):
        self.plan = plan
        self.ranges = _Ranges(piece for piece in plan.pieces if isinstance(piece, Crc))
        self.crc = 0
        self.crcs, self.spread = array("I"), array("I")
        """See `FileResult`"""
        self.at = self.count = 0
        """Bytes and pieces so far"""

    def missing(self) -> tuple[Segment, ...]:
        return self.plan.pieces[self.count :]

    def add(self, piece: Segment, crcs: Iterable[int]) -> None:
        """Add the next piece, with the checksums of its parts; see `layout.summed_parts`."""
        _, num_bytes, stride = summed_parts(piece)
        whole = spread = 0
        for crc in crcs:
            whole = combine(whole, crc, num_bytes)
            if stride:
                spread = combine(spread, crc, stride)
        self.ranges.add(self.at, whole, piece.num_bytes)
        self.crc = combine(self.crc, whole, piece.num_bytes)
        self.crcs.append(whole)
        if stride:
            self.spread.append(spread)
        self.at += piece.num_bytes
        self.count += 1


class _Ranges:
    """The CRC-32 of the ranges that checksum pieces need; they never overlap, and come in order."""

    def __init__(self, wanted: Iterator[Crc]):
        self.spans = sorted({(piece.start, piece.stop) for piece in wanted}, reverse=True)
        self.done: dict[tuple[int, int], int] = {}
        self.crc = 0

    def add(self, start: int, crc: int, length: int) -> None:
        while self.spans and self.spans[-1][1] <= start:
            self.done[self.spans.pop()] = self.crc
            self.crc = 0
        if self.spans and self.spans[-1][0] <= start:
            self.crc = combine(self.crc, crc, length)

    def crc_of(self, piece: Crc, at: int) -> int:
        self.add(at, 0, 0)
        return self.done[(piece.start, piece.stop)]


def gathered(piece: Strided | Blend, sources: SourceFiles, stop: Stop) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a piece that is made from several places of the sources, in order.

    Raises SourceError or StorageError as `SourceFiles.read_into` does.
    """
    return _strided(piece, sources, stop) if isinstance(piece, Strided) else _blended(piece, sources, stop)


def _strided(piece: Strided, sources: SourceFiles, stop: Stop) -> Iterator[bytes | memoryview]:
    from llmtailor.storage.casts import cast  # numpy takes a while

    _, count, width, bands = piece.grid
    row_bytes = sum(band.width for band in bands)
    whole = BLOCKS[piece.dtype].elements if piece.dtype in BLOCKS else 1
    step = whole // math.gcd(whole, width)  # no block is cut
    at_once = min(count, max(1, streams.BUFFER_BYTES // row_bytes // step) * step)
    rows = memoryview(bytearray(at_once * row_bytes))
    is_same = piece.dtype == piece.source_dtype and piece.scale == 1
    reads = {term.extent.path: term for term in piece.reads}
    for first in range(0, count, at_once):
        stop.check()
        number = min(at_once, count - first)
        data = rows[: number * row_bytes]
        later = [band._replace(start=band.start + first * band.stride) for band in bands]
        gather(later, number, data, lambda band, start, room: sources.read_into(reads[band.path], start, room))
        if is_same:
            yield data
        else:
            rounded = cast(data, piece.source_dtype, piece.dtype, piece.scale)
            yield _roundable(rounded, piece, sources.where(piece.reads[0]))


def _blended(piece: Blend, sources: SourceFiles, stop: Stop) -> Iterator[bytes]:
    from llmtailor.storage.casts import add, refine  # numpy takes a while

    if not piece.terms:
        for begin in range(0, piece.numel, CHUNK_ELEMENTS):
            yield bytes(size_of(piece.dtype, min(CHUNK_ELEMENTS, piece.numel - begin)))
        return
    terms = [sources.chunks(term, CHUNK_ELEMENTS * ITEMSIZE[term.source_dtype]) for term in piece.terms]
    encoding = piece.terms[0].encoding
    newest = encoding.dtype if encoding is not None and encoding.dtype in DIFFERENCES else piece.terms[0].source_dtype
    for read in zip(*terms, strict=True):
        stop.check()
        terms_read = [(data, term.source_dtype, term.factor) for data, term in zip(read, piece.terms, strict=True)]
        yield (
            refine(terms_read[0][0], newest, *terms_read[1][:2], piece.dtype)
            if piece.refines
            else add(terms_read, piece.dtype)
        )


def gather_again(
    plan: Plan, groups: Sequence[Sequence[tuple[Strided | Blend, int]]], files: Collection[tuple[int, str]], stop: Stop
) -> None:
    """Make pieces again, and compare them with the CRC-32 of what was written.

    The lists in ``groups`` are read in parallel. ``files``, positions in `Plan.sources` with paths, may have changed.
    Raises SourceError if one has, or StorageError.
    """
    run_all([partial(_gather_again, plan, pieces, files, stop) for pieces in groups], num_workers(), stop)


def _gather_again(
    plan: Plan, pieces: Sequence[tuple[Strided | Blend, int]], files: Collection[tuple[int, str]], stop: Stop
) -> None:
    sources = SourceFiles(plan, (), {})
    for piece, wanted in pieces:
        crc = 0
        for some in gathered(piece, sources, stop):
            crc = crc32(some, crc)
        if crc != wanted:
            suspects = {sources.where(term) for term in piece.reads if (term.source, term.extent.path) in files}
            raise SourceError(problem for where in sorted(suspects) for problem in changed(where).problems)


@dataclass(frozen=True, slots=True)
class Run:
    """The checksum of elements of a state, from ``begin`` on, as written."""

    state: State
    begin: int
    num_bytes: int
    crc: int
    """Of elements that do not follow each other: that of the bytes from the first to the last, if those between were
    left out of the polynomial"""
    skipped: int = 0
    """The bytes between"""
    itemsize: int = 0
    """Known if there are any"""


@dataclass(frozen=True, slots=True)
class CopyStats:
    """How the bytes of an output were produced."""

    cloned_bytes: int = 0
    """In blocks shared with the sources"""
    copied_bytes: int = 0
    """Written"""
    kept_bytes: int = 0
    """Written by an earlier run that was interrupted"""
    linked_bytes: int = 0
    """In files that are hard links to files of the sources"""

    def __add__(self, other: CopyStats) -> CopyStats:
        return CopyStats(*map(operator.add, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class FileResult:
    plan: FileLayout
    crc: int
    crcs: Sequence[int]
    """CRC-32 of every piece; a link has none, as it is not read"""
    spread: Sequence[int]
    """Of every piece whose elements do not follow each other in the state, in order: see `Run.crc`"""
    digest: str | None
    """XXH3 of the file, if requested"""
    moved: CopyStats

    @property
    def path(self) -> str:
        return self.plan.path

    @property
    def num_bytes(self) -> int:
        return self.plan.num_bytes

    @property
    def facts(self) -> tuple[object, ...]:
        """All but the plan, which other ranks have"""
        return self.crc, self.crcs, self.spread, self.digest, self.moved

    @property
    def checked(self) -> Iterator[tuple[Segment, int]]:
        """The pieces with their CRC-32; none of a link"""
        return zip(self.plan.each(), self.crcs, strict=True) if self.crcs else iter(())

    def runs(self) -> Iterator[Run]:
        spread = iter(self.spread)
        for piece, crc in self.checked:
            if not isinstance(piece, (Copy, Cast, Strided, Blend)) or piece.state is None:
                continue
            count, num_bytes, stride = summed_parts(piece)
            if isinstance(piece, Strided) and stride:
                skipped = (count - 1) * (stride - num_bytes)
                yield Run(piece.state, piece.begin, piece.num_bytes, next(spread), skipped, stride // piece.stride)
            else:
                yield Run(piece.state, piece.begin, num_bytes, crc)


@dataclass(frozen=True, slots=True)
class Context:
    """The settings and callbacks for carrying out a plan."""

    facts: Sequence[Mapping[str, FileFact]] = ()
    """The files of each source as indexed; a file that has changed since is refused when it is opened"""
    kept: Mapping[str, tuple[Mark, ...]] = field(default_factory=dict)
    """The marks of files that an earlier run began; they are read back up to the last mark that is still right"""
    on_progress: Callable[[int], None] = lambda num_bytes: None
    """Called from several threads with the bytes written or read back; a negative number undoes earlier calls"""
    record: Callable[[str, Mark], None] = lambda path, mark: None
    """Called from several threads with how far a file is durable"""
    digest: bool = False
    """Whether to compute the XXH3 of every file"""
    stop: Stop = field(default_factory=Stop)
    stores: Mapping[str, Store] = field(default_factory=dict)
    """The plan's sources that are not folders, by name"""
    inline: bool = False
    """Whether to write the files one after another in the calling thread. Python waits at its end for the threads of a
    pool, so a write that never returns must not be in one."""
    clone: Clone = "never"
    """Whether the files share blocks with the sources"""
    direct: bool = True
    """Whether large files bypass the page cache where they can, which halves the CPU time; not for files that are read
    again at once"""
    taken: Taken[tuple[int, str]] | None = None
    """Gets the checksums of what is read to be converted; those of what is only copied are in the results"""
    upload: Upload | None = None
    """Uploads and removes each file when it is complete"""


def execute(plan: Plan, staging: Path, context: Context | None = None) -> list[FileResult]:
    """Write every file of the plan below ``staging``, each fsynced; return their checksums in plan order.

    Raises SourceError if a source file is missing, has changed or ends early, StorageError if the disk fails or is
    full, and Interrupted on Ctrl-C or SIGTERM, once all workers have stopped.
    """
    context = context or Context()
    try:
        for folder in {(staging / file.path).parent for file in plan.files}:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(staging, error) from error
    # a store answers late, so its requests wait for each other less than a disk's
    workers = STORE_WORKERS if any(isinstance(source, RemotePath) for source in plan.sources) else num_writers()
    num_large = sum(file.num_bytes >= MIN_DIRECT_BYTES for file in plan.files)
    direct = direct_bytes(1 if context.inline else min(workers, num_large)) if context.direct else 0
    work = _Work(plan, staging, context, direct, BoundedSemaphore(workers), RangeCopier(context.clone))
    if context.inline:
        return [_make_file(work, file) for file in plan.files]
    # the largest first, so that no long file is left to one worker at the end
    order = sorted(range(len(plan.files)), key=lambda number: -plan.files[number].num_bytes)
    jobs = [partial(_make_file, work, plan.files[number]) for number in order]
    results = run_all(jobs, 2 * workers, context.stop)
    return [result for _, result in sorted(zip(order, results, strict=True), key=lambda pair: pair[0])]


@dataclass(frozen=True, slots=True)
class _Work:
    plan: Plan
    staging: Path
    context: Context
    direct: int
    """The size of the buffer of a file that bypasses the page cache; 0 if none does"""
    turns: BoundedSemaphore
    """Held by each thread that reads or writes"""
    copier: RangeCopier


def _make_file(work: _Work, file: FileLayout) -> FileResult:
    if (upload := work.context.upload) is None:
        return _write_file(work, file)
    with upload.room_for(file.num_bytes):
        result = _write_file(work, file)
        upload.take(work.staging / file.path, file.path, result.crc)
    return result


def _link_file(work: _Work, file: LinkLayout) -> FileResult:
    """Make a hard link to a file of a source. Its bytes are not read, so they have no checksums."""
    sources, target = SourceFiles(work.plan, work.context.facts, {}), work.staging / file.path
    piece, num_bytes = file.origin, file.num_bytes
    source = sources.open(piece)  # checks that it is unchanged
    try:
        target.unlink(missing_ok=True)  # of an earlier run
        os.link(work.plan.path(piece.source, piece.extent.path).resolve(), target)
        status = target.stat()
        os.fsync(source.fd)
    except OSError as error:
        what = f"can't make a hard link to {sources.where(piece)}: {error.strerror or error}"
        raise StorageError.at(target, what, "leave out --reference") from error
    if (status.st_ino, status.st_size) != (os.fstat(source.fd).st_ino, num_bytes):
        raise changed(sources.where(piece))
    work.context.on_progress(num_bytes)
    return FileResult(file, 0, (), (), None, CopyStats(linked_bytes=num_bytes))


def _write_file(work: _Work, file: FileLayout) -> FileResult:
    """Write one file: its bytes while holding a turn, then its fsync, in parallel with other files."""
    if isinstance(file, LinkLayout):
        return _link_file(work, file)
    context, target, watch = work.context, work.staging / file.path, Stopwatch()
    marks = context.kept.get(file.path, ())
    sources = SourceFiles(work.plan, context.facts, context.stores, context.taken)
    try:
        fd = os.open(target, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | (0 if marks else os.O_EXCL), 0o666)
        try:
            with work.turns, Inline() if context.inline else Threads(1) as marker:
                watch.lap()
                context.stop.check()
                filled, output = _resume_file(file.made(), fd, marks, work)
                done_before = bool(marks) and output.at == file.num_bytes
                output.begin()
                kept_bytes = output.at
                _fill(filled, output, sources, work.copier, marker, context)
            if context.upload is None:
                os.fsync(fd)
            if not done_before:
                context.record(file.path, Mark(file.num_bytes, filled.crc))
        finally:
            os.close(fd)
    except OSError as error:
        raise cannot_write(target, error) from error
    logger.info("%s: %s bytes, CRC-32 %08x, in %s", file.path, f"{file.num_bytes:,}", filled.crc, watch.lap())
    moved = CopyStats(output.cloned, file.num_bytes - kept_bytes - output.cloned, kept_bytes)
    return FileResult(file, filled.crc, filled.crcs, filled.spread, output.hexdigest(), moved)


def _resume_file(plan: FileLayout, fd: int, marks: Sequence[Mark], work: _Work) -> tuple[WriteProgress, Output]:
    """Read back what an earlier run wrote, up to the last mark that is true."""
    context = work.context
    direct = work.direct if not marks and plan.num_bytes >= MIN_DIRECT_BYTES else 0
    filled = WriteProgress(plan)
    output = Output(fd, context.on_progress, new_digest() if context.digest else None, direct)
    for number, mark in enumerate(marks):
        try:
            for piece in filled.missing():
                if filled.at + piece.num_bytes > mark.num_bytes:
                    break
                count, num_bytes, _ = summed_parts(piece)
                filled.add(piece, [output.keep_prefix(num_bytes, context.stop) for _ in range(count)])
            true = (filled.at, filled.crc) == (mark.num_bytes, mark.crc)
        except OSError:  # cut short, or no longer readable
            true = False
        if not true:
            logger.info("%s: the content up to byte %d does not match the journal", plan.path, mark.num_bytes)
            context.on_progress(-output.at)
            return _resume_file(plan, fd, marks[:number], work)
    if marks:
        logger.info("%s: %d of %d bytes are there and match the journal", plan.path, output.at, plan.num_bytes)
    return filled, output


def _fill(
    filled: WriteProgress, output: Output, sources: SourceFiles, copier: RangeCopier, marker: Executor, context: Context
) -> None:
    marked, due = filled.at, None
    marking: Future[None] | None = None

    def mark(reached: Mark) -> None:
        os.fdatasync(output.fd)
        logger.debug("%s: %d of %d bytes are durable", filled.plan.path, reached.num_bytes, filled.plan.num_bytes)
        context.record(filled.plan.path, reached)

    for run in consecutive(filled.missing()):
        for piece, crcs in zip(run, _write(run, filled, output, sources, copier, context.stop), strict=True):
            filled.add(piece, crcs)
            if due is None and filled.at - marked >= MARK_BYTES and filled.at < filled.plan.num_bytes:
                due = Mark(filled.at, filled.crc)
            if due is not None and output.at >= due.num_bytes:  # no longer in the buffer
                if marking:
                    marking.result()
                marked, marking, due = due.num_bytes, marker.submit(mark, due), None
    output.end()
    if marking:
        marking.result()  # a disk reports an error only once, not again at the last fsync


def _write(
    run: Sequence[Segment], filled: WriteProgress, output: Output, sources: SourceFiles, copier: RangeCopier, stop: Stop
) -> Iterator[Iterable[int]]:
    """Write a run of pieces; yield the CRC-32 of each, or of each of its parts: take them before the next piece."""
    piece = run[0]
    stop.check()
    if isinstance(piece, Bytes):
        yield (output.put(piece.data),)
    elif isinstance(piece, Crc):
        yield (output.put(filled.ranges.crc_of(piece, filled.at).to_bytes(4, "little")),)
    elif isinstance(piece, Zeros):
        yield (output.put_all(_ZEROS[: piece.num_bytes - at] for at in range(0, piece.num_bytes, len(_ZEROS))),)
    elif isinstance(piece, Cast):
        yield (output.put_all(_casted(piece, sources, stop)),)
    elif isinstance(piece, Strided) and piece.stride:
        yield _row_by_row(piece, output, sources, stop)
    elif isinstance(piece, (Strided, Blend)):
        yield (output.put_all(gathered(piece, sources, stop)),)
    else:
        assert not isinstance(piece, Slot), "a plan has no slots"
        store = sources.stores.get(str(sources.plan.sources[piece.source]))
        copies = [copy for copy in run if isinstance(copy, Copy)]
        if store is not None:
            for copy in copies:
                yield (output.put_all(_from_store(store, copy, stop)),)
        else:
            moved = copier.move(piece, copies[-1].extent.stop, sources, output)
            yield from ((crc,) for crc in _checksums(copies, moved, stop))


def _row_by_row(piece: Strided, output: Output, sources: SourceFiles, stop: Stop) -> Iterator[int]:
    """Write a piece; yield the CRC-32 of each row."""
    _, size, _ = summed_parts(piece)
    for rows in gathered(piece, sources, stop):
        output.put(rows)
        yield from (crc32(rows[at : at + size]) for at in range(0, len(rows), size))


def _roundable(rounded: bytes, piece: Cast | Strided, where: str) -> bytes:
    """Return what was rounded. Raises SourceError for moments that 8 bits can't hold."""
    from llmtailor.storage.casts import has_lost_blocks

    if piece.dtype in (Q8, Q8_ROOT) and piece.source_dtype != piece.dtype and has_lost_blocks(rounded, piece.dtype):
        what = "a moment has an element that is infinite, not a number, or a negative second moment"
        raise SourceError.at(where, what, "omit --moments 8bit, or the policy that rounds", Code.NOT_ROUNDABLE)
    return rounded


def _casted(piece: Cast, sources: SourceFiles, stop: Stop) -> Iterator[bytes]:
    from llmtailor.storage.casts import cast  # numpy takes a while

    for data in sources.chunks(piece, streams.BUFFER_BYTES // 16 * ITEMSIZE[piece.source_dtype]):
        stop.check()
        rounded = cast(data, piece.source_dtype, piece.dtype, piece.scale)
        yield _roundable(rounded, piece, sources.where(piece))


def _from_store(store: Store, piece: Copy, stop: Stop) -> Iterator[memoryview]:
    left = piece.num_bytes
    while left:
        stop.check()
        some = store.read(piece.extent.path, piece.extent.stop - left, piece.extent.stop)
        yield some
        left -= len(some)


def _checksums(pieces: Iterable[Segment], data: Iterator[memoryview], stop: Stop) -> Iterator[int]:
    """Yield the CRC-32 of each piece, whose bytes follow each other in ``data``."""
    some = memoryview(b"")
    for piece in pieces:
        crc, left = 0, piece.num_bytes
        while left:
            if not some:
                stop.check()
                some = next(data)
            part, some = some[:left], some[left:]
            crc = crc32(part, crc)
            left -= len(part)
        yield crc
