"""Removes what a run no longer needs: partial checkpoints that no step uses, and unfinished or abandoned folders.

What partial checkpoints are needed for is decided here, without reading a file. The Trainer (``save_total_limit``) and
users delete full checkpoints. Steps are therefore counted twice: those that can be composed from all existing
checkpoints, and those that partial checkpoints alone can compose. A step needs its own partial checkpoint and those
that this one builds on.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from llmtailor.checkpoint.lineage import (
    Ledger,
    RunCheckpoint,
    composable_steps,
    is_complete,
    newer_masters,
    partial_needs,
    present_of,
    sources_at,
    usable_at,
)
from llmtailor.copying.staging import left_over
from llmtailor.errors import Problem, SourceError, VerificationError, some
from llmtailor.formats.registry import display_name
from llmtailor.frameworks.framework import survey_contents
from llmtailor.model.parts import Part
from llmtailor.recipe import ONLY_MOMENTS
from llmtailor.runs.folder import FolderKind, RunFolder, files_in, freed_bytes, mark_errors_as_late, remove_partial
from llmtailor.runs.scan import Scan, check_newest, scan_run

logger = logging.getLogger(__name__)
BUG = "this is a bug in llmtailor: please report it; nothing was removed"
_WHY = {
    FolderKind.UNFINISHED: "unfinished save",
    FolderKind.ABANDONED: "abandoned attempt",
    FolderKind.STAGING: "left over from an interrupted merge",
}


def deletable(saves: Sequence[RunCheckpoint], ledger: Ledger, keep: int) -> list[int]:
    """Return the steps of the partial checkpoints that a run no longer needs, oldest first (see `needed`)."""
    return sorted({save.step for save in saves} - needed(saves, ledger, keep))


def needed(saves: Sequence[RunCheckpoint], ledger: Ledger, keep: int) -> set[int]:
    """Return the steps of the partial checkpoints that must stay; ``ledger`` is the running one, after its newest save.

    They are those that the newest ``keep`` composable steps need, including their own, and every holder of the newest
    state of a part, for future steps. Only steps of the run's own past count; while an abandoned attempt has newer
    ones, its newest ``keep`` stay as well. Partial checkpoints of other runs, and those that ``thin`` made, always
    stay.
    """
    if keep < 1:
        raise ValueError("keep must be 1 or more")
    present = present_of(ledger)
    kin = [save for save in saves if _is_kin(save, ledger)]
    complete = sorted((save for save in kin if is_complete(save, kin)), key=lambda save: save.step)
    own = [save for save in complete if present.builds_on(save)]
    stay = [save for save in saves if save.is_thinned or not _is_kin(save, ledger)]
    for save in (*_newest(complete, keep), *_newest(own, keep), present):
        stay += partial_needs(save, kin)
    return {save.step for save in stay}


def _newest(saves: Iterable[RunCheckpoint], keep: int) -> list[RunCheckpoint]:
    at = {save.step: save for save in saves}
    return [at[step] for step in sorted(at)[-keep:]]


def _is_kin(save: RunCheckpoint, ledger: Ledger) -> bool:
    """Return whether both build on the same complete base."""
    assert save.ledger is not None
    return not {save.ledger.lineage, *save.ledger.history}.isdisjoint({ledger.lineage, *ledger.history})


@dataclass(frozen=True, slots=True)
class Reachable:
    """The partial checkpoints of a run that stay, and the steps that they serve."""

    before: tuple[int, ...]
    """Composable steps now"""
    after: tuple[int, ...]
    """Composable steps afterwards; the same without ``keep``"""
    needed: frozenset[RunCheckpoint]
    """Partial checkpoints that must stay"""


def find_reachable(checkpoints: Sequence[RunCheckpoint], parts: Sequence[Part], keep: int | None) -> Reachable:
    """Decide which partial checkpoints stay: those that the newest ``keep`` composable steps need (None: all steps),
    and those that the newest ``keep`` steps composable from partial checkpoints alone need.

    Partial checkpoints newer than all of the latter also stay, with those they build on: a later save may complete
    them.
    """
    partial = [one for one in checkpoints if one.is_partial]
    before, alone = composable_steps(checkpoints, parts), composable_steps(partial, parts)
    promised, promised_alone = (steps[-keep:] if keep else steps for steps in (before, alone))
    newest = alone[-1] if alone else -1
    needed: set[RunCheckpoint] = set()
    for one in partial:
        if one.step in {*promised, *promised_alone} or one.step > newest:
            needed |= {one, *partial_needs(one, partial)}
    for there, steps in ((checkpoints, promised), (partial, promised_alone)):
        for step in steps:
            sources = sources_at(there, step, parts) or {}
            masters = newer_masters(usable_at(there, step), sources)
            needed |= {one for one in (*sources.values(), *masters.values()) if one.is_partial}
    left = [one for one in checkpoints if not one.is_partial or one in needed]
    _check_same(checkpoints, left, promised, parts)
    _check_same(partial, [one for one in partial if one in needed], promised_alone, parts)
    return Reachable(tuple(before), tuple(composable_steps(left, parts)), frozenset(needed))


def _check_same(
    before: Sequence[RunCheckpoint], after: Sequence[RunCheckpoint], promised: Iterable[int], parts: Sequence[Part]
) -> None:
    """Check, independently of the code that decided, that every promised step has the same sources as before."""

    def used(there: Sequence[RunCheckpoint], step: int) -> object:
        sources = sources_at(there, step, parts)
        return sources and (sources, newer_masters(usable_at(there, step), sources))

    changed = [step for step in promised if used(before, step) != used(after, step)]
    if changed:
        what = f"step {', '.join(map(str, changed))} would not be composed as before"
        raise VerificationError.at("gc", what, BUG)


@dataclass(frozen=True, slots=True)
class Age:
    """The oldest parts of the composite of a step."""

    steps_back: int
    """How many global steps earlier they were saved; 0 if all are of that step"""
    parts: tuple[Part, ...]
    """The oldest parts; empty if all are of that step"""
    only: str | None = None
    """``moments``: they alone are that old, and the masters of these parts are newer"""


@dataclass(frozen=True, slots=True)
class StepAge:
    """A step that stays composable."""

    step: int
    now: Age | None
    """None if it can't be composed now"""
    afterwards: Age


