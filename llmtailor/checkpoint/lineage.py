"""The saves of a run: which earlier saves each builds on, and which of them each part of a composite comes from. Pure.

A *lineage* is an unbroken chain of saves, with a random id. A run starts one with its complete base, and every resume
starts another that continues it. So saves of an abandoned attempt differ from the run's own, even at equal steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from llmtailor.errors import Problem, SourceError
from llmtailor.model.parts import Part, step_of, with_layers

THINNED = "thin-"
"""Prefix of the lineages of partial checkpoints that ``thin`` made from full ones that state no attempt"""

UNRECORDED = "after-"
"""Prefix of the lineages of trainings that resumed from a save without the saver"""

WHAT = "the record of earlier saves"
FIX = "use another step, or copy the partial checkpoint again"


@dataclass(frozen=True, slots=True)
class Past:
    """What a checkpoint or a training continues: a step of a lineage, and the lineages before it."""

    step: int
    lineage: str
    history: Mapping[str, int]
    """Earlier lineage -> its last step that belongs to this one"""
    missed: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Part -> updates that Adam's step counts and its moments lack: a resume has gone on with older ones"""

    @property
    def lineages(self) -> set[str]:
        return {self.lineage, *self.history}

    def includes(self, other: Past) -> bool:
        """Whether the other is this one or part of its past."""
        until = self.step if other.lineage == self.lineage else self.history.get(other.lineage, -1)
        return other.step <= until

    def abandons(self, other: Past) -> bool:
        """Whether it abandons the other: it continues the other's lineage from an earlier step."""
        return other.step > self.history.get(other.lineage, other.step)


def read_past(step: Any, lineage: Any, history: Any, missed: Any = None) -> Past | None:
    """Return the past that the values from a file describe, or None if they are invalid. Older files have no
    ``missed``."""
    if not _is_count(step) or not isinstance(lineage, str) or not lineage or not isinstance(history, Mapping):
        return None
    if not all(isinstance(name, str) and name and _is_count(until) for name, until in history.items()):
        return None
    if not isinstance(missed, Mapping | None) or not all(map(_is_count, (missed or {}).values())):
        return None
    return Past(step, lineage, dict(history), dict(missed or {}))


def is_one_attempt(stated: Iterable[Past]) -> bool:
    """Whether all checkpoints belong to one attempt and to what it continues."""
    known = list(stated)
    newest = max(known, key=lambda past: past.step, default=None)
    return newest is None or all(newest.includes(one) for one in known)


def continued(past: Past, step: int) -> Past:
    """Return the past of an unrecorded training that resumed from ``past`` and has reached a later step."""
    return Past(step, f"{UNRECORDED}{past.lineage}@{past.step}", {**past.history, past.lineage: past.step}, past.missed)


