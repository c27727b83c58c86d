"""What is still usable of a checkpoint: which states, and whether it can be the base."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.placement import Extent, Runs
from llmtailor.codes import Code
from llmtailor.errors import Problem, SourceError
from llmtailor.findings import ERROR, NOTE, Finding
from llmtailor.formats.clients import CLIENTS, TRAINER_STATE
from llmtailor.formats.manifest import read_manifest
from llmtailor.formats.rng import is_rng_file
from llmtailor.formats.trainer import (
    MANIFEST,
    SCALER,
    is_weight_file,
)
from llmtailor.formats.zero.files import LATEST, is_shard_name
from llmtailor.model.states import FROZEN, MASTER, MODULE, WEIGHT, State
from llmtailor.verify.verify import verify_checkpoint

if TYPE_CHECKING:
    from llmtailor.verify.deep import Deep

_OF_THE_BASE = (TRAINER_STATE, SCALER, *(one.scheduler for one in CLIENTS.values() if one.scheduler))
_OF_THE_SCHEDULER = (Code.SCHEDULER_MISSING, Code.SCHEDULER_LENGTH, Code.SCHEDULER_RATE, Code.SCHEDULER_STEP)
_FIRST_MODEL_STATES = re.compile(r".*/zero_pp_rank_0_mp_rank_\d+_model_states\.pt")


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
        from llmtailor.verify.deep import read_everything  # numpy takes a while

        manifest = read_manifest(path, index.name)
        found = read_everything(index, index.unreadable, manifest, on_progress)
        findings += [finding for finding in found.findings if finding.severity != NOTE]
        damage = _sort(findings, index, is_deep=True)
        if damage[_FATAL] and index.is_partial:  # the checksum of a rank shard doesn't show which states are damaged
            raise SourceError(damage[_FATAL])
        lost = _trusting_checksums(index, found)
        findings += found.values
    dropped = {finding.path for finding in damage[_DROPPED] if finding.path}
    weights_lost = index.has_masters and bool(damage[_WEIGHTS] or any(state.kind == WEIGHT for state in lost))
    problems = tuple(dict.fromkeys(finding.problem for finding in findings))
    damaged_files = {one.path for one in problems}.intersection(index.files)
    return Holder(
        index=_without(index, dropped, weights_lost),
        lost={
            state: runs
            for state, runs in lost.items()
            if state.kind != MODULE and not (state.kind == WEIGHT and index.has_masters)
        },
        is_whole=not (lost or damaged_files or any(finding.severity == ERROR for finding in findings)),
        unfit=tuple(damage[_UNFIT]),
        damage=problems,
        knows_tied=not any(_FIRST_MODEL_STATES.fullmatch(path) for path in index.unreadable),
        weights_lost=weights_lost,
        dropped=tuple(sorted(dropped - {LATEST})),
    )


_FATAL, _UNFIT, _DROPPED, _WEIGHTS = "states can't be identified", "no base", "file left out", "weights lost"


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
        elif is_weight_file(path) and not index.is_partial:  # those hold masters and moments, not weights
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
    weights_lost = weights_lost and not index.is_partial
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
        if not index.has_masters or state.kind not in (MASTER, FROZEN):
            return False
        place = index.held[state].place
        return all(is_right(fragment.extent) for begin, end in runs for fragment in place.cover(begin, end))

    return {state: runs for state, runs in found.states.items() if not is_trusted(state, runs)}
