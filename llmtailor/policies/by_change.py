"""Policies that choose by how parts have changed since they were last saved."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from llmtailor.errors import Problem
from llmtailor.model.parts import ModelStructure
from llmtailor.policies.policy import Configured, Situation, number, whole

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
    the choice comes near to taking turns (docs/fidelity.md). There is no threshold to tune.

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


@dataclass(frozen=True, slots=True)
class Update(Configured):
    """Parts by their relative change since *they* were last saved.

    ``threshold``: all parts that have changed by more than this. ``budget_bytes``: the parts that have changed most, up
    to this number of bytes per save; a part that does not fit is skipped for the next one that does. Both: of the parts
    above the threshold, those that have changed most. Of parts with the same change, the first in the model comes
    first. A part that can't be measured, or whose change is NaN, counts as changed without limit.
    """

    name: ClassVar[str] = "update"
    needs_drift: ClassVar[bool] = True
    default_max_staleness: ClassVar[int] = 20

    threshold: float | None = number(0.0, None)
    budget_bytes: int | None = whole(1, None)

    def contradictions(self) -> list[Problem]:
        if self.threshold is not None or self.budget_bytes is not None:
            return []
        fix = "give threshold (a relative change, e.g. 0.01), budget_bytes (for each save), or both"
        return [Problem(f"policy {self.name}", "it has neither a threshold nor a budget", fix)]

    def choose(self, situation: Situation) -> dict[str, str]:
        drift = {part: _known(situation.drift, part) for part in situation.parts}
        changed = [part for part in situation.parts if drift[part] > (self.threshold or 0.0)]
        left = math.inf if self.budget_bytes is None else self.budget_bytes
        chosen: dict[str, str] = {}
        for part in sorted(changed, key=lambda part: -drift[part]):
            if situation.num_bytes[part] <= left:
                left -= situation.num_bytes[part]
                chosen[part] = f"changed by {drift[part]:.2%}" if math.isfinite(drift[part]) else "change unknown"
        return chosen

    def worst_staleness(self, structure: ModelStructure, parts: Sequence[str]) -> None:
        return None


def _known(measured: Mapping[str, float] | None, part: str) -> float:
    """Return what was measured of a part; infinity if it could not be."""
    assert measured is not None, "measured for policies that need it"
    found = measured.get(part, math.inf)
    return math.inf if math.isnan(found) else found
