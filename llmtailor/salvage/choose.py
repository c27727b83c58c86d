"""Which checkpoint each part, or each element, comes from. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.placement import Runs, common, count, union, without
from llmtailor.errors import some
from llmtailor.formats.registry import shared_layers, with_experts
from llmtailor.model.parts import ModelStructure, layer_of
from llmtailor.model.states import WEIGHT, State, is_moment
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
    masters: int | None = None
    """A newer holder than that of ``shares``, which then supplies only the moments"""

    @property
    def holder(self) -> int | None:
        """Position of the newest holder used, apart from that of newer masters"""
        return min(self.shares, default=None)

    @property
    def giving(self) -> frozenset[int]:
        """The positions of all holders used"""
        return frozenset(self.shares) | ({self.masters} if self.masters is not None else set())


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
        given = {number for choice in self.parts for number in choice.giving}
        return tuple(sorted(given | ({self.base} if self.base is not None else set())))


def choose(holders: Sequence[Holder], structure: ModelStructure, fragments: bool) -> Choice:
    """Take every part from the newest holder that has all of it; with ``fragments``, choose element by element for
    parts damaged in newer ones. ``holders`` are ordered from newest to oldest, and fit together. Layers of which a
    save holds only some experts are chosen expert by expert.

    Each element's master and moments come from one holder, unless a newer one was saved without the moments: then the
    masters are the newer one's. The base is the newest holder that can be one and is used,
    or else the newest that can be one.
    """
    reference = holders[0].index
    wanted = _states_by_part(reference, structure)
    parts: list[PartChoice] = []
    cuts: dict[State, Cuts] = {}
    fine = with_experts(structure, reference, {part for one in holders for part in shared_layers(one.index, structure)})
    for part in structure.parts:
        states = wanted.get(part, {})
        lost = [_lost(one, states, reference) for one in holders]
        whole = next((number for number, of_one in enumerate(lost) if not of_one), None)
        shares = {}
        if whole is not None:
            shares = {whole: sum(reference.held[of_param[0]].numel for of_param in states.values())}
        may_mix = fragments and not reference.weights_are_whole and whole != 0
        mixed = _mix(states, holders) if may_mix else None
        if mixed is not None:
            shares, more = mixed
            cuts |= more
        elif part not in fine.parts:
            parts += [_newest(share, own, holders, lost) for share, own in _divide(part, states, fine, reference)]
            continue
        masters = _newer_masters(holders, lost, whole) if mixed is None else None
        parts.append(PartChoice(part, shares, _why(holders[0], lost[0]) if set(shares) != {0} else "", masters))
    giving = {number for choice in parts for number in choice.giving}
    able = [number for number, one in enumerate(holders) if not one.unfit and one.knows_tied]
    base = next((number for number in able if number in giving), next(iter(able), None))
    return Choice(tuple(parts), cuts, base)


def _newest(
    part: str, runs: Mapping[str, Runs], holders: Sequence[Holder], lost: Sequence[Mapping[State, Runs]]
) -> PartChoice:
    """Take these elements of params from the newest holder that has lost none of them."""
    own = [
        {state: both for state, gone in of_one.items() if (both := common(gone, runs.get(state.param, ())))}
        for of_one in lost
    ]
    whole = next((number for number, of_one in enumerate(own) if not of_one), None)
    shares = {whole: sum(map(count, runs.values()))} if whole is not None else {}
    return PartChoice(part, shares, _why(holders[0], own[0]) if whole != 0 else "", _newer_masters(holders, own, whole))


def _newer_masters(holders: Sequence[Holder], lost: Sequence[Mapping[State, Runs]], whole: int | None) -> int | None:
    """Return the newest holder before that of the whole that lacks only moments, which its save has left out."""

    def is_left_out(number: int, state: State, runs: Runs) -> bool:
        held = holders[number].index.held.get(state)
        return is_moment(state.kind) and held is not None and not common(runs, held.runs)

    newer = ((number, lost[number]) for number in range(whole or 0))
    return next((at for at, gone in newer if all(is_left_out(at, *one) for one in gone.items())), None)


def _divide(
    layer: str, states: Mapping[str, Sequence[State]], fine: ModelStructure, reference: CheckpointIndex
) -> Iterator[tuple[str, dict[str, Runs]]]:
    """Yield the shares of a layer, each with its elements of params."""
    for part in fine.parts:
        runs: dict[str, Runs] = {}
        for name in fine.names(part) if layer_of(part) == layer else ():
            piece = fine.pieces.get(name)
            if piece is not None:
                runs[piece.param] = ((piece.begin, piece.end),)
            elif name in states:
                runs[name] = ((0, reference.held[states[name][0]].numel),)
        if runs:
            yield part, runs


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
            whole = ((0, reference.held[state].numel),)
            if held is None or not held.is_here:
                lost[state] = whole
            elif not held.is_whole:  # of a fused param, the save holds some experts
                lost[state] = union(without(whole, held.runs), holder.lost.get(state, ()))
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
            for begin, end in common(runs, held.runs):
                paths.update(dict.fromkeys(fragment.extent.path for fragment in held.place.cover(begin, end)))
    kinds = some(dict.fromkeys(state.kind for state in lost))
    if not paths:
        return f"{newest.name} does not hold it"
    return f"{kinds} lost in {some('the file' if path == '.' else path.rpartition('/')[2] for path in paths)}"
