"""The newest state of a run: the newest checkpoint that can be resumed, and the composite of the newest states.

``llmtailor merge --run`` does the same as `compose_newest`, with more options.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmtailor.codes import Code
from llmtailor.compose.plan import Options, plan_merge
from llmtailor.compose.prove import prove
from llmtailor.compose.write import preview, settle_output, write
from llmtailor.containers.json import read_json
from llmtailor.documents import document
from llmtailor.errors import Problem, SourceError, TargetError
from llmtailor.findings import ERROR, Finding, folded
from llmtailor.formats.registry import display_name
from llmtailor.loaders.files import FOLDER, TRAINER_STATE
from llmtailor.loaders.loader import is_partial
from llmtailor.recipe.strategies import StrategyOptions
from llmtailor.runs.attempts import Judge
from llmtailor.runs.folder import RunFolder
from llmtailor.runs.scan import Scan, choose_for_run
from llmtailor.verify.verify import Damage, Verdict, to_json, verify_checkpoint

logger = logging.getLogger(__name__)
_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Newest:
    """The checkpoint with the newest state of a run."""

    path: Path
    step: int
    is_new: bool
    """Whether it was written now; otherwise it was there already"""


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
    run = Path(os.path.abspath(run))
    if not any(RunFolder(folder).complete() for folder in (run, *also)):
        return None
    options = Options(world_size=world_size, reuse=True)
    while True:
        names = frozenset(run.iterdir())
        recipe, opened = choose_for_run(run, None, StrategyOptions("latest"), also=also)
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
    for notice in folded(composition.report.notices):
        logger.warning("%s", notice)
    try:
        preview(composition)
    except TargetError as error:  # a merge of other saves, or for other ranks, that was killed: nobody will resume it
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
        is_abandoned = any(problem.code is Code.GIVEN_UP for problem in scan.refused.get(newest, ()))
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
    if not attempts or os.path.abspath(checkpoint.parent) != os.path.abspath(run) or not state.is_file():
        return False
    step = read_json(state, str(state)).get("global_step")
    if not isinstance(step, int):
        return False
    # an attempt from a later step went on from what the one before had saved
    return next((one.step for one in reversed(attempts) if one.step <= step), None) == step


@dataclass(frozen=True, slots=True)
class Latest:
    """The search result."""

    path: Path | None
    """The newest resumable checkpoint, or None"""
    verdict: Verdict | None
    passed_over: tuple[Verdict, ...]
    """The verdicts on newer checkpoints"""
    newer_partial: Path | None
    """The newest partial checkpoint if it is even newer: a composite would resume from its step"""


def find_latest(
    run: Path,
    at: int | None = None,
    deep: bool = False,
    on_progress: Callable[[int], None] = lambda num_bytes: None,
    *,
    trust_unrecorded: bool = False,
    client: str | None = None,
) -> Latest:
    """Find the newest full checkpoint of a run that `verify_checkpoint` finds resumable.

    Checkpoints of abandoned attempts are skipped.

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
    judge = Judge.of(folder, at, trust_unrecorded)
    found: Path | None = None
    verdicts: list[Verdict] = []
    for step, path in reversed(folder.full().items()):
        if at is None or step <= at:
            verdicts.append(_verify(path, step, deep, on_progress, judge, client))
            if verdicts[-1].is_resumable:
                found = path
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
    path: Path, step: int, deep: bool, on_progress: Callable[[int], None], judge: Judge, client: str | None
) -> Verdict:
    problem = judge.why_not(path, step)
    if problem is None:
        try:
            return verify_checkpoint(path, deep, on_progress, client=client)
        except SourceError as error:  # not a checkpoint, or of an unsupported kind
            problems = error.problems
    else:
        problems = (problem,)
    return Verdict(display_name(path), deep, tuple(Finding.of(one, ERROR) for one in problems), Damage(), None)


def latest_to_json(latest: Latest) -> dict[str, Any]:
    """Return the search result as a `document`."""
    content = {
        "path": latest.path,
        "verdict": to_json(latest.verdict) if latest.verdict else None,
        "passed_over": map(to_json, latest.passed_over),
        "newer_partial": latest.newer_partial,
    }
    return document("latest/1", content)


def prove_step(run: Path, step: int) -> None:
    """Plan what ``llmtailor merge --run RUN --at STEP`` writes, and read its outline back. No state is read or written.

    Raises a TailorError with the reasons if the step can't be composed, and OSError.
    """
    recipe, opened = choose_for_run(run, step, StrategyOptions("latest"))
    # the output is a name only: the run may have a full checkpoint of the step
    composition = plan_merge(recipe, RunFolder(run).partial / f"composite-of-{step}", opened=opened)
    if composition.report.global_step != step:
        raise SourceError(recipe.notices)
    prove(composition)
