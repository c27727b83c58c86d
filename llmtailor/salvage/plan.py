"""The service behind ``llmtailor salvage``: assess the run's checkpoints, choose sources, plan a merge."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.layout import Bytes, FileLayout
from llmtailor.checkpoint.lineage import RunCheckpoint
from llmtailor.checkpoint.placement import Extent, Runs, common, count, union, without
from llmtailor.checkpoint.step_names import SALVAGED
from llmtailor.codes import Code
from llmtailor.compose.plan import MergePlan, OpenedSources, Options, plan_merge
from llmtailor.compose.report import to_json as plan_to_json
from llmtailor.compose.resume import is_written
from llmtailor.containers.json import MAX_BYTES
from llmtailor.containers.torch_file import read_torch_file
from llmtailor.copying.copy import CopyStats
from llmtailor.copying.moving import Clone
from llmtailor.copying.staging import already_there
from llmtailor.documents import document
from llmtailor.errors import PathIn, Problem, SourceError, UnsupportedCheckpoint, some
from llmtailor.findings import ERROR, NOTE, Finding
from llmtailor.formats.provenance import read_manifest
from llmtailor.formats.registry import display_name, find_structure, shared_layers, with_experts
from llmtailor.frameworks.files import (
    LATEST,
    MANIFEST,
    SCALER,
    TRAINER_STATE,
    is_rng_file,
    is_shard_name,
    is_weight_file,
)
from llmtailor.frameworks.framework import FRAMEWORKS
from llmtailor.model.parts import ModelStructure, Part, condense, group_shares
from llmtailor.model.roles import FROZEN, MASTER, MODULE, WEIGHT, State, is_moment
from llmtailor.recipe import ONLY_MOMENTS, Assignment, Recipe
from llmtailor.recipe.emit import write_recipe
from llmtailor.runs.folder import RunFolder
from llmtailor.runs.scan import scan_back
from llmtailor.storage.local import read_source
from llmtailor.verify.verify import check_file, verify_checkpoint

if TYPE_CHECKING:
    from llmtailor.verify.values import Deep

_SCHEDULERS = {framework.scheduler for framework in FRAMEWORKS.values() if framework.scheduler}
_OF_THE_BASE = {TRAINER_STATE, SCALER, *_SCHEDULERS}
_OF_THE_SCHEDULER = (Code.SCHEDULER_MISSING, Code.SCHEDULER_LENGTH, Code.SCHEDULER_RATE, Code.SCHEDULER_STEP)
_FIRST_MODEL_STATES = re.compile(r".*/zero_pp_rank_0_mp_rank_\d+_model_states\.pt")
_FATAL, _UNFIT, _DROPPED, _WEIGHTS = "states can't be identified", "no base", "file left out", "weights lost"


@dataclass(frozen=True, slots=True)
class UsableSource:
    """A checkpoint of which at least one part is usable."""

    index: CheckpointIndex
    """The index without damaged files, and without weights if these are damaged: the masters can be rounded instead"""
    lost: Mapping[State, Runs]
    """Elements that can't be used"""
    is_whole: bool
    """Whether no damage was found"""
    unfit: tuple[Problem, ...]
    """Why it can't be the base"""
    damage: tuple[Problem, ...]
    knows_tied: bool
    """Whether it is known which params are tied: under ZeRO-3 only one file of rank 0 records it"""
    weights_lost: bool
    """Whether weights were saved in addition to masters but can't be used"""
    dropped: tuple[str, ...]
    """Damaged files of the root without states, except those whose damage makes it unfit as the base"""

    @property
    def name(self) -> str:
        return self.index.name

    @property
    def step(self) -> int:
        return self.index.global_step


