"""A Trainer with `LayerGroupsMixin` that trains, and resumes what it saved: a program for real/forkserver.py.

Each of its two functions trains two steps, and a third in a resume.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

from llmtailor.training import LayerGroupsMixin

RATE, DECAY = 5e-3, 0.1


class LayerTrainer(LayerGroupsMixin, Trainer):
    pass


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, at):
        tokens = (at + torch.arange(8)) % 61
        return {"input_ids": tokens, "labels": tokens}


def start(folder, stage, resume=None, steps=2):
    auto = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    config = {
        **auto,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "zero_force_ds_cpu_optimizer": False,
    }
    args = TrainingArguments(
        output_dir=str(folder / f"stage{stage}"),
        deepspeed=config if stage else None,
        bf16=bool(stage),
        use_cpu=True,
        per_device_train_batch_size=2,
        max_steps=steps,
        save_strategy="steps",
        save_steps=1,
        report_to=[],
        seed=0,
        learning_rate=RATE,
        weight_decay=DECAY,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    # Loaded while the arguments exist, a model is partitioned at once under ZeRO-3: all its params are empty.
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    assert (stage == 3) == all(param.numel() == 0 for param in model.parameters())
    trainer = LayerTrainer(model=model, args=args, train_dataset=Tokens(), data_collator=default_data_collator)
    trainer.train(resume_from_checkpoint=resume)


def plain(folder):
    start(folder, 0)
    start(folder, 0, str(folder / "stage0/checkpoint-2"), 3)


def main(folder: Path) -> None:
    import deepspeed

    deepspeed.init_distributed("gloo")
    for stage in (3, 2):
        start(folder, stage)
        start(folder, stage, str(folder / f"stage{stage}/checkpoint-2"), 3)
    torch.distributed.barrier()
