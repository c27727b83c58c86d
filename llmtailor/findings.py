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
    params: tuple[str, ...] = ()
    """Those concerned, where there are others of which it does not hold"""

    @classmethod
    def of(cls, problem: Problem, severity: str) -> Finding:
        """Give a problem a severity."""
        return cls(problem.where, problem.what, problem.fix, problem.code, severity)

    @property
    def problem(self) -> Problem:
        """The same without its severity"""
        return Problem(self.where, self.what, self.fix, self.code)

    def to_json(self) -> dict[str, str | None]:
        return {"severity": self.severity, **Problem.to_json(self)}
