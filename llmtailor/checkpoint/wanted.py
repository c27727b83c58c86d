"""What a writer is asked for, besides the base."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmtailor.checkpoint.index import TRAINER
from llmtailor.checkpoint.optimizer import OptimizerLayout
from llmtailor.checkpoint.sources import Linkable


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The properties of a composite that its base does not decide."""

    layout: OptimizerLayout
    """The optimizer's layout, with the step of each sub-group"""
    dtype: str | None = None
    """The weights' safetensors dtype; None keeps the base's"""
    from_group: Sequence[int] | None = None
    """For each param group, the base's group whose place in the scheduler's lists it takes; None keeps the base's"""
    is_alone: bool = False
    """Whether the base is the only source"""
    framework: str = TRAINER
    """What will resume from it; see `frameworks.framework`"""
    linkable: Linkable | None = None
    """What the output may hold as hard links; None for nothing"""
