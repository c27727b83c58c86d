"""Removes from a run's folder what nothing needs any more: partial checkpoints, and what was never finished."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmtailor.checkpoint.lineage import SaveRecord
from llmtailor.engine.staging import left_over
from llmtailor.errors import Problem, SourceError, some
from llmtailor.formats.known_files import survey_contents
from llmtailor.formats.partial.manifest import FOLDER, read_manifest
from llmtailor.formats.partial.read import is_partial
from llmtailor.formats.registry import display_name
from llmtailor.recipe.candidates import composable_steps
from llmtailor.runs.folder import ABANDONED, Folder
from llmtailor.runs.guard import carrying_out, check_newest
from llmtailor.runs.places import files_in, freed_bytes, left_behind
from llmtailor.runs.retention import Needs, find_needs
from llmtailor.runs.scan import Scan, scan_run
from llmtailor.runs.to_weights import StepAge, compare_ages

logger = logging.getLogger(__name__)
_SAVE = re.compile(r"step-\d{8,}")
_GIVEN_UP = re.compile(rf"step-\d{{8,}}{re.escape(ABANDONED)}(-\d+)?")
_STAGING = re.compile(r"\.(.+)\.llmtailor-staging")


@dataclass(frozen=True, slots=True)
class Removal:
    """A folder that goes."""

    path: Path
    why: str
    step: int | None = None
    """Of a partial checkpoint"""


@dataclass(frozen=True, slots=True)
class GcPlan:
    """Everything is decided, nothing is touched."""

    run: Path
    scan: Scan
    """Of every attempt"""
    needs: Needs
    removals: tuple[Removal, ...]
    in_use: tuple[Path, ...]
    """Left alone: another process is writing there"""
    left_alone: tuple[Problem, ...]
    """What can't be used, or must not be removed, and why"""
    ages: tuple[StepAge, ...]
    """Of each step that stays composable"""
    freed: int


def plan_gc(run: Path, keep: int | None) -> GcPlan:
    """Decide what goes; with ``keep`` only the newest so many composable steps stay composable.

    Raises SourceError if the newest checkpoint can't be used, or no step can be composed.
    """
    run = Path(run).absolute()
    scan = scan_run(run, every_chain=True)
    check_newest(scan)
    partial = [one for one in scan.usable if one.is_partial]
    records = {one: SaveRecord.from_json(read_manifest(one.path, one.name).ledger, one.name) for one in partial}
    needs = find_needs(scan.usable, records, scan.anatomy.parts, keep)
    if not needs.kept:
        what = "no step of this run can be composed, so nothing is removed"
        raise SourceError([Problem(display_name(run), what, "save a complete checkpoint first"), *scan.skipped])
    for one in partial:
        logger.info("%s: %s", one.name, "needed" if one in needs.needed else "no step needs it")
    unneeded = [Removal(one.path, "no step needs it", one.step) for one in partial if one not in needs.needed]
    left, in_use = _leftovers(run)
    found = {removal: _unknown(removal.path) for removal in (*unneeded, *left)}
    removals = tuple(removal for removal, unknown in found.items() if not unknown)
    kept = [
        Problem(display_name(removal.path), f"it holds what no save has written: {some(unknown)}", "move that away")
        for removal, unknown in found.items()
        if unknown
    ]
    freed = freed_bytes(path for removal in removals for path in files_in(removal.path))
    gone = {removal.path for removal in removals}
    rest = [one for one in scan.usable if one.path not in gone]
    ages = compare_ages(scan.usable, rest, composable_steps(rest, scan.anatomy.parts), scan.anatomy.parts)
    return GcPlan(run, scan, needs, removals, tuple(in_use), (*scan.skipped, *kept), ages, freed)


def _unknown(folder: Path) -> tuple[str, ...]:
    if _STAGING.fullmatch(folder.name):
        return ()
    try:
        return survey_contents(folder).unknown
    except OSError as error:
        return (f"something that can't be read ({error.strerror})",)


def collect(plan: GcPlan, tell: Callable[[Removal], None] = lambda removal: None) -> None:
    """Carry out a plan that was made inside `watch.only_writer`. Raises StorageError; nothing needed is ever gone."""
    folder = Folder(plan.run)
    with carrying_out(plan.run, "can't remove it", "check the permissions; run this again"):
        for removal in plan.removals:
            if unknown := _unknown(removal.path):
                logger.info("left %s alone: %s appeared there", removal.path, some(unknown))
                continue
            if removal.step is not None:
                folder.remove(removal.step)
            elif _STAGING.fullmatch(removal.path.name):
                with left_over(_output_of(removal.path)) as is_unused:
                    if not is_unused:
                        logger.info("left %s alone: another process is writing there now", removal.path)
                        continue
                    shutil.rmtree(removal.path)
            else:
                shutil.rmtree(removal.path)
            logger.info("removed %s: %s", removal.path, removal.why)
            tell(removal)


def _leftovers(run: Path) -> tuple[list[Removal], list[Path]]:
    """Return what was never finished, and what looks so but is in use."""
    found = [Removal(path, "left by a thinning that was killed") for path in left_behind(run)]
    in_use = []
    for path in sorted((run / FOLDER).iterdir()) if (run / FOLDER).is_dir() else ():
        if path.is_dir() and _SAVE.fullmatch(path.name) and not is_partial(path):
            found.append(Removal(path, "a save that did not finish"))
        elif path.is_dir() and _GIVEN_UP.fullmatch(path.name):
            found.append(Removal(path, "of an attempt that was given up"))
    for path in sorted(run.iterdir()):
        if path.is_dir() and _STAGING.fullmatch(path.name):
            with left_over(_output_of(path)) as is_unused:
                if is_unused:
                    found.append(Removal(path, "left by a merge that was interrupted"))
                else:
                    in_use.append(path)
    return found, in_use


def _output_of(staging: Path) -> Path:
    match = _STAGING.fullmatch(staging.name)
    assert match
    return staging.with_name(match[1])
