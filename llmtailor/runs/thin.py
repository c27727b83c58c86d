"""Thins out a run's folder: older full checkpoints become partial ones, or keep their weights only.

Each is replaced by itself, oldest first, and only when what takes its place has been written, read back and
published: so the run can be interrupted anywhere, and the same command goes on.

The last check before anything is removed: can the step be composed from what stays, as ``merge`` would do it?
"""

from __future__ import annotations

import logging
import shutil
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.lineage import THINNED
from llmtailor.compose.plan import plan_merge
from llmtailor.engine.pool import Stop, stoppable
from llmtailor.errors import Problem, TailorError, Unanswered, VerificationError
from llmtailor.formats.partial.manifest import read_manifest
from llmtailor.formats.partial.write import trained_states
from llmtailor.formats.registry import index_checkpoint
from llmtailor.model.parts import Anatomy
from llmtailor.recipe.candidates import Assignment, RunCheckpoint, newest_resumable, sources_at, usable_at
from llmtailor.recipe.recipe import Recipe
from llmtailor.runs.folder import Folder
from llmtailor.runs.guard import carrying_out, check_newest
from llmtailor.runs.places import files_in, freed_bytes, left_behind, remove_replaced
from llmtailor.runs.scan import Scan, describe_checkpoint, scan_run
from llmtailor.runs.thinning import (
    PARTIAL,
    WEIGHTS,
    Chooser,
    Deciding,
    Decision,
    Fate,
    FullFacts,
    Thinning,
    make_chooser,
    read_facts,
    read_thinned,
    replaced,
)
from llmtailor.runs.to_partial import (
    Contents,
    Conversion,
    check_same,
    check_unchanged,
    compared,
    plan_conversion,
    write_conversion,
)
from llmtailor.runs.to_weights import StepAge, compare_ages, is_kept, reduce_to_weights

_FIX = "this is a bug in llmtailor: please report it; nothing was removed"


def check_on_disk(promised: RunCheckpoint, anatomy: Anatomy) -> None:
    """Raise VerificationError if a checkpoint on the disk is not what was decided with."""
    found = describe_checkpoint(index_checkpoint(promised.path), anatomy)
    if found != promised or found.past != promised.past:
        raise VerificationError.at(promised.path, "it does not hold what was decided", _FIX)


def check_composable(run: Path, left: Iterable[RunCheckpoint], step: int, anatomy: Anatomy) -> None:
    """Plan the composite of a step from the checkpoints that will be left; nothing is written.

    Raises VerificationError, with every problem, if that can't be done.
    """
    usable = usable_at(left, step)
    sources, base = sources_at(usable, step, anatomy.parts), newest_resumable(usable)
    if sources is None or base is None:
        raise VerificationError.at(run, f"step {step} could not be composed any more", _FIX)
    title = f"step {step} after thinning"
    recipe = Recipe.of(Assignment(base, sources, dict.fromkeys(sources, "newest"), title), title)
    try:
        plan_merge(recipe, run / f".checkpoint-{step}.llmtailor-never-written")
    except Unanswered:
        raise
    except TailorError as error:
        raise VerificationError((*error.problems, Problem(str(run), f"step {step} can't be composed", _FIX))) from error


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Step:
    """What happens to one full checkpoint."""

    fate: Fate
    kind: str
    """What it is, e.g. ``deepspeed-zero3 on 2 ranks``"""
    num_bytes: int
    """Of its files now"""
    freed: int = 0
    """How many bytes fewer the disk holds afterwards; negative if what takes its place is larger"""
    conversion: Conversion | None = None


@dataclass(frozen=True, slots=True)
class ThinPlan:
    """Everything is decided, nothing is touched."""

    run: Path
    thinning: Thinning
    scan: Scan
    """Of every attempt"""
    decision: Decision
    steps: tuple[Step, ...]
    """One for each full checkpoint, oldest first"""
    left_behind: tuple[Path, ...] = field(default=())
    """By a process that was killed; removed as well"""
    freed: int = 0
    ages: tuple[StepAge, ...] = ()
    """Of each step that stays composable"""


def plan_thinning(run: Path, thinning: Thinning) -> ThinPlan:
    """Decide what becomes of a run's checkpoints, and what that frees; no tensor is read.

    Raises SourceError if the newest checkpoint can't be used or no complete state would be left, and UsageError for a
    strategy that makes no sense.
    """
    run = Path(run).absolute()
    scan = scan_run(run, every_chain=True)
    index = scan.indexes[check_newest(scan)]
    trained = {scan.anatomy.part_of[param] for param in trained_states(index)}
    parts = [part for part in scan.anatomy.parts if part in trained]
    chooser = None if thinning.weights_only else make_chooser(thinning, scan.anatomy, parts)
    decision = _decide(scan, chooser, thinning.keep_full)
    steps = _measure(decision, scan, chooser)
    left = left_behind(run)
    freed = sum(step.freed for step in steps) + freed_bytes(path for folder in left for path in files_in(folder))
    rest = list(scan.usable)
    for fate in decision.fates:
        rest = replaced(rest, fate)
    ages = compare_ages(scan.usable, rest, decision.after, scan.anatomy.parts)
    return ThinPlan(run, thinning, scan, decision, steps, tuple(left), freed, ages)


