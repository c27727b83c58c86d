"""The service behind ``llmtailor latest``: find the newest checkpoint of a run that a stock resume can use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtailor.errors import SourceError
from llmtailor.findings import ERROR, Finding
from llmtailor.formats.registry import display_name
from llmtailor.runs.attempts import Judge
from llmtailor.runs.folder import RunFolder
from llmtailor.storage.stand_in import location_of
from llmtailor.verify.verdict import Damage, Verdict, to_json
from llmtailor.verify.verify import verify_checkpoint


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
    """Return the search result as JSON data; the keys are stable within a schema version."""
    return {
        "schema": "llmtailor.latest/1",
        "path": None if latest.path is None else location_of(latest.path),
        "verdict": to_json(latest.verdict) if latest.verdict else None,
        "passed_over": [to_json(verdict) for verdict in latest.passed_over],
        "newer_partial": None if latest.newer_partial is None else str(latest.newer_partial),
    }
