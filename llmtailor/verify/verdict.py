"""The result of `verify`: a level, findings, and the damaged files and states; as text and as JSON data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmtailor.checkpoint.index import DCP, TRAINER, CheckpointIndex
from llmtailor.checkpoint.placement import Runs
from llmtailor.errors import counted
from llmtailor.findings import ERROR, SEVERITIES, WARNING, Finding, folded
from llmtailor.formats.clients import client_of
from llmtailor.formats.partial.manifest import FOLDER
from llmtailor.formats.registry import display_name
from llmtailor.model.parts import condense
from llmtailor.model.states import State

RESUMABLE = "resumable"
WITH_WARNINGS = "resumable with warnings"
NOT_RESUMABLE = "not resumable"
INTACT = "partial, intact"
INTACT_WITH_WARNINGS = "partial, intact with warnings"
DAMAGED = "partial, damaged"


@dataclass(frozen=True, slots=True)
class Damage:
    """The unusable files and elements; everything else that was checked is usable."""

    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Files that are missing, incomplete or wrong: relative path -> what is wrong"""
    states: Mapping[State, Runs] = field(default_factory=dict)
    """Elements of a state that are lost or wrong. If two states contradict each other, both are listed."""


@dataclass(frozen=True, slots=True)
class Holding:
    """The parts that a partial checkpoint holds and lacks."""

    held: tuple[str, ...]
    absent: tuple[str, ...]
    masters: tuple[str, ...] = ()
    """Those of the absent parts of which it holds the masters, without the moments"""


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


def to_json(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as JSON data; the keys are stable within a schema version."""
    index, holding = verdict.index, verdict.holding
    known = ("format", "world_size", "global_step")
    return {
        "schema": "llmtailor.verify/1",
        "name": verdict.name,
        "verdict": verdict.level,
        "resumable": verdict.is_resumable,
        "intact": verdict.is_intact,
        "parts": {"held": [*holding.held], "absent": [*holding.absent]} if holding else None,
        "deep": verdict.is_deep,
        **{name: getattr(index, name, None) for name in known},
        "findings": [finding.to_json() for finding in verdict.findings],
        "damaged_files": [{"path": path, "what": list(what)} for path, what in sorted(verdict.damage.files.items())],
        "damaged_states": [
            {"param": state.param, "kind": state.kind, "elements": [list(run) for run in runs]}
            for state, runs in sorted(verdict.damage.states.items())
        ],
    }


def to_text(verdict: Verdict) -> str:
    """Return the verdict in one line, followed by the findings, the most severe first."""
    counts = ", ".join(
        counted(len(found), severity) for severity in SEVERITIES if (found := verdict.of_severity(severity))
    )
    lines = [f"{verdict.name}: {verdict.level}" + (f" ({counts})" if counts else "")]
    if (index := verdict.index) is not None:
        read = "every byte was read" if verdict.is_deep else "structure only, no tensor was read"
        by = "" if index.client in (TRAINER, DCP) else f", resumed by {client_of(index).loader}"
        ranks = counted(index.world_size, "rank")
        lines.append(f"{index.format}, step {index.global_step}, for {ranks}{by}; {read}")
        if verdict.holding is not None:
            lines.append(_what_it_holds(verdict.holding, index, verdict.is_intact))
    lines += [f"{finding.severity}: {finding}" for finding in folded(verdict.findings)]
    return "\n".join(lines)


def _what_it_holds(holding: Holding, index: CheckpointIndex, is_intact: bool) -> str:
    """Return what a partial checkpoint holds, and the command that makes a resumable checkpoint of it."""
    total = len(holding.held) + len(holding.absent)
    parts = (
        f"{len(holding.held)} of {total} parts: {condense(holding.held)}" if holding.absent else f"all {total} parts"
    )
    if holding.masters:
        parts += f"; the masters alone of {len(holding.masters)}: {condense(holding.masters)}"
    if not is_intact:
        return f"holds {parts}"
    merge = "llmtailor merge RECIPE"
    if index.root.absolute().parent.name == FOLDER:
        merge = f"llmtailor merge --run {display_name(index.root.absolute().parent.parent)} --at {index.global_step}"
    return f"holds {parts}; for a resumable checkpoint: {merge}"
