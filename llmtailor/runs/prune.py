"""Decides what thinning makes of each full checkpoint of a run. Pure.

A checkpoint is touched only if every promised step can be composed without it, by the same rules as ``merge --run``.
In addition, the partial checkpoints made here must be complete among themselves: they form their own chain of saves,
separate from those of the training-side saver, so that nothing deleted or abandoned elsewhere affects them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.lineage import (
    THINNED,
    Ledger,
    Past,
    RunCheckpoint,
    composable_steps,
    is_complete,
    lost_parts,
    sources_at,
    steps_at,
)
from llmtailor.errors import Problem, SourceError, UsageError, VerificationError
from llmtailor.formats.partial.manifest import IS_THINNED
from llmtailor.model.parts import ModelStructure, Part, condense, with_layers
from llmtailor.model.precision import AS_POLICY, PrecisionOptions
from llmtailor.policies import PartChoice, Policy, Situation, choose, fitted, make_policy, named_policy
from llmtailor.recipe.selectors import select
from llmtailor.runs.conversion import Conversion
from llmtailor.runs.retention import BUG

BASE = "complete base"
UNBOUNDED = 1 << 30
"""The staleness bound, in saves, of a selection: parts that it leaves out always come from the base."""
Thinned = tuple[RunCheckpoint, Mapping[int, float]]
"""A checkpoint that was or will be made from a full one, with its ledger, and its losses as in `FullFacts`"""
STAYS, PARTIAL, WEIGHTS, LINKED = "stays", "partial", "weights only", "linked"


@dataclass(frozen=True, slots=True)
class ThinOptions:
    """What becomes of a run's older full checkpoints."""

    keep_full: int
    """The number of newest full checkpoints that stay unchanged; 1 or more"""
    strategy: str | None = None
    """The policy that chooses the parts each older checkpoint keeps, in the syntax of `policies.make_policy`"""
    selectors: tuple[str, ...] = ()
    """Without a policy: the parts that all of them keep, as in a recipe. Without both, they keep weights only."""
    precision: PrecisionOptions = AS_POLICY
    reference: bool = False
    """Whether older checkpoints stay complete: what they don't keep are hard links to files of still older ones"""

    @property
    def weights_only(self) -> bool:
        return self.strategy is None and not self.selectors


@dataclass(frozen=True, slots=True)
class FixedSelection:
    """The policy of a fixed selection: the same parts every time."""

    parts: frozenset[str]
    selectors: tuple[str, ...]
    name: str = "select"
    needs_drift: bool = False

    def choose(self, situation: Situation) -> dict[str, str]:
        return {part: "selected" for part in situation.parts if part in self.parts}

    def worst_staleness(self, structure: ModelStructure, parts: Sequence[Part]) -> int:
        return UNBOUNDED

    def settings(self) -> dict[str, Any]:
        return {"selectors": list(self.selectors)}


@dataclass(frozen=True, slots=True)
class Chooser:
    """Chooses the parts a checkpoint keeps by a policy, as the training-side saver does."""

    policy: Policy
    bound: int
    """The most saves that a part may be behind"""
    structure: ModelStructure
    trained: tuple[Part, ...]
    """The parts with trained params"""

    @classmethod
    def of(
        cls, options: ThinOptions, structure: ModelStructure, trained: Sequence[Part], *, weights_are_masters: bool
    ) -> Chooser:
        """Build it from the options. Raises UsageError for an invalid strategy or selectors."""
        policy: Policy
        if options.strategy is None:
            policy = FixedSelection(_whole_parts(options.selectors, structure, trained), options.selectors)
        else:
            if (kind := named_policy(options.strategy)) and kind.needs_drift:  # before its options are parsed
                what = f"{kind.name} depends on how much the parts change, which only the training can measure"
                raise UsageError.at("--strategy", what, "use moments_in_turn, parity, filter, round_robin:4 or full")
            policy = fitted(make_policy(options.strategy), weights_are_masters=weights_are_masters)
        bound = policy.worst_staleness(structure, trained)
        assert bound is not None, "only policies that need drift have no bound"
        return cls(policy, bound, structure, tuple(trained))

    def choose(self, ledger: Ledger, step: int, num_bytes: Mapping[str, int]) -> PartChoice:
        """Return the parts that a step's checkpoint keeps, and why; the first one of a ledger keeps all."""
        if not ledger.held_by:
            return PartChoice(dict.fromkeys(self.trained, BASE), frozenset())
        situation = Situation(step, ledger.saves, self.structure, self.trained, num_bytes, ledger.last)
        return choose(self.policy, situation, self.bound)

    def settings(self) -> dict[str, Any]:
        return {"name": self.policy.name, **self.policy.settings(), IS_THINNED: True}


