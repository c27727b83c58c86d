"""What `verify` says about a checkpoint: a level, findings, and which files and states are damaged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from llmtailor.core.findings import ERROR, SEVERITIES, WARNING, Finding
from llmtailor.core.index import CheckpointIndex
from llmtailor.core.states import State

RESUMABLE = "resumable"
WITH_WARNINGS = "resumable with warnings"
NOT_RESUMABLE = "not resumable"
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
    """What can be told of the checkpoint in spite of the damage; see `core.index.Survey`."""

    @property
    def level(self) -> str:
        severities = {finding.severity for finding in self.findings}
        return NOT_RESUMABLE if ERROR in severities else WITH_WARNINGS if WARNING in severities else RESUMABLE

    @property
    def is_resumable(self) -> bool:
        """Whether a stock resume works; maybe with warnings."""
        return self.level != NOT_RESUMABLE

    def of_severity(self, severity: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == severity]


def by_severity(findings: list[Finding]) -> tuple[Finding, ...]:
    """Sort findings, each once, the severe ones first."""
    return tuple(sorted(dict.fromkeys(findings), key=lambda finding: SEVERITIES.index(finding.severity)))
