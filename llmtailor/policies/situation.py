"""What a policy is asked at a save, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from llmtailor.core.anatomy import Anatomy, layer_part
from llmtailor.errors import Problem


@dataclass(frozen=True, slots=True)
class Situation:
    """What a policy may know at a save. The same on every rank, and the same again after a resume.

    Saves are counted from the complete base, which is save 0 and which no policy is asked about.
    """

    step: int
    """The global step of this save."""
    save: int
    """The number of this save: how many of this run came before it."""
    anatomy: Anatomy
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

    def worst_staleness(self, anatomy: Anatomy, parts: Sequence[str]) -> int | None:
        """Return after how many saves at most each of the parts is saved again, less one; None if that is open.

        0 says that every save holds every part, 1 that a part can be one save old.
        """
        ...

    def settings(self) -> Mapping[str, Any]:
        """Return the options, ready for JSON, for manifest and log."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """A policy that remembers more than a `Situation` tells. The state travels in every checkpoint."""

    def state_dict(self) -> Mapping[str, Any]:
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


def layer_numbers(anatomy: Anatomy) -> dict[str, int]:
    """Return the layers' parts with their numbers; all other parts are auxiliary."""
    return {layer_part(number): number for number in range(anatomy.num_layers)}
