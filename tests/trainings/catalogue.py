"""The trainings that the tests stand on, one set of ranks for each world size. A run costs a second."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

from trainings.spec import Spec, by_name

FROZEN = ("*embed_tokens*", "*.layers.1.*")
SMALL_GROUPS = 3000
"""Elements per rank: some sub-groups of a tiny model"""

TWO_RANKS = by_name(
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
    ]
)

THREE_RANKS = by_name(
    [
        Spec("llama-w3"),
        Spec("llama-layer-w3", groups="layer"),
        Spec("llama-sub-w3", sub_group_size=SMALL_GROUPS, clipping=False),
        Spec("llama-extras-w3", extras=True, frozen=FROZEN),
        Spec("qwen2-w3", "qwen2", tied=True, groups="layer"),
        Spec("gpt2-w3", "gpt2", tied=True),
        Spec("mixtral-w3", "mixtral"),
    ]
)

SIX = {"per_device_batch": 3}
"""Two ranks see as many samples in a step as three do with the default, so that one can go on from the other."""

TWO_RANKS_ANY = by_name(
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
    ]
)
"""For other stages and changes of layout"""

THREE_RANKS_ANY = by_name(
    [
        Spec("zero1-w3", stage=1),
        Spec("zero2-w3", stage=2, clipping=False),
        Spec("zero2-layer-w3", stage=2, groups="layer", seed=1),
        Spec("zero2-rr-w3", stage=2, round_robin=True),
        Spec("zero2-aligned-w3", stage=2, parameter_alignment=True),
        Spec("zero1-bf16opt-w3", stage=1, grad_accum_dtype="fp32"),
        Spec("zero1-extras-w3", stage=1, extras=True),
    ]
)

MIDDLE = 4
"""The step from which the stock resumes go on"""

RESUMED = [name for name in TWO_RANKS | THREE_RANKS if not name.endswith("-b")]
"""``runs["llama+resume"]`` is ``llama`` stopped at `MIDDLE` and resumed."""

RESUMED_ANY = [name for name, spec in (TWO_RANKS_ANY | THREE_RANKS_ANY).items() if spec.stage < 3 and not spec.elastic]
"""The same of the others"""


BATCHES = {2: TWO_RANKS | TWO_RANKS_ANY, 3: THREE_RANKS | THREE_RANKS_ANY}

SHORT = {
    *("llama", "llama-b", "llama-layer", "llama-tied", "llama-fp16", "llama-ds-both", "llama-frozen"),
    *("llama-extras-layer", "llama-no-gather", "llama-sharded", "mixtral"),
    *("zero1", "zero1-bf16opt", "zero1-extras-layer", "zero2", "zero2-rr", "zero2-aligned", "zero2-fp16"),
    *("zero2-tied", "zero2-extras", "zero2-elastic"),
    *("llama-sub-w3", "zero2-w3", "zero2-rr-w3"),
}
"""What is trained without --all: every feature, and every pair of features that has code of its own"""
LONG = {name for batch in BATCHES.values() for name in batch} - SHORT
"""conftest.py marks what is parametrized with one of these as long."""


def long_but(short: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the cases, those marked long that are not among the short ones."""
    long = pytest.mark.long
    split = [(case, [case] if isinstance(case, str) else case) for case in cases]
    return [case if case in short else pytest.param(*values, marks=long) for case, values in split]


def batch(ranks: int, everything: bool = True, without: frozenset[str] = frozenset()) -> dict[str, Spec]:
    """Return the straight runs of a world size and their stock resumes, leaving out some optimizers."""
    straight = [spec for spec in BATCHES[ranks].values() if spec.optimizer not in without]
    if not everything:
        return by_name(spec for spec in straight if spec.name in SHORT)
    resumed = [
        spec.resumed(f"{spec.name}/checkpoint-{MIDDLE}", f"{spec.name}+resume", save_steps=spec.steps)
        for spec in straight
        if spec.name in (*RESUMED, *RESUMED_ANY)
    ]
    return by_name([*straight, *resumed])
