"""Decides what becomes of each full checkpoint of a run that is thinned out. Pure.

A checkpoint is touched only if every step that is promised can be composed without it, by the same rules as ``merge
--run``. Beyond that, the partial checkpoints made here must be complete among themselves.

What a user wants older checkpoints to keep. Pure.

Reads what `fates` decides by: no tensor, only headers and small files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.lineage import THINNED, Ledger, Past, SaveRecord
from llmtailor.containers.json import read_json
from llmtailor.errors import PathIn, Problem, SourceError, UnsupportedCheckpoint, UsageError, VerificationError, some
from llmtailor.formats.known_files import survey_contents
from llmtailor.formats.partial.manifest import read_manifest
from llmtailor.formats.partial.read import is_partial
from llmtailor.formats.partial.write import check_can_be_partial, trained_states
from llmtailor.formats.trainer import ADAPTER, MANIFEST, TRAINER_STATE
from llmtailor.model.parts import Anatomy
from llmtailor.model.states import WEIGHT
from llmtailor.policies import Policy, Situation, choose, make_policy, named_policy
from llmtailor.recipe.candidates import RunCheckpoint, composable_steps, sources_at
from llmtailor.recipe.selectors import select
from llmtailor.recipe.text import condense
from llmtailor.runs.retention import holders
from llmtailor.runs.thinned import Thinned, ledger_before, read_losses

BASE = "complete base"
UNBOUNDED = 1 << 30
"""Saves. The limit of a selection: parts that it leaves out stay those of the base."""


@dataclass(frozen=True, slots=True)
class Thinning:
    """How to thin out a run."""

    keep_full: int
    """So many of the newest full checkpoints stay as they are; 1 or more."""
    strategy: str | None = None
    """A policy, as `policies.make_policy` reads it: it says which parts each older checkpoint keeps."""
    selectors: tuple[str, ...] = ()
    """Or the parts that all of them keep, as in a recipe. With neither, they keep no optimizer state at all."""

    @property
    def weights_only(self) -> bool:
        return self.strategy is None and not self.selectors


@dataclass(frozen=True, slots=True)
class Selected:
    """The policy of a selection: the same parts every time."""

    parts: frozenset[str]
    selectors: tuple[str, ...]
    name: str = "select"
    needs_drift: bool = False

    def choose(self, situation: Situation) -> dict[str, str]:
        return {part: "selected" for part in situation.parts if part in self.parts}

    def worst_staleness(self, anatomy: Anatomy, parts: Sequence[str]) -> int:
        return UNBOUNDED

    def settings(self) -> dict[str, Any]:
        return {"selectors": list(self.selectors)}


def make_chooser(thinning: Thinning, anatomy: Anatomy, trained: Sequence[str]) -> Chooser:
    """Return what says which parts a checkpoint keeps. ``trained`` are the parts with trained params.

    Raises UsageError for a strategy or selectors that make no sense.
    """
    policy: Policy
    if thinning.strategy is not None:
        if (kind := named_policy(thinning.strategy)) and kind.needs_drift:  # before it is asked for its options
            what = f"{kind.name} goes by how much the parts change, which only the training itself can measure"
            raise UsageError.at("--strategy", what, "take full, parity, filter or round_robin:4")
        policy = make_policy(thinning.strategy)
        bound = policy.worst_staleness(anatomy, trained)
        assert bound is not None, "only what goes by the change of parts has no bound"
        return Chooser(policy, bound, anatomy, tuple(trained))
    policy = Selected(_whole_parts(thinning.selectors, anatomy, trained), thinning.selectors)
    return Chooser(policy, UNBOUNDED, anatomy, tuple(trained))


def _whole_parts(selectors: Sequence[str], anatomy: Anatomy, trained: Sequence[str]) -> frozenset[str]:
    names, found = select(selectors, anatomy, "--select")
    problems = list(found)
    touched = dict.fromkeys(part for name, part in anatomy.part_of.items() if name in names)
    split = [part for part in touched if not names.issuperset(anatomy.names(part))]
    if split:
        what = f"they select only some of the tensors of {condense(split)}"
        problems.append(Problem("--select", what, "select whole parts"))
    chosen = frozenset(touched) & frozenset(trained)
    if not problems and not chosen:
        problems.append(Problem("--select", "nothing of what they select is trained", "select parts that are"))
    if problems:
        raise UsageError(problems)
    return chosen


@dataclass(frozen=True, slots=True)
class Chooser:
    """Asks a policy which parts a checkpoint keeps, as the training-side saver does."""

    policy: Policy
    bound: int
    """No part becomes older than so many saves."""
    anatomy: Anatomy
    trained: tuple[str, ...]

    def choose(self, ledger: Ledger, step: int, num_bytes: Mapping[str, int]) -> dict[str, str]:
        """Return the parts that the checkpoint of a step keeps, and why; the first one of a ledger keeps all."""
        if not ledger.held_by:
            return dict.fromkeys(self.trained, BASE)
        situation = Situation(
            step=step,
            save=ledger.saves,
            anatomy=self.anatomy,
            parts=self.trained,
            num_bytes=num_bytes,
            last=ledger.last,
        )
        return dict(choose(self.policy, situation, self.bound).parts)

    def settings(self) -> dict[str, Any]:
        """Return the policy as the manifest tells it."""
        return {"name": self.policy.name, **self.policy.settings(), "made_of_full_checkpoints": True}


STAYS, PARTIAL, WEIGHTS = "stays", "partial", "weights only"


@dataclass(frozen=True, slots=True)
class FullFacts:
    """What is known of a full checkpoint, beside what `RunCheckpoint` says."""

    obstacle: str = ""
    """Why it must stay as it is; empty for none."""
    losses: Mapping[int, float] = field(default_factory=dict)
    """See `runs.thinned`."""
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


def read_facts(
    index: CheckpointIndex, anatomy: Anatomy, target: Path, usable: Collection[Path], *, weights_only: bool
) -> FullFacts:
    """Read the facts of a full checkpoint; ``target`` is where it would be as a partial one."""
    obstacle = _obstacle(index)
    if not obstacle:
        obstacle = _no_weights(index) if weights_only else _not_partial(index, target, usable)
    return FullFacts(obstacle, _losses(index.root), part_bytes(index, anatomy))


def read_thinned(partial: Iterable[RunCheckpoint]) -> list[Thinned]:
    """Return those partial checkpoints that were made of full ones."""
    ledgers = {one: Ledger.from_json(read_manifest(one.path, one.name).ledger, one.name) for one in partial}
    return [
        Thinned(one.step, ledger, _losses(one.path))
        for one, ledger in ledgers.items()
        if ledger.lineage.startswith(THINNED)
    ]


def part_bytes(index: CheckpointIndex, anatomy: Anatomy) -> dict[str, int]:
    """Return the bytes of each part's trained states; parts of which nothing is trained are left out."""
    found: dict[str, int] = {}
    for param, states in trained_states(index).items():
        part = anatomy.part_of[param]
        found[part] = found.get(part, 0) + sum(index.held[state].num_bytes for state in states)
    return {part: found[part] for part in anatomy.parts if part in found}


