"""The service behind ``llmtailor salvage``: assess the run's checkpoints -> choose -> recipe -> plan of a merge."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.layout import Bytes, FileLayout
from llmtailor.checkpoint.lineage import RunCheckpoint
from llmtailor.checkpoint.step_names import SALVAGED
from llmtailor.compose.plan import Composition, Opened, Options, plan_merge
from llmtailor.compose.report import to_json as plan_to_json
from llmtailor.compose.write import is_written
from llmtailor.containers.json import MAX_BYTES
from llmtailor.containers.torch_zip import read_torch_file
from llmtailor.documents import document
from llmtailor.engine.copy import Moved
from llmtailor.engine.moving import Clone
from llmtailor.engine.staging import already_there
from llmtailor.errors import PathIn, Problem, SourceError
from llmtailor.formats.registry import display_name, find_structure, with_experts
from llmtailor.loaders.files import is_rng_file
from llmtailor.model.parts import ModelStructure, condense, group_shares, layer_of
from llmtailor.recipe import ONLY_MOMENTS, Assignment, Recipe
from llmtailor.recipe.emit import write_recipe
from llmtailor.runs.folder import RunFolder
from llmtailor.runs.scan import scan_back
from llmtailor.salvage.choose import Choice, Holder, assess, choose, without_weights
from llmtailor.storage.local import read_source
from llmtailor.verify.verify import check_file, verify_checkpoint

logger = logging.getLogger(__name__)
OnProgress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Salvage:
    """What is usable of a run's checkpoints, from the newest on, as far back as needed, and what to make of it.

    Nothing is written yet.
    """

    run: Path
    newest: tuple[int, Path]
    """Step and folder of the newest checkpoint, usable or not"""
    holders: Sequence[Holder]
    refused: Sequence[Problem]
    """Why nothing of the others is usable"""
    structure: ModelStructure
    choice: Choice
    fragments: bool
    deeper: Choice | None = None
    """The choice that ``--fragments`` would make; None if it gains nothing or was requested"""
    composition: Composition | None = None
    """None: the base is whole, and nothing newer is usable."""
    is_written: bool = False
    """Whether the output already exists from the same salvage"""

    @property
    def damage(self) -> tuple[Problem, ...]:
        """All damage in the holders"""
        return tuple(dict.fromkeys(one for holder in self.holders for one in (*holder.unfit, *holder.damage)))

    @property
    def base(self) -> Holder:
        assert self.choice.base is not None, "an incomplete choice is refused"
        return self.holders[self.choice.base]

    @property
    def is_intact(self) -> bool:
        """Whether the newest checkpoint is whole, so there is nothing to salvage"""
        return self.composition is None and self.base.index.root == self.newest[1]


def plan_salvage(
    run: Path,
    out: Path | None = None,
    *,
    at: int | None = None,
    deep: bool = False,
    fragments: bool = False,
    replace_out: bool = False,
    trust_unrecorded: bool = False,
    in_place: bool = False,
    clone: Clone = "auto",
    on_progress: OnProgress = lambda num_bytes: None,
) -> Salvage:
    """Plan the composite that loses the least of a run: every part from the newest checkpoint that has it intact.

    ``out`` defaults to ``salvaged-checkpoint-STEP`` in the run's folder. With ``fragments``, a part that is damaged in
    the newest checkpoint comes from several, element by element. With ``deep``, tensors are also read, and
    ``on_progress`` gets the bytes. Nothing later than ``at`` is used.
    ``in_place``: the output will replace a checkpoint, so it may already exist if it is of the same salvage. ``clone``
    is that of `Options`. Raises SourceError with all obstacles if there is no complete composite, and what `plan_merge`
    raises.
    """
    run = Path(run).absolute()
    salvage = _choose(run, at, deep, fragments, on_progress, trust_unrecorded)
    if not salvage.choice.is_complete:
        raise _no_composite(salvage)
    deeper = choose(salvage.holders, salvage.structure, True)
    if not fragments and deeper.cuts and deeper.is_complete:
        salvage = replace(salvage, deeper=deeper)
    base = salvage.base
    if salvage.choice.used != (salvage.choice.base,) or not base.is_whole or base.index.form.is_partial:
        salvage = replace(
            salvage, composition=_plan(salvage, out, Options(replace=replace_out or in_place, clone=clone))
        )
    composition = salvage.composition
    if composition is None or replace_out or not in_place or not composition.out.exists():
        return salvage
    if not is_written(composition) or not verify_checkpoint(composition.out).is_resumable:
        raise already_there(composition.out)
    logger.info("%s already exists, from the same salvage", composition.out)
    return replace(salvage, is_written=True)


def _choose(
    run: Path,
    at: int | None,
    deep: bool,
    fragments: bool,
    on_progress: OnProgress,
    trust_unrecorded: bool,
) -> Salvage:
    """Assess the run's checkpoints from the newest on, until a composite is complete.

    Raises SourceError if nothing of them is usable.
    """

    def read(path: Path, found: list[Holder]) -> Holder:
        *found[:], holder = _share_tied([*found, assess(path, deep, on_progress)])
        state = "whole" if holder.is_whole else "damaged"
        logger.info("%s is %s: %d states are lost", holder.name, state, len(holder.lost))
        return holder

    holders, refused = scan_back(
        run,
        at,
        read=read,
        index_of=lambda holder: holder.index,
        is_enough=lambda found, step: choose(found, find_structure(found[0].index), fragments).is_complete,
        trust_unrecorded=trust_unrecorded,
    )
    problems = tuple(problem for problems in refused.values() for problem in problems)
    if not holders:
        head = Problem(display_name(run), "no checkpoint is usable, even in part", "fix one of the checkpoints below")
        raise SourceError([head, *problems])
    newest, structure = RunFolder(run).checkpoints_until(at)[0], find_structure(holders[0].index)
    return Salvage(run, newest, holders, problems, structure, choose(holders, structure, fragments), fragments)


def _share_tied(holders: Iterable[Holder]) -> list[Holder]:
    """Copy the tied params to holders that lost the file with them; they are the same for the whole run."""
    holders = list(holders)
    known = next((one.index.tied for one in holders if one.knows_tied), None)
    if known is None:
        return holders
    return [
        one if one.knows_tied else replace(one, knows_tied=True, index=replace(one.index, tied=known))
        for one in holders
    ]


def _no_composite(salvage: Salvage) -> SourceError:
    choice, holders = salvage.choice, salvage.holders
    fix = "fix one of the files below, or restart the training"
    if choose(holders, salvage.structure, True).is_complete:
        fix = "use --fragments: together they hold every element"
    problems = [
        Problem(row.part, "no checkpoint holds it intact" + (f" ({row.why})" if row.why else ""), fix)
        for row in choice.parts
        if row.holder is None
    ]
    if choice.base is None:
        fix = "fix the files below: schedule and trainer state must come from one of them"
        problems.append(Problem(display_name(salvage.run), "no checkpoint can be the base", fix))
        problems += [problem for holder in holders for problem in holder.unfit]
        problems += [
            Problem(holder.name, "the file that lists the tied weights can't be read", "copy it back")
            for holder in holders
            if not holder.knows_tied
        ]
    damage = [problem for holder in holders for problem in holder.damage]
    return SourceError(dict.fromkeys([*problems, *damage, *salvage.refused]))


def _plan(salvage: Salvage, out: Path | None, options: Options) -> Composition:
    choice, base = salvage.choice, salvage.base
    used = {number: salvage.holders[number] for number in choice.used}
    if base.index.form.has_masters and (choice.cuts or any(holder.weights_lost for holder in used.values())):
        used = {number: without_weights(holder) for number, holder in used.items()}
    checkpoints = {number: RunCheckpoint(holder.index.root, holder.step, None) for number, holder in used.items()}
    assignment = Assignment(
        base=RunCheckpoint(base.index.root, base.step, None),
        source_of={
            row.part: checkpoints[row.holder if row.masters is None else row.masters]
            for row in choice.parts
            if row.holder is not None
        },
        reason={row.part: row.why or "intact" for row in choice.parts},
        title=f"salvage of {display_name(salvage.run)}",
        moments_of={
            row.part: checkpoints[row.holder]
            for row in choice.parts
            if row.holder is not None and row.masters is not None
        },
    ).joined()
    shared = {layer_of(row.part) for row in choice.parts} - {row.part for row in choice.parts}
    structure = with_experts(salvage.structure, base.index, shared)
    recipe = Recipe.of(assignment, assignment.title, write_recipe(assignment, structure))
    files, about_files = _replace_files(salvage.run, base)
    opened = Opened(
        indexes={holder.index.root: holder.index for holder in used.values()},
        cuts={
            state: tuple((begin, end, used[number].index.root) for begin, end, number in runs)
            for state, runs in choice.cuts.items()
        },
        files=tuple(files),
        notices=tuple(dict.fromkeys([*_notices(salvage), *about_files])),
    )
    out = out or salvage.run / f"{SALVAGED}checkpoint-{base.step}"
    return plan_merge(recipe, out, options, opened)


def _replace_files(run: Path, base: Holder) -> tuple[list[FileLayout], list[Problem]]:
    """Replace damaged files of the base that a run never changes (config, tokenizer) with other checkpoints' copies."""
    layouts, notices = [], []
    others = list(reversed(RunFolder(run).full().values()))
    for path in base.dropped:
        where, donor = PathIn(base.name, path), None
        if not is_rng_file(path):
            donor = next((root for root in others if root != base.index.root and _is_sound(root, path)), None)
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
    base, cuts, notices = salvage.base, salvage.choice.cuts, []
    used = (salvage.holders[number] for number in salvage.choice.used)
    for holder in (one for one in used if one.step > base.step):
        what = (
            f"schedule, data order, random number states and trainer state are of step {base.step}: those of "
            f"{holder.name} can't be used, so its last {holder.step - base.step} steps of data are trained on again"
        )
        notices.append(Problem(base.name, what, f"if you can restore these files of {holder.name}, do so first"))
    if cuts:
        params = len({state.param for state in cuts})
        what = f"{params} params combine elements from several steps (--fragments)"
        notices.append(Problem(display_name(salvage.run), what, "compare the losses after the resume"))
    return [*notices, *salvage.damage, *salvage.refused]