def assess(path: Path, deep: bool, on_progress: Callable[[int], None] = lambda num_bytes: None) -> UsableSource:
    """Return the usable parts of a checkpoint. With ``deep``, also read its tensors.

    Raises SourceError if nothing is usable, and Interrupted on Ctrl-C.
    """
    verdict = verify_checkpoint(path)
    index, lost = verdict.index, verdict.damage.states
    findings = [finding for finding in verdict.findings if finding.severity != NOTE]
    if index is None:
        raise SourceError(findings)
    damage = _sort(findings, index)
    if damage[_FATAL]:
        raise SourceError(damage[_FATAL])
    if deep:
        from llmtailor.verify.values import read_everything  # numpy takes a while

        manifest = read_manifest(path, index.name)
        deep_reading = read_everything(index, index.unreadable, manifest, on_progress)
        findings += [finding for finding in deep_reading.findings if finding.severity != NOTE]
        damage = _sort(findings, index, is_deep=True)
        if (
            damage[_FATAL] and index.form.is_partial
        ):  # the checksum of a rank shard doesn't show which states are damaged
            raise SourceError(damage[_FATAL])
        lost = _trusting_checksums(index, deep_reading)
        findings += deep_reading.values
    dropped = {finding.path for finding in damage[_DROPPED] if finding.path}
    weights_lost = index.form.has_masters and bool(damage[_WEIGHTS] or any(state.kind == WEIGHT for state in lost))
    problems = tuple(dict.fromkeys(finding.problem for finding in findings))
    damaged_files = {problem.path for problem in problems}.intersection(index.files)
    return UsableSource(
        index=_without(index, dropped, weights_lost),
        lost={
            state: runs
            for state, runs in lost.items()
            if state.kind != MODULE and not (state.kind == WEIGHT and index.form.has_masters)
        },
        is_whole=not (lost or damaged_files or any(finding.severity == ERROR for finding in findings)),
        unfit=tuple(damage[_UNFIT]),
        damage=problems,
        knows_tied=not any(_FIRST_MODEL_STATES.fullmatch(path) for path in index.unreadable),
        weights_lost=weights_lost,
        dropped=tuple(sorted(dropped - {LATEST})),
    )


def _sort(findings: Iterable[Finding], index: CheckpointIndex, is_deep: bool = False) -> dict[str, list[Finding]]:
    """Return the damage of a checkpoint by its consequence for a salvage."""
    damage: dict[str, list[Finding]] = defaultdict(list)
    for finding in findings:
        path = finding.path or ""
        if path in _OF_THE_BASE or finding.code in _OF_THE_SCHEDULER:
            if is_deep or finding.severity == ERROR:
                damage[_UNFIT].append(finding)
        elif path in index.unreadable or (is_deep and ("/" in path or is_shard_name(path))):
            continue  # the damaged elements are listed separately
        elif is_weight_file(path) and not index.form.is_partial:  # those hold masters and moments, not weights
            damage[_WEIGHTS].append(finding)
        elif path == LATEST or is_rng_file(path):
            damage[_DROPPED].append(finding)
            if path == LATEST and len([tag for tag in index.root.glob("global_step*") if tag.is_dir()]) > 1:
                damage[_FATAL].append(finding)
        elif path == MANIFEST or finding.severity == ERROR:
            damage[_FATAL].append(finding)
        elif "/" not in path and (index.root / path).is_file():
            damage[_DROPPED].append(finding)
    return damage


def _without(index: CheckpointIndex, dropped: Collection[str], weights_lost: bool) -> CheckpointIndex:
    # the safetensors files of a partial checkpoint hold masters, moments and frozen params
    weights_lost = weights_lost and not index.form.is_partial
    files = {path: fact for path, fact in index.files.items() if path not in dropped}
    if weights_lost:
        files = {path: fact for path, fact in files.items() if not is_weight_file(path)}
    return replace(
        index,
        files=files,
        held={state: stored for state, stored in index.held.items() if not (weights_lost and state.kind == WEIGHT)},
        findings=tuple(finding for finding in index.findings if finding.severity != ERROR),
    )


def _trusting_checksums(index: CheckpointIndex, deep_reading: Deep) -> dict[State, Runs]:
    """Drop masters that match their checksum from the damage: if a weight contradicts its master, both are listed."""
    blamed = {finding.path for finding in deep_reading.values} | index.unreadable

    def is_right(extent: Extent) -> bool:
        records = () if extent.path in blamed else deep_reading.intact.get(extent.path, ())
        return any(record.start <= extent.start and extent.stop <= record.stop for record in records)

    def is_trusted(state: State, runs: Runs) -> bool:
        if not index.form.has_masters or state.kind not in (MASTER, FROZEN):
            return False
        place = index.held[state].place
        return all(is_right(fragment.extent) for begin, end in runs for fragment in place.cover(begin, end))

    return {state: runs for state, runs in deep_reading.states.items() if not is_trusted(state, runs)}


@dataclass(frozen=True, slots=True)
class PartSource:
    part: Part
    source: int | None
    """Position of the newest source with all of it; None if there is none"""
    why: str
    """What newer sources lack of it; empty if the newest has all of it"""
    masters: int | None = None
    """A newer source of the masters than ``source``, which then supplies only the moments"""

    @property
    def sources_used(self) -> frozenset[int]:
        return frozenset(number for number in (self.source, self.masters) if number is not None)