def compare_ages(
    before: Sequence[RunCheckpoint], after: Sequence[RunCheckpoint], steps: Iterable[int], parts: Sequence[Part]
) -> tuple[StepAge, ...]:
    """Return how old the parts of each step's composite are now and afterwards."""
    found = ((step, _age(before, step, parts), _age(after, step, parts)) for step in steps)
    return tuple(StepAge(step, now, afterwards) for step, now, afterwards in found if afterwards is not None)


def _age(checkpoints: Sequence[RunCheckpoint], step: int, parts: Sequence[Part]) -> Age | None:
    sources = sources_at(checkpoints, step, parts)
    if sources is None:
        return None
    back = {part: step - sources[part].step_of(part) for part in parts}
    most = max(0, *back.values())
    oldest = tuple(part for part in parts if most and back[part] == most)
    masters = {**sources, **newer_masters(usable_at(checkpoints, step), sources)}
    are_newer = oldest and all((masters[part].master_step_of(part) or 0) > step - most for part in oldest)
    return Age(most, oldest, ONLY_MOMENTS if are_newer else None)


@dataclass(frozen=True, slots=True)
class Removal:
    path: Path
    why: str
    step: int | None = None
    """For a partial checkpoint"""
    out: Path | None = None
    """For what a merge left: its output"""


@dataclass(frozen=True, slots=True)
class GcPlan:
    """What gc will remove. Nothing has been touched yet."""

    scan: Scan
    """Covers every attempt"""
    before: tuple[int, ...]
    """Composable steps now"""
    removals: tuple[Removal, ...]
    in_use: tuple[Path, ...]
    """Left alone, because another process is writing there"""
    left_alone: tuple[Problem, ...]
    """What can't be used, or must not be removed, and why"""
    ages: tuple[StepAge, ...]
    """For each step that stays composable"""
    freed: int
    """Bytes"""


