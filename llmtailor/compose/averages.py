"""Averages: which source every state comes from, and the weighted sums of masters and moments. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.optimizer import OptimizerLayout
from llmtailor.checkpoint.sources import AVERAGE, RESET, Cut, Mix, Sources, Weights
from llmtailor.compose.adam_step import StepChoice, betas_of
from llmtailor.errors import MismatchError, Problem, some
from llmtailor.model.parts import condense
from llmtailor.model.states import BUFFER, EXP_AVG, EXP_AVG_SQ, MASTER, WEIGHT, State, is_moment
from llmtailor.recipe import Average, Origin
from llmtailor.recipe.resolve import Choice


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


def number_sources(
    choice: Choice, indexes: Sequence[CheckpointIndex], base: int, cuts: Mapping[State, tuple[Cut, ...]]
) -> Sources:
    """Return the sources of every tensor as positions in ``indexes``.

    Only what is trained is averaged. Frozen params and buffers come from the newest checkpoint of an average.
    """
    number_of = {index.root: number for number, index in enumerate(indexes)}
    reference, pieces = indexes[base], choice.structure.pieces
    trained = {param for group in reference.group_params for param in group}
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
        if reference.tied.get(name, name) in trained:
            averages[name] = mix
    weights_of = {name: number_of[root] for name, root in choice.weights_of.items()}
    moments_of = {name: number_of[root] for name, root in choice.moments_of.items()}
    of_moments = of_name | moments_of
    more: dict[State, tuple[Cut, ...]] = {}
    for param, names in choice.structure.pieces_of.items():
        of_name[param] = max((of_name[name] for name in names), key=lambda number: indexes[number].global_step)
        kinds = {MASTER, *(state.kind for state in reference.held if state.param == param)} - {WEIGHT, BUFFER}
        for kind in kinds:
            source_of = of_moments if is_moment(kind) else of_name
            more[State(param, kind)] = _join(Cut(pieces[one].begin, pieces[one].end, source_of[one]) for one in names)
    return Sources(of_name, weights_of, {**more, **cuts}, averages, of_moments=moments_of)


def _join(cuts: Iterable[Cut]) -> tuple[Cut, ...]:
    """Return the same elements in as few cuts as possible; they follow each other."""
    joined: list[Cut] = []
    for cut in cuts:
        begin = joined.pop().begin if joined and joined[-1].source == cut.source else cut.begin
        joined.append(Cut(begin, cut.end, cut.source))
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
        if is_moment(state.kind):
            kinds.setdefault(state.param, []).append(state.kind)
    sums = {State(name, MASTER): mix.weights for name, mix in sources.averages.items()}
    problems = [*_partly_reset(sources, target, steps)]
    step_of = [index.steps() for index in indexes]
    betas_in = [_betas_by_param(index) for index in indexes]
    unfit: dict[tuple[str, str], list[str]] = {}
    for choice, flat in zip(steps, target.sub_groups, strict=True):
        betas = betas_of(target.groups[flat.group].hyper)
        for param in flat.params:
            mix = sources.averages.get(param)
            if mix is None:
                continue
            if mix.moments == RESET:
                sums |= {State(param, kind): () for kind in kinds.get(param, ())}
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
                    sums[State(param, kind)] = _debiased(mix.weights, own, choice.step, beta)
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
    step: float,
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


def _betas_by_param(index: CheckpointIndex) -> dict[str, tuple[float, float] | None]:
    return {param: betas_of(group.hyper) for group in index.groups for param in group.params}


def describe(mix: Mix, indexes: Sequence[CheckpointIndex]) -> str:
    """Return an average in words: ``average of A (0.25), B (0.75)``."""
    return "average of " + ", ".join(f"{indexes[number].name} ({weight:g})" for number, weight in mix.weights)
