"""Options of the policies: declared once as fields of a frozen dataclass, checked when it is made."""

from __future__ import annotations

import math
from dataclasses import MISSING, Field, field, fields
from typing import Any, ClassVar

from llmtailor.errors import Problem, UsageError


def whole(least: int, default: Any = MISSING) -> Any:
    """Declare an option that is a whole number."""
    return field(default=default, metadata={"kind": int, "least": least})


def number(least: float, default: Any = MISSING) -> Any:
    """Declare an option that is a finite number."""
    return field(default=default, metadata={"kind": float, "least": least})


class Configured:
    """Base of the policies that come with llmtailor.

    Raises UsageError with everything that is wrong with the options.
    """

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    name: ClassVar[str]
    needs_drift: ClassVar[bool] = False

    def __post_init__(self) -> None:
        problems = [problem for one in fields(self) if (problem := self._problem(one))]
        if problems or (problems := self.contradictions()):
            raise UsageError(problems)

    def contradictions(self) -> list[Problem]:
        """Return what is wrong with options that are fine one by one."""
        return []

    def settings(self) -> dict[str, Any]:
        """Return name and options; `make_policy` makes the same policy of them."""
        return {"name": self.name} | {one.name: getattr(self, one.name) for one in fields(self)}

    def _problem(self, option: Field[Any]) -> Problem | None:
        value, kind, least = getattr(self, option.name), option.metadata["kind"], option.metadata["least"]
        if value is None and option.default is None:
            return None
        kinds = (int,) if kind is int else (int, float)
        if type(value) in kinds and math.isfinite(value) and value >= least:
            return None
        noun = "a whole number" if kind is int else "a number"
        return Problem(f"policy {self.name}", f"{option.name} is {value!r}", f"give {noun}, {least} or more")
