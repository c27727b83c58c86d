"""What `verify` says about a checkpoint: a level, findings, and which files and states are damaged."""

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
    """What can't be used any more; everything else can, as far as it was looked at."""

    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Files that are missing, not whole, or not what they should be: relative path -> what is wrong with them."""
    states: Mapping[State, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """Elements ``begin``..``end`` of a state that are lost or wrong: ascending runs that don't touch. Where two states
    contradict each other, both are listed."""


@dataclass(frozen=True, slots=True)
class Holding:
    """The parts of the model, as a partial checkpoint has them."""

    held: tuple[str, ...]
    absent: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of verifying a checkpoint."""

    name: str
    """How messages call it."""
    is_deep: bool
    """Whether the tensors were read, too."""
    findings: tuple[Finding, ...]
    """The severe ones first."""
    damage: Damage
    index: CheckpointIndex | None
    """What is known of the checkpoint in spite of the damage; see `checkpoint.index.Survey`."""
    is_partial: bool = False
    """No stock resume reads it; it is judged as a source of composites."""
    holding: Holding | None = None
    """Of a partial checkpoint that could be indexed"""

    @property
    def level(self) -> str:
        levels = (
            (DAMAGED, INTACT_WITH_WARNINGS, INTACT) if self.is_partial else (NOT_RESUMABLE, WITH_WARNINGS, RESUMABLE)
        )
        return levels[0 if self.of_severity(ERROR) else 1 if self.of_severity(WARNING) else 2]

    @property
    def is_intact(self) -> bool:
        """Whether it is good for what it claims to be: a stock resume, or what a partial checkpoint holds."""
        return not self.of_severity(ERROR)

    @property
    def is_resumable(self) -> bool:
        """Whether a stock resume works; maybe with warnings. A partial checkpoint never resumes by itself."""
        return self.is_intact and not self.is_partial

    def of_severity(self, severity: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == severity]


def by_severity(findings: list[Finding]) -> tuple[Finding, ...]:
    """Sort findings, each once, the severe ones first."""
    return tuple(sorted(dict.fromkeys(findings), key=lambda finding: SEVERITIES.index(finding.severity)))
