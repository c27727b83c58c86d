"""Rebuilds the optimizer's param groups: layer by layer, or the two that the Trainer makes. Pure.

A param keeps its hyperparameters: a new group has those of the old group that its params come from; if they come from
several, these must agree. `arrange` alone decides the order, for checkpoints and for training scripts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.optimizer import NAME_KEYS, ParamGroup
from llmtailor.errors import MismatchError, Problem, SourceError
from llmtailor.model.parts import ModelStructure

KEEP, LAYER, DEFAULT = "keep", "layer", "default"
CHOICES = (KEEP, LAYER, DEFAULT)

NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)", re.IGNORECASE)
"""Names that transformers 5.23 excludes from weight decay. It also excludes params inside an ``nn.LayerNorm``."""

_HYPER = frozenset(
    (
        *("lr", "initial_lr", "weight_decay", "betas", "eps", "amsgrad", "maximize", "foreach", "capturable"),
        *("differentiable", "fused", "decoupled_weight_decay", "bias_correction", "momentum", "base_momentum"),
        *("max_momentum", "max_lr", "min_lr"),
    )
)


@dataclass(frozen=True, slots=True)
class Regrouping:
    """New param groups, and what changes with them."""

    groups: tuple[ParamGroup, ...]
    from_group: tuple[int, ...]
    """For each new group, the old group whose entries in the scheduler's lists it takes."""
    notices: tuple[Problem, ...]


def regroup(
    base: CheckpointIndex, structure: ModelStructure, how: str, model_order: Sequence[str]
) -> Regrouping | None:
    """Return the new param groups of a composite; None if they are those of the base.

    ``model_order`` lists the params in the order of ``model.named_parameters()`` or of the model's state dict; it may
    include buffers and frozen params. Raises MismatchError if groups with different hyperparameters would be joined.
    """
    if how not in CHOICES:
        raise ValueError(f"no such grouping: {how}")
    if how == KEEP:
        return None
    old = {param: number for number, params in enumerate(base.group_params) for param in params}
    names = [name for name in dict.fromkeys(model_order) if name in old]
    if missing := old.keys() - set(names):
        what = f"the order of the model's params is unknown: it lacks {min(missing)}"
        raise SourceError.at(base.name, what, "copy the checkpoint again, or keep the groups (--groups keep)")
    decays = find_decaying(base)
    arranged = arrange(names, structure, decays, how)
    if arranged == list(base.group_params):
        return None
    origins = [sorted({old[name] for name in params}) for params in arranged]
    _check_agreement(base, origins, how)
    groups = tuple(
        ParamGroup(params, _hyper_of(params, [base.groups[number].hyper for number in origin]))
        for params, origin in zip(arranged, origins, strict=True)
    )
    return Regrouping(groups, tuple(origin[0] for origin in origins), _guesses(base, decays, how))


def arrange(
    names: Iterable[str], structure: ModelStructure, decays: Collection[str], how: str
) -> list[tuple[str, ...]]:
    """Return the param groups of trainable params, given in the order of the model, which each group keeps.

    ``default``: the params with weight decay, then those without. ``layer``: two groups for each part of the model,
    all groups without decay first; in each half the parts outside the layers, by name, then the layers. No group is
    empty.
    """
    names = list(names)
    if how == DEFAULT:
        halves = ([name for name in names if name in decays], [name for name in names if name not in decays])
        return [tuple(half) for half in halves if half]
    numbers = structure.layers
    groups: dict[tuple[bool, str], list[str]] = {}
    for name in names:
        groups.setdefault((name in decays, structure.part_of[name]), []).append(name)

    def place(key: tuple[bool, str]) -> tuple[bool, int, str]:
        number = numbers.get(key[1], -1)
        return key[0], number, "" if number >= 0 else min(groups[key])

    return [tuple(groups[key]) for key in sorted(groups, key=place)]