@dataclass(frozen=True, slots=True)
class SourceChoice:
    parts: tuple[PartSource, ...]
    base: int | None

    @property
    def is_complete(self) -> bool:
        return self.base is not None and all(choice.source is not None for choice in self.parts)

    @property
    def used(self) -> tuple[int, ...]:
        """Every source that something is taken from"""
        used = {number for choice in self.parts for number in choice.sources_used}
        return tuple(sorted(used | ({self.base} if self.base is not None else set())))


def choose(sources: Sequence[UsableSource], structure: ModelStructure) -> SourceChoice:
    """Take every part from the newest source that has all of it. ``sources`` are ordered from newest to oldest, and fit
    together. Layers of which a save holds only some experts are chosen expert by expert.

    Masters and moments of a part come from one source, unless a newer one was saved without the moments: then the
    masters are the newer one's. The base is the newest source that can be one and is used, else the newest that can.
    """
    reference = sources[0].index
    by_part = _states_by_part(reference, structure)
    parts: list[PartSource] = []
    shared = {part for source in sources for part in shared_layers(source.index, structure)}
    by_expert = with_experts(structure, reference, shared)
    for part in structure.parts:
        states = by_part.get(part, {})
        lost = [_lost(source, states, reference) for source in sources]
        if part in by_expert.parts:
            parts.append(_newest(part, sources, lost))
        else:
            for share, runs in _divide(part, states, by_expert, reference):
                parts.append(_newest(share, sources, [_within(runs, lost_of_layer) for lost_of_layer in lost]))
    sources_used = {number for choice in parts for number in choice.sources_used}
    able = [number for number, source in enumerate(sources) if not source.unfit and source.knows_tied]
    base = next((number for number in able if number in sources_used), next(iter(able), None))
    return SourceChoice(tuple(parts), base)


def _within(runs: Mapping[str, Runs], lost: Mapping[State, Runs]) -> dict[State, Runs]:
    """Return the lost elements among these elements of params."""
    return {state: both for state, gone in lost.items() if (both := common(gone, runs.get(state.param, ())))}


def _newest(part: Part, sources: Sequence[UsableSource], lost: Sequence[Mapping[State, Runs]]) -> PartSource:
    """Take a part from the newest source that has lost nothing of it."""
    whole = next((number for number, lost_of_source in enumerate(lost) if not lost_of_source), None)
    why = _why(sources[0], lost[0]) if whole != 0 else ""
    return PartSource(part, whole, why, _newer_masters(sources, lost, whole))


def _newer_masters(
    sources: Sequence[UsableSource], lost: Sequence[Mapping[State, Runs]], whole: int | None
) -> int | None:
    """Return the newest source before number ``whole`` that lacks only moments, which its save left out."""

    def is_left_out(number: int, state: State, runs: Runs) -> bool:
        stored = sources[number].index.held.get(state)
        return is_moment(state.kind) and stored is not None and not common(runs, stored.runs)

    newer = ((number, lost[number]) for number in range(whole or 0))
    return next(
        (at for at, lost_there in newer if all(is_left_out(at, *entry) for entry in lost_there.items())),
        None,
    )


def _divide(
    layer: Part, states: Mapping[str, Sequence[State]], fine: ModelStructure, reference: CheckpointIndex
) -> Iterator[tuple[Part, dict[str, Runs]]]:
    """Yield the shares of a layer, each with its elements of params."""
    for part in fine.parts:
        runs: dict[str, Runs] = {}
        for name in fine.names(part) if part.whole == layer else ():
            piece = fine.pieces.get(name)
            if piece is not None:
                runs[piece.param] = ((piece.begin, piece.end),)
            elif name in states:
                runs[name] = ((0, reference.held[states[name][0]].numel),)
        if runs:
            yield part, runs


def _states_by_part(index: CheckpointIndex, structure: ModelStructure) -> dict[str, dict[str, list[State]]]:
    """Return the required states by part and param. Under ZeRO the weights are the rounded masters."""
    by_part: dict[str, dict[str, list[State]]] = {}
    for state in index.held:
        if state.param in index.params and not (state.kind == WEIGHT and index.form.has_masters):
            by_part.setdefault(structure.part_of[state.param], {}).setdefault(state.param, []).append(state)
    return by_part


