"""What was saved when: the state that every policy resumes from. Travels in each partial checkpoint."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from llmtailor.errors import Problem, SourceError

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
