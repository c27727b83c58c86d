"""A pytest plugin for accelerate's tests: `save_state` leaves what `llmtailor convert` makes of the state it saved.

The optimizers get the params' names, as `Adam(model.named_parameters())` does: the models have no config.json.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from peers import seam

stock_prepare, stock_save, stock_load = Accelerator.prepare, Accelerator.save_state, Accelerator.load_state


def prepare(self: Accelerator, *objects: Any, **options: Any) -> Any:
    models = [each for each in objects if isinstance(each, torch.nn.Module)]
    for optimizer in objects:
        if isinstance(optimizer, torch.optim.Optimizer):
            seam.name_params(models[0], optimizer)
    return stock_prepare(self, *objects, **options)


def save_state(self: Accelerator, *args: Any, **options: Any) -> str:
    saved: str = stock_save(self, *args, **options)
    seam.convert(Path(saved), Path(saved), ())
    return saved


def load_state(self: Accelerator, *args: Any, **options: Any) -> Any:
    """Load a state from before the first step without Adam's zeros: the tests compare it with an empty one."""
    result = stock_load(self, *args, **options)
    for optimizer in self._optimizers:
        for param in [param for param, state in optimizer.state.items() if state["step"] == 0]:
            assert not any(value.any() for value in optimizer.state.pop(param).values())
    return result


Accelerator.prepare, Accelerator.save_state, Accelerator.load_state = prepare, save_state, load_state