@dataclass(frozen=True, slots=True)
class Ledger:
    """The saves of a run so far, as the newest one records them in its manifest."""

    lineage: str
    history: Mapping[str, int] = field(default_factory=dict)
    """Earlier lineage that this one continues -> its last step that belongs to this run"""
    saves: int = 0
    """Number of saves over all these lineages, which is the number of the next one"""
    held_by: Mapping[Part, tuple[int, int]] = field(default_factory=dict)
    """Part -> number and step of the save that last held it"""
    policy_state: Mapping[str, Any] | None = None
    """State that a custom policy keeps between saves, as JSON data"""
    missed: Mapping[str, int] = field(default_factory=dict)
    """See `Past`"""

    def __post_init__(self) -> None:
        if problems := _problems(self.to_json()):
            raise ValueError("; ".join(problems))

    @property
    def step(self) -> int | None:
        """The step of the newest save; None before the first."""
        return max(self.steps.values(), default=None)

    @property
    def steps(self) -> dict[Part, int]:
        """Part -> step of the save that last held it"""
        return {part: step for part, (_, step) in self.held_by.items()}

    @property
    def last(self) -> dict[str, int]:
        """Part -> number of the save that last held it, as `Situation` takes it."""
        return {part: save for part, (save, _) in self.held_by.items()}

    def after(
        self,
        step: int,
        saved: Collection[Part],
        trainable: Iterable[Part],
        policy_state: Mapping[str, Any] | None = None,
    ) -> Ledger:
        """Return the ledger after one more save, for that save's manifest.

        ``trainable`` are the parts that the run trains now, ``saved`` some of them. Parts that were frozen since are
        dropped; parts that were unfrozen since must be saved, and the first save must hold all parts. Raises ValueError
        for a save that would leave a part unsaved, or that does not come after the previous one.
        """
        held_by = {part: (self.saves, step) if part in saved else self.held_by.get(part) for part in trainable}
        if unassigned := [part for part, held in held_by.items() if held is None]:
            raise ValueError(f"after step {step} no save would hold {', '.join(unassigned)}")
        if not saved or not held_by.keys() >= set(saved):
            raise ValueError(f"step {step} must save at least one part, and only trainable ones")
        if self.step is not None and step <= self.step:
            raise ValueError(f"step {step} does not come after step {self.step}")
        known = {part: held for part, held in held_by.items() if held is not None}
        return replace(self, saves=self.saves + 1, held_by=known, policy_state=policy_state)

    def past(self, step: int) -> Past:
        """Return what a checkpoint of this step states."""
        return Past(step, self.lineage, self.history, self.missed)

    def resumed(self, lineage: str, step: int) -> Ledger:
        """Return the ledger of a run that resumed at ``step``, with the new id ``lineage``."""
        return replace(self, lineage=lineage, history={**self.history, self.lineage: step})

    def without(self, parts: Collection[Part]) -> Ledger:
        """Return the ledger without some parts, so that the next save must hold them (see `lost_parts`)."""
        return replace(self, held_by={part: held for part, held in self.held_by.items() if part not in parts})

    def divided(self, parts: Collection[Part], lost: Collection[Part]) -> Ledger:
        """Return the ledger without ``lost`` parts, for a run that saves ``parts`` from now on.

        An expert that is now saved separately was last held with its layer. A layer that is now saved as a whole was
        last held by the save with all its experts, if that is the newest of each; otherwise the next save must hold it.
        """
        kept = {part: held for part, held in self.held_by.items() if part not in lost}
        shares: dict[Part, set[tuple[int, int]]] = {}
        for part, held in self.held_by.items():
            shares.setdefault(part.whole, set()).add(held)
        incomplete, layers = {part.whole for part in lost}, {part.whole for part in parts}
        found = {part: kept[part] for part in kept if part.whole not in layers}
        for part in parts:
            if part in kept or part.whole in kept:
                found[part] = kept.get(part) or kept[part.whole]
            elif len(shares.get(part, ())) == 1 and part not in incomplete:
                (found[part],) = shares[part]
        return replace(self, held_by=found)

    def steps_behind(self) -> dict[str, int]:
        """Return the age of each part in training steps, as of the newest save."""
        newest = self.step or 0
        return {part: newest - step for part, step in self.steps.items()}

    def to_json(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @classmethod
    def from_json(cls, data: object, where: str) -> Ledger:
        """Read the output of `to_json`; ``where`` names the file. Raises SourceError with every problem."""
        if not isinstance(data, Mapping):
            raise SourceError.at(where, f"{WHAT} is {data!r}", FIX)
        data = {"missed": {}, **data}  # older ones have none
        names = [one.name for one in fields(cls)]
        problems = [f"it lacks {name}" for name in names if name not in data] or _problems(data)
        if problems:
            raise SourceError(Problem(where, f"{WHAT} is damaged: {what}", FIX) for what in problems)
        held_by = {Part(part): (save, step) for part, (save, step) in data["held_by"].items()}
        return cls(data["lineage"], data["history"], data["saves"], held_by, data["policy_state"], data["missed"])


def _problems(data: Mapping[str, Any]) -> list[str]:
    """Return what is invalid; the values may be of any type."""
    lineage, saves, state = data["lineage"], data["saves"], data["policy_state"]
    is_right = {
        "lineage": isinstance(lineage, str) and lineage != "",
        "saves": _is_count(saves),
        "policy_state": isinstance(state, Mapping | None),
        "history": isinstance(data["history"], Mapping),
        "held_by": isinstance(data["held_by"], Mapping),
        "missed": isinstance(data["missed"], Mapping),
    }
    problems = [f"{name} is {data[name]!r}" for name in is_right if not is_right[name]]
    for name, is_valid in (("history", _is_count), ("held_by", _is_held), ("missed", _is_count)):
        if is_right[name]:
            wrong = {key: value for key, value in data[name].items() if not is_valid(value)}
            problems += [f"{name} maps {key!r} to {value!r}" for key, value in wrong.items()]
    if not problems and lineage in data["history"]:
        problems = [f"lineage {lineage!r} continues itself"]
    if not problems:
        late = [part for part, (save, _) in data["held_by"].items() if save >= saves]
        problems = [f"{part!r} is held by a save that does not exist" for part in late]
    return problems


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_held(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_count, value))


