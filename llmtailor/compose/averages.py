"""What several sources determine together: averages, and the optimizer's ``step`` of a sub-group. Pure.

A sub-group whose params all come with the same step gets that step, so in layer-aligned groups each layer keeps its
own. Where steps differ, no single one is right for all: the base's step stays, the moments are kept as they are, and
the bias correction of the other params is wrong by the factor given here. Other scalars of a sub-group are treated
likewise.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.lineage import Past
from llmtailor.checkpoint.optimizer import OptimizerLayout
from llmtailor.checkpoint.sources import AVERAGE, RESET, Mix, SourceRange, Sources, Weights
from llmtailor.containers.unpickle import as_number
from llmtailor.errors import MismatchError, Problem, some
from llmtailor.frameworks.stock_fields import keeps_as_adam
from llmtailor.model.parts import ModelStructure, Part, condense
from llmtailor.model.roles import (
    BUFFER,
    EXP_AVG,
    EXP_AVG_SQ,
    MASTER,
    WEIGHT,
    State,
    is_moment,
    is_optimizer_state,
    is_tied_to_master,
)
from llmtailor.recipe import Average, Origin
from llmtailor.recipe.resolve import Choice

NOTICEABLE = 0.01
"""Relative change of an update that causes a warning"""


@dataclass(frozen=True, slots=True)
class StepChoice:
    """The step of a sub-group, and the other steps of its params' moments."""

    flat_id: int
    step: float | None
    """None if the optimizer does not count steps of them"""
    others: tuple[float, ...]
    worst_factor: float
    """The factor, of those farthest from 1, by which the bias correction scales the first update of the params with
    other moments than the step counts; 1 means no effect."""
    most_missed: float = 0
    """The most updates that the step counts, and moments of the sub-group lack"""
    scalars: Mapping[str, Any] = field(default_factory=dict)
    """The other scalars of the sub-group"""


@dataclass(frozen=True, slots=True)
class MissedUpdates:
    """The updates that Adam's step counts and the moments of the sources lack, as these state it."""

    stated: Sequence[Past | None] = ()
    structure: ModelStructure | None = None

    def of(self, source: int, param: str) -> int:
        if source >= len(self.stated) or (past := self.stated[source]) is None or not past.missed:
            return 0
        return max(past.missed.get(part, past.missed.get(part.whole, 0)) for part in self._parts_of(param))

    def by_part(self, lacking: Mapping[str, int]) -> dict[str, int]:
        """Return the greatest number of each part, given those of params."""
        return dict(sorted((part, number) for param, number in lacking.items() for part in self._parts_of(param)))

    def _parts_of(self, param: str) -> set[Part]:
        assert self.structure is not None, "with what sources state"
        return {self.structure.part_of[name] for name in self.structure.pieces_of.get(param, [param])}


NONE_MISSED = MissedUpdates()


def choose_steps(
    indexes: Sequence[CheckpointIndex],
    sources: Sources,
    base: int,
    target: OptimizerLayout,
    missed: MissedUpdates = NONE_MISSED,
) -> tuple[StepChoice, ...]:
    """Return the step of every sub-group of the target."""
    steps, scalars = [index.steps() for index in indexes], [index.scalars() for index in indexes]
    choices = []
    for flat_id, flat in enumerate(target.sub_groups):
        # the steps of each param's moments: with their newest source, or 0 if they are reset
        brought = {
            param: {0.0}
            if sources.moments_of(param) == RESET
            else {steps[source][param] for source in sources.moments_from(param) if param in steps[source]}
            for param in flat.params
            if param in steps[base]
        }
        every = {step for some in brought.values() for step in some}
        of_base = {steps[base][param] for param in brought}
        step = every.pop() if len(every) == 1 else max(of_base, default=None if flat.params else 0.0)
        # averaged moments are made for the step that was chosen
        kept = (some for param, some in brought.items() if sources.moments_of(param) != AVERAGE)
        others = tuple(sorted({other for some in kept for other in some if other != step}))
        of_moments = {
            steps[source][param] - missed.of(source, param)
            for param in brought
            if sources.moments_of(param) not in (AVERAGE, RESET)
            for source in sources.moments_from(param)
            if param in steps[source]
        }
        is_corrected = not any(_has_first_alone(indexes[base], param) for param in flat.params)
        betas = betas_of(target.groups[flat.group].hyper) if is_corrected else None
        own = {*others, *of_moments} - {step}
        factors = [bias_factor(count, step, *betas) for count in own] if betas and step is not None else []
        worst = max(factors, key=lambda factor: abs(math.log(factor)), default=1.0)
        from_one = {source for param in flat.params for source in sources.moments_from(param)}
        number = from_one.pop() if len(from_one) == 1 else base
        of_first = scalars[number].get(flat.params[0], {}) if flat.params else {}
        most = max((step - count for count in own), default=0) if betas and step is not None else 0
        choices.append(StepChoice(flat_id, step, others, worst, most, of_first))
    return tuple(choices)