def bytes_to_move(plan: ThinPlan) -> int:
    """Return of how many bytes `thin` will tell its observer."""
    total = 0
    for step in plan.steps:
        if step.conversion is not None:
            total += step.conversion.num_bytes_to_move
        elif step.fate.becomes == PARTIAL and step.fate.successor is not None:
            index = plan.scan.indexes[step.fate.successor.path]
            total += 2 * sum(index.held[state].num_bytes for state in compared(index))
    return total


def thin(
    plan: ThinPlan,
    tell: Callable[[Step], None] = lambda step: None,
    observe: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Carry out a plan that was made inside `watch.only_writer`; ``tell`` is told of each checkpoint that is done.

    ``observe`` is told of bytes written and read, `bytes_to_move` in all, from several threads.

    Raises StorageError, SourceError, VerificationError or Interrupted; what was done until then stays, and nothing is
    lost.
    """
    there = list(plan.scan.usable)
    differing: list[Problem] = []
    with carrying_out(plan.run, "can't go on", "check the disk; the same command goes on"), stoppable() as stop:
        for folder in plan.left_behind:
            shutil.rmtree(folder)
        for step in plan.steps:
            stop.check()
            fate = step.fate
            if fate.becomes == WEIGHTS:
                reduce_to_weights(plan.scan.indexes[fate.checkpoint.path])
            elif fate.becomes == PARTIAL:
                try:
                    _replace(plan, step, there, stop, observe)
                except _Different as error:
                    differing += error.problems
                    continue
            else:
                logger.info("%s stays: %s", fate.checkpoint.name, fate.why or "it is one of the newest")
                continue
            there = replaced(there, fate)
            tell(step)
        if differing:
            raise VerificationError(differing)


class _Different(VerificationError):
    """A partial checkpoint that is there already is not of the same save as the full one."""


def _replace(
    plan: ThinPlan, step: Step, there: Sequence[RunCheckpoint], stop: Stop, observe: Callable[[int], None]
) -> None:
    """Put a partial checkpoint in the place of a full one."""
    fate, full = step.fate, step.fate.checkpoint
    assert fate.successor is not None
    if step.conversion is not None:
        write_conversion(step.conversion, stop, observe)
    else:
        try:
            check_same(plan.scan.indexes[fate.successor.path], plan.scan.indexes[full.path], stop, observe)
        except VerificationError as error:
            raise _Different(error.problems) from error
    try:
        check_on_disk(fate.successor, plan.scan.anatomy)
        check_composable(plan.run, replaced(there, fate), full.step, plan.scan.anatomy)
    except VerificationError:
        if step.conversion is not None:
            Folder(plan.run).remove(full.step)
        raise
    check_unchanged(plan.scan.indexes[full.path])
    logger.info("removing %s: step %d can be composed without it", full.name, full.step)
    remove_replaced(full.path)


def _decide(scan: Scan, chooser: Chooser | None, keep_full: int) -> Decision:
    folder = Folder(scan.run)
    indexes, anatomy = scan.indexes, scan.anatomy
    known: dict[Path, FullFacts] = {}

    def facts(checkpoint: RunCheckpoint) -> FullFacts:
        if checkpoint.path not in known:
            target = folder.at(checkpoint.step)
            index = indexes[checkpoint.path]
            known[checkpoint.path] = read_facts(index, anatomy, target, indexes.keys(), weights_only=chooser is None)
        return known[checkpoint.path]

    deciding = Deciding(
        checkpoints=scan.usable,
        parts=anatomy.parts,
        keep_full=keep_full,
        facts=facts,
        chooser=chooser,
        thinned=read_thinned(one for one in scan.usable if one.is_partial),
        new_lineage=lambda: THINNED + uuid.uuid4().hex[:12],
        path_of=folder.at,
    )
    return deciding.decide()


def _measure(decision: Decision, scan: Scan, chooser: Chooser | None) -> tuple[Step, ...]:
    """Lay out what is to be written, so that its size is known to the byte."""
    frozen: dict[str, tuple[Path, int]] = {}
    for one in scan.usable:  # oldest first
        for fact in read_manifest(one.path, one.name).bundles if one.is_partial else ():
            frozen[fact.path] = (one.path, fact.num_bytes)
    steps = []
    for fate in decision.fates:
        index = scan.indexes[fate.checkpoint.path]
        conversion, freed = None, 0
        if fate.becomes == WEIGHTS:
            freed = freed_bytes(path for path in files_in(index.root) if not is_kept(str(path.relative_to(index.root))))
        elif fate.becomes == PARTIAL:
            freed = freed_bytes(files_in(index.root))
        if fate.ledger is not None and chooser is not None and fate.successor is not None:
            contents = Contents(fate.parts, fate.ledger, chooser.settings())
            conversion = plan_conversion(index, scan.anatomy, fate.successor.path, contents, frozen)
            freed -= conversion.num_bytes
            frozen |= {file.path: (fate.successor.path, file.num_bytes) for file in conversion.layout.frozen}
        num_bytes = sum(fact.num_bytes for fact in index.files.values())
        steps.append(Step(fate, _kind(index), num_bytes, freed, conversion))
    return tuple(steps)


def _kind(index: CheckpointIndex) -> str:
    ranks = f"{index.world_size} rank{'s' if index.world_size > 1 else ''}"
    return f"{'composite, ' if index.part_steps else ''}{index.format} on {ranks}"
