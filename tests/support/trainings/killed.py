"""Trainings with any optimizer, one after another in a process that may kill itself: with the stock Trainer, with the
saver attached, or resumed. Orders are in a JSON file; each leaves its losses and final weights in its folder."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from trainings.alone import Alone
from trainings.optimizers import ALL

STEPS = 12
MOMENTS = ("on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end")
"""When a process may die: between steps, and between a backward pass, an update and its end"""


class Dying(TrainerCallback):  # type: ignore[misc]
    def __init__(self, step: int, moment: str) -> None:
        def die(args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step >= step:
                os.kill(os.getpid(), signal.SIGKILL)

        setattr(self, moment, die)


def begin(folder: Path, name: str, attached: dict[str, Any] | None = None, **options: Any) -> Alone:
    """Return a training with an optimizer of the catalogue; matrices are large enough for 8-bit states."""
    made = {"save_strategy": "steps", "per_device_train_batch_size": 2, **options, **ALL[name].given()}
    run = Alone(folder, attached, arch="wide", layers=2, rows=64, learning_rate=1e-3, **made)
    run.trainer.remove_callback(run.truth)  # quantized states can't be copied
    return run


def main(orders: Path, folder: Path) -> None:
    """Train what the orders say: ``optimizer``, and for each training ``name``, ``attached``, ``dies`` and
    ``resume_from``."""
    torch.compile = lambda function=None, **_: function or (lambda inner: inner)  # type: ignore[assignment]
    told = json.loads(orders.read_text())
    for order in told["trainings"]:
        often = {"max_steps": STEPS, "save_strategy": "no"}
        run = begin(folder / order["name"], told["optimizer"], order.get("attached"), **often)
        if dies := order.get("dies"):
            run.trainer.add_callback(Dying(*dies))
        run.train(order.get("resume_from"))
        torch.save(run.trainer.model.state_dict(), run.folder / "final.pt")
        (run.folder / "losses.json").write_text(json.dumps(run.losses))
