"""The adaptive policy: what has changed most since it was last saved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from llmtailor.core.anatomy import Anatomy
from llmtailor.errors import Problem
from llmtailor.policies.options import Configured, number, whole
from llmtailor.policies.situation import Situation


@dataclass(frozen=True, slots=True)
class Update(Configured):
    """Parts by their relative change since *they* were last saved.

    ``threshold``: all that have changed by more than that. ``budget_bytes``: the ones that have changed most, as far as
    they fit into so many bytes per save; a part that does not fit is passed over for the next one that does. With
    both: of those above the threshold, the ones that have changed most. Of parts that changed alike, the first in the
    model goes first. A part that can't be measured, or whose change is no number, counts as changed without limit.
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
        drift = {part: _drift(situation, part) for part in situation.parts}
        changed = [part for part in situation.parts if drift[part] > (self.threshold or 0.0)]
        left = math.inf if self.budget_bytes is None else self.budget_bytes
        chosen: dict[str, str] = {}
        for part in sorted(changed, key=lambda part: -drift[part]):
            if situation.num_bytes[part] <= left:
                left -= situation.num_bytes[part]
                chosen[part] = f"changed by {drift[part]:.2%}" if math.isfinite(drift[part]) else "change unknown"
        return chosen

    def worst_staleness(self, anatomy: Anatomy, parts: Sequence[str]) -> None:
        return None


def _drift(situation: Situation, part: str) -> float:
    assert situation.drift is not None, "measured for policies that ask for it"
    drift = situation.drift.get(part, math.inf)
    return math.inf if math.isnan(drift) else drift
