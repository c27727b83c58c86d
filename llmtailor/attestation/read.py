"""Reads elements of a training and the same ones of its checkpoint, and looks for where other values come from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmtailor.attestation.compare import (
    CHUNK_BYTES,
    FULL,
    READ_BYTES,
    RUN_ELEMENTS,
    Buffer,
    ElementDiff,
    LearningRates,
    LiveGroup,
    Mismatch,
    MismatchKind,
    Number,
    RankResult,
    Subject,
    address_of,
    all_runs,
    entry_of,
    expected_states,
    has_vanished,
    is_zero,
    judge,
    memcmp,
    same_bytes,
    sample_runs,
)
from llmtailor.checkpoint.elements import StateReader
from llmtailor.checkpoint.index import CheckpointIndex, TensorEntry
from llmtailor.checkpoint.placement import Box, Contiguous, Extent, Inside, Runs
from llmtailor.containers.json import extent_of
from llmtailor.containers.unpickle import Call, as_tensor
from llmtailor.errors import TailorError, counted, some
from llmtailor.formats.registry import find_structure, index_checkpoint
from llmtailor.frameworks.files import rng_file
from llmtailor.frameworks.rng import to_trainer
from llmtailor.model.dtypes import FLOATING, ITEMSIZE
from llmtailor.model.roles import BUFFER, FROZEN, KIND_OF_ROLE, MASTER, WEIGHT, State, is_moment, is_optimizer_state
from llmtailor.runs.folder import RunFolder
from llmtailor.storage.casts import cast
from llmtailor.storage.checksums import new_digest
from llmtailor.storage.local import OpenFiles
from llmtailor.storage.remote import device_of

logger = logging.getLogger(__name__)
MAX_OTHERS = 6
"""Other checkpoints of the run that are searched for the values of a state"""
MAX_READS, MAX_MISSES = 2000, 8
"""Reads of a rank to look for values; states of a kind in a row that it finds none for"""


@dataclass(frozen=True, slots=True)
class LiveFragment:
    """Elements of a state that this process holds."""

    param: str
    kind: str
    begin: int
    """Index of the first element in the flattened param"""
    numel: int
    dtype: str
    """A safetensors dtype name"""
    shape: tuple[int, ...]
    """Of the whole state"""
    read: Callable[[Runs, str], Buffer]
    """Returns elements, which count from ``begin``, cast to a dtype; a view of the live ones where that is possible"""
    forward: LiveFragment | None = None
    """Of a master: the weight of the forward pass at the same elements, if it is a tensor of its own"""
    box: Box | None = None
    """The elements' box in the state, if they are not adjacent in it"""

    def among(self, entry: TensorEntry) -> tuple[TensorEntry, int]:
        """Return a checkpoint's state with the elements that this may refer to, and the first of these."""
        if self.box is None:
            return entry, self.begin
        return replace(entry, shape=self.box.sizes, place=Inside(entry.place, entry.shape, self.box)), 0


@dataclass(slots=True)
class Live:
    """What this process holds of a training, before its next optimizer step."""

    fragments: Callable[[], Iterator[LiveFragment]]
    """All states of this rank, copies of what other ranks hold as well included. A param without moments has none."""
    copies: Callable[[], Iterator[LiveFragment]]
    """The weights of the forward pass that every rank has whole, beside the masters in `fragments`"""
    roles: Mapping[str, str]
    """Param or persistent buffer -> ``trainable``, ``frozen`` or ``buffer``"""
    aliases: Mapping[str, Sequence[str]]
    """Tied param -> its other names"""
    steps: Mapping[str, float | None]
    """The optimizer's step of each param; None if the param has other states only"""
    numbers: Mapping[str, Mapping[str, Number]]
    """Of each trained param of which this rank has elements, the states that are single numbers"""
    groups: Sequence[LiveGroup]
    rank: int
    world_size: int
    schedule: LearningRates | None = None
    counters: Mapping[str, Any] = field(default_factory=dict)
    scale: Mapping[str, Any] | None = None
    """The state of a GradScaler, or of DeepSpeed's loss scaler"""
    open_other: Callable[[Path], CheckpointIndex] = index_checkpoint
    """Opens other checkpoints of the run"""
    without_gradient: frozenset[str] = frozenset()
    """Params that don't require one"""
    lost: frozenset[str] = frozenset()
    """Frozen params and buffers of the checkpoint that the model does not have"""
    may_be_others: Collection[str] = ()
    """Tensors that the model does not have, of a checkpoint that does not say which ones are the model's"""
    strays: int = 0
    """Params of the optimizer that the model does not have"""
    converted: frozenset[str] = frozenset()
    """Params that the checkpoint may hold in another form, so that their absence under their own names is no alarm"""


