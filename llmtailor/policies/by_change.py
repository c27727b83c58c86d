"""The policy that chooses by how parts have changed since they were last saved."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from llmtailor.errors import Problem
from llmtailor.model.parts import ModelStructure
from llmtailor.policies.policy import Configured, Situation, number

STALENESS = 4
"""Without a bound of the user's, `Adaptive` saves every part at least once while it saves the bytes of this number of
models."""


@dataclass
class Adaptive(Configured):
    """A share of the bytes at every save: the parts whose absence would cost most.

    What a part costs if it is left out is ``expected_loss`` (see `Situation`). Parts are ranked by
    ``expected_loss / bytes * sqrt(age)``. The age is there because a choice now decides about the saves to come, as in
    the scheduling of updates by their age (I. Kadota et al., "Scheduling Policies for Minimizing Age of Information in
    Broadcast Wireless Networks", 2018); without it, small budgets let parts starve, with a higher power than the root,
    the choice comes near to taking turns (benchmarks/fidelity.md). There is no threshold to tune.

    What a save holds more or less than its share, the next ones make up for. So do they for parts that were added
    because they had become too old.
    """

    name: ClassVar[str] = "adaptive"
    needs_drift: ClassVar[bool] = True

    share: float = number(0.0, 0.5)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._credit = 0
        """Bytes that earlier saves have left over, or negative"""
        self._asked = 0
        """Number of the save that was chosen last"""

    def contradictions(self) -> list[Problem]:
        if 0 < self.share <= 1:
            return []
        fix = "give the share of the bytes that a save may hold: more than 0, at most 1"
        return [Problem(f"policy {self.name}", f"share is {self.share!r}", fix)]

    @property
    def default_max_staleness(self) -> int:
        return math.ceil(STALENESS / self.share)

    def choose(self, situation: Situation) -> dict[str, str]:
        sizes = situation.num_bytes
        total = sum(sizes[part] for part in situation.parts)
        allowance = round(self.share * total)
        if self._asked and self._asked == situation.save - 1:
            saved = sum(sizes[part] for part in situation.parts if situation.last.get(part) == self._asked)
            self._credit = max(-total, min(self._credit + allowance - saved, allowance))
        self._asked = situation.save
        left = allowance + self._credit
        chosen: dict[str, str] = {}
        cost = {part: _known(situation.expected_loss, part) for part in situation.parts}
        for part in sorted(situation.parts, key=lambda part: _rank(situation, part, cost[part]), reverse=True):
            if not chosen or 2 * left >= sizes[part]:  # rounded to the nearest
                left -= sizes[part]
                chosen[part] = "change unknown" if math.isinf(cost[part]) else f"costs {cost[part]:.2g}"
        return chosen

    def worst_staleness(self, structure: ModelStructure, parts: Sequence[str]) -> None:
        return None

    def state_dict(self) -> dict[str, int]:
        return {"credit": self._credit, "asked": self._asked}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._credit, self._asked = int(state["credit"]), int(state["asked"])


def _rank(situation: Situation, part: str, cost: float) -> tuple[float, float]:
    """Return what the order of parts follows; the second value decides between parts that have not changed."""
    age = situation.age(part) if part in situation.last else math.inf
    return cost * math.sqrt(age) / max(1, situation.num_bytes[part]), age


def _known(measured: Mapping[str, float] | None, part: str) -> float:
    """Return what was measured of a part; infinity if it could not be."""
    assert measured is not None, "measured for policies that need it"
    found = measured.get(part, math.inf)
    return math.inf if math.isnan(found) else found
