"""The record of saves that partial checkpoints carry which were made of full ones afterwards. Pure.

They are a run of saves of their own, with a complete base, beside whatever the training-side saver has written. So
nothing that is deleted or abandoned elsewhere takes anything from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from llmtailor.checkpoint.lineage import Ledger, SaveRecord
from llmtailor.runs.retention import lost_parts


@dataclass(frozen=True, slots=True)
class Thinned:
    """A partial checkpoint that was made of a full one, or will be."""

    step: int
    ledger: Ledger
    """After it"""
    losses: Mapping[int, float]
    """What the run had logged by then: step -> loss"""


def read_losses(trainer_state: Mapping[str, Any]) -> dict[int, float]:
    """Return the losses that a ``trainer_state.json`` tells of; what is malformed tells nothing."""
    log = trainer_state.get("log_history")
    entries = [entry for entry in log if isinstance(entry, dict)] if isinstance(log, list) else []
    return {
        entry["step"]: entry["loss"]
        for entry in entries
        if type(entry.get("step")) is int and isinstance(entry.get("loss"), (int, float))
    }


def contradict(one: Mapping[int, float], other: Mapping[int, float]) -> bool:
    """Whether two checkpoints are of different attempts: they have logged different losses at the same step."""
    shared = one.keys() & other.keys()
    return any(one[step] != other[step] and not (math.isnan(one[step]) and math.isnan(other[step])) for step in shared)


def ledger_before(
    step: int, losses: Mapping[int, float], thinned: Iterable[Thinned], new_lineage: Callable[[], str]
) -> Ledger:
    """Return the ledger that the full checkpoint of a step is to be saved under, as one of those ``thinned``.

    It goes on from the newest that is older and of the same attempt; if there is none, or others have gone on from
    there already, another lineage begins. Parts whose newest state is lost are left out, so that they are saved again.
    """
    thinned = list(thinned)
    older = [one for one in thinned if one.step < step and not contradict(one.losses, losses)]
    if not older:
        return Ledger(new_lineage())
    last = max(older, key=lambda one: one.step)
    ledger = last.ledger
    if any(one.ledger.lineage == ledger.lineage and one.step > last.step for one in thinned):
        ledger = ledger.resumed(new_lineage(), last.step)
    return ledger.without(lost_parts(last.ledger, [SaveRecord.of(one.ledger) for one in thinned]))
