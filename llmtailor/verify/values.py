"""The deep checks of `verify`: values, checksums and digests.

Every byte is read once, in parallel and in bounded memory. The states of a param are read together, as a bundle,
because its weights must be its rounded masters. Values are checked block by block, so that intermediate results stay
in the processor's cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from llmtailor.checkpoint.elements import read_stored
from llmtailor.checkpoint.index import CheckpointIndex, TensorEntry
from llmtailor.checkpoint.placement import Extent, Grid, Runs, StoredRange, arrange
from llmtailor.codes import Code
from llmtailor.containers.json import read_json
from llmtailor.containers.torch_file import ZipRecord
from llmtailor.copying.pool import Stop, num_workers, run_all, stoppable
from llmtailor.errors import PathIn, SourceError, some
from llmtailor.findings import ERROR, NOTE, WARNING, Finding
from llmtailor.formats.composite import ManifestFacts
from llmtailor.frameworks.files import CONFIG
from llmtailor.frameworks.framework import is_resumed_from
from llmtailor.model.dtypes import DTYPES, F24, FLOATING, ITEMSIZE
from llmtailor.model.mergekit_data import naming_of, on_disk
from llmtailor.model.parts import SavedAs
from llmtailor.model.roles import BUFFER, EXP_AVG, EXP_AVG_SQ, FROZEN, KIND_OF_ROLE, MASTER, MODULE, WEIGHT, State
from llmtailor.storage.casts import cast, roundings, widen
from llmtailor.storage.checksums import Intervals, crc32
from llmtailor.storage.local import OpenFiles
from llmtailor.verify.checksums import compare_digests, stated_checksums, wrong_checksum
from llmtailor.verify.structure import Elements, Spans, elements_in, held_of, join, lost_elements

NOT_FINITE, NOT_A_NUMBER, NEGATIVE, DIFFERS, SPLIT = "not finite", "not a number", "negative", "differs", "split"
UNLIKE = "unlike"
_CALLED = {MODULE: "the module's weight", FROZEN: "the frozen value", MASTER: "the master"}
_OTHER_SAVE = "they are from different saves, or damaged: copy both files again, or use another checkpoint"
_DIVERGED = "the run had diverged, or the file is damaged: use an older checkpoint"
_SAID: Final[dict[str, tuple[str, str, Code, str]]] = {
    NOT_FINITE: ("is not finite", _DIVERGED, Code.NOT_FINITE, ERROR),
    NEGATIVE: ("is negative, but a mean of squares can't be", _OTHER_SAVE, Code.NEGATIVE, ERROR),
    DIFFERS: ("is not the rounded master", _OTHER_SAVE, Code.NOT_ROUNDED, ERROR),
    SPLIT: ("is not the rounded master, as requested", "a resume uses the masters", Code.SPLIT_WEIGHTS, WARNING),
}
_SAID[UNLIKE] = ("is not the same on all tensor-parallel ranks", _OTHER_SAVE, Code.RANKS_DIFFER, ERROR)
_SAID[NOT_A_NUMBER] = _SAID[NOT_FINITE]
BLOCK_ELEMENTS = 1 << 16
"""Elements that are checked at once, so that intermediate results stay in the processor's cache"""
Mask = npt.NDArray[np.bool_]
Bytes = bytes | bytearray | memoryview
_TESTS: Final[dict[str, Callable[[Any, Any, Any], Mask]]] = {
    NOT_FINITE: lambda bits, sign, special: (bits & special) == special,
    NOT_A_NUMBER: lambda bits, sign, special: (bits & ~sign) > special,
    NEGATIVE: lambda bits, sign, special: bits > sign,
}
CHUNK_ELEMENTS = 1 << 20
_WORTH_ANNOUNCING = 1 << 18
_Run = tuple[int, int]
_NON_NEGATIVE = {EXP_AVG_SQ, "max_exp_avg_sq"}
_OF_THE_MODEL = {WEIGHT, MASTER, FROZEN, BUFFER, MODULE}


@dataclass(slots=True)
class BadValues:
    """Elements of a state that are wrong in one way."""

    count: int = 0
    runs: list[tuple[int, int]] = field(default_factory=list)
    """One range per chunk, from the first such element to just past the last"""