def matters(choices: Sequence[StepChoice]) -> bool:
    """Return whether moments of other updates than their sub-group counts make the first update noticeably wrong."""
    return any(abs(choice.worst_factor - 1) > NOTICEABLE for choice in choices)


def _has_first_alone(index: CheckpointIndex, param: str) -> bool:
    """Return whether an optimizer such as Lion keeps the first moment of a param only: it corrects no bias."""
    return State(param, EXP_AVG) in index.held and State(param, EXP_AVG_SQ) not in index.held


def with_steps(target: OptimizerLayout, choices: Sequence[StepChoice]) -> OptimizerLayout:
    """Return the layout with the chosen steps and scalars in its sub-groups."""
    pairs = zip(target.sub_groups, choices, strict=True)
    return replace(
        target, sub_groups=tuple(replace(one, step=choice.step, scalars=choice.scalars) for one, choice in pairs)
    )


def rebase_scales(
    indexes: Sequence[CheckpointIndex],
    sources: Sources,
    target: OptimizerLayout,
    choices: Sequence[StepChoice],
    missed: MissedUpdates = NONE_MISSED,
) -> dict[tuple[State, int], float]:
    """Return the factors that keep the bias-corrected moments of params whose step differs from their sub-group's.

    They are those of states from one source each.

    Adam corrects exp_avg by ``1 / (1 - beta1**step)`` and exp_avg_sq likewise with beta2. When ``step`` is replaced,
    scaled moments keep the corrected values.
    """
    steps = [index.steps() for index in indexes]
    scales: dict[tuple[State, int], float] = {}
    for choice, flat in zip(choices, target.sub_groups, strict=True):
        betas = betas_of(target.groups[flat.group].hyper)
        for param in flat.params:
            if sources.moments_of(param) in (AVERAGE, RESET):
                continue
            for source in sources.moments_from(param):
                own = steps[source].get(param, 0.0) - missed.of(source, param)
                is_corrected = betas and own > 0 and not _has_first_alone(indexes[source], param)
                if betas and is_corrected and choice.step is not None and own != choice.step:
                    for kind, beta in zip((EXP_AVG, EXP_AVG_SQ), betas, strict=True):
                        scales[State(param, kind), source] = (1 - beta**choice.step) / (1 - beta**own)
    return scales


def updates_missed(
    indexes: Sequence[CheckpointIndex],
    sources: Sources,
    target: OptimizerLayout,
    choices: Sequence[StepChoice],
    scales: Collection[tuple[State, int]],
    missed: MissedUpdates,
) -> dict[str, int]:
    """Return param -> the updates that its step in a composite counts and its moments lack; none of those scaled to it,
    or without second moments."""
    steps = [index.steps() for index in indexes]
    lacking: dict[str, int] = {}
    for choice, flat in zip(choices, target.sub_groups, strict=True):
        for param in flat.params if choice.step is not None else ():
            for source in sources.moments_from(param):
                state = State(param, EXP_AVG_SQ)
                if sources.moments_of(param) in (AVERAGE, RESET) or state not in indexes[source].held:
                    continue
                number = int(choice.step or 0) - int(steps[source].get(param, 0)) + missed.of(source, param)
                if (state, source) not in scales and number > 0:
                    lacking[param] = max(number, lacking.get(param, 0))
    return lacking


def bias_factor(own: float, used: float, beta1: float, beta2: float) -> float:
    """Return the factor by which ``used`` in place of ``own`` scales the first update after a resume.

    Adam divides exp_avg by ``1 - beta1**t`` and exp_avg_sq by ``1 - beta2**t``; the first resumed step has a count one
    higher than the checkpoint's. eps is neglected.
    """
    own, used = own + 1, used + 1
    first = (1 - beta1**own) / (1 - beta1**used) if beta1 else 1.0
    second = (1 - beta2**used) / (1 - beta2**own) if beta2 else 1.0
    return first * math.sqrt(second)


