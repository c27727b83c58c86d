"""Plans a composite: recipe -> index -> resolve -> check -> lay out -> plan. `compose.write` writes it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from llmtailor.checkpoint.index import TRAINER, CheckpointIndex
from llmtailor.checkpoint.layout import DEFAULT, KEEP, FileLayout, Plan, regroup
from llmtailor.checkpoint.lineage import Past
from llmtailor.checkpoint.optimizer import Mesh, OptimizerLayout
from llmtailor.checkpoint.sources import Linkable, Sources
from llmtailor.checkpoint.unclear import agree_on_roles
from llmtailor.codes import Code
from llmtailor.compose.averages import (
    MissedUpdates,
    StepChoice,
    check_names,
    choose_steps,
    matters,
    number_sources,
    rebase_scales,
    updates_missed,
    with_steps,
    with_sums,
)
from llmtailor.compose.checks import (
    check_filled,
    check_fit,
    check_links,
    check_one_step,
    differing_hyperparameters,
    without_later_states,
)
from llmtailor.compose.fill import plan_composite
from llmtailor.compose.report import FileRow, Report, StepRow, part_rows, source_rows, step_notices
from llmtailor.copying.moving import Clone, room_to_upload
from llmtailor.copying.staging import SPARE_BYTES, check_device, check_target, free_bytes, old_output, space_for
from llmtailor.errors import Problem, Problems, TailorError, TargetError, attempt
from llmtailor.formats.provenance import stated_attempt
from llmtailor.formats.registry import (
    check_base,
    check_options,
    choose_format,
    default_output,
    display_name,
    find_model_order,
    find_structure,
    index_checkpoint,
    lay_out_target,
    settle_roles,
    with_experts,
    writer_of,
)
from llmtailor.frameworks.framework import check_replaceable, choose_framework, is_partial
from llmtailor.frameworks.trainer_state import attempt_of, state_attempt, state_lags
from llmtailor.frameworks.write import Wanted, lay_out_tokenizer
from llmtailor.model.parts import ModelStructure, condense
from llmtailor.model.roles import MASTER, State
from llmtailor.recipe import Recipe
from llmtailor.recipe.emit import write_normal_form
from llmtailor.recipe.parse import load_recipe
from llmtailor.recipe.resolve import Choice, resolve, weigh
from llmtailor.storage.local import Entries, as_path
from llmtailor.storage.remote import RemotePath
from llmtailor.timing import Stopwatch


@dataclass(frozen=True, slots=True)
class OpenedSources:
    """Sources of a recipe that are open already."""

    indexes: Mapping[Path, CheckpointIndex]
    """Root -> index"""
    others: Mapping[Path, CheckpointIndex] = field(default_factory=dict)
    """Further checkpoints of the run, from which masters of the sources may differ"""
    files: tuple[FileLayout, ...] = ()
    """Files that the base lacks."""
    copied: Collection[Path] = ()
    """Roots of sources whose files get no links, see `Options.reference`"""
    notices: tuple[Problem, ...] = ()


logger = logging.getLogger(__name__)
_MANY_FILES = 10_000
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a merge that are not in the recipe."""

    world_size: int | None = None
    """Number of ranks of the output; None keeps the base's."""
    mesh: Mesh | None = field(default=None, repr=False)  # as `layout`
    """The same by kind of parallelism"""
    groups: str = KEEP
    """Param groups of the output: ``keep``, ``layer``, ``default`` or ``one``. ``keep`` makes the Trainer's own of the
    one group that DeepSpeed made, in an output that only the Trainer without DeepSpeed reads."""
    stage: int | None = None
    """ZeRO stage of the output, 0 for a checkpoint without DeepSpeed; None keeps the base's."""
    replace: bool = False
    """Whether to replace an existing checkpoint, once the new one is complete."""
    reuse: bool = False
    """Whether an existing output is kept if this merge wrote it; otherwise the new one gets a numbered name."""
    copy_tokenizer: bool = True
    """Whether to copy the base's tokenizer files."""
    step: str = "base"
    """Adam's step if params of one group have different ones: ``base`` keeps the base's step and the moments,
    ``rebase`` scales the moments to it, ``auto`` does so if the first update would be noticeably wrong otherwise, and
    ``source`` refuses."""
    allow_split: bool = False
    """Whether the weights and optimizer states of a part may come from different checkpoints."""
    allow_errors: bool = field(default=False, repr=False)  # as `layout`
    """Whether to publish an output that has errors of its sources, so that `verify` calls it not resumable"""
    restart: bool = False
    """Whether to discard an unfinished merge in the output and start over."""
    checksum: bool = False
    """Whether to compute a digest of every output file and every source file read."""
    compare: bool = field(default=True, repr=False)  # the output is the same
    """Whether what is read is compared with llmtailor's own records of the sources; not to salvage damaged ones"""
    to: str | None = None
    """Format of the output: ``deepspeed``, ``universal``, ``trainer``, ``fsdp`` or ``dcp``; None keeps the base's, as
    far as `stage` allows."""
    layout: str | None = field(default=None, repr=False)  # not shown: the plan's digest depends on it
    """Whose loader finds the output's files: ``trainer``, ``accelerate`` or ``deepspeed``; None keeps the base's."""
    reference: bool = False
    """Whether the output holds the sources' data files as hard links, where its format and theirs allow that"""
    clone: Clone = "auto"
    """Whether the output shares blocks with its sources: ``auto`` where the file system can, ``never``, or ``require``,
    which fails where it can't"""


