"""train.py with what it has no word for: DDP without DeepSpeed (stage 0), LoRA and dropout.

Of a Spec, ``arch`` may end in ``+lora`` (the head is trained whole) or ``+dropout``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from trainings import trainer as train
from trainings.spec import Spec

LORA = LoraConfig(r=3, target_modules=["q_proj", "v_proj", "up_proj"], modules_to_save=["lm_head"])
stock_build, stock_config = train.build, train.deepspeed_config


def build(arch: str, layers: int, tied: bool) -> Any:
    arch, _, more = arch.partition("+")
    model = stock_build(arch, layers, tied)
    if more == "dropout":
        model.register_forward_pre_hook(part_ways)
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.2
    if more == "lora":
        return get_peft_model(model, LORA)
    return model


def part_ways(*_: object) -> None:
    """Draw as many random numbers as the rank says: all ranks start from the same seed."""
    torch.rand(int(os.environ["RANK"]))


def deepspeed_config(spec: Spec) -> dict[str, Any] | None:
    return stock_config(spec) if spec.stage else None


def main(specs_file: Path, folder: Path) -> None:
    train.build, train.deepspeed_config = build, deepspeed_config  # type: ignore[assignment]
    train.main(specs_file, folder)
