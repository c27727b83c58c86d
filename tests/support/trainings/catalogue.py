"""The trainings that several tests stand on, and which of them the short suite has. A run costs a second or two."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from trainings.spec import DEEPSPEEDS_MUON, Fsdp, Job, Lightning, Loop, Spec, Training, by_name

FROZEN = ("*embed_tokens*", "*.layers.1.*")
SMALL_GROUPS = 3000
"""Elements per rank: some sub-groups of a tiny model"""

ZERO3 = by_name(
    [
        Spec("llama"),
        Spec("llama-b", seed=1),
        Spec("llama-layer", groups="layer"),
        Spec("llama-layer-b", groups="layer", seed=1),
        Spec("llama-sub", sub_group_size=SMALL_GROUPS),
        Spec("llama-layer-sub", groups="layer", sub_group_size=1000),
        Spec("llama-tied", tied=True),
        Spec("llama-tied-layer", tied=True, groups="layer"),
        Spec("llama-fp16", dtype="fp16", save_steps=1),
        Spec("llama-fp32", dtype="fp32"),
        Spec("llama-ds-adamw", optimizer="ds_adamw"),
        Spec("llama-ds-both", optimizer="ds_adamw", scheduler="ds"),
        Spec("llama-ds-scheduler", scheduler="ds"),
        Spec("llama-cpu-adam", optimizer="cpu_adam"),
        Spec("llama-offload", offload=True),
        Spec("llama-no-gather", gather=False),
        Spec("llama-sharded", max_shard_size=8000, tokenizer=True),
        Spec("llama-frozen", frozen=FROZEN),
        Spec("llama-frozen-b", frozen=FROZEN, seed=1),
        Spec("llama-extras", extras=True),
        Spec("llama-extras-layer", extras=True, frozen=FROZEN, groups="layer"),
        Spec("qwen2", "qwen2", tied=True),
        Spec("qwen3-layer", "qwen3", groups="layer"),
        Spec("mistral", "mistral"),
        Spec("gemma", "gemma", tied=True),
        Spec("gpt2", "gpt2", tied=True),
        Spec("gpt-neox", "gpt_neox"),
        Spec("mixtral", "mixtral"),
        Spec("mixtral-layer", "mixtral", groups="layer"),
        Spec("qwen3-moe", "qwen3_moe"),
        Spec("llama-w3", ranks=3),
        Spec("llama-layer-w3", groups="layer", ranks=3),
        Spec("llama-sub-w3", sub_group_size=SMALL_GROUPS, clipping=False, ranks=3),
        Spec("llama-extras-w3", extras=True, frozen=FROZEN, ranks=3),
        Spec("qwen2-w3", "qwen2", tied=True, groups="layer", ranks=3),
        Spec("gpt2-w3", "gpt2", tied=True, ranks=3),
        Spec("mixtral-w3", "mixtral", ranks=3),
    ]
)
SIX = {"per_device_batch": 3}
"""Two ranks see as many samples in a step as three do with the default, so that one can continue the other."""

OTHERS = by_name(
    [
        Spec("zero3", **SIX),
        Spec("zero3-layer", groups="layer", **SIX),
        Spec("zero3-b", seed=1, **SIX),
        Spec("zero1", stage=1, **SIX),
        Spec("zero2", stage=2, **SIX),
        Spec("zero2-layer", stage=2, groups="layer", **SIX),
        Spec("zero2-rr", stage=2, round_robin=True, **SIX),
        Spec("zero1-rr", stage=1, round_robin=True, **SIX),
        Spec("zero2-aligned", stage=2, parameter_alignment=True, **SIX),
        Spec("zero1-bf16opt", stage=1, grad_accum_dtype="fp32", **SIX),
        Spec("zero2-fp32-grads", stage=2, grad_accum_dtype="fp32", **SIX),
        Spec("zero3-fp32-grads", stage=3, grad_accum_dtype="fp32", **SIX),
        Spec("zero1-bf16opt-rr", stage=1, grad_accum_dtype="fp32", round_robin=True, **SIX),
        Spec("zero2-fp16", stage=2, dtype="fp16", save_steps=1, **SIX),
        Spec("zero1-fp32", stage=1, dtype="fp32", **SIX),
        Spec("zero2-frozen", stage=2, frozen=FROZEN, **SIX),
        Spec("zero2-tied", "qwen2", stage=2, tied=True, **SIX),
        Spec("zero1-extras-layer", stage=1, extras=True, frozen=FROZEN, groups="layer", **SIX),
        Spec("zero2-extras", stage=2, extras=True, **SIX),
        Spec("zero2-elastic", stage=2, elastic=True, **SIX),
        Spec("zero1-elastic", stage=1, elastic=True, **SIX),
        Spec("zero1-w3", stage=1, ranks=3),
        Spec("zero2-w3", stage=2, clipping=False, ranks=3),
        Spec("zero2-layer-w3", stage=2, groups="layer", seed=1, ranks=3),
        Spec("zero2-rr-w3", stage=2, round_robin=True, ranks=3),
        Spec("zero2-aligned-w3", stage=2, parameter_alignment=True, ranks=3),
        Spec("zero1-bf16opt-w3", stage=1, grad_accum_dtype="fp32", ranks=3),
        Spec("zero1-extras-w3", stage=1, extras=True, ranks=3),
    ]
)
"""For other stages and changes of layout"""
DEEPSPEED = ZERO3 | OTHERS

PEFT = by_name([Spec("lora3", "llama+lora"), Spec("lora2", "qwen2+lora", tied=True, stage=2)])
ADAPTERS = by_name([Spec("loras1", "llama+loras", stage=1)])
DDP = by_name([Spec("dropout", stage=0, dtype="fp32", dropout=0.2)])
"""Without DeepSpeed"""

MIDDLE = 4
"""The step from which the stock resumes continue"""

FSDP = by_name(
    [
        Fsdp("trainer"),
        Fsdp("loop", "loop"),
        Fsdp("full", "full"),
        Fsdp("fsdp1", "fsdp1"),
        Fsdp("columns", "columns"),
        Fsdp("titan", "titan"),
        Fsdp("hf", "hf"),
        Fsdp("no-fsdp", "ddp"),
        Fsdp("loop-tied", "loop", tied=True),
        Fsdp("trainer-tied", tied=True),
        Fsdp("loop-frozen", "loop", frozen=FROZEN),
        Fsdp("titan-bf16", "titan", dtype="bf16"),
        Fsdp("loop-w3", "loop", per_device_batch=2, ranks=3),
        Fsdp("loop-hsdp", "loop", replicas=2),
        Fsdp("ranks", "ranks"),
        Fsdp("verl", "verl"),
        Fsdp("verl-tied", "verl", tied=True, frozen=FROZEN[1:], extras=True),
        Fsdp("hsdp", "verl", replicas=2),
        Fsdp("hsdp-w4", "verl", replicas=2, per_device_batch=2, ranks=4),
    ]
)

PLAIN: dict[str, Any] = {"stage": 0, "dtype": "fp32"}
LOOPS = by_name(
    [
        Loop("engine-1", stage=1, scheduler="", tag="1"),
        Loop("engine-2", stage=2, scheduler="deepspeed", tag="checkpoint"),
        Loop("engine-3", stage=3, steps=6),
        Loop("accelerate-2", "accelerate", stage=2, objects=True),
        Loop("accelerate-3", "accelerate", stage=3, scheduler=""),
        Loop("accelerate-ddp", "accelerate", objects=True, **PLAIN),
        Loop("accelerate-fsdp", "accelerate", fsdp=True, **PLAIN),
        Loop("accelerate-fsdp-named", "accelerate", fsdp=True, named=True, **PLAIN),
        Loop("accelerate-named", "accelerate", scheduler="", named=True, **PLAIN),
    ]
)
HEADS: dict[str, Any] = {"arch": "heads", "layers": 2, "ranks": 4, "tp": 2, "scheduler": "", "dtype": "fp32"}
AUTOTP = by_name(
    [
        Loop("tp-2", stage=2, **HEADS),
        Loop("tp-3", stage=3, **HEADS),
        Loop("tp-1-bf16", stage=1, **HEADS | {"dtype": "bf16"}),
        Loop("tp-2-tied", stage=2, tied=True, **HEADS),
        Loop("tp-3-tied", stage=3, tied=True, **HEADS),
        Loop("tp-2-one-head", stage=2, **HEADS | {"arch": "llama"}),  # the second rank has no head at all
        Loop("tp-2-fused", stage=2, **HEADS | {"arch": "phi3"}),  # a rank has two boxes of the weight of gate and up
    ]
)
LOOPS_SAVED = by_name(
    [
        Loop("engine-saver", stage=2, scheduler="", saver="full"),
        Loop("accelerate-2-saver", "accelerate", stage=2, objects=True, saver="full"),
        Loop("accelerate-3-saver", "accelerate", stage=3, scheduler="", objects=True, saver="full"),
        Loop("accelerate-ddp-saver", "accelerate", named=True, objects=True, saver="full", **PLAIN),
        Loop("accelerate-fsdp-saver", "accelerate", fsdp=True, named=True, objects=True, saver="full", **PLAIN),
    ]
)

ENGINE: dict[str, Any] = {"scheduler": "", "save_steps": 1}
FSDP2: dict[str, Any] = {"fsdp": True, "objects": True, "save_steps": 1, **PLAIN}
OPTIMIZERS = by_name(
    [
        *(Loop(f"muon-{stage}", stage=stage, optimizer=DEEPSPEEDS_MUON, **ENGINE) for stage in (1, 2, 3)),
        Loop("muon-offload-2", stage=2, optimizer=DEEPSPEEDS_MUON, offload=True, **ENGINE),
        Loop("momentum-3", stage=3, optimizer="SGD momentum", **ENGINE),
        Loop("lion-2", stage=2, optimizer="optimi Lion", **ENGINE),
        Loop("bnb-lion-2", stage=2, optimizer="bnb Lion", **ENGINE),
        Loop("adafactor-1", stage=1, optimizer="transformers Adafactor", **ENGINE),
        Loop("fsdp-muon", "accelerate", optimizer="Muon", **FSDP2),
        Loop("fsdp-muon-adam", "accelerate", optimizer="Muon with Adam", **FSDP2),
        Loop("fsdp-sgd", "accelerate", optimizer="SGD momentum", **FSDP2),
        Loop("fsdp-stable", "accelerate", optimizer="optimi StableAdamW", **FSDP2),
        Loop("fsdp-lion", "accelerate", optimizer="optimi Lion", **FSDP2),
    ]
)
"""Other optimizers than AdamW, in loops"""
WHOLE = by_name(
    [
        Loop("bnb-8bit-2", stage=2, optimizer="bnb AdamW 8-bit", **ENGINE),
        Loop("ddp-adafactor", "accelerate", optimizer="Adafactor", objects=True, **PLAIN),
        Loop("ddp-8bit", "accelerate", optimizer="bnb AdamW 8-bit", objects=True, save_steps=1, **PLAIN),
    ]
)
"""With states that can't be cut"""
OPTIMIZERS_SAVED = by_name(
    replace(spec, name=f"{name}-saver", saver="moments_in_turn:2") for name, spec in OPTIMIZERS.items()
)