def _lost(source: UsableSource, states: Mapping[str, Sequence[State]], reference: CheckpointIndex) -> dict[State, Runs]:
    """Return the elements of these states that a source lacks."""
    lost: dict[State, Runs] = {}
    for of_param in states.values():
        for state in of_param:
            stored = source.index.held.get(state)
            whole = ((0, reference.held[state].numel),)
            if stored is None or not stored.is_here:
                lost[state] = whole
            elif not stored.is_whole:  # of a fused param, the save holds some experts
                lost[state] = union(without(whole, stored.runs), source.lost.get(state, ()))
            elif runs := source.lost.get(state):
                lost[state] = runs
    return {state: runs for state, runs in lost.items() if count(runs)}


def _why(newest: UsableSource, lost: Mapping[State, Runs]) -> str:
    """Return in words why the newest source can't supply a part."""
    paths: dict[str, None] = {}
    for state, runs in lost.items():
        stored = newest.index.held.get(state)
        if stored is not None and stored.is_here:
            for begin, end in common(runs, stored.runs):
                paths.update(dict.fromkeys(fragment.extent.path for fragment in stored.place.cover(begin, end)))
    kinds = some(dict.fromkeys(state.kind for state in lost))
    if not paths:
        return f"{newest.name} does not hold it"
    return f"{kinds} lost in {some('the file' if path == '.' else path.rpartition('/')[2] for path in paths)}"


logger = logging.getLogger(__name__)
OnProgress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Salvage:
    """The usable checkpoints of a run, from the newest back to the oldest needed, and the composite to write.

    Nothing is written yet.
    """

    run: Path
    newest: tuple[int, Path]
    """Step and folder of the newest checkpoint, usable or not"""
    sources: Sequence[UsableSource]
    refused: Sequence[Problem]
    """Why nothing of the others is usable"""
    structure: ModelStructure
    choice: SourceChoice
    composition: MergePlan | None = None
    """None: the base is whole, and nothing newer is usable."""
    is_written: bool = False
    """Whether the output already exists from the same salvage"""

    @property
    def damage(self) -> tuple[Problem, ...]:
        return tuple(dict.fromkeys(chain.from_iterable((*source.unfit, *source.damage) for source in self.sources)))

    @property
    def base(self) -> UsableSource:
        assert self.choice.base is not None, "an incomplete choice is refused"
        return self.sources[self.choice.base]

    @property
    def is_intact(self) -> bool:
        """Whether the newest checkpoint is whole, so there is nothing to salvage"""
        return self.composition is None and self.base.index.root == self.newest[1]


def plan_salvage(
    run: str | Path,
    out: Path | None = None,
    *,
    at: int | None = None,
    deep: bool = False,
    replace_out: bool = False,
    trust_unrecorded: bool = False,
    in_place: bool = False,
    clone: Clone = "auto",
    on_progress: OnProgress = lambda num_bytes: None,
) -> Salvage:
    """Plan the composite that loses the least of a run: every part from the newest checkpoint that has it intact.

    ``out`` defaults to ``salvaged-checkpoint-STEP`` in the run's folder. With ``deep``, tensors are also read, and
    ``on_progress`` gets the bytes. Nothing later than ``at`` is used.
    ``in_place``: the output will replace a checkpoint, so it may already exist if it is of the same salvage. ``clone``
    is that of `Options`. Raises SourceError with all obstacles if there is no complete composite, and what `plan_merge`
    raises.
    """
    run = Path(run).absolute()  # on this machine: it is changed in place
    salvage = _choose(run, at, deep, on_progress, trust_unrecorded)
    if not salvage.choice.is_complete:
        raise _no_composite(salvage)
    base, composition = salvage.base, None
    if salvage.choice.used != (salvage.choice.base,) or not base.is_whole or base.index.form.is_partial:
        composition = _plan(salvage, out, Options(replace=replace_out or in_place, clone=clone, compare=False))
        salvage = replace(salvage, composition=composition)
    if composition is None or replace_out or not in_place or not composition.out.exists():
        return salvage
    if not is_written(composition) or not verify_checkpoint(composition.out).is_resumable:
        raise already_there(composition.out)
    logger.info("%s already exists, from the same salvage", composition.out)
    return replace(salvage, is_written=True)


