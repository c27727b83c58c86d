"""Thins out a run's folder: older full checkpoints become partial ones, get links, or keep only their weights.

Each is replaced separately, oldest first, and only once its replacement has been written, read back and published. The
command can be interrupted at any point; rerunning it resumes.

The last check before each removal is that ``merge`` can compose the step from what stays.
"""

from __future__ import annotations

import filecmp
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path

from llmtailor._version import __version__
from llmtailor.checkpoint.elements import StateReader
from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.layout import Cast, Copy, LinkLayout, Plan, Strided
from llmtailor.checkpoint.lineage import RunCheckpoint, newest_resumable, sources_at, usable_at
from llmtailor.checkpoint.placement import Extent, StoredRange
from llmtailor.compose.plan import plan_merge
from llmtailor.compose.readback import check_written
from llmtailor.compose.report import card
from llmtailor.compose.resume import now
from llmtailor.copying.copy import Context, CopyStats, FileResult, execute
from llmtailor.copying.moving import Clone
from llmtailor.copying.pool import Stop, num_workers, run_all, stoppable
from llmtailor.copying.recheck import differing_files
from llmtailor.copying.staging import check_space, space_for
from llmtailor.errors import PathIn, Problem, SourceError, TailorError, Unanswered, VerificationError, some
from llmtailor.formats.registry import display_name, index_checkpoint
from llmtailor.frameworks.files import CARD, MANIFEST, PARTIAL_MANIFEST
from llmtailor.frameworks.framework import FRAMEWORKS
from llmtailor.model.dtypes import ITEMSIZE
from llmtailor.model.parts import ModelStructure
from llmtailor.model.roles import WEIGHT, State, is_moment
from llmtailor.recipe import Assignment, Recipe
from llmtailor.runs.conversion import Conversion, compared, kept_files, plan_weights
from llmtailor.runs.folder import FolderKind, link_or_copy, remove_partial, remove_replaced, staged
from llmtailor.runs.guards import mark_errors_as_late
from llmtailor.runs.prune import LINKED, PARTIAL, STAYS, WEIGHTS, PruneAction
from llmtailor.runs.retention import BUG
from llmtailor.runs.scan import describe_checkpoint
from llmtailor.runs.thin_plan import ThinPlan, manifest_of_links, plan_links
from llmtailor.storage.casts import cast
from llmtailor.storage.local import (
    OpenFiles,
    added_since,
    check_own,
    facts_now,
    fsync_folder,
    replace_folder,
    write_durably,
)
from llmtailor.timing import Stopwatch

logger = logging.getLogger(__name__)
OnProgress = Callable[[int], None]
_CHUNK_ELEMENTS = 1 << 20
_DISK_OR_BUG = f"the disk loses data, or {BUG}"
_SHARED_FACTS = (
    *("form.stage", "form.variant", "world_size", "global_step", "precision", "train.step_is_tensor", "params", "tied"),
    *("groups", "sub_groups", "zero.skipped_steps", "zero.settings", "composite"),
)
"""The index fields that a partial checkpoint shares with the full one it was made from"""


def check_crcs(root: Path, wanted: Mapping[str, int], stop: Stop, on_progress: OnProgress) -> None:
    """Read files back from the disk. Raises VerificationError with every file that differs, OSError, or Interrupted."""
    if differing := differing_files(root, wanted, on_progress, stop):
        raise VerificationError(
            Problem(str(root / path), "it does not read back as it was written", _DISK_OR_BUG) for path in differing
        )