def _whole_parts(selectors: Sequence[str], structure: ModelStructure, trained: Sequence[str]) -> frozenset[str]:
    names, selector_problems = select(selectors, structure, "--select")
    problems = list(selector_problems)
    touched = dict.fromkeys(part for name, part in structure.part_of.items() if name in names)
    if split := [part for part in touched if not names.issuperset(structure.names(part))]:
        what = f"the selectors match only some of the tensors of {condense(split)}"
        problems.append(Problem("--select", what, "select whole parts"))
    chosen = frozenset(touched) & frozenset(trained)
    if not problems and not chosen:
        problems.append(Problem("--select", "the selectors match no trained part", "select trained parts"))
    if problems:
        raise UsageError(problems)
    return chosen


@dataclass(frozen=True, slots=True)
class FullFacts:
    """Facts about a full checkpoint beyond those in `RunCheckpoint`."""

    obstacle: str = ""
    """Why it must stay unchanged; empty if it need not"""
    losses: Mapping[int, float] = field(default_factory=dict)
    """The losses that the run had logged by then: step -> loss"""
    num_bytes: Mapping[str, int] = field(default_factory=dict)
    """Part -> bytes of its trained states"""
    has_links: bool = False
    """Whether ``thin`` has made it"""
    attempt: Past | None = None
    """The attempt that it states"""


@dataclass(frozen=True, slots=True)
class PruneAction:
    """What becomes of a full checkpoint."""

    checkpoint: RunCheckpoint
    becomes: str
    """`STAYS`, `PARTIAL`, `LINKED` or `WEIGHTS`"""
    why: str = ""
    """Why an older one stays"""
    parts: Mapping[Part, str] = field(default_factory=dict)
    """If it becomes partial or gets links: the parts it keeps, each with the reason"""
    masters: tuple[Part, ...] = ()
    """Further parts, of which it keeps the masters without the moments"""
    successor: RunCheckpoint | None = None
    """The checkpoint that replaces it: a partial one, or one with links"""
    kept: RunCheckpoint | None = None
    """If it becomes partial: what the policy leaves of it, as a full checkpoint, which every attempt can use"""
    ledger: Ledger | None = None
    """The ledger after it, if it is written, or if others will link to it"""
    links_to: RunCheckpoint | None = None
    """The checkpoint that has everything else"""
    freed: int = 0
    """Bytes freed; negative if the replacement is larger"""
    conversion: Conversion | None = None
    """The layout of the partial checkpoint to write"""
    written_bytes: int = 0
    """With links: the bytes that are written, and those of the links"""
    linked_bytes: int = 0

    @property
    def is_written(self) -> bool:
        """Whether the successor must be written; otherwise it already exists."""
        return self.successor is not None and self.ledger is not None

    def applied_to(self, checkpoints: Iterable[RunCheckpoint]) -> list[RunCheckpoint]:
        """Return the run's checkpoints after this action."""
        if self.becomes == STAYS:
            return list(checkpoints)
        new = [self.successor] if self.successor else []
        replaced = {self.checkpoint.path, *(checkpoint.path for checkpoint in new)}
        return [*(checkpoint for checkpoint in checkpoints if checkpoint.path not in replaced), *new]


