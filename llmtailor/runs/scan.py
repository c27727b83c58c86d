"""From a run's folder to a recipe: which checkpoints can be used, and what each part should come from."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.lineage import Past, SaveRecord
from llmtailor.codes import Code
from llmtailor.compose.checks import differences
from llmtailor.errors import Problem, Problems, SourceError, TailorError
from llmtailor.formats.partial.manifest import read_manifest
from llmtailor.formats.registry import absent_parts, display_name, dissect_checkpoint, index_checkpoint
from llmtailor.formats.trainer import TRAINER_STATE
from llmtailor.model.parts import Anatomy
from llmtailor.recipe.candidates import Assignment, RunCheckpoint
from llmtailor.recipe.emit import write_recipe
from llmtailor.recipe.recipe import Recipe
from llmtailor.recipe.strategies import StrategyOptions, assign
from llmtailor.recipe.text import condense
from llmtailor.recipe.update_log import assign_flags, read_flags
from llmtailor.runs.judge import Judge, list_all

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Scan:
    """What a run's folder offers up to some step."""

    run: Path
    usable: tuple[RunCheckpoint, ...]
    """Oldest first; all of one model and one layout, that of the newest."""
    refused: Mapping[Path, tuple[Problem, ...]]
    """Why the others can't be used."""
    anatomy: Anatomy
    indexes: Mapping[Path, CheckpointIndex]
    """Of the usable ones, by folder"""

    @property
    def given_up(self) -> frozenset[Path]:
        """Those of attempts that the run does not continue"""
        codes = {folder: {problem.code for problem in problems} for folder, problems in self.refused.items()}
        return frozenset(folder for folder, found in codes.items() if Code.GIVEN_UP in found)

    @property
    def skipped(self) -> tuple[Problem, ...]:
        """Why the others can't be used, all together"""
        return tuple(problem for problems in self.refused.values() for problem in problems)


@dataclass(frozen=True, slots=True)
class UpdateLog:
    """LLMTailor's log of which parts were saved at which step, and what it is to be held against."""

    text: str
    name: str
    base: Path | None = None
    """The checkpoint that holds every part, for parts that the log does not name."""
    total_layers: int | None = None


def scan_run(
    run: Path,
    at: int | None = None,
    also: Path | None = None,
    *,
    only_newest: bool = False,
    every_chain: bool = False,
    trust_unrecorded: bool = False,
) -> Scan:
    """Index the checkpoints of a run's folder, full and partial, up to step ``at``; and ``also``, if it lies elsewhere.

    Incomplete or damaged checkpoints, those of another model or layout than the newest good one, and those that do not
    belong to the run's present attempt are skipped with the reason. So are, unless ``every_chain``, partial ones that
    the newest partial one does not build on. Full checkpoints that do not say which attempt they are of are used if
    ``trust_unrecorded``. With ``only_newest`` the scan ends, going backwards, where the newest state of every part is
    found. Raises SourceError if nothing is left.
    """
    folders = find_checkpoints(run, at)
    judge = Judge.of(run, at, trust_unrecorded)
    if also is not None and also not in [folder for _, folder in folders]:
        folders.append((-1, also))
    refused: dict[Path, tuple[Problem, ...]] = {}
    good: list[tuple[RunCheckpoint, CheckpointIndex]] = []
    anatomy: Anatomy | None = None
    past: Past | None = None
    newest: dict[str, int] = {}
    for number, folder in folders:
        if only_newest and anatomy and all(newest.get(part, -1) >= number for part in anatomy.parts):
            logger.info("looked no further back than %s: every part is found", display_name(good[-1][0].path))
            break
        foreign = judge.why_not(folder, number) if folder != also else None
        if foreign is not None and foreign.code is Code.GIVEN_UP:
            refused[folder] = (foreign,)
            logger.info("skipped %s: %s", foreign.where, foreign.what)
            continue
        try:
            index = index_checkpoint(folder)
            mine = past_of(index)
        except SourceError as error:  # not that there was no answer
            refused[folder] = error.problems
            logger.info("skipped %s: %s", error.problems[0].where, error.problems[0].what)
            continue
        reason = foreign or why_not(number, index, good[0][1] if good else None)
        if reason is None and not every_chain and past and mine and not past.includes(mine):
            reason = of_another_chain(index.name)
        if reason is not None:
            refused[folder] = (reason,)
            logger.info("skipped %s: %s", index.name, reason.what)
            continue
        if anatomy is None:
            anatomy = dissect_checkpoint(index)
        past = past or mine
        checkpoint = describe_checkpoint(index, anatomy)
        held = {part: checkpoint.step_of(part) for part in anatomy.parts if checkpoint.holds(part)}
        newest |= {part: max(step, newest.get(part, -1)) for part, step in held.items()}
        good.append((checkpoint, index))
    if anatomy is None:
        raise _nothing_usable(run, at, [problem for problems in refused.values() for problem in problems])
    good.sort(key=lambda pair: pair[0].step)
    usable = tuple(checkpoint for checkpoint, _ in good)
    return Scan(run, usable, refused, anatomy, {index.root: index for _, index in good})


