"""Reports of saves, for the run's log and the Trainer's."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from llmtailor.errors import StorageError
from llmtailor.runs.save_log import ABANDONED_LOG, LOG
from llmtailor.storage.local import replace_durably


@dataclass(frozen=True, slots=True)
class SaveReport:
    """A finished save."""

    step: int
    parts: Mapping[str, str]
    """Saved part -> reason"""
    num_bytes: int
    """Size of all ranks' files, in bytes. Frozen params count even if they are hard links to an earlier save."""
    stall_s: float
    """Seconds for which the save stopped training: in `PartialSaver.save` and before the next optimizer steps. This and
    the following times are those of the slowest rank."""
    drift: Mapping[str, float]
    """Part -> relative change since its own last save, measured before this one"""
    expected_loss: Mapping[str, float]
    """Part -> estimated rise of the loss with its own last save, measured before this one; see `policies.Situation`"""
    steps_behind: Mapping[str, int]
    """Part -> optimizer steps since its newest save, after this one"""
    path: Path
    """The partial checkpoint"""
    copy_s: float = 0.0
    """Seconds from the start of the save until its states were copied to host memory; 0 without background saves"""
    write_s: float = 0.0
    """Seconds until its files were durable"""
    publish_s: float = 0.0
    """Seconds until the partial checkpoint was complete"""
    buffer_bytes: int = 0
    """The most host memory that the copies occupied at once on one rank, in bytes"""
    masters: Collection[str] = ()
    """Further parts, of which it holds the masters without the moments"""

    def to_json(self) -> dict[str, object]:
        """Return the save as a line of ``saves.jsonl``."""
        return {
            "step": self.step,
            "parts": dict(self.parts),
            **({"masters": [*self.masters]} if self.masters else {}),
            "num_bytes": self.num_bytes,
            "stall_s": round(self.stall_s, 6),
            "copy_s": round(self.copy_s, 6),
            "write_s": round(self.write_s, 6),
            "publish_s": round(self.publish_s, 6),
            "buffer_bytes": self.buffer_bytes,
            "drift": dict(self.drift),
            "expected_loss": dict(self.expected_loss),
            "steps_behind": dict(self.steps_behind),
        }

    def metrics(self) -> dict[str, float]:
        """Return the values for the Trainer's logger."""
        return {
            "checkpoint/bytes": self.num_bytes,
            "checkpoint/step": self.step,
            "checkpoint/stall_s": self.stall_s,
            "checkpoint/copy_s": self.copy_s,
            "checkpoint/write_s": self.write_s,
            "checkpoint/publish_s": self.publish_s,
            "checkpoint/buffer_bytes": self.buffer_bytes,
            "checkpoint/stalest_part_steps": max(self.steps_behind.values(), default=0),
        }


def append(folder: Path, line: Mapping[str, Any]) -> None:
    """Append a line to the log; ignore errors."""
    with suppress(OSError), (folder / LOG).open("ab+") as file:
        if file.tell() and not _ends_a_line(file):  # a kill truncated the last one
            file.write(b"\n")
        file.write(json.dumps(line).encode() + b"\n")


def abandon_after(folder: Path, step: int) -> None:
    """Move the lines of later saves to `ABANDONED_LOG`: the run resumes at ``step``. A truncated line is dropped."""
    with suppress(OSError, StorageError):
        lines = (folder / LOG).read_bytes().splitlines()
        steps = [_step_of(line) for line in lines]
        kept = [line for line, at in zip(lines, steps, strict=True) if at is not None and at <= step]
        later = [line for line, at in zip(lines, steps, strict=True) if at is not None and at > step]
        if len(kept) < len(lines):
            with (folder / ABANDONED_LOG).open("ab") as file:
                file.write(b"".join(line + b"\n" for line in later))
            replace_durably(folder / LOG, b"".join(line + b"\n" for line in kept))


def _ends_a_line(file: BinaryIO) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def _step_of(line: bytes) -> int | None:
    """Return the step of a line of the log, None if it is not valid."""
    try:
        content = json.loads(line)
    except ValueError:
        return None
    step = content.get("step") if isinstance(content, dict) else None
    return step if type(step) is int else None