@dataclass(slots=True)
class Pruner:
    """Decides on one full checkpoint after another, each given the outcome for the older ones."""

    checkpoints: Sequence[RunCheckpoint]
    """All usable checkpoints of the run, of every attempt"""
    parts: Sequence[Part]
    keep_full: int
    facts: Callable[[RunCheckpoint], FullFacts]
    chooser: Chooser | None
    """None: older ones become weights only."""
    reference: bool
    """Whether older ones get links, instead of becoming partial"""
    thinned: list[Thinned]
    """The checkpoints that were previously made from full ones, in the same way"""
    new_lineage: Callable[[], str]
    path_of: Callable[[int], Path]
    """The folder of a step's partial checkpoint"""

    def decide(self) -> list[PruneAction]:
        """Return what to do with each full checkpoint, oldest first.

        Raises SourceError if no complete state would be left.
        """
        by_step = sorted(self.checkpoints, key=lambda checkpoint: checkpoint.step)
        full = [checkpoint for checkpoint in by_step if not checkpoint.is_partial]
        there, promised = list(self.checkpoints), set(composable_steps(self.checkpoints, self.parts))
        actions = []
        for number, checkpoint in enumerate(full):
            if number >= len(full) - self.keep_full:
                actions.append(PruneAction(checkpoint, STAYS))
                continue
            action = self._propose(checkpoint, there)
            left = action.applied_to(there)
            later = [step for step in sorted(promised) if step >= checkpoint.step]
            broken = {step for step in later if sources_at(left, step, self.parts) is None}
            requested = {checkpoint.step} if action.becomes == WEIGHTS else set()
            if needed := sorted(broken - requested):
                why = f"step {', '.join(map(str, needed))} could not be composed without it"
                action = PruneAction(checkpoint, STAYS, why)
            elif older := [step for step in later if self._is_older(step, left, there, action)]:
                why = f"the composite of step {', '.join(map(str, older))} would have older states without it"
                action = PruneAction(checkpoint, STAYS, why)
            else:
                there, promised = left, promised - broken
                if action.ledger is not None:
                    save = replace(action.successor or checkpoint, ledger=action.ledger)
                    self.thinned.append((save, self.facts(checkpoint).losses))
            actions.append(action)
        self._check(actions, promised, composable_steps(there, self.parts))
        return actions

    def _propose(self, checkpoint: RunCheckpoint, there: Iterable[RunCheckpoint]) -> PruneAction:
        facts, step = self.facts(checkpoint), checkpoint.step
        if self.reference and facts.has_links:
            return PruneAction(checkpoint, STAYS, "it has links already")
        if facts.obstacle:
            return PruneAction(checkpoint, STAYS, facts.obstacle)
        if self.chooser is None:
            return PruneAction(checkpoint, WEIGHTS)
        before = ledger_before(step, facts, self.thinned, self.new_lineage)
        choice = self.chooser.choose(before, step, facts.num_bytes)
        ledger = before.after(step, choice.parts, self.chooser.trained)
        action = PruneAction(checkpoint, PARTIAL, parts=choice.parts, masters=choice.masters, ledger=ledger)
        if self.reference:
            return self._with_links(action, there, ledger)
        left_out = set(self.chooser.trained) - choice.parts.keys()  # every partial checkpoint has the frozen params
        held_parts = with_layers([part for part in self.parts if part.whole not in left_out], self.parts)
        successor = RunCheckpoint(
            path=self.path_of(step),
            step=step,
            parts=None if held_parts >= set(self.parts) else held_parts,
            part_steps=checkpoint.part_steps,
            master_steps=checkpoint.master_steps,
            ledger=ledger,
            masters=frozenset(choice.masters),
            is_thinned=True,
        )
        action = replace(action, successor=successor, kept=replace(successor, ledger=None))
        if (existing := next((save for save in there if save.is_partial and save.step == step), None)) is not None:
            trained = self.chooser.trained
            parts = {part: "already exists" for part in trained if existing.holds(part)}
            masters = tuple(part for part in trained if part not in parts and existing.master_step_of(part) is not None)
            action = replace(action, parts=parts, masters=masters, successor=existing, ledger=None)
        return action

    def _is_older(
        self, step: int, left: Sequence[RunCheckpoint], there: Sequence[RunCheckpoint], action: PruneAction
    ) -> bool:
        """Whether a step would be composed of older states than those that the policy leaves: the partial checkpoint
        that replaces a full one may hold less, or belong to another attempt than the newest save."""
        if action.kept is None:
            return False
        expected = [*(checkpoint for checkpoint in there if checkpoint.path != action.checkpoint.path), action.kept]
        wanted, steps = (steps_at(checkpoints, step, self.parts) for checkpoints in (expected, left))
        assert wanted and steps, "it can be composed"
        return any(have < want for part in self.parts for have, want in zip(steps[part], wanted[part], strict=True))

    def _with_links(self, action: PruneAction, there: Iterable[RunCheckpoint], ledger: Ledger) -> PruneAction:
        """Return the action that keeps a checkpoint full, with links to the one before it, of the same attempt."""
        checkpoint = action.checkpoint
        losses = self.facts(checkpoint).losses
        able = (full for full in there if not full.is_partial and full.resumable and full.step < checkpoint.step)
        older = [full for full in able if not _contradict(self.facts(full).losses, losses)]
        old = ledger.held_by.keys() - action.parts.keys()
        if not old or not older:
            return PruneAction(checkpoint, STAYS, "it keeps all parts", ledger=ledger)
        before = max(older, key=lambda full: full.step)
        steps = {part: (before if part.whole in old else checkpoint).step_of(part) for part in self.parts}
        of_masters = {
            part: (before if part.whole in old - {*action.masters} else checkpoint).master_step_of(part)
            for part in self.parts
        }
        successor = replace(
            checkpoint,
            part_steps=steps,
            master_steps={part: step for part, step in of_masters.items() if step is not None},
        )
        return replace(action, becomes=LINKED, successor=successor, links_to=before)

    def _check(self, actions: Sequence[PruneAction], promised: set[int], after: Sequence[int]) -> None:
        """Check the outcome independently of the code that decided it."""
        if not after:
            what = "no resumable checkpoint would remain: none of the newest full checkpoints is complete"
            raise SourceError.at("thin", what, "keep more full checkpoints, or save a complete one first")
        saves = [save for save, _ in self.thinned]
        successors = [action.successor for action in actions if action.is_written and action.successor]
        incomplete = {save.step for save in successors if not is_complete(save, saves)}
        if lost := promised - set(after) | incomplete:
            what = f"step {', '.join(map(str, sorted(lost)))} could no longer be composed"
            raise VerificationError.at("thin", what, BUG)


