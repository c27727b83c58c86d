"""The trainings that the proofs stand on: one set of ranks for each number of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from partial.jobs import Job
from trainings.catalogue import FROZEN, SMALL_GROUPS

CHECKED_2 = [
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
    Job("z3-lora", "llama+lora"),
    Job("z2-lora", "qwen2+lora", tied=True, stage=2),
    Job("z3-rounded", options={"moments": "bf16"}),
    Job("z2", stage=2),
    Job("z2-layer", stage=2, groups="layer", policy="moments_in_turn:2"),
    Job("z2-rr", stage=2, round_robin=True),
    Job("z2-aligned", stage=2, parameter_alignment=True),
    Job("z2-frozen", stage=2, frozen=FROZEN),
    Job("z2-fp16", stage=2, dtype="fp16", every=1),
    Job("z1", "gpt2", stage=1, tied=True),
    Job("z1-bf16opt", stage=1, grad_accum_dtype="fp32"),
    Job("z1-extras", stage=1, extras=True, frozen=FROZEN, groups="layer", policy="moments_in_turn:2"),
    Job("ddp", stage=0, dtype="fp32", arguments={"gradient_accumulation_steps": 2}),
    Job("ddp-bf16", "qwen2", tied=True, stage=0),
    Job("ddp-lora", "qwen2+lora", tied=True, stage=0, dtype="fp32"),
    Job("ddp-mixtral", "mixtral", stage=0, dtype="fp32", policy="moments_in_turn:2"),
    Job("ddp-extras", stage=0, dtype="fp32", extras=True, frozen=FROZEN, groups="layer"),
]
"""Composites of these are held against the truth."""

CHECKED_3 = [
    Job("z3-w3", "mixtral"),
    Job("z3-extras-w3", extras=True, frozen=FROZEN, groups="layer", tokenizer=True, policy="moments_in_turn:2"),
    Job("z2-rr-w3", stage=2, round_robin=True),
    Job("z1-bf16opt-w3", stage=1, grad_accum_dtype="fp32"),
]

NOISY = {
    "gradient_accumulation_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "metric_for_best_model": "loss",
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5, "threshold": 0.5},
}
"""Evaluations at the steps that are saved, which decide the learning rates"""
LIVELY = [
    Job("lively", "gpt2", policy="full", dropout=0.1, arguments=NOISY, steps=8),
    Job("lively-0", "gpt2", stage=0, dtype="fp32", policy="full", dropout=0.1, arguments=NOISY, steps=8),
    Job("lively-2", "gpt2", stage=2, policy="full", dropout=0.1, arguments=NOISY, steps=8),
]
"""With dropout, so that random numbers matter"""

EXPERTS = [
    Job("z3-experts", "mixtral", policy="round_robin:4", options={"experts": "parts"}, steps=8),
    Job("z2-experts", "mixtral", stage=2, policy="moments_in_turn:4", options={"experts": "parts"}, steps=8),
    Job("z3-experts-then-layers", "mixtral", goes_on="z3-experts", at=4, policy="parity", steps=8),
    Job(
        "ddp-experts",
        "mixtral",
        stage=0,
        dtype="fp32",
        policy="adaptive:0.6",
        options={"experts": "parts"},
        steps=8,
    ),
]
"""Each expert is a part; then whole layers again"""

DISTURBED = [
    Job("full-0", options={"background": False}, disturb={"what": "full", "step": 4, "rank": 0}),
    Job("full-1", stage=1, options={"background": False}, disturb={"what": "full", "step": 4, "rank": 1}),
    Job("frozen-2", stage=2, frozen=FROZEN, disturb={"what": "frozen", "step": 6, "param": "*embed_tokens*"}),
    Job("frozen-3", frozen=FROZEN, disturb={"what": "frozen", "step": 6, "param": "*embed_tokens*"}),
]
TEACHERS = [
    Job("ddp-teacher", stage=0, dtype="fp32", frozen=FROZEN, disturb={"what": "teacher", "param": "*"}),
    Job("z3-teacher", frozen=FROZEN, disturb={"what": "teacher", "param": "*"}),
]
NODES = [Job("nodes", options={"staging_dir": "nodes"}, frozen=FROZEN)]
"""Two nodes, each with a disk of its own"""
SLOW = [
    Job("slow-skip", stage=2, policy="full", every=1, options={"when_busy": "skip"}, disturb={"what": "held"}),
    Job(
        "slow-wait",
        stage=0,
        dtype="fp32",
        policy="full",
        every=1,
        steps=4,
        options={"when_busy": "wait", "host_buffer": 1 << 20},
        disturb={"what": "slow"},
    ),
]
"""Writing a save takes several steps."""
UNGUARDED = [
    Job("torn-z3", unguarded=True, steps=4),
    Job("torn-cpu-adam", optimizer="cpu_adam", unguarded=True),
    Job("torn-ddp", stage=0, dtype="fp32", unguarded=True, arguments={"optim": "adamw_torch"}),
]
REFUSED = [
    Job("locked", disturb={"what": "locked"}, fails=True, truth=False),
    Job("anew", goes_on="z3", fails=True, truth=False),
    *(
        Job(f"{optim}-{stage}", stage=stage, fails=True, truth=False, arguments={"optim": optim})
        for optim in ("sgd", "adafactor")
        for stage in (2, 3)
    ),
]

GOING_ON = [
    Job("z3-again", goes_on="z3", at=4, per_device_batch=3, steps=8),
    Job("z3-twice", goes_on="z3-again", at=6, per_device_batch=3, steps=8),
    Job("z3-full-again", goes_on="z3-full", at=4, policy="full", per_device_batch=3, steps=8),
    Job("z3-full-twice", goes_on="z3-full-again", at=6, policy="full", per_device_batch=3, steps=8),
    Job(
        "z3-then-filter",
        goes_on="z3",
        at=4,
        policy="filter:first=1,last=1,every=2,aux_every=1",
        per_device_batch=3,
        steps=8,
    ),
]
"""Trainings with the saver after a first and a second failure"""


def stock_resumes(jobs: list[Job]) -> Iterator[Job]:
    """Resume each from its first save, which is complete, by the stock Trainer; and from its last but one."""
    for job in jobs:
        last = job.steps - (job.every or 1)
        plain = replace(job, goes_on=job.name, policy=None, truth=False)
        yield replace(plain, name=f"{job.name}@{job.every}", at=max(2, job.every or 1))
        if job.name in MIXED:
            yield replace(plain, name=f"{job.name}@{last}", at=last)


MIXED = ("z3", "z3-layer", "z2", "z1", "ddp")


def without_saver(job: Job) -> Job:
    return replace(job, name=f"{job.name}-alone", policy=None, truth=False)


def jobs_for(ranks: int, before: Path | None = None, everything: bool = True) -> list[Job]:
    """Return all jobs of a world size; ``before`` is the folder of those on 2 ranks."""
    if ranks == 3:
        moved = [
            Job("z3-on-3", goes_on=str(before and before / "z3"), at=4, steps=8),
            Job("z3-full-on-3", goes_on=str(before and before / "z3-full"), at=4, policy="full", steps=8),
        ]
        jobs = [*CHECKED_3, *stock_resumes(CHECKED_3), *moved]
    else:
        alone = [without_saver(job) for job in LIVELY]
        resumed = stock_resumes([*CHECKED_2, *LIVELY])
        jobs = [
            *CHECKED_2,
            *LIVELY,
            *alone,
            *resumed,
            *GOING_ON,
            *EXPERTS,
            *DISTURBED,
            *TEACHERS,
            *NODES,
            *SLOW,
            *UNGUARDED,
            *REFUSED,
        ]
    return jobs if everything else [job for job in jobs if job.name not in LONG_JOBS]


SHORT = {
    *("z3", "z2-fp16", "z2-rr", "z2-lora", "z1", "z1-bf16opt", "z1-extras"),
    *("z2-experts", "ddp-experts"),
    *("ddp", "ddp-lora", "ddp-extras", "z3-extras-w3"),
    *("lively-2", "lively-2-alone", "z3-again"),
    *("full-1", "frozen-2", "ddp-teacher", "locked", "anew", "sgd-2", "adafactor-3"),
    *("nodes", "slow-skip", "slow-wait", "torn-z3", "torn-ddp"),
    *("z3@2", "z2-fp16@1", "z2-rr@2", "z1-extras@2", "ddp@2", "ddp@4", "lively-2@2"),
}
"""What is trained without --all"""
LONG_JOBS = {job.name for ranks in (2, 3) for job in jobs_for(ranks)} - SHORT
