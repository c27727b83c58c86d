"""What a run's folder holds: which checkpoints can be used together, and which is the newest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.lineage import Ledger, Past, RunCheckpoint, best_holders
from llmtailor.codes import Code
from llmtailor.compose.checks import differences
from llmtailor.containers.json import read_json
from llmtailor.documents import document
from llmtailor.errors import Problem, SourceError
from llmtailor.findings import ERROR
from llmtailor.formats.partial.manifest import read_manifest
from llmtailor.formats.registry import (
    absent_parts,
    display_name,
    find_structure,
    index_checkpoint,
    shared_layers,
    with_experts,
)
from llmtailor.frameworks.files import FOLDER, TRAINER_STATE
from llmtailor.frameworks.framework import framework_of, is_partial
from llmtailor.model.parts import ModelStructure, Part, with_layers
from llmtailor.model.roles import MASTER
from llmtailor.runs.attempts import AttemptFilter
from llmtailor.runs.folder import RunFolder
from llmtailor.storage.local import absolute
from llmtailor.verify.verify import Verdict, refused, to_json, verify_checkpoint

logger = logging.getLogger(__name__)
T = TypeVar("T")
Index = Callable[[Path], CheckpointIndex]


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
        return tuple(checkpoint for checkpoint in self.usable if checkpoint.is_partial)

    @property
    def skipped(self) -> tuple[Problem, ...]:
        """Why the others can't be used, all together"""
        return tuple(problem for problems in self.refused.values() for problem in problems)


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

    def is_enough(indexes: list[CheckpointIndex], step: int) -> bool:
        nonlocal whole, structure
        whole = whole or find_structure(indexes[0])
        layers = {layer for index in indexes[len(usable) :] for layer in shared_layers(index, whole)}
        if structure is None or not layers <= shared:
            shared.update(layers)
            structure = with_experts(whole, indexes[0], shared)
            usable.clear()
        usable.extend(describe_checkpoint(index, structure) for index in indexes[len(usable) :])
        if not only_newest:
            return False
        newest = best_holders(usable, structure.parts)
        return all(part in newest and newest[part].step_of(part) >= step for part in structure.parts)

    indexes, refused = scan_back(
        run,
        at,
        read=lambda path, indexes: index(path),
        index_of=lambda index: index,
        is_enough=is_enough,
        base=base,
        also=also,
        every_chain=every_chain,
        trust_unrecorded=trust_unrecorded,
    )
    if not indexes:
        until = f" at or before step {at}" if at is not None else ""
        head = Problem(display_name(run), f"no checkpoint{until} can be used", "fix one of the checkpoints below")
        raise SourceError([head, *(problem for problems in refused.values() for problem in problems)])
    is_enough(indexes, 0)
    assert structure is not None
    usable.sort(key=lambda checkpoint: checkpoint.step)
    return Scan(run, tuple(usable), refused, structure, {index.root: index for index in indexes})


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
    results: list[T] = []
    refused: dict[Path, tuple[Problem, ...]] = {}
    past: Past | None = None

    def refuse(folder: Path, *problems: Problem) -> None:
        refused[folder] = problems
        logger.info("skipped %s: %s", problems[0].where, problems[0].what)

    for step, folder in folders:
        if results and is_enough(results, step):
            logger.info("stopped at %s: every part is found", index_of(results[-1]).name)
            break
        unrecorded = judge.why_not(folder, step) if folder != base else None
        if unrecorded is not None and unrecorded.code is Code.ABANDONED:
            refuse(folder, unrecorded)
            continue
        try:
            result = read(folder, results)
            index = index_of(result)
            ledger = ledger_of(index)
        except SourceError as error:  # Unanswered is not caught
            refuse(folder, *error.problems)
            continue
        is_converted = index.composite.is_converted and not index.form.is_partial
        if is_converted and any(at == step and is_partial(path) for at, path in folders):
            # the save of its step holds the same, and maybe more: what one format needs has no place in another
            logger.info("%s is not used: it is a composite of the saves of its step, in another format", index.name)
            continue
        reason = unrecorded or _why_not(step, index, index_of(results[0]) if results else None)
        mine = ledger.past(index.global_step) if ledger else None
        if reason is None and not every_chain and past and mine and not past.includes(mine):
            what = "the newest partial checkpoint does not build on it"
            reason = Problem(index.name, what, "to use it anyway, name it in a recipe")
        if reason is not None:
            refuse(folder, reason)
            continue
        past = past or mine
        results.append(result)
    return results, refused


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
        bases={structure.part_of[name]: difference.base for name, difference in index.partial.differences.items()},
        is_thinned=index.partial.is_thinned,
    )


