"""The stock Trainer, under DeepSpeed or without."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from deepspeed.accelerator import get_accelerator
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from llmtailor.param_groups import LayerGroupsMixin
from llmtailor.saving import AttestResume
from trainings.common import (
    DECAY,
    DTYPES,
    RATE,
    Logs,
    Losses,
    Tokens,
    arguments_of,
    checkpoint_of,
    new_model,
    train_each,
)
from trainings.echo import Echo
from trainings.models import layer_groups, tokenizer
from trainings.spec import Spec


class LayerGroups(Trainer):  # type: ignore[misc]
    """The Trainer ignores ``optimizers=`` under DeepSpeed; only this override changes the groups."""

    optimizer: Any

    def create_optimizer(self, model: Any = None) -> Any:
        if self.optimizer is None:
            model = model or self.model
            decayed = set(self.get_decay_parameter_names(model))
            self.optimizer = torch.optim.AdamW(layer_groups(model, decayed, DECAY), lr=RATE)
        return self.optimizer


class LayerTrainer(LayerGroupsMixin, Trainer):  # type: ignore[misc]
    pass


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
    if spec.load_universal:
        config["checkpoint"] = {"load_universal": True}
    return config


def arguments(spec: Spec, folder: Path, **changes: Any) -> TrainingArguments:
    if not spec.stage:  # forget that a training before this one used DeepSpeed
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
        unset_hf_deepspeed_config()
        return arguments_of(spec, folder, **changes)
    get_accelerator().is_fp16_supported = lambda: True  # else DeepSpeed refuses fp16 on most CPUs
    mixed = {"bf16": spec.dtype == "bf16", "fp16": spec.dtype == "fp16"}
    return arguments_of(spec, folder, deepspeed=deepspeed_config(spec), **{**mixed, **changes})


def new_trainer(spec: Spec, args: TrainingArguments, model: Any, kind: type[Trainer] | None = None) -> Any:
    """A Trainer for the model, with `Logs` as its first callback."""
    if not spec.stage:
        model = model.to(DTYPES[spec.dtype])
    if spec.max_shard_size:
        save = model.save_pretrained
        model.save_pretrained = lambda *a, **kw: save(*a, **kw, max_shard_size=spec.max_shard_size)
    return (kind or kind_of(spec))(
        model=model,
        args=args,
        train_dataset=Tokens(),
        eval_dataset=Tokens(6),
        data_collator=default_data_collator,
        processing_class=tokenizer() if spec.tokenizer else None,
    )


def kind_of(spec: Spec) -> type[Trainer]:
    return {"default": Trainer, "layer": LayerGroups, "mixin": LayerTrainer}[spec.groups]


def loaded(model: Any, stage: int, place: Path) -> Any:
    """The model as `from_pretrained` loads it under a DeepSpeed config: with ZeRO-3 all its params are empty."""
    model.save_pretrained(place)  # on rank 0
    torch.distributed.barrier()
    found = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    assert (stage == 3) == all(param.numel() == 0 for param in found.parameters())
    return found


def run(spec: Spec, folder: Path) -> Losses:
    args, logs = arguments(spec, folder), Logs()
    model = new_model(spec)
    if spec.groups == "mixin":
        model = loaded(model, spec.stage, folder / f"model-of-{spec.name}")
    trainer = new_trainer(spec, args, model)
    trainer.add_callback(logs)
    if spec.echo:
        trainer.add_callback(Echo(trainer, folder / spec.name))
    trainer.add_callback(AttestResume(on_mismatch="stop"))
    trainer.train(resume_from_checkpoint=checkpoint_of(spec, folder))
    return logs.logs


def main(specs_file: Path, folder: Path) -> None:
    train_each(specs_file, folder, run)
