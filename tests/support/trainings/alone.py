"""The Trainer without DeepSpeed, in this process, with or without the saver: a second or two for a tiny model."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, default_data_collator, set_seed

from llmtailor.saving import attach
from trainings.common import DECAY, RATE, Logs, Tokens, arguments
from trainings.models import build


class NamedGroups(Trainer):
    """One group per param, in reverse, that lists its name: nothing like the Trainer's own groups."""

    def create_optimizer(self, model: Any = None) -> Any:
        named = [(name, param) for name, param in (model or self.model).named_parameters() if param.requires_grad]
        groups = [{"params": [param], "lt_params": [name], "weight_decay": DECAY} for name, param in reversed(named)]
        self.optimizer = torch.optim.AdamW(groups, lr=RATE)
        return self.optimizer


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


class Stops(TrainerCallback):
    """Ends a training after a step, as a time limit does, or as early stopping does, after an evaluation."""

    def __init__(self, step: int, when: str = "step") -> None:
        self.step, self.when = step, when

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= self.when == "step" and state.global_step == self.step

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= self.when == "evaluation" and state.global_step == self.step


class Alone:
    """A training; `attached` are the arguments of `attach`, None to leave the saver out; `given` are more of the
    Trainer's own, and `options` are TrainingArguments."""

    def __init__(
        self,
        folder: Path,
        attached: dict[str, Any] | None = None,
        *,
        arch: str = "llama",
        layers: int = 3,
        tied: bool = False,
        dtype: torch.dtype = torch.float32,
        dropout: float = 0.0,
        rows: int = 16,
        prepare: Callable[[Any], Any] = lambda model: None,
        kind: type[Trainer] = Trainer,
        callbacks: tuple[TrainerCallback, ...] = (),
        eval_sets: Any = None,
        given: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        set_seed(0)
        model = build(arch, layers, tied).to(dtype)
        model = prepare(model) or model
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = dropout
        self.folder, self.logs, self.truth = folder, Logs(), Truth()
        self.trainer = kind(
            model=model,
            args=arguments(folder, **{"per_device_train_batch_size": 4, **options}),
            train_dataset=Tokens(rows),
            eval_dataset=Tokens(6) if eval_sets is None else eval_sets,
            data_collator=default_data_collator,
            callbacks=[self.truth, self.logs, *callbacks],
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
    def losses(self) -> dict[int, float]:
        """Of the steps that ran in this process"""
        return self.logs.losses

    @property
    def log(self) -> list[dict[str, Any]]:
        """What the Trainer logged, without times and without the saver's lines."""
        speeds = ("_runtime", "_per_second")
        lines = [line for line in self.trainer.state.log_history if "checkpoint/bytes" not in line]
        return [
            {key: line[key] for key in line if not key.endswith(speeds)} for line in lines if "train_loss" not in line
        ]

    def checkpoint(self, step: int) -> Path:
        return self.folder / f"checkpoint-{step}"

    @property
    def saves(self) -> list[int]:
        return sorted(int(path.parent.name[5:]) for path in self.folder.glob("partial/step-????????/manifest.json"))

    @property
    def checkpoints(self) -> list[int]:
        return sorted(int(path.name.removeprefix("checkpoint-")) for path in self.folder.glob("checkpoint-*"))


def train(
    folder: Path,
    arch: str = "llama",
    *,
    resume_from: Path | None = None,
    steps: int = 4,
    layers: int = 2,
    batch: int = 2,
    rows: int = 64,
    **more: Any,
) -> Alone:
    """Train without the saver; the Trainer saves every second step. ``bf16`` computes in it, by autocast."""
    often = {"max_steps": steps, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": batch}
    return Alone(folder, arch=arch, layers=layers, rows=rows, **often, **more).train(resume_from)


@cache
def finished() -> Alone:
    """Return a training that tests share. Never write into its folder."""
    return train(Path(_made().name) / "run")


@cache
def _made() -> tempfile.TemporaryDirectory[str]:
    """Removed when this process ends"""
    return tempfile.TemporaryDirectory(prefix="llmtailor-tests-")