def _why_not(step: int, index: CheckpointIndex, newest: CheckpointIndex | None) -> Problem | None:
    """Return why a checkpoint can't be used with the newest good one, or None; ``step`` is the one in its name."""
    if step >= 0 and step != index.global_step:
        what = f"its name says step {step}, but its content is of step {index.global_step}"
        return Problem(index.name, what, "rename the folder, or name it in a recipe")
    unlike = differences(index, newest) if newest else []
    return unlike[0] if unlike else None


def find_newest(checkpoints: Iterable[tuple[int, Path]], is_usable: Callable[[int, Path], bool | None]) -> Path | None:
    """Return the newest checkpoint that is usable: the first one, since ``checkpoints`` are the newest first.

    ``is_usable`` returns None if that can't be told. Then the result is None too: this one may be the newest.
    """
    for step, path in checkpoints:
        if (answer := is_usable(step, path)) is not False:
            return path if answer else None
    return None


def check_newest(scan: Scan) -> Path:
    """Return the newest checkpoint of a run's current attempt.

    Raises SourceError with the reasons if nothing can resume from it: then only the older ones are left. A full one is
    verified for a resume, not only for a merge.
    """

    def is_current(step: int, path: Path) -> bool:
        is_abandoned = any(problem.code is Code.ABANDONED for problem in scan.refused.get(path, ()))
        return not is_abandoned and (path.parent.name != FOLDER or is_partial(path))

    newest = find_newest(RunFolder(scan.run).checkpoints_until(None), is_current) or scan.run
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
    return next((past.step for past in reversed(attempts) if past.step <= step), None) == step


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
    framework: str | None = None,
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
        framework: what will resume, see `verify_checkpoint`.

    Raises:
        SourceError: the folder does not exist.
        Interrupted: Ctrl-C or SIGTERM.
    """
    folder = RunFolder(run)
    attempt = AttemptFilter.of(folder, at, trust_unrecorded)
    verdicts: list[Verdict] = []

    def until(checkpoints: dict[int, Path]) -> Iterator[tuple[int, Path]]:
        return ((step, path) for step, path in reversed(checkpoints.items()) if at is None or step <= at)

    def is_resumable(step: int, path: Path) -> bool | None:
        try:
            if (problem := attempt.why_not(path, step)) is not None:
                raise SourceError(problem)
            verdict = verify_checkpoint(path, deep, on_progress, framework=framework)
        except SourceError as error:  # also for a folder that is not a checkpoint, or of an unsupported kind
            verdict = refused(path, deep, error)
        verdicts.append(verdict)
        return verdict.is_resumable if verdict.is_judged else None

    newest = find_newest(until(folder.full()), is_resumable)
    verdict = verdicts.pop() if newest else None
    least = verdict.index.global_step if verdict and verdict.index else -1
    newer_partial = find_newest(
        until(folder.complete()), lambda step, path: step > least and attempt.why_not(path, step) is None
    )
    return Latest(newest, verdict, tuple(verdicts), newer_partial)


def latest_to_json(latest: Latest) -> dict[str, Any]:
    content = {
        "path": latest.path,
        "verdict": to_json(latest.verdict) if latest.verdict else None,
        "passed_over": map(to_json, latest.passed_over),
        "newer_partial": latest.newer_partial,
    }
    return document("latest/1", content)
