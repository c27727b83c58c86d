"""What a run's folder holds: which checkpoints can be used together, the newest state, and a recipe for it.

``llmtailor merge --run`` does the same as `compose_newest`, with more options.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.lineage import Ledger, Past, RunCheckpoint, best_holders, composable_steps, newest_resumable
from llmtailor.codes import Code
from llmtailor.compose.checks import differences
from llmtailor.compose.plan import OpenedSources, Options, plan_merge
from llmtailor.compose.report import Report, total_setback
from llmtailor.compose.write import preview, prove, settle_output, write
from llmtailor.containers.json import read_json
from llmtailor.documents import document
from llmtailor.errors import DamagedSource, Problem, Problems, SourceError, TailorError, TargetError, about
from llmtailor.findings import ERROR, folded
from llmtailor.formats.partial.manifest import read_manifest
from llmtailor.formats.registry import (
    absent_parts,
    display_name,
    find_structure,
    index_checkpoint,
    output_in,
    shared_layers,
    with_experts,
)
from llmtailor.frameworks.files import FOLDER, TRAINER_STATE
from llmtailor.frameworks.framework import framework_of, is_partial
from llmtailor.model.parts import ModelStructure, Part, condense, with_layers
from llmtailor.model.roles import MASTER
from llmtailor.recipe import Assignment, Recipe
from llmtailor.recipe.emit import write_recipe
from llmtailor.recipe.strategies import FlagLine, StrategyOptions, assign, assign_flags, read_flags
from llmtailor.runs.folder import AttemptFilter, RunFolder
from llmtailor.storage.local import absolute, as_path
from llmtailor.verify.verify import Verdict, refused, to_json, verify_checkpoint

logger = logging.getLogger(__name__)
T = TypeVar("T")
Index = Callable[[Path], CheckpointIndex]
_SHOWN = 3
"""Of many steps, so many of the first and of the last are listed."""


@dataclass(frozen=True, slots=True)
class Scan:
    """The usable checkpoints of a run's folder up to some step."""

    run: Path
    usable: tuple[RunCheckpoint, ...]
    """Oldest first; all with the newest one's model and layout"""
    refused: Mapping[Path, tuple[Problem, ...]]
    """Why the others can't be used"""
    structure: ModelStructure
    """Experts are parts in the layers of which a checkpoint holds some only"""
    indexes: Mapping[Path, CheckpointIndex]
    """The indexes of the usable ones, by folder"""

    @property
    def partial(self) -> tuple[RunCheckpoint, ...]:
        """The usable partial checkpoints, oldest first"""
        return tuple(one for one in self.usable if one.is_partial)

    @property
    def skipped(self) -> tuple[Problem, ...]:
        """Why the others can't be used, all together"""
        return tuple(problem for problems in self.refused.values() for problem in problems)


@dataclass(frozen=True, slots=True)
class UpdateLog:
    """LLMTailor's log of which parts were saved at which step, and what to check it against."""

    text: str
    name: str
    base: Path | None = None
    """A checkpoint that holds every part, for parts that the log does not name"""
    total_layers: int | None = None


def scan_run(
    run: Path,
    at: int | None = None,
    base: Path | None = None,
    *,
    also: Sequence[Path] = (),
    only_newest: bool = False,
    every_chain: bool = False,
    trust_unrecorded: bool = False,
    index: Index = index_checkpoint,
) -> Scan:
    """Index the full and partial checkpoints of a run's folder up to step ``at``, and ``base`` if it is elsewhere.

    ``also`` are staging folders, see `RunFolder`. ``index`` returns the index of a checkpoint, which may be known.

    See `scan_back` for those that are skipped. With ``only_newest`` the scan goes backwards only until it has found the
    newest state of every part. Raises SourceError if nothing is left.
    """
    whole: ModelStructure | None = None
    structure: ModelStructure | None = None
    shared: set[Part] = set()
    usable: list[RunCheckpoint] = []

    def is_enough(found: list[CheckpointIndex], step: int) -> bool:
        nonlocal whole, structure
        whole = whole or find_structure(found[0])
        layers = {layer for index in found[len(usable) :] for layer in shared_layers(index, whole)}
        if structure is None or not layers <= shared:
            shared.update(layers)
            structure = with_experts(whole, found[0], shared)
            usable.clear()
        usable.extend(describe_checkpoint(index, structure) for index in found[len(usable) :])
        if not only_newest:
            return False
        newest = best_holders(usable, structure.parts)
        return all(part in newest and newest[part].step_of(part) >= step for part in structure.parts)

    found, refused = scan_back(
        run,
        at,
        read=lambda path, found: index(path),
        index_of=lambda one: one,
        is_enough=is_enough,
        base=base,
        also=also,
        every_chain=every_chain,
        trust_unrecorded=trust_unrecorded,
    )
    if not found:
        until = f" at or before step {at}" if at is not None else ""
        head = Problem(display_name(run), f"no checkpoint{until} can be used", "fix one of the checkpoints below")
        raise SourceError([head, *(problem for problems in refused.values() for problem in problems)])
    is_enough(found, 0)
    assert structure is not None
    usable.sort(key=lambda one: one.step)
    return Scan(run, tuple(usable), refused, structure, {one.root: one for one in found})


