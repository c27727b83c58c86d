"""A training run's checkpoints, and the choice of one for each part: what becomes a recipe."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

THINNED = "thin-"
"""Begins the lineages of partial checkpoints that were made of full ones afterwards (see `history.thinned`). They say
how these build on each other, and nothing of the attempt of the training."""

UNRECORDED = "after-"
"""Begins the lineages of trainings that went on from a save without the saver"""


@dataclass(frozen=True, slots=True)
class Past:
    """What a checkpoint, or a training, continues: a step of a lineage, and those that led there."""

    step: int
    lineage: str
    """A random id of an unbroken chain of saves; see `history.ledger`."""
    history: Mapping[str, int]
    """Earlier lineages -> the last step of theirs that belongs to this one"""

    def includes(self, other: Past) -> bool:
        until = self.step if other.lineage == self.lineage else self.history.get(other.lineage, -1)
        return other.step <= until

    def gives_up(self, other: Past) -> bool:
        """Whether it continues a step before the other's, of the same lineage: the other was abandoned for it."""
        return other.step > self.history.get(other.lineage, other.step)


def read_past(step: Any, lineage: Any, history: Any) -> Past | None:
    """Return the past that values out of a file tell of; None if they make no sense."""
    if not _is_step(step) or not isinstance(lineage, str) or not lineage or not isinstance(history, Mapping):
        return None
    if not all(isinstance(name, str) and name and _is_step(until) for name, until in history.items()):
        return None
    return Past(step, lineage, dict(history))


def _is_step(value: Any) -> bool:
    return type(value) is int and value >= 0


def is_one_attempt(stated: Iterable[Past]) -> bool:
    """Whether checkpoints are all of one attempt and what it continues."""
    known = list(stated)
    newest = max(known, key=lambda past: past.step, default=None)
    return newest is None or all(newest.includes(one) for one in known)


def continued(past: Past, step: int) -> Past:
    """Return what a training is that went on from ``past`` to a later step, and that nobody recorded."""
    return Past(step, f"{UNRECORDED}{past.lineage}@{past.step}", {**past.history, past.lineage: past.step})


@dataclass(frozen=True, slots=True)
class RunCheckpoint:
    """A usable checkpoint of a run."""

    path: Path
    step: int
    parts: frozenset[str] | None
    """What it holds; None: every part. A partial checkpoint holds some."""
    resumable: bool = True
    """Whether it can be the base, i.e. supplies learning-rate schedule, random number states and trainer state."""
    past: Past | None = field(default=None, compare=False)
    """Of a partial checkpoint: the saves that it builds on, by its own record of them"""
    part_steps: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Of a composite: the step each part really comes from"""

    @property
    def is_partial(self) -> bool:
        """Whether it is a partial checkpoint, be it with every part."""
        return self.past is not None

    @property
    def name(self) -> str:
        """The name of its folder, e.g. ``checkpoint-300``."""
        return self.path.name

    def holds(self, part: str) -> bool:
        return self.parts is None or part in self.parts

    def step_of(self, part: str) -> int:
        """Return the step at which what it holds of a part was saved."""
        return self.part_steps.get(part, self.step)


@dataclass(frozen=True, slots=True)
class Assignment:
    """Which checkpoint each part comes from, and why."""

    base: RunCheckpoint
    """Supplies what belongs to no part."""
    source_of: Mapping[str, RunCheckpoint]
    """Every part of the anatomy."""
    reason: Mapping[str, str]
    """For every part a few words, e.g. ``newest`` or ``flagged at 150``."""
    title: str
    """What made it, e.g. ``strategy parity at step 400``."""


def newest_resumable(checkpoints: Iterable[RunCheckpoint]) -> RunCheckpoint | None:
    """Return what can be the base; of two of the same step the one that holds more."""
    able = [checkpoint for checkpoint in checkpoints if checkpoint.resumable]
    return max(able, key=lambda one: (one.step, one.parts is None), default=None)


def best_holder(candidates: Iterable[RunCheckpoint], part: str) -> RunCheckpoint | None:
    """Return what holds the newest state of the part; of two of the same step the full one, to read from fewer folders.

    Of two that hold the same state, such as a composite and what it was made of, the newer one is taken.
    """
    holders = [checkpoint for checkpoint in candidates if checkpoint.holds(part)]
    return max(holders, key=lambda one: (one.step_of(part), one.parts is None, one.step), default=None)


def usable_at(checkpoints: Iterable[RunCheckpoint], step: int) -> list[RunCheckpoint]:
    """Return what a composite of a step can be made of: full checkpoints up to then, and partial ones of the same
    attempt as the newest of them."""
    until = [checkpoint for checkpoint in checkpoints if checkpoint.step <= step]
    pasts = [checkpoint.past for checkpoint in until if checkpoint.past]
    newest = max(pasts, key=lambda past: past.step, default=None)
    return [one for one in until if one.past is None or (newest and newest.includes(one.past))]


def sources_at(
    checkpoints: Iterable[RunCheckpoint], step: int, parts: Collection[str]
) -> dict[str, RunCheckpoint] | None:
    """Return what each part of a composite of a step comes from, all the newest; None if it can't be composed.

    It can't if a part has no holder up to then, or nothing of the very step can be the base.
    """
    usable = usable_at(checkpoints, step)
    base = newest_resumable(usable)
    if base is None or base.step != step:
        return None
    holders = {part: best_holder(usable, part) for part in parts}
    found = {part: holder for part, holder in holders.items() if holder is not None}
    return found if len(found) == len(holders) else None


def composable_steps(checkpoints: Sequence[RunCheckpoint], parts: Collection[str]) -> list[int]:
    """Return the steps that a complete checkpoint can be composed for, or is there, ascending."""
    steps = sorted({checkpoint.step for checkpoint in checkpoints})
    return [step for step in steps if sources_at(checkpoints, step, parts) is not None]