def find_bad_values(
    index: CheckpointIndex, bad_values: Mapping[tuple[State, str], BadValues], is_split: bool
) -> Iterator[Finding]:
    """Yield a finding per kind of state and bad value. With ``is_split``, weights may differ on purpose."""
    together: dict[tuple[str, str], list[State]] = {}
    for state, problem in bad_values:
        together.setdefault((state.kind, problem), []).append(state)
    for (kind, problem), states in together.items():
        count = sum(bad_values[state, problem].count for state in states)
        first, _ = min(bad_values[states[0], problem].runs)
        entry = held_of(index, states[0])
        total = sum(held_of(index, state).numel for state in states)
        tensors = f"in {len(states)} tensors, the first" if len(states) > 1 else "the first"
        where = PathIn(index.name, next(iter(entry.place.cover(first, first + 1))).extent.path)
        at = f"{count:,} of {total:,} elements, {tensors} at {_coordinates(first, entry.shape)} of {states[0].param}"
        on_purpose = problem == DIFFERS and is_split and kind == WEIGHT
        what, fix, code, severity = _SAID[SPLIT if on_purpose else problem]
        name = f"{_CALLED.get(kind, kind)} of {some(state.param for state in states)}"
        yield Finding(where, f"{name} {what}: {at}", fix, code, severity)


def find_zeroed(index: CheckpointIndex, not_zero: Collection[State]) -> Iterator[Finding]:
    """Report flat tensors of a full checkpoint whose moments are all zero although Adam has made steps.

    The gradients of a whole flat tensor are never all zero: such moments were erased or never loaded.
    """
    stepped = [
        flat
        for flat in index.sub_groups
        if flat.step and any(index.params[param].numel for param in flat.params)
        if State(flat.params[0], EXP_AVG_SQ) in index.held
    ]
    for kind in (EXP_AVG, EXP_AVG_SQ):
        keeping = [flat for flat in stepped if State(flat.params[0], kind) in index.held]  # Adafactor has no exp_avg
        zeroed = [flat for flat in keeping if not any(State(param, kind) in not_zero for param in flat.params)]
        if zeroed:
            params = tuple(param for flat in zeroed for param in flat.params)
            what = f"{kind} of {some(params)} is all zero after {zeroed[0].step or 0:g} steps of Adam"
            severity = ERROR if len(zeroed) == len(stepped) else WARNING
            yield Finding(
                index.name, what, f"a resume restarts Adam there; {_OTHER_SAVE}", Code.ALL_ZERO, severity, params
            )


def damaged_elements(
    index: CheckpointIndex,
    bad_values: Mapping[tuple[State, str], BadValues],
    saved_as: Mapping[str, tuple[SavedAs, ...]],
    is_split: bool,
) -> Iterator[Elements]:
    """Yield the ranges of elements that can't be trusted; if two states contradict each other, those of both."""
    pieces = {piece.name: (name, piece.begin) for name, saved in saved_as.items() for piece in saved}
    for (state, problem), bad in bad_values.items():
        if problem == DIFFERS and is_split and state.kind == WEIGHT:
            continue
        name, offset = pieces.get(state.param, (state.param, 0))
        name = index.tied.get(name, name)
        for begin, end in bad.runs:
            yield state, (begin, end)
            if problem == DIFFERS:
                kind = MASTER if index.params[name].role == "trainable" else FROZEN
                yield State(name, kind), (begin + offset, end + offset)


def _coordinates(element: int, shape: tuple[int, ...]) -> str:
    coordinates = []
    for extent in reversed(shape):
        element, inside = divmod(element, extent)
        coordinates.append(inside)
    return str(list(reversed(coordinates)))


def find(problem: str, data: Bytes, dtype: str) -> Mask | None:
    """Return which elements are not finite, not a number (buffers may be infinite: they hold masks) or negative.

    Returns None if there are none, as with a dtype that is not floating-point.
    """
    if dtype == F24:
        data, dtype = cast(data, F24, "F32"), "F32"
    if dtype not in FLOATING:
        return None
    bits, test = bits_of(data, dtype), _TESTS[problem]
    sign, special = bits.dtype.type(1 << (8 * ITEMSIZE[dtype] - 1)), bits.dtype.type(DTYPES[dtype].exponent)
    return _blockwise(len(bits), lambda block: test(bits[block], sign, special))


