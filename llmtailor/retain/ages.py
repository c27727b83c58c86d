"""How old the parts of what can be composed are, now and afterwards. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llmtailor.core.run import RunCheckpoint, sources_at


@dataclass(frozen=True, slots=True)
class Age:
    """The oldest parts of the composite of a step."""

    steps_back: int
    """How many steps before it they were saved; 0 if all are of that step"""
    parts: tuple[str, ...]
    """Which they are; empty if all are of that step"""


@dataclass(frozen=True, slots=True)
class StepAge:
    """A step that stays composable."""

    step: int
    now: Age | None
    """None if it can't be composed now"""
    afterwards: Age


def compare_ages(
    before: Sequence[RunCheckpoint], after: Sequence[RunCheckpoint], steps: Iterable[int], parts: Sequence[str]
) -> tuple[StepAge, ...]:
    """Say of each step that can be composed of what is left how old its parts will be, and are."""
    found = ((step, _age(before, step, parts), _age(after, step, parts)) for step in steps)
    return tuple(StepAge(step, now, afterwards) for step, now, afterwards in found if afterwards is not None)


def _age(checkpoints: Sequence[RunCheckpoint], step: int, parts: Sequence[str]) -> Age | None:
    sources = sources_at(checkpoints, step, parts)
    if sources is None:
        return None
    back = {part: step - sources[part].step_of(part) for part in parts}
    most = max(0, *back.values())
    return Age(most, tuple(part for part in parts if most and back[part] == most))
