"""Compares two checkpoints: every state that both hold is streamed, in parallel and in flat memory."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from llmtailor.checkpoint.index import CheckpointIndex, TensorEntry
from llmtailor.checkpoint.placement import Runs, common
from llmtailor.compare.training import Difference, compare_training
from llmtailor.compare.values import Change, compare
from llmtailor.engine.pool import num_workers, run_all, stoppable
from llmtailor.engine.streams import cannot_read
from llmtailor.errors import MismatchError, Problem, UsageError
from llmtailor.formats.registry import find_structure, index_checkpoint, with_experts
from llmtailor.model.parts import ModelStructure, layer_of, nearest
from llmtailor.model.roles import place_of
from llmtailor.model.states import BUFFER, EXP_AVG, EXP_AVG_SQ, FROZEN, ITEMSIZE, MASTER, WEIGHT, State
from llmtailor.storage.casts import FLOATING
from llmtailor.storage.local import Files

CHUNK_ELEMENTS = 1 << 20
KINDS = (WEIGHT, MASTER, EXP_AVG, EXP_AVG_SQ)
"""The kinds of states of a usual training; others follow these in tables"""
_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Compared:
    """A state that was compared."""

    state: State
    part: str
    layer: int | None
    """Its layer, if its part is one"""
    module: str
    """Its module inside the layer, e.g. ``self_attn.q_proj``, with ``*`` for numbers; outside of layers, its part"""
    change: Change


@dataclass(frozen=True, slots=True)
class Diff:
    """How checkpoint B differs from checkpoint A."""

    a: str
    b: str
    steps: tuple[int, int]
    """The global steps of A and B"""
    part_steps: dict[str, tuple[int, int]]
    """Part -> the steps at which its moments were saved, of a composite not always the global step"""
    training: tuple[Difference, ...]
    """What differs besides the values of states"""
    states: tuple[Compared, ...]
    """In the order of the model"""
    chosen: tuple[str, ...] = ()
    """The only kinds of states that were compared; empty for all"""
    master_steps: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Part -> the steps at which its masters were saved, which may be newer than the moments"""

    @property
    def is_equal(self) -> bool:
        """Whether a training continues from B exactly as from A, as far as the `chosen` kinds show"""
        return not any(one.matters for one in self.training) and not any(one.change.changed for one in self.states)

    @property
    def kinds(self) -> list[str]:
        """The kinds of states compared"""
        found = {one.state.kind for one in self.states}
        return [*(kind for kind in KINDS if kind in found), *sorted(found - {*KINDS})]

    def by(self, label: Callable[[Compared], str]) -> dict[str, dict[str, Change]]:
        """Return label -> kind -> the change of all states of that label and kind."""
        found: dict[str, dict[str, Change]] = {}
        for one in self.states:
            of_label = found.setdefault(label(one), {})
            of_label[one.state.kind] = of_label.get(one.state.kind, Change()) + one.change
        return found


def diff(
    a: Path, b: Path, kinds: Collection[str] = (), on_progress: Callable[[int], None] = lambda num_bytes: None
) -> Diff:
    """Compare two checkpoints of any format; partial ones are compared as far as both hold a state.

    Args:
        a, b: the folders of the checkpoints.
        kinds: the kinds of states to compare, such as ``weight`` and ``exp_avg``; empty for all.
        on_progress: called from several threads with numbers of bytes read.

    Raises SourceError for a damaged checkpoint, MismatchError if no state is in both, UsageError for a kind that is not
    in both, Interrupted on Ctrl-C.
    """
    return diff_indexes(index_checkpoint(a), index_checkpoint(b), kinds, on_progress)


def diff_indexes(
    a: CheckpointIndex, b: CheckpointIndex, kinds: Collection[str], on_progress: Callable[[int], None]
) -> Diff:
    """See `diff`."""
    structure = _structure_of_both(a, b)
    common = [*_common(a, b)]
    if not common:
        what = f"{a.name} and {b.name} have no state in common"
        raise MismatchError.at(b.name, what, "compare checkpoints of the same model")
    held = list(dict.fromkeys(state.kind for state in common))
    if unknown := [kind for kind in kinds if kind not in held]:
        raise UsageError(
            Problem("--kind", f"not in both checkpoints: {kind!r}", nearest(kind, held)) for kind in unknown
        )
    states = [state for state in common if not kinds or state.kind in kinds]
    part_steps = {part: (a.step_of(part), b.step_of(part)) for part in structure.parts}
    return Diff(
        a.name,
        b.name,
        (a.global_step, b.global_step),
        part_steps,
        tuple(compare_training(a, b, structure)),
        _compare_states(a, b, structure, [_Unit(state, state.param) for state in states], on_progress),
        tuple(kinds),
        {part: (a.master_step_of(part), b.master_step_of(part)) for part in structure.parts},
    )


def diff_parts(
    a: CheckpointIndex, b: CheckpointIndex, parts: Collection[str], on_progress: Callable[[int], None]
) -> tuple[Compared, ...]:
    """Compare the states of these parts as far as both hold them; the result may be empty. Raises as `diff`."""
    structure = _structure_of_both(a, b)
    shared = {layer_of(part) for part in parts if layer_of(part) != part}
    structure = with_experts(structure, a, shared)
    pieces_of, units = structure.pieces_of, []
    for state in _common(a, b):
        for name in pieces_of.get(state.param, [state.param]):
            if structure.part_of[name] in parts:
                piece = structure.pieces.get(name)
                units.append(_Unit(state, name, ((piece.begin, piece.end),) if piece else None))
    return _compare_states(a, b, structure, units, on_progress)


class _Unit(NamedTuple):
    """What is compared: a state, or an expert's elements of it."""

    state: State
    name: str
    """Of the param, or of its piece"""
    runs: Runs | None = None
    """None for all elements"""


