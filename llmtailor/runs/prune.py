"""Decides what thinning makes of each full checkpoint of a run, and lays it out; nothing is written.

The decisions are pure. `plan_thinning` and `read_facts` read the run's folder, but no tensor.

A checkpoint is touched only if every promised step can be composed without it, by the same rules as ``merge --run``.
In addition, the partial checkpoints made here must be complete among themselves: they form their own chain of saves,
separate from those of the training-side saver, so that nothing deleted or abandoned elsewhere affects them.
"""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import cache, cached_property
from itertools import repeat
from pathlib import Path
from typing import Any

from llmtailor._version import __version__
from llmtailor.checkpoint.index import ACCELERATE, DCP, FSDP, LIGHTNING, MEGATRON, CheckpointIndex
from llmtailor.checkpoint.layout import FileLayout, Plan
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
from llmtailor.checkpoint.sources import Sources
from llmtailor.compose.fill import plan_composite
from llmtailor.compose.plan import MergePlan, OpenedSources, Options, plan_merge
from llmtailor.compose.write import make_manifest
from llmtailor.containers.dcp import METADATA
from llmtailor.containers.json import read_json
from llmtailor.copying.copy import FileResult
from llmtailor.copying.moving import Clone
from llmtailor.errors import (
    MismatchError,
    PathIn,
    Problem,
    SourceError,
    UnsupportedCheckpoint,
    UsageError,
    VerificationError,
    some,
)
from llmtailor.findings import ERROR
from llmtailor.formats.dcp.folder import MODEL_FOLDER
from llmtailor.formats.dcp.links import has_linkable_files
from llmtailor.formats.dcp.target import check_states
from llmtailor.formats.dcp.write import lay_out_model
from llmtailor.formats.partial.manifest import IS_THINNED, BundleFact, manifest_json, ranges_of, read_manifest
from llmtailor.formats.partial.write import (
    PartialLayout,
    check_can_be_partial,
    describe_partial,
    lay_out_partial,
    trained_states,
)
from llmtailor.formats.provenance import stated_attempt
from llmtailor.formats.registry import find_structure
from llmtailor.frameworks.files import (
    ADAPTER,
    DCP_RECORD,
    LATEST,
    LATEST_UNIVERSAL,
    MANIFEST,
    OPTIMIZER,
    SCALER,
    SCHEDULER,
    TRAINER_STATE,
    is_rng_file,
    owner_of,
)
from llmtailor.frameworks.framework import framework_of, is_partial, survey_contents
from llmtailor.frameworks.read import adapters_of
from llmtailor.model.parts import ModelStructure, Part, condense, with_layers
from llmtailor.model.precision import AS_POLICY, EXACT, Precision, PrecisionOptions
from llmtailor.model.roles import WEIGHT, State
from llmtailor.policies import PartChoice, Policy, Situation, choose, fitted, make_policy, named_policy, precision_of
from llmtailor.recipe import Assignment, Recipe
from llmtailor.recipe.selectors import select
from llmtailor.runs.folder import FolderKind, RunFolder, files_in, freed_bytes, log_entries, staged
from llmtailor.runs.gc import BUG, StepAge, compare_ages
from llmtailor.runs.scan import Scan, check_newest, scan_run
from llmtailor.verify.verify import verify_checkpoint

_SCRIPT = re.compile(r"zero_to_\w+\.py")
_OF_A_RESUME = (LATEST, LATEST_UNIVERSAL, OPTIMIZER, SCHEDULER, SCALER)
BASE = "complete base"
UNBOUNDED = 1 << 30
"""The staleness bound, in saves, of a selection: parts that it leaves out always come from the base."""
Thinned = tuple[RunCheckpoint, Mapping[int, float]]
"""A checkpoint that was or will be made from a full one, with its ledger, and its losses as in `FullFacts`"""
STAYS, PARTIAL, WEIGHTS, LINKED = "stays", "partial", "weights only", "linked"
LEDGER = "ledger"
"""The key of the ledger in the manifest of a checkpoint with links"""


def compared(one: CheckpointIndex) -> list[State]:
    """Return the states that `check_same` compares."""
    return [state for state, held in one.held.items() if held.is_here and state.kind != WEIGHT]