def scan_back(
    run: Path,
    at: int | None,
    *,
    read: Callable[[Path, list[T]], T],
    index_of: Callable[[T], CheckpointIndex],
    is_enough: Callable[[list[T], int], bool],
    base: Path | None = None,
    also: Sequence[Path] = (),
    every_chain: bool = False,
    trust_unrecorded: bool = False,
) -> tuple[list[T], dict[Path, tuple[Problem, ...]]]:
    """Read a run's checkpoints up to step ``at``, newest first; return those that can be used together, and why the
    others can't.

    Checkpoints of abandoned attempts are refused unread. Others are refused if they can't be read; if the newest good
    one has another model or layout; if they don't state their attempt although attempts are recorded (unless
    ``trust_unrecorded``); and if they are partial and the newest partial one does not build on them (unless
    ``every_chain``). ``base`` is read last, if it is elsewhere, whatever attempt it belongs to.

    ``read`` gets a folder and what was found so far, and raises SourceError for an unusable checkpoint.
    ``is_enough`` gets what was found and the next step to read, and returns whether to stop. Raises SourceError if
    there is no checkpoint up to step ``at``.
    """
    folders = RunFolder(run, also).checkpoints_until(at)
    judge = AttemptFilter.of(RunFolder(run), at, trust_unrecorded)
    if base is not None and base not in [folder for _, folder in folders]:
        folders.append((-1, base))
    found: list[T] = []
    refused: dict[Path, tuple[Problem, ...]] = {}
    past: Past | None = None

    def refuse(folder: Path, *problems: Problem) -> None:
        refused[folder] = problems
        logger.info("skipped %s: %s", problems[0].where, problems[0].what)

    for step, folder in folders:
        if found and is_enough(found, step):
            logger.info("stopped at %s: every part is found", index_of(found[-1]).name)
            break
        unrecorded = judge.why_not(folder, step) if folder != base else None
        if unrecorded is not None and unrecorded.code is Code.ABANDONED:
            refuse(folder, unrecorded)
            continue
        try:
            one = read(folder, found)
            index = index_of(one)
            ledger = ledger_of(index)
        except SourceError as error:  # Unanswered is not caught
            refuse(folder, *error.problems)
            continue
        is_converted = index.composite.is_converted and not index.form.is_partial
        if is_converted and any(at == step and is_partial(path) for at, path in folders):
            # the save of its step holds the same, and maybe more: what one format needs has no place in another
            logger.info("%s is not used: it is a composite of the saves of its step, in another format", index.name)
            continue
        reason = unrecorded or _why_not(step, index, index_of(found[0]) if found else None)
        mine = ledger.past(index.global_step) if ledger else None
        if reason is None and not every_chain and past and mine and not past.includes(mine):
            what = "the newest partial checkpoint does not build on it"
            reason = Problem(index.name, what, "to use it anyway, name it in a recipe")
        if reason is not None:
            refuse(folder, reason)
            continue
        past = past or mine
        found.append(one)
    return found, refused


def ledger_of(index: CheckpointIndex) -> Ledger | None:
    """Return the ledger of a partial checkpoint; None for a full one. Raises SourceError."""
    if not index.form.is_partial:
        return None
    return RunCheckpoint.from_json(index.root, read_manifest(index.root, index.name).ledger, index.name).ledger


