"""Applies a recipe to a model: one source for every tensor. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llmtailor.errors import Problem, RecipeError
from llmtailor.model.parts import ModelStructure, condense
from llmtailor.recipe.recipe import NamedWeight, Origin, Parts, PlaceRule, Recipe, Select
from llmtailor.recipe.selectors import SelectorError, named_by, select


@dataclass(frozen=True, slots=True)
class Choice:
    """The checkpoint that each tensor comes from."""

    source_of: Mapping[str, Origin]
    """Has every name in `ModelStructure.part_of`. Tied names share a source, as do a weight on disk and its params."""
    filled: tuple[str, ...]
    """Parts that come from the base because no rule names them; with `` (partly)`` if rules name some tensors"""
    weights_of: Mapping[str, Path] = field(default_factory=dict)
    """Name -> source of its weight, if that is not the source of its optimizer states in `source_of`"""
    split: tuple[str, ...] = ()
    """The parts of those names; with `` (partly)`` if only some tensors of the part are among them"""


def resolve(
    recipe: Recipe, structure: ModelStructure, base: Path, params: Collection[str], *, allow_split: bool = False
) -> Choice:
    """Return the source of every tensor; tensors that no rule names come from `base`.

    `params` are the params and buffers with their names in training. Other names in `structure` are tensors with other
    names in safetensors files (the experts of some MoE models): they follow the params of their part.

    Slices, models, pre_weights and post_weights must not conflict; ``parts`` override them, later ones override earlier
    ones. With `allow_split`, pre_weights and post_weights may conflict with the others: they then decide the weights,
    and the others the optimizer states.
    Raises RecipeError with every problem; if the recipe has no base, tensors without a source are a problem.
    """
    problems: list[Problem] = []
    states, weights = _apply_places(recipe, structure, allow_split, problems)
    for rule in recipe.rules:
        names: Collection[str] = ()
        if isinstance(rule, Select):
            names, found = select(rule.selectors, structure, rule.where)
            problems += found
        elif isinstance(rule, Parts):
            names = [name for name, part in structure.part_of.items() if part in rule.parts]
        states |= dict.fromkeys(names, rule.source)
        weights |= dict.fromkeys(names, rule.source)

    source_of, filled = _complete(recipe, structure, states, base, params, problems)
    weights_of: dict[str, Path] = {}
    if weights != states:
        of_weight, _ = _complete(recipe, structure, weights, base, params, problems)
        # only pre_weights and post_weights set weights apart, and they name one checkpoint
        differing = {name: source for name, source in of_weight.items() if source != source_of[name]}
        weights_of = {name: source for name, source in differing.items() if isinstance(source, Path)}
    if filled and recipe.base is None:
        fix = "add base_model: with the checkpoint that supplies the rest, or name these parts"
        problems.append(Problem(recipe.name, f"no rule names a source for these parts: {condense(filled)}", fix))
    if problems:
        raise RecipeError(dict.fromkeys(problems))
    whole, partly = structure.divide(weights_of)
    shares = {part: part for part in whole} | {part: f"{part} (partly)" for part in partly}
    return Choice(source_of, filled, weights_of, tuple(shares[part] for part in structure.parts if part in shares))


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
        own, other = (for_weights, for_states) if isinstance(rule, NamedWeight) else (for_states, for_weights)
        for name in filter(names.__contains__, structure.part_of):
            first = own.setdefault(name, rule)
            if first.source == rule.source and not allow_split:
                first = other.get(name, rule)
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
    params: Collection[str],
    problems: list[Problem],
) -> tuple[dict[str, Origin], tuple[str, ...]]:
    """Fill gaps from the base; weights with other names on disk follow the params of their part."""
    trained = set(params).intersection(structure.part_of) or set(structure.part_of)
    by_part: dict[str, list[str]] = {part: [] for part in structure.parts}
    for name, part in structure.part_of.items():
        by_part[part].append(name)

    source_of: dict[str, Origin] = {name: chosen.get(name, base) for name in structure.part_of if name in trained}
    everywhere = dict.fromkeys(source_of.values())
    filled: list[str] = []
    split: list[str] = []
    unknown: list[str] = []
    for part, names in by_part.items():
        own = [name for name in names if name in trained]
        if gaps := sum(name not in chosen for name in own):
            filled.append(part if gaps == len(own) else f"{part} (partly)")
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
    return {name: source_of[name] for name in structure.part_of}, tuple(filled)