def check_places(
    plan: Plan, written: CheckpointIndex, source: CheckpointIndex, params: Collection[str], masters: Collection[str]
) -> None:
    """Compare the index of what was written with the plan and with the checkpoint it was made from.

    What was written must hold every state of ``params``, the masters of ``masters``, and no other states that are
    trained. Together with the checksums of all files, this shows that every state is there, bit for bit. Raises
    VerificationError.
    """
    values = [(fact, *(attrgetter(fact)(index) for index in (written, source))) for fact in _SHARED_FACTS]
    differing = [fact for fact, here, there in values if here != there]
    wrong = [f"its {fact.rpartition('.')[2]} differs from that of {source.name}" for fact in differing]
    trained = {param for group in source.group_params for param in group}
    for state, entry in source.held.items():
        if state.kind == WEIGHT:
            continue
        there = written.held.get(state)
        if there is None or (there.live_dtype, there.shape) != (entry.dtype, entry.shape):
            wrong.append(f"it does not describe {state.kind} of {state.param}")
        elif there.is_here != (
            state.param in params
            or state.param not in trained
            or (state.param in masters and not is_moment(state.kind))
        ):
            wrong.append(f"{state.kind} of {state.param} should {'not ' if there.is_here else ''}be there")
    for file in plan.files:
        for start, piece in file.placed():
            if not isinstance(piece, (Copy, Cast, Strided)) or piece.state is None:
                continue
            entry = written.held[piece.state]
            if entry.is_here:
                numel = piece.num_bytes // ITEMSIZE[entry.dtype] if isinstance(piece, Copy) else piece.numel
                planned = Extent(file.path, start, start + piece.num_bytes)
                if [stored.extent for stored in entry.place.cover(piece.begin, piece.begin + numel)] != [planned]:
                    wrong.append(f"{piece.state.kind} of {piece.state.param} is not where it was written")
    if wrong:
        raise VerificationError(Problem(written.name, what, _DISK_OR_BUG) for what in wrong)


def find_difference(
    save: CheckpointIndex, full: CheckpointIndex, stop: Stop, on_progress: OnProgress
) -> Problem | None:
    """Return which states of a partial checkpoint differ from the full one of its step, rounded as they are stored
    there; None if none do. Raises OSError, or Interrupted."""
    if save.partial.differences:
        fix = "both stay; with a higher --keep-full-last it is not tried"
        return Problem(save.name, f"it holds only differences, so {full.name} is not removed", fix)
    states = compared(save)
    with OpenFiles(save.root) as files, OpenFiles(full.root) as files_of_full:
        reader = StateReader(files_of_full)

        def is_same(state: State, stored: StoredRange) -> bool:
            mine, theirs = save.held[state], full.held[state]
            data = bytearray(stored.extent.num_bytes)
            files.read_into(stored.extent.path, stored.extent.start, memoryview(data))
            original = reader.read(theirs, (stored.begin, stored.end))
            on_progress(2 * len(data))
            is_rounded = mine.stored_as != theirs.dtype
            return bytes(data) == (cast(original, theirs.dtype, mine.stored_as) if is_rounded else bytes(original))

        chunks = [
            (state, stored)
            for state in states
            if state in full.held
            for run in save.held[state].runs
            for part in save.held[state].place.cover(*run)  # each begins with a new block
            for begin in range(part.begin, part.end, _CHUNK_ELEMENTS)
            for stored in save.held[state].place.cover(begin, min(begin + _CHUNK_ELEMENTS, part.end))
        ]
        are_same = run_all((partial(is_same, *chunk) for chunk in chunks), num_workers(), stop)
    differing = dict.fromkeys(state for (state, _), is_equal in zip(chunks, are_same, strict=True) if not is_equal)
    differing |= dict.fromkeys(state for state in states if state not in full.held)
    if not differing:
        return None
    names = some(f"{state.kind} of {state.param}" for state in differing)
    fix = "they belong to different attempts: move one of them out of the run's folder"
    return Problem(save.name, f"its values differ from those of {full.name}: {names}", fix)


def check_unchanged(index: CheckpointIndex) -> None:
    """Raise SourceError with every file that has changed or appeared since the checkpoint was indexed."""
    folders = {f"{folder}/": None for path in index.files for folder in Path(path).parents if folder.name}
    added = [path for path in added_since(index.root, {**index.files, **folders}) if path not in index.files]
    appeared, differs = "it appeared in the meantime, so nothing here is removed", "the file changed while it was read"
    why = dict.fromkeys(added, appeared)
    for path, fact in facts_now(index.root, index.files).items():
        if fact is None or not fact.is_like(index.files[path]):
            why[path] = differs
    if why:
        raise SourceError(Problem(PathIn(index.name, path), what, "run this again") for path, what in why.items())