def compare_states(index: CheckpointIndex, live: Live, how: str) -> RankResult:
    """Compare the states of this rank with those of the checkpoint. Raises SourceError, OSError."""
    differences: list[ElementDiff] = []
    notes: dict[str, None] = {}
    converted: list[str] = []
    has_kinds: dict[str, set[str]] = {}
    for state in index.held:
        has_kinds.setdefault(state.param, set()).add(state.kind)
    with OpenFiles(index.root, index.files) as files:
        reader = StateReader(files)
        search = Search(index, live, reader)
        held_here: dict[tuple[str, int], set[str]] = {}
        masters: list[LiveFragment] = []
        for fragment in live.fragments():
            held_here.setdefault((fragment.param, fragment.begin), set()).add(fragment.kind)
            if fragment.kind == MASTER:
                masters.append(fragment)
            state = State(fragment.param, fragment.kind)
            entry = entry_of(index, state, live.aliases)
            if fragment.param in live.converted and (entry is None or _sizes(entry.shape) != _sizes(fragment.shape)):
                converted.append(fragment.param)
                continue
            if entry is None:
                difference, note = _unsaved(fragment, live)
                if (
                    fragment.kind == FROZEN
                    and fragment.param not in live.without_gradient
                    and (twin := search.twin(fragment))
                ):
                    difference, note = ElementDiff(state, MismatchKind.UNTIED, twin), ""
                differences += [difference] if difference else []
                notes |= {note: None} if note else {}
                continue
            difference = _compare(fragment, entry, reader, search, how, index.world_size)
            if difference is not None:
                differences.append(difference)
            if fragment.forward is not None and difference is None:
                differences += _compare_forward(fragment, fragment.forward, how)
        for fragment in masters:
            differences += _missing(fragment, index, live, reader, held_here[fragment.param, fragment.begin], has_kinds)
        different, more = compare_trained(index, live, lambda entry: not _is_zero_at(reader, entry, 0, entry.numel))
        differences += different
        notes |= dict.fromkeys(more)
    for param, kinds in lost_states(index, live).items():
        differences += [ElementDiff(State(param, kind), MismatchKind.MISSING, "not in the model") for kind in kinds]
    if live.may_be_others:
        what = f"tensors beside the params may not be the model's, and were not compared: {some(live.may_be_others)}"
        notes[what] = None
    if converted:
        what = f"weights of {counted(len(converted), 'param')} are stored in another form and were not compared"
        notes[f"{what}: {some(converted)}"] = None
    if search.gave_up:
        notes["where the other values come from was looked up for some states only"] = None
    return RankResult(tuple(differences), (), tuple(notes))


def lost_states(index: CheckpointIndex, live: Live) -> dict[str, list[str]]:
    """Return the params and buffers of the checkpoint that the training does not have, with their kinds of state."""
    known = {*live.roles, *(name for names in live.aliases.values() for name in names)}
    known |= {stored for name, stored in index.tied.items() if name in known}
    lost: dict[str, list[str]] = {}
    expected = expected_states(index)
    for name, param in index.params.items():
        if name in known:
            continue
        if param.role == "trainable":
            lost[name] = [MASTER, *(kind for kind in expected.get(name, ()) if is_optimizer_state(kind))]
        elif name in live.lost and entry_of(index, State(name, KIND_OF_ROLE[param.role]), {}) is not None:
            lost[name] = [KIND_OF_ROLE[param.role]]
    return lost


