"""Trainings without a Trainer, on CPU ranks: a loop around a DeepSpeed engine, and one around accelerate's Accelerator.

What saves and loads is stock. accelerate restores the random numbers of each rank, so its loop draws its data from
them; an engine's checkpoint has none, so that loop's data follow from the step.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType

import llmtailor
from llmtailor.saving import saver_for
from trainings.common import DECAY, RATE, Losses, batch, checkpoint_of, new_model, train_each
from trainings.models import VOCAB
from trainings.optimizers import IN_LOOPS
from trainings.spec import DEEPSPEEDS_MUON, Loop

FSDP = {
    "fsdp_version": 2,
    "auto_wrap_policy": "transformer_based_wrap",
    "transformer_cls_names_to_wrap": ["LlamaDecoderLayer"],
    "state_dict_type": "SHARDED_STATE_DICT",
}
CONFIG = "config.json"


def engine_config(spec: Loop) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": spec.per_device_batch,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": spec.stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": spec.dtype == "bf16"},
    }
    if spec.scheduler == "deepspeed":
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": RATE, "warmup_num_steps": 10}}
    if spec.optimizer == DEEPSPEEDS_MUON:
        torch._dynamo.config.disable = True  # else it compiles for minutes
        config["optimizer"] = {"type": "Muon", "params": {"lr": RATE, "momentum": 0.95, "weight_decay": DECAY}}
        config["zero_optimization"]["reduce_scatter"] = False  # which Muon asks for
    if spec.tp > 1:
        config["tensor_parallel"] = {"autotp_size": spec.tp}
        if spec.arch == "phi3":  # DeepSpeed knows no plan for it: gate and up are cut each, the attention is not
            fused = {"partition_type": "column", "shape": [2, -1], "partition_dim": 0}
            specs = [{"patterns": [r".*\.gate_up_proj\.weight$"], **fused}]
            specs += [{"patterns": [r".*\.down_proj\.weight$"], "partition_type": "row"}]
            config["tensor_parallel"]["partition_config"] = {"use_default_specs": False, "layer_specs": specs}
        if spec.tied:
            config["tensor_parallel"]["vocab_parallel_lm_head"] = True
    if spec.load_universal:
        config["checkpoint"] = {"load_universal": True}
    if spec.offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    return config


def new_optimizer(spec: Loop, model: Any) -> Any:
    if spec.optimizer == DEEPSPEEDS_MUON:
        return None
    if spec.optimizer:
        make = IN_LOOPS[spec.optimizer].make
        assert make is not None
        return make(model)
    params = model.named_parameters() if spec.named else model.parameters()
    return torch.optim.AdamW(params, lr=RATE, weight_decay=DECAY)


def new_scheduler(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 40)


class EngineLoop:
    def __init__(self, spec: Loop) -> None:
        self.spec, model = spec, new_model(spec)
        optimizer = new_optimizer(spec, model)
        scheduler = new_scheduler(optimizer) if spec.scheduler == "torch" else None
        found = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=scheduler, config=engine_config(spec)
        )
        self.engine = found[0]
        self.epoch = 0
        self.saver: Any = None

    def step(self, number: int) -> torch.Tensor:
        size, tp = self.spec.per_device_batch, self.spec.tp
        loss = self.engine(**batch(((number - 1) * dist.get_world_size() + dist.get_rank()) // tp * size, size)).loss
        self.engine.backward(loss)
        self.engine.step()
        self.epoch = number
        return loss.detach()

    def save(self, folder: Path) -> None:
        if self.spec.saver:
            if self.saver is None:
                self.saver = saver_for(folder.parent, engine=self.engine, policy=self.spec.saver)
                self.saver.start(0)
            self.saver.save(self.epoch).wait()
            return
        self.engine.save_checkpoint(str(folder), self.spec.tag or None, client_state={"epoch": self.epoch})

    def load(self, folder: str) -> int:
        path, client_state = self.engine.load_checkpoint(folder)
        assert path is not None
        self.epoch = client_state.get("epoch", self.engine.global_steps)  # the saver does not know it
        assert self.epoch == self.engine.global_steps
        return self.epoch


class Meter:
    """An object of the loop's own, which accelerate saves along."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "self": type(self)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.seen = saved["seen"]


class AccelerateLoop:
    def __init__(self, spec: Loop) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        self.spec = spec
        plugin = DeepSpeedPlugin(hf_ds_config=engine_config(spec)) if spec.stage else None
        os.environ["ACCELERATE_USE_DEEPSPEED"] = str(bool(spec.stage)).lower()  # the plugin of a run before has set it
        os.environ["ACCELERATE_USE_FSDP"] = str(spec.fsdp).lower()
        PartialState(cpu=True)  # else it looks for an accelerator, and each rank would be on its own
        if spec.fsdp:  # which accelerate knows on accelerators only
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
        fsdp = FullyShardedDataParallelPlugin(**FSDP) if spec.fsdp else None
        is_cpu = not (spec.stage or spec.fsdp)
        self.accelerator = Accelerator(cpu=is_cpu, deepspeed_plugin=plugin, fsdp_plugin=fsdp)
        assert self.accelerator.num_processes == dist.get_world_size()
        model = new_model(spec)
        optimizer = new_optimizer(spec, model)
        made = [model, optimizer] + ([new_scheduler(optimizer)] if spec.scheduler else [])
        self.model, self.optimizer, *schedulers = self.accelerator.prepare(*made)
        self.schedulers, self.meter = schedulers, Meter()
        self.saver: Any = None
        if spec.objects:
            self.accelerator.register_for_checkpointing(self.meter)
        for draw in (random.seed, np.random.seed, torch.manual_seed):
            draw(100 + dist.get_rank())

    def step(self, number: int) -> torch.Tensor:
        shift = random.randrange(VOCAB) + int(np.random.randint(VOCAB))
        tokens = (torch.randint(VOCAB, (self.spec.per_device_batch, 12)) + shift) % VOCAB
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.accelerator.backward(loss)
        self.optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()
        self.optimizer.zero_grad()
        self.meter.seen += 1
        return loss.detach()

    def save(self, folder: Path) -> None:
        if self.spec.saver:
            if self.saver is None:
                self.saver = saver_for(folder.parent, accelerator=self.accelerator, policy=self.spec.saver)
                self.saver.start(0)
            self.saver.save(self.meter.seen).wait()
            return
        self.accelerator.save_state(str(folder))
        if dist.get_rank() == 0 and not (folder / CONFIG).exists():
            self.accelerator.unwrap_model(self.model).config.save_pretrained(folder)
        dist.barrier()

    def load(self, folder: str) -> int:
        self.accelerator.load_state(folder)
        return self.meter.seen if self.spec.objects else self.spec.save_steps


def run(spec: Loop, folder: Path) -> Losses:
    loop = EngineLoop(spec) if spec.client == "deepspeed" else AccelerateLoop(spec)
    checkpoint = checkpoint_of(spec, folder)
    done = loop.load(checkpoint) if checkpoint else 0
    if checkpoint and spec.tp == 1:
        held = {"engine": loop.engine} if isinstance(loop, EngineLoop) else {"accelerator": loop.accelerator}
        llmtailor.attest(checkpoint, **held, on_mismatch="stop")
    losses = {}
    for number in range(done + 1, spec.steps + 1):
        loss = loop.step(number).float()
        dist.all_reduce(loss)
        losses[number] = float(loss / dist.get_world_size())
        if number % spec.save_steps == 0:
            loop.save(folder / spec.name / f"checkpoint-{number}")
    return losses


def main(specs_file: Path, folder: Path) -> None:
    train_each(specs_file, folder, run)
