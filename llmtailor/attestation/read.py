"""Reads elements of a training and the same ones of its checkpoint, and looks for where other values come from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmtailor.attestation.compare import (
    FULL,
    RUN_ELEMENTS,
    Buffer,
    Difference,
    Findings,
    Kind,
    LiveGroup,
    Mismatch,
    Subject,
    all_runs,
    entry_of,
    judge,
    sample_runs,
)
from llmtailor.checkpoint.index import CheckpointIndex, TensorEntry
from llmtailor.checkpoint.placement import Extent, Runs
from llmtailor.containers.json import extent_of
from llmtailor.containers.unpickle import Call, as_tensor
from llmtailor.errors import TailorError
from llmtailor.formats.registry import index_checkpoint
from llmtailor.loaders.files import rng_file
from llmtailor.loaders.rng import to_trainer
from llmtailor.model.roles import BUFFER, FROZEN, ITEMSIZE, MASTER, State, is_moment
from llmtailor.runs.folder import RunFolder
from llmtailor.storage.local import Files

logger = logging.getLogger(__name__)
MAX_OTHERS = 6
"""Other checkpoints of the run that are searched for the values of a state"""


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
    read: Callable[[Runs], bytes]
    """Returns elements, which count from ``begin``, as bytes"""
    forward: LiveFragment | None = None
    """Of a master: the weight of the forward pass at the same elements, if it is a tensor of its own"""


@dataclass(slots=True)
class Live:
    """What this process holds of a training, before its next optimizer step."""

    fragments: Callable[[], Iterator[LiveFragment]]
    """All states of this rank, copies of what other ranks hold as well included. A param without moments has none."""
    roles: Mapping[str, str]
    """Param or persistent buffer -> ``trainable``, ``frozen`` or ``buffer``"""
    aliases: Mapping[str, Sequence[str]]
    """Tied param -> its other names"""
    steps: Mapping[str, float | None]
    groups: Sequence[LiveGroup]
    rank: int
    world_size: int
    precision: str
    is_adapter: bool = False
    """Whether PEFT wraps the model, so that the base model is not in the checkpoint"""
    schedule: Mapping[str, Any] | None = None
    counters: Mapping[str, Any] = field(default_factory=dict)
    scale: Mapping[str, Any] | None = None
    """The state of a GradScaler, or of DeepSpeed's loss scaler"""
    open_other: Callable[[Path], CheckpointIndex] = index_checkpoint
    """Opens other checkpoints of the run"""


def compare_states(index: CheckpointIndex, live: Live, how: str) -> Findings:
    """Compare the states of this rank with those of the checkpoint. Raises SourceError, OSError."""
    found: list[Difference] = []
    notes: dict[str, None] = {}
    num_compared = 0
    has_kinds: dict[str, set[str]] = {}
    for state in index.held:
        has_kinds.setdefault(state.param, set()).add(state.kind)
    with Files(index.root, index.files) as files:
        search = Search(index, live, files)
        held_here: dict[tuple[str, int], set[str]] = {}
        masters: list[LiveFragment] = []
        for one in live.fragments():
            held_here.setdefault((one.param, one.begin), set()).add(one.kind)
            if one.kind == MASTER:
                masters.append(one)
            state = State(one.param, one.kind)
            entry = entry_of(index, state, live.aliases)
            if entry is None:
                difference, note = _unsaved(one, live, index)
                found += [difference] if difference else []
                notes |= {note: None} if note else {}
                continue
            num_compared += 1
            difference = _compare(one, entry, files, search, how, index.world_size)
            if difference is not None:
                found.append(difference)
            if one.forward is not None and difference is None:
                found += _compare_forward(one, one.forward, how)
        for one in masters:
            found += _missing(one, index, live, files, held_here[one.param, one.begin], has_kinds)
    found += [Difference(State(param, MASTER), Kind.MISSING, "not in the model") for param in _lost(index, live)]
    return Findings(tuple(found), (), tuple(notes), num_compared)


