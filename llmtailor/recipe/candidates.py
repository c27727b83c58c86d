"""A run's checkpoints, and the choice of one for each part, which becomes a recipe. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llmtailor.checkpoint.lineage import Past


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

    def parts_of(self) -> dict[RunCheckpoint, tuple[str, ...]]:
        """Return the checkpoints, the base first, then newest first, and the parts that come from each."""
        others = sorted(self.source_of.values(), key=lambda source: -source.step)
        return {
            source: tuple(part for part, owner in self.source_of.items() if owner == source)
            for source in dict.fromkeys([self.base, *others])
        }


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