@contextmanager
def _writing(
    indexes: Sequence[CheckpointIndex], target: Path, plan: Plan, stop: Stop, clone: Clone, on_progress: OnProgress
) -> Iterator[tuple[Path, list[FileResult], dict[str, int]]]:
    """Write the files of a plan next to ``target``; yield their folder, the files, and the CRC-32 of all but links.

    After the block, check that the sources of the plan are unchanged. After an error, nothing is left. Raises
    StorageError, SourceError, Interrupted or OSError.
    """
    check_space(target, space_for(plan, clone))
    staging, watch = staged(target, FolderKind.THINNING), Stopwatch()
    check_own(staging)
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        facts = [index.files for index in indexes]
        context = Context(facts=facts, on_progress=on_progress, stop=stop, clone=clone)
        results = execute(plan, staging, context)
        logger.info("wrote %s, %s bytes, in %s", display_name(target), f"{plan.num_bytes:,}", watch.lap())
        crcs = {result.path: result.crc for result in results if not isinstance(result.plan, LinkLayout)}
        yield staging, results, crcs
        for index in indexes:
            check_unchanged(index)
        logger.info("read it back in %s", watch.lap())
        stop.check()
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def write_conversion(
    conversion: Conversion, stop: Stop, on_progress: OnProgress = lambda num_bytes: None, clone: Clone = "never"
) -> CopyStats:
    """Write a partial checkpoint, read it back, and publish it with one rename, complete and durable.

    Return how its bytes got there. ``on_progress`` gets the bytes written and read back, twice the bytes of the plan in
    all, from several threads. Raises VerificationError if it does not read back as planned, and as `_writing`; then it
    is absent.
    """
    target, source, plan = conversion.target, conversion.source, conversion.plan
    with _writing([source], target, plan, stop, clone, on_progress) as (staging, results, crcs):
        for name, folder in conversion.links.items():
            if filecmp.cmp(folder / name, staging / name, shallow=False):
                (staging / name).unlink()
                link_or_copy(folder / name, staging / name)
        write_durably(staging / PARTIAL_MANIFEST, conversion.manifest(results))
        fsync_folder(staging)
        check_crcs(staging, crcs, stop, on_progress)
        written = index_checkpoint(staging, display_name(target))
        check_places(plan, written, source, *conversion.kept_params())
    try:
        staging.rename(target)
        fsync_folder(target.parent)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return _moved(results)


def reduce_to_weights(
    index: CheckpointIndex, stop: Stop, clone: Clone = "never", on_progress: OnProgress = lambda num_bytes: None
) -> CopyStats:
    """Replace a full checkpoint with one without optimizer states; files are linked where possible, else copied.

    Return how the bytes of these files got there. The full one stays until the other takes its place. Raises
    VerificationError if the weights don't read back, and as `_writing`.
    """
    root, kept_paths = index.root, kept_files(index)
    with _writing([index], root, plan_weights(index), stop, clone, on_progress) as (staging, results, crcs):
        for path in kept_paths:
            (staging / path).parent.mkdir(exist_ok=True)
            link_or_copy(root / path, staging / path)
        for folder in {(staging / path).parent for path in (*kept_paths, *crcs)} | {staging}:
            fsync_folder(folder)
        check_crcs(staging, crcs, stop, on_progress)
        for path in kept_paths:
            original, copy = root / path, staging / path
            if not (original.samefile(copy) or filecmp.cmp(original, copy, shallow=False)):
                raise VerificationError.at(index.name, f"{path} would be lost", _DISK_OR_BUG)
    _replace(root, staging)
    return _moved(results)


def write_links(
    action: PruneAction,
    full: CheckpointIndex,
    structure: ModelStructure,
    stop: Stop,
    clone: Clone = "never",
    on_progress: OnProgress = lambda num_bytes: None,
) -> CopyStats:
    """Replace a full checkpoint with one that has links to the files of ``action.links_to``, which may be links, too.

    Return how its bytes got there. The full one stays until the other takes its place. Raises VerificationError if that
    does not read back as planned, what `plan_merge` raises, and as `_writing`.
    """
    assert action.links_to is not None and action.successor is not None and action.ledger is not None
    check_on_disk(action.links_to, structure)
    linked = index_checkpoint(action.links_to.path)
    merge = plan_links(action, structure, full, linked, clone)
    merge = replace(merge, out=full.root, report=replace(merge.report, out=full.name))
    with _writing(merge.indexes, full.root, merge.plan, stop, clone, on_progress) as (staging, results, crcs):
        readme = card(merge.report, __version__, merge.format, merge.target.stage, FRAMEWORKS[merge.framework]).encode()
        write_durably(staging / MANIFEST, manifest_of_links(merge, action.ledger, results, readme, now()))
        write_durably(staging / CARD, readme)
        for folder, _, _ in os.walk(staging):
            fsync_folder(Path(folder))
        check_crcs(staging, crcs, stop, on_progress)
        check_written(merge, staging)
        check_on_disk(replace(action.successor, path=staging), structure)
    _replace(full.root, staging)
    return _moved(results)


