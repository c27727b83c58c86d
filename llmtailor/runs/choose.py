"""Chooses a recipe for a run's folder: which checkpoint each part of a step comes from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from llmtailor.checkpoint.lineage import best_holders, composable_steps, newest_resumable
from llmtailor.compose.plan import OpenedSources
from llmtailor.compose.report import total_setback
from llmtailor.errors import Problem, Problems, SourceError, TailorError, about
from llmtailor.findings import folded
from llmtailor.formats.registry import display_name, index_checkpoint, output_in
from llmtailor.frameworks.files import FOLDER
from llmtailor.model.parts import condense
from llmtailor.recipe import Assignment, Recipe
from llmtailor.recipe.emit import write_recipe
from llmtailor.recipe.strategies import FlagLine, StrategyOptions, assign, assign_flags, read_flags
from llmtailor.runs.folder import RunFolder
from llmtailor.runs.scan import Index, Scan, scan_run
from llmtailor.storage.local import absolute

logger = logging.getLogger(__name__)
_SHOWN = 3
"""Of many steps, so many of the first and of the last are listed."""


@dataclass(frozen=True, slots=True)
class UpdateLog:
    """LLMTailor's log of which parts were saved at which step, and what to check it against."""

    text: str
    name: str
    base: Path | None = None
    """A checkpoint that holds every part, for parts that the log does not name"""
    total_layers: int | None = None


def choose_for_run(
    run: Path,
    at: int | None,
    how: StrategyOptions | UpdateLog,
    folder: Path | None = None,
    *,
    also: Sequence[Path] = (),
    trust_unrecorded: bool = False,
    index: Index = index_checkpoint,
) -> tuple[Recipe, OpenedSources]:
    """Choose a recipe for a run's folder by a strategy or LLMTailor's update log; return it with its sources.

    Nothing later than step ``at`` is used. ``also`` are staging folders, see `RunFolder`. Paths in its text are
    relative to ``folder`` where it is close by. ``index`` is that of `scan_run`. Raises RecipeError or SourceError with
    every problem found.
    """
    name, run, also = f"the recipe for {run}", absolute(run), [absolute(staging) for staging in also]
    if isinstance(how, StrategyOptions):
        scan_all = partial(scan_run, run, also=also, trust_unrecorded=trust_unrecorded, index=index)
        steps = [step for step, _ in RunFolder(run, also).checkpoints()]
        if at is not None and steps and at < steps[-1]:
            what = f"there is no checkpoint at or before step {at}; the first is {steps[-1]}"
            raise _not_composable(scan_all(), what)
        scan = scan_all(at, only_newest=how.strategy == "latest")
        _check_complete(scan, at, scan_all)
        assignment = assign(scan.usable, scan.structure, how)
    else:
        problems = Problems()
        lines: tuple[FlagLine, ...] = ()
        try:
            lines = read_flags(how.text, how.name)
        except TailorError as error:
            problems.add(error)
        base = how.base.absolute() if how.base else None
        scan = scan_run(run, at, base, also=also, trust_unrecorded=trust_unrecorded, index=index)
        base_checkpoint = next((checkpoint for checkpoint in scan.usable if checkpoint.path == base), None)
        if base is not None and base_checkpoint is None:
            reason = scan.refused.get(base, ())
            fix = "name another base, or fix it"
            problems.add(SourceError(reason or [Problem("--base", f"{base} is later than step {at}", fix)]))
        problems.raise_if_any()
        step = at if at is not None else scan.usable[-1].step
        assignment = assign_flags(
            lines,
            scan.usable,
            scan.structure,
            failure_step=step,
            base=base_checkpoint,
            total_layers=how.total_layers,
            name=how.name,
        )
    _log_choice(assignment)
    output, base_path = None, assignment.base.path
    if base_path.parent in [staging / FOLDER for staging in also]:  # by default, it would be written there
        output = output_in(run, assignment.base.step)
    text = write_recipe(assignment, scan.structure, folder, _header(scan, assignment), output)
    recipe = Recipe.of(assignment, name, text, scan.skipped, output)
    return recipe, OpenedSources(indexes={root: scan.indexes[root] for root in recipe.sources()}, others=scan.indexes)


def _check_complete(scan: Scan, at: int | None, scan_all: Callable[[], Scan]) -> None:
    """Raise SourceError if a scan up to step ``at`` found no complete state; ``scan_all`` is one of the whole run."""
    parts = scan.structure.parts
    holders = best_holders(scan.usable, parts)
    until = f" at or before step {at}" if at is not None else ""
    if missing := [part for part in parts if part not in holders]:
        raise _not_composable(scan_all(), f"no usable checkpoint{until} holds {condense(missing)}")
    if newest_resumable(scan.usable) is None:
        what = f"no usable checkpoint{until} has the schedule and the trainer state, which a resume needs"
        raise _not_composable(scan_all(), what)


def _not_composable(scan: Scan, what: str) -> SourceError:
    """Return the error for a step of a run, with the steps that can be composed."""
    where, steps = display_name(scan.run), composable_steps(scan.usable, scan.structure.parts)
    if not steps:
        fix = "no step of this run can be composed: copy back what was deleted, or use another run"
        return SourceError([Problem(where, what, fix), *scan.skipped])
    shown = list(map(str, steps))
    shown = [*shown[:_SHOWN], "...", *shown[-_SHOWN:]] if len(shown) > 2 * _SHOWN else shown
    return SourceError.at(where, what, f"use --at with a step that can be composed: {', '.join(shown)}; or omit it")


def _log_choice(assignment: Assignment) -> None:
    parts: dict[tuple[str, str], list[str]] = {}
    for part, source in assignment.source_of.items():
        parts.setdefault((source.name, assignment.reason[part]), []).append(part)
    for (name, reason), chosen in parts.items():
        logger.info("%s from %s: %s", condense(chosen), name, reason)


def _header(scan: Scan, assignment: Assignment) -> list[str]:
    steps = ", ".join(f"{source.step}{' (partial)' if source.parts is not None else ''}" for source in scan.usable)
    lines = [f"{assignment.title}, from {display_name(scan.run)}", f"usable checkpoints: {steps}"]
    base = scan.indexes[assignment.base.path]
    parts = assignment.source_of.items()
    setback = total_setback(base.setback_with(part, source.step_of(part)) for part, source in parts)
    if setback is not None:
        lines.append(f"estimated setback by stale parts: {about(setback)} steps")
    return lines + [f"skipped: {problem.where}: {problem.what}" for problem in folded(scan.skipped)]
