"""Checks whether the sources fit together: pure comparisons of indexes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from llmtailor.checkpoint.index import DCP, FSDP, CheckpointIndex
from llmtailor.checkpoint.layout import Plan, Slot
from llmtailor.checkpoint.optimizer import COUNTERS, as_option
from llmtailor.checkpoint.placement import without
from llmtailor.checkpoint.sources import SourceRange, Sources
from llmtailor.compose.averages import StepChoice
from llmtailor.errors import MismatchError, Problem, counted, size, some
from llmtailor.model.roles import BUFFER, FROZEN, MASTER, WEIGHT, State, is_moment, is_optimizer_state

_PARTIAL = (
    "it is a partial checkpoint: name a source for these parts, or let llmtailor merge --run RUN_DIR choose them all"
)
_NO_MOMENTS = (
    "it was saved without these moments: add {from: SOURCE, select: ..., only: moments}, with moments: reset if it is "
    "averaged, or let llmtailor merge --run RUN_DIR choose the sources"
)
_NO_BASE = (
    "its masters are differences from those of another save: put that back beside it, or let llmtailor merge --run "
    "RUN_DIR choose the sources"
)
_OTHER_MODEL = "use checkpoints of the same model and training setup"
_IN_UPDATE = ("betas", "eps", "weight_decay", "amsgrad", "maximize", "momentum", "nesterov", "use_muon")


def check_fit(indexes: Sequence[CheckpointIndex], base: int, any_groups: bool = False) -> None:
    """Raise MismatchError with every difference between the sources and the base, and every NaN in the base's options.

    With ``any_groups`` their param groups may differ: states are matched by name, and the target gets new groups.
    """
    base_index = indexes[base]
    others = [index for index in indexes if index is not base_index]
    problems = [problem for index in others for problem in differences(index, base_index, any_groups)]
    for number, group in enumerate(base_index.groups):
        if wrong := [key for key, value in group.hyper.items() if isinstance(value, float) and math.isnan(value)]:
            what = f"{', '.join(wrong)} of param group {number} is NaN"
            problems.append(Problem(base_index.name, what, "use a checkpoint from before the training diverged"))
    if problems:
        raise MismatchError(dict.fromkeys(problems))


def differences(index: CheckpointIndex, base: CheckpointIndex, any_groups: bool = False) -> list[Problem]:
    """Return what differs. Weights may differ in dtype, because they can be made from masters."""
    found: list[Problem] = []

    def differ(what: str, fix: str = _OTHER_MODEL) -> None:
        found.append(Problem(index.name, what, fix))

    # without separate masters, the precision is that of the masters, which is compared below
    if index.form.has_masters == base.form.has_masters and index.precision != base.precision:
        differ(f"it was trained in {index.precision}, the base in {base.precision}")
    if lacking := [name for name in base.params if name not in index.params]:
        differ(f"it lacks {some(lacking)} of the base {base.name}")
    if extra := [name for name in index.params if name not in base.params]:
        differ(f"it has {some(extra)}, which the base {base.name} lacks")
    both = [(index.params[name], one) for name, one in base.params.items() if name in index.params]
    unlike = [(own, one) for own, one in both if own.shape != one.shape]
    if shapes := [f"{own.name} {list(own.shape)} instead of {list(one.shape)}" for own, one in unlike]:
        differ(f"shapes differ from the base's: {some(shapes)}")
    if roles := [f"{own.name} is {own.role} instead of {one.role}" for own, one in both if own.role != one.role]:
        differ(f"params differ in what is trained: {some(roles)}", "use checkpoints with the same frozen params")
    if dict(index.tied) != dict(base.tied):
        own, one = (", ".join(f"{name} = {stored}" for name, stored in each.tied.items()) for each in (index, base))
        differ(f"its tied weights are {own or 'none'}, the base's are {one or 'none'}")
    if not found and not any_groups and index.group_params != base.group_params:
        differ(
            f"it has {_groups(index)}; the base has {_groups(base)}",
            "use --groups layer or --groups default to rebuild them, or use checkpoints with the same groups",
        )
    if found:
        return found
    # weights can be made from masters; with masters, frozen params are in the run's precision, without in the masters'
    left_out = (WEIGHT,) if index.form.has_masters == base.form.has_masters else (WEIGHT, FROZEN)
    mine, theirs = (
        {state: held for state, held in each.held.items() if state.kind not in left_out} for each in (index, base)
    )
    kinds, wanted = ({state.kind for state in each} for each in (mine, theirs))
    dtypes = [
        f"{state.kind} of {state.param} is {mine[state].live_dtype} instead of {held.live_dtype}"
        for state, held in theirs.items()
        if state in mine and mine[state].live_dtype != held.live_dtype
    ]
    unlike_states = [
        f"{state.kind} of {state.param} {list(mine[state].shape)} instead of {list(held.shape)}"
        for state, held in theirs.items()
        if state in mine and state.kind != BUFFER and mine[state].shape != held.shape
    ]
    modes = [{group.hyper.get("train_mode") for group in each.groups} for each in (index, base)]
    if modes[0] != modes[1]:
        what = "its schedule-free optimizer was in another mode (train_mode), so its weights are of another kind"
        differ(what, "use checkpoints that were all saved in the same mode, such as before any evaluation")
    # params without states, which get some with their first gradient: see `without_later_states`
    both_have = _with_moments(mine) & _with_moments(theirs)
    moments = {
        state for state in mine.keys() ^ theirs.keys() if is_optimizer_state(state.kind) and state.param in both_have
    }
    if kinds != wanted:
        what = f"it holds {', '.join(sorted(kinds))}, the base {', '.join(sorted(wanted))}"
        differ(f"the kinds of state differ: {what}", "use checkpoints of the same optimizer")
    elif moments:
        listed = some(sorted(f"{state.kind} of {state.param}" for state in moments))
        differ(
            f"the optimizer's states differ: only one of the two has {listed}", "use checkpoints of the same optimizer"
        )
    elif unlike_states:
        differ(
            f"shapes of the optimizer's states differ: {some(unlike_states)}", "use checkpoints of the same optimizer"
        )
    elif dtypes:
        differ(f"dtypes differ from the base's: {some(dtypes)}")
    return found


def _with_moments(states: Iterable[State]) -> set[str]:
    return {state.param for state in states if is_optimizer_state(state.kind)}


def without_later_states(
    indexes: Sequence[CheckpointIndex], sources: Sources, base: int
) -> tuple[CheckpointIndex, list[Problem]]:
    """Return the base without the optimizer's states of params whose source has none, and what is to be said of it.

    The source was saved before their first gradient, as can be where moments are saved in turn.

    Raises MismatchError for params of which only some sources have states, or the source, and not the base.
    """
    have, index = [_with_moments(index.held) for index in indexes], indexes[base]
    unlike: dict[int, list[str]] = {}
    later: set[str] = set()
    for param in (param for params in index.group_params for param in params):
        found = sources.moments_from(param)
        lacking = {source for source in found if param not in have[source]}
        if param in have[base] and lacking == found and index.form.weights_are_whole:
            later.add(param)
            continue
        for source in found:
            if (source in lacking) == (param in have[base]):
                unlike.setdefault(source, []).append(param)
    if unlike:
        raise MismatchError(
            Problem(
                indexes[source].name,
                f"the optimizer's states differ: only one of this and the base has any of {some(params)}",
                "take these params from a checkpoint that is like the base",
            )
            for source, params in unlike.items()
        )
    if not later:
        return index, []
    held = {
        state: one
        for state, one in index.held.items()
        if state.param not in later or not is_optimizer_state(state.kind)
    }
    groups = (replace(one, step=None, scalars={}) if later & {*one.params} else one for one in index.sub_groups)
    what = f"the optimizer had no states of {some(sorted(later))} yet when those of their parts were saved"
    notice = Problem(index.name, what, "no action needed: it makes them at the next step, as with a first gradient")
    return replace(index, held=held, sub_groups=tuple(groups)), [notice]


def check_filled(plan: Plan, indexes: Sequence[CheckpointIndex], sources: Sources) -> None:
    """Raise MismatchError if a chosen source lacks a state that the target needs, or has it in another shape."""
    lacking: dict[int, dict[State, None]] = {}
    for slot in plan.summary.unfilled:
        total = sources.sum_of(slot.state)
        state = total[0] if total else slot.state
        spans = sources.spans(state, slot.begin, slot.end)
        asked = [SourceRange(slot.begin, slot.end, number) for number, _ in total[1]] if total else spans
        for begin, end, source in ((cut.begin, cut.end, cut.source) for cut in asked):
            if not can_fill(slot._replace(state=state, begin=begin, end=end), indexes[source]):
                lacking.setdefault(source, {})[state] = None
    if lacking:
        raise MismatchError(
            Problem(
                indexes[source].name,
                f"it does not hold the {some([f'{state.kind} of {state.param}' for state in states])}",
                _fix_for(indexes[source], states),
            )
            for source, states in lacking.items()
        )


def _fix_for(index: CheckpointIndex, lacking: Collection[State]) -> str:
    if all(held.is_whole for held in index.held.values()):
        return _OTHER_MODEL
    if all(state.param in index.partial.differences and not is_moment(state.kind) for state in lacking):
        return _NO_BASE
    masters = [index.held.get(State(state.param, MASTER)) for state in lacking if is_moment(state.kind)]
    has_masters = len(masters) == len(lacking) and all(held is not None and held.is_whole for held in masters)
    return _NO_MOMENTS if has_masters else _PARTIAL


def can_fill(slot: Slot, index: CheckpointIndex) -> bool:
    """Return whether a checkpoint holds a state, and enough of it for a slot."""
    try:
        held = index.holding(slot.state, slot.dtype)
        if slot.state.kind == BUFFER:
            return held.numel >= slot.end - slot.begin
        return not without(((slot.begin, slot.end),), held.runs)
    except KeyError:
        return False


def check_links(plan: Plan, indexes: Sequence[CheckpointIndex], to_format: str) -> list[Problem]:
    """Return a notice on the hard links of a plan made with ``--reference``.

    Raises MismatchError if there are none: other formats than FSDP's and DCP's put states in places of their own.
    """
    if not plan.links:
        if to_format not in (FSDP, DCP):
            what = f"files of the format {to_format} can't be composed of files of the sources"
            fix = "leave it out; --clone shares blocks with the sources on XFS and Btrfs"
        else:
            what = "no source has a state in a DCP folder as the output would hold it"
            fix = "leave it out; only FSDP's and DCP's sharded checkpoints have such folders"
        raise MismatchError.at("--reference", what, fix)
    names = some(dict.fromkeys(indexes[file.origin.source].name for file in plan.links))
    num_bytes = sum(file.num_bytes for file in plan.links)
    what = f"{counted(len(plan.links), 'file')} of {size(num_bytes)} are hard links to files of {names}"
    fix = "these may be removed, but nothing may be saved to the same folders again: that would change the files here"
    return [Problem("--reference", what, fix)]


def check_one_step(choices: Sequence[StepChoice]) -> None:
    """Raise MismatchError if params of one sub-group have different steps, which ``--step source`` can't resolve."""
    mixed = [choice for choice in choices if choice.others]
    if mixed:
        steps = sorted({step for choice in mixed for step in (choice.step, *choice.others) if step is not None})
        raise MismatchError.at(
            "--step source",
            f"{len(mixed)} of {len(choices)} sub-groups, which have one step each, mix params from steps "
            f"{', '.join(f'{step:g}' for step in steps)}",
            "use --groups layer, so that each layer has its own, or --step base or --step rebase",
        )


def differing_hyperparameters(index: CheckpointIndex, base: CheckpointIndex) -> list[str]:
    """Return the hyperparameters that affect a param's update and differ from the base's, whose values are kept."""
    numbered = [{param: at for at, group in enumerate(one.groups) for param in group.params} for one in (index, base)]
    pairs = {(number, numbered[1][param]) for param, number in numbered[0].items() if param in numbered[1]}
    hypers = [(index.groups[own].hyper, base.groups[other].hyper) for own, other in pairs]
    return [
        key
        for key in (*_IN_UPDATE, *COUNTERS)
        if any(as_option(own.get(key)) != as_option(other.get(key)) for own, other in hypers)
    ]


def _groups(index: CheckpointIndex) -> str:
    sizes = [len(params) for params in index.group_params]
    listed = ", ".join(map(str, sizes[:6])) + (" ..." if len(sizes) > 6 else "")
    return f"{counted(len(sizes), 'param group')} ({listed} params)"
