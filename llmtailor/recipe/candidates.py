"""The choice of a checkpoint for each part: what becomes a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmtailor.checkpoint.lineage import RunCheckpoint


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
