"""Decides what thinning makes of each full checkpoint of a run. Pure, except `read_facts`.

A checkpoint is touched only if every promised step can be composed without it, by the same rules as ``merge --run``.
In addition, the partial checkpoints made here must be complete among themselves: they form their own chain of saves,
separate from those of the training-side saver, so that nothing deleted or abandoned elsewhere affects them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.index import LIGHTNING, CheckpointIndex
from llmtailor.checkpoint.lineage import (
    THINNED,
    Ledger,
    RunCheckpoint,
    composable_steps,
    is_complete,
    lost_parts,
    sources_at,
)
from llmtailor.containers.json import read_json
from llmtailor.errors import PathIn, Problem, SourceError, UnsupportedCheckpoint, UsageError, VerificationError, some
from llmtailor.formats.clients import TRAINER_STATE, client_of
from llmtailor.formats.known_files import survey_contents
from llmtailor.formats.partial.manifest import is_partial
from llmtailor.formats.partial.write import check_can_be_partial
from llmtailor.formats.trainer import ADAPTER, MANIFEST
from llmtailor.model.parts import ModelStructure, condense, layer_of, with_layers
from llmtailor.model.states import WEIGHT
from llmtailor.policies import Choice, Policy, Situation, choose, make_policy, named_policy
from llmtailor.recipe.selectors import select
from llmtailor.runs.to_partial import Conversion, part_bytes

BASE = "complete base"
UNBOUNDED = 1 << 30
"""The staleness bound, in saves, of a selection: parts that it leaves out always come from the base."""
Thinned = tuple[RunCheckpoint, Mapping[int, float]]
"""A partial checkpoint that was or will be made from a full one, and its losses as in `FullFacts`"""
STAYS, PARTIAL, WEIGHTS = "stays", "partial", "weights only"
_BUG = "this is a bug in llmtailor: please report it; nothing was changed"


@dataclass(frozen=True, slots=True)
class ThinOptions:
    """The options of ``thin``."""

    keep_full: int
    """The number of newest full checkpoints that stay unchanged; 1 or more"""
    strategy: str | None = None
    """The policy, in the syntax of `policies.make_policy`, that chooses the parts each older checkpoint keeps"""
    selectors: tuple[str, ...] = ()
    """Or the parts that all of them keep, as in a recipe. With neither, they keep no optimizer states."""

    @property
    def weights_only(self) -> bool:
        return self.strategy is None and not self.selectors


@dataclass(frozen=True, slots=True)
class Selected:
    """The policy of a fixed selection: the same parts every time."""

    parts: frozenset[str]
    selectors: tuple[str, ...]
    name: str = "select"
    needs_drift: bool = False

    def choose(self, situation: Situation) -> dict[str, str]:
        return {part: "selected" for part in situation.parts if part in self.parts}

    def worst_staleness(self, structure: ModelStructure, parts: Sequence[str]) -> int:
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
    trained: tuple[str, ...]
    """The parts with trained params"""

    @classmethod
    def of(cls, options: ThinOptions, structure: ModelStructure, trained: Sequence[str]) -> Chooser:
        """Build it from the options. Raises UsageError for an invalid strategy or selectors."""
        policy: Policy
        if options.strategy is None:
            policy = Selected(_whole_parts(options.selectors, structure, trained), options.selectors)
        else:
            if (kind := named_policy(options.strategy)) and kind.needs_drift:  # before its options are parsed
                what = f"{kind.name} depends on how much the parts change, which only the training can measure"
                raise UsageError.at("--strategy", what, "use moments_in_turn, parity, filter, round_robin:4 or full")
            policy = make_policy(options.strategy)
        bound = policy.worst_staleness(structure, trained)
        assert bound is not None, "only policies that need drift have no bound"
        return cls(policy, bound, structure, tuple(trained))

    def choose(self, ledger: Ledger, step: int, num_bytes: Mapping[str, int]) -> Choice:
        """Return the parts that a step's checkpoint keeps, and why; the first one of a ledger keeps all."""
        if not ledger.held_by:
            return Choice(dict.fromkeys(self.trained, BASE), frozenset())
        situation = Situation(step, ledger.saves, self.structure, self.trained, num_bytes, ledger.last)
        return choose(self.policy, situation, self.bound)

    def settings(self) -> dict[str, Any]:
        """Return the policy's settings as the manifest records them."""
        return {"name": self.policy.name, **self.policy.settings(), "made_of_full_checkpoints": True}


def _whole_parts(selectors: Sequence[str], structure: ModelStructure, trained: Sequence[str]) -> frozenset[str]:
    names, found = select(selectors, structure, "--select")
    problems = list(found)
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


