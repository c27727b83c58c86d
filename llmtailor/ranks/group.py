"""The ranks that do the same steps at the same time (`Ranks`), and those of one command that a launcher has started
(`RankGroup`): who takes part, who is alive, and how all of them end together.

Each rank of a group has a thread that keeps the rank's status on the board up to date and reads those of others: rank 0
reads all, the others read rank 0's. The status has a heartbeat, a number that grows as long as the process runs. A rank
without a heartbeat for `LIMIT_S` is dead or hangs, and the work ends on all ranks. Clocks of different nodes are never
compared.

Rank 0's status has a random token; the others answer with it, and rank 0 lists who has answered. A rank believes rank 0
only once it is listed, so what earlier groups have left on the board is ignored.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import socket
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

from llmtailor.errors import PathIn, Problem, SourceError, StorageError, TailorError, Unanswered, ranges, ranks_text
from llmtailor.ranks.errors import as_error, from_json, merged, to_json
from llmtailor.ranks.launch import RankInfo
from llmtailor.ranks.store import await_messages
from llmtailor.ranks.team import Ranks
from llmtailor.storage.local import Lock, OpenFile, check_own, make_folder
from llmtailor.storage.threads import start
from llmtailor.timing import TIME_LIMIT, time_limit

_T = TypeVar("_T")


logger = logging.getLogger(__name__)
LIMIT_S = 180.0
"""Seconds without a heartbeat after which a rank counts as dead. NFS may hide new files for 60."""
BEAT_S = 1.0
POLL_S = (0.1, 2.0)
"""Seconds between two reads, of few ranks and of many"""
LEAVING_S = (10.0, 60.0)
"""Seconds for which rank 0 finally waits for ranks that never answered, and for those that still write"""
WORKING, DONE, IDLE, FAILED, ENDED = "working", "done", "idle", "failed", "ended"
"""Stages. A rank that is done is no longer needed; one that is idle has left without having done its share."""


_OPEN = os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_ROOM = 4096


class FileBoard:
    """A board in a folder, one small file per message: no port to open, no host to find, and nothing to import.

    A file is written in place: it keeps its blocks, so a rank can still report that the disk is full. NFS shows a file
    as it is when it is opened, but caches that a file does not exist; so reading creates it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def set(self, key: str, message: Any) -> None:
        data = json.dumps(message).encode()
        framed = (b"%08x%08x" % (zlib.crc32(data), len(data)) + data).ljust(_ROOM)
        fd = os.open(self.folder / key, os.O_WRONLY | _OPEN, 0o666)
        try:
            at = 0
            while at < len(framed):
                at += os.pwrite(fd, memoryview(framed)[at:], at)
        finally:
            os.close(fd)

    def get(self, *keys: str) -> list[Any] | None:
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


class Stoppable(Protocol):
    """The workers of this process, see `copying.pool.Stop`."""

    requested: bool
    failed: bool

    def check(self) -> None: ...


