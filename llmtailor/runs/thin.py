"""Thins out a run's folder: older full checkpoints become partial ones or keep only their weights.

Each is replaced separately, oldest first, and only once its replacement has been written, read back and published. The
command can be interrupted at any point; rerunning it resumes.

The last check before each removal is that ``merge`` can compose the step from what stays.
"""

from __future__ import annotations

import logging
import shutil
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from llmtailor.checkpoint.lineage import (
    THINNED,
    RunCheckpoint,
    composable_steps,
    newest_resumable,
    sources_at,
    usable_at,
)
from llmtailor.compose.plan import plan_merge
from llmtailor.engine.copy import Moved
from llmtailor.engine.moving import Clone
from llmtailor.engine.pool import stoppable
from llmtailor.errors import Problem, TailorError, Unanswered, VerificationError
from llmtailor.formats.partial.manifest import read_manifest
from llmtailor.formats.partial.write import trained_states
from llmtailor.formats.registry import find_structure, index_checkpoint
from llmtailor.model.parts import ModelStructure
from llmtailor.recipe import Assignment, Recipe
from llmtailor.runs.folder import RunFolder, carrying_out, files_in, freed_bytes, remove_partial, remove_replaced
from llmtailor.runs.gc import StepAge, compare_ages
from llmtailor.runs.pruning import (
    PARTIAL,
    WEIGHTS,
    Chooser,
    FullFacts,
    PruneAction,
    Pruner,
    ThinOptions,
    read_facts,
    read_thinned,
)
from llmtailor.runs.scan import Scan, check_newest, describe_checkpoint, scan_run
from llmtailor.runs.to_partial import check_same, check_unchanged, compared, plan_conversion, write_conversion
from llmtailor.runs.to_weights import freed_by_reduction, plan_weights, reduce_to_weights

logger = logging.getLogger(__name__)
_FIX = "this is a bug in llmtailor: please report it; nothing was removed"


@dataclass(frozen=True, slots=True)
class ThinPlan:
    """What thinning will do. Nothing has been touched yet."""

    options: ThinOptions
    scan: Scan
    """Covers every attempt"""
    actions: tuple[PruneAction, ...]
    """One for each full checkpoint, oldest first"""
    before: tuple[int, ...]
    """Composable steps now"""
    left_behind: tuple[Path, ...]
    """What a killed ``thin`` left; also removed"""
    freed: int
    """Bytes"""
    ages: tuple[StepAge, ...]
    """For each step that stays composable"""


def plan_thinning(run: Path, options: ThinOptions, *, trust_unrecorded: bool = False) -> ThinPlan:
    """Decide how to thin out a run's checkpoints, and compute the bytes freed; no tensor is read.

    ``trust_unrecorded`` also thins out full checkpoints that do not state their attempt.

    Raises SourceError if the newest checkpoint can't be used or no complete state would be left, and UsageError for an
    invalid strategy or selectors.
    """
    run = Path(run).absolute()
    folder, scan = RunFolder(run), scan_run(run, every_chain=True, trust_unrecorded=trust_unrecorded)
    newest = scan.indexes[check_newest(scan)]
    structure, indexes = find_structure(newest), scan.indexes  # what is made here holds whole layers
    trained = {structure.part_of[param] for param in trained_states(newest)}
    parts = [part for part in structure.parts if part in trained]
    chooser = None if options.weights_only else Chooser.of(options, structure, parts)

    @cache
    def facts_of(one: RunCheckpoint) -> FullFacts:
        return read_facts(indexes[one.path], structure, folder.at(one.step), indexes, weights_only=chooser is None)

    pruner = Pruner(
        checkpoints=scan.usable,
        parts=scan.structure.parts,
        keep_full=options.keep_full,
        facts=facts_of,
        chooser=chooser,
        thinned=read_thinned(scan.usable),
        new_lineage=lambda: THINNED + uuid.uuid4().hex[:12],
        path_of=folder.at,
    )
    actions = _measure(pruner.decide(), scan, chooser)
    left = folder.left_by_thin()
    freed = sum(action.freed for action in actions) + freed_bytes(path for folder in left for path in files_in(folder))
    rest = list(scan.usable)
    for action in actions:
        rest = action.applied_to(rest)
    every = scan.structure.parts
    before, after = (tuple(composable_steps(there, every)) for there in (scan.usable, rest))
    ages = compare_ages(scan.usable, rest, after, every)
    return ThinPlan(options, scan, actions, before, tuple(left), freed, ages)


