"""Decides which partial checkpoints a run still needs, and how old the parts of its steps are. Pure.

The Trainer (``save_total_limit``) and users delete full checkpoints. Steps are therefore counted twice: those that can
be composed from all existing checkpoints, and those that partial checkpoints alone can compose. A step needs its own
partial checkpoint and those that this one builds on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llmtailor.checkpoint.lineage import (
    Ledger,
    RunCheckpoint,
    composable_steps,
    is_complete,
    newer_masters,
    partial_needs,
    present_of,
    sources_at,
    usable_at,
)
from llmtailor.errors import VerificationError
from llmtailor.model.parts import Part
from llmtailor.recipe import ONLY_MOMENTS

logger = logging.getLogger(__name__)
BUG = "this is a bug in llmtailor: please report it; nothing was removed"


def deletable(saves: Sequence[RunCheckpoint], ledger: Ledger, keep: int) -> list[int]:
    """Return the steps of the partial checkpoints that a run no longer needs, oldest first (see `needed`)."""
    return sorted({save.step for save in saves} - needed(saves, ledger, keep))


def needed(saves: Sequence[RunCheckpoint], ledger: Ledger, keep: int) -> set[int]:
    """Return the steps of the partial checkpoints that must stay; ``ledger`` is the running one, after its newest save.

    They are those that the newest ``keep`` composable steps need, including their own, and every holder of the newest
    state of a part, for future steps. Only steps of the run's own past count; while an abandoned attempt has newer
    ones, its newest ``keep`` stay as well. Partial checkpoints of other runs, and those that ``thin`` made, always
    stay.
    """
    if keep < 1:
        raise ValueError("keep must be 1 or more")
    present = present_of(ledger)
    kin = [save for save in saves if _is_kin(save, ledger)]
    complete = sorted((save for save in kin if is_complete(save, kin)), key=lambda save: save.step)
    own = [save for save in complete if present.builds_on(save)]
    stay = [save for save in saves if save.is_thinned or not _is_kin(save, ledger)]
    for save in (*_newest(complete, keep), *_newest(own, keep), present):
        stay += partial_needs(save, kin)
    return {save.step for save in stay}


def _newest(saves: Iterable[RunCheckpoint], keep: int) -> list[RunCheckpoint]:
    at = {save.step: save for save in saves}
    return [at[step] for step in sorted(at)[-keep:]]


def _is_kin(save: RunCheckpoint, ledger: Ledger) -> bool:
    """Return whether both build on the same complete base."""
    assert save.ledger is not None
    return not {save.ledger.lineage, *save.ledger.history}.isdisjoint({ledger.lineage, *ledger.history})


@dataclass(frozen=True, slots=True)
class Reachable:
    """The partial checkpoints of a run that stay, and the steps that they serve."""

    before: tuple[int, ...]
    """Composable steps now"""
    after: tuple[int, ...]
    """Composable steps afterwards; the same without ``keep``"""
    needed: frozenset[RunCheckpoint]
    """Partial checkpoints that must stay"""


def find_reachable(checkpoints: Sequence[RunCheckpoint], parts: Sequence[Part], keep: int | None) -> Reachable:
    """Decide which partial checkpoints stay: those that the newest ``keep`` composable steps need (None: all steps),
    and those that the newest ``keep`` steps composable from partial checkpoints alone need.

    Partial checkpoints newer than all of the latter also stay, with those they build on: a later save may complete
    them.
    """
    partial = [checkpoint for checkpoint in checkpoints if checkpoint.is_partial]
    before, alone = composable_steps(checkpoints, parts), composable_steps(partial, parts)
    promised, promised_alone = (steps[-keep:] if keep else steps for steps in (before, alone))
    newest = alone[-1] if alone else -1
    needed: set[RunCheckpoint] = set()
    for checkpoint in partial:
        if checkpoint.step in {*promised, *promised_alone} or checkpoint.step > newest:
            needed |= {checkpoint, *partial_needs(checkpoint, partial)}
    for there, steps in ((checkpoints, promised), (partial, promised_alone)):
        for step in steps:
            sources = sources_at(there, step, parts) or {}
            masters = newer_masters(usable_at(there, step), sources)
            needed |= {checkpoint for checkpoint in (*sources.values(), *masters.values()) if checkpoint.is_partial}
    left = [checkpoint for checkpoint in checkpoints if not checkpoint.is_partial or checkpoint in needed]
    _check_same(checkpoints, left, promised, parts)
    _check_same(partial, [checkpoint for checkpoint in partial if checkpoint in needed], promised_alone, parts)
    return Reachable(tuple(before), tuple(composable_steps(left, parts)), frozenset(needed))


def _check_same(
    before: Sequence[RunCheckpoint], after: Sequence[RunCheckpoint], promised: Iterable[int], parts: Sequence[Part]
) -> None:
    """Check, independently of the code that decided, that every promised step has the same sources as before."""

    def used(there: Sequence[RunCheckpoint], step: int) -> object:
        sources = sources_at(there, step, parts)
        return sources and (sources, newer_masters(usable_at(there, step), sources))

    changed = [step for step in promised if used(before, step) != used(after, step)]
    if changed:
        what = f"step {', '.join(map(str, changed))} would not be composed as before"
        raise VerificationError.at("gc", what, BUG)


@dataclass(frozen=True, slots=True)
class Age:
    """The oldest parts of the composite of a step."""

    steps_back: int
    """How many global steps earlier they were saved; 0 if all are of that step"""
    parts: tuple[Part, ...]
    """The oldest parts; empty if all are of that step"""
    only: str | None = None
    """``moments``: they alone are that old, and the masters of these parts are newer"""


@dataclass(frozen=True, slots=True)
class StepAge:
    """A step that stays composable."""

    step: int
    now: Age | None
    """None if it can't be composed now"""
    afterwards: Age


def compare_ages(
    before: Sequence[RunCheckpoint], after: Sequence[RunCheckpoint], steps: Iterable[int], parts: Sequence[Part]
) -> tuple[StepAge, ...]:
    """Return how old the parts of each step's composite are now and afterwards."""
    ages = ((step, _age(before, step, parts), _age(after, step, parts)) for step in steps)
    return tuple(StepAge(step, now, afterwards) for step, now, afterwards in ages if afterwards is not None)


def _age(checkpoints: Sequence[RunCheckpoint], step: int, parts: Sequence[Part]) -> Age | None:
    sources = sources_at(checkpoints, step, parts)
    if sources is None:
        return None
    back = {part: step - sources[part].step_of(part) for part in parts}
    most = max(0, *back.values())
    oldest = tuple(part for part in parts if most and back[part] == most)
    masters = {**sources, **newer_masters(usable_at(checkpoints, step), sources)}
    are_newer = oldest and all((masters[part].master_step_of(part) or 0) > step - most for part in oldest)
    return Age(most, oldest, ONLY_MOMENTS if are_newer else None)