def betas_of(hyper: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return Adam's betas; None if the hyperparameters have none that are valid."""
    match hyper.get("betas"):
        case [one, other]:
            first, second = as_number(one), as_number(other)
            if first is not None and second is not None and 0 <= first < 1 and 0 <= second < 1:
                return float(first), float(second)
    return None


def check_names(choice: Choice, base: CheckpointIndex) -> None:
    """Raise MismatchError if averaged weights have other names on disk than their params, or are part of a tensor.

    transformers keeps the experts of some models fused in memory. Their stored weights would have to be rounded from
    parts of averaged masters.
    """
    structure, known = choice.structure, {*base.params, *base.tied}
    averaged = [name for name, origin in choice.source_of.items() if isinstance(origin, Average)]
    parts = {structure.part_of[name]: None for name in averaged if structure.stored_in(name) not in known}
    if parts:
        what = "the weights on disk have other names than the params, so they can't be averaged"
        raise MismatchError.at(base.name, f"{condense(list(parts))}: {what}", "take these parts from one checkpoint")
    pieces = structure.pieces.keys() & {*averaged, *choice.weights_of}
    if mixed := [part for part in structure.parts if part in {structure.part_of[name] for name in pieces}]:
        what = "of experts in one tensor, each needs one checkpoint for its weights and optimizer states"
        raise MismatchError.at(base.name, f"{condense(mixed)}: {what}", "average whole layers")


def number_sources(choice: Choice, indexes: Sequence[CheckpointIndex], base: int) -> Sources:
    """Return the sources of every tensor as positions in ``indexes``.

    Only what is trained is averaged. Frozen params and buffers come from the newest checkpoint of an average.
    """
    number_of = {index.root: number for number, index in enumerate(indexes)}
    base_index, pieces = indexes[base], choice.structure.pieces
    trained = {param for group in base_index.group_params for param in group}
    mixes: dict[Origin, tuple[int, Mix]] = {}
    of_name: dict[str, int] = {}
    averages: dict[str, Mix] = {}
    for name, origin in choice.source_of.items():
        if not isinstance(origin, Average):
            of_name[name] = number_of[origin]
            continue
        if origin not in mixes:
            weights = tuple((number_of[root], share) for root, share in origin.shares())
            newest = max((number for number, _ in weights), key=lambda number: indexes[number].global_step)
            mixes[origin] = newest, Mix(weights, origin.moments)
        of_name[name], mix = mixes[origin]
        if base_index.tied.get(name, name) in trained:
            averages[name] = mix
    weights_of = {name: number_of[root] for name, root in choice.weights_of.items()}
    moments_of = {name: number_of[root] for name, root in choice.moments_of.items()}
    of_moments = of_name | moments_of
    cuts: dict[State, tuple[SourceRange, ...]] = {}
    whole: dict[str, list[str]] = {}
    for param, names in choice.structure.pieces_of.items():
        of_name[param] = max((of_name[name] for name in names), key=lambda number: indexes[number].global_step)
        kinds = {MASTER, *(state.kind for state in base_index.held if state.param == param)} - {WEIGHT, BUFFER}
        for kind in kinds:
            source_of = of_moments if is_moment(kind) else of_name
            cuts_of_kind = _join(SourceRange(pieces[one].begin, pieces[one].end, source_of[one]) for one in names)
            held = base_index.held.get(State(param, kind))
            if held is None or held.shape == base_index.params[param].shape:
                cuts[State(param, kind)] = cuts_of_kind
            elif len(cuts_of_kind) > 1:
                whole.setdefault(kind, []).append(param)
            else:
                moments_of[param] = cuts_of_kind[0].source
    if whole:
        fix = "take all experts of a layer from one checkpoint"
        raise MismatchError(
            Problem(base_index.name, f"{kind} of {some(params)} can't be divided among experts", fix)
            for kind, params in whole.items()
        )
    return Sources(of_name, weights_of, cuts, averages, of_moments=moments_of)


def _join(cuts: Iterable[SourceRange]) -> tuple[SourceRange, ...]:
    """Return the same elements in as few cuts as possible; they follow each other."""
    joined: list[SourceRange] = []
    for cut in cuts:
        begin = joined.pop().begin if joined and joined[-1].source == cut.source else cut.begin
        joined.append(SourceRange(begin, cut.end, cut.source))
    return tuple(joined)


def with_sums(
    sources: Sources,
    indexes: Sequence[CheckpointIndex],
    base: int,
    target: OptimizerLayout,
    steps: Sequence[StepChoice],
) -> Sources:
    """Return the sources with the terms of every weighted sum, for the chosen steps of the target's sub-groups.

    Raises MismatchError with every reason why moments can't be averaged or reset.
    """
    if not sources.averages:
        return sources
    kinds: dict[str, list[str]] = {}
    for state in indexes[base].held:
        if is_optimizer_state(state.kind):
            kinds.setdefault(state.param, []).append(state.kind)
    sums = {State(name, MASTER): mix.weights for name, mix in sources.averages.items()}
    problems = [*_partly_reset(sources, target, steps)]
    step_of = [index.steps() for index in indexes]
    betas_in = [{param: betas_of(group.hyper) for group in index.groups for param in group.params} for index in indexes]
    reason: tuple[str, str] | None
    unfit: dict[tuple[str, str], list[str]] = {}
    for choice, flat in zip(steps, target.sub_groups, strict=True):
        betas = betas_of(target.groups[flat.group].hyper)
        for param in flat.params:
            mix = sources.averages.get(param)
            if mix is None:
                continue
            if bound := sorted(filter(is_tied_to_master, kinds.get(param, ()))):
                reason = (
                    f"{', '.join(bound)} may be a copy or a part of the weights, so these can't be averaged",
                    "leave them out",
                )
                unfit.setdefault(reason, []).append(param)
                continue
            if mix.moments == RESET and keeps_as_adam(kinds.get(param, ()), target.groups[flat.group].hyper):
                sums |= {State(param, kind): () for kind in kinds.get(param, ())}
            elif mix.moments == RESET and kinds.get(param):
                reason = "what the optimizer starts from is not known, so moments can't be reset", "use moments: newest"
                unfit.setdefault(reason, []).append(param)
            if mix.moments != AVERAGE:
                continue
            made = [(step_of[number].get(param, 0.0), betas_in[number].get(param)) for number, _ in mix.weights]
            if reason := _why_not(kinds.get(param, ()), betas, made, choice.step):
                unfit.setdefault(reason, []).append(param)
                continue
            assert betas is not None, "without betas there is a reason"
            for kind, beta in zip((EXP_AVG, EXP_AVG_SQ), betas, strict=True):
                if kind in kinds.get(param, ()):
                    own = [step for step, _ in made]
                    sums[State(param, kind)] = _debiased(mix.weights, own, choice.step or 0.0, beta)
    problems += [Problem("moments", f"{what}: {some(params)}", fix) for (what, fix), params in unfit.items()]
    if problems:
        raise MismatchError(problems)
    return replace(sources, sums=sums)


def _debiased(weights: Weights, own: Sequence[float], step: float, beta: float) -> Weights:
    """Return the factors that make the average of bias-corrected moments one of ``step``.

    Adam divides a moment by ``1 - beta**step``, as of the step at which it was saved.
    """
    return tuple(
        (number, weight if made == step else weight * (1 - beta**step) / (1 - beta**made))
        for (number, weight), made in zip(weights, own, strict=True)
    )


def _why_not(
    kinds: Sequence[str],
    betas: tuple[float, float] | None,
    made: Sequence[tuple[float, tuple[float, float] | None]],
    step: float | None,
) -> tuple[str, str] | None:
    """Return why moments can't be averaged, and the fix; None if they can.

    ``made`` are the steps and betas of the sources.
    """
    fix = "use moments: newest or reset"
    others = sorted(set(kinds) - {EXP_AVG, EXP_AVG_SQ})
    if others:
        return f"{', '.join(others)} can't be averaged, only Adam's exp_avg and exp_avg_sq", fix
    if betas is None:
        return "the optimizer states no betas, so its moments can't be averaged", fix
    if any(one != betas for _, one in made):
        return "the checkpoints have different betas, so moments can't be averaged", fix
    if step and not all(own for own, _ in made):
        return "a checkpoint has made no optimizer step, so its moments can't be averaged", fix
    return None


def _partly_reset(sources: Sources, target: OptimizerLayout, steps: Sequence[StepChoice]) -> Iterator[Problem]:
    """Yield a problem if params whose moments are reset share Adam's step with others."""
    kept = [
        param
        for choice, flat in zip(steps, target.sub_groups, strict=True)
        if choice.step and any(sources.moments_of(param) == RESET for param in flat.params)
        for param in flat.params
        if sources.moments_of(param) != RESET
    ]
    if kept:
        what = f"params with moments: reset share Adam's step with params whose moments are kept: {some(kept)}"
        yield Problem("moments", what, "reset whole param groups, use --groups layer, or use moments: newest")


def describe(mix: Mix, indexes: Sequence[CheckpointIndex]) -> str:
    """Return an average in words: ``average of A (0.25), B (0.75)``."""
    return "average of " + ", ".join(f"{indexes[number].name} ({weight:g})" for number, weight in mix.weights)
