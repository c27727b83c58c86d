"""The protocol of policies: what they get and return at a save, and how options are declared and checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar, Protocol, runtime_checkable

from llmtailor.errors import Problem, UsageError
from llmtailor.model.parts import ModelStructure, Part


@dataclass(frozen=True, slots=True)
class Situation:
    """The input of a policy at a save: the same on every rank, and the same after a resume.

    Saves are counted from the complete base, which is save 0; no policy is asked about it.
    """

    step: int
    """Global step of this save"""
    save: int
    """Number of this save: how many of this run came before it"""
    structure: ModelStructure
    parts: tuple[Part, ...]
    """The parts with trainable params, in the order of the model: what can be chosen"""
    num_bytes: Mapping[str, int]
    """Part -> bytes needed to save it, over all ranks"""
    last: Mapping[str, int]
    """Part -> number of the save that last held it. A part that no save holds (frozen until now) is missing."""
    drift: Mapping[str, float] | None = None
    """Part -> relative change ``|w - w_saved| / |w_saved|`` since it was last saved. None unless the policy needs
    it; parts that could not be measured are missing."""
    expected_loss: Mapping[str, float] | None = None
    """Part -> estimate of how much the training loss rises if this part alone is taken from its last save, in nats;
    only the ratios are reliable. None and missing as for `drift`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(map(Part, self.parts)))  # a caller may give text
        if self.save < 1:
            raise ValueError("save 0 is the complete base; no policy is asked about it")
        if lacking := [part for part in self.parts if part not in self.num_bytes]:
            raise ValueError(f"no bytes are given for {', '.join(lacking)}")

    def age(self, part: Part) -> int:
        """Return the part's age in saves if this save leaves it out too."""
        return self.save - self.last[part]


class Policy(Protocol):
    """A choice of the parts that a save holds. It must be deterministic: every rank asks it with the same situation and
    must get the same answer, as must a resumed run.

    A policy need not enforce limits: `choose` adds parts that it leaves out for too long.

    Optional attributes: ``default_max_staleness``, for users who give no bound to a policy without one; and
    ``saves_masters``: if true, every save holds the masters of the parts that are not chosen, so that only moments
    become old; and ``precision``, a `model.precision.Precision` that saves are rounded to unless the options say
    otherwise. A policy with a state of its own follows `Stateful` as well.
    """

    @property
    def name(self) -> str: ...

    @property
    def needs_drift(self) -> bool:
        """Whether it needs `Situation.drift` or `Situation.expected_loss`."""

    def choose(self, situation: Situation) -> Mapping[str, str]:
        """Return the parts to save, each with a short reason."""

    def worst_staleness(self, structure: ModelStructure, parts: Sequence[Part]) -> int | None:
        """Return the maximum age of a part, in saves; None if there is no maximum.

        0 means that every save holds every part, 1 that a part can be one save old.
        """

    def settings(self) -> Mapping[str, object]:
        """Return the options as JSON data, for manifest and log."""


@runtime_checkable
class Stateful(Protocol):
    """A policy with a state beyond the `Situation`. Every checkpoint records it."""

    def state_dict(self) -> Mapping[str, object]:
        """Return the state as JSON data."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class PartChoice:
    """The parts that a save holds."""

    parts: Mapping[Part, str]
    """Part -> reason, in the order of the model. Never empty."""
    added: frozenset[Part]
    """The parts that the policy left out"""
    problems: tuple[Problem, ...] = ()
    """The invalid parts of the policy's answer, which were ignored"""
    masters: tuple[Part, ...] = ()
    """Further parts, of which it holds the masters without the moments"""


def whole(least: int, default: Any = MISSING) -> Any:
    """Declare an option that is a whole number."""
    return field(default=default, metadata={"kind": int, "least": least})


def number(least: float, default: Any = MISSING) -> Any:
    """Declare an option that is a finite number."""
    return field(default=default, metadata={"kind": float, "least": least})


class Configured:
    """Base of the policies that come with llmtailor.

    Raises UsageError with every problem of the options.
    """

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    name: ClassVar[str]
    needs_drift: ClassVar[bool] = False

    def __post_init__(self) -> None:
        problems = [problem for option in fields(self) if (problem := self._problem(option))]
        if problems or (problems := self.contradictions()):
            raise UsageError(problems)

    def contradictions(self) -> list[Problem]:
        """Return the problems of options that are valid one by one but not together."""
        return []

    def settings(self) -> dict[str, object]:
        """Return name and options in a form that `make_policy` accepts."""
        return {"name": self.name} | {option.name: getattr(self, option.name) for option in fields(self)}

    def _problem(self, option: Field[Any]) -> Problem | None:
        value, kind, least = getattr(self, option.name), option.metadata["kind"], option.metadata["least"]
        kinds = (int,) if kind is int else (int, float)
        if type(value) in kinds and math.isfinite(value) and value >= least:
            return None
        noun = "a whole number" if kind is int else "a number"
        return Problem(f"policy {self.name}", f"{option.name} is {value!r}", f"give {noun}, {least} or more")