@dataclass(frozen=True, slots=True)
class MergePlan:
    """A planned composite; nothing is written yet."""

    recipe: Recipe
    out: Path
    options: Options
    indexes: tuple[CheckpointIndex, ...]
    base: int
    structure: ModelStructure
    target: OptimizerLayout
    steps: tuple[StepChoice, ...]
    plan: Plan
    report: Report
    format: str
    """The output's, as ``--to`` calls it"""
    framework: str
    """Whose loader will resume from the output, see `frameworks.framework`"""
    attempt: Past | None
    """The attempt of the run that it belongs to, if its sources state one"""
    replaces: Entries | None = None
    """The existing content of the output folder, all replaceable; None if the output must not exist"""

    @property
    def is_copy(self) -> bool:
        """Whether the output would be a copy of its base."""
        base = self.indexes[self.base]
        wanted = (self.target.world_size, self.target.tp, self.target.stage, self.format, self.framework)
        changed = wanted != (base.world_size, base.tp, base.form.stage, base.form.file_format, base.framework)
        one_source = all(row.source == base.name for row in self.report.parts)
        is_same = not (changed or base.form.is_partial or self.recipe.dtype)
        return one_source and is_same and self.options.groups == KEEP


def plan_merge(
    recipe: Recipe | str | Path,
    out: str | Path | None = None,
    options: Options | None = None,
    opened: OpenedSources | None = None,
) -> MergePlan:
    """Plan the composite that a recipe describes. Nothing is written, and no tensor is read.

    Args:
        recipe: a parsed recipe, or the path of a YAML file.
        out: the folder to write. None takes the recipe's ``output``, or else ``<base>-merged`` next to the base, or the
            run's ``checkpoint-STEP`` if the base is one of its partial checkpoints.
        options: see `Options`.
        opened: sources that are open already.

    Raises a `TailorError` with every problem found; the earliest failed stage decides its class.
    """
    options = options or Options()
    read = [] if isinstance(recipe, Recipe) else [as_path(recipe)]
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(*read)
    out = None if out is None else as_path(out)
    problems = Problems()

    def collect(call: Callable[[], _T]) -> _T | None:
        return attempt(call, problems, TailorError)

    indexes, base = open_sources(recipe, problems, opened)
    written, step_of = recipe, {index.root: index.global_step for index in indexes}
    recipe = collect(lambda: weigh(written, step_of)) or recipe
    reference, watch = indexes[base], Stopwatch()
    logger.info("the base is %s, %s", reference.name, "as the recipe says" if recipe.base else "the newest source")
    out = (out or recipe.output or default_output(reference)).absolute()
    if isinstance(out, RemotePath) and not out.is_inside:
        raise TargetError.at(reference.name, "the base is in an object store, and no output is named", "name one")
    structure = find_structure(reference)
    parts = with_experts(structure, reference)
    replaces = collect(lambda: _check_target(out, [*read, *(index.root for index in indexes)], options))
    to_format, stage = choose_format(reference, options.to, options.stage)
    indexes = collect(lambda: settle_roles(indexes, base, to_format, stage)) or indexes
    reference = indexes[base]
    framework = (
        collect(lambda: choose_framework(reference, to_format, options.to, options.layout)) or reference.framework
    )
    collect(lambda: check_base(reference, framework))
    how = options.groups
    if how == KEEP and _lacks_trainers_groups(reference, to_format, framework):
        how = DEFAULT
    collect(lambda: check_fit(indexes, base, how != KEEP))
    apart = {index.root: index.split_layers for index in indexes}
    params = set(reference.params)
    choice = collect(
        lambda: resolve(recipe, parts, reference.root, params, allow_split=options.allow_split, apart=apart)
    )
    if choice is not None:
        collect(partial(check_names, choice, reference))
    about_tokenizer = (recipe.tokenizer, recipe.chat_template, options.copy_tokenizer)
    tokenizer = collect(lambda: lay_out_tokenizer(reference, *about_tokenizer, framework))
    collect(lambda: check_options(to_format, recipe.dtype, options.allow_split))
    regrouping = None
    if how != KEEP:
        regrouping = collect(lambda: regroup(reference, structure, how, find_model_order(reference)))
    problems.raise_if_any()
    assert choice is not None and tokenizer is not None

    number_of = {index.root: number for number, index in enumerate(indexes)}
    sources = number_sources(choice, indexes, base)
    indexes, sources = with_bases(indexes, sources, opened.others.values() if opened else ())
    reference, about_states = without_later_states(indexes, sources, base)
    indexes = (*indexes[:base], reference, *indexes[base + 1 :])
    groups = regrouping.groups if regrouping else None
    target = lay_out_target(reference, to_format, stage, options.world_size, groups, options.mesh)
    stated = [stated_attempt(index.root) for index in indexes]
    missed = MissedUpdates(stated, parts)
    steps = choose_steps(indexes, sources, base, target, missed)
    target = with_steps(target, steps)
    sources = with_sums(sources, indexes, base, target, steps)
    rebases = options.step == "rebase" or (options.step == "auto" and matters(steps))
    scales = rebase_scales(indexes, sources, target, steps, missed) if rebases else {}
    lacking = updates_missed(indexes, sources, target, steps, scales.keys(), missed)

    copied = {number_of[root] for root in opened.copied} if opened else set()

    def unchanged(state: State) -> int | None:
        source = sources.only(state)
        return None if source is None or source in copied or (state, source) in scales else source

    linkable = Linkable(indexes, unchanged) if options.reference else None
    from_group = regrouping.from_group if regrouping else None
    wanted = Wanted(target, recipe.dtype, from_group, len(indexes) == 1, framework, linkable)
    layouts, about_weights = writer_of(to_format, framework)(reference, wanted)
    layouts += (*tokenizer, *(opened.files if opened else ()))
    its_attempt, about_attempts = attempt_of(stated, base, reference.global_step)
    if its_attempt is not None:
        its_attempt = replace(its_attempt, missed=missed.by_part(lacking))
    layouts = state_attempt(layouts, reference, its_attempt)
    counted = [one.step for one in target.sub_groups if one.params and one.step is not None]
    layouts, about_lags = state_lags(layouts, reference, counted, to_format)
    plan = plan_composite(layouts, indexes, sources, base, scales)
    check_filled(plan, indexes, sources)
    about_links = check_links(plan, indexes, to_format) if options.reference else ()
    check_device(plan, out)
    if options.step == "source":
        check_one_step(steps)
    special = [
        *(opened.notices if opened else ()),
        *_about_many_files(len(plan.files), target.world_size, reference.world_size),
        *about_weights,
        *about_attempts,
        *about_lags,
        *about_states,
        *about_links,
        *(regrouping.notices if regrouping else ()),
        *step_notices(steps, reference.name, bool(scales)),
    ]
    logger.info("planned %d files, %s bytes, in %s", len(plan.files), f"{plan.num_bytes:,}", watch.lap())
    report = Report(
        recipe=recipe.name,
        out=display_name(out),
        base=reference.name,
        global_step=reference.global_step,
        world_size=target.world_size,
        mesh=target.mesh,
        parts=part_rows(plan, choice.structure, indexes, sources, base),
        sources=source_rows(plan, indexes, base),
        steps=tuple(StepRow(one.flat_id, one.step, one.others) for one in steps if one.step is not None),
        files=tuple(FileRow(file.path, file.num_bytes) for file in plan.files),
        num_bytes=plan.num_bytes,
        needed_bytes=room_to_upload(file.num_bytes for file in plan.files) + SPARE_BYTES
        if isinstance(out, RemotePath)
        else space_for(plan, options.clone),
        free_bytes=free_bytes(out),
        notices=tuple(_notices(recipe, indexes, base, choice, special)),
    )
    return MergePlan(
        recipe=recipe,
        out=out,
        options=options,
        indexes=indexes,
        base=base,
        structure=structure,
        target=target,
        steps=steps,
        plan=plan,
        report=report,
        format=to_format,
        framework=framework,
        attempt=its_attempt,
        replaces=replaces,
    )


