"""What is still usable of each checkpoint, and which one each part, or each element, comes from."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.placement import Extent, Runs, common, count, union, without
from llmtailor.codes import Code
from llmtailor.errors import Problem, SourceError, some
from llmtailor.findings import ERROR, NOTE, Finding
from llmtailor.formats.manifest import read_manifest
from llmtailor.formats.registry import shared_layers, with_experts
from llmtailor.loaders.files import LATEST, MANIFEST, SCALER, TRAINER_STATE, is_rng_file, is_shard_name, is_weight_file
from llmtailor.loaders.loader import CLIENTS
from llmtailor.model.parts import ModelStructure, layer_of
from llmtailor.model.states import FROZEN, MASTER, MODULE, WEIGHT, State, is_moment
from llmtailor.verify.verify import verify_checkpoint

if TYPE_CHECKING:
    from llmtailor.verify.values import Deep

_OF_THE_BASE = (TRAINER_STATE, SCALER, *(one.scheduler for one in CLIENTS.values() if one.scheduler))
_OF_THE_SCHEDULER = (Code.SCHEDULER_MISSING, Code.SCHEDULER_LENGTH, Code.SCHEDULER_RATE, Code.SCHEDULER_STEP)
_FIRST_MODEL_STATES = re.compile(r".*/zero_pp_rank_0_mp_rank_\d+_model_states\.pt")
_FATAL, _UNFIT, _DROPPED, _WEIGHTS = "states can't be identified", "no base", "file left out", "weights lost"
Cuts = tuple[tuple[int, int, int], ...]
"""Elements ``begin``..``end`` and the holder they come from, in order."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A checkpoint of which at least one part is usable."""

    index: CheckpointIndex
    """The index without damaged files, and without weights if these are damaged: the masters can be rounded instead"""
    lost: Mapping[State, Runs]
    """Elements that can't be used"""
    is_whole: bool
    """Whether no damage was found"""
    unfit: tuple[Problem, ...]
    """Why it can't be the base"""
    damage: tuple[Problem, ...]
    knows_tied: bool
    """Whether it is known which params are tied: under ZeRO-3 only one file of rank 0 records it"""
    weights_lost: bool
    """Whether weights were saved beside masters but can't be used"""
    dropped: tuple[str, ...]
    """Damaged files of the root without states, except those whose damage makes it unfit as the base"""

    @property
    def name(self) -> str:
        return self.index.name

    @property
    def step(self) -> int:
        return self.index.global_step


def assess(path: Path, deep: bool, on_progress: Callable[[int], None] = lambda num_bytes: None) -> Holder:
    """Return what is usable of a checkpoint. With ``deep``, also read its tensors.

    Raises SourceError if nothing is usable, and Interrupted on Ctrl-C.
    """
    verdict = verify_checkpoint(path)
    index, lost = verdict.index, verdict.damage.states
    findings = [finding for finding in verdict.findings if finding.severity != NOTE]
    if index is None:
        raise SourceError(findings)
    damage = _sort(findings, index)
    if damage[_FATAL]:
        raise SourceError(damage[_FATAL])
    if deep:
        from llmtailor.verify.values import read_everything  # numpy takes a while

        manifest = read_manifest(path, index.name)
        found = read_everything(index, index.unreadable, manifest, on_progress)
        findings += [finding for finding in found.findings if finding.severity != NOTE]
        damage = _sort(findings, index, is_deep=True)
        if (
            damage[_FATAL] and index.form.is_partial
        ):  # the checksum of a rank shard doesn't show which states are damaged
            raise SourceError(damage[_FATAL])
        lost = _trusting_checksums(index, found)
        findings += found.values
    dropped = {finding.path for finding in damage[_DROPPED] if finding.path}
    weights_lost = index.form.has_masters and bool(damage[_WEIGHTS] or any(state.kind == WEIGHT for state in lost))
    problems = tuple(dict.fromkeys(finding.problem for finding in findings))
    damaged_files = {one.path for one in problems}.intersection(index.files)
    return Holder(
        index=_without(index, dropped, weights_lost),
        lost={
            state: runs
            for state, runs in lost.items()
            if state.kind != MODULE and not (state.kind == WEIGHT and index.form.has_masters)
        },
        is_whole=not (lost or damaged_files or any(finding.severity == ERROR for finding in findings)),
        unfit=tuple(damage[_UNFIT]),
        damage=problems,
        knows_tied=not any(_FIRST_MODEL_STATES.fullmatch(path) for path in index.unreadable),
        weights_lost=weights_lost,
        dropped=tuple(sorted(dropped - {LATEST})),
    )


def _sort(findings: Iterable[Finding], index: CheckpointIndex, is_deep: bool = False) -> dict[str, list[Finding]]:
    """Return the damage of a checkpoint by its consequence for a salvage."""
    found: dict[str, list[Finding]] = defaultdict(list)
    for finding in findings:
        path = finding.path or ""
        if path in _OF_THE_BASE or finding.code in _OF_THE_SCHEDULER:
            if is_deep or finding.severity == ERROR:
                found[_UNFIT].append(finding)
        elif path in index.unreadable or (is_deep and ("/" in path or is_shard_name(path))):
            continue  # the damaged elements are listed separately
        elif is_weight_file(path) and not index.form.is_partial:  # those hold masters and moments, not weights
            found[_WEIGHTS].append(finding)
        elif path == LATEST or is_rng_file(path):
            found[_DROPPED].append(finding)
            if path == LATEST and len([tag for tag in index.root.glob("global_step*") if tag.is_dir()]) > 1:
                found[_FATAL].append(finding)
        elif path == MANIFEST or finding.severity == ERROR:
            found[_FATAL].append(finding)
        elif "/" not in path and (index.root / path).is_file():
            found[_DROPPED].append(finding)
    return found


def _without(index: CheckpointIndex, dropped: Collection[str], weights_lost: bool) -> CheckpointIndex:
    # the safetensors files of a partial checkpoint hold masters, moments and frozen params
    weights_lost = weights_lost and not index.form.is_partial
    files = {path: fact for path, fact in index.files.items() if path not in dropped}
    if weights_lost:
        files = {path: fact for path, fact in files.items() if not is_weight_file(path)}
    return replace(
        index,
        files=files,
        held={state: held for state, held in index.held.items() if not (weights_lost and state.kind == WEIGHT)},
        findings=tuple(finding for finding in index.findings if finding.severity != ERROR),
    )


def without_weights(holder: Holder) -> Holder:
    """Return a holder whose weights will be rounded from its masters, whatever its weight files contain."""
    return replace(holder, index=_without(holder.index, (), weights_lost=True))


def _trusting_checksums(index: CheckpointIndex, found: Deep) -> dict[State, Runs]:
    """Drop masters that match their checksum from the damage: if a weight contradicts its master, both are listed."""
    blamed = {finding.path for finding in found.values} | index.unreadable

    def is_right(extent: Extent) -> bool:
        records = () if extent.path in blamed else found.intact.get(extent.path, ())
        return any(record.start <= extent.start and extent.stop <= record.stop for record in records)

    def is_trusted(state: State, runs: Runs) -> bool:
        if not index.form.has_masters or state.kind not in (MASTER, FROZEN):
            return False
        place = index.held[state].place
        return all(is_right(fragment.extent) for begin, end in runs for fragment in place.cover(begin, end))

    return {state: runs for state, runs in found.states.items() if not is_trusted(state, runs)}


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
        may_mix = fragments and not reference.form.weights_are_whole and whole != 0
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
        if state.param in index.params and not (state.kind == WEIGHT and index.form.has_masters):
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
