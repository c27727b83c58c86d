"""What a writer of checkpoints is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmtailor.checkpoint.optimizer import OptimizerLayout


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a composite shall be where its base does not decide it."""

    layout: OptimizerLayout
    """Of the optimizer, with the step of each sub-group"""
    dtype: str | None = None
    """Of the weights, a safetensors dtype; None keeps the base's"""
    from_group: Sequence[int] | None = None
    """For each param group the base's whose place in the scheduler's lists it takes; None: they are the base's"""
    is_alone: bool = False
    """Whether nothing comes from another source than the base"""
