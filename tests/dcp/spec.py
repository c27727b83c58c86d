"""What one FSDP training is: pure data, sent to the training processes as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Spec:
    """One run. Checkpoints land in a folder named after it."""

    name: str
    kind: str = "trainer"
    """``trainer``: the Trainer with FSDP2, through accelerate. ``full``: the same, with FULL_STATE_DICT. ``ddp``: the
    Trainer with neither FSDP nor DeepSpeed.
    ``fsdp1``: a loop with FSDP1 that saves by accelerate's functions. ``loop``: a loop that saves ``{model, optim}``.
    ``columns``: the same, but matrices are saved as tensor parallelism cuts them. ``titan``: a loop that saves as
    torchtitan does, flat, with its own counters. ``hf``: a loop that saves with `transformers.distributed`, weights in
    safetensors."""
    arch: str = "llama"
    tied: bool = False
    layers: int = 3
    dtype: str = "float32"
    """Of the params; computing in bf16 by mixed precision is another thing"""
    frozen: tuple[str, ...] = ()
    """Globs over param names"""
    per_device_batch: int = 3
    steps: int = 4
    save_steps: int = 2
    resume_from: str | None = None
    """A checkpoint folder; a relative path starts from the folder of all runs."""

    def resumed(self, checkpoint: object, name: str, **changes: Any) -> Spec:
        """The same training, going on from a checkpoint, with an echo."""
        return replace(self, name=name, resume_from=str(checkpoint), **changes)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def from_json(data: dict[str, Any]) -> Spec:
    return Spec(**{**data, "frozen": tuple(data["frozen"])})