def _choose(run: Path, at: int | None, deep: bool, on_progress: OnProgress, trust_unrecorded: bool) -> Salvage:
    """Assess the run's checkpoints from the newest on, until a composite is complete.

    Raises SourceError if nothing of them is usable, UnsupportedCheckpoint if a newer one may be intact.
    """
    unjudged: list[Problem] = []

    def read(path: Path, newer: list[UsableSource]) -> UsableSource:
        try:
            *newer[:], source = _share_tied([*newer, assess(path, deep, on_progress)])
        except UnsupportedCheckpoint as error:
            what = "it can't be judged whether it is intact, so nothing older is salvaged in its place"
            fix = "if your program can read it, resume from it; otherwise use --at with an earlier step"
            unjudged.extend([Problem(display_name(path), what, fix), *error.problems] if not newer else ())
            raise
        state = "whole" if source.is_whole else "damaged"
        logger.info("%s is %s: %d states are lost", source.name, state, len(source.lost))
        return source

    sources, refused = scan_back(
        run,
        at,
        read=read,
        index_of=lambda source: source.index,
        is_enough=lambda newer, step: choose(newer, find_structure(newer[0].index)).is_complete,
        trust_unrecorded=trust_unrecorded,
    )
    problems = tuple(problem for problems in refused.values() for problem in problems)
    if not sources:
        head = Problem(display_name(run), "no checkpoint is usable, even in part", "fix one of the checkpoints below")
        raise SourceError([head, *problems])
    if unjudged:
        raise UnsupportedCheckpoint(unjudged)
    newest, structure = RunFolder(run).checkpoints_until(at)[0], find_structure(sources[0].index)
    return Salvage(run, newest, sources, problems, structure, choose(sources, structure))


def _share_tied(sources: Sequence[UsableSource]) -> list[UsableSource]:
    """Copy the tied params to sources that lost the file with them; they are the same for the whole run."""
    known = next((source.index.tied for source in sources if source.knows_tied), None)
    if known is None:
        return [*sources]
    return [
        source if source.knows_tied else replace(source, knows_tied=True, index=replace(source.index, tied=known))
        for source in sources
    ]


def _no_composite(salvage: Salvage) -> SourceError:
    choice, sources = salvage.choice, salvage.sources
    fix = "fix one of the files below, or restart the training"
    problems = [
        Problem(row.part, "no checkpoint holds all of it undamaged" + (f" ({row.why})" if row.why else ""), fix)
        for row in choice.parts
        if row.source is None
    ]
    if choice.base is None:
        fix = "fix the files below: schedule and trainer state must come from one of them"
        problems.append(Problem(display_name(salvage.run), "no checkpoint can be the base", fix))
        problems += [problem for source in sources for problem in source.unfit]
        problems += [
            Problem(source.name, "the file that lists the tied weights can't be read", "copy it back")
            for source in sources
            if not source.knows_tied
        ]
    damage = [problem for source in sources for problem in source.damage]
    return SourceError(dict.fromkeys([*problems, *damage, *salvage.refused]))


def _plan(salvage: Salvage, out: Path | None, options: Options) -> MergePlan:
    choice, base = salvage.choice, salvage.base
    used = {number: salvage.sources[number] for number in choice.used}
    if base.index.form.has_masters and any(source.weights_lost for source in used.values()):
        used = {
            number: replace(source, index=_without(source.index, (), weights_lost=True))
            for number, source in used.items()
        }
    checkpoints = {number: RunCheckpoint(source.index.root, source.step, None) for number, source in used.items()}
    assignment = Assignment(
        base=RunCheckpoint(base.index.root, base.step, None),
        source_of={
            row.part: checkpoints[row.source if row.masters is None else row.masters]
            for row in choice.parts
            if row.source is not None
        },
        reason={row.part: row.why or "complete" for row in choice.parts},
        title=f"salvage of {display_name(salvage.run)}",
        moments_of={
            row.part: checkpoints[row.source]
            for row in choice.parts
            if row.source is not None and row.masters is not None
        },
    ).joined()
    shared = {row.part.whole for row in choice.parts} - {row.part for row in choice.parts}
    structure = with_experts(salvage.structure, base.index, shared)
    recipe = Recipe.of(assignment, assignment.title, write_recipe(assignment, structure))
    files, about_files = _replace_files(salvage.run, base)
    opened = OpenedSources(
        indexes={source.index.root: source.index for source in used.values()},
        files=tuple(files),
        notices=tuple(dict.fromkeys([*_notices(salvage), *about_files])),
    )
    out = out or salvage.run / f"{SALVAGED}checkpoint-{base.step}"
    return plan_merge(recipe, out, options, opened)


