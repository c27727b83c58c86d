"""Adam's ``step``: one number per flat id, and what it means when params of several steps share one.

A flat id whose params all bring the same step gets that one, so in layer-aligned groups it travels with the
layer. Where they differ it can't be right for all: the base's step stays, the moments are kept as they are, and the
bias correction of the others is off by the factor given here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.layout import Sources
from llmtailor.checkpoint.optimizer import OptimizerLayout
from llmtailor.model.states import EXP_AVG, EXP_AVG_SQ, State

NOTICEABLE = 0.01
"""Relative change of an update that is worth a warning."""


@dataclass(frozen=True, slots=True)
class StepChoice:
    """The step a flat id gets, and the other steps that its params' moments have made."""

    flat_id: int
    step: float
    others: tuple[float, ...]
    worst_factor: float
    """By how much the bias correction scales the first update of the params with another step; 1 means not
    at all. The one farthest from 1."""


def choose_steps(
    indexes: Sequence[CheckpointIndex], sources: Sources, base: int, target: OptimizerLayout
) -> tuple[StepChoice, ...]:
    """Choose the step of every flat id of the target."""
    steps = [index.steps() for index in indexes]
    choices = []
    for flat_id, flat in enumerate(target.sub_groups):
        brought = {steps[source][param] for param in flat.params for source in sources.of_states(param)}
        own = {steps[base][param] for param in flat.params}
        step = brought.pop() if len(brought) == 1 else max(own, default=0.0)
        others = tuple(sorted(brought - {step}))
        betas = _betas(target.groups[flat.group].hyper)
        factors = [bias_factor(other, step, *betas) for other in others] if betas else []
        worst = max(factors, key=lambda factor: abs(math.log(factor)), default=1.0)
        choices.append(StepChoice(flat_id, step, others, worst))
    return tuple(choices)


def with_steps(target: OptimizerLayout, choices: Sequence[StepChoice]) -> OptimizerLayout:
    """Return a layout whose sub-groups have the steps that were chosen for them."""
    pairs = zip(target.sub_groups, choices, strict=True)
    return replace(target, sub_groups=tuple(replace(one, step=choice.step) for one, choice in pairs))


def rebase_scales(
    indexes: Sequence[CheckpointIndex], sources: Sources, target: OptimizerLayout, choices: Sequence[StepChoice]
) -> dict[State, float]:
    """Return the factors that keep the bias-corrected moments of params whose step is not that of their flat id.

    Adam corrects exp_avg by ``1 / (1 - beta1**step)`` and exp_avg_sq likewise with beta2; with ``step`` replaced, the
    moments are scaled so that the corrected values stay what they were.
    """
    steps = [index.steps() for index in indexes]
    scales: dict[State, float] = {}
    for choice, flat in zip(choices, target.sub_groups, strict=True):
        betas = _betas(target.groups[flat.group].hyper)
        for param in flat.params:
            own = steps[sources.of_name[param]][param]
            if betas and own != choice.step and own > 0:
                for kind, beta in zip((EXP_AVG, EXP_AVG_SQ), betas, strict=True):
                    scales[State(param, kind)] = (1 - beta**choice.step) / (1 - beta**own)
    return scales


def bias_factor(own: float, used: float, beta1: float, beta2: float) -> float:
    """Return by how much the first update after a resume is scaled when ``used`` stands in for ``own``.

    Adam divides exp_avg by ``1 - beta1**t`` and exp_avg_sq by ``1 - beta2**t``; the first resumed step counts one
    more than the checkpoint. eps is left out.
    """
    own, used = own + 1, used + 1
    first = (1 - beta1**own) / (1 - beta1**used) if beta1 else 1.0
    second = (1 - beta2**used) / (1 - beta2**own) if beta2 else 1.0
    return first * math.sqrt(second)


def _betas(hyper: Mapping[str, Any]) -> tuple[float, float] | None:
    betas = hyper.get("betas")
    if isinstance(betas, (tuple, list)) and len(betas) == 2:
        first, second = betas
        if isinstance(first, (int, float)) and isinstance(second, (int, float)) and 0 <= first < 1 and 0 <= second < 1:
            return float(first), float(second)
    return None
