"""A pytest plugin for the Trainer's tests: it resumes from what `llmtailor convert` makes of a checkpoint.

It is converted to the format of FSDP and back. The optimizer gets the params' names: transformers does not know the
classes of the models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import Trainer

from peers import seam

stock_create, stock_load = Trainer.create_optimizer, Trainer._load_from_checkpoint


def create_optimizer(self: Trainer, model: Any = None) -> Any:
    optimizer = stock_create(self, model)
    seam.name_params(model or self.model, optimizer)
    return optimizer


def load(self: Trainer, checkpoint: str, model: Any = None) -> Any:
    saved = Path(checkpoint)
    if saved.is_dir():
        seam.convert(saved, saved, ("--to", "fsdp", "--num-gpu", 2), ("--to", "trainer"))
    return stock_load(self, checkpoint, model)


Trainer.create_optimizer, Trainer._load_from_checkpoint = create_optimizer, load
