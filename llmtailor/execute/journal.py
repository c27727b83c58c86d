"""The journal of a merge: what it is, and what of it has been written for good.

It is a file of JSON lines in the staging folder. The first says which merge it is; each of the others that a file is
durable up to some byte, with the CRC-32 so far. Whoever goes on reads those bytes again and compares, so a line that
is torn, lost or wrong costs time and no more.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from llmtailor.core.index import FileFact
from llmtailor.execute.identity import Identity
from llmtailor.io.files import write_all

_SCHEMA = "llmtailor.journal/1"


@dataclass(frozen=True, slots=True)
class Mark:
    """The first ``num_bytes`` of a file are durable, and ``crc`` is their CRC-32."""

    num_bytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class Unfinished:
    """What an earlier merge left behind."""

    identity: Identity
    marks: Mapping[str, tuple[Mark, ...]]
    """By relative path, ascending."""

    @property
    def num_bytes(self) -> int:
        return sum(marks[-1].num_bytes for marks in self.marks.values())


class Journal:
    """Writes the journal; several threads may add to it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.reached: dict[str, int] = {}
        """Durable bytes by path."""
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return sum(self.reached.values())

    def begin(self, identity: Identity) -> None:
        """Begin the journal of this merge; it is empty. Raises OSError."""
        facts = {path: asdict(fact) for path, fact in identity.sources.items()}
        self._append({"schema": _SCHEMA, **asdict(identity), "sources": facts})

    def add(self, path: str, mark: Mark) -> None:
        """Note, durably, how far a file is. Raises OSError."""
        with self._lock:
            self._append({"path": path, "num_bytes": mark.num_bytes, "crc32": f"{mark.crc:08x}"})
            self.reached[path] = mark.num_bytes

    def clear(self) -> None:
        """Forget everything, durably. Raises OSError."""
        os.ftruncate(self.fd, 0)
        os.fsync(self.fd)
        self.reached = {}

    def _append(self, content: dict[str, Any]) -> None:
        os.lseek(self.fd, 0, os.SEEK_END)
        # the line feed in front closes a line that was torn
        write_all(self.fd, b"\n" + json.dumps(content).encode())
        os.fsync(self.fd)


def read_journal(fd: int) -> Unfinished | None:
    """Return what a journal says; None if it is empty or doesn't even say which merge it is of. Raises OSError."""
    lines = _lines(fd)
    try:
        identity = _identity(next(lines))
    except (StopIteration, KeyError, TypeError, ValueError):
        return None
    marks: dict[str, tuple[Mark, ...]] = {}
    for line in lines:
        try:
            path, mark = line["path"], Mark(line["num_bytes"], int(line["crc32"], 16))
        except (KeyError, TypeError, ValueError):
            continue
        if isinstance(path, str) and isinstance(mark.num_bytes, int):
            # a file that was cut and written again has later lines for less
            marks[path] = (*(one for one in marks.get(path, ()) if one.num_bytes < mark.num_bytes), mark)
    return Unfinished(identity, marks)


def _lines(fd: int) -> Iterator[dict[str, Any]]:
    data = b""
    while chunk := os.pread(fd, 1 << 20, len(data)):
        data += chunk
    for line in data.split(b"\n"):
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(content, dict):
            yield content


def _identity(line: dict[str, Any]) -> Identity:
    if line.pop("schema") != _SCHEMA:
        raise KeyError("schema")
    sources = {path: FileFact(**fact) for path, fact in dict(line.pop("sources")).items()}
    identity = Identity(**line, sources=sources)
    if not isinstance(identity.num_bytes, int):
        raise TypeError("num_bytes")
    return identity
