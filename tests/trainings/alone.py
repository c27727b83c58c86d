"""The plain Trainer, in this process: no DeepSpeed, one CPU process, a second or two for a tiny model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator, set_seed

from llmtailor.saving import attach
from trainings.models import VOCAB, build

RATE, DECAY = 5e-3, 0.1


class Tokens(torch.utils.data.Dataset):
    """Arithmetic progressions, so that there is something to learn; with 256 rows those of real/train.py."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        tokens = (i + torch.arange(12) * (1 + i % 3)) % VOCAB
        return {"input_ids": tokens, "labels": tokens}


class NamedGroups(Trainer):
    """One group per param, in reverse, that lists its name: nothing like the Trainer's own groups."""

    def create_optimizer(self, model: Any = None) -> Any:
        named = [(name, param) for name, param in (model or self.model).named_parameters() if param.requires_grad]
        groups = [{"params": [param], "lt_params": [name], "weight_decay": DECAY} for name, param in reversed(named)]
        self.optimizer = torch.optim.AdamW(groups, lr=RATE)
        return self.optimizer


class Losses(TrainerCallback):
    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.losses[state.global_step] = logs["loss"]


@dataclass
class Run:
    folder: Path
    trainer: Trainer
    losses: dict[int, float] = field(default_factory=dict)

    def checkpoint(self, step: int) -> Path:
        return self.folder / f"checkpoint-{step}"


def train(
    folder: Path,
    arch: str = "llama",
    *,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    kind: type[Trainer] = Trainer,
    prepare: Callable[[Any], None] = lambda model: None,
    resume_from: Path | None = None,
    steps: int = 4,
    layers: int = 2,
    batch: int = 2,
    rows: int = 64,
    bf16: bool = False,
) -> Run:
    """Train ``steps`` steps, saving every second one; ``bf16`` computes in it, by autocast."""
    args = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=steps,
        save_strategy="steps",
        save_steps=2,
        logging_steps=1,
        per_device_train_batch_size=batch,
        bf16=bf16,
        learning_rate=RATE,
        weight_decay=DECAY,
        lr_scheduler_type="linear",
        seed=0,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    set_seed(0)
    model = build(arch, layers, tied).to(dtype)
    prepare(model)
    losses = Losses()
    trainer = kind(
        model=model, args=args, train_dataset=Tokens(rows), data_collator=default_data_collator, callbacks=[losses]
    )
    trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
    return Run(folder, trainer, losses.losses)


def live_states(run: Run) -> dict[str, dict[str, torch.Tensor]]:
    """Return what the optimizer of a finished run holds, by the names of the live params."""
    optimizer = run.trainer.optimizer
    return {
        name: optimizer.state[param] for name, param in run.trainer.model.named_parameters() if param in optimizer.state
    }


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