def _compare_states(
    a: CheckpointIndex,
    b: CheckpointIndex,
    structure: ModelStructure,
    units: list[_Unit],
    on_progress: Callable[[int], None],
) -> tuple[Compared, ...]:
    found = _compare_all(a, b, units, on_progress)
    order = {part: number for number, part in enumerate(structure.parts)}
    compared = [_compared(State(unit.name, unit.state.kind), structure, found[unit]) for unit in units]
    return tuple(sorted(compared, key=lambda one: order[one.part]))


def _structure_of_both(a: CheckpointIndex, b: CheckpointIndex) -> ModelStructure:
    """Return the parts of A's model, with what only B has."""
    one, two = find_structure(a), find_structure(b)
    parts = (*one.parts, *(part for part in two.parts if part not in one.parts))
    return ModelStructure({**two.part_of, **one.part_of}, parts, one.num_layers, one.tied)


def _common(a: CheckpointIndex, b: CheckpointIndex) -> Iterator[State]:
    """Yield the states that both hold. Without DeepSpeed, masters are the weights and not listed again."""
    left_out = {MASTER, FROZEN, BUFFER} if a.weights_are_states and b.weights_are_states else set[str]()
    for state, one in a.held.items():
        two = b.held.get(state)
        if two is None or not (one.is_here and two.is_here) or state.kind in left_out:
            continue
        if one.numel and two.numel and not common(one.runs, two.runs):  # other experts of a fused param
            continue
        is_alike = one.dtype == two.dtype or {one.dtype, two.dtype} <= FLOATING
        if is_alike and (one.shape == two.shape or one.numel == two.numel or state.kind == BUFFER):
            yield state


def _compared(state: State, structure: ModelStructure, change: Change) -> Compared:
    part = structure.part_of[state.param]
    layer = structure.layers.get(part)
    place = place_of(state.param)
    module = part if layer is None else ".".join(place.path[len(place.module) + 1 :])
    return Compared(state, part, layer, _NUMBERS.sub("*", module) or part, change)


def _compare_all(
    a: CheckpointIndex, b: CheckpointIndex, units: list[_Unit], on_progress: Callable[[int], None]
) -> dict[_Unit, Change]:
    readers = (_Reader(a, on_progress), _Reader(b, on_progress))

    def compare_chunk(unit: _Unit, begin: int, end: int) -> tuple[_Unit, Change]:
        one, two = (reader.read(unit.state, begin, end) for reader in readers)
        return unit, compare(one, a.held[unit.state].dtype, two, b.held[unit.state].dtype)

    jobs = (
        partial(compare_chunk, unit, begin, min(begin + CHUNK_ELEMENTS, high))
        for unit in units
        # each rank has its own buffers: of two numbers of ranks, the first ones are compared
        for low, high in _runs(a.held[unit.state], b.held[unit.state], unit)
        for begin in range(low, high, CHUNK_ELEMENTS)
    )
    found = dict.fromkeys(units, Change())
    with stoppable() as stop:
        for unit, change in run_all(jobs, num_workers(), stop):
            found[unit] += change
    return found


def _runs(one: TensorEntry, two: TensorEntry, unit: _Unit) -> Runs:
    """Return the elements that both hold of what is compared."""
    runs = common(one.runs, two.runs)
    return runs if unit.runs is None else common(runs, unit.runs)


class _Reader:
    """Reads runs of elements of a checkpoint, each thread into a buffer of its own."""

    def __init__(self, index: CheckpointIndex, on_progress: Callable[[int], None]) -> None:
        self._index = index
        self._files = Files(index.root, index.files)
        self._on_progress = on_progress
        self._own = threading.local()

    def read(self, state: State, begin: int, end: int) -> memoryview:
        """Return elements of a state; they are valid until this thread's next call. Raises SourceError."""
        held: TensorEntry = self._index.held[state]
        itemsize = ITEMSIZE[held.dtype]
        size = (end - begin) * itemsize
        if len(self._own.__dict__.get("buffer", b"")) < size:
            self._own.buffer = bytearray(max(size, CHUNK_ELEMENTS * itemsize))
        room = memoryview(self._own.buffer)[:size]
        if held.is_all_zero:
            room[:] = bytes(size)
        for fragment in held.place.cover(begin, end):
            low, high = ((element - begin) * itemsize for element in (fragment.begin, fragment.end))
            try:
                self._files.read_into(fragment.extent.path, fragment.extent.start, room[low:high])
            except OSError as error:
                raise cannot_read(f"{self._index.name}/{fragment.extent.path}", error) from error
        self._on_progress(size)
        return room


def to_json(found: Diff, label: Callable[[Compared], str]) -> dict[str, object]:
    """Return the result as JSON data; ``label`` says by what it is grouped. Infinite and undefined numbers are null."""
    return {
        "schema": "llmtailor.diff/1",
        "a": found.a,
        "b": found.b,
        "steps": list(found.steps),
        "is_equal": found.is_equal,
        "kinds": found.kinds,
        "training": [{"what": one.what, "a": one.a, "b": one.b, "matters": one.matters} for one in found.training],
        "states": [
            {"label": name, "kind": kind, **_numbers(change)}
            for name, kinds in found.by(label).items()
            for kind, change in kinds.items()
        ],
        "part_steps": {part: list(steps) for part, steps in found.part_steps.items()},
        "master_steps": {part: list(steps) for part, steps in found.master_steps.items()},
    }


def _numbers(change: Change) -> dict[str, float | int | None]:
    relative = change.relative
    return {
        "numel": change.numel,
        "changed": change.changed,
        "not_finite": change.not_finite,
        "relative": relative if math.isfinite(relative) else None,
        "largest": change.largest,
        "cosine": change.cosine,
    }
