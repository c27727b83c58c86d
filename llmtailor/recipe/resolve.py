"""Applies a recipe to a model: one source for every tensor. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from llmtailor.errors import Problem, RecipeError
from llmtailor.model.parts import ModelStructure, Part, condense
from llmtailor.recipe import ONLY_MOMENTS, Average, NamedWeight, Origin, Parts, PlaceRule, Recipe, Select, WholeModel
from llmtailor.recipe.selectors import SelectorError, named_by, select


@dataclass(frozen=True, slots=True)
class Choice:
    """The checkpoint that each tensor comes from."""

    source_of: Mapping[str, Origin]
    """Has every name in the structure. Tied names share a source, as do a weight on disk and its params."""
    structure: ModelStructure
    """The parts. Experts are parts of their own only in layers that come from several checkpoints or are
    of several steps"""
    filled: tuple[str, ...]
    """Parts that come from the base because no rule names them; with `` (partly)`` if rules name some tensors"""
    weights_of: Mapping[str, Path] = field(default_factory=dict)
    """Name -> source of its weight, if that is not the source of its optimizer states in `source_of`"""
    split: tuple[str, ...] = ()
    """The parts of those names; with `` (partly)`` if only some tensors of the part are among them"""
    moments_of: Mapping[str, Path] = field(default_factory=dict)
    """Name of a trained param -> source of its moments, if that is not the source in `source_of`"""


def weigh(recipe: Recipe, step_of: Mapping[Path, int]) -> Recipe:
    """Return the recipe with the weights of exponential moving averages, which depend on the steps of their members.

    The weight of the k-th newest checkpoint, counted from 0, is ``(1 - decay) * decay**k``. Checkpoints that are not in
    ``step_of`` have other problems and are left out. Raises RecipeError for two checkpoints of one step, and for
    a weight that is too small for a number.
    """
    return replace(
        recipe,
        rules=tuple(
            replace(rule, source=_weighed(rule.source, step_of)) if isinstance(rule, WholeModel | Select) else rule
            for rule in recipe.rules
        ),
    )


def _weighed(origin: Origin, step_of: Mapping[Path, int]) -> Origin:
    if not isinstance(origin, Average) or origin.decay is None:
        return origin
    known = [source for source, _ in origin.members if source in step_of]
    newest_first = sorted(known, key=lambda source: -step_of[source])
    steps = [step_of[source] for source in newest_first]
    if len(set(steps)) < len(steps):
        twice = next(step for step in steps if steps.count(step) > 1)
        what = f"two checkpoints of the moving average are of step {twice}, so their order is unknown"
        raise RecipeError.at(origin.where, what, "keep one of them, or use merge_method: linear with weights")
    weights = [(1 - origin.decay) * origin.decay**age for age in range(len(newest_first))]
    if 0.0 in weights:
        what = f"{len(weights)} checkpoints with decay {origin.decay:g} give weights too small for a number"
        raise RecipeError.at(origin.where, what, "leave the oldest out, or use a decay closer to 1")
    members = tuple(zip(reversed(newest_first), reversed(weights), strict=True))
    return Average(members, origin.moments, origin.where) if members else origin


def resolve(
    recipe: Recipe,
    structure: ModelStructure,
    base: Path,
    params: Collection[str],
    *,
    allow_split: bool = False,
    apart: Mapping[Path, Collection[Part]] = MappingProxyType({}),
) -> Choice:
    """Return the source of every tensor; tensors that no rule names come from `base`.

    In `structure`, experts are parts. `params` are the params and buffers with their names in training. Other names in
    `structure` are tensors with other names in safetensors files (the experts of some MoE models): they follow the
    params of their part.

    Slices, models, pre_weights and post_weights must not conflict; ``parts`` override them, later ones override earlier
    ones. Those with ``only: moments`` leave everything else of their tensors where it is. With `allow_split`,
    pre_weights and post_weights may conflict with the others: they then decide the weights, and the others the
    optimizer states. `apart` are the layers of each source whose experts are of several steps; they stay apart also if
    they all come from it.
    Raises RecipeError with every problem; if the recipe has no base, tensors without a source are a problem.
    """
    problems: list[Problem] = []
    states, weights = _apply_places(recipe, structure, allow_split, problems)
    moments = _apply_selections(recipe, structure, states, weights, problems)
    source_of = _complete(recipe, structure, states, base, params=params, problems=problems)
    weights_of: dict[str, Path] = {}
    if weights != states:
        of_weight = _complete(recipe, structure, weights, base, params=params, problems=problems)
        # only pre_weights and post_weights set weights apart, and they name one checkpoint
        differing = {name: source for name, source in of_weight.items() if source != source_of[name]}
        weights_of = {name: source for name, source in differing.items() if isinstance(source, Path)}
    trained = _trained(structure, params)
    moments_of = {name: source for name, source in moments.items() if name in trained and source != source_of[name]}
    averaged = [structure.part_of[name] for name in moments_of if isinstance(source_of[name], Average)]
    if averaged:
        what = f"the masters of these parts are averaged: {condense(averaged)}"
        problems.append(Problem(recipe.name, f"only: moments: {what}", "use moments: newest, average or reset"))
    of_moments = {name: moments_of.get(name) for name in trained}
    whole = _whole_layers(structure, source_of, weights_of, of_moments, apart)
    filled = _filled(structure, whole, states, trained)
    if filled and recipe.base is None:
        fix = "add base_model: with the checkpoint that supplies the rest, or name these parts"
        problems.append(Problem(recipe.name, f"no rule names a source for these parts: {condense(filled)}", fix))
    if problems:
        raise RecipeError(dict.fromkeys(problems))
    joined = structure.joined(whole)
    stored = {name: name if name in joined.part_of else structure.stored_in(name) for name in structure.part_of}
    weights_of = {stored[name]: source for name, source in weights_of.items()}
    moments_of = {stored[name]: source for name, source in moments_of.items()}
    entire, partly = joined.divide(weights_of)
    shares = {part: part for part in entire} | {part: f"{part} (partly)" for part in partly}
    split = tuple(shares[part] for part in joined.parts if part in shares)
    return Choice(
        {stored[name]: source for name, source in source_of.items()}, joined, filled, weights_of, split, moments_of
    )


def _apply_selections(
    recipe: Recipe,
    structure: ModelStructure,
    states: dict[str, Origin],
    weights: dict[str, Origin],
    problems: list[Problem],
) -> dict[str, Path]:
    """Enter the sources that ``parts`` select into ``states`` and ``weights``; return those of moments alone."""
    moments: dict[str, Path] = {}
    for rule in recipe.rules:
        names: Collection[str] = ()
        if isinstance(rule, Select):
            names, refused = select(rule.selectors, structure, rule.where)
            problems += refused
        elif isinstance(rule, Parts):
            named = {*rule.parts}
            if lost := [part for part in named - {*structure.parts} if part.is_share]:
                what = f"its base has no such parts: {condense(sorted(lost))}"
                problems.append(Problem(recipe.name, what, "use a partial checkpoint as the base"))
            names = [name for name, part in structure.part_of.items() if named & {part, part.whole}]
        else:
            continue
        if rule.only == ONLY_MOMENTS:
            assert isinstance(rule.source, Path), "the parser has refused an average"
            moments |= dict.fromkeys(names, rule.source)
            continue
        states |= dict.fromkeys(names, rule.source)
        weights |= dict.fromkeys(names, rule.source)
        moments = {name: source for name, source in moments.items() if name not in names} if moments else {}
    return moments


def _whole_layers(
    structure: ModelStructure,
    source_of: Mapping[str, Origin],
    weights_of: Mapping[str, Path],
    moments_of: Mapping[str, Path | None],
    apart: Mapping[Path, Collection[Part]],
) -> set[Part]:
    """Return the layers that come from one source, or whose moments come from one and the rest from another, and that
    are of one step there.

    ``moments_of`` has the names that are trained.
    """
    sources: dict[Part, set[tuple[Origin, Path | None]]] = defaultdict(set)
    moments: dict[Part, set[Path | None]] = defaultdict(set)
    for name, part in structure.part_of.items():
        sources[part.whole].add((source_of[name], weights_of.get(name)))
        if name in moments_of:
            moments[part.whole].add(moments_of[name])
    split = {(root, layer) for root, layers in apart.items() for layer in layers}
    return {
        part
        for part, sources_of_part in sources.items()
        if len(sources_of_part) == 1
        and len(moments[part]) <= 1
        and split.isdisjoint((source, part) for source in (*moments[part], *(source for source, _ in sources_of_part)))
    }


def _trained(structure: ModelStructure, params: Collection[str]) -> set[str]:
    """Return the names of params and pieces of params, or all if there are none."""
    params = set(params)
    return {name for name in structure.part_of if structure.stored_in(name) in params} or set(structure.part_of)


def _filled(
    structure: ModelStructure, whole: Collection[Part], chosen: Collection[str], trained: Collection[str]
) -> tuple[str, ...]:
    """Return the parts with params that no rule names, with these layers as one part each."""
    shown = {part: part.whole if part.whole in whole else part for part in structure.parts}
    own: dict[str, list[str]] = {part: [] for part in shown.values()}
    for name, part in structure.part_of.items():
        if name in trained:
            own[shown[part]].append(name)
    gaps = {part: sum(name not in chosen for name in names) for part, names in own.items()}
    return tuple(part if gaps[part] == len(own[part]) else f"{part} (partly)" for part in own if gaps[part])


def _apply_places(
    recipe: Recipe, structure: ModelStructure, allow_split: bool, problems: list[Problem]
) -> tuple[dict[str, Origin], dict[str, Origin]]:
    """Return the sources of optimizer states and of weights by the place rules. Conflicting rules are a problem.

    pre_weights and post_weights are for weights, the others for optimizer states. Either kind decides both if the other
    has no rule.
    """
    for_states: dict[str, PlaceRule] = {}
    for_weights: dict[str, PlaceRule] = {}
    clashes: dict[tuple[PlaceRule, PlaceRule], list[str]] = defaultdict(list)
    for rule in recipe.rules:
        if isinstance(rule, Select | Parts):
            continue
        try:
            names = named_by(rule, structure)
        except SelectorError as error:
            problems.append(Problem(rule.where, error.what, error.fix))
            continue
        own, opposite = (for_weights, for_states) if isinstance(rule, NamedWeight) else (for_states, for_weights)
        for name in filter(names.__contains__, structure.part_of):
            first = own.setdefault(name, rule)
            if first.source == rule.source and not allow_split:
                first = opposite.get(name, rule)
            if first.source != rule.source:
                clashes[first, rule].append(structure.part_of[name])
    for (first, second), parts in clashes.items():
        what = (
            f"{condense(parts)}: {second.source} here, but {first.source} at {first.where}; "
            "weights and optimizer state of a part must come from one checkpoint"
        )
        fix = "name the same source in both places, or remove one of them"
        if isinstance(first, NamedWeight) != isinstance(second, NamedWeight):
            weights = first if isinstance(first, NamedWeight) else second
            fix += f"; or use --allow-split for weights from {weights.source} and optimizer states from the other"
        problems.append(Problem(second.where, what, fix))
    states = {name: rule.source for name, rule in (for_weights | for_states).items()}
    return states, {name: rule.source for name, rule in (for_states | for_weights).items()}


def _complete(
    recipe: Recipe,
    structure: ModelStructure,
    chosen: Mapping[str, Origin],
    base: Path,
    *,
    params: Collection[str],
    problems: list[Problem],
) -> dict[str, Origin]:
    """Fill gaps from the base; weights with other names on disk follow the params of their part."""
    trained = _trained(structure, params)
    source_of: dict[str, Origin] = {name: chosen.get(name, base) for name in structure.part_of if name in trained}
    everywhere = dict.fromkeys(source_of.values())
    split: list[str] = []
    unknown: list[str] = []
    for part in structure.parts:
        names = structure.names(part)
        own = [name for name in names if name in trained]
        followers = [name for name in names if name not in trained]
        # A part without params has weights of params in other parts; names alone don't show which.
        sources = dict.fromkeys(source_of[name] for name in own) if own else dict(everywhere)
        if followers and len(sources | dict.fromkeys(chosen[name] for name in followers if name in chosen)) > 1:
            (split if own else unknown).append(part)
        source_of |= dict.fromkeys(followers, next(iter(sources)))
    if split:
        what = f"{condense(split)}: the weights on disk have other names than the params, so globs can't split it"
        problems.append(Problem(recipe.name, what, "take the whole part from one checkpoint"))
    if unknown:
        what = f"{condense(unknown)}: these weights on disk have other names than their params, which are unknown"
        problems.append(Problem(recipe.name, what, "take the whole model from one checkpoint"))
    return {name: source_of[name] for name in structure.part_of}