def find_decaying(base: CheckpointIndex) -> frozenset[str]:
    """Return the params that weight decay applies to.

    The groups show it if some have weight decay and others have none. Otherwise (the Trainer's default is 0 for all;
    one group from a DeepSpeed config decays as a whole) the Trainer's rule decides, as far as names and shapes allow.
    """
    decays = [bool(group.hyper.get("weight_decay")) for group in base.groups]
    numbered = [(param, number) for number, params in enumerate(base.group_params) for param in params]
    if len(set(decays)) > 1:
        return frozenset(param for param, number in numbered if decays[number])
    vectors = [all(_is_vector(base, param) for param in params) for params in base.group_params]
    # If other groups contain matrices, a group of vectors only consists of norms and biases, whatever their names.
    split = not all(vectors)
    return frozenset(
        param for param, number in numbered if not (split and vectors[number]) and _decays_by_rule(base, param)
    )


def _is_vector(base: CheckpointIndex, param: str) -> bool:
    return len(base.params[param].shape) < 2


def _decays_by_rule(base: CheckpointIndex, param: str) -> bool:
    if NO_DECAY.search(param):
        return False
    # A vector with a bias of the same size: an nn.LayerNorm, such as GPT-2's ln_1.
    module, _, last = param.rpartition(".")
    bias = base.params.get(f"{module}.bias")
    return not (last == "weight" and _is_vector(base, param) and bias and bias.shape == base.params[param].shape)


def _guesses(base: CheckpointIndex, decays: frozenset[str], how: str) -> tuple[Problem, ...]:
    """Return a notice if the decaying params had to be guessed, and no group of the base confirms the guess."""
    cut = [params for params in base.group_params if 0 < sum(param in decays for param in params) < len(params)]
    if not cut:
        return ()
    values = ", ".join(sorted({f"{group.hyper.get('weight_decay')}" for group in base.groups}))
    what = (
        f"the weight decay of the groups of {base.name} ({values}) does not show which params it applies to; "
        "norms and biases are split off by the Trainer's naming rule and keep their weight decay"
    )
    return (Problem(f"--groups {how}", what, "compare with the groups of the run that will resume"),)


def _check_agreement(base: CheckpointIndex, origins: Sequence[Sequence[int]], how: str) -> None:
    """Raise MismatchError for every hyperparameter that has several values within a new group."""
    problems: dict[str, Problem] = {}
    for origin in origins:
        hypers = [base.groups[number].hyper for number in origin]
        for key in _differing(hypers):
            if key not in problems and not _is_label(key, [hyper.get(key) for hyper in hypers]):
                other = next(n for n in origin if base.groups[n].hyper.get(key) != hypers[0].get(key))
                values = f"{hypers[0].get(key)} and {base.groups[other].hyper.get(key)}"
                what = f"its param groups {origin[0]} and {other} would become one, but differ in {key} ({values})"
                fix = f"keep the groups (--groups keep){', or --groups layer' if how == DEFAULT else ''}"
                problems[key] = Problem(base.name, what, fix)
    if problems:
        raise MismatchError(problems.values())


def _hyper_of(params: tuple[str, ...], hypers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the hyperparameters of a new group, without labels that differ between its old groups."""
    differing = _differing(hypers)
    merged = {key: value for key, value in hypers[0].items() if key not in differing or key in NAME_KEYS}
    return {key: list(params) if key in NAME_KEYS else value for key, value in merged.items()}


def _differing(hypers: Sequence[Mapping[str, Any]]) -> list[str]:
    keys = dict.fromkeys(key for hyper in hypers for key in hyper)
    return [key for key in keys if any(key not in hyper or hyper[key] != hypers[0].get(key) for hyper in hypers)]


def _is_label(key: str, values: Iterable[Any]) -> bool:
    """Whether a key only says what a group is (``layer: 3``, ``name: embed``), and does not affect the update."""
    if key in _HYPER:
        return False
    flat = [word for value in values for word in (value if isinstance(value, list) else [value])]
    return all(word is None or isinstance(word, str) or type(word) is int for word in flat)