def plan_gc(run: str | Path, keep: int | None, *, trust_unrecorded: bool = False) -> GcPlan:
    """Decide what to remove; with ``keep``, only that many of the newest composable steps stay composable.

    ``trust_unrecorded`` also counts full checkpoints that do not state their attempt.
    Raises SourceError if the newest checkpoint can't be used or no step can be composed.
    """
    run = Path(run).absolute()  # on this machine: it is changed in place
    scan = scan_run(run, every_chain=True, trust_unrecorded=trust_unrecorded)
    check_newest(scan)
    parts = scan.structure.parts
    reachable = find_reachable(scan.usable, parts, keep)
    if not reachable.after:
        what = "no step of this run can be composed, so nothing is removed"
        raise SourceError([Problem(display_name(run), what, "save a complete checkpoint first"), *scan.skipped])
    found, in_use = [], []
    for one in scan.partial:
        is_needed = one in reachable.needed
        logger.info("%s: %s", one.name, "needed" if is_needed else "no step needs it")
        found += [] if is_needed else [Removal(one.path, "no step needs it", one.step)]
    folder = RunFolder(run)
    found += [Removal(path, "left over from a killed thin") for path in folder.left_by_thin()]
    found += [Removal(one.path, _WHY[one.kind]) for one in folder.entries(FolderKind.UNFINISHED, FolderKind.ABANDONED)]
    for entry in folder.entries(FolderKind.STAGING):
        with left_over(entry.target) as is_unused:
            if is_unused:
                found.append(Removal(entry.path, _WHY[FolderKind.STAGING], out=entry.target))
            else:
                in_use.append(entry.path)
    obstacles = {removal: _obstacle(removal) for removal in found}
    removals = tuple(removal for removal in found if not obstacles[removal])
    kept = tuple(problem for problem in obstacles.values() if problem)
    freed = freed_bytes(path for removal in removals for path in files_in(removal.path))
    removed = {removal.path for removal in removals}
    rest = [one for one in scan.usable if one.path not in removed]
    ages = compare_ages(scan.usable, rest, composable_steps(rest, parts), parts)
    return GcPlan(scan, reachable.before, removals, tuple(in_use), (*scan.skipped, *kept), ages, freed)


def _obstacle(removal: Removal) -> Problem | None:
    """Return why a folder must not be removed, if so: it holds, or leads to, what llmtailor did not make."""
    name = display_name(removal.path)
    if removal.path.is_symlink():
        fix = "remove the link, and what it points to, if you don't need them"
        return Problem(name, f"{removal.why}, but it is a symbolic link, so it stays", fix)
    if removal.out is not None:
        return None
    try:
        unknown = survey_contents(removal.path).unknown
    except OSError as error:
        unknown = (f"an unreadable entry ({error.strerror})",)
    return Problem(name, f"it contains unknown files: {some(unknown)}", "move them elsewhere") if unknown else None


def collect(plan: GcPlan, notify: Callable[[Removal], None] = lambda removal: None) -> None:
    """Carry out a plan that was made inside `only_writer`; call ``notify`` after each removal.

    Raises StorageError. Nothing needed is removed at any point.
    """
    with mark_errors_as_late(plan.scan.run, "can't remove it", "check the permissions, then rerun the command"):
        for removal in plan.removals:
            if obstacle := _obstacle(removal):
                logger.info("did not touch %s: %s", removal.path, obstacle.what)
                continue
            with left_over(removal.out) if removal.out else nullcontext(True) as is_unused:
                if not is_unused:
                    logger.info("did not touch %s: another process is now writing there", removal.path)
                    continue
                if removal.step is not None:
                    remove_partial(removal.path)
                else:
                    shutil.rmtree(removal.path)
            logger.info("removed %s: %s", removal.path, removal.why)
            notify(removal)
