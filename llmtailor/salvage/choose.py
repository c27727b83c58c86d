"""Which checkpoint each part, or each element, comes from. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.placement import Runs, count, union, without
from llmtailor.errors import some
from llmtailor.model.parts import ModelStructure
from llmtailor.model.states import WEIGHT, State
from llmtailor.salvage.assess import Holder

Cuts = tuple[tuple[int, int, int], ...]
"""Elements ``begin``..``end`` and the holder they come from, in order."""


@dataclass(frozen=True, slots=True)
class PartChoice:
    """The source of a part."""

    part: str
    shares: Mapping[int, int]
    """Holder -> number of param elements taken from it; empty if there is no complete source"""
    why: str
    """Why not all of it comes from the newest holder; empty if it does"""

    @property
    def holder(self) -> int | None:
        """Position of the newest holder used"""
        return min(self.shares, default=None)


@dataclass(frozen=True, slots=True)
class Choice:
    parts: tuple[PartChoice, ...]
    cuts: Mapping[State, Cuts]
    """States with elements from several holders"""
    base: int | None

    @property
    def is_complete(self) -> bool:
        return self.base is not None and not self.lacking

    @property
    def lacking(self) -> tuple[str, ...]:
        return tuple(choice.part for choice in self.parts if choice.holder is None)

    @property
    def used(self) -> tuple[int, ...]:
        """Every holder that something is taken from"""
        given = {number for choice in self.parts for number in choice.shares}
        return tuple(sorted(given | ({self.base} if self.base is not None else set())))


def choose(holders: Sequence[Holder], structure: ModelStructure, fragments: bool) -> Choice:
    """Take every part from the newest holder that has all of it; with ``fragments``, choose element by element for
    parts damaged in newer ones. ``holders`` are ordered from newest to oldest, and fit together.

    Each element's master and moments come from one holder. The base is the newest holder that can be one and is used,
    or else the newest that can be one.
    """
    reference = holders[0].index
    wanted = _states_by_part(reference, structure)
    parts: list[PartChoice] = []
    cuts: dict[State, Cuts] = {}
    for part in structure.parts:
        states = wanted.get(part, {})
        lost = [_lost(one, states, reference) for one in holders]
        whole = next((number for number, of_one in enumerate(lost) if not of_one), None)
        shares = {}
        if whole is not None:
            shares = {whole: sum(reference.held[of_param[0]].numel for of_param in states.values())}
        may_mix = fragments and not reference.weights_are_whole and whole != 0
        if may_mix and (mixed := _mix(states, holders)) is not None:
            shares, more = mixed
            cuts |= more
        parts.append(PartChoice(part, shares, _why(holders[0], lost[0]) if set(shares) != {0} else ""))
    giving = {number for choice in parts for number in choice.shares}
    able = [number for number, one in enumerate(holders) if not one.unfit and one.knows_tied]
    base = next((number for number in able if number in giving), next(iter(able), None))
    return Choice(tuple(parts), cuts, base)


def _states_by_part(index: CheckpointIndex, structure: ModelStructure) -> dict[str, dict[str, list[State]]]:
    """Return the required states by part and param. Under ZeRO the weights are the rounded masters."""
    found: dict[str, dict[str, list[State]]] = {}
    for state in index.held:
        if state.param in index.params and not (state.kind == WEIGHT and index.has_masters):
            found.setdefault(structure.part_of[state.param], {}).setdefault(state.param, []).append(state)
    return found


def _lost(holder: Holder, states: Mapping[str, Sequence[State]], reference: CheckpointIndex) -> dict[State, Runs]:
    """Return what a holder lacks of some states."""
    lost: dict[State, Runs] = {}
    for of_param in states.values():
        for state in of_param:
            held = holder.index.held.get(state)
            if held is None or not held.is_here:
                lost[state] = ((0, reference.held[state].numel),)
            elif runs := holder.lost.get(state):
                lost[state] = runs
    return {state: runs for state, runs in lost.items() if count(runs)}


def _mix(
    states: Mapping[str, Sequence[State]], holders: Sequence[Holder]
) -> tuple[dict[int, int], dict[State, Cuts]] | None:
    """Take each element from the newest holder that has all of it; None if some have no holder.

    Returns the number of elements by holder, and the cuts.
    """
    reference = holders[0].index
    found: dict[str, Cuts] = {}
    for param, of_param in states.items():
        numel = reference.held[of_param[0]].numel
        left: Runs = ((0, numel),) if numel else ()
        taken: list[tuple[int, int, int]] = []
        for number, holder in enumerate(holders):
            lost = union(*_lost(holder, {param: of_param}, reference).values())
            if holder.index.held.get(of_param[0], reference.held[of_param[0]]).numel != numel:
                lost = ((0, numel),)  # buffers saved by another number of ranks
            usable = without(left, lost)
            taken += [(begin, end, number) for begin, end in usable]
            left = without(left, usable)
        if left:
            return None
        found[param] = tuple(sorted(taken))
    shares: Counter[int] = Counter()
    for begin, end, number in chain(*found.values()):
        shares[number] += end - begin
    first = min(shares, default=None)
    cuts = {
        state: found[param]
        for param, of_param in states.items()
        if any(number != first for *_, number in found[param])
        for state in of_param
    }
    return dict(sorted(shares.items())), cuts


def _why(newest: Holder, lost: Mapping[State, Runs]) -> str:
    """Return what the newest holder lacks of a part."""
    paths: dict[str, None] = {}
    for state, runs in lost.items():
        held = newest.index.held.get(state)
        if held is not None and held.is_here:
            for begin, end in runs:
                paths.update(dict.fromkeys(fragment.extent.path for fragment in held.place.cover(begin, end)))
    kinds = some(dict.fromkeys(state.kind for state in lost))
    if not paths:
        return f"{newest.name} does not hold it"
    return f"{kinds} lost in {some(path.rpartition('/')[2] for path in paths)}"