def past_of(index: CheckpointIndex) -> Past | None:
    """Return the past that a partial checkpoint tells of; None for a full one. Raises SourceError."""
    if not index.is_partial:
        return None
    record = SaveRecord.from_json(read_manifest(index.root, index.name).ledger, index.name)
    return Past(index.global_step, record.lineage, record.history)


def describe_checkpoint(index: CheckpointIndex, anatomy: Anatomy) -> RunCheckpoint:
    """Say what a checkpoint can give to composites; it holds the parts of which nothing is absent."""
    absent = absent_parts(index, anatomy)
    parts = frozenset(anatomy.parts) - absent if absent else None
    resumable = TRAINER_STATE in index.files
    return RunCheckpoint(index.root, index.global_step, parts, resumable, past_of(index), index.part_steps)


def recipe_for_run(
    run: Path,
    at: int | None,
    how: StrategyOptions | UpdateLog,
    folder: Path | None = None,
    *,
    trust_unrecorded: bool = False,
) -> Recipe:
    """Choose a recipe for a run's folder, by a strategy or by LLMTailor's update log.

    Nothing later than step ``at`` is used. Paths in its text are relative to ``folder`` where that is close by.
    Raises RecipeError or SourceError with every problem found.
    """
    name, run = f"the recipe for {run}", Path(os.path.abspath(run))
    if isinstance(how, StrategyOptions):
        is_latest = how.strategy == "latest"
        scan = scan_run(run, at, only_newest=is_latest, trust_unrecorded=trust_unrecorded)
        assignment = assign(scan.usable, scan.anatomy, how)
    else:
        problems = Problems()
        lines = None
        try:
            lines = read_flags(how.text, how.name)
        except TailorError as error:
            problems.add(error)
        base = how.base.absolute() if how.base else None
        scan = scan_run(run, at, also=base, trust_unrecorded=trust_unrecorded)
        found = next((checkpoint for checkpoint in scan.usable if checkpoint.path == base), None)
        if base is not None and found is None:
            reason = scan.refused.get(base, ())
            fix = "name another base, or mend it"
            problems.add(SourceError(reason or [Problem("--base", f"{base} is later than step {at}", fix)]))
        problems.raise_if_any()
        assert lines is not None
        step = at if at is not None else scan.usable[-1].step
        assignment = assign_flags(lines, step, found, scan.usable, scan.anatomy, how.total_layers, how.name)
    _log_choice(assignment)
    text = write_recipe(assignment, scan.anatomy, folder, _header(scan, assignment))
    return Recipe.of(assignment, name, text, scan.skipped)


def _log_choice(assignment: Assignment) -> None:
    parts: dict[tuple[str, str], list[str]] = {}
    for part, source in assignment.source_of.items():
        parts.setdefault((source.name, assignment.reason[part]), []).append(part)
    for (name, reason), chosen in parts.items():
        logger.info("%s from %s: %s", condense(chosen), name, reason)


def find_checkpoints(run: Path, at: int | None) -> list[tuple[int, Path]]:
    """Return the run's checkpoints, full and partial, with their steps, newest first; of one step the full one first.

    Raises SourceError if there is none at or before step ``at``.
    """
    found = list_all(run)
    if not found:
        fix = "name the folder that holds checkpoint-N, or partial/"
        raise SourceError.at(display_name(run), "there is no checkpoint-N in this folder", fix)
    wanted = [(number, path) for number, path in found if at is None or number <= at]
    if not wanted:
        what = f"there is no checkpoint at or before step {at}; the first is {found[-1][0]}"
        raise SourceError.at(display_name(run), what, "give a later step")
    return wanted


def why_not(number: int, index: CheckpointIndex, newest: CheckpointIndex | None) -> Problem | None:
    """Say why a checkpoint is no source beside the newest good one, or None; ``number`` is the step in its name."""
    if number >= 0 and number != index.global_step:
        what = f"the folder says step {number}, its content is of step {index.global_step}"
        return Problem(index.name, what, "rename the folder, or name it in a recipe by hand")
    unlike = differences(index, newest) if newest else []
    return unlike[0] if unlike else None


def of_another_chain(name: str) -> Problem:
    """Say of a partial checkpoint that the newest one does not build on it."""
    what = "it is of other saves than the newest partial checkpoint builds on"
    return Problem(name, what, "to use it all the same, name it in a recipe")


def _nothing_usable(run: Path, at: int | None, skipped: Sequence[Problem]) -> SourceError:
    until = f" at or before step {at}" if at is not None else ""
    head = Problem(display_name(run), f"no checkpoint{until} can be used", "mend one of those named here")
    return SourceError([head, *skipped])


def _header(scan: Scan, assignment: Assignment) -> list[str]:
    steps = ", ".join(f"{one.step}{' (partial)' if one.parts is not None else ''}" for one in scan.usable)
    lines = [f"{assignment.title}, from {display_name(scan.run)}", f"usable checkpoints: {steps}"]
    return lines + [f"skipped: {problem.where}: {problem.what}" for problem in scan.skipped]
