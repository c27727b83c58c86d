"""Checkpoints that someone else has opened and judged for a merge: what a salvage can use of damaged ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.layout import Cut, FileLayout
from llmtailor.errors import Problem
from llmtailor.model.states import State


@dataclass(frozen=True, slots=True)
class Opened:
    """Stands in for opening the sources of a recipe."""

    indexes: Mapping[Path, CheckpointIndex]
    """By root; also of sources that only `cuts` name."""
    cuts: Mapping[State, tuple[tuple[int, int, Path], ...]] = field(default_factory=dict)
    """States made of several sources: elements ``begin``..``end`` and the root they come from. They tile each state."""
    files: tuple[FileLayout, ...] = ()
    """Files that the base lacks."""
    notices: tuple[Problem, ...] = ()

    def sources(self, named: Iterable[Path]) -> tuple[CheckpointIndex, ...]:
        """Return the indexes of these roots, then of those that only cuts name."""
        roots = dict.fromkeys([*named, *(root for cuts in self.cuts.values() for *_, root in cuts)])
        return tuple(self.indexes[root] for root in roots)

    def number_cuts(self, indexes: Sequence[CheckpointIndex], tied: Mapping[str, str]) -> dict[State, tuple[Cut, ...]]:
        """Return the cuts with sources as positions in ``indexes``; a tied name is cut as what it is stored under."""
        number_of = {index.root: number for number, index in enumerate(indexes)}
        cuts = {
            state: tuple(Cut(begin, end, number_of[root]) for begin, end, root in runs)
            for state, runs in self.cuts.items()
        }
        names_of: dict[str, list[str]] = {}
        for name, stored in tied.items():
            names_of.setdefault(stored, []).append(name)
        more = {State(name, state.kind): runs for state, runs in cuts.items() for name in names_of.get(state.param, ())}
        return cuts | more
