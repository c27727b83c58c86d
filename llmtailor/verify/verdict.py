"""The result of `verify`: a level, findings, and the damaged files and states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.findings import ERROR, SEVERITIES, WARNING, Finding
from llmtailor.model.states import State

RESUMABLE = "resumable"
WITH_WARNINGS = "resumable with warnings"
NOT_RESUMABLE = "not resumable"
INTACT = "partial, intact"
INTACT_WITH_WARNINGS = "partial, intact with warnings"
DAMAGED = "partial, damaged"
SCHEMA_VERIFY = "llmtailor.verify/1"
SCHEMA_LATEST = "llmtailor.latest/1"


@dataclass(frozen=True, slots=True)
class Damage:
    """The unusable files and elements; everything else that was checked is usable."""

    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Files that are missing, incomplete or wrong: relative path -> what is wrong"""
    states: Mapping[State, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """Elements ``begin``..``end`` of a state that are lost or wrong, as ascending, disjoint runs. If two states
    contradict each other, both are listed."""


@dataclass(frozen=True, slots=True)
class Holding:
    """The parts that a partial checkpoint holds and lacks."""

    held: tuple[str, ...]
    absent: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of verifying a checkpoint."""

    name: str
    """The checkpoint's name in messages"""
    is_deep: bool
    """Whether the tensors were also read"""
    findings: tuple[Finding, ...]
    """Sorted by severity, the most severe first"""
    damage: Damage
    index: CheckpointIndex | None
    """What is known of the checkpoint despite the damage; see `checkpoint.index.Survey`."""
    is_partial: bool = False
    """Whether it is partial: no stock resume reads it, so it is judged as a source of composites"""
    holding: Holding | None = None
    """Set for a partial checkpoint that could be indexed"""

    @property
    def level(self) -> str:
        levels = (
            (DAMAGED, INTACT_WITH_WARNINGS, INTACT) if self.is_partial else (NOT_RESUMABLE, WITH_WARNINGS, RESUMABLE)
        )
        return levels[0 if self.of_severity(ERROR) else 1 if self.of_severity(WARNING) else 2]

    @property
    def is_intact(self) -> bool:
        """Whether a stock resume works or, for a partial checkpoint, everything it holds is usable"""
        return not self.of_severity(ERROR)

    @property
    def is_resumable(self) -> bool:
        """Whether a stock resume works, possibly with warnings; a partial checkpoint never resumes by itself"""
        return self.is_intact and not self.is_partial

    def of_severity(self, severity: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == severity]


def by_severity(findings: list[Finding]) -> tuple[Finding, ...]:
    """Return the findings without duplicates, the most severe first."""
    return tuple(sorted(dict.fromkeys(findings), key=lambda finding: SEVERITIES.index(finding.severity)))
