"""Removes what a run no longer needs: partial checkpoints that no step uses, and unfinished or abandoned folders."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from llmtailor.checkpoint.lineage import composable_steps
from llmtailor.copying.staging import left_over
from llmtailor.errors import Problem, SourceError, some
from llmtailor.formats.registry import display_name
from llmtailor.frameworks.framework import survey_contents
from llmtailor.runs.folder import FolderKind, RunFolder, files_in, freed_bytes, remove_partial
from llmtailor.runs.guards import mark_errors_as_late
from llmtailor.runs.retention import StepAge, compare_ages, find_reachable
from llmtailor.runs.scan import Scan, check_newest, scan_run

logger = logging.getLogger(__name__)
_WHY = {
    FolderKind.UNFINISHED: "unfinished save",
    FolderKind.ABANDONED: "abandoned attempt",
    FolderKind.STAGING: "left over from an interrupted merge",
}


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
    candidates, in_use = [], []
    for checkpoint in scan.partial:
        is_needed = checkpoint in reachable.needed
        logger.info("%s: %s", checkpoint.name, "needed" if is_needed else "no step needs it")
        candidates += [] if is_needed else [Removal(checkpoint.path, "no step needs it", checkpoint.step)]
    folder = RunFolder(run)
    candidates += [Removal(path, "left over from a killed thin") for path in folder.left_by_thin()]
    unfinished = folder.entries(FolderKind.UNFINISHED, FolderKind.ABANDONED)
    candidates += [Removal(entry.path, _WHY[entry.kind]) for entry in unfinished]
    for entry in folder.entries(FolderKind.STAGING):
        with left_over(entry.target) as is_unused:
            if is_unused:
                candidates.append(Removal(entry.path, _WHY[FolderKind.STAGING], out=entry.target))
            else:
                in_use.append(entry.path)
    obstacles = {removal: _obstacle(removal) for removal in candidates}
    removals = tuple(removal for removal in candidates if not obstacles[removal])
    must_stay = tuple(problem for problem in obstacles.values() if problem)
    freed = freed_bytes(path for removal in removals for path in files_in(removal.path))
    removed = {removal.path for removal in removals}
    remaining = [checkpoint for checkpoint in scan.usable if checkpoint.path not in removed]
    ages = compare_ages(scan.usable, remaining, composable_steps(remaining, parts), parts)
    return GcPlan(scan, reachable.before, removals, tuple(in_use), (*scan.skipped, *must_stay), ages, freed)


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