def _lacks_trainers_groups(base: CheckpointIndex, to_format: str, framework: str) -> bool:
    """Return whether DeepSpeed has made the optimizer, with one group, where a resume by the Trainer has two."""
    is_made = "optimizer" in base.train.ds_config and len(base.groups) == 1
    return is_made and to_format == framework == TRAINER


def _check_target(out: Path, sources: list[Path], options: Options) -> Entries | None:
    """Return the existing content that the output may replace, None if it must be new. Raises TargetError."""
    check_target(out, sources, options.replace or options.reuse)
    if options.replace and out.exists() and isinstance(out, RemotePath):
        what = "an output in an object store can't be replaced"
        raise TargetError.at(display_name(out), what, "choose another output")
    return check_replaceable(old_output(out), display_name(out)) if options.replace else None


def open_sources(
    recipe: Recipe, problems: Problems, opened: OpenedSources | None = None
) -> tuple[tuple[CheckpointIndex, ...], int]:
    """Return the indexes of a recipe's checkpoints, and which of them is the base.

    The base is the recipe's, or the newest source if it names none. Unreadable checkpoints are added to ``problems``
    and left out. Raises at once if the base is unreadable, because nothing else can be checked without it.
    """
    if opened is None:
        found = [attempt(partial(index_checkpoint, root), problems, TailorError) for root in recipe.sources()]
        indexes = tuple(index for index in found if index is not None)
    else:
        indexes = tuple(opened.indexes[root] for root in recipe.sources())
    indexes = agree_on_roles(indexes)
    numbers = [number for number, index in enumerate(indexes) if recipe.base in (None, index.root)]
    base = max(numbers, key=lambda number: indexes[number].global_step, default=None)
    if base is None:
        problems.raise_if_any()
        raise AssertionError("a recipe without readable base has problems")
    return indexes, base


