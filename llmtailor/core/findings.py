"""What is wrong or odd about a checkpoint, and how much it matters to a resume."""

from __future__ import annotations

from dataclasses import dataclass

from llmtailor.errors import Problem

ERROR = "error"
"""A stock resume fails, or goes on from something else than the checkpoint claims, without a word."""
WARNING = "warning"
"""A stock resume works, but something of the saved state is lost on the way, or is not as it should be."""
NOTE = "note"
"""Worth knowing; a resume is not touched by it."""
SEVERITIES = (ERROR, WARNING, NOTE)


@dataclass(frozen=True, slots=True)
class Finding(Problem):
    """A problem with a severity. States can be read all the same, unless an error says otherwise."""

    severity: str = NOTE

    def to_json(self) -> dict[str, str]:
        return {"severity": self.severity, "where": self.where, "what": self.what, "fix": self.fix}