def _replace_files(run: Path, base: UsableSource) -> tuple[list[FileLayout], list[Problem]]:
    """Replace damaged files of the base that a run never changes (config, tokenizer) with other checkpoints' copies."""
    layouts, notices = [], []
    roots = list(reversed(RunFolder(run).full().values()))
    for path in base.dropped:
        where, donor = PathIn(base.name, path), None
        if not is_rng_file(path):
            donor = next((root for root in roots if root != base.index.root and _is_sound(root, path)), None)
        if donor is None:
            fix = "if you have a copy elsewhere, put it into the output before you resume"
            notices.append(Problem(where, "the file is damaged and omitted", fix))
            continue
        data = read_source(donor / path, PathIn(display_name(donor), path), MAX_BYTES)
        layouts.append(FileLayout(path, (Bytes(data, f"from {donor.name}"),)))
        what = f"the file is damaged and replaced with the one from {display_name(donor)}"
        notices.append(Problem(where, what, "if the run changed it in between, check it"))
    return layouts, notices


def _is_sound(root: Path, path: str) -> bool:
    try:
        check_file(root, path, path)
        if path.endswith((".pt", ".pth")):
            read_torch_file(root, path, path)
        return (root / path).stat().st_size <= MAX_BYTES
    except (OSError, ValueError, RecursionError, SourceError):
        return False


def _notices(salvage: Salvage) -> list[Problem]:
    """Return the losses, for the composite's manifest and card."""
    base, notices = salvage.base, []
    used = [salvage.sources[number] for number in salvage.choice.used]
    for source in (source for source in used if source.step > base.step):
        what = (
            f"schedule, data order, random number states and trainer state are of step {base.step}: those of "
            f"{source.name} can't be used, so its last {source.step - base.step} steps of data are trained on again"
        )
        notices.append(Problem(base.name, what, f"if you can restore these files of {source.name}, do so first"))
    return [*notices, *salvage.damage, *salvage.refused]


@dataclass(frozen=True, slots=True)
class SourceShare:
    """A part, or its masters or moments alone, and the checkpoint that they come from."""

    part: Part
    source: str
    step: int
    steps_back: int
    """Steps behind the newest checkpoint of the run, usable or not"""
    why: str
    only: str | None = None
    """``moments``: they alone come from this checkpoint"""

    @property
    def label(self) -> str:
        return self.part + (f" {self.only}" if self.only else "")


def rows(salvage: Salvage) -> list[SourceShare]:
    """Return the rows in the order of the model."""
    newest, path = salvage.newest
    shares = []
    for choice in salvage.choice.parts:
        taken = [(choice.source, None if choice.masters is None else ONLY_MOMENTS)]
        if choice.masters is not None:
            taken.insert(0, (choice.masters, None))
        for number, only in taken:
            assert number is not None, "an incomplete choice is refused"
            source = salvage.sources[number]
            step = source.index.step_of(choice.part)
            why = choice.why if number == choice.source else ""
            if number == 0 and source.step < newest:
                why = f"the newest usable one; {display_name(path)} is not"
            shares.append(SourceShare(choice.part, source.name, step, newest - step, why, only))
    return shares


def fold(shares: Sequence[SourceShare]) -> list[SourceShare]:
    """Join equal rows of consecutive layers into one, ``layer 0-7``; likewise experts."""
    groups = group_shares([row.part for row in shares], [_without_part(row) for row in shares])
    shares = [replace(shares[group[0]], part=Part(condense(shares[at].part for at in group))) for group in groups]
    folded: list[list[SourceShare]] = []
    first = last = None
    for part, rows_of_part in groupby(shares, lambda row: row.part):
        own, number = list(rows_of_part), None if part.is_share else part.layer
        follows = number is not None and number - 1 == last
        if follows and [*map(_without_part, folded[-1])] == [*map(_without_part, own)]:
            folded[-1] = [replace(row, part=Part(f"layer {first}-{number}")) for row in own]
        else:
            folded.append(own)
            first = number
        last = number
    return [row for group in folded for row in group]


def _without_part(row: SourceShare) -> SourceShare:
    return replace(row, part=Part(""))


def to_json(salvage: Salvage, resume_from: Path, moved: CopyStats | None = None) -> dict[str, Any]:
    composition = salvage.composition
    content = {
        "run": salvage.run,
        "newest": {"step": salvage.newest[0], "path": salvage.newest[1]},
        "outcome": "composite" if composition else "intact" if salvage.is_intact else "older",
        "base": salvage.base.name,
        "resume_from": resume_from,
        "parts": rows(salvage),
        "damage": [*dict.fromkeys([*salvage.damage, *salvage.refused])],
        "plan": plan_to_json(composition.report) if composition else None,
        "moved": moved,
    }
    return document("salvage/1", content)