class RankGroup(Ranks):
    """This rank's view of the work that ranks share; a context manager around it.

    Leaving the block with an error ends the work on all ranks. Rank 0 raises the errors of all ranks; the others raise
    an error of the same exit code with `TailorError.is_reported`, so that only one process tells the user.

    Args:
        info: which rank this is.
        folder: the board, which all ranks see. Rank 0 removes it at the end.
        out: the output, for messages.
        lock: the lock of the output, which rank 0 holds meanwhile.
    """

    def __init__(self, info: RankInfo, folder: Path, out: Path, lock: Lock | None = None) -> None:
        self.rank, self.world_size = info.rank, info.world_size
        self.folder, self.out, self.lock = folder, out, lock
        self.limit_s = time_limit(LIMIT_S)
        self.on_progress: Callable[[int], None] = lambda num_bytes: None
        """On rank 0, gets the bytes that other ranks move"""
        self._board = FileBoard(folder)
        self._own: dict[str, Any] = {
            "launch": f"{info.launch} of {info.world_size}",
            "token": secrets.token_hex(8) if self.is_first else "",
            "nonce": secrets.token_hex(4),
            "answered": {},
            "process": f"process {os.getpid()} on {socket.gethostname()}",
            "stage": WORKING,
            "round": 0,
            "beat": 0,
            "num_bytes": 0,
        }
        self._own_error: TailorError | None = None
        self._others = range(1, info.world_size) if self.is_first else range(1)
        self._found: dict[int, dict[str, Any]] = {}
        """The latest statuses of ranks that take part"""
        self._silent_s = dict.fromkeys(self._others, 0.0)
        self._num_bytes = 0
        """What other ranks have moved, as `on_progress` knows it"""
        self._cause: TailorError | None = None
        self._stop: Stoppable | None = None
        self._posting, self._writing, self._closed = threading.Lock(), threading.Lock(), threading.Event()
        self._poll_s = min(POLL_S[1], max(POLL_S[0], 0.02 * info.world_size))
        self._thread = threading.Thread(target=self._run, name="llmtailor-ranks", daemon=True)

    def __enter__(self) -> RankGroup:
        for folder in (self.folder.parent, self.folder):
            check_own(folder)
        make_folder(self.folder)
        if self.is_first:
            self._post()
        start(self._thread)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not self.is_first:
                self._leave(error)
            elif not self._closed.is_set():
                self.end(error)
        finally:
            self._silence()

    def attach(self, stop: Stoppable) -> None:
        """Stop the workers when the work ends elsewhere."""
        self._stop = stop
        stop.failed = stop.failed or self._cause is not None

    def check(self) -> None:
        """Raise what has ended the work, if anything has; Interrupted on request."""
        if self._cause is not None:
            raise self._cause
        if self._stop is not None and self._stop.requested:
            self._stop.check()

    def count(self, num_bytes: int) -> None:
        """Report bytes that were moved to rank 0; from any thread."""
        with self._posting:
            self._own["num_bytes"] += num_bytes

    def done(self) -> None:
        """Report that this rank is no longer needed; return once rank 0 has ended the work."""
        self._report(DONE)
        self._wait(lambda status: status["stage"] == ENDED)

    def collect(self, mine: _T) -> list[_T]:
        """Return every rank's value, as JSON gives it back, on rank 0; elsewhere return at once, nothing.

        Raises what ends the work.
        """
        found = self._exchange(mine, gives=not self.is_first)
        return [mine, *found] if self.is_first else []

    def broadcast(self, value: _T) -> _T:
        """Return rank 0's value on every rank. Raises what ends the work."""
        found = self._exchange(value, gives=self.is_first)
        return value if self.is_first else found[0]

    def all_gather(self, mine: _T) -> list[_T]:
        return self.broadcast(self.collect(mine))

    def wait_for_files(self, folder: Path, sizes: Mapping[str, int]) -> None:
        """Wait until this node sees the files of the others, by path below a folder, in their sizes.

        NFS remembers for up to a minute what is in a folder, unless this node changes it, and what a file is like until
        it is opened. Raises StorageError if it never sees them.
        """
        for parent in {(folder / path).parent for path in sizes}:
            probe = parent / ".llmtailor-probe"
            with suppress(OSError):
                make_folder(probe)
                probe.rmdir()
        for path, num_bytes in sizes.items():
            check = self._patience(PathIn(self.out.name, path))
            while not _has_size(folder / path, num_bytes):
                check()
                time.sleep(self._poll_s)

    def end(self, error: BaseException | None) -> None:
        """On rank 0: end the work on all ranks, and wait until no one writes any more."""
        self._report(ENDED, error)
        began = time.monotonic()
        while waiting := [rank for rank in self._others if not self._has_left(rank, time.monotonic() - began)]:
            logger.debug("waiting until ranks %s have left", ranges(waiting))
            time.sleep(self._poll_s / 2)
        self._silence()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _has_left(self, rank: int, seconds: float) -> bool:
        status = self._found.get(rank)
        if status is None:
            return seconds > min(LEAVING_S[0], self.limit_s)
        is_silent = self._silent_s[rank] > min(LEAVING_S[0], self.limit_s)
        return status["stage"] == ENDED or is_silent or seconds > LEAVING_S[1]

    def _leave(self, error: BaseException | None) -> None:
        """On the other ranks: report why this one can't continue, wait for the end, and raise its error, if any."""
        if error is not None and error is not self._cause:
            self._report(FAILED, error)
        elif self._own["stage"] != DONE:
            self._report(IDLE)
        try:
            while self._cause is None and self._found.get(0, {}).get("stage") != ENDED:
                time.sleep(self._poll_s / 2)
        finally:
            self._silence()
            self._report(ENDED)
            if 0 not in self._found:
                _remove_if_empty(self.folder, self.rank)
        if "error" in (lead := self._found.get(0, {})):
            raised = from_json(lead["error"])
            raised.is_reported = True
            raise raised from error
        elif self._cause is not None and self._cause is not error:
            raise self._cause from error

    def _silence(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _exchange(self, value: object, *, gives: bool) -> list[Any]:
        """Leave a value for the others, or return theirs. Raises StorageError, and what ends the work."""
        number = self._own["round"] + 1
        if not gives:
            self._own["round"] = number
            self._wait(lambda status: status["round"] >= number)
            return [self._take(rank, number) for rank in self._others]
        if not self.is_first:
            self._wait(lambda status: True)  # rank 0's token is part of the key
        try:
            self._board.set(self._key(self.rank, number), value)
        except OSError as error:
            raise as_error(error, str(self.folder)) from error
        with self._posting:
            self._own["round"] = number
        self._post()
        return []

    def _take(self, rank: int, number: int) -> Any:
        """Return a value that another rank has left, once this node sees it. Raises StorageError if it never does."""
        key = self._key(rank, number)
        return await_messages(self._board, [key], self._patience(self.folder / key))[0]  # type: ignore[arg-type]

    def _key(self, rank: int, number: int) -> str:
        return f"{self._own['token']}-{rank}-{number}"

    def _patience(self, where: object) -> Callable[[], None]:
        """Return what to call while something is awaited that another rank has written."""
        until = time.monotonic() + self.limit_s

        def check() -> None:
            self.check()
            if time.monotonic() > until:
                what = f"another rank has written it, but this node does not see it after {self.limit_s:g} s"
                raise StorageError.at(where, what, "check that all nodes mount the same folder, then rerun the command")

        return check

    def _wait(self, is_there: Callable[[Mapping[str, Any]], bool]) -> None:
        """Return once that is so of all whose status this rank reads. Raises what ends the work."""
        while True:
            self.check()
            found = dict(self._found)
            if idle := [at for at, one in found.items() if one["stage"] in (IDLE, ENDED) and not is_there(one)]:
                fix = "check that all ranks see the same folders, then rerun the command"
                raise SourceError.at(ranks_text(idle), "it found nothing to write", fix)
            if len(found) == len(self._others) and all(map(is_there, found.values())):
                return
            time.sleep(self._poll_s / 2)

    def _report(self, stage: str, error: BaseException | None = None) -> None:
        with self._posting:
            self._own["stage"] = stage
            self._own_error = as_error(error) if error is not None else self._own_error
        self._post()

    def _post(self) -> None:
        """Leave this rank's status. If the disk refuses it, the others notice the missing heartbeat."""
        with self._writing:
            with self._posting:
                status, error = dict(self._own), self._own_error
            if not status["token"]:
                return
            for brief in (False, True) if error is not None else (False,):  # a full disk may still take less
                more = {"error": to_json(error, brief=brief)} if error is not None else {}
                with suppress(OSError):
                    self._board.set(str(self.rank), status | more)
                    return

    def _run(self) -> None:
        looked = spoke = time.monotonic()
        while not self._closed.wait(self._poll_s):
            now = time.monotonic()
            # a process that was stopped itself has not looked, so the others were not silent
            passed, looked = min(now - looked, 2 * self._poll_s), now
            if now - spoke >= BEAT_S:
                spoke = now
                with self._posting:
                    self._own["beat"] += 1
                self._post()
            try:
                cause = self._look(passed)
            except Exception as error:  # a bug must not look like a missing heartbeat
                cause = as_error(error)
            if cause is not None and self._cause is None:
                logger.info("the work ends: %s", cause)
                self._cause = cause
                if self._stop is not None:
                    self._stop.failed = True

    def _look(self, passed: float) -> TailorError | None:
        """Read the statuses; return what ends the work."""
        for rank in self._others:
            try:
                messages = self._board.get(str(rank))
            except FileNotFoundError:
                messages = None
                if self._found:
                    return self._gone()
            self._silent_s[rank] += passed
            if messages is None:
                continue
            (status,), before = messages, self._found.get(rank)
            if not (self._is_answer(rank, status) if self.is_first else self._is_call(status)):
                if before is not None and not self.is_first:
                    return self._gone()
                continue
            if before is None or (status["beat"], status["stage"]) != (before["beat"], before["stage"]):
                self._silent_s[rank] = 0.0
            self._found[rank] = status
        if self.is_first:
            moved = sum(status["num_bytes"] for status in self._found.values())
            self.on_progress(moved - self._num_bytes)
            self._num_bytes = moved
        if errors := {rank: from_json(one["error"]) for rank, one in self._found.items() if "error" in one}:
            return merged(errors, self.world_size) if self.is_first else errors[0]
        return self._silence_of_others()

    def _is_answer(self, rank: int, status: Mapping[str, Any]) -> bool:
        if status["launch"] != self._own["launch"] or status["token"] != self._own["token"]:
            return False
        listed = self._own["answered"]
        if str(rank) not in listed:
            with self._posting:  # another thread may be posting the old one
                self._own["answered"] = {**listed, str(rank): status["nonce"]}
            self._post()
        # if two processes have the same rank, the first one counts
        return bool(self._own["answered"][str(rank)] == status["nonce"])

    def _is_call(self, status: Mapping[str, Any]) -> bool:
        if status["launch"] != self._own["launch"]:
            return False
        if status["token"] != self._own["token"] and 0 not in self._found:
            self._own["token"] = status["token"]
            self._post()
        is_listed = status["answered"].get(str(self.rank)) == self._own["nonce"]
        return bool(is_listed and status["token"] == self._own["token"])

    def _silence_of_others(self) -> TailorError | None:
        """Return the error if a rank has had no heartbeat for too long. One that is done may be gone."""
        problems, late = [], []
        longer = f"set {TIME_LIMIT} above {self.limit_s:g} (seconds)"
        fix = f"read that rank's log, and rerun the same command; if the rank was only slow, {longer}"
        for rank in (rank for rank, seconds in self._silent_s.items() if seconds > self.limit_s):
            status = self._found.get(rank)
            if status is None:
                late.append(rank)
            elif status["stage"] not in (DONE, FAILED, ENDED):
                where, what = f"rank {rank} ({status['process']})", "it died or hangs: no heartbeat"
                problems.append(Problem(where, f"{what} for {self.limit_s:g} s", fix))
        if late:
            what = f"no sign of it in {self.folder} for {self.limit_s:g} s"
            start = f"check that all ranks were started and see this folder; if they start slowly, {longer}"
            problems.insert(0, Problem(ranks_text(late), what, start))
        return Unanswered(problems) if problems else None

    def _gone(self) -> TailorError:
        where = self._found[0]["process"] if 0 in self._found else str(self.out)
        what = "it has ended, or another merge has taken its place"
        return Unanswered.at(f"rank 0 ({where})", what, "see its log; then rerun the same command")


def _has_size(path: Path, num_bytes: int) -> bool:
    with suppress(FileNotFoundError):
        return OpenFile(path).num_bytes == num_bytes
    return False


def _remove_if_empty(folder: Path, rank: int) -> None:
    """Remove what this rank made while it waited for a rank 0 that never came."""
    for name in ("0", str(rank)):
        with suppress(OSError):
            if name != "0" or not (folder / name).stat().st_size:
                (folder / name).unlink()
    for path in (folder, folder.parent):
        with suppress(OSError):
            path.rmdir()
