"""Problems of a checkpoint, and how much they matter to a resume."""

from __future__ import annotations

from dataclasses import dataclass

from llmtailor.errors import Problem

ERROR = "error"
"""A stock resume fails, or silently continues from something other than the checkpoint claims."""
WARNING = "warning"
"""A stock resume works, but part of the saved state is lost, or is not as it should be."""
NOTE = "note"
"""Worth knowing; does not affect a resume."""
SEVERITIES = (ERROR, WARNING, NOTE)


@dataclass(frozen=True, slots=True)
class Finding(Problem):
    """A problem with a severity. States can still be read, unless an error says otherwise."""

    severity: str = NOTE
    params: tuple[str, ...] = ()
    """The params concerned, if not all are"""

    @classmethod
    def of(cls, problem: Problem, severity: str) -> Finding:
        """Return a problem with a severity."""
        return cls(problem.where, problem.what, problem.fix, problem.code, severity)

    @property
    def problem(self) -> Problem:
        """The problem without its severity"""
        return Problem(self.where, self.what, self.fix, self.code)

    def to_json(self) -> dict[str, str | None]:
        return {"severity": self.severity, **Problem.to_json(self)}
