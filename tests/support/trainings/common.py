"""What trainings share: data, models by a spec, the Trainer's arguments, losses; and how ranks train one after another.

The Trainer, DeepSpeed and the models are the stock ones.
"""

from __future__ import annotations

import fnmatch
import gc
import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainingArguments, set_seed

from trainings.models import VOCAB, add_extras, build
from trainings.spec import Training, from_json

RATE, DECAY = 5e-3, 0.1
MOMENTS = ("exp_avg", "exp_avg_sq")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LORA: dict[str, Any] = {"r": 3, "target_modules": ["q_proj", "v_proj", "up_proj"], "modules_to_save": ["lm_head"]}
Losses = Mapping[int, object]
"""step -> the loss, or what the Trainer logged with it"""


class Tokens(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Arithmetic progressions, so that there is something to learn; the same for every run and rank."""

    def __init__(self, rows: int = 256) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        tokens = (i + torch.arange(12) * (1 + i % 3)) % VOCAB
        return {"input_ids": tokens, "labels": tokens}


def batch(first: int, size: int) -> dict[str, torch.Tensor]:
    """Some rows of the data, for a loop."""
    tokens = torch.stack([Tokens()[at]["input_ids"] for at in range(first, first + size)])
    return {"input_ids": tokens, "labels": tokens}


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    """Six steps on the CPU that nobody saves, or what ``changes`` says."""
    usual: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": 6,
        "save_strategy": "no",
        "logging_steps": 1,
        "learning_rate": RATE,
        "weight_decay": DECAY,
        "lr_scheduler_type": "linear",
        "seed": 0,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**{**usual, **changes})


def arguments_of(spec: Training, folder: Path, **changes: Any) -> TrainingArguments:
    """The arguments with which the Trainer does what a spec says."""
    own = {
        "per_device_train_batch_size": spec.per_device_batch,
        "max_steps": spec.steps,
        "save_strategy": "steps",
        "save_steps": spec.save_steps,
        "seed": spec.seed,
    }
    return arguments(folder / spec.name, **{**own, **changes})


def new_model(spec: Any) -> Any:
    """The model of a `Spec` or `Fsdp`, in fp32."""
    set_seed(spec.seed)
    arch, _, more = getattr(spec, "arch", "llama").partition("+")
    model = build(arch, spec.layers, spec.tied)
    if more:
        import peft

        config = peft.LoraConfig(**LORA)
        model = peft.get_peft_model(model, config, "default" if more == "lora" else "policy")
        if more == "loras":
            model.add_adapter("reference", peft.LoraConfig(**{**LORA, "modules_to_save": None}))
            model.set_adapter("policy")
    if getattr(spec, "extras", False):
        add_extras(model)
    for name, param in model.named_parameters():
        if any(fnmatch.fnmatch(name, glob) for glob in spec.frozen):
            param.requires_grad = False
    if getattr(spec, "dropout", 0.0):
        drop(model, spec.dropout)
    return model


def drop(model: Any, dropout: float) -> None:
    """Let random numbers matter, and differ between the ranks, which all start from the same seed."""
    model.register_forward_pre_hook(draw)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = dropout


def draw(*_: object) -> None:
    torch.rand(int(os.environ.get("RANK", "0")))


class Logs(TrainerCallback):  # type: ignore[misc]
    """What this process logged; the Trainer's own history also has the steps before a resume."""

    def __init__(self) -> None:
        self.logs: dict[int, dict[str, float]] = {}

    @property
    def losses(self) -> dict[int, float]:
        return {step: log["loss"] for step, log in self.logs.items()}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.logs[state.global_step] = dict(logs)


def checkpoint_of(spec: Training, folder: Path) -> str | None:
    """The checkpoint that a training continues."""
    return str(folder / spec.resume_from) if spec.resume_from else None


def die() -> None:
    """Kill all ranks, once each has come here."""
    torch.distributed.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def train_each(specs_file: Path, folder: Path, run: Callable[[Any, Path], Losses]) -> None:
    """Train one spec after another in this group of ranks; each leaves ``<folder>/<name>/result.json``, written last.

    Importing what trains takes far longer than a tiny training.
    """
    import deepspeed

    deepspeed.init_distributed("gloo")
    for spec in map(from_json, json.loads(specs_file.read_text())):
        print(f"=== {spec.name}", flush=True)
        losses = run(spec, folder)
        if torch.distributed.get_rank() == 0:
            (folder / spec.name).mkdir(exist_ok=True)
            (folder / spec.name / "result.json").write_text(json.dumps(losses))
            print(f"=== {spec.name}: {losses}", flush=True)
        gc.collect()  # engines are full of cycles
        gc.freeze()  # what is left are modules: not to be searched again, which takes as long as the training
    torch.distributed.barrier()
