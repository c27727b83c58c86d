"""Decides what becomes of each full checkpoint of a run that is thinned out. Pure.

A checkpoint is touched only if every step that is promised can be composed without it, by the same rules as ``merge
--run``. Beyond that, the partial checkpoints made here must be complete among themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llmtailor.core.run import Past, RunCheckpoint, composable_steps, sources_at
from llmtailor.errors import SourceError, VerificationError
from llmtailor.history.ledger import Ledger
from llmtailor.history.retention import SaveRecord, holders
from llmtailor.history.thinned import Thinned, ledger_before
from llmtailor.retain.ways import Chooser

STAYS, PARTIAL, WEIGHTS = "stays", "partial", "weights only"


@dataclass(frozen=True, slots=True)
class FullFacts:
    """What is known of a full checkpoint, beside what `RunCheckpoint` says."""

    obstacle: str = ""
    """Why it must stay as it is; empty for none."""
    losses: Mapping[int, float] = field(default_factory=dict)
    """See `history.thinned`."""
    num_bytes: Mapping[str, int] = field(default_factory=dict)
    """Part -> bytes of its trained states"""


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of a full checkpoint."""

    checkpoint: RunCheckpoint
    becomes: str
    """`STAYS`, `PARTIAL` or `WEIGHTS`"""
    why: str = ""
    """Of one that stays though it is old"""
    parts: Mapping[str, str] = field(default_factory=dict)
    """Of one that becomes partial: the parts it keeps, and why each"""
    successor: RunCheckpoint | None = None
    """The partial checkpoint in its place"""
    ledger: Ledger | None = None
    """Of a partial checkpoint that is to be written. None if one of this step is there already, and stands in."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a run."""

    fates: tuple[Fate, ...]
    """Of all full checkpoints, oldest first"""
    before: tuple[int, ...]
    """Steps that can be composed, or are there"""
    after: tuple[int, ...]

    @property
    def changes(self) -> tuple[Fate, ...]:
        return tuple(fate for fate in self.fates if fate.becomes != STAYS)


@dataclass(slots=True)
class Deciding:
    """The run while it is decided: each checkpoint is judged by what the older ones have become."""

    checkpoints: Sequence[RunCheckpoint]
    """All usable ones of the run, of every attempt"""
    parts: Sequence[str]
    keep_full: int
    facts: Callable[[RunCheckpoint], FullFacts]
    chooser: Chooser | None
    """None: older ones become weights only."""
    thinned: list[Thinned]
    """Partial checkpoints that were made of full ones before"""
    new_lineage: Callable[[], str]
    path_of: Callable[[int], Path]
    """The folder of the partial checkpoint of a step"""

    def decide(self) -> Decision:
        """Judge all full checkpoints. Raises SourceError if no complete state would be left."""
        full = sorted((one for one in self.checkpoints if not one.is_partial), key=lambda one: one.step)
        before = composable_steps(self.checkpoints, self.parts)
        there, promised = list(self.checkpoints), set(before)
        fates = []
        for number, checkpoint in enumerate(full):
            if number >= len(full) - self.keep_full:
                fates.append(Fate(checkpoint, STAYS))
                continue
            fate = self._judge(checkpoint, there)
            kept = promised - ({checkpoint.step} if fate.becomes == WEIGHTS else set())
            left = replaced(there, fate)
            broken = [step for step in sorted(kept) if sources_at(left, step, self.parts) is None]
            if fate.becomes == WEIGHTS and sources_at(left, checkpoint.step, self.parts):
                kept.add(checkpoint.step)
            if broken:
                fate = Fate(checkpoint, STAYS, f"step {', '.join(map(str, broken))} could not be composed without it")
            else:
                there, promised = left, kept
                self._remember(fate)
            fates.append(fate)
        after = composable_steps(there, self.parts)
        self._prove(fates, promised, after)
        return Decision(tuple(fates), tuple(before), tuple(after))

    def _judge(self, checkpoint: RunCheckpoint, there: Iterable[RunCheckpoint]) -> Fate:
        facts = self.facts(checkpoint)
        if facts.obstacle:
            return Fate(checkpoint, STAYS, facts.obstacle)
        if self.chooser is None:
            return Fate(checkpoint, WEIGHTS)
        for other in there:
            if other.is_partial and other.step == checkpoint.step:
                held = dict.fromkeys(part for part in self.chooser.trained if other.holds(part))
                return Fate(checkpoint, PARTIAL, parts=dict.fromkeys(held, "is there already"), successor=other)
        step = checkpoint.step
        before = ledger_before(step, facts.losses, self.thinned, self.new_lineage)
        chosen = self.chooser.choose(before, step, facts.num_bytes)
        ledger = before.after(step, chosen, self.chooser.trained)
        untrained = set(self.parts) - set(self.chooser.trained)  # partial checkpoints always have what is frozen
        held_parts = untrained | chosen.keys()
        successor = RunCheckpoint(
            path=self.path_of(step),
            step=step,
            parts=None if held_parts >= set(self.parts) else frozenset(held_parts),
            resumable=True,
            past=Past(step, ledger.lineage, ledger.history),
            part_steps=checkpoint.part_steps,
        )
        return Fate(checkpoint, PARTIAL, parts=chosen, successor=successor, ledger=ledger)

    def _remember(self, fate: Fate) -> None:
        if fate.ledger is not None:
            losses = self.facts(fate.checkpoint).losses
            self.thinned.append(Thinned(fate.checkpoint.step, fate.ledger, losses))

    def _prove(self, fates: Sequence[Fate], promised: set[int], after: Sequence[int]) -> None:
        """Check the outcome by itself, whatever led to it."""
        if not after:
            what = "nothing would be left to resume from: none of the newest full checkpoints is complete"
            raise SourceError.at("thin", what, "keep more full checkpoints, or save a complete one first")
        records = [SaveRecord.of(one.ledger) for one in self.thinned]
        made = [SaveRecord.of(fate.ledger) for fate in fates if fate.ledger is not None]
        lost = promised - set(after) | {record.step for record in made if holders(record, records) is None}
        if lost:
            what = f"step {', '.join(map(str, sorted(lost)))} could not be composed any more"
            raise VerificationError.at(
                "thin", what, "this is a bug in llmtailor: please report it; nothing was touched"
            )


def replaced(checkpoints: Iterable[RunCheckpoint], fate: Fate) -> list[RunCheckpoint]:
    """Return the run's checkpoints after one of them has met its fate."""
    if fate.becomes == STAYS:
        return list(checkpoints)
    left = [
        one for one in checkpoints if one.path not in (fate.checkpoint.path, fate.successor and fate.successor.path)
    ]
    return [*left, fate.successor] if fate.successor else left
