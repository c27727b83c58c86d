"""Reads every byte of a checkpoint once, in parallel and in bounded memory. What it finds is data; others judge it."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from llmtailor.checkpoint.intervals import Intervals
from llmtailor.errors import Interrupted
from llmtailor.model.states import EXP_AVG, EXP_AVG_SQ, ITEMSIZE, State
from llmtailor.storage.checksums import crc32
from llmtailor.verify.bad_values import (
    DIFFERS,
    NEGATIVE,
    NOT_FINITE,
    Blemish,
    Mask,
    any_bit,
    differing,
    negative,
    not_finite,
)
from llmtailor.verify.streams import Bundle, Stream

CHUNK_ELEMENTS = 1 << 20
MAX_WORKERS = 4
_QUEUED = 64
_OPEN_FILES = 64
_WORTH_ANNOUNCING = 1 << 18

_Item = TypeVar("_Item")
_Run = tuple[int, int]


@dataclass(slots=True)
class Readings:
    """What came out of reading."""

    blemishes: dict[tuple[State, str], Blemish] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    """Files that the operating system would not read to the end, and why."""
    not_zero: set[State] = field(default_factory=set)
    """Moments with at least one bit set"""
    by_file: Intervals[str] = field(default_factory=Intervals)
    by_state: Intervals[State] = field(default_factory=Intervals)
    """In bytes of the state, as if it lay in one piece."""


class Reader:
    """Reads ranges of a checkpoint's files, from any thread."""

    def __init__(self, root: Path):
        self.root = root
        self._local = threading.local()
        self._all: set[int] = set()

    def read_into(self, path: str, offset: int, room: memoryview) -> None:
        """Fill ``room`` from ``offset`` on. Raises OSError, also if the file ends before."""
        fd = self._fd(path)
        while room:
            count = os.preadv(fd, [room], offset)
            if count == 0:
                raise OSError(f"it ends before byte {offset + len(room):,}")
            offset, room = offset + count, room[count:]

    def buffer(self, is_original: bool, num_bytes: int) -> memoryview:
        """Return one of this thread's two buffers: new memory for every chunk would take longer than reading it."""
        own: dict[bool, bytearray] = self._local.__dict__.setdefault("buffers", {})
        if len(own.get(is_original, b"")) < num_bytes:
            own[is_original] = bytearray(num_bytes)
        return memoryview(own[is_original])[:num_bytes]

    def announce(self, path: str, start: int, stop: int) -> None:
        """Have the system fetch bytes ahead: a chunk's states lie far apart, so it can't guess what comes next."""
        if stop - start >= _WORTH_ANNOUNCING:
            with suppress(OSError):
                os.posix_fadvise(self._fd(path), start, stop - start, os.POSIX_FADV_WILLNEED)

    def forget(self, path: str) -> None:
        """Have what is read next come from the disk, not from the system's memory."""
        os.posix_fadvise(self._fd(path), 0, 0, os.POSIX_FADV_DONTNEED)

    def _fd(self, path: str) -> int:
        own: OrderedDict[str, int] = self._local.__dict__.setdefault("files", OrderedDict())
        if path in own:
            own.move_to_end(path)
        else:
            if len(own) >= _OPEN_FILES:
                _, oldest = own.popitem(last=False)
                self._all.discard(oldest)
                os.close(oldest)
            own[path] = os.open(self.root / path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            self._all.add(own[path])
        return own[path]

    def close(self) -> None:
        """Close all files, once no thread reads any more."""
        for fd in self._all:
            os.close(fd)
        self._all.clear()


@dataclass(frozen=True, slots=True)
class Reading:
    """How bundles are to be read."""

    reader: Reader
    precision: str
    """Of the weights in training, as `CheckpointIndex.precision`."""
    unreadable: frozenset[str] = frozenset()
    """Files whose fragments are left out."""
    summed_files: frozenset[str] = frozenset()
    """Files whose checksums are taken."""
    sum_states: bool = False
    """Whether checksums of all states are taken, too."""
    observe: Callable[[int], None] = lambda num_bytes: None
    """Told of bytes read, from several threads."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, bundles: Iterable[Bundle]) -> Readings:
        """Read and check all bundles. Raises Interrupted on Ctrl-C."""
        readings = Readings()
        chunks = (
            (bundle, begin, min(begin + CHUNK_ELEMENTS, bundle.numel))
            for bundle in bundles
            for begin in range(0, bundle.numel, CHUNK_ELEMENTS)
        )
        run_all(lambda chunk: self._read_chunk(*chunk, readings), chunks)
        return readings

    def _read_chunk(self, bundle: Bundle, begin: int, end: int, readings: Readings) -> None:
        for stream in bundle.streams:
            low, high = max(begin, stream.begin), min(end, stream.begin + stream.held.numel)
            for fragment in stream.held.place.cover(low - stream.begin, high - stream.begin) if low < high else ():
                self.reader.announce(fragment.extent.path, fragment.extent.start, fragment.extent.stop)
        original = bundle.streams[0]
        reference, lost_there = self._read_stream(original, begin, end, readings, is_original=True)
        self._check(original, reference, lost_there, begin, readings)
        itemsize = ITEMSIZE[original.held.dtype]
        for stream in bundle.streams[1:]:
            low, high = max(begin, stream.begin), min(end, stream.begin + stream.held.numel)
            if low >= high:
                continue
            data, lost = self._read_stream(stream, low - stream.begin, high - stream.begin, readings)
            self._check(stream, data, lost, low - stream.begin, readings)
            if stream.is_copy:
                part = reference[(low - begin) * itemsize : (high - begin) * itemsize]
                mask = differing(part, original.held.dtype, data, stream.held.dtype, self.precision)
                shifted = [(max(0, a + begin - low), max(0, b + begin - low)) for a, b in lost_there]
                self._note(stream.state, DIFFERS, mask, [*lost, *shifted], low - stream.begin, readings)

    def _check(self, stream: Stream, data: memoryview, lost: list[_Run], begin: int, readings: Readings) -> None:
        dtype = stream.held.dtype
        self._note(stream.state, NOT_FINITE, not_finite(data, dtype, stream.may_be_infinite), lost, begin, readings)
        if stream.state.kind in (EXP_AVG, EXP_AVG_SQ) and stream.state not in readings.not_zero and any_bit(data):
            readings.not_zero.add(stream.state)
        if not stream.may_be_negative:
            self._note(stream.state, NEGATIVE, negative(data, dtype), lost, begin, readings)

    def _note(
        self, state: State, kind: str, mask: Mask | None, lost: list[_Run], begin: int, readings: Readings
    ) -> None:
        if mask is None:
            return
        for low, high in lost:
            mask[low:high] = False
        where = mask.nonzero()[0]
        if not len(where):
            return
        first, last = begin + int(where[0]), begin + int(where[-1])
        with self.lock:
            blemish = readings.blemishes.setdefault((state, kind), Blemish(0, first, []))
            blemish.count += len(where)
            blemish.first = min(blemish.first, first)
            blemish.runs.append((first, last + 1))

    def _read_stream(
        self, stream: Stream, begin: int, end: int, readings: Readings, is_original: bool = False
    ) -> tuple[memoryview, list[_Run]]:
        """Return elements ``begin``..``end``, and which of them, counted from ``begin``, are lost: these are zeros.

        They lie in a buffer of this thread, one for originals and one for all else.
        """
        itemsize = ITEMSIZE[stream.held.dtype]
        view, lost = self.reader.buffer(is_original, (end - begin) * itemsize), []
        for fragment in stream.held.place.cover(begin, end):
            extent, low, high = fragment.extent, fragment.begin - begin, fragment.end - begin
            part = view[low * itemsize : high * itemsize]
            if extent.path in self.unreadable or extent.path in readings.unreadable:
                part[:] = bytes(len(part))
                lost.append((low, high))
                continue
            try:
                self.reader.read_into(extent.path, extent.start, part)
            except OSError as error:
                part[:] = bytes(len(part))
                lost.append((low, high))
                with self.lock:
                    readings.unreadable.setdefault(extent.path, error.strerror or str(error))
                continue
            if self.sum_states or extent.path in self.summed_files:
                crc = crc32(part)
                readings.by_file.add(extent.path, extent.start, extent.stop, crc)
                if self.sum_states:
                    readings.by_state.add(stream.state, fragment.begin * itemsize, fragment.end * itemsize, crc)
        self.observe(len(view))
        return view, lost


def crc_of_range(reader: Reader, path: str, start: int, stop: int, observe: Callable[[int], None], crc: int = 0) -> int:
    """Return the CRC-32 of bytes of a file, continuing from ``crc``. Raises OSError."""
    buffer = memoryview(bytearray(min(stop - start, 1 << 20)))
    while start < stop:
        room = buffer[: stop - start]
        reader.read_into(path, start, room)
        crc = crc32(room, crc)
        observe(len(room))
        start += len(room)
    return crc


def run_all(work: Callable[[_Item], None], items: Iterable[_Item]) -> None:
    """Work through items on several threads, with few of them waiting at a time. Ctrl-C raises Interrupted."""
    workers = min(MAX_WORKERS, os.cpu_count() or 1)
    pending: set[Future[None]] = set()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for item in items:
                pending.add(pool.submit(work, item))
                while len(pending) >= _QUEUED:
                    done, pending = wait(pending, return_when="FIRST_COMPLETED")
                    for future in done:
                        future.result()
            done, pending = wait(pending, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        except KeyboardInterrupt:
            raise Interrupted.at("", "interrupted while reading", "run the same command again") from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