@dataclass(frozen=True, slots=True)
class RunCheckpoint:
    """A checkpoint of a run: a full one, or a partial one with what its manifest records of earlier saves."""

    path: Path
    step: int
    parts: frozenset[Part] | None
    """The parts that it holds, and the layers whose shares it all holds; None means all parts"""
    resumable: bool = True
    """Whether it can be the base, i.e. supplies the learning rate schedule, random number states and trainer state"""
    part_steps: Mapping[Part, int] = field(default_factory=dict, compare=False)
    """Of a composite: the step that each part comes from"""
    ledger: Ledger | None = field(default=None, compare=False)
    """Of a partial checkpoint: the saves of its run up to this one"""
    masters: frozenset[Part] = field(default=frozenset(), compare=False)
    """Of a partial checkpoint: further parts whose masters it holds without the moments"""
    master_steps: Mapping[Part, int] = field(default_factory=dict, compare=False)
    """Of a composite: the step that the masters of each part come from"""
    save_id: str = field(default="", compare=False)
    bases: Mapping[Part, str] = field(default_factory=dict, compare=False)
    """Of ``masters``: those that can't be read without another save -> its ``save_id``"""
    is_thinned: bool = field(default=False, compare=False)
    """Of a partial checkpoint: whether ``thin`` made it from a full one"""

    @classmethod
    def saved(cls, path: Path, ledger: Ledger, masters: Collection[Part] = ()) -> RunCheckpoint:
        """Return the partial checkpoint that a ledger's newest save wrote. Raises ValueError if there was no save."""
        newest = [part for part, (save, _) in ledger.held_by.items() if save == ledger.saves - 1]
        if not newest:
            raise ValueError("there was no save yet")
        step = max(ledger.held_by[part][1] for part in newest)
        of_masters = with_layers(masters, ledger.held_by) if masters else frozenset()
        return cls(path, step, with_layers(newest, ledger.held_by), ledger=ledger, masters=of_masters)

    @classmethod
    def from_json(
        cls,
        path: Path,
        data: object,
        where: str,
        masters: Collection[Part] = (),
        save_id: str = "",
        bases: Mapping[Part, str] | None = None,
    ) -> RunCheckpoint:
        """Return the partial checkpoint whose manifest, ``where``, has this ledger. Raises SourceError."""
        ledger = Ledger.from_json(data, where)
        try:
            return replace(cls.saved(path, ledger, masters), save_id=save_id, bases=bases or {})
        except ValueError as error:
            raise SourceError.at(where, f"{WHAT} is damaged: {error}", FIX) from error

    @property
    def is_partial(self) -> bool:
        """Whether it is a partial checkpoint, even one with every part."""
        return self.ledger is not None

    @property
    def past(self) -> Past | None:
        """Of a partial checkpoint"""
        return self.ledger.past(self.step) if self.ledger else None

    @property
    def needed_parts(self) -> frozenset[Part]:
        """Of a partial checkpoint: the parts trained at its step; a composite of that step needs them all"""
        return frozenset(self.ledger.held_by if self.ledger else ())

    @property
    def name(self) -> str:
        """The name of its folder, e.g. ``checkpoint-300``."""
        return self.path.name

    def holds(self, part: Part) -> bool:
        return self.parts is None or part in self.parts or part.whole in self.parts

    def master_step_of(self, part: Part) -> int | None:
        """Return the step at which its masters of a part were saved; None if it holds none."""
        if part in self.masters or part.whole in self.masters or self.holds(part):
            return step_of(self.master_steps or self.part_steps, part, self.step)
        return None

    def bases_of(self, part: Part) -> set[str]:
        """Return the saves without which its masters of a part can't be read."""
        return {base for one, base in self.bases.items() if part in (one, one.whole) or one == part.whole}

    def step_of(self, part: Part) -> int:
        """Return the step at which its state of a part was saved; of a layer of several steps the oldest."""
        return step_of(self.part_steps, part, self.step)

    def builds_on(self, other: RunCheckpoint) -> bool:
        """Whether both are partial and the other is this one or part of its past."""
        return self.past is not None and other.past is not None and self.past.includes(other.past)


def newest_resumable(checkpoints: Iterable[RunCheckpoint]) -> RunCheckpoint | None:
    """Return the checkpoint to use as the base; of two at the same step, the one that holds more."""
    able = [checkpoint for checkpoint in checkpoints if checkpoint.resumable]
    return max(able, key=lambda one: (one.step, one.parts is None), default=None)


def best_holder(candidates: Iterable[RunCheckpoint], part: Part) -> RunCheckpoint | None:
    """Return the checkpoint with the newest state of a part.

    Of two at the same step, this is the full one, to read from fewer folders; of two with the same state (a composite
    and its source), the newer one.
    """
    holders = [checkpoint for checkpoint in candidates if checkpoint.holds(part)]
    return max(holders, key=lambda one: (one.step_of(part), one.parts is None, one.step), default=None)


