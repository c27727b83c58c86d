"""An ordinary training script: a tiny Llama, the unpatched Hugging Face Trainer, DeepSpeed ZeRO in bf16, CPU ranks.

Two of its lines are llmtailor's: they make the Trainer save partial checkpoints. Without --save they are not run.

    DS_ACCELERATOR=cpu torchrun --standalone --nproc_per_node 2 scripts/demo_train.py --output-dir run --save parity
    ... after a failure, and `llmtailor merge --run run`, the same command with --resume ...
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

VOCAB_SIZE = 64
GLOBAL_BATCH = 12
"""Samples per step of all ranks together, so that a run can go on with another number of them."""


class Counting(torch.utils.data.Dataset):
    """Sequences that count up by a fixed stride, each by its own: easy to learn, so the loss falls at once."""

    def __len__(self) -> int:
        return 1200

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start, stride = index % VOCAB_SIZE, 1 + index % 3
        tokens = (start + stride * torch.arange(32)) % VOCAB_SIZE
        return {"input_ids": tokens, "labels": tokens}


def make_model(hidden_size: int, num_layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def deepspeed_config(stage: int) -> dict[str, object]:
    zero: dict[str, object] = {"stage": stage}
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
    }


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--max-steps", type=int, default=30)
    parser.add_argument("--save-steps", type=int, default=10)
    parser.add_argument("--save", metavar="POLICY", help="save partial checkpoints, e.g. parity (default: full ones)")
    parser.add_argument(
        "--resume",
        nargs="?",
        const=True,
        metavar="CHECKPOINT",
        help="go on; from the newest checkpoint-N if none is named",
    )
    parser.add_argument("--stage", type=int, choices=[1, 2, 3], default=3, help="of ZeRO (default: 3)")
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--num-layers", type=int, default=6)
    options = parser.parse_args(words)

    # else DeepSpeed compiles a faster way to sum gradients on one machine, for minutes, and fails without a compiler
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    set_seed(0)
    arguments = TrainingArguments(
        output_dir=str(options.output_dir),
        deepspeed=deepspeed_config(options.stage),
        use_cpu=True,
        bf16=True,
        per_device_train_batch_size=GLOBAL_BATCH // int(os.environ.get("WORLD_SIZE", "1")),
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        max_steps=options.max_steps,
        save_steps=options.save_steps,
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
    )
    model = make_model(options.hidden_size, options.num_layers)
    trainer = Trainer(model=model, args=arguments, train_dataset=Counting())
    if options.save:
        from llmtailor.saving import attach

        attach(trainer, policy=options.save, save_steps=options.save_steps)
    trainer.train(resume_from_checkpoint=options.resume)
    torch.distributed.destroy_process_group()  # else its threads may abort the process while Python shuts down


if __name__ == "__main__":
    main()