def _unsaved(fragment: LiveFragment, live: Live) -> tuple[ElementDiff | None, str]:
    if fragment.kind == MASTER:
        return ElementDiff(State(fragment.param, MASTER), MismatchKind.UNSAVED), ""
    if fragment.kind == FROZEN and fragment.param not in live.without_gradient:
        return None, "params that require a gradient are neither in the optimizer nor in the checkpoint: not compared"
    if fragment.kind == FROZEN:
        return None, "frozen params are not in the checkpoint, so they were not compared"
    if fragment.kind == BUFFER:
        return None, "buffers are not in the checkpoint, so they were not compared"
    return None, f"{fragment.kind} is not in the checkpoint, so it was not compared"


def _missing(
    master: LiveFragment,
    index: CheckpointIndex,
    live: Live,
    reader: StateReader,
    here: set[str],
    has_kinds: Mapping[str, set[str]],
) -> Iterator[ElementDiff]:
    """Yield the moments that the checkpoint has and this rank does not. Zeros count as absent: a param without a
    gradient so far has none."""
    for name in (master.param, *live.aliases.get(master.param, ())):
        for kind in sorted(has_kinds.get(name, ())):
            entry = index.held[State(name, kind)]
            if is_optimizer_state(kind) and kind not in here and entry.is_here and not entry.is_all_zero:
                is_boxed = master.box is not None and len(master.box.sizes) == len(entry.shape)
                entry, begin = master.among(entry) if is_boxed else (entry, master.begin)
                if not _is_zero_at(reader, entry, begin, master.numel):
                    yield ElementDiff(State(master.param, kind), MismatchKind.MISSING)


def _is_zero_at(reader: StateReader, entry: TensorEntry, begin: int, numel: int) -> bool:
    """Return whether a sample of some elements of a state is zero; of one that has not one element for each weight,
    a sample of all."""
    runs = _shift(sample_runs(numel), begin)
    if runs and runs[-1][1] > entry.numel:
        runs = sample_runs(entry.numel)
    return is_zero(reader.read(entry, *runs))


def _newest_steps(index: CheckpointIndex, steps: Mapping[str, float]) -> dict[str, float]:
    """Return the optimizer step that each param would have if every update had reached it: in a composite, the step of
    the save that the param's part comes from."""
    newest = max(steps.values(), default=0)
    if not index.composite.states or not steps:
        return dict.fromkeys(index.params, newest)
    part_of = find_structure(index).part_of
    saved_at = {name: index.step_of(part_of[name]) for name in steps}
    of_save: dict[int, float] = {}
    for name, step in steps.items():
        of_save[saved_at[name]] = max(step, of_save.get(saved_at[name], 0))
    of_saves = {name: max(of_save[at], newest - (index.global_step - at)) for name, at in saved_at.items()}
    return dict.fromkeys(index.params, newest) | of_saves


def compare_trained(
    index: CheckpointIndex, live: Live, is_used: Callable[[TensorEntry], bool]
) -> tuple[list[ElementDiff], list[str]]:
    """Compare which params are trained; return differences and notes.

    A param that has no state in the checkpoint, or only zeros, never had a gradient (``is_used`` tells). One that has
    taken fewer steps than others of its save was frozen before the save, or is used now and then.
    """
    differences, late = list[ElementDiff](), list[str]()
    stored = {name: param for param, names in live.aliases.items() for name in names}
    steps, expected = index.steps(), expected_states(index)
    newest = _newest_steps(index, steps)
    for name, param in index.params.items():
        mine = name if name in live.roles else stored.get(name, "")
        role = live.roles.get(mine)
        if role == "trainable" and mine not in live.without_gradient:
            if param.role == "frozen":
                differences.append(ElementDiff(State(mine, MASTER), MismatchKind.UNFROZEN))
            continue
        if role not in ("trainable", "frozen") or param.role != "trainable":
            continue
        kinds = [kind for kind in expected.get(name, ()) if is_optimizer_state(kind)]
        if not any(is_used(index.held[State(name, kind)]) for kind in kinds):
            continue
        if steps.get(name, 0) < newest[name]:
            late.append(mine)
            continue
        differences.append(ElementDiff(State(mine, MASTER), MismatchKind.UNTRAINED))
        differences += [ElementDiff(State(mine, kind), MismatchKind.MISSING) for kind in kinds if role == "frozen"]
    if not late:
        return differences, []
    return differences, [f"{counted(len(late), 'param')} without gradients now had some before the save: {some(late)}"]


