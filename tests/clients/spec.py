"""What one training without a Trainer is: pure data, sent to the training processes as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Spec:
    """One run. Checkpoints land in a folder named after it."""

    name: str
    client: str = "deepspeed"
    """``deepspeed``: a loop that calls ``engine.save_checkpoint``. ``accelerate``: one that calls ``save_state``."""
    stage: int = 3
    """Of ZeRO; 0 without DeepSpeed"""
    fsdp: bool = False
    """Whether accelerate shards the model with FSDP2"""
    scheduler: str = "torch"
    """``torch``: a LambdaLR. ``deepspeed``: WarmupLR of the DeepSpeed config. Empty: none."""
    tag: str = ""
    """Of every save; empty for DeepSpeed's own, ``global_stepN``"""
    dtype: str = "bf16"
    layers: int = 3
    named: bool = False
    """Whether the optimizer gets ``named_parameters()``"""
    saver: str = ""
    """The policy of llmtailor's saver, which then saves, and not the engine; empty without it"""
    dies_at: int = 0
    """The step after which every rank is killed; 0 for none"""
    objects: bool = False
    """Whether an object is registered with accelerate for its checkpoints"""
    per_device_batch: int = 3
    steps: int = 4
    save_steps: int = 2
    resume_from: str | None = None
    """A checkpoint folder; a relative path starts from the folder of all runs."""

    def resumed(self, checkpoint: object, name: str, **changes: Any) -> Spec:
        """The same training, going on from a checkpoint."""
        return replace(self, name=name, resume_from=str(checkpoint), **changes)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