def with_bases(
    indexes: tuple[CheckpointIndex, ...], sources: Sources, others: Iterable[CheckpointIndex]
) -> tuple[tuple[CheckpointIndex, ...], Sources]:
    """Return the indexes with the saves from which the masters that are used differ, and where they are among them.

    They are among ``others``, or beside the save that needs them. One that is missing is left out.
    """
    known = {index.partial.save_id: index for index in (*others, *indexes)}
    number_of = {index.partial.save_id: number for number, index in enumerate(indexes)}
    bases: dict[tuple[int, str], int] = {}
    added: list[CheckpointIndex] = []
    for number, index in enumerate(indexes):
        for param, one in index.partial.differences.items():
            if not any(cut.source == number for cut in sources.spans(State(param, MASTER), 0, one.entry.numel)):
                continue
            if one.base not in known:
                known |= _beside(index)
            if one.base in known and one.base not in number_of:
                number_of[one.base] = len(indexes) + len(added)
                added.append(known[one.base])
            if one.base in number_of:
                bases[number, param] = number_of[one.base]
    return (*indexes, *added), replace(sources, bases=bases)


def _beside(index: CheckpointIndex) -> dict[str, CheckpointIndex]:
    """Return the partial checkpoints beside one that can be read, by ``save_id``."""
    found: dict[str, CheckpointIndex] = {}
    try:
        paths = [path for path in index.root.parent.iterdir() if is_partial(path)]
    except OSError:
        return found
    for path in paths:
        with suppress(TailorError):
            one = index_checkpoint(path)
            found[one.partial.save_id] = one
    return found