def _losses(root: Path) -> dict[int, float]:
    path = root / TRAINER_STATE
    return read_losses(read_json(path, PathIn(root.name, TRAINER_STATE))) if path.is_file() else {}


def _obstacle(index: CheckpointIndex) -> str:
    if index.root.is_symlink():
        return "it is a link to another place"
    contents = survey_contents(index.root)
    lost = [path for path in contents.known if not path.endswith("/") and path not in index.files]
    if contents.unknown:
        return f"it holds files of unknown making: {some(contents.unknown)}"
    return f"it holds files that would be lost: {some(lost)}" if lost else ""


def _no_weights(index: CheckpointIndex) -> str:
    has_weights = any(state.kind == WEIGHT for state in index.held) or ADAPTER in index.files
    return "" if has_weights else "it has no weights in safetensors form, so nothing would be left of it"


def _not_partial(index: CheckpointIndex, target: Path, usable: Collection[Path]) -> str:
    if TRAINER_STATE not in index.files:
        return f"{TRAINER_STATE} is missing, so nothing can resume from it"
    if target.exists() and target not in usable:
        what = "is of another model or damaged" if is_partial(target) else "did not finish; llmtailor gc removes it"
        return f"{target.parent.name}/{target.name} is in the way, which {what}"
    if MANIFEST in index.files and _is_split(index):
        return "parts of this composite are split over sources, so its weights need not be its rounded masters"
    try:
        check_can_be_partial(index)
    except UnsupportedCheckpoint as error:
        return error.problems[0].what
    return ""


def _is_split(index: CheckpointIndex) -> bool:
    rows = read_json(index.root / MANIFEST, PathIn(index.name, MANIFEST)).get("parts") or []
    return any(isinstance(row, dict) and row.get("is_whole") is False for row in rows)