def _compare(
    fragment: LiveFragment, entry: TensorEntry, reader: StateReader, search: Search, how: str, at_least: int
) -> ElementDiff | None:
    state, offset = State(fragment.param, fragment.kind), fragment.begin
    if fragment.kind == BUFFER and entry.numel > fragment.numel:  # those of each rank
        offset += (search.live.rank % max(1, entry.numel // fragment.numel)) * fragment.numel
    is_beyond = fragment.box is None and offset + fragment.numel > entry.numel
    if is_beyond or (fragment.kind != BUFFER and _sizes(fragment.shape) != _sizes(entry.shape)):
        shapes = ("x".join(map(str, shape)) or "a scalar" for shape in (entry.shape, fragment.shape))
        return ElementDiff(state, MismatchKind.CHANGED, "{} in the checkpoint, {} in the training".format(*shapes))
    if fragment.box is not None:
        entry, offset = fragment.among(entry)
    worst: MismatchKind | None = None
    itemsize = max(ITEMSIZE[fragment.dtype], ITEMSIZE[entry.dtype])
    for runs in _runs_of(fragment, how, itemsize, at_least):
        mine, at = fragment.read(runs, fragment.dtype), _shift(runs, offset)
        if fragment.dtype == entry.stored_as and _holds(reader, entry, at, mine):
            continue
        saved = reader.read(entry, *at)
        kind = judge(mine, fragment.dtype, saved, entry.dtype)
        if kind is None:
            continue
        if kind is MismatchKind.CHANGED:
            if fragment.box is not None:
                return ElementDiff(state, kind)
            break_at = _narrow(runs, mine, fragment, saved, entry)
            return search.explain(fragment, entry, break_at, offset)
        if kind is MismatchKind.ZERO:
            return ElementDiff(state, kind)
        if is_moment(fragment.kind) and has_vanished(mine, fragment.dtype, saved, entry.dtype):
            return ElementDiff(state, MismatchKind.ZERO, f"rounded to zero in {fragment.dtype}")
        worst = kind
    if worst is None:
        return None
    is_cast = fragment.dtype != entry.dtype
    how_rounded = f"{entry.dtype} in the checkpoint, {fragment.dtype} in the training" if is_cast else _REBUILT
    return ElementDiff(state, worst, how_rounded)


_REBUILT = "to 16 bits, as if made from the weights"


def _holds(reader: StateReader, entry: TensorEntry, runs: Runs, mine: Buffer) -> bool:
    """Return whether elements of the checkpoint have these bytes, read little by little."""
    if entry.is_all_zero:
        return is_zero(mine)
    here = address_of(mine)
    # each read of an object store is a request
    step = (CHUNK_BYTES if device_of(reader.files.root) is None else READ_BYTES) // ITEMSIZE[entry.dtype]
    for begin, end in runs:
        for low in range(begin, end, step):
            data = reader.read(entry, (low, min(low + step, end)))
            if memcmp(here, address_of(data), len(data)):
                return False
            here += len(data)
    return True


def _sizes(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]


def _narrow(runs: Runs, mine: Buffer, fragment: LiveFragment, saved: Buffer, entry: TensorEntry) -> Runs:
    """Return few elements that differ, to look for elsewhere."""
    size, saved_size, at = ITEMSIZE[fragment.dtype], ITEMSIZE[entry.dtype], 0
    for begin, end in runs:
        for low in range(begin, end, RUN_ELEMENTS):
            count = min(RUN_ELEMENTS, end - low)
            a, b = mine[at * size : (at + count) * size], saved[at * saved_size : (at + count) * saved_size]
            at += count
            if judge(a, fragment.dtype, b, entry.dtype) is not None and not is_zero(a):
                return ((low, low + count),)
    return runs[:1]


def _compare_forward(master: LiveFragment, weight: LiveFragment, how: str) -> Iterator[ElementDiff]:
    itemsize = max(ITEMSIZE[master.dtype], ITEMSIZE[weight.dtype])
    for runs in _runs_of(master, how, itemsize):
        if not same_bytes(weight.read(runs, weight.dtype), master.read(runs, weight.dtype)):
            yield ElementDiff(State(master.param, MASTER), MismatchKind.FORWARD)
            return


def digest_copies(live: Live, how: str) -> dict[str, bytes]:
    """Return digests of the weights of the forward pass that other ranks have as well.

    Each rank compares those at the elements of its own masters; so all are right if they are also alike on all ranks.
    """
    digests = {}
    for fragment in live.copies() if live.world_size > 1 else ():
        digest = new_digest()
        for runs in _runs_of(fragment, how, ITEMSIZE[fragment.dtype]):
            digest.update(fragment.read(runs, fragment.dtype))
        digests[fragment.param] = digest.digest()
    return digests


def compare_copies(index: CheckpointIndex, live: Live, how: str, unlike: Collection[str]) -> list[ElementDiff]:
    """Compare weights of the forward pass that differ between ranks with the rounded masters of the checkpoint."""
    differences = []
    with OpenFiles(index.root, index.files) as files:
        reader = StateReader(files)
        for fragment in live.copies() if unlike else ():
            entry = entry_of(index, State(fragment.param, MASTER), live.aliases)
            if fragment.param not in unlike or entry is None or entry.numel != fragment.numel:
                continue
            itemsize = max(ITEMSIZE[fragment.dtype], ITEMSIZE[entry.dtype])
            for runs in _runs_of(fragment, how, itemsize):
                saved = reader.read(entry, *runs)
                if not same_bytes(fragment.read(runs, fragment.dtype), _as_live(saved, entry.dtype, fragment.dtype)):
                    differences.append(ElementDiff(State(fragment.param, MASTER), MismatchKind.FORWARD))
                    break
    return differences


def _runs_of(fragment: LiveFragment, how: str, itemsize: int, at_least: int = 0) -> list[Runs]:
    if how == FULL:
        return all_runs(fragment.numel, itemsize)
    return [sample_runs(fragment.numel, at_least)] if fragment.numel else []


def _shift(runs: Runs, by: int) -> Runs:
    return tuple((begin + by, end + by) for begin, end in runs)


class Search:
    """Looks for the values that a state has instead of its own, by a limited number of reads: ranks wait meanwhile."""

    def __init__(self, index: CheckpointIndex, live: Live, reader: StateReader) -> None:
        self.index, self.live, self._reader = index, live, reader
        self.gave_up = False
        """Whether it no longer looks for states of some kind"""
        self._alike: dict[tuple[str, tuple[int, ...]], list[tuple[str, TensorEntry]]] = {}
        for state, entry in index.held.items():
            if entry.is_here and not entry.is_all_zero:
                self._alike.setdefault((state.kind, entry.shape), []).append((state.param, entry))
        self._others: list[tuple[str, CheckpointIndex, StateReader]] | None = None
        self._by_value: dict[tuple[object, ...], dict[bytes, str]] = {}
        self._finders = [self._in_other_checkpoints, self._in_other_ranks, self._in_other_params]
        self._last = ""
        """Which checkpoint or rank explained the last state"""
        self._misses: dict[str, int] = {}
        self._num_reads = 0

    def explain(self, fragment: LiveFragment, entry: TensorEntry, runs: Runs, offset: int) -> ElementDiff:
        """Return the difference of a fragment, with the place that its other values are of, if that is found.

        ``runs`` are elements that differ, counted from the fragment's first, ``offset``, in the state.
        """
        state, at = State(fragment.param, fragment.kind), _shift(runs, offset)
        mine = bytes(fragment.read(runs, fragment.dtype))
        if not is_zero(mine):
            for find in [*self._finders]:
                if self._num_reads >= MAX_READS or self._misses.get(fragment.kind, 0) >= MAX_MISSES:
                    self.gave_up = True
                    break
                if (source := find(fragment, entry, at, mine)) is not None:
                    self._misses[fragment.kind] = 0
                    self._finders.sort(key=lambda finder: finder != find)
                    return ElementDiff(state, *source)
            else:
                self._misses[fragment.kind] = self._misses.get(fragment.kind, 0) + 1
        return ElementDiff(state, MismatchKind.CHANGED)

    def twin(self, fragment: LiveFragment) -> str | None:
        """Return the param of the checkpoint that has the values of one that the checkpoint does not have."""
        runs = sample_runs(fragment.numel)
        if fragment.box is not None or not runs or is_zero(mine := bytes(fragment.read(runs, fragment.dtype))):
            return None
        candidates = [entry for kind in (MASTER, WEIGHT) for entry in self._alike.get((kind, fragment.shape), ())]
        at = _shift(runs, fragment.begin)
        return next((name for name, entry in candidates if self._is_of(fragment, mine, self._reader, entry, at)), None)

    def _is_of(self, fragment: LiveFragment, mine: bytes, reader: StateReader, entry: TensorEntry, runs: Runs) -> bool:
        saved = self._try(reader, entry, runs)
        is_cast = fragment.dtype != entry.dtype
        return bool(saved) and judge(mine, fragment.dtype, saved, entry.dtype) in (
            None,
            MismatchKind.ROUNDED if is_cast else None,
        )

    def _try(self, reader: StateReader, entry: TensorEntry, runs: Runs) -> Buffer:
        self._num_reads += 1
        try:
            return reader.read(entry, *runs)
        except (OSError, LookupError, IndexError):
            return b""

    def _in_other_checkpoints(
        self, fragment: LiveFragment, entry: TensorEntry, runs: Runs, mine: bytes
    ) -> tuple[MismatchKind, str] | None:
        if self._others is None:
            checkpoints = other_checkpoints(self.index, self.live.open_other)
            self._others = [
                (f"step {checkpoint.global_step}, {name}", checkpoint, StateReader(OpenFiles(checkpoint.root)))
                for name, checkpoint in checkpoints
            ]
        for name, checkpoint, reader in sorted(self._others, key=lambda checkpoint: checkpoint[0] != self._last):
            theirs = entry_of(checkpoint, State(fragment.param, fragment.kind), self.live.aliases)
            is_alike = theirs is not None and theirs.shape == entry.shape
            if theirs is not None and is_alike and self._is_of(fragment, mine, reader, theirs, runs):
                self._last = name
                return MismatchKind.ANOTHER_STEP, name
        return None

    def _in_other_ranks(
        self, fragment: LiveFragment, entry: TensorEntry, runs: Runs, mine: bytes
    ) -> tuple[MismatchKind, str] | None:
        shares = [(f"rank {rank}'s", theirs, at) for rank, theirs, at in self._shares(fragment, entry, runs)]
        for name, theirs, at in sorted(shares, key=lambda share: share[0] != self._last):
            if self._num_reads >= MAX_READS:
                break
            if self._is_of(fragment, mine, self._reader, theirs, at):
                self._last = name
                return MismatchKind.OTHER_RANK, name
        return None

    def _in_other_params(
        self, fragment: LiveFragment, entry: TensorEntry, runs: Runs, mine: bytes
    ) -> tuple[MismatchKind, str] | None:
        """Find the param, of those of its shape, by the values that all have at these elements; they are read once."""
        kind = next((kind for kind in (fragment.kind, FROZEN) if (kind, entry.shape) in self._alike), fragment.kind)
        key = (kind, entry.shape, runs, fragment.dtype)
        if key not in self._by_value:
            known = self._by_value[key] = {}
            for param, other_entry in self._alike.get((kind, entry.shape), ()):
                if self._num_reads >= MAX_READS:
                    break
                if saved := self._try(self._reader, other_entry, runs):
                    known.setdefault(_as_live(saved, other_entry.dtype, fragment.dtype), param)
        name = self._by_value[key].get(mine)
        if name is None or name == fragment.param:
            return None
        is_part = _without_numbers(name) == _without_numbers(fragment.param)
        return MismatchKind.OTHER_PART if is_part else MismatchKind.PERMUTED, name

    def _shares(
        self, fragment: LiveFragment, entry: TensorEntry, runs: Runs
    ) -> Iterator[tuple[int, TensorEntry, Runs]]:
        """Yield where the same elements of the shares of other ranks are: rank, state and elements."""
        for rank, extent in self._other_shards(entry, runs):
            numel = extent.num_bytes // ITEMSIZE[entry.dtype]
            shard = replace(entry, shape=(numel,), place=Contiguous(extent, ITEMSIZE[entry.dtype]))
            yield rank, shard, ((0, numel),)
        for rank, moved in self._other_rows(fragment, entry, runs):
            yield rank, entry, moved

    def _other_shards(self, entry: TensorEntry, runs: Runs) -> Iterator[tuple[int, Extent]]:
        """Yield the same place of other ranks' shards."""
        shards: Sequence[Extent] = getattr(entry.place, "shards", ())
        parts = [part for begin, end in runs for part in entry.place.cover(begin, end)] if shards else []
        if len(parts) != 1:
            return
        extent = parts[0].extent
        before = (n for n, shard in enumerate(shards) if shard.path == extent.path and shard.start <= extent.start)
        own = next(before, None)
        for number, shard in enumerate(shards):
            if own is not None and number != own:
                start = shard.start + extent.start - shards[own].start
                yield number, Extent(shard.path, start, start + extent.num_bytes)

    def _other_rows(self, fragment: LiveFragment, entry: TensorEntry, runs: Runs) -> Iterator[tuple[int, Runs]]:
        """Yield the same elements of the shares that other ranks have of the param, if it is cut into rows."""
        world_size = self.live.world_size
        if fragment.numel == entry.numel or not entry.shape or world_size == 1:
            return
        row = entry.numel // entry.shape[0]
        chunk = -(-entry.shape[0] // world_size) * row
        for begin_of in dict.fromkeys((chunk, -(-entry.numel // world_size))):
            for rank in range(world_size):
                moved = _shift(runs, rank * begin_of - fragment.begin)
                if rank * begin_of != fragment.begin and moved[-1][1] <= entry.numel and moved[0][0] >= 0:
                    yield rank, moved


def _as_live(saved: Buffer, dtype: str, live_dtype: str) -> bytes:
    is_cast = dtype != live_dtype and {dtype, live_dtype} <= FLOATING
    return cast(saved, dtype, live_dtype) if is_cast else bytes(saved)


def _without_numbers(name: str) -> str:
    return "".join(character for character in name if not character.isdigit())


def other_checkpoints(
    index: CheckpointIndex, open_other: Callable[[Path], CheckpointIndex]
) -> Iterator[tuple[str, CheckpointIndex]]:
    """Yield other checkpoints of the run, the nearest steps first; those that can't be read are left out."""
    steps: dict[Path, int] = {}
    for folder in (index.root.parent, index.root):
        try:
            run = RunFolder(folder)
            steps |= {path: step for step, path in [*run.complete().items(), *run.full().items()]}
        except (TailorError, OSError):
            continue
    paths = [path for path in steps if path.absolute() != index.root.absolute()]
    for path in sorted(paths, key=lambda path: abs(steps[path] - index.global_step))[:MAX_OTHERS]:
        try:
            checkpoint = open_other(path)
        except (TailorError, OSError):
            continue
        if checkpoint.global_step != index.global_step:
            yield path.name, checkpoint


def compare_random(
    index: CheckpointIndex, live: Mapping[str, Any], rank: int, world_size: int
) -> tuple[list[Mismatch], str]:
    """Compare this process's random states, as `live.training.rng_tree` gives them, with the checkpoint's.

    Return differences, and a note if they can't be compared. Raises OSError.
    """
    if index.world_size != world_size:
        return [], f"random states: those of {index.world_size} ranks do not fit {world_size}"
    mine = {
        "Python": _python_state(live.get("python")),
        "numpy": _numpy_state(live.get("numpy")),
        "torch": None if (tensor := live.get("cpu")) is None else bytes(tensor.cpu().numpy().tobytes()),
    }
    with OpenFiles(index.root, index.files) as files:
        own = _saved_random(index, rank, files)
        if own is None:
            return [], "random states: the checkpoint has none of this rank"
        if not (differing := _differing(mine, own)):
            return [], ""
        for other_rank in range(world_size):
            saved = None if other_rank == rank else _saved_random(index, other_rank, files)
            if saved is not None and not _differing({name: mine[name] for name in differing}, saved):
                return [Mismatch(Subject.RANDOM, "random states", other_rank, rank, True, MismatchKind.OTHER_RANK)], ""
    return [Mismatch(Subject.RANDOM, f"random state of {name}", "another", "its own", True) for name in differing], ""


def _differing(mine: Mapping[str, object], saved: Mapping[str, object]) -> list[str]:
    return [name for name, state in mine.items() if None not in (state, saved[name]) and state != saved[name]]


def _saved_random(index: CheckpointIndex, rank: int, files: OpenFiles) -> Mapping[str, object] | None:
    """Return the random states of a rank in a comparable form; None if the checkpoint has none."""
    names = dict.fromkeys((rng_file(rank, index.world_size, index.framework), rng_file(rank, index.world_size)))
    tree = next((index.train.trees[name] for name in names if name in index.train.trees), None)
    if not isinstance(tree, dict):
        return None
    saved = tree if "python" in tree else to_trainer(tree)
    return {
        "Python": _python_state(saved.get("python")),
        "numpy": _numpy_state(saved.get("numpy")),
        "torch": _saved_bytes(saved.get("cpu"), files, index.name),
    }


def _python_state(state: Any) -> object:
    if not isinstance(state, (tuple, list)) or len(state) != 3:
        return None
    return (state[0], tuple(state[1]), state[2])


def _numpy_state(state: Any) -> object:
    """Return words and position; None for a form that is not known."""
    if isinstance(state, dict):
        inner = state.get("state") or {}
        state = (state.get("bit_generator"), inner.get("key"), inner.get("pos"))
    if not isinstance(state, (tuple, list)) or len(state) < 3:
        return None
    words = state[1]
    if isinstance(words, Call):
        words = words.state[4] if isinstance(words.state, tuple) and len(words.state) == 5 else None
    elif hasattr(words, "tobytes"):
        words = words.astype("<u4").tobytes()
    elif isinstance(words, (list, tuple)):
        words = b"".join(int(word).to_bytes(4, "little") for word in words)
    return None if words is None else (bytes(words), int(state[2]))


def _saved_bytes(node: Any, files: OpenFiles, where: str) -> bytes | None:
    view = as_tensor(node)
    if view is None:
        return None
    try:
        extent = extent_of(view, "random state", where)
    except TailorError:
        return None
    data = bytearray(extent.num_bytes)
    files.read_into(extent.path, extent.start, memoryview(data))
    return bytes(data)