def _replace(root: Path, staging: Path) -> None:
    """Put the checkpoint in ``staging`` in the place of ``root``, and remove the old one. Raises OSError."""
    old = staged(root, FolderKind.OLD)
    replace_folder(staging, root, old)
    fsync_folder(root.parent)
    remove_replaced(root, now_at=staging if staging.exists() else old)


def _moved(results: Iterable[FileResult]) -> CopyStats:
    return sum((result.moved for result in results), CopyStats())


def thin(
    plan: ThinPlan,
    notify: Callable[[PruneAction], None] = lambda action: None,
    on_progress: Callable[[int], None] = lambda num_bytes: None,
    clone: Clone = "auto",
) -> CopyStats:
    """Carry out a plan that was made inside `only_writer`; call ``notify`` after each action.

    Return how the bytes of what was written got there.
    ``on_progress`` gets the bytes written and read, `thin_plan.bytes_to_move` in all, from several threads.

    Raises StorageError, SourceError, VerificationError or Interrupted; finished actions stay, and nothing is lost.
    """
    scan, there, indexes = plan.scan, list(plan.scan.usable), plan.scan.indexes
    differing: list[Problem] = []
    moved = CopyStats()
    with (
        mark_errors_as_late(scan.run, "can't continue", "check the disk and rerun the same command"),
        stoppable() as stop,
    ):
        for folder in plan.left_behind:
            shutil.rmtree(folder)
        for action in plan.actions:
            stop.check()
            full, successor = indexes[action.checkpoint.path], action.successor
            if action.becomes == STAYS:
                logger.info("%s stays: %s", action.checkpoint.name, action.why or "it is one of the newest")
                continue
            if successor is not None and not action.is_written:
                if (problem := find_difference(indexes[successor.path], full, stop, on_progress)) is not None:
                    differing.append(problem)
                    continue
            elif action.becomes == WEIGHTS:
                moved += reduce_to_weights(full, stop, clone, on_progress)
            elif action.becomes == LINKED:
                moved += write_links(action, full, scan.structure, stop, clone, on_progress)
            elif action.conversion is not None:
                moved += write_conversion(action.conversion, stop, on_progress, clone)
            if action.becomes == PARTIAL and successor is not None:
                _remove_full(plan, action, successor, there)
            there = action.applied_to(there)
            notify(action)
        if differing:
            raise VerificationError(differing)
    return moved


def _remove_full(plan: ThinPlan, action: PruneAction, successor: RunCheckpoint, there: Sequence[RunCheckpoint]) -> None:
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
    on_disk = describe_checkpoint(index_checkpoint(promised.path), structure)
    is_same = all(
        (on_disk.step_of(part), on_disk.master_step_of(part)) == (promised.step_of(part), promised.master_step_of(part))
        for part in structure.parts
    )
    if on_disk != promised or on_disk.past != promised.past or not is_same:
        raise VerificationError.at(promised.path, "it does not hold the parts that were decided on", BUG)


def check_composable(run: Path, left: Iterable[RunCheckpoint], step: int, structure: ModelStructure) -> None:
    """Plan the composite of a step from the checkpoints that will be left; nothing is written.

    Raises VerificationError with every problem if that fails.
    """
    usable = usable_at(left, step)
    sources, base = sources_at(usable, step, structure.parts), newest_resumable(usable)
    if sources is None or base is None:
        raise VerificationError.at(run, f"step {step} could no longer be composed", BUG)
    title = f"step {step} after thinning"
    recipe = Recipe.of(Assignment(base, sources, dict.fromkeys(sources, "newest"), title), title)
    try:
        plan_merge(recipe, run / f".checkpoint-{step}.llmtailor-never-written")
    except Unanswered:
        raise
    except TailorError as error:
        raise VerificationError((*error.problems, Problem(str(run), f"step {step} can't be composed", BUG))) from error
