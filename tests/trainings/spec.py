"""What one training run is: pure data, sent to the training processes as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Spec:
    """One run of the stock Trainer. Checkpoints land in a folder named after the run."""

    name: str
    arch: str = "llama"
    tied: bool = False
    layers: int = 3
    dtype: str = "bf16"
    """``bf16``, ``fp16`` or ``fp32``"""
    optimizer: str = "hf"
    """``hf``: the Trainer's AdamW. ``ds_adamw``: torch's AdamW from the DeepSpeed config, one group.
    ``cpu_adam``: DeepSpeedCPUAdam with offloaded states, one group."""
    scheduler: str = "hf"
    """``hf``: linear decay. ``ds``: WarmupDecayLR from the DeepSpeed config."""
    groups: str = "default"
    """``layer``: LLMTailor's 2L+x groups"""
    stage: int = 3
    """Of ZeRO: 1, 2 or 3"""
    round_robin: bool = False
    """``round_robin_gradients``, ZeRO-2 only"""
    parameter_alignment: bool = False
    grad_accum_dtype: str | None = None
    """``fp32`` with bf16 and ZeRO-1 makes DeepSpeed use BF16_Optimizer."""
    elastic: bool = False
    """``elastic_checkpoint``, ZeRO-1 and ZeRO-2 only. Stock can't resume from these."""
    offload: bool = False
    """Optimizer states in CPU memory (``offload_optimizer``)"""
    sub_group_size: int | None = None
    clipping: bool = True
    """``gradient_clipping`` is in the config; without it, DeepSpeed clips at its own default"""
    gather: bool = True
    """Without it, ZeRO-3 writes no model.safetensors."""
    max_shard_size: int | None = None
    """Bytes per safetensors shard"""
    frozen: tuple[str, ...] = ()
    """Globs over param names"""
    tokenizer: bool = False
    """Checkpoints hold tokenizer files."""
    extras: bool = False
    """Each MLP gets a one-element param and buffers that change with every step."""
    per_device_batch: int = 2
    """A resume on other ranks is comparable if the batch of all ranks stays the same."""
    steps: int = 6
    save_steps: int = 2
    seed: int = 0
    resume_from: str | None = None
    """A checkpoint folder; a relative path starts from the folder of all runs."""
    echo: bool = False
    """Write down what DeepSpeed holds before the first step."""

    def resumed(self, checkpoint: object, name: str, **changes: Any) -> Spec:
        """The same training, going on from a checkpoint, with an echo."""
        return replace(self, name=name, resume_from=str(checkpoint), echo=True, **changes)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def from_json(data: dict[str, Any]) -> Spec:
    return Spec(**{**data, "frozen": tuple(data["frozen"])})


def by_name(specs: Iterable[Spec]) -> dict[str, Spec]:
    specs = list(specs)
    named = {spec.name: spec for spec in specs}
    if len(named) != len(specs):
        raise ValueError("two runs have the same name")
    return named
