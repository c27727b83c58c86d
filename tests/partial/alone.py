"""The Trainer without DeepSpeed, in this process, with the saver attached: a second for a tiny model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator, set_seed

from llmtailor.saving import attach
from plain.training import DECAY, RATE, Tokens
from real.models import build

MOMENTS = ("exp_avg", "exp_avg_sq")


class Truth(TrainerCallback):
    """What the optimizer holds after each step, by name."""

    def __init__(self) -> None:
        self.at: dict[int, dict[str, dict[str, torch.Tensor]]] = {}

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        self.at[state.global_step] = {
            name: {"master": param.detach().clone(), **copy.deepcopy(found)}
            for name, param in model.named_parameters()
            if (found := optimizer.state.get(param))
        }


class Alone:
    """A training; `attached` are the arguments of `attach`, None to leave the saver out; `given` are more of the
    Trainer's own."""

    def __init__(
        self,
        folder: Path,
        attached: dict[str, Any] | None = None,
        *,
        dropout: float = 0.0,
        rows: int = 16,
        prepare: Callable[[Any], Any] = lambda model: model,
        kind: type[Trainer] = Trainer,
        callbacks: tuple[TrainerCallback, ...] = (),
        eval_sets: Any = None,
        given: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        usual = {
            "output_dir": str(folder),
            "use_cpu": True,
            "max_steps": 6,
            "save_strategy": "no",
            "logging_steps": 1,
            "per_device_train_batch_size": 4,
            "learning_rate": RATE,
            "weight_decay": DECAY,
            "lr_scheduler_type": "linear",
            "seed": 0,
            "report_to": [],
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
        }
        set_seed(0)
        model = prepare(build("llama", 3, tied=False))
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = dropout
        self.folder = folder
        self.truth = Truth()
        self.trainer = kind(
            model=model,
            args=TrainingArguments(**{**usual, **arguments}),
            train_dataset=Tokens(rows),
            eval_dataset=Tokens(6) if eval_sets is None else eval_sets,
            data_collator=default_data_collator,
            callbacks=[self.truth, *callbacks],
            **(given or {}),
        )
        self.callback = attach(self.trainer, **attached) if attached is not None else None

    def train(self, resume_from: Path | None = None) -> Alone:
        self.trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
        return self

    def finish(self) -> None:
        """Wait for the save in progress, as the end of the process would."""
        assert self.callback and self.callback.saver
        self.callback.saver.finish()

    @property
    def log(self) -> list[dict[str, Any]]:
        """What the Trainer logged, without times and without the saver's lines."""
        speeds = ("_runtime", "_per_second")
        lines = [line for line in self.trainer.state.log_history if "checkpoint/bytes" not in line]
        return [
            {key: line[key] for key in line if not key.endswith(speeds)} for line in lines if "train_loss" not in line
        ]

    @property
    def saves(self) -> list[int]:
        return sorted(int(path.parent.name[5:]) for path in self.folder.glob("partial/step-????????/manifest.json"))

    @property
    def checkpoints(self) -> list[int]:
        return sorted(int(path.name.removeprefix("checkpoint-")) for path in self.folder.glob("checkpoint-*"))