@dataclass(frozen=True)
class Conversion:
    """A full checkpoint laid out as a partial one; no tensor is read. Raises SourceError or UnsupportedCheckpoint."""

    source: CheckpointIndex
    structure: ModelStructure
    target: Path
    parts: Mapping[Part, str]
    """The parts it holds -> reason"""
    ledger: Ledger
    """The ledger after this save"""
    policy: Mapping[str, Any]
    older: Mapping[str, tuple[Path, int]]
    """The files of frozen params in partial checkpoints: name -> folder and size of the newest"""
    masters: tuple[Part, ...] = ()
    """Further parts, of which only the masters are kept"""
    precision: Precision = EXACT
    save_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @cached_property
    def params_of(self) -> dict[Part, list[str]]:
        """The trained params by part, also of those in ``masters``"""
        trained = {name for group in self.source.group_params for name in group}
        parts = (*self.parts, *self.masters)
        return {part: [name for name in self.structure.names(part) if name in trained] for part in parts}

    @cached_property
    def layout(self) -> PartialLayout:
        return lay_out_partial(self.source, *self.kept_params(), self.save_id, self.precision)

    @cached_property
    def plan(self) -> Plan:
        return _copied_from(self.source, self.layout.files)

    @property
    def links(self) -> dict[str, Path]:
        """Files of frozen params that an older partial checkpoint has in the same size, so likely the same content"""
        there = ((file, self.older[file.path]) for file in self.layout.frozen if file.path in self.older)
        return {file.path: folder for file, (folder, num_bytes) in there if num_bytes == file.num_bytes}

    def kept_params(self) -> tuple[set[str], set[str]]:
        """Return the params that are kept whole, and those of which only the masters are."""
        whole = {name for part in self.parts for name in self.params_of[part]}
        return whole, {name for part in self.masters for name in self.params_of[part]}

    @property
    def num_bytes(self) -> int:
        files = sum(file.num_bytes for file in self.plan.files if file.path not in self.links)
        return files + len(self.manifest(()))

    def manifest(self, results: Iterable[FileResult]) -> bytes:
        """Return the manifest with the checksums of the files; its size does not depend on them."""
        of = {one.path: one for one in results}
        own = {file.path for file in (*self.layout.bundles, *self.layout.frozen)}
        facts, carried = [], {}
        for file in self.plan.files:
            crc = of[file.path].crc if of else 0
            if file.path in own:
                checked = of[file.path].checked if of else zip(file.each(), repeat(0))
                facts.append(BundleFact(file.path, file.num_bytes, crc, ranges_of(checked)))
            else:
                carried[file.path] = file.num_bytes, crc
        made = describe_partial(
            self.source, self.save_id, self.parts, self.params_of, tuple(facts), self.ledger.to_json(), self.masters
        )
        return manifest_json(
            replace(made, carried=carried),
            policy=self.policy,
            num_bytes=part_bytes(self.source, self.structure),
            tool_version=__version__,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )


def _copied_from(index: CheckpointIndex, files: Iterable[FileLayout]) -> Plan:
    """Return the plan of files that one checkpoint fills."""
    names = dict.fromkeys([*index.params, *index.tied, *(state.param for state in index.held)], 0)
    return plan_composite(files, [index], Sources(names), 0)


def part_bytes(index: CheckpointIndex, structure: ModelStructure) -> dict[str, int]:
    """Return the bytes of each part's trained states; parts without trained params are left out."""
    found: dict[str, int] = {}
    for param, states in trained_states(index).items():
        part = structure.part_of[param]
        found[part] = found.get(part, 0) + sum(index.held[state].num_bytes for state in states)
    return {part: found[part] for part in structure.parts if part in found}


def kept_files(index: CheckpointIndex) -> list[str]:
    """Return the files that stay as they are: all but the states that only a resume needs."""
    return [path for path in index.files if _is_kept(path, index)]


def _is_kept(path: str, index: CheckpointIndex) -> bool:
    if "/" in path:
        folders = (
            [f"{MODEL_FOLDER}/"] if index.form.file_format == FSDP else [*filter(None, adapters_of(index).values())]
        )
        return path.startswith(tuple(folders))
    if index.form.file_format == DCP and (path == METADATA or path.endswith(".distcp")):
        return False  # its weights are written to other files
    is_of_accelerate = owner_of(path) == ACCELERATE
    return path not in _OF_A_RESUME and not (is_rng_file(path) or is_of_accelerate or _SCRIPT.fullmatch(path))


