"""Runs without training: policies are asked save by save, and what they answer counts as saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from llmtailor.errors import Problem, UsageError
from llmtailor.model.parts import ModelStructure
from llmtailor.policies import Policy, Situation, choose

Drift = Callable[[int, Mapping[str, int]], Mapping[str, float]]
"""(number of the save, part -> number of the save that last held it) -> drift"""


def alike(parts: Sequence[str], num_bytes: int = 100) -> dict[str, int]:
    return dict.fromkeys(parts, num_bytes)


def situation(
    structure: ModelStructure,
    save: int = 1,
    *,
    parts: Sequence[str] | None = None,
    num_bytes: Mapping[str, int] | None = None,
    last: Mapping[str, int] | None = None,
    drift: Mapping[str, float] | None = None,
) -> Situation:
    """Return a situation; by default the first save behind a base that held parts of equal size."""
    parts = tuple(structure.parts if parts is None else parts)
    last = dict.fromkeys(parts, 0) if last is None else last
    return Situation(save * 50, save, structure, parts, num_bytes or alike(parts), last, drift, drift)


def by_itself(
    policy: Policy, structure: ModelStructure, saves: int, *, parts: Sequence[str] | None = None, **given: Any
) -> list[list[str]]:
    """Return what a fixed schedule chooses at saves 1.., without anything added to it."""
    return [list(policy.choose(situation(structure, save, parts=parts, **given))) for save in range(1, saves + 1)]


@dataclass
class Made:
    """A run: what each save held."""

    saved: list[dict[str, str]] = field(default_factory=list)
    """Part -> why, for saves 1.."""
    costs: list[int] = field(default_factory=list)
    oldest: int = 0
    """In saves."""


def run(
    policy: Policy,
    structure: ModelStructure,
    max_staleness: int,
    saves: int,
    *,
    num_bytes: Mapping[str, int] | None = None,
    drift: Drift | None = None,
) -> Made:
    made = Made()
    last = dict.fromkeys(structure.parts, 0)
    for save in range(1, saves + 1):
        measured = drift(save, last) if drift else None
        now = situation(structure, save, num_bytes=num_bytes, last=dict(last), drift=measured)
        choice = choose(policy, now, max_staleness)
        assert choice.parts
        assert not choice.problems
        last |= dict.fromkeys(choice.parts, save)
        made.saved.append(dict(choice.parts))
        made.costs.append(sum(now.num_bytes[part] for part in choice.parts))
        made.oldest = max(made.oldest, *(save - held for held in last.values()))
    return made


class Custom:
    """A policy made of a function; it promises nothing by default."""

    name = "custom"

    def __init__(
        self, choose: Callable[[Situation], Any], worst: int | None = None, *, needs_drift: bool = False
    ) -> None:
        self.choose = choose
        self.worst = worst
        self.needs_drift = needs_drift

    def worst_staleness(self, structure: ModelStructure, parts: Sequence[str]) -> int | None:
        return self.worst

    def settings(self) -> dict[str, Any]:
        return {"name": self.name}


def refusal(action: Callable[[], object]) -> list[Problem]:
    """Return the problems of the UsageError that the action must raise."""
    with pytest.raises(UsageError) as caught:
        action()
    assert all(problem.where and problem.what and problem.fix for problem in caught.value.problems)
    return list(caught.value.problems)