LIGHTNING = by_name(
    [
        Lightning("lightning"),
        Lightning("lightning-groups", groups=2, norm=True),
        Lightning("lightning-zero-2", stage=2),
        Lightning("lightning-zero-3", stage=3, groups=2),
    ]
)
LIGHTNING_OPTIMIZERS = by_name(
    [
        Lightning("lightning-8bit", optimizer="bnb AdamW 8-bit"),
        Lightning("lightning-adafactor", optimizer="Adafactor"),
        Lightning("lightning-muon", optimizer="Muon beside AdamW"),
        Lightning("lightning-lion", optimizer="optimi Lion"),
    ]
)
LIGHTNING_SAVED = by_name(
    [
        Lightning("lightning-saver", groups=2, norm=True, saver="full"),
        Lightning("lightning-zero-2-saver", stage=2, saver="full"),
        Lightning("lightning-zero-3-saver", stage=3, saver="full"),
    ]
)

# With the saver attached to the Trainer

SIXTEEN = {"moments": "bf16", "masters": "bf16"}
COMPRESSED = {"moments": "8bit", "masters": "24bit-delta"}
CHECKED = by_name(
    [
        Job("z3", per_device_batch=3, steps=8),
        Job("z3-full", policy="full", per_device_batch=3, steps=8),
        Job("z3-layer", groups="layer"),
        Job("z3-sub", sub_group_size=SMALL_GROUPS, arguments={"gradient_accumulation_steps": 2}),
        Job("z3-frozen", frozen=FROZEN),
        Job("z3-extras", extras=True, tokenizer=True),
        Job("z3-tied", "qwen2", tied=True),
        Job("z3-fp16", dtype="fp16", every=1, sub_group_size=SMALL_GROUPS),
        Job("z3-fp32", dtype="fp32"),
        Job("z3-offload", offload=True),
        Job("z3-cpu-adam", optimizer="cpu_adam", policy="moments_in_turn:2"),
        Job("z3-ds-adamw", optimizer="ds_adamw"),
        Job("z3-ds-both", optimizer="ds_adamw", scheduler="ds"),
        Job("z3-mixtral", "mixtral"),
        Job("z3-lora", "llama+policy"),
        Job("z2-lora", "qwen2+lora", tied=True, stage=2),
        Job("z3-rounded", policy="moments_in_turn:2", options=COMPRESSED),
        Job("z3-bf16", policy="moments_in_turn:2", options=SIXTEEN, per_device_batch=3, steps=8),
        Job("z2", stage=2),
        Job("z2-rounded", stage=2, policy="moments_in_turn:2", options=COMPRESSED | {"moments": "bf16"}),
        Job("z2-layer", stage=2, groups="layer", policy="moments_in_turn:2"),
        Job("z2-rr", stage=2, round_robin=True),
        Job("z2-aligned", stage=2, parameter_alignment=True),
        Job("z2-frozen", stage=2, frozen=FROZEN),
        Job("z2-fp16", stage=2, dtype="fp16", every=1),
        Job("z1", "gpt2", stage=1, tied=True),
        Job("z1-bf16opt", stage=1, grad_accum_dtype="fp32"),
        Job("z1-extras", stage=1, extras=True, frozen=FROZEN, groups="layer", policy="moments_in_turn:2"),
        Job("ddp", arguments={"gradient_accumulation_steps": 2}, **PLAIN),
        Job("ddp-bf16", "qwen2", tied=True, stage=0),
        Job("ddp-lora", "qwen2+lora", tied=True, **PLAIN),
        Job("ddp-mixtral", "mixtral", policy="moments_in_turn:2", **PLAIN),
        Job("ddp-extras", extras=True, frozen=FROZEN, groups="layer", **PLAIN),
        Job("z3-w3", "mixtral", ranks=3),
        Job(
            "z3-extras-w3",
            extras=True,
            frozen=FROZEN,
            groups="layer",
            tokenizer=True,
            policy="moments_in_turn:2",
            ranks=3,
        ),
        Job("z2-rr-w3", stage=2, round_robin=True, ranks=3),
        Job("z1-bf16opt-w3", stage=1, grad_accum_dtype="fp32", ranks=3),
    ]
)
"""Composites of these are held against the truth."""