def describe_checkpoint(index: CheckpointIndex, structure: ModelStructure) -> RunCheckpoint:
    """Return a checkpoint as a source of composites; it holds the parts of which no tensor is absent."""
    absent = absent_parts(index, structure)
    parts = with_layers(frozenset(structure.parts) - absent, structure.parts) if absent else None
    state = framework_of(index).state
    is_resumable = not state or state in index.files
    masters = absent - absent_parts(index, structure, MASTER) if absent else absent
    of_masters = with_layers(masters, structure.parts) if masters else masters
    return RunCheckpoint(
        path=index.root,
        step=index.global_step,
        parts=parts,
        resumable=is_resumable,
        part_steps=index.composite.states,
        ledger=ledger_of(index),
        masters=of_masters,
        master_steps=index.composite.masters,
        save_id=index.partial.save_id,
        bases={structure.part_of[name]: one.base for name, one in index.partial.differences.items()},
        is_thinned=index.partial.is_thinned,
    )


def _why_not(step: int, index: CheckpointIndex, newest: CheckpointIndex | None) -> Problem | None:
    """Return why a checkpoint can't be used with the newest good one, or None; ``step`` is the one in its name."""
    if step >= 0 and step != index.global_step:
        what = f"its name says step {step}, but its content is of step {index.global_step}"
        return Problem(index.name, what, "rename the folder, or name it in a recipe")
    unlike = differences(index, newest) if newest else []
    return unlike[0] if unlike else None


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
    name, run, also = f"the recipe for {run}", absolute(run), [absolute(one) for one in also]
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
        found = next((checkpoint for checkpoint in scan.usable if checkpoint.path == base), None)
        if base is not None and found is None:
            reason = scan.refused.get(base, ())
            fix = "name another base, or fix it"
            problems.add(SourceError(reason or [Problem("--base", f"{base} is later than step {at}", fix)]))
        problems.raise_if_any()
        step = at if at is not None else scan.usable[-1].step
        assignment = assign_flags(lines, step, found, scan.usable, scan.structure, how.total_layers, how.name)
    _log_choice(assignment)
    output, base_path = None, assignment.base.path
    if base_path.parent in [one / FOLDER for one in also]:  # by default, it would be written there
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
    steps = ", ".join(f"{one.step}{' (partial)' if one.parts is not None else ''}" for one in scan.usable)
    lines = [f"{assignment.title}, from {display_name(scan.run)}", f"usable checkpoints: {steps}"]
    base = scan.indexes[assignment.base.path]
    parts = assignment.source_of.items()
    setback = total_setback(base.setback_with(part, source.step_of(part)) for part, source in parts)
    if setback is not None:
        lines.append(f"estimated setback by stale parts: {about(setback)} steps")
    return lines + [f"skipped: {problem.where}: {problem.what}" for problem in folded(scan.skipped)]


_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Newest:
    """The checkpoint with the newest state of a run."""

    path: Path
    step: int
    is_new: bool
    """Whether it was written now; otherwise it was there already"""


def merge_run(
    run: str | Path,
    out: str | Path | None = None,
    options: Options | None = None,
    *,
    at: int | None = None,
    strategy: str | StrategyOptions = "latest",
) -> Report:
    """Compose the newest state of a run's folder, as ``llmtailor merge --run`` does; return the report.

    Args:
        run: the run's folder.
        out: the folder to write. None: where a resume finds it, unless a checkpoint there has this state already; then
            nothing is written, and the report names that one.
        options: see `Options`. None keeps ranks, format and param groups of the run.
        at: the highest step to use; None for any.
        strategy: ``latest``, ``parity`` or ``filter``.

    Raises what `plan_merge` and `write` raise.
    """
    how = StrategyOptions(strategy) if isinstance(strategy, str) else strategy
    options = options or Options(reuse=out is None, step="auto")

    def compose(index: Index) -> Report:
        recipe, opened = choose_for_run(as_path(run), at, how, index=index)
        composition, there = plan_merge(recipe, out, options, opened), None
        if options.reuse:
            composition, there = settle_output(composition)
        if there is not None:
            return replace(composition.report, out=f"{there}")
        write(composition)
        return composition.report

    return without_damaged(compose)