@dataclass(frozen=True, slots=True)
class Row:
    """A part, or the share of a part that comes from one checkpoint."""

    part: str
    source: str
    step: int
    steps_back: int
    """Steps behind the newest checkpoint of the run, usable or not"""
    share: float
    """Of the part's elements, 0..1"""
    why: str
    only: str | None = None
    """``moments``: they alone come from this checkpoint"""

    @property
    def label(self) -> str:
        """The part, and what of it comes from this checkpoint"""
        return self.part + (f" {self.only}" if self.only else "")


def rows(salvage: Salvage) -> list[Row]:
    """Return the rows in model order; the newest share of a mixed part comes first."""
    newest, _ = salvage.newest
    found = []
    for choice in salvage.choice.parts:
        total = sum(choice.shares.values())
        given = [(number, numel / total if total else 1.0) for number, numel in choice.shares.items()]
        if choice.masters is not None:
            given.insert(0, (choice.masters, 1.0))
        for at, (number, share) in enumerate(given):
            holder = salvage.holders[number]
            step = holder.index.step_of(choice.part)
            only = ONLY_MOMENTS if at and choice.masters is not None else None
            why = choice.why if number and not (only is None and choice.masters is not None) else ""
            if number == 0 and holder.step < newest:
                why = f"the newest usable one; {display_name(salvage.newest[1])} is not"
            found.append(Row(choice.part, holder.name, step, newest - step, share, why, only))
    return found