def ledger_before(step: int, facts: FullFacts, thinned: Sequence[Thinned], new_lineage: Callable[[], str]) -> Ledger:
    """Return the ledger under which a step's full checkpoint is saved as one of ``thinned``.

    The ledger belongs to the attempt that the full checkpoint states, and continues the newest older ledger that this
    attempt goes back to. If no attempt is stated, losses tell attempts apart; a new lineage then begins if there is no
    older ledger, or if another checkpoint continues it already. The ledger lists no part whose newest state is lost,
    so that this part is saved again.
    """
    saves = [save for save, _ in thinned]
    older = [save for save, logged in thinned if save.step < step and _goes_back_to(facts, save, logged)]
    last = max(older, key=lambda save: save.step, default=None)
    ledger = last.ledger if last is not None else None
    lost = lost_parts(ledger, saves) if ledger is not None else set()
    if facts.attempt is not None:
        ledger = replace(ledger or Ledger("new"), lineage=facts.attempt.lineage, history=facts.attempt.history)
    elif last is None or ledger is None:
        ledger = Ledger(new_lineage())
    elif any(save.ledger and save.ledger.lineage == ledger.lineage and save.step > last.step for save in saves):
        ledger = ledger.resumed(new_lineage(), last.step)
    return ledger.without(lost)


def _goes_back_to(facts: FullFacts, save: RunCheckpoint, logged: Mapping[int, float]) -> bool:
    if facts.attempt is not None and save.past is not None:
        return facts.attempt.includes(save.past)
    return save.ledger is not None and save.ledger.lineage.startswith(THINNED) and not _contradict(logged, facts.losses)


def _contradict(a: Mapping[int, float], b: Mapping[int, float]) -> bool:
    """Return whether two checkpoints belong to different attempts: they logged different losses at the same step."""
    shared = a.keys() & b.keys()
    return any(a[step] != b[step] and not (math.isnan(a[step]) and math.isnan(b[step])) for step in shared)
