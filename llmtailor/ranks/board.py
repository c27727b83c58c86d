"""A board: ranks exchange JSON messages by key, in files of a folder that all ranks see, or in torch.distributed's
key-value store.

There are no collectives: in a thread, they would mix with those of a training. A heartbeat is a number on the board
that grows; a waiting rank compares it with the one that it read before, by its own clock.

Errors travel between ranks as JSON without loss: class, exit code, and of each problem its place with the path in a
checkpoint, text, fix, code, severity, params, and the ranks that have it.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Protocol

from llmtailor.codes import Code
from llmtailor.errors import BRANCHES, Interrupted, PathIn, Problem, StorageError, TailorError
from llmtailor.findings import Finding

_OPEN = os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_ROOM = 4096
"""Bytes of a message's file, unless there is more to say"""
_POLL_S = (0.005, 0.25)
"""Seconds between two reads: first and longest"""
PULSE_S = 5.0
"""Seconds between two heartbeats, and between two reads of one"""


class Board(Protocol):
    """Messages by key."""

    def post(self, key: str, message: Any) -> None:
        """Leave a message, in place of the one before. Raises OSError if there is no room for it."""

    def read(self, *keys: str) -> list[Any] | None:
        """Return the messages of these keys if all are there."""

    def remove(self, *keys: str) -> None:
        """Remove messages, if they are there."""


class FileBoard:
    """A board in a folder, one small file per message: no port to open, no host to find, and nothing to import.

    A file is written in place: it keeps its blocks, so a rank can still report that the disk is full. NFS shows a file
    as it is when it is opened, but caches that a file does not exist; so reading creates it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def post(self, key: str, message: Any) -> None:
        data = json.dumps(message).encode()
        framed = (b"%08x%08x" % (zlib.crc32(data), len(data)) + data).ljust(_ROOM)
        fd = os.open(self.folder / key, os.O_WRONLY | _OPEN, 0o666)
        try:
            at = 0
            while at < len(framed):
                at += os.pwrite(fd, memoryview(framed)[at:], at)
        finally:
            os.close(fd)

    def read(self, *keys: str) -> list[Any] | None:
        """Raises FileNotFoundError if the folder is gone; other errors of the disk count as silence."""
        messages: list[Any] = []
        for key in keys:
            try:
                fd = os.open(self.folder / key, os.O_RDWR | _OPEN, 0o666)
                try:
                    head = os.pread(fd, 16, 0)
                    length = int(head[8:] or b"0", 16)
                    data = os.pread(fd, min(length, os.fstat(fd).st_size), 16)
                finally:
                    os.close(fd)
            except FileNotFoundError:
                raise
            except (OSError, ValueError):
                return None
            if not length or len(data) != length or b"%08x" % zlib.crc32(data) != head[:8]:
                return None  # not there yet, or just being written
            messages.append(json.loads(data))
        return messages

    def remove(self, *keys: str) -> None:
        for key in keys:
            with suppress(OSError):
                (self.folder / key).unlink()


class StoreBoard:
    """A board in a key-value store of torch.distributed, or in one that has its methods.

    ``server`` is what must exist as long as the store is used.
    """

    def __init__(self, store: Any, server: object = None) -> None:
        self._store, self._server = store, server

    def post(self, key: str, message: Any) -> None:
        self._store.set(key, json.dumps(message))

    def read(self, *keys: str) -> list[Any] | None:
        return [json.loads(self._store.get(key)) for key in keys] if self._store.check([*keys]) else None

    def count(self, key: str, more: int) -> int:
        """Add to a number, and return it."""
        return int(self._store.add(key, more))

    def remove(self, *keys: str) -> None:
        for key in keys:
            with suppress(Exception):  # not every store can
                self._store.delete_key(key)


class OwnStore(dict[str, Any]):
    """The store of one process without torch.distributed."""

    set = dict.__setitem__
    get = dict.__getitem__  # type: ignore[assignment]

    def check(self, keys: list[str]) -> bool:
        return self.keys() >= {*keys}

    def add(self, key: str, more: int) -> int:
        self[key] = self.setdefault(key, 0) + more
        return int(self[key])

    def delete_key(self, key: str) -> bool:
        return self.pop(key, None) is not None


class Pulse:
    """A heartbeat that ranks share: a number on the board that grows while any of them makes progress."""

    def __init__(self, board: StoreBoard, key: str) -> None:
        self._board, self._key = board, key
        self._seen, self._at = 0, time.monotonic()

    def _is_due(self) -> bool:
        now = time.monotonic()
        if is_due := now - self._at > PULSE_S:
            self._at = now
        return is_due

    def beat(self) -> None:
        """Count up, unless the last time was just now."""
        if self._is_due():
            self._board.count(self._key, 1)

    def is_new(self) -> bool:
        """Whether any rank has counted up since the last read; not if that was just now."""
        before = self._seen
        if self._is_due():
            self._seen = self._board.count(self._key, 0)
        return self._seen != before


def await_messages(board: Board, keys: list[str], check: Callable[[], object]) -> list[Any]:
    """Return the messages of these keys once all are there; ``check``, called after each read, may raise."""
    for _ in turns():
        with suppress(FileNotFoundError):  # if the folder is gone, ``check`` knows why
            if (messages := board.read(*keys)) is not None:
                return messages
        check()
    raise AssertionError("turns() ends only when is_over() returns True")


def turns(is_over: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Yield, with growing pauses, until it is over.

    Without locks, because a signal handler may interrupt the same loop and wait for the same thing.
    """
    pause, longest = _POLL_S
    yield
    while not is_over():
        time.sleep(pause)
        pause = min(1.1 * pause, longest)  # a wait ends at most a tenth too late: a save has up to three of them
        yield


