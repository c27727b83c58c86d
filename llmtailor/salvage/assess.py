"""What is still usable of a checkpoint: which states, and whether it can be the base."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.lineage import RunCheckpoint
from llmtailor.checkpoint.placement import Runs
from llmtailor.codes import Code
from llmtailor.containers.torch_zip import Record, list_records
from llmtailor.errors import PathIn, Problem, SourceError
from llmtailor.findings import ERROR, NOTE, Finding
from llmtailor.formats.manifest import read_manifest
from llmtailor.formats.rng import is_rng_file
from llmtailor.formats.trainer import MANIFEST, SCALER, SCHEDULER, TRAINER_STATE, is_weight_file
from llmtailor.formats.zero.files import LATEST
from llmtailor.model.states import FROZEN, MASTER, MODULE, WEIGHT, State
from llmtailor.storage.local import Files
from llmtailor.verify.verify import verify_checkpoint

_OF_THE_BASE = (SCHEDULER, TRAINER_STATE, SCALER)
_OF_THE_SCHEDULER = (Code.SCHEDULER_MISSING, Code.SCHEDULER_LENGTH, Code.SCHEDULER_RATE, Code.SCHEDULER_STEP)
_FIRST_MODEL_STATES = re.compile(r".*/zero_pp_rank_0_mp_rank_\d+_model_states\.pt")


@dataclass(frozen=True, slots=True)
class Holder:
    """A checkpoint of which at least one part is usable."""

    checkpoint: RunCheckpoint
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
        return self.checkpoint.step


@dataclass(frozen=True, slots=True)
class _Sorted:
    """The damage of a checkpoint, by its consequence for a salvage."""

    fatal: tuple[Problem, ...]
    """The states can no longer be identified."""
    unfit: tuple[Problem, ...]
    dropped: frozenset[str]
    weights_lost: bool


def assess(path: Path, step: int, deep: bool, on_progress: Callable[[int], None] = lambda num_bytes: None) -> Holder:
    """Return what is usable of a checkpoint. With ``deep``, also read its tensors.

    Raises SourceError if nothing is usable, and Interrupted on Ctrl-C.
    """
    verdict = verify_checkpoint(path)
    index = verdict.index
    if index is None:
        raise SourceError(finding for finding in verdict.findings if finding.severity != NOTE)
    findings = [finding for finding in verdict.findings if finding.severity != NOTE]
    damage = _sort(findings, index)
    if damage.fatal:
        raise SourceError(damage.fatal)
    lost: Mapping[State, Runs] = verdict.damage.states
    if deep:
        from llmtailor.verify.deep import read_everything  # numpy takes a while

        found = read_everything(index, index.unreadable, read_manifest(path, index.name), on_progress)
        more = [finding for finding in found.findings if finding.severity != NOTE]
        damage = _sort([*findings, *more], index, is_deep=True)
        if damage.fatal and index.is_partial:  # the checksum of a rank shard doesn't show which states are damaged
            raise SourceError(damage.fatal)
        lost = _trusting_checksums(index, found.states, found.values)
        findings += [*more, *found.values]
    weights_lost = index.has_masters and (damage.weights_lost or any(state.kind == WEIGHT for state in lost))
    problems = tuple(dict.fromkeys(finding.problem for finding in findings))
    damaged_files = {one.path for one in problems}.intersection(index.files)
    return Holder(
        checkpoint=RunCheckpoint(path, step, None),
        index=_without(index, damage.dropped, weights_lost),
        lost={
            state: runs
            for state, runs in lost.items()
            if state.kind != MODULE and not (state.kind == WEIGHT and index.has_masters)
        },
        is_whole=not (lost or damaged_files or any(finding.severity == ERROR for finding in findings)),
        unfit=damage.unfit,
        damage=problems,
        knows_tied=not any(_FIRST_MODEL_STATES.fullmatch(path) for path in index.unreadable),
        weights_lost=weights_lost,
        dropped=tuple(sorted(damage.dropped - {LATEST})),
    )


def _sort(findings: Iterable[Finding], index: CheckpointIndex, is_deep: bool = False) -> _Sorted:
    fatal: list[Problem] = []
    unfit: list[Problem] = []
    dropped: set[str] = set()
    weights_lost = False
    for finding in findings:
        path = finding.path or ""
        if path in _OF_THE_BASE or finding.code in _OF_THE_SCHEDULER:
            if is_deep or finding.severity == ERROR:
                unfit.append(finding)
        elif path in index.unreadable or (is_deep and "/" in path):
            continue  # the damaged elements are listed separately
        elif is_weight_file(path) and not index.is_partial:  # those hold masters and moments, not weights
            weights_lost = True
        elif path == MANIFEST:
            fatal.append(finding)
        elif path == LATEST or is_rng_file(path):
            dropped.add(path)
            if path == LATEST and len([tag for tag in index.root.glob("global_step*") if tag.is_dir()]) > 1:
                fatal.append(finding)
        elif finding.severity == ERROR:
            fatal.append(finding)
        elif "/" not in path and (index.root / path).is_file():
            dropped.add(path)
    return _Sorted(tuple(fatal), tuple(unfit), frozenset(dropped), weights_lost)


def _without(index: CheckpointIndex, dropped: frozenset[str], weights_lost: bool) -> CheckpointIndex:
    # the safetensors files of a partial checkpoint hold masters, moments and frozen params
    weights_lost = weights_lost and not index.is_partial
    return replace(
        index,
        files={
            path: fact
            for path, fact in index.files.items()
            if path not in dropped and not (weights_lost and is_weight_file(path))
        },
        held={state: held for state, held in index.held.items() if not (weights_lost and state.kind == WEIGHT)},
        findings=tuple(finding for finding in index.findings if finding.severity != ERROR),
    )


def without_weights(holder: Holder) -> Holder:
    """Return a holder whose weights will be rounded from its masters, whatever its weight files contain."""
    return replace(holder, index=_without(holder.index, frozenset(), weights_lost=True))


def _trusting_checksums(
    index: CheckpointIndex, states: Mapping[State, Runs], values: Iterable[Finding]
) -> dict[State, Runs]:
    """Drop masters that match their checksum from the damage: if a weight contradicts its master, both are listed."""
    from llmtailor.verify.read import crc_of_range  # numpy takes a while

    blamed = {finding.path for finding in values} | index.unreadable
    files = Files(index.root)

    @cache
    def records_of(path: str) -> Sequence[Record]:
        return list_records(index.root, path, PathIn(index.name, path)) if path.endswith(".pt") else ()

    @cache
    def matches(path: str, record: Record) -> bool:
        try:
            return record.crc == crc_of_range(files, path, record.start, record.stop, lambda num_bytes: None)
        except OSError:
            return False

    def is_right(state: State, runs: Runs) -> bool:
        if not index.has_masters or state.kind not in (MASTER, FROZEN):
            return False
        place = index.held[state].place
        extents = {fragment.extent for begin, end in runs for fragment in place.cover(begin, end)}
        return not blamed.intersection(extent.path for extent in extents) and all(
            any(
                record.start <= extent.start and extent.stop <= record.stop and matches(extent.path, record)
                for record in records_of(extent.path)
            )
            for extent in extents
        )

    with files:
        return {state: runs for state, runs in states.items() if not is_right(state, runs)}