NOISY = {
    "gradient_accumulation_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "metric_for_best_model": "loss",
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5, "threshold": 0.5},
}
"""Evaluations at the steps that are saved, which decide the learning rates"""
FULL: dict[str, Any] = {"policy": "full", "dropout": 0.1, "arguments": NOISY, "steps": 8}
LIVELY = by_name(
    [Job("lively", "gpt2", **FULL), Job("lively-0", "gpt2", **PLAIN, **FULL), Job("lively-2", "gpt2", stage=2, **FULL)]
)
"""With dropout, so that random numbers matter"""

EXPERTS: dict[str, Any] = {"options": {"experts": "parts"}, "steps": 8}
"""Each expert is a part."""
CHANGES = {"what": "frozen", "step": 6, "param": "*embed_tokens*"}
"""A frozen param changes before the last save."""
GOING_ON: dict[str, Any] = {"per_device_batch": 3, "steps": 8}
"""Trainings with the saver after a first and a second failure"""
FEW = "filter:first=1,last=1,every=2,aux_every=1"
JOBS = by_name(
    [
        Job("z3-again", goes_on="z3", at=4, **GOING_ON),
        Job("z3-bf16-again", goes_on="z3-bf16", at=4, policy="moments_in_turn:2", options=SIXTEEN, **GOING_ON),
        Job("z3-twice", goes_on="z3-again", at=6, **GOING_ON),
        Job("z3-then-filter", goes_on="z3", at=4, policy=FEW, **GOING_ON),
        Job("z3-on-3", goes_on="z3", at=4, steps=8, ranks=3),
        Job("z3-full-on-3", goes_on="z3-full", at=4, policy="full", steps=8, ranks=3),
        Job("z3-experts", "mixtral", policy="round_robin:4", **EXPERTS),
        Job("z2-experts", "mixtral", stage=2, policy="moments_in_turn:4", **EXPERTS),
        Job("ddp-experts", "mixtral", policy="adaptive:0.6", **PLAIN, **EXPERTS),
        Job("full-0", options={"background": False}, disturb={"what": "full", "step": 4, "rank": 0}),
        Job("full-1", stage=1, options={"background": False}, disturb={"what": "full", "step": 4, "rank": 1}),
        Job("z3-teacher", frozen=FROZEN, disturb={"what": "teacher", "param": "*"}),
        Job("frozen-2", stage=2, frozen=FROZEN, disturb=CHANGES),
        Job("frozen-3", frozen=FROZEN, disturb=CHANGES),
        Job("nodes", options={"staging_dir": "nodes"}, frozen=FROZEN),  # two nodes, each with a disk of its own
        Job("slow-skip", stage=2, policy="full", every=1, options={"when_busy": "skip"}, disturb={"what": "held"}),
    ]
)
MIXED = ("z3", "z3-layer", "z2", "z1", "ddp")