def plan_weights(index: CheckpointIndex) -> Plan:
    """Return the plan of the files to be written: none, but for a DCP folder."""
    return _copied_from(index, lay_out_model(index)) if index.form.file_format == DCP else Plan((), ())


@dataclass(frozen=True, slots=True)
class ThinOptions:
    keep_full: int
    """The number of newest full checkpoints that stay unchanged; 1 or more"""
    strategy: str | None = None
    """The policy, in the syntax of `policies.make_policy`, that chooses the parts each older checkpoint keeps"""
    selectors: tuple[str, ...] = ()
    """Or the parts that all of them keep, as in a recipe. With neither, they keep no optimizer states."""
    precision: PrecisionOptions = AS_POLICY
    reference: bool = False
    """Whether they stay complete, with hard links to the files of older ones for all that they don't keep"""

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
    has_links: bool = False
    """Whether ``thin`` has made it"""
    attempt: Past | None = None
    """The attempt that it states"""


@dataclass(frozen=True, slots=True)
class PruneAction:
    checkpoint: RunCheckpoint
    becomes: str
    """`STAYS`, `PARTIAL`, `LINKED` or `WEIGHTS`"""
    why: str = ""
    """Why an old one stays"""
    parts: Mapping[Part, str] = field(default_factory=dict)
    """For one that becomes partial or gets links: the parts it keeps, each with the reason"""
    masters: tuple[Part, ...] = ()
    """Further parts, of which it keeps the masters without the moments"""
    successor: RunCheckpoint | None = None
    """The checkpoint that replaces it: a partial one, or one with links"""
    kept: RunCheckpoint | None = None
    """For one that becomes partial: what the policy leaves of it, as a full checkpoint, which every attempt can use"""
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
        replaced = {self.checkpoint.path, *(one.path for one in new)}
        return [*(one for one in checkpoints if one.path not in replaced), *new]


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
        full = sorted((one for one in self.checkpoints if not one.is_partial), key=lambda one: one.step)
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
                    made = replace(action.successor or checkpoint, ledger=action.ledger)
                    self.thinned.append((made, self.facts(checkpoint).losses))
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
        if (other := next((one for one in there if one.is_partial and one.step == step), None)) is not None:
            trained = self.chooser.trained
            parts = {part: "already exists" for part in trained if other.holds(part)}
            masters = tuple(part for part in trained if part not in parts and other.master_step_of(part) is not None)
            action = replace(action, parts=parts, masters=masters, successor=other, ledger=None)
        return action

    def _is_older(
        self, step: int, left: Sequence[RunCheckpoint], there: Sequence[RunCheckpoint], action: PruneAction
    ) -> bool:
        """Whether a step would be composed of older states than those that the policy leaves: what stands in for a
        full checkpoint may hold less, or belong to another attempt than the newest save."""
        if action.kept is None:
            return False
        left_over = [*(one for one in there if one.path != action.checkpoint.path), action.kept]
        wanted, found = (steps_at(one, step, self.parts) for one in (left_over, left))
        assert wanted and found, "it can be composed"
        return any(have < want for part in self.parts for have, want in zip(found[part], wanted[part], strict=True))

    def _with_links(self, action: PruneAction, there: Iterable[RunCheckpoint], ledger: Ledger) -> PruneAction:
        """Return the action that keeps a checkpoint full, with links to the one before it, of the same attempt."""
        checkpoint = action.checkpoint
        losses = self.facts(checkpoint).losses
        able = (one for one in there if not one.is_partial and one.resumable and one.step < checkpoint.step)
        older = [one for one in able if not _contradict(self.facts(one).losses, losses)]
        old = ledger.held_by.keys() - action.parts.keys()
        if not old or not older:
            return PruneAction(checkpoint, STAYS, "it keeps all parts", ledger=ledger)
        before = max(older, key=lambda one: one.step)
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
        made = [action.successor for action in actions if action.is_written and action.successor]
        incomplete = {save.step for save in made if not is_complete(save, saves)}
        if lost := promised - set(after) | incomplete:
            what = f"step {', '.join(map(str, sorted(lost)))} could no longer be composed"
            raise VerificationError.at("thin", what, BUG)


