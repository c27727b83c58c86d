"""The Trainer with the saver attached.

While it trains, a job writes down the truth about each save without the saver's code: a checkpoint of the Trainer's own
when it would have saved and, without DeepSpeed, what the processes hold.
"""

from __future__ import annotations

import fnmatch
import json
import logging
import os
import resource
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
from transformers import PrinterCallback, Trainer, TrainerCallback

from helpers.composing import compose
from llmtailor.background.snapshot import Snapshot, StepBarrier
from llmtailor.copying import streams
from llmtailor.saving import attach
from trainings.common import MOMENTS, Losses, new_model, train_each
from trainings.spec import Job
from trainings.trainer import LayerGroups, arguments, kind_of, new_trainer


class Messages(logging.Handler):
    """What the saver said to the user."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(f"{record.levelname}: {record.getMessage()}")


class Disturbance(TrainerCallback):  # type: ignore[misc]
    """Something that goes wrong. ``{"what": "full", "step": 4, "rank": 1}``: that rank's disk is full at a save;
    ``frozen``: a frozen param changes before a save; ``teacher``: frozen params follow right after each step of the
    optimizer; ``held``: the disk takes two steps for each write."""

    LIMIT_BYTES = 4096

    def __init__(self, what: dict[str, Any], model: Any, folder: Path, rank: int) -> None:
        self.what = {"step": -1, **what}
        self.model = model
        self.write_all = streams.write_all
        self.step, self.has_stepped = (0, 1), threading.Condition()
        if what["what"] == "held":
            streams.write_all = self.write_held

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with self.has_stepped:
            self.step = (state.global_step, state.max_steps)
            self.has_stepped.notify_all()
        if state.global_step != self.what["step"]:
            return
        if self.what["what"] == "full" and args.process_index == self.what["rank"]:
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.LIMIT_BYTES, hard))
        if self.what["what"] == "frozen":
            self.change(2, args.process_index)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.what["what"] == "teacher":
            self.change(1.01, args.process_index)

    def change(self, factor: float, rank: int) -> None:
        for name, param in self.model.named_parameters():
            if not param.requires_grad and fnmatch.fnmatch(name, self.what["param"]):
                zero3 = hasattr(param, "ds_id")
                with torch.no_grad(), deepspeed.zero.GatheredParameters([param], modifier_rank=0, enabled=zero3):
                    if not zero3 or rank == 0:
                        param.mul_(factor)

    def write_held(self, fd: int, data: bytes | memoryview) -> None:
        with self.has_stepped:
            until = min(self.step[0] + 2, self.step[1])
            assert self.has_stepped.wait_for(lambda: self.step[0] >= until, 60)
        self.write_all(fd, data)

    def end(self) -> None:
        streams.write_all = self.write_all

    def relieve(self) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def watched(kind: type[Trainer], job: Job, folder: Path) -> type[Trainer]:
    """A Trainer that writes down the truth where it would save."""

    class Watched(kind):  # type: ignore[misc,valid-type]
        disturbance: Disturbance | None = None
        _in_stock = False
        _seen = 0

        def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
            super()._maybe_log_save_evaluate(*args, **kwargs)
            if self.disturbance:
                self.disturbance.relieve()
            step = self.state.global_step
            if job.truth and step > self._seen and (step % (job.every or 1) == 0 or step == self.state.max_steps):
                self._seen = step
                shutil.rmtree(
                    folder / "stock" / f"checkpoint-{step}", ignore_errors=True
                )  # of what the job goes on from
                torch.distributed.barrier()
                if not self.is_deepspeed_enabled:
                    write_truth(self, folder / "truth" / f"{step}.pt")
                self._in_stock = True
                self._save_checkpoint(self.model, None)
                self._in_stock = False

        def _get_output_dir(self, trial: Any = None) -> str:
            return str(folder / "stock") if self._in_stock else super()._get_output_dir(trial)

    return Watched


def write_truth(trainer: Any, path: Path) -> None:
    """Write masters, moments, steps, frozen params and buffers of a training without DeepSpeed, whole on each rank."""
    model, optimizer = trainer.accelerator.unwrap_model(trainer.model), inner(trainer.optimizer)
    names = {param: name for name, param in model.named_parameters()}
    held = {name: optimizer.state[param] for param, name in names.items() if param.requires_grad}
    truth: dict[str, Any] = {
        kind: {name: state[kind].clone() for name, state in held.items()} for kind in ("step", *MOMENTS)
    }
    weights = {name: param.detach().clone() for param, name in names.items()}
    truth["master"] = {name: weights[name] for name in held}
    truth["frozen"] = {name: weight for name, weight in weights.items() if name not in held}
    truth["buffer"] = {name: buffer.clone() for name, buffer in model.named_buffers() if name in model.state_dict()}
    truth["order"] = [names[param] for group in optimizer.param_groups for param in group["params"]]
    if trainer.args.process_index == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(truth, path)


def inner(optimizer: Any) -> Any:
    return optimizer.optimizer if hasattr(optimizer, "accelerator_state") else optimizer


def add_frozen(model: Any) -> None:
    """Give a layer what the config does not describe: a frozen module with buffers."""
    layer = next(module for name, module in model.named_modules() if name.endswith(".layers.0"))
    layer.added = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4)).requires_grad_(False)


class TensorRates(LayerGroups):  # type: ignore[misc]
    """Rates and betas as tensors, as torch asks for in captured graphs."""

    def create_optimizer(self, model: Any = None) -> Any:
        for group in super().create_optimizer(model).param_groups:
            group["lr"], group["betas"] = torch.tensor(group["lr"]), tuple(map(torch.tensor, group["betas"]))
        return self.optimizer


def prepare(job: Job, root: Path, rank: int) -> str | None:
    """Copy what the job goes on from, and compose its checkpoint; return that."""
    folder = root / job.name
    if rank == 0 and job.goes_on:
        for kept in ("partial", "stock", "truth"):
            if kept == "partial" or (root / job.goes_on / kept).exists():
                shutil.copytree(root / job.goes_on / kept, folder / kept)
        if job.at is not None:
            compose(folder, job.at, torch.distributed.get_world_size())
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    resume = folder / f"checkpoint-{job.at}" if job.at is not None else job.resume_from and root / job.resume_from
    return str(resume) if resume else None


def options_of(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """Return the options of `attach`. Each rank is a node of its own if there are staging folders."""
    os.environ.pop("GROUP_RANK", None)
    options = dict(job.options or {})
    if "staging_dir" in options:
        os.environ["GROUP_RANK"] = str(rank)
        options["staging_dir"] = str(folder / options["staging_dir"] / str(rank))
    return options


def run(job: Job, root: Path) -> Losses:
    folder = root / job.name
    args = arguments(job, root, **{"save_strategy": "no", **(job.arguments or {})})
    rank = args.process_index
    resume = prepare(job, root, rank)
    model = new_model(job)
    if job.extras:
        add_frozen(model)
    kind = TensorRates if job.extras and job.groups == "layer" else kind_of(job)
    trainer = new_trainer(job, args, model, watched(kind, job, folder))
    trainer.remove_callback(PrinterCallback)  # it can't print where the disk is full
    if job.disturb:
        trainer.disturbance = Disturbance(job.disturb, model, folder, rank)
        trainer.add_callback(trainer.disturbance)
    messages = Messages()
    logger = logging.getLogger("llmtailor.saving")
    logger.addHandler(messages)
    if job.policy is not None:
        attach(trainer, policy=job.policy, save_steps=job.every, **options_of(job, folder, rank))
    trainer.train(resume_from_checkpoint=resume)
    logger.removeHandler(messages)
    if trainer.disturbance:
        trainer.disturbance.end()
    log = trainer.state.log_history
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"result-{rank}.json").write_text(json.dumps({"log": log, "messages": messages.told}, indent=1))
    return {line["step"]: line for line in log if "loss" in line}


SLOW_TENSORS = 10
"""The first of a save, which are copied slowly; the others have to wait for them."""


def copy_late() -> None:
    """Copy so late that training would overwrite states before they are copied, if it did not wait: not before
    somebody waits for the copies; if nobody does, the save fails."""
    arm, copy, wait, may_copy = StepBarrier.arm, Snapshot._copy, Snapshot.wait, threading.Event()

    def arming(*args: Any) -> None:
        may_copy.clear()
        arm(*args)

    def copying(snapshot: Snapshot, number: int) -> None:
        if number in snapshot._order[:SLOW_TENSORS]:
            assert may_copy.wait(60)
            time.sleep(0.01)
        copy(snapshot, number)

    def waiting(*args: Any) -> None:
        may_copy.set()
        wait(*args)

    StepBarrier.arm, Snapshot._copy, Snapshot.wait = arming, copying, waiting  # type: ignore[method-assign]


def main(specs_file: Path, root: Path) -> None:
    copy_late()
    train_each(specs_file, root, run)