@dataclass(frozen=True, slots=True)
class PruneAction:
    """The outcome for a full checkpoint."""

    checkpoint: RunCheckpoint
    becomes: str
    """`STAYS`, `PARTIAL` or `WEIGHTS`"""
    why: str = ""
    """Why an old one stays"""
    parts: Mapping[str, str] = field(default_factory=dict)
    """For one that becomes partial: the parts it keeps, each with the reason"""
    masters: tuple[str, ...] = ()
    """Further parts, of which it keeps the masters without the moments"""
    successor: RunCheckpoint | None = None
    """The partial checkpoint that replaces it"""
    is_written: bool = False
    """Whether that one must be written; otherwise it already exists"""
    freed: int = 0
    """Bytes freed; negative if the replacement is larger"""
    conversion: Conversion | None = None
    """The layout of the partial checkpoint to write"""

    def applied_to(self, checkpoints: Iterable[RunCheckpoint]) -> list[RunCheckpoint]:
        """Return the run's checkpoints after this action."""
        if self.becomes == STAYS:
            return list(checkpoints)
        new = [self.successor] if self.successor else []
        replaced = {self.checkpoint.path, *(one.path for one in new)}
        return [*(one for one in checkpoints if one.path not in replaced), *new]


@dataclass(slots=True)
class Pruner:
    """Decides on one full checkpoint after another, each given the outcome for the older ones."""

    checkpoints: Sequence[RunCheckpoint]
    """All usable checkpoints of the run, of every attempt"""
    parts: Sequence[str]
    keep_full: int
    facts: Callable[[RunCheckpoint], FullFacts]
    chooser: Chooser | None
    """None: older ones become weights only."""
    thinned: list[Thinned]
    """The partial checkpoints that were previously made from full ones"""
    new_lineage: Callable[[], str]
    path_of: Callable[[int], Path]
    """The folder of a step's partial checkpoint"""

    def decide(self) -> list[PruneAction]:
        """Return what to do with each full checkpoint, oldest first.

        Raises SourceError if no complete state would be left.
        """
        full = sorted((one for one in self.checkpoints if not one.is_partial), key=lambda one: one.step)
        there, promised = list(self.checkpoints), set(composable_steps(self.checkpoints, self.parts))
        actions = []
        for number, checkpoint in enumerate(full):
            if number >= len(full) - self.keep_full:
                actions.append(PruneAction(checkpoint, STAYS))
                continue
            action = self._propose(checkpoint, there)
            left = action.applied_to(there)
            broken = {step for step in promised if sources_at(left, step, self.parts) is None}
            requested = {checkpoint.step} if action.becomes == WEIGHTS else set()
            if needed := sorted(broken - requested):
                why = f"step {', '.join(map(str, needed))} could not be composed without it"
                action = PruneAction(checkpoint, STAYS, why)
            else:
                there, promised = left, promised - broken
                if action.is_written and action.successor is not None:
                    self.thinned.append((action.successor, self.facts(checkpoint).losses))
            actions.append(action)
        self._check(actions, promised, composable_steps(there, self.parts))
        return actions

    def _propose(self, checkpoint: RunCheckpoint, there: Iterable[RunCheckpoint]) -> PruneAction:
        facts, step = self.facts(checkpoint), checkpoint.step
        if facts.obstacle:
            return PruneAction(checkpoint, STAYS, facts.obstacle)
        if self.chooser is None:
            return PruneAction(checkpoint, WEIGHTS)
        for other in there:
            if other.is_partial and other.step == step:
                trained = self.chooser.trained
                parts = {part: "already exists" for part in trained if other.holds(part)}
                masters = tuple(
                    part for part in trained if part not in parts and other.master_step_of(part) is not None
                )
                return PruneAction(checkpoint, PARTIAL, parts=parts, masters=masters, successor=other)
        before = ledger_before(step, facts.losses, self.thinned, self.new_lineage)
        choice = self.chooser.choose(before, step, facts.num_bytes)
        ledger = before.after(step, choice.parts, self.chooser.trained)
        left_out = set(self.chooser.trained) - choice.parts.keys()  # every partial checkpoint has the frozen params
        held_parts = with_layers([part for part in self.parts if layer_of(part) not in left_out], self.parts)
        successor = RunCheckpoint(
            path=self.path_of(step),
            step=step,
            parts=None if held_parts >= set(self.parts) else held_parts,
            part_steps=checkpoint.part_steps,
            master_steps=checkpoint.master_steps,
            ledger=ledger,
            masters=frozenset(choice.masters),
        )
        return PruneAction(
            checkpoint, PARTIAL, parts=choice.parts, masters=choice.masters, successor=successor, is_written=True
        )

    def _check(self, actions: Sequence[PruneAction], promised: set[int], after: Sequence[int]) -> None:
        """Check the outcome independently of the code that decided it."""
        if not after:
            what = "no resumable checkpoint would be left: none of the newest full checkpoints is complete"
            raise SourceError.at("thin", what, "keep more full checkpoints, or save a complete one first")
        saves = [save for save, _ in self.thinned]
        made = [action.successor for action in actions if action.is_written and action.successor]
        incomplete = {save.step for save in made if not is_complete(save, saves)}
        if lost := promised - set(after) | incomplete:
            what = f"step {', '.join(map(str, sorted(lost)))} could no longer be composed"
            raise VerificationError.at("thin", what, _BUG)