def fold(listed: Sequence[Row]) -> list[Row]:
    """Join identical rows of consecutive layers into one, ``layer 0-7``; likewise experts."""
    folded: list[tuple[str, list[Row]]] = []
    facts = [row.part if row.share < 1 else _without_part(row) for row in listed]
    groups = [[listed[at] for at in group] for group in group_shares([row.part for row in listed], facts)]
    listed = [replace(group[0], part=condense(row.part for row in group)) for group in groups]
    for part, group in groupby(listed, lambda row: row.part):
        own = list(group)
        above, rows_above = folded[-1] if folded else ("", [])
        first, _, last = above.removeprefix("layer ").partition("-")
        number = part.removeprefix("layer ")
        follows = (last or first).isdigit() and number == str(int(last or first) + 1)
        if follows and [_without_part(row) for row in rows_above] == [_without_part(row) for row in own]:
            folded[-1] = (f"layer {first}-{number}", own)
        else:
            folded.append((part, own))
    return [replace(row, part=part) for part, own in folded for row in own]


def _without_part(row: Row) -> Row:
    return replace(row, part="", share=round(row.share, 2))


def gain(salvage: Salvage) -> float:
    """Return the share of all elements that ``--fragments`` would take from a newer checkpoint, 0..1."""
    if salvage.deeper is None:
        return 0.0
    taken: dict[str, list[Counter[int]]] = {}
    for at, choice in enumerate((salvage.choice, salvage.deeper)):
        for row in choice.parts:
            taken.setdefault(layer_of(row.part), [Counter(), Counter()])[at].update(row.shares)
    newer = sum((other - own)[number] for own, other in taken.values() for number in other if number < max(own))
    total = sum(own.total() for own, _ in taken.values())
    return newer / total if total else 0.0


def to_json(salvage: Salvage, resume_from: Path, moved: Moved | None = None) -> dict[str, Any]:
    """Return the salvage as a `document`."""
    composition = salvage.composition
    content = {
        "run": salvage.run,
        "newest": {"step": salvage.newest[0], "path": salvage.newest[1]},
        "outcome": "composite" if composition else "intact" if salvage.is_intact else "older",
        "base": salvage.base.name,
        "resume_from": resume_from,
        "fragments": salvage.fragments,
        "fragments_would_gain": gain(salvage),
        "parts": rows(salvage),
        "damage": [*dict.fromkeys([*salvage.damage, *salvage.refused])],
        "plan": plan_to_json(composition.report) if composition else None,
        "moved": moved,
    }
    return document("salvage/1", content)
