"""The journal of a merge: the merge's identity, and how much of it has been written durably.

The journal is a file of JSON lines in the staging folder. The first line identifies the merge; each of the others
records up to which byte a file is durable, with the CRC-32 so far. A merge that resumes reads those bytes again and
compares, so a torn, lost or wrong line costs only time.

If several ranks share a merge, each rank except rank 0 has its own journal of marks. The next merge enters them into
rank 0's.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from llmtailor.checkpoint.layout import Plan
from llmtailor.errors import some
from llmtailor.storage.local import FileFact, chunks, write_all


@dataclass(frozen=True, slots=True)
class Identity:
    """Everything that decides the bytes of the output, and details for messages."""

    tool_version: str
    plan: str
    """Digest of the plan: every piece with the folders it reads from, including literal bytes"""
    sources: Mapping[str, FileFact]
    """Every file that pieces read from, by path"""
    request: str
    """Digest of the recipe and the options: the same request, even if the plan has changed"""
    recipe: str
    begun: str
    num_bytes: int

    def digest(self) -> str:
        """Return the SHA-256 of everything that decides the output's bytes, including the state of the source files."""
        facts = [(path, fact.num_bytes, fact.mtime_ns) for path, fact in sorted(self.sources.items())]
        return hashlib.sha256(repr((self.tool_version, self.plan, facts)).encode()).hexdigest()


def identify(
    plan: Plan, facts: Sequence[Mapping[str, FileFact]], *, tool_version: str, recipe: str, request: object, begun: str
) -> Identity:
    """Return a merge's identity. ``facts`` are those of each source's files; ``request`` needs a stable repr."""
    sources = {f"{plan.sources[source]}/{path}": facts[source][path] for source, path in plan.summary.read}
    asked = hashlib.sha256(repr(request).encode()).hexdigest()
    return Identity(tool_version, plan.summary.digest, sources, asked, recipe, begun, plan.num_bytes)


def why_not(old: Identity, new: Identity) -> str:
    """Return why the merge ``new`` can't resume from the output of ``old``; empty if it can."""
    changed = [
        path for path, fact in new.sources.items() if path not in old.sources or not fact.is_like(old.sources[path])
    ]
    if old.tool_version != new.tool_version:
        return f"it was started by llmtailor {old.tool_version}, but this is {new.tool_version}"
    if old.plan == new.plan and not changed:
        return ""
    if old.plan != new.plan and old.request != new.request:
        return "its recipe or options differ"
    return f"its sources have changed since: {some(changed)}" if changed else "its sources have changed since"


def is_another(old: Identity, new: Identity) -> bool:
    """Return whether ``old`` is another merge, whose output may still be wanted, and not an older state of this one."""
    return old.request != new.request and old.plan != new.plan


_SCHEMA = "llmtailor.journal/1"


@dataclass(frozen=True, slots=True)
class Mark:
    """The first ``num_bytes`` of a file are durable, and ``crc`` is their CRC-32."""

    num_bytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class Unfinished:
    identity: Identity
    marks: Mapping[str, tuple[Mark, ...]]
    """By relative path, ascending"""

    def with_marks_of(self, journals: Iterable[Unfinished | None]) -> Unfinished:
        """Return it with the marks in the journals of other ranks, if they are of the same merge."""
        joined = dict(self.marks)
        for journal in journals:
            is_same = journal and journal.identity.digest() == self.identity.digest()
            for path, marks in journal.marks.items() if journal and is_same else ():
                before = (mark for mark in joined.get(path, ()) if mark.num_bytes < marks[0].num_bytes)
                joined[path] = (*before, *marks)
        return Unfinished(self.identity, joined)

    @property
    def num_bytes(self) -> int:
        return sum(marks[-1].num_bytes for marks in self.marks.values())


class Journal:
    """Writes the journal; several threads may add to it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.reached: dict[str, int] = {}
        """Durable bytes by path"""
        self._lock = threading.Lock()

    def begin(self, identity: Identity) -> None:
        """Start the empty journal of this merge. Raises OSError."""
        facts = {path: asdict(fact) for path, fact in identity.sources.items()}
        self._append({"schema": _SCHEMA, **asdict(identity), "sources": facts})

    def add(self, path: str, mark: Mark) -> None:
        """Durably record how far a file is. Raises OSError."""
        with self._lock:
            self._append(_line(path, mark))
            self.reached[path] = mark.num_bytes

    def take_in(self, marks: Mapping[str, Sequence[Mark]]) -> None:
        """Durably record what the journals of other ranks have. Raises OSError."""
        lines = [_line(path, mark) for path, several in marks.items() for mark in several]
        if lines:
            self._append(*lines)
            self.reached |= {path: several[-1].num_bytes for path, several in marks.items()}

    def clear(self) -> None:
        """Durably delete all content. Raises OSError."""
        os.ftruncate(self.fd, 0)
        os.fsync(self.fd)
        self.reached = {}

    def _append(self, *contents: dict[str, Any]) -> None:
        os.lseek(self.fd, 0, os.SEEK_END)
        # the leading line feed ends a torn line
        write_all(self.fd, b"".join(b"\n" + json.dumps(content).encode() for content in contents))
        os.fsync(self.fd)


def _line(path: str, mark: Mark) -> dict[str, Any]:
    return {"path": path, "num_bytes": mark.num_bytes, "crc32": f"{mark.crc:08x}"}


def read_journal(fd: int) -> Unfinished | None:
    """Return the content of a journal; None if it is empty or does not identify its merge. Raises OSError."""
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
            # a file that was cut and rewritten has later lines with fewer bytes
            marks[path] = (*(earlier for earlier in marks.get(path, ()) if earlier.num_bytes < mark.num_bytes), mark)
    return Unfinished(identity, marks)


def _lines(fd: int) -> Iterator[dict[str, Any]]:
    data = b"".join(bytes(chunk) for chunk in chunks(fd, memoryview(bytearray(1 << 20))))
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