def without_damaged(compose: Callable[[Index], T]) -> T:
    """Return what ``compose`` returns. If it finds that the bytes of a checkpoint are damaged, call it again without
    that one: an older state of the run is better than none.

    It gets what `scan_run` takes as ``index``. Raises what it raises for other reasons.
    """
    damaged: dict[Path, DamagedSource] = {}

    def index(path: Path) -> CheckpointIndex:
        if path in damaged:
            raise damaged[path]
        return index_checkpoint(path)

    while True:
        try:
            return compose(index)
        except DamagedSource as error:
            if not error.roots - damaged.keys():
                raise
            damaged |= dict.fromkeys(error.roots, error)


def compose_newest(
    run: Path, world_size: int | None = None, also: Sequence[Path] = (), *, waits: bool = False
) -> Newest | None:
    """Compose the newest state of a run, unless a complete checkpoint has it.

    Args:
        run: the run's folder.
        world_size: the number of ranks that will resume. None keeps that of the newest save.
        also: staging folders of the run, see `RunFolder`.
        waits: whether another process composes it, for which this one waits without a limit.

    Returns None if the run has no complete partial checkpoint.

    Raises what `runs.scan.choose_for_run`, `plan_merge` and `write` raise.
    """
    run = absolute(run)
    if not any(RunFolder(folder).complete() for folder in (run, *also)):
        return None
    return without_damaged(partial(_compose_newest, run, world_size, also, waits))


def _compose_newest(run: Path, world_size: int | None, also: Sequence[Path], waits: bool, index: Index) -> Newest:
    options = Options(world_size=world_size, reuse=True, step="auto")
    while True:
        names = frozenset(run.iterdir())
        recipe, opened = choose_for_run(run, None, StrategyOptions("latest"), also=also, index=index)
        composition, there = settle_output(plan_merge(recipe, None, options, opened))
        while waits and there is None and names == frozenset(run.iterdir()):
            time.sleep(_POLL_S)
            composition, there = settle_output(composition)
        if not waits or there is not None:
            break  # otherwise the other process may have published between this one's scan and its choice of a name
    step = composition.report.global_step
    if there is not None:
        root = composition.indexes[composition.base].root if composition.is_copy else composition.out
        return Newest(root, step, False)
    for notice in composition.report.shown_notices:
        logger.warning("%s", notice)
    try:
        preview(composition)
    except TargetError as error:  # a merge of other saves, or for other ranks, that was killed and will not be resumed
        logger.warning("%s; it is discarded", error.problems[0].what)
        composition = replace(composition, options=replace(composition.options, restart=True))
    write(composition, notify=logger.info)
    return Newest(composition.out, step, True)


def check_newest(scan: Scan) -> Path:
    """Return the newest checkpoint of a run's current attempt.

    Raises SourceError with the reasons if nothing can resume from it: then only the older ones are left. A full one is
    verified for a resume, not only for a merge.
    """
    for _, newest in RunFolder(scan.run).checkpoints_until(None):
        is_abandoned = any(problem.code is Code.ABANDONED for problem in scan.refused.get(newest, ()))
        if not is_abandoned and (newest.parent.name != FOLDER or is_partial(newest)):
            break
    else:
        newest = scan.run
    if newest not in scan.indexes:
        reasons = scan.refused.get(newest, ())
        what = "the newest checkpoint can't be used, so older ones are not touched"
    elif is_partial(newest) or (verdict := verify_checkpoint(newest)).is_resumable:
        return newest
    else:
        reasons = tuple(finding.problem for finding in verdict.of_severity(ERROR))
        what = "the newest checkpoint is not resumable, so older ones are not touched"
    fix = "wait if it is still being saved; otherwise fix it, or move it out of the folder, then rerun the command"
    raise SourceError([Problem(display_name(newest), what, fix), *reasons])


def continues(run: Path, checkpoint: Path) -> bool:
    """Return whether the newest recorded attempt of a run goes back to this checkpoint of the same run.

    A job that names it again is then a restart, perhaps not the first one: later attempts began from newer states.
    Raises SourceError for a damaged record or a damaged ``trainer_state.json``.
    """
    attempts = RunFolder(run).attempts()
    state = checkpoint / TRAINER_STATE
    if not attempts or absolute(checkpoint.parent) != absolute(run) or not state.is_file():
        return False
    step = read_json(state, str(state)).get("global_step")
    if not isinstance(step, int):
        return False
    # an attempt from a later step continued from a save of the previous one
    return next((one.step for one in reversed(attempts) if one.step <= step), None) == step


