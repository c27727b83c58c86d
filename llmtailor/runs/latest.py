"""The service behind ``llmtailor latest``: the newest checkpoint of a run that a stock resume can be trusted with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtailor.errors import SourceError
from llmtailor.findings import ERROR, Finding
from llmtailor.formats.partial.read import is_partial
from llmtailor.formats.registry import display_name
from llmtailor.runs.folder import list_checkpoints
from llmtailor.runs.judge import Judge, list_all
from llmtailor.verify.report import to_json
from llmtailor.verify.verdict import SCHEMA_LATEST, Damage, Verdict
from llmtailor.verify.verify import verify_checkpoint


@dataclass(frozen=True, slots=True)
class Latest:
    """The outcome of the search, newest first."""

    path: Path | None
    """The newest resumable checkpoint; None if there is none."""
    verdict: Verdict | None
    passed_over: tuple[Verdict, ...]
    """The verdicts of those that are newer."""
    newer_partial: Path | None
    """The newest partial checkpoint that is newer still, if there is one: a composite would resume from its step."""


def find_latest(
    run: Path,
    at: int | None = None,
    deep: bool = False,
    observe: Callable[[int], None] = lambda num_bytes: None,
    *,
    trust_unrecorded: bool = False,
) -> Latest:
    """Find the newest ``checkpoint-N`` of a run that `verify_checkpoint` finds resumable.

    Checkpoints of abandoned attempts are skipped.

    Args:
        run: the Trainer's ``output_dir``.
        at: the highest N to consider; None for any.
        deep: read every tensor, too.
        observe: with ``deep``, called with a number of bytes read, from several threads.
        trust_unrecorded: also consider checkpoints that do not say which attempt they belong to.

    Raises:
        SourceError: there is no such folder.
        Interrupted: Ctrl-C or SIGTERM.
    """
    passed_over: list[Verdict] = []
    judge = Judge.of(run, at, trust_unrecorded)
    for path, verdict in _verdicts(run, at, deep, observe, judge):
        if verdict.is_resumable:
            return Latest(path, verdict, tuple(passed_over), _newer_partial(run, at, verdict, judge))
        passed_over.append(verdict)
    return Latest(None, None, tuple(passed_over), _newer_partial(run, at, None, judge))


def _newer_partial(run: Path, at: int | None, than: Verdict | None, judge: Judge) -> Path | None:
    least = than.index.global_step if than and than.index else -1
    own = (
        path
        for step, path in list_all(run)
        if least < step and (at is None or step <= at) and is_partial(path) and judge.why_not(path, step) is None
    )
    return next(own, None)


def _verdicts(
    run: Path, at: int | None, deep: bool, observe: Callable[[int], None], judge: Judge
) -> Iterator[tuple[Path, Verdict]]:
    for step, path in sorted(list_checkpoints(run).items(), reverse=True):
        if at is not None and step > at:
            continue
        if (problem := judge.why_not(path, step)) is not None:
            yield path, Verdict(display_name(path), deep, (Finding.of(problem, ERROR),), Damage(), None)
            continue
        try:
            yield path, verify_checkpoint(path, deep, observe)
        except SourceError as error:  # no checkpoint, or of a kind that can't be judged
            findings = tuple(Finding.of(one, ERROR) for one in error.problems)
            yield path, Verdict(display_name(path), deep, findings, Damage(), None)


def latest_to_json(latest: Latest) -> dict[str, Any]:
    """Return the outcome of a search as JSON data; the keys are stable within a schema version."""
    return {
        "schema": SCHEMA_LATEST,
        "path": None if latest.path is None else str(latest.path),
        "verdict": to_json(latest.verdict) if latest.verdict else None,
        "passed_over": [to_json(verdict) for verdict in latest.passed_over],
        "newer_partial": None if latest.newer_partial is None else str(latest.newer_partial),
    }