def differing(original: Bytes, dtype: str, copy: Bytes, copy_dtype: str, precision: str) -> Mask | None:
    """Return which elements of a copy are not the rounded original, bit for bit; None if there are none.

    A copy in a dtype other than ``precision``, that of the weights in training, was made from these weights or, if
    there were none, from the original itself. Either is accepted. Other dtypes than floating-point are compared if
    they are the same.
    """
    have, source = bits_of(copy, copy_dtype), memoryview(original)
    castable = {dtype, copy_dtype} <= FLOATING
    if not castable and dtype != copy_dtype:
        return None
    itemsize = ITEMSIZE[dtype]

    def check(block: slice) -> Mask:
        part = source[block.start * itemsize : block.stop * itemsize]
        if not castable:
            plain: Mask = have[block] != bits_of(part, dtype)
            return plain
        wrong: Mask = np.ones(block.stop - block.start, np.bool_)
        for rounded in roundings(part, dtype, copy_dtype, (precision,)):
            wrong &= have[block] != bits_of(rounded, copy_dtype)
            if not wrong.any():
                break
        return wrong

    return _blockwise(len(have), check)


def _blockwise(numel: int, check: Callable[[slice], Mask]) -> Mask | None:
    whole_mask: Mask | None = None
    for start in range(0, numel, BLOCK_ELEMENTS):
        block = slice(start, min(start + BLOCK_ELEMENTS, numel))
        block_mask = check(block)
        if block_mask.any():
            whole_mask = np.zeros(numel, np.bool_) if whole_mask is None else whole_mask
            whole_mask[block] = block_mask
    return whole_mask


def bits_of(data: Bytes, dtype: str) -> npt.NDArray[Any]:
    """Return elements as unsigned integers of their size, those of 24 bits as of 32."""
    if dtype == F24:
        return widen(data, F24).view("<u4")
    return np.frombuffer(data, f"<u{ITEMSIZE[dtype]}")


@dataclass(frozen=True, slots=True)
class Stream:
    state: State
    held: TensorEntry
    checks: tuple[str, ...] = (NOT_FINITE,)
    """The problems that `find_bad_values` looks for"""
    begin: int = 0
    """The element of the bundle at which it begins: a fused param is saved in pieces"""
    is_copy: bool = False
    """Whether it must be the rounded first stream"""
    is_again: bool = False
    """Whether it is read to be compared with another rank's only: neither summed, nor counted"""


class StateBundle(NamedTuple):
    """The states of one param, or a weight without a param. All except copies have ``numel`` elements."""

    numel: int
    streams: list[Stream]

    @property
    def runs(self) -> Runs:
        """The elements to read: all, or those that a partial checkpoint holds of every state"""
        return next((stream.held.runs for stream in self.streams if not stream.held.is_whole), ((0, self.numel),))


def bundle_states(
    index: CheckpointIndex, saved_as: Mapping[str, tuple[SavedAs, ...]], unreadable: Collection[str] = ()
) -> Iterator[StateBundle]:
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
            yield StateBundle(numel, fresh)


def _bundle_copies(index: CheckpointIndex) -> Iterator[StateBundle]:
    """Yield the states that several tensor-parallel ranks hold, with all of their copies."""
    parallel = index.zero.tensor_parallel
    for state, places in parallel.copies.items() if parallel else ():
        first = Stream(state, held_of(index, state), (), is_again=True)
        copies = [replace(first, held=replace(first.held, place=place), is_copy=True) for place in places]
        yield StateBundle(first.held.numel, [first, *copies])