def _measure(actions: Iterable[PruneAction], scan: Scan, chooser: Chooser | None) -> tuple[PruneAction, ...]:
    """Lay out each partial checkpoint to write, so that its size is known to the byte."""
    frozen: dict[str, tuple[Path, int]] = {}
    for one in scan.partial:  # oldest first
        for fact in read_manifest(one.path, one.name).bundles:
            frozen[fact.path] = (one.path, fact.num_bytes)
    measured = []
    for action in actions:
        index = scan.indexes[action.checkpoint.path]
        conversion, freed = None, 0
        if action.becomes == WEIGHTS:
            freed = freed_by_reduction(index)
        elif action.becomes == PARTIAL:
            freed = freed_bytes(files_in(index.root))
        successor = action.successor if action.is_written else None
        if successor is not None and successor.ledger is not None and chooser is not None:
            policy, target = chooser.settings(), successor.path
            held = (action.parts, successor.ledger, policy, frozen, uuid.uuid4().hex, action.masters)
            conversion = plan_conversion(index, chooser.structure, target, *held)
            freed -= conversion.num_bytes
            frozen |= {file.path: (successor.path, file.num_bytes) for file in conversion.layout.frozen}
        measured.append(replace(action, freed=freed, conversion=conversion))
    return tuple(measured)


def bytes_to_move(plan: ThinPlan) -> int:
    """Return the total bytes that `thin` reports to its ``on_progress``."""
    total = 0
    for action in plan.actions:
        if action.conversion is not None:
            total += action.conversion.plan.num_bytes
        elif action.becomes == WEIGHTS:
            total += plan_weights(plan.scan.indexes[action.checkpoint.path]).num_bytes
        elif action.successor is not None:
            index = plan.scan.indexes[action.successor.path]
            total += sum(index.held[state].held_bytes for state in compared(index))
    return 2 * total  # written and read back, or both read


def thin(
    plan: ThinPlan,
    notify: Callable[[PruneAction], None] = lambda action: None,
    on_progress: Callable[[int], None] = lambda num_bytes: None,
    clone: Clone = "auto",
) -> Moved:
    """Carry out a plan that was made inside `only_writer`; call ``notify`` after each action.

    Return how the bytes of what was written got there.
    ``on_progress`` gets the bytes written and read, `bytes_to_move` in all, from several threads.

    Raises StorageError, SourceError, VerificationError or Interrupted; finished actions stay, and nothing is lost.
    """
    scan, there, indexes = plan.scan, list(plan.scan.usable), plan.scan.indexes
    differing: list[Problem] = []
    moved = Moved()
    with (
        carrying_out(scan.run, "can't continue", "check the disk and rerun the same command"),
        stoppable() as stop,
    ):
        for folder in plan.left_behind:
            shutil.rmtree(folder)
        for action in plan.actions:
            stop.check()
            full, successor = indexes[action.checkpoint.path], action.successor
            if action.becomes == WEIGHTS:
                moved += reduce_to_weights(full, stop, clone, on_progress)
            elif successor is None:
                logger.info("%s stays: %s", action.checkpoint.name, action.why or "it is one of the newest")
                continue
            elif action.conversion is not None:
                moved += write_conversion(action.conversion, stop, on_progress, clone)
            else:
                try:
                    check_same(indexes[successor.path], full, stop, on_progress)
                except VerificationError as error:
                    differing += error.problems
                    continue
            if successor is not None:
                _put_in_place(plan, action, successor, there)
            there = action.applied_to(there)
            notify(action)
        if differing:
            raise VerificationError(differing)
    return moved


def _put_in_place(
    plan: ThinPlan, action: PruneAction, successor: RunCheckpoint, there: Sequence[RunCheckpoint]
) -> None:
    """Remove a full checkpoint whose partial one is on the disk, once its step can be composed without it."""
    scan, full = plan.scan, plan.scan.indexes[action.checkpoint.path]
    try:
        check_on_disk(successor, scan.structure)
        check_composable(scan.run, action.applied_to(there), successor.step, scan.structure)
    except VerificationError:
        if action.conversion is not None:
            remove_partial(successor.path)
        raise
    check_unchanged(full)
    logger.info("removing %s: step %d can be composed without it", full.root.name, successor.step)
    remove_replaced(full.root)


def check_on_disk(promised: RunCheckpoint, structure: ModelStructure) -> None:
    """Raise VerificationError if a checkpoint on disk is not the one that the decision assumed."""
    found = describe_checkpoint(index_checkpoint(promised.path), structure)
    if found != promised or found.past != promised.past:
        raise VerificationError.at(promised.path, "it does not hold the parts that were decided on", _FIX)


def check_composable(run: Path, left: Iterable[RunCheckpoint], step: int, structure: ModelStructure) -> None:
    """Plan the composite of a step from the checkpoints that will be left; nothing is written.

    Raises VerificationError with every problem if that fails.
    """
    usable = usable_at(left, step)
    sources, base = sources_at(usable, step, structure.parts), newest_resumable(usable)
    if sources is None or base is None:
        raise VerificationError.at(run, f"step {step} could no longer be composed", _FIX)
    title = f"step {step} after thinning"
    recipe = Recipe.of(Assignment(base, sources, dict.fromkeys(sources, "newest"), title), title)
    try:
        plan_merge(recipe, run / f".checkpoint-{step}.llmtailor-never-written")
    except Unanswered:
        raise
    except TailorError as error:
        raise VerificationError((*error.problems, Problem(str(run), f"step {step} can't be composed", _FIX))) from error
