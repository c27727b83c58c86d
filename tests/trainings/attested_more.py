"""Resumes of the campaign: faults inside the Trainer and Lightning before their first step, and clean resumes.

A callback in the place of `AttestResume` gets the training when it has been loaded, and ends it.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.strategies import DeepSpeedStrategy
from transformers import TrainerCallback

from llmtailor.loaders.loader import LOADERS
from llmtailor.saving.api import training_of
from llmtailor.saving.attesting import parts_of
from llmtailor.saving.callbacks import find_trainer
from llmtailor.saving.training import Held
from trainings import lightning
from trainings import trainer as stock
from trainings.attested import Resumed, attested, run_case
from trainings.spec import from_json

stock_attest = stock.AttestResume


class Done(Exception):
    """The training has served its purpose."""


class Here(Resumed):
    """A training that a trainer has loaded."""

    def __init__(self, given: dict[str, Any], held: Held, checkpoint: Path) -> None:
        self.given, self.checkpoint = given, checkpoint
        self.engine, self.model, self.optimizer = held.engine, held.model, held.optimizer
        self.scheduler: Any = held.scheduler
        self.training = training_of(held, LOADERS["trainer"])


Act = Callable[[Here], None]


class InTrainer(TrainerCallback):
    def __init__(self, checkpoint: Path, act: Act) -> None:
        self.checkpoint, self.act = checkpoint, act

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        trainer = find_trainer(self)
        self.act(Here({"trainer": trainer}, parts_of(trainer), self.checkpoint))
        raise Done


class InLightning(pl.Callback):  # type: ignore[misc]
    def __init__(self, checkpoint: Path, act: Act) -> None:
        self.checkpoint, self.act = checkpoint, act

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        is_deepspeed, scheduler = (
            isinstance(trainer.strategy, DeepSpeedStrategy),
            trainer.lr_scheduler_configs[0].scheduler,
        )
        if is_deepspeed:
            held = Held(trainer.strategy.deepspeed_engine, scheduler=scheduler)
        else:
            held = Held(None, module, trainer.optimizers[0], scheduler)
        given = {
            key: one
            for key, one in {key: getattr(held, key) for key in ("engine", "model", "optimizer", "scheduler")}.items()
            if one is not None
        } | {"step": trainer.global_step}
        self.act(Here(given, held, self.checkpoint))
        raise Done


def resume(case: dict[str, Any], checkpoint: Path, act: Act, folder: Path) -> None:
    """Let a trainer load a checkpoint, then act on the training, and end it."""
    size = os.environ["WORLD_SIZE"]
    try:
        if case["by"] == "lightning":
            lightning.AttestResume = lambda **_: InLightning(checkpoint, act)  # type: ignore[assignment,misc]
            lightning.run(from_json(case["spec"]).resumed(checkpoint, "again"), folder)
        else:
            stock.AttestResume = lambda **_: InTrainer(checkpoint, act)  # type: ignore[assignment,misc]
            stock.run(replace(from_json(case["spec"]), name="again", resume_from=str(checkpoint)), folder)
    except Done:
        pass
    finally:
        stock.AttestResume = stock_attest  # type: ignore[misc]
        os.environ["WORLD_SIZE"] = size
        gc.collect()


def run_faults(case: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    newer, before = (Path(path) for path in case["checkpoints"])
    if case["by"] == "lora":
        straight = from_json(case["spec"])
        stock.run(straight, folder)
        dist.barrier()
        newer, before = (folder / straight.name / f"checkpoint-{step}" for step in (4, 2))
    older: dict[Any, Any] = {}
    found: list[dict[str, Any]] = []

    def act(here: Here) -> None:
        found.extend(attested(here, older, case["faults"]))

    resume(case, before, lambda here: older.update(here.values()), folder)
    resume(case, newer, act, folder)
    return found


def run_clean(case: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    paths = [Path(path) for path in case["clean"]]
    if case["by"] == "loop":
        resumed = Resumed(case["spec"], paths[0].parent, 4)
        for path in paths:
            resumed.load(path)
            resumed.checkpoint = path
            found.append(resumed.attest("full" if len(found) % 3 == 0 else "sample").to_json())
    else:
        for path in paths:
            resume(case, path, lambda here: found.append(here.attest().to_json()), folder)
    return found


def main(plan: Path, folder: Path) -> None:
    deepspeed.init_distributed("gloo")
    cases: Sequence[dict[str, Any]] = json.loads(plan.read_text())
    for number, case in enumerate(cases):
        if "clean" in case:
            found = run_clean(case, folder)
        elif case["by"] == "loop":
            found = run_case(case, Path(case["root"]))
        else:
            found = run_faults(case, folder)
        if dist.get_rank() == 0:
            (folder / f"found-{number}.json").write_text(json.dumps(found))
            print(f"=== {case['name']}: {len(found)}", flush=True)
        gc.collect()
    dist.barrier()
