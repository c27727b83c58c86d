"""Which sources each state of an output comes from: one, several that are cut, or a weighted sum of several. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.model.roles import FROZEN, MASTER, MODULE, WEIGHT, State, is_moment


@dataclass(frozen=True, slots=True)
class SourceRange:
    """Elements ``begin``..``end`` of a state come from ``source``, a position in `Plan.sources`."""

    begin: int
    end: int
    source: int


Weights = tuple[tuple[int, float], ...]
"""Position in `Plan.sources`, and factor"""
NEWEST, AVERAGE, RESET = MOMENTS = ("newest", "average", "reset")
"""The moments of averaged masters: those of the newest source, their average, or zeros at step 0"""


@dataclass(frozen=True, slots=True)
class Mix:
    """A weighted average of sources."""

    weights: Weights
    """They sum to 1."""
    moments: str = NEWEST


@dataclass(frozen=True)  # without slots, for cached_property
class Sources:
    """Which source each state comes from, as a position in `Plan.sources`."""

    of_name: Mapping[str, int]
    """Tensor name -> source, for all kinds of state; of an averaged param the newest source."""
    of_weight: Mapping[str, int] = field(default_factory=dict)
    """Tensor name -> source of its weight alone, where that differs"""
    cuts: Mapping[State, tuple[SourceRange, ...]] = field(default_factory=dict)
    """States whose elements come from several sources -> the cuts that tile each, in order. A weight rounded from a
    master or a frozen value has the cuts of the original."""
    averages: Mapping[str, Mix] = field(default_factory=dict)
    """Trained param, or tied name of one -> what its masters are averaged from"""
    sums: Mapping[State, Weights] = field(default_factory=dict)
    """States that are weighted sums: the masters of averaged params, and their moments unless they are the newest's"""
    of_moments: Mapping[str, int] = field(default_factory=dict)
    """Tensor name -> source of its moments alone, where that differs"""
    bases: Mapping[tuple[int, str], int] = field(default_factory=dict)
    """(Source, param) whose masters are differences -> the source that they differ from"""

    def moments_of(self, param: str) -> str | None:
        """Return which moments an averaged param gets (one of `MOMENTS`); None for another param."""
        return self.averages[param].moments if param in self.averages else None

    def sum_of(self, state: State) -> tuple[State, Weights] | None:
        """Return the state whose weighted sum makes a state, and the terms; None if it comes from one source."""
        if state.kind == WEIGHT and state.param in self.of_weight:
            return None
        original = State(state.param, MASTER) if state.kind in (WEIGHT, MODULE) else state
        return (original, self.sums[original]) if original in self.sums else None

    def of(self, state: State) -> int:
        if state.kind == WEIGHT and state.param in self.of_weight:
            return self.of_weight[state.param]
        if is_moment(state.kind) and state.param in self.of_moments:
            return self.of_moments[state.param]
        return self.of_name[state.param]

    def of_any(self, name: str) -> set[int]:
        """Return every source of a tensor's states, except moments that have their own source (``of_moments``)."""
        found = self._of_cuts.get((name, False), set()) | self._of_cuts.get((name, True), set())
        return (found or {self.of_name[name]}) | {self.of_weight.get(name, self.of_name[name])}

    def moments_from(self, name: str) -> set[int]:
        """Return every source of a param's moments."""
        return self._of_cuts.get((name, True)) or {self.of_moments.get(name, self.of_name[name])}

    @cached_property
    def _of_cuts(self) -> dict[tuple[str, bool], set[int]]:
        """Param, and whether its moments are meant -> every source of their cuts"""
        found: dict[tuple[str, bool], set[int]] = {}
        for state, cuts in self.cuts.items():
            found.setdefault((state.param, is_moment(state.kind)), set()).update(cut.source for cut in cuts)
        return found

    def cuts_of(self, state: State) -> tuple[SourceRange, ...]:
        """Return the cuts that tile a state, in order; empty if it comes from one source."""
        cuts = self.cuts.get(state)
        for original in (MASTER, FROZEN) if state.kind in (WEIGHT, MODULE) else ():
            cuts = cuts or self.cuts.get(State(state.param, original))
        return cuts or ()

    def only(self, state: State) -> int | None:
        """Return the source that a state's elements are from; None if there are several, or they are summed."""
        cuts = self.cuts_of(state)
        return None if cuts or self.sum_of(state) else self.of(state)

    def spans(self, state: State, begin: int, end: int) -> Iterator[SourceRange]:
        """Yield the cuts that tile elements ``begin``..``end`` of a state, in order."""
        for cut in self.cuts_of(state) or (SourceRange(begin, end, self.of(state)),):
            low, high = max(begin, cut.begin), min(end, cut.end)
            if low < high:
                yield SourceRange(low, high, cut.source)


@dataclass(frozen=True, slots=True)
class Linkable:
    """The sources whose files an output may hold as hard links."""

    indexes: Sequence[CheckpointIndex]
    source_of: Callable[[State], int | None]
    """Returns the source whose bytes of a state the output holds unchanged; None if there is none, or several"""
