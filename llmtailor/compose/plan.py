"""Plans a composite, in stages: read the sources, choose parts, choose states, lay out the files, fill them, check.

`compose.write` writes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from llmtailor.checkpoint.index import TRAINER, CheckpointIndex
from llmtailor.checkpoint.layout import DEFAULT, KEEP, FileLayout, Plan, Regrouping, regroup
from llmtailor.checkpoint.lineage import Past
from llmtailor.checkpoint.optimizer import Mesh, OptimizerLayout
from llmtailor.checkpoint.sources import Linkable, Sources
from llmtailor.checkpoint.unclear import agree_on_roles
from llmtailor.checkpoint.wanted import Wanted
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
from llmtailor.frameworks.write import lay_out_tokenizer
from llmtailor.model.parts import ModelStructure, condense
from llmtailor.model.roles import MASTER, State
from llmtailor.recipe import Recipe
from llmtailor.recipe.emit import write_normal_form
from llmtailor.recipe.parse import load_recipe
from llmtailor.recipe.resolve import Choice, resolve, weigh
from llmtailor.storage.local import Entries, as_path
from llmtailor.storage.remote import RemotePath
from llmtailor.timing import Stopwatch

logger = logging.getLogger(__name__)
_MANY_FILES = 10_000
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSources:
    """Sources of a recipe that are open already."""

    indexes: Mapping[Path, CheckpointIndex] = field(default_factory=dict)
    """Root -> index"""
    others: Mapping[Path, CheckpointIndex] = field(default_factory=dict)
    """Further checkpoints of the run, from which masters of the sources may differ"""
    files: tuple[FileLayout, ...] = ()
    """Files that the base lacks."""
    copied: Collection[Path] = ()
    """Roots of sources whose files get no links, see `Options.reference`"""
    notices: tuple[Problem, ...] = ()


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
    """Format of the output, one of `formats.registry.WRITERS`; None keeps the base's, as far as `stage` allows."""
    layout: str | None = field(default=None, repr=False)  # not shown: the plan's digest depends on it
    """What will resume from the output: ``trainer``, ``accelerate`` or ``deepspeed``; None keeps the base's."""
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
    """The one that will resume from the output, see `frameworks.framework`"""
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
    options, opened, watch = options or Options(), opened or OpenedSources(), Stopwatch()
    problems = Problems()
    read = read_sources(recipe, None if out is None else as_path(out), options, opened, problems)
    parts = choose_parts(read, options, problems)
    states = choose_states(read, parts, options, opened)
    files = lay_out(read, parts, states, options, opened)
    plan = plan_composite(files.layouts, states.indexes, states.sources, read.base, states.scales)
    about_links = check(plan, read, states, options)
    special = [
        *opened.notices,
        *_about_many_files(len(plan.files), states.target.world_size, read.base_index.world_size),
        *files.notices,
        *states.notices,
        *about_links,
        *parts.notices,
    ]
    special += step_notices(states.steps, read.base_index.name, bool(states.scales))
    logger.info("planned %d files, %s bytes, in %s", len(plan.files), f"{plan.num_bytes:,}", watch.lap())
    return MergePlan(
        recipe=read.recipe,
        out=read.out,
        options=options,
        indexes=states.indexes,
        base=read.base,
        structure=read.structure,
        target=states.target,
        steps=states.steps,
        plan=plan,
        report=_report(plan, read, parts, states, options, special),
        format=read.format,
        framework=read.framework,
        attempt=files.attempt,
        replaces=read.replaces,
    )


def _collect(problems: Problems, call: Callable[[], _T]) -> _T | None:
    """Return the result of a call; add an error to ``problems`` and return None."""
    return attempt(call, problems, TailorError)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSources:
    """The first stage: the checkpoints of a recipe, and what the options say of the output."""

    recipe: Recipe
    """With the weights of ``ema``"""
    indexes: tuple[CheckpointIndex, ...]
    base: int
    structure: ModelStructure
    out: Path
    format: str
    stage: int
    framework: str
    replaces: Entries | None

    @property
    def base_index(self) -> CheckpointIndex:
        """The base"""
        return self.indexes[self.base]