def _bundles(index: CheckpointIndex, saved_as: Mapping[str, tuple[SavedAs, ...]]) -> Iterator[StateBundle]:
    names_of: dict[str, list[str]] = {}
    for name, stored in index.tied.items():
        names_of.setdefault(stored, []).append(name)
    moments: dict[str, list[Stream]] = {}
    for state, entry in index.held.items():
        if state.kind not in _OF_THE_MODEL:
            checks = (NOT_FINITE, NEGATIVE) if state.kind in _NON_NEGATIVE else (NOT_FINITE,)
            if entry.shape == index.params[state.param].shape:
                moments.setdefault(state.param, []).append(Stream(state, entry, checks))
            else:  # not elementwise
                yield StateBundle(entry.numel, [Stream(state, entry, checks)])
    for param in index.params.values():
        streams = []
        kind = KIND_OF_ROLE[param.role]
        original = State(param.name, kind)
        if original in index.held and kind == BUFFER:
            entry = index.held[original]
            yield StateBundle(
                entry.numel if index.form.has_buffers_by_rank else param.numel,
                [Stream(original, entry, (NOT_A_NUMBER,))],
            )
        elif original in index.held:
            streams.append(Stream(original, index.held[original]))
            for name in (param.name, *names_of.get(param.name, ())):
                streams += _copies(index, name, saved_as.get(name) or (SavedAs(name, param.shape),))
        if kind != BUFFER:
            yield StateBundle(param.numel, [*streams, *moments.get(param.name, ())])
    for state, entry in index.held.items():
        if state.kind == WEIGHT:  # of a buffer, or by another name than in memory
            yield StateBundle(entry.numel, [Stream(state, entry, (NOT_A_NUMBER,))])


def _copies(index: CheckpointIndex, name: str, saved_as: tuple[SavedAs, ...]) -> Iterator[Stream]:
    if rounded := index.zero.module.get(State(name, MODULE)):
        yield Stream(State(name, MODULE), rounded, is_copy=True)
    for piece in saved_as:
        state = State(piece.name, WEIGHT)
        if state in index.held and index.held[state].shape == piece.shape:
            yield Stream(state, index.held[state], begin=piece.begin, is_copy=True)


class _Unreadable(Exception):
    """A file can't be read; it is noted already."""


