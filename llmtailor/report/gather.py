"""Reads a run for a report. Nothing in its folder can stop this: an unreadable file becomes a problem to show."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from llmtailor.checkpoint.index import CheckpointIndex, Survey
from llmtailor.codes import Code
from llmtailor.compose.plan import Options, plan_merge
from llmtailor.compose.report import Report
from llmtailor.compose.resume import choose_output
from llmtailor.errors import Interrupted, Problem, SourceError, TailorError
from llmtailor.formats.registry import display_name, survey_checkpoint
from llmtailor.model.parts import Part
from llmtailor.recipe.strategies import StrategyOptions
from llmtailor.runs.attempts import AttemptFilter
from llmtailor.runs.choose import choose_for_run
from llmtailor.runs.folder import FolderKind, RunFolder, log_entries
from llmtailor.runs.save_log import ABANDONED_LOG, LOG, SaveLog, read_log
from llmtailor.runs.scan import Scan, scan_run
from llmtailor.storage.local import absolute
from llmtailor.verify.diff import Compared, diff_parts
from llmtailor.verify.verify import Verdict, refused, verify_surveyed

logger = logging.getLogger(__name__)
T = TypeVar("T")
NEWEST = 3
"""Checkpoints that are verified, besides the sources of the composite"""
_VERIFIED = 12
"""The most that are verified"""


@dataclass(frozen=True, slots=True)
class Attempt:
    resumed_at: int
    started: str
    """ISO 8601, from the record"""


@dataclass(frozen=True, slots=True)
class LossCurve:
    """The losses that a ``trainer_state.json`` logs."""

    source: str
    train: tuple[tuple[int, float], ...]
    """(step, loss), by step"""
    evaluation: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Checked:
    verdict: Verdict
    foreign: Code | None
    """Why commands that choose checkpoints skip it, whatever the verdict: see `runs.attempts.AttemptFilter`"""


@dataclass(frozen=True, slots=True)
class PartChange:
    """The difference between the newest two saved states of a part."""

    part: Part
    steps: tuple[int, int]
    """At which the two were saved"""
    states: tuple[Compared, ...]


@dataclass
class RunFacts:
    run: str
    made: datetime
    log: SaveLog = field(default_factory=SaveLog)
    abandoned: SaveLog = field(default_factory=SaveLog)
    attempts: tuple[Attempt, ...] = ()
    folders: tuple[tuple[str, str, int], ...] = ()
    """Name, kind and step of what is in the folder, the newest first"""
    report: Report | None = None
    """What ``merge --run`` would compose now"""
    there: str | None = None
    """The complete checkpoint that makes a merge unnecessary, if any"""
    not_composed: tuple[Problem, ...] = ()
    """Why nothing can be composed"""
    checked: tuple[Checked, ...] = ()
    losses: LossCurve | None = None
    changes: tuple[PartChange, ...] | None = None
    """None if the values were not to be read"""
    problems: list[Problem] = field(default_factory=list)
    """What could not be read"""


def gather(
    run: Path, with_values: bool = False, on_progress: Callable[[int], None] = lambda num_bytes: None
) -> RunFacts:
    """Read the records of a run and the headers of its checkpoints; ``with_values`` also compares tensors.

    Raises SourceError if the folder does not exist, and Interrupted.
    """
    run = absolute(run)  # as the sources of a composite are named
    folder = RunFolder(run)
    folder.full()
    survey = cache(survey_checkpoint)  # each checkpoint is read once for all that follows

    def index(path: Path) -> CheckpointIndex:
        return survey(path).sound_index()

    facts = RunFacts(display_name(run), datetime.now(timezone.utc))
    partial = f"{facts.run}/{folder.partial.name}"
    with _noting(facts, f"{partial}/{LOG}"):
        facts.log = read_log(folder.partial / LOG)
        facts.abandoned = read_log(folder.partial / ABANDONED_LOG)
    with _noting(facts, partial):
        facts.attempts = tuple(Attempt(past.step, started) for past, started in folder.starts())
    with _noting(facts, facts.run):
        facts.folders = tuple(
            (entry.path.name, entry.kind.value, entry.step)
            for entry in sorted(folder.entries(*FolderKind), key=lambda entry: -entry.step)
        )
        facts.losses = _losses(folder)
    sources: list[Path] = []
    with _noting(facts, facts.run):
        sources = _compose(run, facts, index)
    with _noting(facts, facts.run):
        facts.checked = tuple(_check(folder, sources, facts, survey)) if facts.folders else ()
    if with_values:
        facts.changes = ()
    if with_values and facts.report is not None:
        with _noting(facts, facts.run):
            facts.changes = tuple(_changes(scan_run(run, index=index), on_progress))
    return facts


@contextmanager
def _noting(facts: RunFacts, where: str) -> Any:
    """Note why something can't be read, and continue."""
    try:
        yield
    except Interrupted:
        raise
    except TailorError as error:
        facts.problems += error.problems
    except OSError as error:
        facts.problems.append(Problem(where, f"it can't be read: {error.strerror}", "check the disk and permissions"))