def ledger_before(step: int, facts: FullFacts, thinned: Sequence[Thinned], new_lineage: Callable[[], str]) -> Ledger:
    """Return the ledger under which a step's full checkpoint is saved as one of ``thinned``.

    It belongs to the attempt that the full one states, and continues the newest older one that this attempt goes back
    to. If none is stated, attempts are told apart by their losses: without an older one, or if another already
    continues it, it starts a new lineage. Parts whose newest state is lost are left out, so that they are saved again.
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


def _contradict(one: Mapping[int, float], other: Mapping[int, float]) -> bool:
    """Return whether two checkpoints belong to different attempts: they logged different losses at the same step."""
    shared = one.keys() & other.keys()
    return any(one[step] != other[step] and not (math.isnan(one[step]) and math.isnan(other[step])) for step in shared)


def read_losses(root: Path) -> dict[int, float]:
    """Return the losses logged in ``trainer_state.json``; malformed entries are left out."""
    return {
        entry["step"]: entry["loss"]
        for entry in (log_entries(root, root.name) if (root / TRAINER_STATE).is_file() else ())
        if type(entry.get("step")) is int and isinstance(entry.get("loss"), (int, float))
    }


def ledger_of_links(index: CheckpointIndex) -> Ledger | None:
    """Return the ledger of a checkpoint with links that ``thin`` has made; None for another one."""
    where = PathIn(index.name, MANIFEST)
    found = read_json(index.root / MANIFEST, where).get(LEDGER) if MANIFEST in index.files else None
    return None if found is None else Ledger.from_json(found, where)


def plan_links(
    action: PruneAction, structure: ModelStructure, full: CheckpointIndex, linked: CheckpointIndex, clone: Clone
) -> MergePlan:
    """Plan the checkpoint with links that replaces a full one.

    ``linked`` is what it links to, now or when that one has links, too. Only the places in its files differ.
    """
    own, other, ledger = action.checkpoint, action.links_to, action.ledger
    assert other is not None and ledger is not None
    old = ledger.held_by.keys() - {*action.parts, *action.masters}
    source_of = {part.whole: other if part.whole in old else own for part in structure.parts}
    title = f"step {own.step}, thinned out"
    reasons = {part: "newest" if source_of[part] is own else f"as in {other.name}" for part in source_of}
    recipe = Recipe.of(Assignment(own, source_of, reasons, title, dict.fromkeys(action.masters, other)), title)
    return plan_merge(
        recipe,
        staged(full.root, FolderKind.THINNING),
        Options(reference=True, reuse=True, clone=clone, allow_errors=True),  # as resumable as the full one
        OpenedSources(indexes={full.root: full, linked.root: linked}, copied=[full.root]),
    )


def manifest_of_links(
    composition: MergePlan, ledger: Ledger, results: Sequence[FileResult], card: bytes, created: str
) -> bytes:
    content = make_manifest(composition, results, {}, card, "", created)
    return json.dumps({**content, LEDGER: ledger.to_json()}, indent=2).encode() + b"\n"


def read_facts(
    index: CheckpointIndex, structure: ModelStructure, target: Path, usable: Collection[Path], options: ThinOptions
) -> FullFacts:
    """Read the facts of a full checkpoint without its tensors; ``target`` is its path as a partial one."""
    obstacle = _why_untouchable(index)
    has_adapter = any(f"{folder}{ADAPTER}" in index.files for folder in adapters_of(index).values())
    if not obstacle and options.reference:
        obstacle = _why_no_links(index)
    elif not obstacle and not options.weights_only:
        obstacle = _why_not_partial(index, target, usable)
    elif not obstacle and not has_adapter and not any(state.kind == WEIGHT for state in index.held):
        obstacle = "it has no safetensors weights, so nothing would remain"
    has_links = ledger_of_links(index) is not None
    num_bytes = part_bytes(index, structure)
    return FullFacts(obstacle, read_losses(index.root), num_bytes, has_links, stated_attempt(index.root))


def _best_model(newest: CheckpointIndex) -> str | None:
    """Return the name of the checkpoint that the Trainer loads when it ends, with ``load_best_model_at_end``; its own
    rotation keeps it, too."""
    where = PathIn(newest.name, TRAINER_STATE)
    best = (
        read_json(newest.root / TRAINER_STATE, where).get("best_model_checkpoint")
        if TRAINER_STATE in newest.files
        else None
    )
    return Path(best).name if isinstance(best, str) else None


def _why_untouchable(index: CheckpointIndex) -> str:
    if index.root.is_symlink():
        return "it is a symbolic link"
    if index.framework == LIGHTNING and not index.form.stage:
        return "Lightning's one file has no partial form"
    if index.form.format == MEGATRON:
        return "Megatron-core's checkpoints have no partial form"
    contents = survey_contents(index.root)
    lost = [path for path in contents.known if not path.endswith("/") and path not in index.files]
    if contents.unknown:
        return f"it holds files of unknown origin: {some(contents.unknown)}"
    return f"it holds files that would be lost: {some(lost)}" if lost else ""


def _why_no_links(index: CheckpointIndex) -> str:
    if not has_linkable_files(index):
        return "it is not a folder of torch.distributed.checkpoint"
    if DCP_RECORD in index.files:
        return "its saver has made links already"
    try:
        check_states(index, index.groups)
    except UnsupportedCheckpoint as error:
        return error.problems[0].what
    errors = verify_checkpoint(index.root).of_severity(ERROR)  # as the one with links must be without
    return f"it is not resumable: {errors[0].what}" if errors else ""


def _why_not_partial(index: CheckpointIndex, target: Path, usable: Collection[Path]) -> str:
    state = framework_of(index).state
    if state and state not in index.files:
        return f"{state} is missing, so it is not resumable"
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


@dataclass(frozen=True, slots=True)
class ThinPlan:
    """What thinning will do. Nothing has been touched yet."""

    options: ThinOptions
    scan: Scan
    """Covers every attempt"""
    actions: tuple[PruneAction, ...]
    """One for each full checkpoint, oldest first"""
    before: tuple[int, ...]
    """Composable steps now"""
    left_behind: tuple[Path, ...]
    """What a killed ``thin`` left; also removed"""
    freed: int
    """Bytes"""
    ages: tuple[StepAge, ...]
    """For each step that stays composable"""


def plan_thinning(run: str | Path, options: ThinOptions, *, trust_unrecorded: bool = False) -> ThinPlan:
    """Decide how to thin out a run's checkpoints, and compute the bytes freed; no tensor is read.

    ``trust_unrecorded`` also thins out full checkpoints that do not state their attempt.

    Raises SourceError if the newest checkpoint can't be used or no complete state would be left, UsageError for an
    invalid strategy or selectors, and MismatchError for links in a format without such files.
    """
    run = Path(run).absolute()  # on this machine: it is changed in place
    folder, scan = RunFolder(run), scan_run(run, every_chain=True, trust_unrecorded=trust_unrecorded)
    newest = scan.indexes[check_newest(scan)]
    best = _best_model(newest)
    structure, indexes = find_structure(newest), scan.indexes  # what is made here holds whole layers
    trained = {structure.part_of[param] for param in trained_states(newest)}
    parts = [part for part in structure.parts if part in trained]
    has_masters = newest.form.has_masters and newest.precision in ("BF16", "F16")
    chooser = None
    if not options.weights_only:
        chooser = Chooser.of(options, structure, parts, weights_are_masters=not has_masters)
    if options.reference:
        _check_reference(scan)

    @cache
    def facts_of(one: RunCheckpoint) -> FullFacts:
        facts = read_facts(indexes[one.path], structure, folder.at(one.step), indexes, options)
        return replace(facts, obstacle=f"{newest.name} names it as the best model") if one.name == best else facts

    pruner = Pruner(
        checkpoints=scan.usable,
        parts=scan.structure.parts,
        keep_full=options.keep_full,
        facts=facts_of,
        chooser=chooser,
        reference=options.reference,
        thinned=[
            (replace(one, ledger=ledger), read_losses(one.path))
            for one in scan.usable
            if (one.is_thinned if not options.reference else not one.is_partial)
            and (ledger := one.ledger or ledger_of_links(indexes[one.path]))
        ],
        new_lineage=lambda: THINNED + uuid.uuid4().hex[:12],
        path_of=folder.at,
    )
    weights = newest.precision if has_masters else "F32"
    precision = precision_of(chooser.policy, options.precision, weights) if chooser else EXACT
    if options.reference and precision != EXACT:
        what = "they round states, but a stock dcp.load needs exact ones"
        raise UsageError.at("--reference", what, "omit it, or --masters, --moments and policies that round")
    actions = _measure(pruner.decide(), scan, chooser, precision)
    left = folder.left_by_thin()
    freed = sum(action.freed for action in actions) + freed_bytes(path for folder in left for path in files_in(folder))
    rest = list(scan.usable)
    for action in actions:
        rest = action.applied_to(rest)
    every = scan.structure.parts
    before, after = (tuple(composable_steps(there, every)) for there in (scan.usable, rest))
    ages = compare_ages(scan.usable, rest, after, every)
    return ThinPlan(options, scan, actions, before, tuple(left), freed, ages)


def _check_reference(scan: Scan) -> None:
    full = [one for one in scan.usable if not one.is_partial]
    if full and not has_linkable_files(newest := scan.indexes[full[-1].path]):
        what = f"{newest.name} is {newest.format}: only FSDP's and DCP's sharded checkpoints have files to link to"
        fix = "leave it out; merge --run then composes a step when it is needed"
        raise MismatchError.at("--reference", what, fix)


def _measure(
    actions: Iterable[PruneAction], scan: Scan, chooser: Chooser | None, precision: Precision
) -> tuple[PruneAction, ...]:
    """Lay out each partial checkpoint to write, so that its size is known to the byte."""
    frozen: dict[str, tuple[Path, int]] = {}
    for one in scan.partial:  # oldest first
        for fact in read_manifest(one.path, one.name).bundles:
            frozen[fact.path] = (one.path, fact.num_bytes)
    measured = []
    for action in actions:
        index = scan.indexes[action.checkpoint.path]
        conversion, freed = None, 0
        if action.becomes == WEIGHTS:
            kept = {*kept_files(index)}
            lost = (index.root / path for path in index.files if path not in kept)
            freed = freed_bytes(lost) - plan_weights(index).num_bytes
        elif action.becomes in (PARTIAL, LINKED):
            freed = freed_bytes(files_in(index.root))
        if action.links_to is not None and action.ledger is not None:
            planned = plan_links(action, scan.structure, index, scan.indexes[action.links_to.path], "never")
            linked = sum(file.num_bytes for file in planned.plan.links)
            written = planned.plan.num_bytes - linked
            freed -= written + len(manifest_of_links(planned, action.ledger, (), b"", ""))
            action = replace(action, written_bytes=written, linked_bytes=linked)
        successor = action.successor if action.becomes == PARTIAL and action.is_written else None
        if successor is not None and successor.ledger is not None and chooser is not None:
            conversion = Conversion(
                source=index,
                structure=chooser.structure,
                target=successor.path,
                parts=action.parts,
                ledger=successor.ledger,
                policy=chooser.settings(),
                older=dict(frozen),
                masters=action.masters,
                precision=precision,
            )
            freed -= conversion.num_bytes
            frozen |= {file.path: (successor.path, file.num_bytes) for file in conversion.layout.frozen}
        measured.append(replace(action, freed=freed, conversion=conversion))
    return tuple(measured)


def bytes_to_move(plan: ThinPlan) -> int:
    """Return the total bytes that `thin` reports to its ``on_progress``."""
    total = 0
    for action in plan.actions:
        if action.conversion is not None:
            total += action.conversion.plan.num_bytes
        elif action.becomes == LINKED:
            total += action.written_bytes + action.linked_bytes // 2  # which are not read back
        elif action.becomes == WEIGHTS:
            total += plan_weights(plan.scan.indexes[action.checkpoint.path]).num_bytes
        elif action.successor is not None:
            index = plan.scan.indexes[action.successor.path]
            total += sum(index.held[state].held_bytes for state in compared(index))
    return 2 * total  # written and read back, or both read
