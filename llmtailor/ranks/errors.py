"""Errors between ranks: made from an exception, sent as JSON, and those of several ranks as one.

Nothing is lost as JSON: class, exit code, and of each problem its place with the path in a checkpoint, text, fix, code,
severity, params, and the ranks that have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from llmtailor.codes import Code
from llmtailor.errors import BRANCHES, Interrupted, PathIn, Problem, StorageError, TailorError
from llmtailor.findings import Finding


def as_error(error: BaseException, where: str = "") -> TailorError:
    """Return an exception as ranks report it; ``where`` is the place of one that names none."""
    if isinstance(error, TailorError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return Interrupted.at("", "interrupted", "rerun the same command")
    if isinstance(error, OSError):
        what, fix = f"can't read or write: {error.strerror or error}", "free some space, or check the disk"
        return StorageError.at(error.filename or where, what, fix)
    fix = "this is a bug in llmtailor, or in what it was given: please report it with that rank's traceback"
    return TailorError.at(where, f"unexpected {type(error).__name__}: {error!s:.500}", fix)


def to_json(error: TailorError) -> dict[str, Any]:
    return {
        "class": type(error).__name__,
        "exit_code": error.exit_code,
        "came_late": error.came_late,
        "problems": [_problem_to_json(problem) for problem in dict.fromkeys(error.problems)],
    }


def from_json(content: Mapping[str, Any]) -> TailorError:
    """Return an error that another rank has written; its class, or if that is not known here, that of its exit code."""
    kinds = {kind.__name__: kind for kind in _kinds(TailorError)}
    branch = next((kind for kind in BRANCHES if kind.exit_code == content["exit_code"]), TailorError)
    error = kinds.get(content["class"], branch)(map(_problem_from_json, content["problems"]))
    error.came_late = content["came_late"]
    return error


def merged(errors: Mapping[int, TailorError], num_ranks: int) -> TailorError:
    """Return the errors of some of several ranks as one: each problem once, with its ranks, unless all have it.

    Its class is that of the lowest exit code: a full disk must not hide a bug or a refusal.
    """
    first = min(errors.values(), key=lambda error: error.exit_code)
    if len(errors) == num_ranks == 1:
        return first
    ranks_of: dict[Problem, list[int]] = {}
    for rank, error in sorted(errors.items()):
        for problem in dict.fromkeys(error.problems):
            ranks_of.setdefault(problem, []).append(rank)
    whole = type(first)(
        problem if problem.ranks or len(ranks) == num_ranks else replace(problem, ranks=tuple(ranks))
        for problem, ranks in ranks_of.items()
    )
    whole.__dict__ |= {**first.__dict__, "problems": whole.problems}
    whole.came_late = any(error.came_late for error in errors.values())
    return whole


def _kinds(kind: type[TailorError]) -> Iterator[type[TailorError]]:
    yield kind
    for one in kind.__subclasses__():
        yield from _kinds(one)


def _problem_to_json(problem: Problem) -> dict[str, Any]:
    content = {field.name: getattr(problem, field.name) for field in fields(problem)}
    where = problem.where
    place = [where.checkpoint, where.path] if isinstance(where, PathIn) else str(where)
    return {**content, "where": place, "code": problem.code.value}


def _problem_from_json(content: Mapping[str, Any]) -> Problem:
    where, known = content["where"], {code.value: code for code in Code}
    found: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in content.items()
    }
    found |= {"where": PathIn(*where) if isinstance(where, list) else where, "code": known[content["code"]]}
    return (Finding if "severity" in found else Problem)(**found)