def best_holders(candidates: Collection[RunCheckpoint], parts: Iterable[Part]) -> dict[Part, RunCheckpoint]:
    """Return the best holder of each part; parts without one are left out."""
    found = {part: best_holder(candidates, part) for part in parts}
    return {part: holder for part, holder in found.items() if holder is not None}


def newer_masters(
    candidates: Collection[RunCheckpoint], source_of: Mapping[Part, RunCheckpoint]
) -> dict[Part, RunCheckpoint]:
    """Return the checkpoint with the newest masters of each part, if they are newer than those of its source."""
    found, there = {}, {one.save_id for one in candidates}
    for part, source in source_of.items():
        able = (one for one in candidates if one.bases_of(part) <= there)
        steps = {one: step for one in able if (step := one.master_step_of(part)) is not None}
        newest = max(steps, key=lambda one: (steps[one], one.step), default=source)
        if steps.get(newest, 0) > (source.master_step_of(part) or 0):
            found[part] = newest
    return found


def usable_at(checkpoints: Iterable[RunCheckpoint], step: int) -> list[RunCheckpoint]:
    """Return the checkpoints that a composite at a step can be made from: the full ones up to that step, and the
    partial ones that the newest partial one builds on."""
    until = [checkpoint for checkpoint in checkpoints if checkpoint.step <= step]
    newest = max((one for one in until if one.is_partial), key=lambda one: one.step, default=None)
    return [one for one in until if not one.is_partial or (newest and newest.builds_on(one))]


def sources_at(
    checkpoints: Iterable[RunCheckpoint], step: int, parts: Collection[Part]
) -> dict[Part, RunCheckpoint] | None:
    """Return the checkpoint that each part of a composite at a step comes from; None if it can't be composed.

    It can't if no checkpoint up to that step holds a part, or if none at exactly that step can be the base.
    """
    usable = usable_at(checkpoints, step)
    base = newest_resumable(usable)
    if base is None or base.step != step:
        return None
    found = best_holders(usable, parts)
    return found if found.keys() >= set(parts) else None


def steps_at(
    checkpoints: Iterable[RunCheckpoint], step: int, parts: Collection[Part]
) -> dict[Part, tuple[int, int]] | None:
    """Return the step of each part's states in a composite at a step, and that of its masters; None if it can't be
    composed."""
    usable = usable_at(checkpoints, step)
    sources = sources_at(usable, step, parts)
    if sources is None:
        return None
    masters = {**sources, **newer_masters(usable, sources)}
    return {part: (sources[part].step_of(part), masters[part].master_step_of(part) or 0) for part in parts}


def composable_steps(checkpoints: Sequence[RunCheckpoint], parts: Collection[Part]) -> list[int]:
    """Return the steps for which a complete checkpoint exists or can be composed, ascending."""
    steps = sorted({checkpoint.step for checkpoint in checkpoints})
    return [step for step in steps if sources_at(checkpoints, step, parts) is not None]


def partial_sources(save: RunCheckpoint, saves: Iterable[RunCheckpoint]) -> dict[Part, RunCheckpoint]:
    """Return the best holder of each part that a partial checkpoint needs, among the partial ones it builds on."""
    return best_holders([one for one in saves if save.builds_on(one)], save.needed_parts)


def partial_needs(save: RunCheckpoint, saves: Iterable[RunCheckpoint]) -> set[RunCheckpoint]:
    """Return every partial checkpoint that a composite at a partial checkpoint's step comes from."""
    past = [one for one in saves if save.builds_on(one)]
    sources = best_holders(past, save.needed_parts)
    # what masters differ from is the newest holder, so it is among the sources
    return {*sources.values(), *newer_masters(past, sources).values()}


def is_complete(save: RunCheckpoint, saves: Iterable[RunCheckpoint]) -> bool:
    """Whether a complete state can be composed at a partial checkpoint's step from partial checkpoints alone.

    If one was deleted, the next older holder of its parts is used, although the ledger names the deleted one.
    """
    return partial_sources(save, saves).keys() >= save.needed_parts


def lost_parts(ledger: Ledger, saves: Iterable[RunCheckpoint]) -> set[Part]:
    """Return the parts whose newest save is missing.

    A run that resumes has older states of them than the ledger records, so it must forget that they were saved
    (`Ledger.without`); otherwise their recorded age would be wrong.
    """
    there = partial_sources(present_of(ledger), saves)
    return {part for part, step in ledger.steps.items() if part not in there or there[part].step < step}


def present_of(ledger: Ledger) -> RunCheckpoint:
    """Return the newest state of a run as a partial checkpoint that holds no part itself."""
    return RunCheckpoint(Path(), ledger.step or 0, frozenset(), ledger=ledger)