def stock_resumes(jobs: Iterable[Job]) -> Iterator[Job]:
    """Resume each from its first save, which is complete, by the stock Trainer; and from its last but one."""
    for job in jobs:
        last = job.steps - (job.every or 1)
        plain = replace(job, goes_on=job.name, policy=None, truth=False)
        yield replace(plain, name=f"{job.name}@{job.every}", at=max(2, job.every or 1))
        if job.name in MIXED:
            yield replace(plain, name=f"{job.name}@{last}", at=last)


SAVED = CHECKED | LIVELY
WITHOUT_SAVER = by_name(
    [
        *(replace(job, name=f"{job.name}-alone", policy=None, truth=False) for job in LIVELY.values()),
        *stock_resumes(SAVED.values()),
    ]
)
ALL: dict[str, Training] = by_name(
    [
        *(
            DEEPSPEED | PEFT | ADAPTERS | DDP | FSDP | LOOPS | AUTOTP | LOOPS_SAVED | LIGHTNING | LIGHTNING_SAVED
        ).values(),
        *(LIGHTNING_OPTIMIZERS | OPTIMIZERS | WHOLE | OPTIMIZERS_SAVED).values(),
        *(SAVED | JOBS | WITHOUT_SAVER).values(),
    ]
)

SHORT = {
    *("llama", "llama-layer", "llama-tied", "llama-fp16", "llama-ds-both", "llama-frozen"),
    *("llama-extras-layer", "llama-no-gather", "llama-sharded", "mixtral"),
    *("zero1", "zero1-bf16opt", "zero1-extras-layer", "zero2", "zero2-rr", "zero2-aligned", "zero2-fp16"),
    *("zero2-tied", "zero2-extras", "zero2-elastic"),
    *("llama-sub-w3", "zero2-w3", "zero2-rr-w3"),
    *(
        {
            *PEFT,
            *ADAPTERS,
            *DDP,
            *FSDP,
            *LOOPS,
            "tp-2",
            "tp-3",
            "tp-2-fused",
            *LOOPS_SAVED,
            *LIGHTNING,
            *LIGHTNING_SAVED,
        }
        - {"loop-tied", "titan-bf16", "accelerate-fsdp-named", "hsdp-w4"}
        - {"accelerate-3-saver", "lightning-zero-3-saver"}
    ),
    *("z3", "z3-bf16", "z2-fp16", "z2-rr", "z2-lora", "z1-bf16opt", "z1-extras", "z2-experts"),
    *("ddp", "ddp-lora", "ddp-extras", "z3-extras-w3"),
    *("z3-bf16-again", "full-1", "frozen-2", "nodes", "slow-skip", "z3@2"),
    *("muon-2", "bnb-lion-2", "adafactor-1", "fsdp-stable", *WHOLE, "muon-2-saver", "lightning-8bit"),
}
"""What is trained without --all: every feature, and every pair of features that has code of its own"""
LONG = ALL.keys() - SHORT
"""conftest.py marks what is parametrized with one of these as long."""


def long_but(short: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the cases, those marked long that are not among the short ones."""
    long = pytest.mark.long
    split = [(case, [case] if isinstance(case, str) else case) for case in cases]
    return [case if case in short else pytest.param(*values, marks=long) for case, values in split]


def batch_of(name: str, everything: bool, without: Collection[str] = ()) -> dict[str, Training]:
    """Return all runs that are trained with one: in the same ranks, by the same program; without some optimizers."""

    def key(spec: Training) -> tuple[str, int, bool]:
        return spec.program, spec.ranks, spec.has_saver

    wanted = (spec for spec in ALL.values() if key(spec) == key(ALL[name]) and (everything or spec.name in SHORT))
    return by_name(spec for spec in wanted if getattr(spec, "optimizer", "") not in without)