def _lost(index: CheckpointIndex, live: Live) -> list[str]:
    """Return the trained params of the checkpoint that the training does not have."""
    known = {*live.roles, *(name for names in live.aliases.values() for name in names)}
    known |= {stored for name, stored in index.tied.items() if name in known}
    return [name for name, param in index.params.items() if param.role == "trainable" and name not in known]


def _unsaved(one: LiveFragment, live: Live, index: CheckpointIndex) -> tuple[Difference | None, str]:
    if one.kind == MASTER:
        return Difference(State(one.param, MASTER), Kind.UNSAVED), ""
    if one.kind == FROZEN:
        return None, "frozen params are not in the checkpoint, so they were not compared"
    if one.kind == BUFFER:
        return None, "buffers are not in the checkpoint, so they were not compared"
    return None, f"{one.kind} is not in the checkpoint, so it was not compared"


def _missing(
    master: LiveFragment,
    index: CheckpointIndex,
    live: Live,
    files: Files,
    here: set[str],
    has_kinds: Mapping[str, set[str]],
) -> Iterator[Difference]:
    """Yield the moments that the checkpoint has and this rank does not. Zeros count as absent: a param without a
    gradient so far has none."""
    for name in (master.param, *live.aliases.get(master.param, ())):
        for kind in sorted(has_kinds.get(name, ())):
            entry = index.held[State(name, kind)]
            if is_moment(kind) and kind not in here and entry.is_here and not entry.is_all_zero:
                runs = _shift(sample_runs(master.numel), master.begin)
                if runs and runs[-1][1] > entry.numel:  # not one element per weight
                    runs = sample_runs(entry.numel)
                if any(read_elements(files, entry, runs)):
                    yield Difference(State(master.param, kind), Kind.MISSING)


