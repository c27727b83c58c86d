"""The log of a run's saves, ``partial/saves.jsonl``, as data. Whatever a line holds, reading it raises nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmtailor.containers.json import decode
from llmtailor.errors import PathIn
from llmtailor.storage.local import check_size, open_source

LOG = "saves.jsonl"
"""In the folder of partial checkpoints: one JSON object per save, oldest first"""
ABANDONED_LOG = "saves.abandoned.jsonl"
"""The same, for saves of abandoned attempts"""
_MAX_LINE = 16 << 20
"""Bytes of a line that are read; a save of a model with a thousand parts has less than 100 kB"""
_MAX_BYTES = 4 << 30
_MAX_INT = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedSave:
    """A published save. Times are those of the slowest rank."""

    step: int
    parts: Mapping[str, str] = field(default_factory=dict)
    """Saved part -> reason"""
    num_bytes: int = 0
    """Size of all ranks' files, in bytes. Frozen params count even if they are hard links to an earlier save."""
    stall_s: float = 0.0
    """Seconds for which the save stopped training: in `PartialSaver.save` and before the next optimizer steps"""
    copy_s: float = 0.0
    """Seconds from the start of the save until its states were copied to host memory; 0 without background saves"""
    write_s: float = 0.0
    """Seconds until its files were durable"""
    publish_s: float = 0.0
    """Seconds until the partial checkpoint was complete"""
    drift: Mapping[str, float] = field(default_factory=dict)
    """Part -> relative change since its own last save, measured before this one; may be infinite"""
    expected_loss: Mapping[str, float] = field(default_factory=dict)
    """Part -> estimated rise of the loss with its own last save, measured before this one; see `policies.Situation`"""
    steps_behind: Mapping[str, int] = field(default_factory=dict)
    """Part -> optimizer steps since its newest save, after this one"""
    masters: tuple[str, ...] = ()
    """Further parts, of which it holds the masters without the moments"""
    updates_missed: int = 0
    """The most updates that the moments of a part lack and Adam counts, because resumes went on with older ones"""


@dataclass(frozen=True, slots=True)
class FailedSave:
    step: int
    why: str


@dataclass(frozen=True, slots=True)
class AttestedResume:
    """What a resumed training was found to hold, compared with its checkpoint."""

    step: int
    checkpoint: str
    is_same: bool
    num_states: int
    num_same: int
    how: str
    """``sample`` or ``full``"""
    cause: str = ""
    """What is wrong; empty if nothing is"""


@dataclass(frozen=True, slots=True)
class SaveLog:
    saves: tuple[LoggedSave, ...] = ()
    """By ascending step"""
    failed: tuple[FailedSave, ...] = ()
    attested: tuple[AttestedResume, ...] = ()
    """In the order of the attempts"""
    unreadable: int = 0
    """Lines that are not valid; a kill may leave one"""


def read_log(path: Path) -> SaveLog:
    """Read a log; one that does not exist is empty. Raises as `lines_of`."""
    saves: list[LoggedSave] = []
    failed: list[FailedSave] = []
    attested: list[AttestedResume] = []
    unreadable = 0
    for line in lines_of(path):
        try:
            content = decode(line)
            step = _count(content["step"])
            if "failed" in content:
                failed.append(FailedSave(step, str(content["failed"])))
            elif "attested" in content:
                attested.append(_attested(step, content["attested"]))
            elif "num_bytes" in content:
                saves.append(_save(step, content))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            unreadable += 1
    return SaveLog(tuple(sorted(saves, key=lambda save: save.step)), tuple(failed), tuple(attested), unreadable)


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a log that are not empty; none if it does not exist.

    Raises SourceError for anything but a file of reasonable size, or one that can't be read.
    """
    if not path.exists():
        return
    with open_source(path, PathIn(path.parent.name, path.name)) as file:
        check_size(file, _MAX_BYTES)
        begun = b""
        for start in range(0, file.num_bytes, _MAX_LINE):
            *lines, begun = (begun + file.read(start, min(start + _MAX_LINE, file.num_bytes))).split(b"\n")
            if len(begun) >= _MAX_LINE:
                lines, begun = [*lines, begun], b""
            yield from filter(bytes.strip, lines)
        if begun.strip():
            yield begun


def _save(step: int, content: Mapping[str, Any]) -> LoggedSave:
    return LoggedSave(
        step=step,
        parts={str(part): str(why) for part, why in content["parts"].items()},
        num_bytes=_count(content["num_bytes"]),
        **{name: _seconds(content.get(name, 0.0)) for name in ("stall_s", "copy_s", "write_s", "publish_s")},
        drift={str(part): _change(value) for part, value in content.get("drift", {}).items()},
        expected_loss={str(part): _change(value) for part, value in content.get("expected_loss", {}).items()},
        steps_behind={str(part): _count(value) for part, value in content.get("steps_behind", {}).items()},
        masters=tuple(map(str, content.get("masters", ()))),
        updates_missed=_count(content.get("updates_missed", 0)),
    )


def _attested(step: int, content: Mapping[str, Any]) -> AttestedResume:
    return AttestedResume(
        step,
        str(content["checkpoint"]),
        bool(content["is_same"]),
        _count(content["num_states"]),
        _count(content["num_same"]),
        str(content["how"]),
        str(content.get("cause") or ""),
    )


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MAX_INT:
        raise ValueError("not a count")
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or not 0 <= value < _MAX_INT:
        raise ValueError("not a number of seconds")
    return float(value)


def _change(value: Any) -> float:
    if type(value) not in (int, float) or value < 0:
        raise ValueError("not a relative change")
    return math.inf if math.isnan(value) else float(value)
