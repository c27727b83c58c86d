"""Adam's ``step``: one number per sub-group, and the effect when params of several steps share one.

A sub-group whose params all come with the same step gets that step, so in layer-aligned groups each layer keeps its
own. Where steps differ, no single one is right for all: the base's step stays, the moments are kept as they are, and
the bias correction of the other params is wrong by the factor given here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.optimizer import OptimizerLayout
from llmtailor.checkpoint.sources import AVERAGE, RESET, Sources
from llmtailor.containers.pickle_nodes import as_number
from llmtailor.model.states import EXP_AVG, EXP_AVG_SQ, State

NOTICEABLE = 0.01
"""Relative change of an update that causes a warning"""


@dataclass(frozen=True, slots=True)
class StepChoice:
    """The step of a sub-group, and the other steps of its params' moments."""

    flat_id: int
    step: float
    others: tuple[float, ...]
    worst_factor: float
    """The factor, of those farthest from 1, by which the bias correction scales the first update of the params with
    another step; 1 means no effect."""


def choose_steps(
    indexes: Sequence[CheckpointIndex], sources: Sources, base: int, target: OptimizerLayout
) -> tuple[StepChoice, ...]:
    """Return the step of every sub-group of the target."""
    steps = [index.steps() for index in indexes]
    choices = []
    for flat_id, flat in enumerate(target.sub_groups):
        brought = {param: _brought(param, steps, sources) for param in flat.params}
        every = {step for some in brought.values() for step in some}
        own = {steps[base][param] for param in flat.params}
        step = every.pop() if len(every) == 1 else max(own, default=0.0)
        # averaged moments are made for the step that was chosen
        kept = (some for param, some in brought.items() if sources.moments_of(param) != AVERAGE)
        others = tuple(sorted({other for some in kept for other in some} - {step}))
        betas = betas_of(target.groups[flat.group].hyper)
        factors = [bias_factor(other, step, *betas) for other in others] if betas else []
        worst = max(factors, key=lambda factor: abs(math.log(factor)), default=1.0)
        choices.append(StepChoice(flat_id, step, others, worst))
    return tuple(choices)


def _brought(param: str, steps: Sequence[Mapping[str, float]], sources: Sources) -> set[float]:
    """Return the steps of a param's moments: with their newest source, or 0 if they are reset."""
    if sources.moments_of(param) == RESET:
        return {0.0}
    return {steps[source][param] for source in sources.moments_from(param)}


def with_steps(target: OptimizerLayout, choices: Sequence[StepChoice]) -> OptimizerLayout:
    """Return the layout with the chosen steps in its sub-groups."""
    pairs = zip(target.sub_groups, choices, strict=True)
    return replace(target, sub_groups=tuple(replace(one, step=choice.step) for one, choice in pairs))


def rebase_scales(
    indexes: Sequence[CheckpointIndex], sources: Sources, target: OptimizerLayout, choices: Sequence[StepChoice]
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
                own = steps[source][param]
                if betas and own != choice.step and own > 0:
                    for kind, beta in zip((EXP_AVG, EXP_AVG_SQ), betas, strict=True):
                        scales[State(param, kind), source] = (1 - beta**choice.step) / (1 - beta**own)
    return scales


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
