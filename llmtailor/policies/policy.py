"""What a policy is asked at a save, what it answers, and how its options are declared and checked."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar, Protocol, runtime_checkable

from llmtailor.errors import Problem, UsageError
from llmtailor.model.parts import ModelStructure, layer_part


@dataclass(frozen=True, slots=True)
class Situation:
    """What a policy may know at a save. The same on every rank, and the same again after a resume.

    Saves are counted from the complete base, which is save 0 and which no policy is asked about.
    """

    step: int
    """The global step of this save."""
    save: int
    """The number of this save: how many of this run came before it."""
    structure: ModelStructure
    parts: tuple[str, ...]
    """The parts that have trainable params, in the order of the model: what can be chosen."""
    num_bytes: Mapping[str, int]
    """Part -> bytes that saving it costs, over all ranks."""
    last: Mapping[str, int]
    """Part -> number of the save that last held it. A part that no save holds (frozen until now) is missing."""
    drift: Mapping[str, float] | None = None
    """Part -> relative change ``|w - w_saved| / |w_saved|`` since it was last saved. None unless the policy asks for
    it; a part that can't be measured is missing."""

    def __post_init__(self) -> None:
        if self.save < 1:
            raise ValueError("save 0 is the complete base; no policy is asked about it")
        if lacking := [part for part in self.parts if part not in self.num_bytes]:
            raise ValueError(f"no bytes are given for {', '.join(lacking)}")

    def age(self, part: str) -> int:
        """Return how many saves old the part will be if this save leaves it out too."""
        return self.save - self.last[part]


class Policy(Protocol):
    """Says which parts a save holds. Must be deterministic, so that a resumed run goes on as if nothing had happened.

    Rank 0 asks, and tells the others. A policy need not care for limits: whatever it leaves out for too long is added
    (`choose`). One without a bound of its own may have an attribute ``default_max_staleness`` for users who give none;
    one with a state of its own follows `Stateful` as well.
    """

    @property
    def name(self) -> str: ...

    @property
    def needs_drift(self) -> bool:
        """Whether `Situation.drift` shall be measured."""
        ...

    def choose(self, situation: Situation) -> Mapping[str, str]:
        """Return the parts to save, and for each a few words why."""
        ...

    def worst_staleness(self, structure: ModelStructure, parts: Sequence[str]) -> int | None:
        """Return after how many saves at most each of the parts is saved again, less one; None if that is open.

        0 says that every save holds every part, 1 that a part can be one save old.
        """
        ...

    def settings(self) -> Mapping[str, object]:
        """Return the options, ready for JSON, for manifest and log."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """A policy that remembers more than a `Situation` tells. The state travels in every checkpoint."""

    def state_dict(self) -> Mapping[str, object]:
        """Return the state, ready for JSON."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class Choice:
    """The parts that a save holds."""

    parts: Mapping[str, str]
    """Part -> why, in the order of the model. Never empty."""
    added: frozenset[str]
    """Those that the policy had left out."""
    problems: tuple[Problem, ...] = ()
    """What was wrong with the policy's answer, and was ignored."""


def layer_numbers(structure: ModelStructure) -> dict[str, int]:
    """Return the layers' parts with their numbers; all other parts are auxiliary."""
    return {layer_part(number): number for number in range(structure.num_layers)}


MANY = 12


def nearest(name: object, valid: Collection[str]) -> str:
    """Return a fix: the valid name that is closest, if one is close, and the valid names."""
    close = difflib.get_close_matches(str(name), list(valid), n=1)
    listed = list(valid)[:MANY] + ([f"and {len(valid) - MANY} more"] if len(valid) > MANY else [])
    head = f"did you mean {close[0]!r}? Valid here: " if close else "valid here: "
    return head + (", ".join(listed) or "none")


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

    def settings(self) -> dict[str, object]:
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