def ledger_before(
    step: int, losses: Mapping[int, float], thinned: Sequence[Thinned], new_lineage: Callable[[], str]
) -> Ledger:
    """Return the ledger under which a step's full checkpoint is saved as one of ``thinned``.

    It continues the newest older one of the same attempt. If there is none, or another one already continues it, it
    starts a new lineage. Parts whose newest state is lost are left out, so that they are saved again.
    """
    saves = [save for save, _ in thinned]
    older = [save for save, logged in thinned if save.step < step and not _contradict(logged, losses)]
    last = max(older, key=lambda save: save.step, default=None)
    if last is None or last.ledger is None:
        return Ledger(new_lineage())
    ledger, lost = last.ledger, lost_parts(last.ledger, saves)
    if any(save.ledger and save.ledger.lineage == ledger.lineage and save.step > last.step for save in saves):
        ledger = ledger.resumed(new_lineage(), last.step)
    return ledger.without(lost)


def _contradict(one: Mapping[int, float], other: Mapping[int, float]) -> bool:
    """Return whether two checkpoints belong to different attempts: they logged different losses at the same step."""
    shared = one.keys() & other.keys()
    return any(one[step] != other[step] and not (math.isnan(one[step]) and math.isnan(other[step])) for step in shared)


def read_thinned(checkpoints: Iterable[RunCheckpoint]) -> list[Thinned]:
    """Return the partial checkpoints that were made from full ones."""
    return [
        (one, read_losses(one.path)) for one in checkpoints if one.ledger and one.ledger.lineage.startswith(THINNED)
    ]


def read_losses(root: Path) -> dict[int, float]:
    """Return the losses logged in ``trainer_state.json``; malformed entries are left out."""
    path = root / TRAINER_STATE
    log = read_json(path, PathIn(root.name, TRAINER_STATE)).get("log_history") if path.is_file() else None
    entries = [entry for entry in log if isinstance(entry, dict)] if isinstance(log, list) else []
    return {
        entry["step"]: entry["loss"]
        for entry in entries
        if type(entry.get("step")) is int and isinstance(entry.get("loss"), (int, float))
    }


def read_facts(
    index: CheckpointIndex, structure: ModelStructure, target: Path, usable: Collection[Path], *, weights_only: bool
) -> FullFacts:
    """Read the facts of a full checkpoint without its tensors; ``target`` is its path as a partial one."""
    obstacle = _why_untouchable(index)
    if not obstacle and not weights_only:
        obstacle = _why_not_partial(index, target, usable)
    elif not obstacle and ADAPTER not in index.files and not any(state.kind == WEIGHT for state in index.held):
        obstacle = "it has no safetensors weights, so nothing of it would be left"
    return FullFacts(obstacle, read_losses(index.root), part_bytes(index, structure))


def _why_untouchable(index: CheckpointIndex) -> str:
    if index.root.is_symlink():
        return "it is a symbolic link"
    if index.client == LIGHTNING and not index.stage:
        return "Lightning's one file has no partial form"
    contents = survey_contents(index.root)
    lost = [path for path in contents.known if not path.endswith("/") and path not in index.files]
    if contents.unknown:
        return f"it holds files of unknown origin: {some(contents.unknown)}"
    return f"it holds files that would be lost: {some(lost)}" if lost else ""


def _why_not_partial(index: CheckpointIndex, target: Path, usable: Collection[Path]) -> str:
    state = client_of(index).state
    if state and state not in index.files:
        return f"{state} is missing, so nothing can resume from it"
    if target.exists() and target not in usable:
        what = "is of another model or damaged" if is_partial(target) else "is unfinished; llmtailor gc removes it"
        return f"{target.parent.name}/{target.name} exists and {what}"
    if MANIFEST in index.files:
        rows = read_json(index.root / MANIFEST, PathIn(index.name, MANIFEST)).get("parts") or []
        if any(isinstance(row, dict) and row.get("is_whole") is False for row in rows):
            return "parts of this composite are split across sources, so its weights may not be its rounded masters"
    try:
        check_can_be_partial(index)
    except UnsupportedCheckpoint as error:
        return error.problems[0].what
    return ""