@dataclass(frozen=True, slots=True)
class Latest:
    """The search result."""

    path: Path | None
    """The newest resumable checkpoint, or None"""
    verdict: Verdict | None
    passed_over: tuple[Verdict, ...]
    """The verdicts on newer checkpoints, or on all if none is resumable"""
    newer_partial: Path | None
    """The newest partial checkpoint if it is even newer: a composite would resume from its step"""

    @property
    def unjudged(self) -> Verdict | None:
        """The verdict on the newest checkpoint that may be resumable, if that can't be judged; then ``path`` is None"""
        return next((verdict for verdict in self.passed_over if not verdict.is_judged), None)


def find_latest(
    run: str | Path,
    at: int | None = None,
    deep: bool = False,
    on_progress: Callable[[int], None] | None = None,
    *,
    trust_unrecorded: bool = False,
    client: str | None = None,
) -> Latest:
    """Find the newest full checkpoint of a run that `verify_checkpoint` finds resumable.

    Checkpoints of abandoned attempts are skipped. The search ends at a checkpoint that can't be judged: it may be
    resumable, so older ones are not looked at.

    Args:
        run: the run's folder.
        at: the highest step to consider; None for any.
        deep: also read every tensor.
        on_progress: with ``deep``, called with a number of bytes read, from several threads.
        trust_unrecorded: also consider checkpoints that do not state their attempt.
        client: what will resume, see `verify_checkpoint`.

    Raises:
        SourceError: the folder does not exist.
        Interrupted: Ctrl-C or SIGTERM.
    """
    folder = RunFolder(run)
    judge = AttemptFilter.of(folder, at, trust_unrecorded)
    found: Path | None = None
    verdicts: list[Verdict] = []
    for step, path in reversed(folder.full().items()):
        if at is None or step <= at:
            verdicts.append(_verify(path, step, deep, on_progress, judge, client))
            if verdicts[-1].is_resumable:
                found = path
            if found or not verdicts[-1].is_judged:
                break
    verdict = verdicts.pop() if found else None
    least = verdict.index.global_step if verdict and verdict.index else -1
    newer_partial = (
        path
        for step, path in reversed(folder.complete().items())
        if least < step and (at is None or step <= at) and judge.why_not(path, step) is None
    )
    return Latest(found, verdict, tuple(verdicts), next(newer_partial, None))


def _verify(
    path: Path,
    step: int,
    deep: bool,
    on_progress: Callable[[int], None] | None,
    judge: AttemptFilter,
    client: str | None,
) -> Verdict:
    if (problem := judge.why_not(path, step)) is not None:
        return refused(path, deep, SourceError(problem))
    try:
        return verify_checkpoint(path, deep, on_progress, client=client)
    except SourceError as error:  # not a checkpoint, or of an unsupported kind
        return refused(path, deep, error)


def latest_to_json(latest: Latest) -> dict[str, Any]:
    content = {
        "path": latest.path,
        "verdict": to_json(latest.verdict) if latest.verdict else None,
        "passed_over": map(to_json, latest.passed_over),
        "newer_partial": latest.newer_partial,
    }
    return document("latest/1", content)


def prove_step(run: Path, step: int, index: Index = index_checkpoint, *, plans: bool = True) -> None:
    """Plan what ``llmtailor merge --run RUN --at STEP`` writes, and read its outline back. No state is read or written.

    Without ``plans``, only choose its sources and compare their indexes, which is several times faster.

    ``index`` is that of `scan_run`. Raises a TailorError with the reasons if the step can't be composed, and OSError.
    """
    recipe, opened = choose_for_run(run, step, StrategyOptions("latest"), index=index)
    if not plans and recipe.base is not None and opened.indexes[recipe.base].global_step == step:
        return
    # the output is a name only: the run may have a full checkpoint of the step
    composition = plan_merge(recipe, RunFolder(run).partial / f"composite-of-{step}", opened=opened)
    if composition.report.global_step != step:
        raise SourceError(recipe.notices)
    prove(composition)