_SHORT = 300


def as_error(error: BaseException, where: str = "") -> TailorError:
    """Return an exception as ranks report it; ``where`` is the place of one that names none."""
    if isinstance(error, TailorError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return Interrupted.at("", "interrupted", "rerun the same command")
    if isinstance(error, OSError):
        what, fix = f"can't read or write: {error.strerror or error}", "free some space, or check the disk"
        return StorageError.at(error.filename or where, what, fix)
    fix = "this is a bug in llmtailor, or in what it was given: please report it with that rank's traceback"
    return TailorError.at(where, f"unexpected {type(error).__name__}: {error!s:.500}", fix)


def to_json(error: TailorError, *, brief: bool = False) -> dict[str, Any]:
    """Return an error as JSON; a brief one has fewer problems and shorter texts, for a full disk."""
    problems = [_problem_to_json(one) for one in dict.fromkeys(error.problems)]
    if brief:
        problems = [{name: _shortened(value) for name, value in one.items()} for one in problems[:2]]
    return {
        "class": type(error).__name__,
        "exit_code": error.exit_code,
        "came_late": error.came_late,
        "problems": problems,
    }


def from_json(content: Mapping[str, Any]) -> TailorError:
    """Return an error that another rank has written; its class, or if that is not known here, that of its exit code."""
    kinds = {kind.__name__: kind for kind in _kinds(TailorError)}
    branch = next((kind for kind in BRANCHES if kind.exit_code == content["exit_code"]), TailorError)
    error = kinds.get(content["class"], branch)(map(_problem_from_json, content["problems"]))
    error.came_late = content["came_late"]
    return error


def merged(errors: Mapping[int, TailorError], num_ranks: int) -> TailorError:
    """Return the errors of some of several ranks as one: each problem once, with its ranks, unless all have it.

    Its class is that of the lowest exit code: a full disk must not hide a bug or a refusal.
    """
    ranks_of: dict[Problem, list[int]] = {}
    for rank, error in sorted(errors.items()):
        for problem in dict.fromkeys(error.problems):
            ranks_of.setdefault(problem, []).append(rank)
    found = type(min(errors.values(), key=lambda error: error.exit_code))(
        one if one.ranks or len(ranks) == num_ranks else replace(one, ranks=tuple(ranks))
        for one, ranks in ranks_of.items()
    )
    found.came_late = any(error.came_late for error in errors.values())
    return found


def _kinds(kind: type[TailorError]) -> Iterator[type[TailorError]]:
    yield kind
    for one in kind.__subclasses__():
        yield from _kinds(one)


def _problem_to_json(problem: Problem) -> dict[str, Any]:
    content = {field.name: getattr(problem, field.name) for field in fields(problem)}
    where = problem.where
    place = [where.checkpoint, where.path] if isinstance(where, PathIn) else str(where)
    return {**content, "where": place, "code": problem.code.value}


def _problem_from_json(content: Mapping[str, Any]) -> Problem:
    where, known = content["where"], {code.value: code for code in Code}
    found: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in content.items()
    }
    found |= {"where": PathIn(*where) if isinstance(where, list) else where, "code": known[content["code"]]}
    return (Finding if "severity" in found else Problem)(**found)


def _shortened(value: Any) -> Any:
    return value[:_SHORT] if isinstance(value, str) else value[:8] if isinstance(value, (list, tuple)) else value
