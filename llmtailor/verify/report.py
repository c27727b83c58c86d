"""A verdict as text and as JSON data."""

from __future__ import annotations

from typing import Any

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.errors import some
from llmtailor.findings import ERROR, NOTE, SEVERITIES, WARNING
from llmtailor.formats.partial.manifest import FOLDER
from llmtailor.formats.registry import display_name
from llmtailor.verify.verdict import SCHEMA_VERIFY, Holding, Verdict

_PLURAL = {ERROR: "errors", WARNING: "warnings", NOTE: "notes"}


def to_json(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as JSON data; the keys are stable within a schema version."""
    index, holding = verdict.index, verdict.holding
    return {
        "schema": SCHEMA_VERIFY,
        "name": verdict.name,
        "verdict": verdict.level,
        "resumable": verdict.is_resumable,
        "intact": verdict.is_intact,
        "parts": {"held": [*holding.held], "absent": [*holding.absent]} if holding else None,
        "deep": verdict.is_deep,
        "format": index.format if index else None,
        "world_size": index.world_size if index else None,
        "global_step": index.global_step if index else None,
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
        f"{len(found)} {severity if len(found) == 1 else _PLURAL[severity]}"
        for severity in SEVERITIES
        if (found := verdict.of_severity(severity))
    )
    lines = [f"{verdict.name}: {verdict.level}" + (f" ({counts})" if counts else "")]
    if verdict.index is not None:
        index = verdict.index
        read = "every byte was read" if verdict.is_deep else "structure only, no tensor was read"
        lines.append(f"{index.format}, step {index.global_step}, for {index.world_size} ranks; {read}")
        if verdict.holding is not None:
            lines.append(_what_it_holds(verdict.holding, index, verdict.is_intact))
    lines += [f"{finding.severity}: {finding}" for finding in verdict.findings]
    return "\n".join(lines)


def _what_it_holds(holding: Holding, index: CheckpointIndex, is_intact: bool) -> str:
    """Return what a partial checkpoint holds, and the command that makes a resumable checkpoint of it."""
    total = len(holding.held) + len(holding.absent)
    parts = f"{len(holding.held)} of {total} parts: {some(holding.held)}" if holding.absent else f"all {total} parts"
    if not is_intact:
        return f"holds {parts}"
    merge = "llmtailor merge RECIPE"
    if index.root.absolute().parent.name == FOLDER:
        merge = f"llmtailor merge --run {display_name(index.root.absolute().parent.parent)} --at {index.global_step}"
    return f"holds {parts}; for a resumable checkpoint: {merge}"