def _compose(run: Path, facts: RunFacts, index: Callable[[Path], CheckpointIndex]) -> list[Path]:
    """Plan the output of ``merge --run``, and return its sources."""
    try:
        recipe, opened = choose_for_run(run, None, StrategyOptions("latest"), index=index)
        composition, there = choose_output(plan_merge(recipe, None, Options(reuse=True, step="auto"), opened))
    except Interrupted:
        raise
    except TailorError as error:
        facts.not_composed = error.problems
        return []
    facts.report, facts.there = composition.report, there
    return [index.root for index in composition.indexes]


def _verify(path: Path, survey: Callable[[Path], Survey]) -> Verdict:
    try:
        return verify_surveyed(survey(path), path)
    except SourceError as error:  # not a checkpoint, or of an unsupported kind
        return refused(path, False, error)


def _check(
    folder: RunFolder, sources: Sequence[Path], facts: RunFacts, survey: Callable[[Path], Survey]
) -> Iterator[Checked]:
    judge = None
    with suppress(SourceError):  # a damaged record of attempts, which is among the problems already
        judge = AttemptFilter.of(folder, None)
    steps = {path: step for step, path in folder.checkpoints()}
    newest = [*steps][:NEWEST]
    for path in [*dict.fromkeys([*newest, *sources])][:_VERIFIED]:
        foreign = judge.why_not(path, steps[path]) if judge and path in steps else None
        with _noting(facts, display_name(path)):  # transformers may not answer
            yield Checked(_verify(path, survey), foreign.code if foreign else None)


def _losses(folder: RunFolder) -> LossCurve | None:
    for _, path in folder.checkpoints():
        with suppress(SourceError):
            if (read := read_losses(path)).train:
                return read
    return None


def read_losses(checkpoint: Path) -> LossCurve:
    """Return the losses in the ``trainer_state.json`` of a checkpoint. Raises SourceError if it can't be read."""
    name = display_name(checkpoint)
    entries = log_entries(checkpoint, name)
    return LossCurve(name, _series(entries, "loss"), _series(entries, "eval_loss"))


def _series(entries: Sequence[Mapping[str, Any]], key: str) -> tuple[tuple[int, float], ...]:
    series = {}
    for entry in entries:
        step: Any = entry.get("step")
        value: Any = entry.get(key)
        if type(step) is not int or not 0 <= step < 1 << 53 or type(value) is bool:
            continue
        if isinstance(value, (int, float)) and math.isfinite(value) and abs(value) < 1e300:
            series[step] = float(value)
    return tuple(sorted(series.items()))


def _changes(scan: Scan, on_progress: Callable[[int], None]) -> list[PartChange]:
    """Compare the newest two states of each part; parts between the same two checkpoints are read together."""
    pairs: dict[tuple[Path, Path], list[tuple[Part, tuple[int, int]]]] = {}
    for part in scan.structure.parts:
        # not those whose masters are newer than their moments: they are of no one step
        holding = [checkpoint for checkpoint in scan.usable if checkpoint.holds(part)]
        steps = {checkpoint.path: checkpoint.step_of(part) for checkpoint in holding}
        path_of = {steps[each.path]: each.path for each in holding if each.master_step_of(part) == steps[each.path]}
        if len(path_of) > 1:
            before, newest = sorted(path_of)[-2:]
            pairs.setdefault((path_of[before], path_of[newest]), []).append((part, (before, newest)))
    changes = []
    for (before_path, newest_path), parts in pairs.items():
        a, b = scan.indexes[before_path], scan.indexes[newest_path]
        logger.info("comparing %d parts of %s and %s", len(parts), a.name, b.name)
        compared = diff_parts(a, b, [part for part, _ in parts], on_progress)
        changes += [
            PartChange(part, steps, states)
            for part, steps in parts
            if (states := tuple(compared for compared in compared if compared.part == part))
        ]
    order = {part: number for number, part in enumerate(scan.structure.parts)}
    return sorted(changes, key=lambda change: order[change.part])