def _compare(
    one: LiveFragment, entry: TensorEntry, files: Files, search: Search, how: str, at_least: int
) -> Difference | None:
    state, offset = State(one.param, one.kind), one.begin
    if one.kind == BUFFER and entry.numel > one.numel:  # those of each rank
        offset += (search.live.rank % max(1, entry.numel // one.numel)) * one.numel
    if offset + one.numel > entry.numel:
        shape = "x".join(map(str, entry.shape))
        return Difference(state, Kind.CHANGED, f"{shape} in the checkpoint, {one.numel:,} elements in the training")
    worst: Kind | None = None
    for runs in all_runs(one.numel) if how == FULL else [sample_runs(one.numel, at_least)]:
        if not runs:
            continue
        saved = read_elements(files, entry, _shift(runs, offset))
        mine = one.read(runs)
        kind = judge(mine, one.dtype, saved, entry.dtype, search.live.precision)
        if kind is None:
            continue
        if kind is Kind.CHANGED or (kind is Kind.ROUNDED and how != FULL):
            break_at = _narrow(runs, mine, one, saved, entry)
            return search.explain(one, entry, kind, break_at, offset)
        if kind is Kind.ZERO:
            return Difference(state, kind)
        worst = kind
    return None if worst is None else Difference(state, worst, _rounding(one, entry, search.live.precision))


def _narrow(runs: Runs, mine: Buffer, one: LiveFragment, saved: Buffer, entry: TensorEntry) -> Runs:
    """Return few elements that differ, to look for elsewhere."""
    size, other, at = ITEMSIZE[one.dtype], ITEMSIZE[entry.dtype], 0
    for begin, end in runs:
        for low in range(begin, end, RUN_ELEMENTS):
            count = min(RUN_ELEMENTS, end - low)
            a, b = mine[at * size : (at + count) * size], saved[at * other : (at + count) * other]
            at += count
            if judge(a, one.dtype, b, entry.dtype, one.dtype) is not None and any(a):
                return ((low, low + count),)
    return runs[:1]


def _rounding(one: LiveFragment, entry: TensorEntry, precision: str) -> str:
    if one.dtype != entry.dtype:
        return f"{entry.dtype} in the checkpoint, {one.dtype} in the training"
    return f"to {precision}, as if made from the weights"


def _compare_forward(master: LiveFragment, weight: LiveFragment, how: str) -> Iterator[Difference]:
    for runs in all_runs(master.numel) if how == FULL else [sample_runs(master.numel)]:
        if runs and judge(weight.read(runs), weight.dtype, master.read(runs), master.dtype, weight.dtype) not in (
            None,
            Kind.ROUNDED,
        ):
            yield Difference(State(master.param, MASTER), Kind.FORWARD)
            return


def _shift(runs: Runs, by: int) -> Runs:
    return tuple((begin + by, end + by) for begin, end in runs)


def read_elements(files: Files, entry: TensorEntry, runs: Runs) -> Buffer:
    """Return elements of a state of a checkpoint; what no file holds is zero. Raises OSError, LookupError."""
    size = ITEMSIZE[entry.dtype]
    data = bytearray(sum(end - begin for begin, end in runs) * size)
    room, at = memoryview(data), 0
    for begin, end in runs:
        for part in entry.place.cover(begin, end):
            low = at + (part.begin - begin) * size
            files.read_into(part.extent.path, part.extent.start, room[low : low + part.extent.num_bytes])
        at += (end - begin) * size
    return data


class Search:
    """Looks for the values that a state has instead of its own; each place is read once per position."""

    def __init__(self, index: CheckpointIndex, live: Live, files: Files) -> None:
        self.index, self.live, self._files = index, live, files
        self._alike: dict[tuple[str, tuple[int, ...]], list[tuple[str, TensorEntry]]] = {}
        for state, held in index.held.items():
            if held.is_here and not held.is_all_zero:
                self._alike.setdefault((state.kind, held.shape), []).append((state.param, held))
        self._others: list[tuple[str, CheckpointIndex]] | None = None
        self._seen: dict[tuple[object, ...], dict[bytes, str]] = {}

    def explain(self, one: LiveFragment, entry: TensorEntry, kind: Kind, runs: Runs, offset: int) -> Difference:
        """Return the difference of a fragment, with the place that its values are of, if that is found.

        ``runs`` are elements that differ, counted from the fragment's first, ``offset``, in the state.
        """
        state, mine, at = State(one.param, one.kind), one.read(runs), _shift(runs, offset)
        if any(mine):
            for how, detail, saved, dtype in self._candidates(one, entry, at):
                if saved and judge(mine, one.dtype, saved, dtype, one.dtype) in (None, Kind.ROUNDED):
                    return Difference(state, how, detail)
        return Difference(state, kind, _rounding(one, entry, self.live.precision) if kind is Kind.ROUNDED else "")

    def _candidates(self, one: LiveFragment, entry: TensorEntry, runs: Runs) -> Iterator[tuple[Kind, str, Buffer, str]]:
        for name, other in self._other_checkpoints():
            held = entry_of(other, State(one.param, one.kind), self.live.aliases)
            if held is not None and held.shape == entry.shape:
                saved = _try(Files(other.root), held, runs)
                yield Kind.ANOTHER_STEP, f"step {other.global_step}, {name}", saved, held.dtype
        for rank, saved in self._other_shards(entry, runs):
            yield Kind.OTHER_RANK, f"rank {rank}'s", saved, entry.dtype
        for rank, moved in self._other_rows(one, entry, runs):
            yield Kind.OTHER_RANK, f"rank {rank}'s", _try(self._files, entry, moved), entry.dtype
        kind = next((kind for kind in (one.kind, FROZEN) if (kind, entry.shape) in self._alike), one.kind)
        for param, held in self._alike.get((kind, entry.shape), ()):
            if held is not entry and param != one.param:
                is_part = _without_numbers(param) == _without_numbers(one.param)
                how = Kind.OTHER_PART if is_part else Kind.PERMUTED
                yield how, param, _try(self._files, held, runs), held.dtype

    def _other_shards(self, entry: TensorEntry, runs: Runs) -> Iterator[tuple[int, bytes]]:
        """Yield what other ranks' shards hold at the same place."""
        shards: Sequence[Extent] = getattr(entry.place, "shards", ())
        parts = [part for begin, end in runs for part in entry.place.cover(begin, end)] if shards else []
        if len(parts) != 1:
            return
        extent = parts[0].extent
        own = next((n for n, one in enumerate(shards) if one.path == extent.path and one.start <= extent.start), None)
        for number, shard in enumerate(shards):
            if own is not None and number != own:
                start = shard.start + extent.start - shards[own].start
                data = bytearray(extent.num_bytes)
                try:
                    self._files.read_into(shard.path, start, memoryview(data))
                except OSError:
                    continue
                yield number, bytes(data)

    def _other_rows(self, one: LiveFragment, entry: TensorEntry, runs: Runs) -> Iterator[tuple[int, Runs]]:
        """Yield the same elements of the shares that other ranks have of the param, if it is cut into rows."""
        world_size = self.live.world_size
        if one.numel == entry.numel or not entry.shape or world_size == 1:
            return
        row = entry.numel // entry.shape[0]
        chunk = -(-entry.shape[0] // world_size) * row
        for begin_of in dict.fromkeys((chunk, -(-entry.numel // world_size))):
            for rank in range(world_size):
                moved = _shift(runs, rank * begin_of - one.begin)
                if rank * begin_of != one.begin and moved[-1][1] <= entry.numel and moved[0][0] >= 0:
                    yield rank, moved

    def _other_checkpoints(self) -> Iterator[tuple[str, CheckpointIndex]]:
        if self._others is None:
            self._others = list(other_checkpoints(self.index, self.live.open_other))
        yield from self._others


def _try(files: Files, held: TensorEntry, runs: Runs) -> Buffer:
    try:
        return read_elements(files, held, runs)
    except (OSError, LookupError, IndexError):
        return b""


def _without_numbers(name: str) -> str:
    return "".join(one for one in name if not one.isdigit())


def other_checkpoints(
    index: CheckpointIndex, open_other: Callable[[Path], CheckpointIndex]
) -> Iterator[tuple[str, CheckpointIndex]]:
    """Yield other checkpoints of the run, the nearest steps first; those that can't be read are left out."""
    found: dict[Path, int] = {}
    for folder in (index.root.parent, index.root):
        try:
            run = RunFolder(folder)
            found |= {path: step for step, path in [*run.complete().items(), *run.full().items()]}
        except (TailorError, OSError):
            continue
    paths = [path for path in found if path.absolute() != index.root.absolute()]
    for path in sorted(paths, key=lambda path: abs(found[path] - index.global_step))[:MAX_OTHERS]:
        try:
            other = open_other(path)
        except (TailorError, OSError):
            continue
        if other.global_step != index.global_step:
            yield path.name, other


def compare_random(
    index: CheckpointIndex, live: Mapping[str, Any], rank: int, world_size: int
) -> tuple[list[Mismatch], str]:
    """Compare this process's random states, as `saving.training.rng_tree` gives them, with the checkpoint's.

    Return differences, and a note if they can't be compared. Raises OSError.
    """
    names = dict.fromkeys((rng_file(rank, world_size, index.client), rng_file(rank, world_size)))
    tree = next((index.train.trees[name] for name in names if name in index.train.trees), None)
    if index.world_size != world_size:
        return [], f"random states: those of {index.world_size} ranks do not fit {world_size}"
    if not isinstance(tree, dict):
        return [], "random states: the checkpoint has none of this rank"
    saved = tree if "python" in tree else to_trainer(tree)
    with Files(index.root, index.files) as files:
        pairs = {
            "Python": (_python_state(live.get("python")), _python_state(saved.get("python"))),
            "numpy": (_numpy_state(live.get("numpy")), _numpy_state(saved.get("numpy"))),
            "torch": (_live_bytes(live.get("cpu")), _saved_bytes(saved.get("cpu"), files, index.name)),
        }
    found = [
        Mismatch(Subject.RANDOM, f"random state of {name}", "another", "its own", True)
        for name, (mine, other) in pairs.items()
        if mine is not None and other is not None and mine != other
    ]
    return found, ""


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


def _live_bytes(tensor: Any) -> bytes | None:
    return None if tensor is None else bytes(tensor.cpu().numpy().tobytes())


def _saved_bytes(node: Any, files: Files, where: str) -> bytes | None:
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
