"""Which saves a checkpoint builds on."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from llmtailor.errors import Problem, SourceError

THINNED = "thin-"
"""Begins the lineages of partial checkpoints that were made of full ones afterwards (see `runs.thinned`). They say
how these build on each other, and nothing of the attempt of the training."""


UNRECORDED = "after-"
"""Begins the lineages of trainings that went on from a save without the saver"""


@dataclass(frozen=True, slots=True)
class Past:
    """What a checkpoint, or a training, continues: a step of a lineage, and those that led there."""

    step: int
    lineage: str
    """A random id of an unbroken chain of saves; see `recipe.candidates`."""
    history: Mapping[str, int]
    """Earlier lineages -> the last step of theirs that belongs to this one"""

    def includes(self, other: Past) -> bool:
        until = self.step if other.lineage == self.lineage else self.history.get(other.lineage, -1)
        return other.step <= until

    def gives_up(self, other: Past) -> bool:
        """Whether it continues a step before the other's, of the same lineage: the other was abandoned for it."""
        return other.step > self.history.get(other.lineage, other.step)


def read_past(step: Any, lineage: Any, history: Any) -> Past | None:
    """Return the past that values out of a file tell of; None if they make no sense."""
    if not _is_step(step) or not isinstance(lineage, str) or not lineage or not isinstance(history, Mapping):
        return None
    if not all(isinstance(name, str) and name and _is_step(until) for name, until in history.items()):
        return None
    return Past(step, lineage, dict(history))


def _is_step(value: Any) -> bool:
    return type(value) is int and value >= 0


def is_one_attempt(stated: Iterable[Past]) -> bool:
    """Whether checkpoints are all of one attempt and what it continues."""
    known = list(stated)
    newest = max(known, key=lambda past: past.step, default=None)
    return newest is None or all(newest.includes(one) for one in known)


def continued(past: Past, step: int) -> Past:
    """Return what a training is that went on from ``past`` to a later step, and that nobody recorded."""
    return Past(step, f"{UNRECORDED}{past.lineage}@{past.step}", {**past.history, past.lineage: past.step})


WHAT = "the record of earlier saves"


FIX = "take another step, or copy the partial checkpoint again"


@dataclass(frozen=True, slots=True)
class Ledger:
    """The saves of a run so far, as the newest of them knows them.

    A *lineage* is an unbroken chain of saves. A run begins one with its complete base, and every resume begins another
    that continues it (`resumed`). So what an abandoned attempt saved after the step that was resumed from is told
    apart from what the run itself saved, even where steps coincide.
    """

    lineage: str
    """A random id."""
    history: Mapping[str, int] = field(default_factory=dict)
    """Earlier lineages that this one continues -> the last step of theirs that belongs to this run."""
    saves: int = 0
    """How many there were, over all these lineages: the number of the next one."""
    held_by: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Part -> number and step of the save that last held it."""
    policy_state: Mapping[str, Any] | None = None
    """What a policy of one's own wants to remember, as JSON data."""

    def __post_init__(self) -> None:
        if problems := _problems({one.name: getattr(self, one.name) for one in fields(self)}):
            raise ValueError("; ".join(problems))

    @property
    def step(self) -> int | None:
        """The step of the newest save; None before the first."""
        return max((step for _, step in self.held_by.values()), default=None)

    @property
    def last(self) -> dict[str, int]:
        """Part -> number of the save that last held it, as a `Situation` wants it."""
        return {part: save for part, (save, _) in self.held_by.items()}

    def after(
        self, step: int, saved: Collection[str], trainable: Iterable[str], policy_state: Mapping[str, Any] | None = None
    ) -> Ledger:
        """Return the ledger after one more save, which is the one to be written into it.

        `trainable` are the parts that the run trains now, of which `saved` are some: parts frozen since are dropped,
        parts unfrozen since must be among the `saved`. The first save must hold all of them. Raises ValueError for a
        save that would leave a part without a holder, or that does not come after the previous one.
        """
        held_by = {part: (self.saves, step) if part in saved else self.held_by.get(part) for part in trainable}
        if homeless := [part for part, held in held_by.items() if held is None]:
            raise ValueError(f"after step {step} no save would hold {', '.join(homeless)}")
        if not saved or not held_by.keys() >= set(saved):
            raise ValueError(f"step {step} must save something, and only what is trainable")
        if self.step is not None and step <= self.step:
            raise ValueError(f"step {step} does not come after step {self.step}")
        known = {part: held for part, held in held_by.items() if held is not None}
        return replace(self, saves=self.saves + 1, held_by=known, policy_state=policy_state)

    def resumed(self, lineage: str, step: int) -> Ledger:
        """Return the ledger of a run that resumed at `step`, which is this one's newest save or not much later.

        `lineage` is a new id.
        """
        return replace(self, lineage=lineage, history={**self.history, self.lineage: step})

    def without(self, parts: Collection[str]) -> Ledger:
        """Return the ledger without some parts, so that the next save holds them (see `retention.lost_parts`)."""
        return replace(self, held_by={part: held for part, held in self.held_by.items() if part not in parts})

    def staleness(self) -> dict[str, int]:
        """Return how many saves old each part is, as of the newest save."""
        return {part: self.saves - 1 - save for part, (save, _) in self.held_by.items()}

    def steps_behind(self) -> dict[str, int]:
        """Return how many training steps old each part is, as of the newest save."""
        newest = self.step or 0
        return {part: newest - step for part, (_, step) in self.held_by.items()}

    def to_json(self) -> dict[str, Any]:
        return {
            "lineage": self.lineage,
            "history": dict(self.history),
            "saves": self.saves,
            "held_by": {part: list(held) for part, held in self.held_by.items()},
            "policy_state": None if self.policy_state is None else dict(self.policy_state),
        }

    @classmethod
    def from_json(cls, data: object, where: str) -> Ledger:
        """Read what `to_json` returned. Raises SourceError with every problem; `where` names the file."""
        if not isinstance(data, Mapping):
            raise SourceError.at(where, f"{WHAT} is {data!r}", FIX)
        names = [one.name for one in fields(cls)]
        problems = [f"it lacks {name}" for name in names if name not in data] or _problems(data)
        if problems:
            raise SourceError(Problem(where, f"{WHAT} is damaged: {what}", FIX) for what in problems)
        held_by = {part: (save, step) for part, (save, step) in data["held_by"].items()}
        return cls(data["lineage"], data["history"], data["saves"], held_by, data["policy_state"])