def _about_many_files(num_files: int, ranks: int, before: int) -> Iterator[Problem]:
    if ranks > before and num_files > _MANY_FILES:
        what = f"for {ranks:,} ranks, the output has {num_files:,} files"
        yield Problem("--num-gpu", what, "check the number, and whether the file system takes as many files (df -i)")


def _notices(
    recipe: Recipe, indexes: Sequence[CheckpointIndex], base: int, choice: Choice, special: Sequence[Problem]
) -> list[Problem]:
    reference = indexes[base]
    notices = list(recipe.notices)
    if recipe.base is None:
        what = f"the recipe names none; {reference.name}, the newest source, supplies everything outside the parts"
        notices.append(Problem("base_model", what, "add base_model: to choose it yourself"))
    if choice.filled and recipe.rules:
        what = f"no rule names {condense(choice.filled)}; they come from the base {reference.name}"
        logger.info("%s", what)
        if recipe.is_unlike_mergekit(choice.filled):
            what += " (mergekit takes the embeddings from the first slice, norm and head from the last)"
            notices.append(Problem("parts", what, "if they should come from another checkpoint, name them in a rule"))
    if choice.split:
        what = f"weights and optimizer states of {condense(choice.split)} come from different checkpoints, as requested"
        fix = "a resume uses the optimizer's masters, not the weights"
        notices.append(Problem("--allow-split", what, fix, Code.SPLIT_WEIGHTS))
    notices += special
    for index in indexes:
        if keys := differing_hyperparameters(index, reference):
            verb = "differs" if len(keys) == 1 else "differ"
            what = f"its {', '.join(keys)} {verb} from the base's, which the composite keeps"
            notices.append(Problem(index.name, what, "to keep its values, use it as base_model"))
        notices += index.findings
    return list(dict.fromkeys(notices))


def explain_recipe(config: Path, folder: Path | None, *, allow_split: bool = False) -> str:
    """Return the YAML of a recipe file in the short form; nearby paths are relative to ``folder``.

    Raises a TailorError with every problem of the recipe and of its checkpoints.
    """
    recipe = load_recipe(config)
    problems = Problems()
    indexes, base = open_sources(recipe, problems)
    problems.raise_if_any()
    recipe = weigh(recipe, {index.root: index.global_step for index in indexes})
    reference = indexes[base]
    structure = with_experts(find_structure(reference), reference)
    choice = resolve(recipe, structure, reference.root, set(reference.params), allow_split=allow_split)
    return write_normal_form(
        recipe,
        choice.source_of,
        reference.root,
        choice.structure,
        folder,
        weights_of=choice.weights_of,
        moments_of=choice.moments_of,
    )
