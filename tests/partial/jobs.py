"""What one training with the saver is: pure data, sent to the training processes as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainings.spec import Spec


@dataclass(frozen=True)
class Job(Spec):
    """One training, alone or going on from what another has saved. Steps count from 1; see `Spec` for the rest.

    ``arch`` may end in ``+lora``: PEFT trains an adapter, and the head whole.
    """

    stage: int = 3
    """0: the Trainer without DeepSpeed"""
    policy: Any = "parity"
    """None: the saver is not attached."""
    every: int | None = 2
    """``save_steps`` of `attach`"""
    options: dict[str, Any] | None = None
    """More arguments of `attach`"""
    arguments: dict[str, Any] | None = None
    """More TrainingArguments, or others than usual"""
    dropout: float = 0.0
    truth: bool = True
    """At every save, write down what the process holds, and let the Trainer save a checkpoint of its own."""
    goes_on: str | None = None
    """Another job, whose partial checkpoints this one finds in its folder: a name, or the path of its folder"""
    at: int | None = None
    """The step at which to go on: `merge --run` composes it before the training starts."""
    disturb: dict[str, Any] | None = None
    """See `driver.Disturbance`."""
    unguarded: bool = False
    """Whether the optimizer does not wait for copies"""
    fails: bool = False
    """Whether the training ends with one of llmtailor's own errors, which is the result then."""


def from_json(data: dict[str, Any]) -> Job:
    return Job(**{**data, "frozen": tuple(data["frozen"])})