def _problems(data: Mapping[str, Any]) -> list[str]:
    """Return what can't be, whatever the types."""
    problems = []
    lineage, saves, state = data["lineage"], data["saves"], data["policy_state"]
    if not isinstance(lineage, str) or not lineage:
        problems.append(f"lineage is {lineage!r}")
    if not _is_count(saves):
        problems.append(f"saves is {saves!r}")
        saves = math.inf
    if not isinstance(state, Mapping | None):
        problems.append(f"policy_state is {state!r}")
    for name, is_right in (("history", _is_count), ("held_by", _is_held)):
        if isinstance(data[name], Mapping):
            wrong = {key: value for key, value in data[name].items() if not is_right(value)}
            problems += [f"{name} says {value!r} of {key!r}" for key, value in wrong.items()]
        else:
            problems.append(f"{name} is {data[name]!r}")
    if not problems and lineage in data["history"]:
        problems.append(f"lineage {lineage!r} continues itself")
    if not problems:
        late = [part for part, (save, _) in data["held_by"].items() if save >= saves]
        problems += [f"{part!r} is held by a save that has not been" for part in late]
    return problems


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_held(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_count, value))


@dataclass(frozen=True, slots=True)
class SaveRecord:
    """A checkpoint on disk, as its manifest describes it: a partial one, or a full one of the Trainer's."""

    step: int
    parts: frozenset[str]
    """What it holds. Ignored for a full one, which holds everything."""
    lineage: str
    held_by: Mapping[str, int] = field(default_factory=dict)
    """Part -> step of the newest save that held it as of this one. Its keys are the parts that were trained then, so
    those that a composite of this step needs."""
    history: Mapping[str, int] = field(default_factory=dict)
    """Earlier lineages that its own continues -> the last step of theirs that belongs to it (see `Ledger`)."""
    is_stock: bool = False
    """A full checkpoint of the Trainer's: complete by itself, and not ours to delete. One of unknown lineage has ""; it
    gives nothing to composites of other steps. List it only if nobody else will delete it (``save_total_limit``):
    partial checkpoints that it makes superfluous are deleted."""

    @classmethod
    def of(cls, ledger: Ledger) -> SaveRecord:
        """Return the record of a ledger's newest save, which must not be missing."""
        newest = {part: step for part, (save, step) in ledger.held_by.items() if save == ledger.saves - 1}
        if not newest:
            raise ValueError("there was no save yet")
        held_by = {part: step for part, (_, step) in ledger.held_by.items()}
        return cls(max(newest.values()), frozenset(newest), ledger.lineage, held_by, ledger.history)

    @classmethod
    def from_json(cls, data: object, where: str) -> SaveRecord:
        """Return the record of the newest save that a manifest's ledger tells of. Raises SourceError."""
        ledger = Ledger.from_json(data, where)
        try:
            return cls.of(ledger)
        except ValueError as error:
            raise SourceError.at(where, f"{WHAT} is damaged: it says that {error}", FIX) from error

    def holds(self, part: str) -> bool:
        return self.is_stock or part in self.parts

    @property
    def past(self) -> Past:
        return Past(self.step, self.lineage, self.history)

    def follows(self, other: SaveRecord) -> bool:
        """Whether the other's states are of this one's own past, or its present."""
        return self.past.includes(other.past)
