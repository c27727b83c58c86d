"""What a training was, beside the states of its params: what a composite takes over from its base.

Object trees are decoded pickles: plain values and the nodes of `containers.pickle_nodes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TrainState:
    """The part of a checkpoint that any format can take over, and what only the same framework can."""

    step_is_tensor: bool = True
    """torch's AdamW keeps ``step`` as a 0-dim fp32 tensor, DeepSpeedCPUAdam as an int."""
    model_order: tuple[str, ...] = ()
    """The names of the model's params, in its order; others among them do no harm. Empty where only the model's code
    tells."""
    trees: Mapping[str, Any] = field(default_factory=dict)
    """The stock files of the root by name: the scheduler's state, the loss scale, random number states"""
    optim: tuple[Mapping[str, Any] | None, ...] = ()
    """DeepSpeed: each rank's ``optim_states`` without the states; None for a file that can't be used"""
    model: tuple[Mapping[str, Any] | None, ...] = ()
    """DeepSpeed: the ``model_states``, of each rank or of all, without params and buffers"""
