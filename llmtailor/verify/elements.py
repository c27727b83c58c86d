"""Sets of elements of states: those in chosen byte ranges, and in files that can't be read. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain

from llmtailor.checkpoint.index import CheckpointIndex, TensorEntry
from llmtailor.checkpoint.placement import Extent, Runs, union
from llmtailor.model.states import MODULE, State

Spans = dict[State, Runs]
Elements = tuple[State, tuple[int, int]]


def elements_in(index: CheckpointIndex, is_meant: Callable[[Extent], bool]) -> Iterator[Elements]:
    """Yield the elements of states in chosen byte ranges."""
    for state, held in all_held(index):
        for fragment in chain.from_iterable(held.place.cover(*run) for run in held.runs):
            if is_meant(fragment.extent):
                yield state, (fragment.begin, fragment.end)


def lost_elements(index: CheckpointIndex, paths: Collection[str]) -> Iterator[Elements]:
    """Yield the elements of states in unreadable files."""
    return elements_in(index, lambda extent: extent.path in paths) if paths else iter(())


def join(runs: Iterable[Elements]) -> Spans:
    """Return the elements of each state as one set."""
    found: dict[State, list[tuple[int, int]]] = {}
    for state, run in runs:
        found.setdefault(state, []).append(run)
    return {state: union(tuple(spans)) for state, spans in found.items()}


def all_held(index: CheckpointIndex) -> Iterator[tuple[State, TensorEntry]]:
    """Yield every state held, including the module's weights of ZeRO-1/2."""
    yield from index.held.items()
    for name, held in index.module.items():
        yield State(name, MODULE), held


def held_of(index: CheckpointIndex, state: State) -> TensorEntry:
    return index.module[state.param] if state.kind == MODULE else index.held[state]
