"""What a save did: for the run's log, and for the Trainer's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOG = "saves.jsonl"
"""In the folder of partial checkpoints: one JSON object per save, oldest first"""


@dataclass(frozen=True, slots=True)
class SaveReport:
    """A finished save."""

    step: int
    parts: Mapping[str, str]
    """The chosen parts, and why each was"""
    num_bytes: int
    """Of all ranks' files; frozen params count though they may be links"""
    stall_s: float
    """How long training stood still on this rank, all included"""
    drift: Mapping[str, float]
    """Part -> relative change since its own last save, measured before this one"""
    steps_behind: Mapping[str, int]
    """Part -> how many training steps its newest save lies back, after this save"""
    path: Path

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "parts": dict(self.parts),
            "num_bytes": self.num_bytes,
            "stall_s": round(self.stall_s, 6),
            "drift": dict(self.drift),
            "steps_behind": dict(self.steps_behind),
        }

    def metrics(self) -> dict[str, float]:
        """Return what goes to the Trainer's logger."""
        return {
            "checkpoint/bytes": self.num_bytes,
            "checkpoint/stall_s": self.stall_s,
            "checkpoint/stalest_part_steps": max(self.steps_behind.values(), default=0),
        }


def append(folder: Path, line: Mapping[str, Any]) -> None:
    """Append a line to the log. A log that can't be written stops nothing."""
    try:
        with (folder / LOG).open("a") as file:
            file.write(json.dumps(line) + "\n")
    except OSError:
        pass