@dataclass
class Reading:
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
        self.files = OpenFiles(self.index.root)
        self._lock = threading.Lock()
        self._own = threading.local()

    def read(self, bundles: Iterable[StateBundle]) -> None:
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
        read = partial(self.files.crc_of, path, on_progress=self.on_progress)
        return self.by_file.crc_of(path, start, stop, read)

    def _read_chunk(self, bundle: StateBundle, begin: int, end: int) -> None:
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
            if (
                stream.state.kind in (EXP_AVG, EXP_AVG_SQ)
                and stream.state not in self.not_zero
                and np.frombuffer(data, np.uint8).any()
            ):
                self.not_zero.add(stream.state)
            if stream.is_copy and reference is not None and not is_original:
                offset, itemsize = low + stream.begin - begin, ITEMSIZE[original.held.dtype]
                part = reference[offset * itemsize : (offset + high - low) * itemsize]
                precision = dtype if stream.is_again else self.index.precision
                mask = differing(part, original.held.dtype, data, dtype, precision)
                lost += [(max(0, first - offset), max(0, last - offset)) for first, last in lost_there]
                self._note(stream.state, UNLIKE if stream.is_again else DIFFERS, mask, lost, low)

    def _note(self, state: State, problem: str, mask: Mask | None, lost: list[_Run], begin: int) -> None:
        if mask is None:
            return
        for low, high in lost:
            mask[low:high] = False
        where = mask.nonzero()[0]
        if len(where):
            with self._lock:
                bad = self.bad_values.setdefault((state, problem), BadValues())
                bad.count += len(where)
                bad.runs.append((begin + int(where[0]), begin + int(where[-1]) + 1))

    def _read_stream(self, stream: Stream, begin: int, end: int, is_original: bool) -> tuple[memoryview, list[_Run]]:
        """Return elements ``begin``..``end``, and the runs of them, relative to ``begin``, that are lost (set to zero).

        The buffer belongs to this thread: one for originals and one for everything else.
        """
        itemsize = ITEMSIZE[stream.held.dtype]
        view, lost = self._buffer(is_original, (end - begin) * itemsize), []
        for stored_range in arrange(stream.held.place, begin, end):
            is_there = self._fill(view, stored_range, begin, stream)
            pieces: list[tuple[StoredRange | Grid, bool]] = [(stored_range, is_there)]
            if isinstance(stored_range, Grid) and not is_there:  # maybe only one of its files can't be read
                cover = stream.held.place.cover(stored_range.begin, stored_range.end)
                pieces = [(stored, self._fill(view, stored, begin, stream)) for stored in cover]
            for stored, is_read in pieces:
                low, high = stored.begin - begin, stored.end - begin
                part = view[low * itemsize : high * itemsize]
                if not is_read:
                    part[:] = bytes(len(part))
                    lost.append((low, high))
                elif self.sum_states and not stream.is_again:
                    self.by_state.add(stream.state, stored.begin * itemsize, stored.end * itemsize, crc32(part))
        if not stream.is_again:
            self.on_progress(len(view))
        return view, lost

    def _fill(self, view: memoryview, have: StoredRange | Grid, begin: int, stream: Stream) -> bool:
        """Read elements into a view that starts at element ``begin``; return whether that succeeded."""
        itemsize = ITEMSIZE[stream.held.dtype]
        elements = view[(have.begin - begin) * itemsize : (have.end - begin) * itemsize]

        def read(path: str, start: int, room: memoryview, *, is_exact: bool) -> None:
            self._read(path, start, room, is_summed=is_exact and not stream.is_again)

        try:
            read_stored(have, elements, read)
        except _Unreadable:
            return False
        return True

    def _read(self, path: str, start: int, room: memoryview, *, is_summed: bool) -> None:
        """Read bytes of a file, and sum them if need be. Raises _Unreadable."""
        if path in self.left_out or path in self.unreadable:
            raise _Unreadable
        try:
            self.files.read_into(path, start, room)
        except OSError as error:
            with self._lock:
                self.unreadable.setdefault(path, error.strerror or str(error))
            raise _Unreadable from error
        if is_summed and (self.sum_states or path in self.sum_files):
            self.by_file.add(path, start, start + len(room), crc32(room))

    def _buffer(self, is_original: bool, num_bytes: int) -> memoryview:
        """Return one of this thread's two buffers: allocating one for every chunk would take longer than reading it."""
        own: dict[bool, bytearray] = self._own.__dict__.setdefault("buffers", {})
        if len(own.get(is_original, b"")) < num_bytes:
            own[is_original] = bytearray(num_bytes)
        return memoryview(own[is_original])[:num_bytes]

    def _announce(self, stream: Stream, begin: int, end: int) -> None:
        """Have the system fetch bytes ahead: a chunk's states are far apart, so it can't predict the next ones."""
        for have in arrange(stream.held.place, begin, end):
            for extent in have.extents if isinstance(have, Grid) else (have.extent,):
                if extent.num_bytes >= _WORTH_ANNOUNCING:
                    with suppress(OSError):
                        self.files.will_need(extent.path, extent.start, extent.stop)


def _parts(bundle: StateBundle, begin: int, end: int) -> list[tuple[Stream, int, int]]:
    """Return the streams of a bundle with the elements of each that correspond to the bundle's ``begin``..``end``."""
    parts = [
        (stream, max(begin, stream.begin) - stream.begin, min(end - stream.begin, stream.held.numel))
        for stream in bundle.streams
    ]
    return [part for part in parts if part[1] < part[2]]


@dataclass(frozen=True, slots=True)
class Deep:
    findings: tuple[Finding, ...]
    """Findings about files and checksums"""
    values: tuple[Finding, ...]
    """Findings about the values of states"""
    states: Spans
    """Elements that are lost or can't be trusted"""
    intact: Mapping[str, Sequence[ZipRecord]]
    """The records of torch files that match their checksums, by file"""


