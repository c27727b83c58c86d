"""What is known of a finished or failed save, and the log of a run's saves."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from llmtailor.containers.json import decode
from llmtailor.errors import StorageError, TailorError
from llmtailor.runs.save_log import ABANDONED_LOG, LOG, LoggedSave, lines_of
from llmtailor.storage.local import append_line, check_own, replace_durably


class SaveFailed(StorageError):
    """A save failed; nothing of it remains, and training can continue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport(LoggedSave):
    """A finished save."""

    path: Path
    """The partial checkpoint"""
    buffer_bytes: int = 0
    """The most host memory that the copies occupied at once on one rank, in bytes"""

    def to_json(self) -> dict[str, object]:
        """Return the save as a line of ``saves.jsonl``."""
        return {
            "step": self.step,
            "parts": dict(self.parts),
            **({"masters": [*self.masters]} if self.masters else {}),
            **({"updates_missed": self.updates_missed} if self.updates_missed else {}),
            "num_bytes": self.num_bytes,
            **{name: round(getattr(self, name), 6) for name in ("stall_s", "copy_s", "write_s", "publish_s")},
            "buffer_bytes": self.buffer_bytes,
            **{name: dict(getattr(self, name)) for name in ("drift", "expected_loss", "steps_behind")},
        }

    def metrics(self) -> dict[str, float]:
        """Return the values for the Trainer's logger."""
        names = ("step", "stall_s", "copy_s", "write_s", "publish_s", "buffer_bytes")
        return {
            "checkpoint/bytes": self.num_bytes,
            **{f"checkpoint/{name}": getattr(self, name) for name in names},
            "checkpoint/stalest_part_steps": max(self.steps_behind.values(), default=0),
        }


def abandon_after(folder: Path, step: int) -> None:
    """Move the lines of later saves to `ABANDONED_LOG`: the run resumes at ``step``. A truncated line is dropped."""
    with suppress(OSError, TailorError):
        check_own(folder / LOG, is_file=True)
        lines, kept, later = [*lines_of(folder / LOG)], list[bytes](), list[bytes]()
        for line in lines:
            with suppress(ValueError, KeyError, TypeError, RecursionError):  # a kill truncated it
                (kept if decode(line)["step"] <= step else later).append(line)
        if later:
            append_line(folder / ABANDONED_LOG, b"\n".join(later))
        if kept != lines:
            replace_durably(folder / LOG, b"".join(line + b"\n" for line in kept))
