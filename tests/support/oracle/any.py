"""Read a checkpoint of any ZeRO stage, the slow way."""

from __future__ import annotations

from pathlib import Path

from oracle import zero3, zero12
from oracle.zero3 import Snapshot


def load(checkpoint: Path) -> Snapshot:
    """Tell the stages apart by the one file that ZeRO-1 and ZeRO-2 have for all ranks."""
    tag = checkpoint / (checkpoint / "latest").read_text()
    return (zero12 if (tag / zero12.MODEL).exists() else zero3).load(checkpoint)