def read_sources(
    recipe: Recipe | str | Path, out: Path | None, options: Options, opened: OpenedSources, problems: Problems
) -> ReadSources:
    """Read the checkpoints. What does not prevent the next stage is added to ``problems``."""

    path = None if isinstance(recipe, Recipe) else as_path(recipe)
    parsed = recipe if isinstance(recipe, Recipe) else load_recipe(as_path(recipe))
    unsettled, base = open_sources(parsed, problems, opened)
    base_index, step_of = unsettled[base], {index.root: index.global_step for index in unsettled}
    weighed = _collect(problems, lambda: weigh(parsed, step_of)) or parsed
    logger.info("the base is %s, %s", base_index.name, "as the recipe says" if parsed.base else "the newest source")
    target = (out or weighed.output or default_output(base_index)).absolute()
    if isinstance(target, RemotePath) and not target.is_inside:
        raise TargetError.at(base_index.name, "the base is in an object store, and no output is named", "name one")
    structure = find_structure(base_index)
    sources = [*([path] if path is not None else ()), *(index.root for index in unsettled)]
    replaces = _collect(problems, lambda: _check_target(target, sources, options))
    to_format, stage = choose_format(base_index, options.to, options.stage)
    indexes = _collect(problems, lambda: settle_roles(unsettled, base, to_format, stage)) or unsettled
    chosen = _collect(problems, lambda: choose_framework(indexes[base], to_format, options.to, options.layout))
    framework = chosen or base_index.framework
    _collect(problems, lambda: check_base(indexes[base], framework))
    return ReadSources(
        recipe=weighed,
        indexes=indexes,
        base=base,
        structure=structure,
        out=target,
        format=to_format,
        stage=stage,
        framework=framework,
        replaces=replaces,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenParts:
    """The second stage: the source of each param, the tokenizer's files, and the param groups."""

    choice: Choice
    structure: ModelStructure
    """With experts as parts"""
    tokenizer: Sequence[FileLayout]
    regrouping: Regrouping | None
    """None keeps the base's groups"""

    @property
    def notices(self) -> Sequence[Problem]:
        return self.regrouping.notices if self.regrouping else ()


def choose_parts(read: ReadSources, options: Options, problems: Problems) -> ChosenParts:
    """Resolve the recipe, and compare the checkpoints. Raises a `TailorError` with all problems so far."""

    recipe, base_index = read.recipe, read.base_index
    structure = with_experts(read.structure, base_index)
    lacks_groups = options.groups == KEEP and _lacks_trainers_groups(base_index, read.format, read.framework)
    groups = DEFAULT if lacks_groups else options.groups
    _collect(problems, lambda: check_fit(read.indexes, read.base, groups != KEEP))
    apart, params = {index.root: index.split_layers for index in read.indexes}, set(base_index.params)
    choice = _collect(
        problems,
        lambda: resolve(recipe, structure, base_index.root, params, allow_split=options.allow_split, apart=apart),
    )
    if choice is not None:
        _collect(problems, partial(check_names, choice, base_index))
    about_tokenizer = (recipe.tokenizer, recipe.chat_template, options.copy_tokenizer)
    tokenizer = _collect(problems, lambda: lay_out_tokenizer(base_index, *about_tokenizer, read.framework))
    _collect(problems, lambda: check_options(read.format, recipe.dtype, options.allow_split))
    regrouping = None
    if groups != KEEP:
        regrouping = _collect(
            problems, lambda: regroup(base_index, read.structure, groups, find_model_order(base_index))
        )
    problems.raise_if_any()
    assert choice is not None and tokenizer is not None
    return ChosenParts(choice=choice, structure=structure, tokenizer=tokenizer, regrouping=regrouping)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenStates:
    """The third stage: the source of each state, the optimizer's layout, and its steps."""

    indexes: tuple[CheckpointIndex, ...]
    """With the saves that masters of sources differ from"""
    sources: Sources
    target: OptimizerLayout
    steps: tuple[StepChoice, ...]
    scales: Mapping[tuple[State, int], float]
    """See `averages.rebase_scales`"""
    attempts: Sequence[Past | None]
    """That of each checkpoint"""
    missed: Mapping[str, int]
    """Part -> the updates that its moments lack"""
    notices: Sequence[Problem]


def choose_states(read: ReadSources, parts: ChosenParts, options: Options, opened: OpenedSources) -> ChosenStates:
    """Choose the source of each state. Raises a `TailorError` if the states or the steps don't fit together."""
    base, numbered = read.base, number_sources(parts.choice, read.indexes, read.base)
    with_older, of_states = with_bases(read.indexes, numbered, opened.others.values())
    base_index, notices = without_later_states(with_older, of_states, base)
    indexes = (*with_older[:base], base_index, *with_older[base + 1 :])
    groups = parts.regrouping.groups if parts.regrouping else None
    layout = lay_out_target(base_index, read.format, read.stage, options.world_size, groups, options.mesh)
    attempts = [stated_attempt(index.root) for index in indexes]
    missed = MissedUpdates(attempts, parts.structure)
    steps = choose_steps(indexes, of_states, base, layout, missed)
    target = with_steps(layout, steps)
    sources = with_sums(of_states, indexes, base, target, steps)
    rebases = options.step == "rebase" or (options.step == "auto" and matters(steps))
    scales = rebase_scales(indexes, sources, target, steps, missed) if rebases else {}
    lacking = updates_missed(indexes, sources, target, steps, scales.keys(), missed)
    return ChosenStates(
        indexes=indexes,
        sources=sources,
        target=target,
        steps=steps,
        scales=scales,
        attempts=attempts,
        missed=missed.by_part(lacking),
        notices=notices,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LaidOut:
    """The fourth stage: the layouts of all files."""

    layouts: Sequence[FileLayout]
    attempt: Past | None
    notices: Sequence[Problem]


def lay_out(
    read: ReadSources, parts: ChosenParts, states: ChosenStates, options: Options, opened: OpenedSources
) -> LaidOut:
    """Lay out the output's files. Raises a `TailorError` for a base that the format can't hold."""
    base_index, sources = states.indexes[read.base], states.sources
    copied = {number for number, index in enumerate(read.indexes) if index.root in opened.copied}

    def unchanged(state: State) -> int | None:
        source = sources.only(state)
        return None if source is None or source in copied or (state, source) in states.scales else source

    wanted = Wanted(
        layout=states.target,
        dtype=read.recipe.dtype,
        from_group=parts.regrouping.from_group if parts.regrouping else None,
        is_alone=len(states.indexes) == 1,
        framework=read.framework,
        linkable=Linkable(states.indexes, unchanged) if options.reference else None,
    )
    own, about_weights = writer_of(read.format, read.framework).lay_out(base_index, wanted)
    stated, about_attempts = attempt_of(states.attempts, read.base, base_index.global_step)
    output_attempt = None if stated is None else replace(stated, missed=states.missed)
    with_attempt = state_attempt([*own, *parts.tokenizer, *opened.files], base_index, output_attempt)
    counted = [one.step for one in states.target.sub_groups if one.params and one.step is not None]
    layouts, about_lags = state_lags(with_attempt, base_index, counted, read.format)
    return LaidOut(layouts=layouts, attempt=output_attempt, notices=[*about_weights, *about_attempts, *about_lags])


def check(plan: Plan, read: ReadSources, states: ChosenStates, options: Options) -> list[Problem]:
    """Return notices on hard links. Raises a `TailorError` if sources lack states, or the output can't be there."""
    check_filled(plan, states.indexes, states.sources)
    notices = check_links(plan, states.indexes, read.format) if options.reference else []
    check_device(plan, read.out)
    if options.step == "source":
        check_one_step(states.steps)
    return notices


def _report(
    plan: Plan,
    read: ReadSources,
    parts: ChosenParts,
    states: ChosenStates,
    options: Options,
    special: Sequence[Problem],
) -> Report:
    out, target = read.out, states.target
    needed = space_for(plan, options.clone)
    if isinstance(out, RemotePath):
        needed = room_to_upload(file.num_bytes for file in plan.files) + SPARE_BYTES
    return Report(
        recipe=read.recipe.name,
        out=display_name(out),
        base=read.base_index.name,
        global_step=read.base_index.global_step,
        world_size=target.world_size,
        mesh=target.mesh,
        parts=part_rows(plan, parts.choice.structure, states.indexes, states.sources, read.base),
        sources=source_rows(plan, states.indexes, read.base),
        steps=tuple(StepRow(one.flat_id, one.step, one.others) for one in states.steps if one.step is not None),
        files=tuple(FileRow(file.path, file.num_bytes) for file in plan.files),
        num_bytes=plan.num_bytes,
        needed_bytes=needed,
        free_bytes=free_bytes(out),
        notices=tuple(_notices(read.recipe, states.indexes, read.base, parts.choice, special)),
    )


def _lacks_trainers_groups(base: CheckpointIndex, to_format: str, framework: str) -> bool:
    """Return whether DeepSpeed has made the optimizer, with one group, where a resume by the Trainer has two."""
    is_made = "optimizer" in base.zero.engine.ds_config and len(base.groups) == 1
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
    known = opened.indexes if opened else {}
    roots = recipe.sources()
    found = [known.get(root) or attempt(partial(index_checkpoint, root), problems, TailorError) for root in roots]
    indexes = agree_on_roles([index for index in found if index is not None])
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
    base_index = indexes[base]
    notices = list(recipe.notices)
    if recipe.base is None:
        what = f"the recipe names none; {base_index.name}, the newest source, supplies everything outside the parts"
        notices.append(Problem("base_model", what, "add base_model: to choose it yourself"))
    if choice.filled and recipe.rules:
        what = f"no rule names {condense(choice.filled)}; they come from the base {base_index.name}"
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
        if keys := differing_hyperparameters(index, base_index):
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
    base_index = indexes[base]
    structure = with_experts(find_structure(base_index), base_index)
    choice = resolve(recipe, structure, base_index.root, set(base_index.params), allow_split=allow_split)
    return write_normal_form(
        recipe,
        choice.source_of,
        base_index.root,
        choice.structure,
        folder,
        weights_of=choice.weights_of,
        moments_of=choice.moments_of,
    )
