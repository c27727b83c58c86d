"""Which attempt of a run a checkpoint belongs to, and which attempts were given up. Pure.

A run is a chain of attempts: each start of the training is one, and says which step of which earlier attempt it goes on
from. Whoever resumes at step 400 gives up what was saved after it. A composite never mixes what was given up with what
took its place.

Attempts are told from two places. ``partial/attempts.json`` lists every start, so also one that died before its first
save. And each checkpoint states its own attempt (`formats.attempt_mark`), wherever it is copied to.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from llmtailor.checkpoint.lineage import UNRECORDED, Past, read_past

FILE = "attempts.json"
"""In the folder of partial checkpoints"""
SCHEMA = "llmtailor.attempts/1"
FOREVER = sys.maxsize
"""The last step of a lineage that may still be going on"""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A start of the training."""

    lineage: str
    """A random id, as in `recipe.candidates`"""
    resumed_at: int
    """The step it goes on from; 0 for a training from scratch"""
    history: Mapping[str, int]
    """Earlier lineages that it continues -> the last step of theirs that belongs to it"""
    started: str
    """When, in ISO 8601 with the time zone"""

    @property
    def past(self) -> Past:
        """What belongs to the run from this attempt's point of view, its own future included"""
        return Past(FOREVER, self.lineage, self.history)

    def to_json(self) -> dict[str, Any]:
        return {
            "lineage": self.lineage,
            "resumed_at": self.resumed_at,
            "history": dict(self.history),
            "started": self.started,
        }


class Standing(Enum):
    """What a checkpoint is to the run as it stands now."""

    OWN = "own"
    GIVEN_UP = "given up"
    """Of an attempt that another one replaced"""
    UNRECORDED = "unrecorded"
    """It does not say which attempt it is of, and is later than where the record of attempts begins; or it is of a
    training that went on from the present attempt without the saver."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """The present of a run, by which its checkpoints are judged."""

    present: Past | None
    """None: nothing tells; every checkpoint belongs to the run then."""
    begins_at: int
    """Up to this step a checkpoint may be older than the record of attempts, and needs no statement."""

    def judge(self, step: int, stated: Past | None) -> Standing:
        """Judge the checkpoint of a step, which states that it is of some attempt, or states nothing."""
        if self.present is None:
            return Standing.OWN
        if stated is None:
            return Standing.OWN if step <= self.begins_at else Standing.UNRECORDED
        if self.present.includes(stated):
            return Standing.OWN
        return Standing.GIVEN_UP if self.root(stated) is None else Standing.UNRECORDED

    def root(self, stated: Past) -> int | None:
        """Return the step that an unrecorded training went on from; None if that is no step of the last attempt.

        Of an earlier attempt's step the last attempt itself is what goes on.
        """
        if self.present is None or not stated.lineage.startswith(UNRECORDED):
            return None
        step = stated.history.get(self.present.lineage)
        return step if stated.lineage == f"{UNRECORDED}{self.present.lineage}@{step}" else None


def timeline(attempts: Iterable[Attempt], stated: Iterable[Past]) -> Timeline:
    """Return the present of a run: that of its last attempt, if there is a record of them.

    Without a record, as in a folder that was put together by hand, it is the newest checkpoint's, of those ``stated``
    that no other one gives up.
    """
    recorded = list(attempts)
    if recorded:
        last = recorded[-1]
        own = [one for one in recorded if one.lineage == last.lineage or one.lineage in last.history]
        return Timeline(last.past, min(one.resumed_at for one in own))
    known = list(stated)
    alive = [one for one in known if not any(other.gives_up(one) for other in known)]
    return Timeline(max(alive, key=lambda past: past.step, default=None), FOREVER)


def read_attempts(content: object) -> list[Attempt]:
    """Read what `attempts_json` returned. Raises ValueError for anything else."""
    listed = content.get("attempts") if isinstance(content, dict) and content.get("schema") == SCHEMA else None
    if not isinstance(listed, list):
        raise ValueError(f"it is no record of attempts by {SCHEMA!r}")
    return [_read(one) for one in listed]


def attempts_json(attempts: Iterable[Attempt]) -> dict[str, Any]:
    return {"schema": SCHEMA, "attempts": [one.to_json() for one in attempts]}


def _read(one: object) -> Attempt:
    content = one if isinstance(one, dict) else {}
    past = read_past(content.get("resumed_at"), content.get("lineage"), content.get("history"))
    started = content.get("started")
    if past is None or not isinstance(started, str):
        raise ValueError(f"it lists {one!r:.200}")
    return Attempt(past.lineage, past.step, past.history, started)
