"""Reads every byte of a checkpoint once, in parallel and in bounded memory. Its results are data for others to judge.

The states of a param are read together, as a bundle, because its weights must be its rounded masters.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from llmtailor.checkpoint.index import CheckpointIndex, TensorEntry
from llmtailor.checkpoint.placement import Extent, Runs
from llmtailor.engine.pool import Stop, num_workers, run_all
from llmtailor.model.parts import SavedAs
from llmtailor.model.states import BUFFER, EXP_AVG, EXP_AVG_SQ, FROZEN, ITEMSIZE, MASTER, MODULE, WEIGHT, State
from llmtailor.storage.checksums import Intervals, crc32
from llmtailor.storage.local import Files
from llmtailor.verify.bad_values import (
    DIFFERS,
    NEGATIVE,
    NOT_A_NUMBER,
    NOT_FINITE,
    BadValues,
    Mask,
    any_bit,
    differing,
    find,
)

CHUNK_ELEMENTS = 1 << 20
_WORTH_ANNOUNCING = 1 << 18

_Run = tuple[int, int]
_NON_NEGATIVE = {EXP_AVG_SQ, "max_exp_avg_sq"}
_OF_THE_MODEL = {WEIGHT, MASTER, FROZEN, BUFFER, MODULE}


@dataclass(frozen=True, slots=True)
class Stream:
    """One state of a bundle, and the checks on its values."""

    state: State
    held: TensorEntry
    checks: tuple[str, ...] = (NOT_FINITE,)
    """The problems that `bad_values.find` looks for"""
    begin: int = 0
    """The element of the bundle at which it begins: a fused param is saved in pieces"""
    is_copy: bool = False
    """Whether it must be the rounded first stream"""


class Bundle(NamedTuple):
    """The states of one param, or a weight without a param. All except copies have ``numel`` elements."""

    numel: int
    streams: list[Stream]

    @property
    def runs(self) -> Runs:
        """The elements to read: all, or those that a partial checkpoint holds of every state"""
        return next((one.held.runs for one in self.streams if not one.held.is_whole), ((0, self.numel),))


def bundle_states(
    index: CheckpointIndex, saved_as: Mapping[str, tuple[SavedAs, ...]], unreadable: Collection[str] = ()
) -> Iterator[Bundle]:
    """Yield everything to read, each byte once. Padding is in no placement, so in no bundle.

    ``saved_as`` lists params whose weights have other names.
    """
    seen: set[Extent] = set()
    for numel, streams in _bundles(index, saved_as):
        fresh = []
        for stream in streams:
            if stream.held.is_here and stream.held.numel and not stream.held.is_all_zero:
                # tied names may share their bytes, and without DeepSpeed weights are masters
                first, _ = stream.held.runs[0]
                begins = next(iter(stream.held.place.cover(first, first + 1))).extent
                if begins.path in unreadable or begins not in seen:
                    seen.add(begins)
                    fresh.append(stream)
        if fresh:
            yield Bundle(numel, fresh)


def _bundles(index: CheckpointIndex, saved_as: Mapping[str, tuple[SavedAs, ...]]) -> Iterator[Bundle]:
    names_of: dict[str, list[str]] = {}
    for name, stored in index.tied.items():
        names_of.setdefault(stored, []).append(name)
    moments: dict[str, list[Stream]] = {}
    for state, held in index.held.items():
        if state.kind not in _OF_THE_MODEL:
            checks = (NOT_FINITE, NEGATIVE) if state.kind in _NON_NEGATIVE else (NOT_FINITE,)
            moments.setdefault(state.param, []).append(Stream(state, held, checks))
    for param in index.params.values():
        streams = []
        kind = {"buffer": BUFFER, "trainable": MASTER, "frozen": FROZEN}[param.role]
        original = State(param.name, kind)
        if original in index.held and kind == BUFFER:
            held = index.held[original]
            yield Bundle(
                held.numel if index.has_buffers_by_rank else param.numel, [Stream(original, held, (NOT_A_NUMBER,))]
            )
        elif original in index.held:
            streams.append(Stream(original, index.held[original]))
            for name in (param.name, *names_of.get(param.name, ())):
                streams += _copies(index, name, saved_as.get(name) or (SavedAs(name, param.shape),))
        if kind != BUFFER:
            yield Bundle(param.numel, [*streams, *moments.get(param.name, ())])
    for state, held in index.held.items():
        if state.kind == WEIGHT:  # of a buffer, or by another name than in memory
            yield Bundle(held.numel, [Stream(state, held, (NOT_A_NUMBER,))])


def _copies(index: CheckpointIndex, name: str, saved_as: tuple[SavedAs, ...]) -> Iterator[Stream]:
    if name in index.module:
        yield Stream(State(name, MODULE), index.module[name], is_copy=True)
    for piece in saved_as:
        state = State(piece.name, WEIGHT)
        if state in index.held and index.held[state].shape == piece.shape:
            yield Stream(state, index.held[state], begin=piece.begin, is_copy=True)


@dataclass
class Reading:
    """Reads bundles and keeps the results."""

    index: CheckpointIndex
    left_out: Collection[str]
    """Files known to be unreadable"""
    on_progress: Callable[[int], None]
    """Gets the bytes read, from several threads"""
    stop: Stop
    sum_files: Collection[str]
    """Files to take checksums of"""
    sum_states: bool
    """Whether to take checksums of all states"""
    bad_values: dict[tuple[State, str], BadValues] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    """Files that could not be read to the end, and why"""
    not_zero: set[State] = field(default_factory=set)
    """Moments with at least one bit set"""
    by_file: Intervals[str] = field(default_factory=Intervals)
    by_state: Intervals[State] = field(default_factory=Intervals)
    """By bytes of the state, as if it were contiguous"""

    def __post_init__(self) -> None:
        self.files = Files(self.index.root)
        self._lock = threading.Lock()
        self._own = threading.local()

    def read(self, bundles: Iterable[Bundle]) -> None:
        """Read and check all bundles. Raises Interrupted on Ctrl-C."""
        bundles = list(bundles)
        jobs = (
            partial(self._read_chunk, bundle, begin, min(begin + CHUNK_ELEMENTS, high))
            for bundle in bundles
            for low, high in bundle.runs
            for begin in range(low, high, CHUNK_ELEMENTS)
        )
        run_all(jobs, num_workers(), self.stop)
        order = {stream.state: number for number, stream in enumerate(s for bundle in bundles for s in bundle.streams)}
        self.bad_values = dict(sorted(self.bad_values.items(), key=lambda item: (order[item[0][0]], item[0][1])))

    def crc_of(self, path: str, start: int, stop: int) -> int:
        """Return the CRC-32 of bytes of a file; those not read yet are read now. Raises OSError."""
        read = partial(crc_of_range, self.files, path, on_progress=self.on_progress)
        return self.by_file.crc_of(path, start, stop, read)

    def _read_chunk(self, bundle: Bundle, begin: int, end: int) -> None:
        """Read elements ``begin``..``end`` of a bundle: the corresponding elements of each stream."""
        parts = _parts(bundle, begin, end)
        for stream, low, high in parts:
            self._announce(stream, low, high)
        original, reference = bundle.streams[0], None
        for stream, low, high in parts:
            dtype, is_original = stream.held.dtype, stream is original
            data, lost = self._read_stream(stream, low, high, is_original)
            if is_original:
                reference, lost_there = data, lost
            for check in stream.checks:
                self._note(stream.state, check, find(check, data, dtype), lost, low)
            if stream.state.kind in (EXP_AVG, EXP_AVG_SQ) and stream.state not in self.not_zero and any_bit(data):
                self.not_zero.add(stream.state)
            if stream.is_copy and reference is not None and not is_original:
                offset, itemsize = low + stream.begin - begin, ITEMSIZE[original.held.dtype]
                part = reference[offset * itemsize : (offset + high - low) * itemsize]
                mask = differing(part, original.held.dtype, data, dtype, self.index.precision)
                lost += [(max(0, first - offset), max(0, last - offset)) for first, last in lost_there]
                self._note(stream.state, DIFFERS, mask, lost, low)

    def _note(self, state: State, problem: str, mask: Mask | None, lost: list[_Run], begin: int) -> None:
        if mask is None:
            return
        for low, high in lost:
            mask[low:high] = False
        where = mask.nonzero()[0]
        if len(where):
            with self._lock:
                found = self.bad_values.setdefault((state, problem), BadValues())
                found.count += len(where)
                found.runs.append((begin + int(where[0]), begin + int(where[-1]) + 1))

    def _read_stream(self, stream: Stream, begin: int, end: int, is_original: bool) -> tuple[memoryview, list[_Run]]:
        """Return elements ``begin``..``end``, and the runs of them, relative to ``begin``, that are lost (set to zero).

        The buffer belongs to this thread: one for originals and one for everything else.
        """
        itemsize = ITEMSIZE[stream.held.dtype]
        view, lost = self._buffer(is_original, (end - begin) * itemsize), []
        for fragment in stream.held.place.cover(begin, end):
            extent, low, high = fragment.extent, fragment.begin - begin, fragment.end - begin
            part = view[low * itemsize : high * itemsize]
            if not self._fill(part, extent.path, extent.start):
                part[:] = bytes(len(part))
                lost.append((low, high))
            elif self.sum_states or extent.path in self.sum_files:
                crc = crc32(part)
                self.by_file.add(extent.path, extent.start, extent.stop, crc)
                if self.sum_states:
                    self.by_state.add(stream.state, fragment.begin * itemsize, fragment.end * itemsize, crc)
        self.on_progress(len(view))
        return view, lost

    def _fill(self, room: memoryview, path: str, offset: int) -> bool:
        """Read bytes of a file; return whether that succeeded."""
        if path in self.left_out or path in self.unreadable:
            return False
        try:
            self.files.read_into(path, offset, room)
        except OSError as error:
            with self._lock:
                self.unreadable.setdefault(path, error.strerror or str(error))
            return False
        return True

    def _buffer(self, is_original: bool, num_bytes: int) -> memoryview:
        """Return one of this thread's two buffers: allocating one for every chunk would take longer than reading it."""
        own: dict[bool, bytearray] = self._own.__dict__.setdefault("buffers", {})
        if len(own.get(is_original, b"")) < num_bytes:
            own[is_original] = bytearray(num_bytes)
        return memoryview(own[is_original])[:num_bytes]

    def _announce(self, stream: Stream, begin: int, end: int) -> None:
        """Have the system fetch bytes ahead: a chunk's states are far apart, so it can't predict the next ones."""
        for fragment in stream.held.place.cover(begin, end):
            extent = fragment.extent
            if extent.num_bytes >= _WORTH_ANNOUNCING:
                with suppress(OSError):
                    self.files.will_need(extent.path, extent.start, extent.stop)


def _parts(bundle: Bundle, begin: int, end: int) -> list[tuple[Stream, int, int]]:
    """Return the streams of a bundle with the elements of each that correspond to the bundle's ``begin``..``end``."""
    parts = [
        (stream, max(begin, stream.begin) - stream.begin, min(end - stream.begin, stream.held.numel))
        for stream in bundle.streams
    ]
    return [part for part in parts if part[1] < part[2]]


def crc_of_range(
    files: Files, path: str, start: int, stop: int, on_progress: Callable[[int], None], crc: int = 0
) -> int:
    """Return the CRC-32 of bytes of a file, continuing from ``crc``. Raises OSError."""
    buffer = memoryview(bytearray(min(stop - start, 1 << 20)))
    while start < stop:
        room = buffer[: stop - start]
        files.read_into(path, start, room)
        crc = crc32(room, crc)
        on_progress(len(room))
        start += len(room)
    return crc
