"""Run trainings one after another in one process group: ``torchrun train.py SPECS.json FOLDER``, or see forkserver.py.

The Trainer, DeepSpeed and the models are the stock ones. Importing them takes far longer than a tiny training,
hence the batch. Each run leaves ``<FOLDER>/<name>/result.json``, written last.
"""

from __future__ import annotations

import fnmatch
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator, set_seed

from llmtailor.saving import AttestResume
from trainings.echo import Echo
from trainings.forkserver import die_with_parent
from trainings.models import VOCAB, add_extras, build, layer_groups, tokenizer
from trainings.spec import Spec, from_json

RATE, DECAY = 5e-3, 0.1


class Tokens(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Arithmetic progressions, so that there is something to learn; the same for every run and rank."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        tokens = (i + torch.arange(12) * (1 + i % 3)) % VOCAB
        return {"input_ids": tokens, "labels": tokens}


class LayerGroups(Trainer):  # type: ignore[misc]
    """The Trainer ignores ``optimizers=`` under DeepSpeed; only this override changes the groups."""

    optimizer: Any

    def create_optimizer(self, model: Any = None) -> Any:
        if self.optimizer is None:
            model = model or self.model
            decayed = set(self.get_decay_parameter_names(model))
            self.optimizer = torch.optim.AdamW(layer_groups(model, decayed, DECAY), lr=RATE)
        return self.optimizer


class Losses(TrainerCallback):  # type: ignore[misc]
    """What this process logged; the Trainer's own history also has the steps before a resume."""

    def __init__(self) -> None:
        self.logs: dict[int, dict[str, float]] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.logs[state.global_step] = dict(logs)


def deepspeed_config(spec: Spec) -> dict[str, Any]:
    auto = dict.fromkeys(
        ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
        "auto",
    )
    if not spec.clipping:
        del auto["gradient_clipping"]
    zero: dict[str, Any] = {"stage": spec.stage}
    if spec.stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = spec.gather
    switches = {
        "round_robin_gradients": spec.round_robin,
        "parameter_alignment": spec.parameter_alignment,
        "elastic_checkpoint": spec.elastic,
    }
    zero |= {name: True for name, on in switches.items() if on}
    if spec.sub_group_size:
        zero["sub_group_size"] = spec.sub_group_size
    if spec.offload or spec.optimizer == "cpu_adam":
        zero["offload_optimizer"] = {"device": "cpu"}
    config: dict[str, Any] = {**auto, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
    config["zero_force_ds_cpu_optimizer"] = False
    if spec.grad_accum_dtype:
        config["data_types"] = {"grad_accum_dtype": spec.grad_accum_dtype}
    if spec.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if spec.dtype == "fp16":  # so high a first scale makes some steps overflow, and be skipped
        config["fp16"] = {"enabled": True, "initial_scale_power": 18, "hysteresis": 1}
    if spec.optimizer != "hf":
        torch_adam = {"torch_adam": True} if spec.optimizer == "ds_adamw" else {}
        config["optimizer"] = {"type": "AdamW", "params": {"lr": RATE, "weight_decay": DECAY, **torch_adam}}
    if spec.scheduler == "ds":
        config["scheduler"] = {
            "type": "WarmupDecayLR",
            "params": {"warmup_max_lr": RATE, "warmup_num_steps": "auto", "total_num_steps": "auto"},
        }
    return config


def arguments(spec: Spec, folder: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder / spec.name),
        deepspeed=deepspeed_config(spec),
        bf16=spec.dtype == "bf16",
        fp16=spec.dtype == "fp16",
        use_cpu=True,
        per_device_train_batch_size=spec.per_device_batch,
        max_steps=spec.steps,
        save_strategy="steps",
        save_steps=spec.save_steps,
        logging_steps=1,
        lr_scheduler_type="linear",
        learning_rate=RATE,
        weight_decay=DECAY,
        seed=spec.seed,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def train(spec: Spec, folder: Path) -> None:
    began = time.monotonic()
    args = arguments(spec, folder)
    set_seed(spec.seed)
    model = build(spec.arch, spec.layers, spec.tied)
    if spec.extras:
        add_extras(model)
    for name, param in model.named_parameters():
        if any(fnmatch.fnmatch(name, glob) for glob in spec.frozen):
            param.requires_grad = False
    if spec.max_shard_size:
        save = model.save_pretrained
        model.save_pretrained = lambda *a, **kw: save(*a, **kw, max_shard_size=spec.max_shard_size)
    kind = LayerGroups if spec.groups == "layer" else Trainer
    losses = Losses()
    trainer = kind(
        model=model,
        args=args,
        train_dataset=Tokens(),
        data_collator=default_data_collator,
        processing_class=tokenizer() if spec.tokenizer else None,
        callbacks=[losses],
    )
    if spec.echo:
        trainer.add_callback(Echo(trainer, folder / spec.name))
    trainer.add_callback(AttestResume(on_mismatch="stop"))
    trainer.train(resume_from_checkpoint=str(folder / spec.resume_from) if spec.resume_from else None)
    if args.process_index == 0:
        (folder / spec.name / "result.json").write_text(json.dumps(losses.logs, indent=1))
        told = {step: log["loss"] for step, log in losses.logs.items()}
        print(f"=== {spec.name}: done in {time.monotonic() - began:.1f} s, losses {told}", flush=True)


def main(specs_file: Path, folder: Path) -> None:
    get_accelerator().is_fp16_supported = lambda: True  # else DeepSpeed refuses fp16 on most CPUs
    for spec in map(from_json, json.loads(specs_file.read_text())):
        print(f"=== {spec.name}", flush=True)
        train(spec, folder)
        gc.collect()  # engines are full of cycles
        gc.freeze()  # what is left are modules: not to be searched again, which takes as long as the training
    torch.distributed.barrier()


if __name__ == "__main__":
    die_with_parent()  # torchrun puts us out of reach of its process group
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it compiles for a minute; gloo will do
    main(*map(Path, sys.argv[1:]))
    sys.stdout.flush()
    os._exit(0)  # no teardown of the interpreter: a gloo thread that wakes up in it aborts the process now and then