def read_everything(
    index: CheckpointIndex,
    unreadable: frozenset[str],
    manifest: ManifestFacts | None,
    on_progress: Callable[[int], None] = lambda num_bytes: None,
) -> Deep:
    """Read a checkpoint and check its values and checksums.

    ``on_progress`` gets the number of bytes read, from several threads. Raises Interrupted on Ctrl-C.
    """
    saved_as = _saved_as(index)
    sums = stated_checksums(index, manifest, index.files.keys() - unreadable, skip_damaged=True)
    with stoppable() as stop:
        summed = {path for path, stated in sums.items() if stated}
        sum_states = bool(manifest and manifest.digests)
        reading = Reading(index, unreadable, on_progress, stop, summed, sum_states)
        with reading.files:
            reading.read([*bundle_states(index, saved_as, unreadable), *_bundle_copies(index)])
            jobs = [partial(_compare_sums, reading, path, stated) for path, stated in sorted(sums.items())]
            wrong = [record for of_file in run_all(jobs, num_workers(), stop) for record in of_file]
    is_split, form = manifest is not None and manifest.is_split, index.form
    lost = join(lost_elements(index, unreadable.union(reading.unreadable)))
    damaged = [
        *damaged_elements(index, reading.bad_values, saved_as, is_split),
        *((state, run) for state, spans in lost.items() for run in spans),
    ]
    about_sums = []
    for path, record in wrong:

        def overlaps(extent: Extent, path: str = path, record: ZipRecord = record) -> bool:
            return extent.path == path and extent.start < record.stop and record.start < extent.stop

        inside = [*elements_in(index, overlaps)] if record.name else []
        damaged += inside
        about_sums.append(wrong_checksum(index, path, record, {state for state, _ in inside}))
    findings = (
        *_unread(index, reading),
        *sorted(about_sums, key=str),
        *(compare_digests(index, reading.by_state, manifest, lost) if manifest else ()),
        *(find_zeroed(index, reading.not_zero) if form.has_masters and not (lost or form.is_partial) else ()),
        *_not_compared(index, saved_as),
    )
    intact = {
        path: [record for record in stated if record.name and (path, record) not in wrong]
        for path, stated in sums.items()
        if path not in reading.unreadable
    }
    return Deep(findings, tuple(find_bad_values(index, reading.bad_values, is_split)), join(damaged), intact)


def _compare_sums(reading: Reading, path: str, stated: list[ZipRecord]) -> list[tuple[str, ZipRecord]]:
    """Return the records that do not match; the whole file only if all of its records do."""
    wrong: list[tuple[str, ZipRecord]] = []
    try:
        for record in stated if path not in reading.unreadable else ():
            if (record.name or not wrong) and reading.crc_of(path, record.start, record.stop) != record.crc:
                wrong.append((path, record))
    except OSError as error:
        reading.unreadable[path] = error.strerror or str(error)
        return []
    return wrong


def _unread(index: CheckpointIndex, reading: Reading) -> Iterator[Finding]:
    for path, why in sorted(reading.unreadable.items()):
        severity = ERROR if is_resumed_from(path, index) else WARNING
        what = f"the file can't be read: {why}"
        yield Finding(PathIn(index.name, path), what, "check the disk", Code.FILE_UNREADABLE, severity)


def _saved_as(index: CheckpointIndex) -> dict[str, tuple[SavedAs, ...]]:
    """Return the names and pieces under which transformers saves params, where they differ from those in memory."""
    where = PathIn(index.name, CONFIG)
    try:
        config = read_json(index.root / CONFIG, where) if CONFIG in index.files else {}
    except SourceError:
        return {}  # reported by the structure checks
    naming = naming_of(str(config["model_type"]) if "model_type" in config else None)
    renamed = [param for name, param in index.params.items() if naming and State(name, WEIGHT) not in index.held]
    return {param.name: tuple(on_disk(param, naming)) for param in renamed if naming}


def _not_compared(index: CheckpointIndex, saved_as: Mapping[str, tuple[SavedAs, ...]]) -> Iterator[Finding]:
    known = {*index.params, *index.tied, *(piece.name for pieces in saved_as.values() for piece in pieces)}
    names = [state.param for state in index.held if state.kind == WEIGHT and state.param not in known]
    if index.form.has_masters and names:
        what = f"the weights of {some(names)} have other names than the params, so were not compared with the masters"
        fix = "compare what a resume holds: llmtailor attest (of a checkpoint on this machine)"
        yield Finding(index.name, what, fix, Code.NOT_COMPARED, NOTE)
