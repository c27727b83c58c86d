"""From what reading has found to findings, and to the elements that are damaged. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from llmtailor.codes import Code
from llmtailor.core.findings import ERROR, WARNING, Finding
from llmtailor.core.index import CheckpointIndex, Held
from llmtailor.core.states import EXP_AVG, EXP_AVG_SQ, FROZEN, MASTER, MODULE, WEIGHT, State
from llmtailor.core.words import some
from llmtailor.errors import PathIn
from llmtailor.verify.bundles import SavedNames

NOT_FINITE, NEGATIVE, DIFFERS = "not finite", "negative", "differs"
Spans = dict[State, tuple[tuple[int, int], ...]]
_CALLED = {MODULE: "the module's weight", FROZEN: "the frozen value", MASTER: "the master"}
_OTHER_SAVE = "they are of different saves, or damaged: copy both files again, or take another checkpoint"
_DIVERGED = "the run had diverged, or the file is damaged: take an older checkpoint"


@dataclass(slots=True)
class Blemish:
    """Elements of a state that are off in one way."""

    count: int
    first: int
    runs: list[tuple[int, int]]
    """One range per chunk, from the first such element to behind the last."""


def find_blemishes(
    index: CheckpointIndex, blemishes: Mapping[tuple[State, str], Blemish], is_split: bool
) -> Iterator[Finding]:
    """Yield a finding for every kind of state and way to be off. With ``is_split`` weights may differ on purpose."""
    together: dict[tuple[str, str], list[State]] = {}
    for state, problem in blemishes:
        together.setdefault((state.kind, problem), []).append(state)
    for (kind, problem), states in together.items():
        count = sum(blemishes[state, problem].count for state in states)
        first = blemishes[states[0], problem].first
        held = held_of(index, states[0])
        total = sum(held_of(index, state).numel for state in states)
        tensors = f"in {len(states)} tensors, the first" if len(states) > 1 else "the first"
        where = PathIn(index.name, next(iter(held.place.cover(first, first + 1))).extent.path)
        at = f"{count:,} of {total:,} elements, {tensors} at {_coordinates(first, held.shape)} of {states[0].param}"
        name = f"{_CALLED.get(kind, kind)} of {some(state.param for state in states)}"
        if problem == NOT_FINITE:
            yield Finding(where, f"{name} is not finite: {at}", _DIVERGED, Code.NOT_FINITE, ERROR)
        elif problem == NEGATIVE:
            yield Finding(
                where, f"{name} is negative, which a mean of squares can't be: {at}", _OTHER_SAVE, Code.NEGATIVE, ERROR
            )
        elif is_split and kind == WEIGHT:
            fix = "a resume goes on from the masters"
            yield Finding(
                where, f"{name} is not the rounded master, as asked for: {at}", fix, Code.SPLIT_WEIGHTS, WARNING
            )
        else:
            yield Finding(where, f"{name} is not the rounded master: {at}", _OTHER_SAVE, Code.NOT_ROUNDED, ERROR)


def find_zeroed(index: CheckpointIndex, not_zero: Collection[State]) -> Iterator[Finding]:
    """Tell of flat ids of a full checkpoint whose moments are all zero although Adam has made steps.

    Gradients of a whole flat tensor are never all zero: such moments were wiped, or never loaded.
    """
    stepped = [
        flat
        for flat in index.flat_ids
        if flat.step > 0 and any(index.params[param].numel for param in flat.params)
        if State(flat.params[0], EXP_AVG_SQ) in index.held
    ]
    for kind in (EXP_AVG, EXP_AVG_SQ):
        zeroed = [flat for flat in stepped if not any(State(param, kind) in not_zero for param in flat.params)]
        if zeroed:
            params = tuple(param for flat in zeroed for param in flat.params)
            what = f"{kind} of {some(params)} is zero throughout, after {zeroed[0].step:g} steps of Adam"
            severity = ERROR if len(zeroed) == len(stepped) else WARNING
            yield Finding(
                index.name, what, f"a resume restarts Adam there; {_OTHER_SAVE}", Code.ALL_ZERO, severity, params
            )


def damaged_elements(
    index: CheckpointIndex, blemishes: Mapping[tuple[State, str], Blemish], saved_as: SavedNames, is_split: bool
) -> Iterator[tuple[State, tuple[int, int]]]:
    """Yield the ranges of elements that can't be trusted: of two states that contradict each other, both."""
    pieces = {piece.name: (name, piece.begin) for name, found in saved_as.items() for piece in found}
    for (state, problem), blemish in blemishes.items():
        if problem == DIFFERS and is_split and state.kind == WEIGHT:
            continue
        name, offset = pieces.get(state.param, (state.param, 0))
        name = index.tied.get(name, name)
        for begin, end in blemish.runs:
            yield state, (begin, end)
            if problem == DIFFERS:
                kind = MASTER if index.params[name].role == "trainable" else FROZEN
                yield State(name, kind), (begin + offset, end + offset)


def lost_elements(index: CheckpointIndex, paths: frozenset[str]) -> Iterator[tuple[State, tuple[int, int]]]:
    """Yield the elements of states that lie in files which can't be read."""
    if paths:
        for state, held in all_held(index):
            for fragment in held.place.cover(0, held.numel) if held.is_here else ():
                if fragment.extent.path in paths:
                    yield state, (fragment.begin, fragment.end)


def elements_in(index: CheckpointIndex, path: str, start: int, stop: int) -> Iterator[tuple[State, tuple[int, int]]]:
    """Yield the elements of states that lie in bytes ``start``..``stop`` of a file."""
    for state, held in all_held(index):
        for fragment in held.place.cover(0, held.numel) if held.is_here else ():
            extent = fragment.extent
            if extent.path == path and extent.start < stop and start < extent.stop:
                yield state, (fragment.begin, fragment.end)


def join(runs: Iterable[tuple[State, tuple[int, int]]]) -> Spans:
    """Return ascending runs of elements that don't touch, for each state."""
    found: dict[State, list[tuple[int, int]]] = {}
    for state, run in runs:
        found.setdefault(state, []).append(run)
    return {state: tuple(_joined(spans)) for state, spans in found.items()}


def _joined(runs: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    begin, end = min(runs)
    for low, high in sorted(runs):
        if low > end:
            yield begin, end
            begin, end = low, high
        end = max(end, high)
    yield begin, end


def all_held(index: CheckpointIndex) -> Iterator[tuple[State, Held]]:
    """Yield everything that is held, the module's weights of ZeRO-1/2 included."""
    yield from index.held.items()
    for name, held in index.module.items():
        yield State(name, MODULE), held


def held_of(index: CheckpointIndex, state: State) -> Held:
    return index.module[state.param] if state.kind == MODULE else index.held[state]


def _coordinates(element: int, shape: tuple[int, ...]) -> str:
    found = []
    for extent in reversed(shape):
        element, inside = divmod(element, extent)
        found.append(inside)
    return str(list(reversed(found)))
