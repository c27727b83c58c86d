"""What one training with Lightning is: pure data, sent to the training processes as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

NEWEST = "newest"
"""What `newest_checkpoint` composes of the run's own saves, in the ranks that resume"""


@dataclass(frozen=True)
class Spec:
    """One run. An epoch has two steps, and Lightning saves at the end of each."""

    name: str
    stage: int = 0
    """Of ZeRO; 0 for DDP"""
    groups: int = 1
    """Param groups: one, or one for matrices and one without decay for vectors"""
    norm: bool = False
    """Whether the module also has a batch norm, an unused head and a frozen param"""
    layers: int = 3
    saver: str = ""
    """The policy of llmtailor's saver, which then saves at each step; empty for Lightning's own checkpoints only"""
    fault: str = ""
    """What of a loaded checkpoint is spoiled: ``schedule``, ``moments`` or ``weights``; without one, a resume that
    does not hold its checkpoint stops"""
    dies_at: int = 0
    """The step after which every rank is killed; 0 for none"""
    per_device_batch: int = 3
    steps: int = 4
    resume_from: str | None = None
    """A checkpoint, or `NEWEST`"""

    def resumed(self, checkpoint: object, name: str, **changes: Any) -> Spec:
        """The same training, going on from a checkpoint."""
        return replace(self, name=name, resume_from=str(checkpoint), **changes)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
