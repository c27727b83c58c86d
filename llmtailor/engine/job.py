"""A merge that several ranks share: who takes part, who is alive, and how all of them end together.

Each rank has a thread that keeps the rank's post (`engine.posts`) up to date and reads those of others: rank 0 reads
all, the others read rank 0's. A number in the post grows as long as the process runs. A rank whose number stands still
for `LIMIT_S` is dead or hangs, and the merge ends on all ranks. Clocks of different nodes are never compared.

Rank 0 holds the lock of the output. Its post calls the others by a random token; they answer with that token, and rank
0 lists who has answered. A rank believes rank 0 only once it is listed, so posts of earlier merges mean nothing.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from llmtailor.codes import Code
from llmtailor.engine.launch import Member
from llmtailor.engine.pool import Stop
from llmtailor.engine.posts import Posts
from llmtailor.engine.staging import RANKS, acquire, lock_of, release, staging_folder
from llmtailor.errors import BRANCHES, Interrupted, Problem, SourceError, StorageError, TailorError, Unanswered, ranges
from llmtailor.storage.local import make_folder
from llmtailor.timing import TIME_LIMIT, time_limit

logger = logging.getLogger(__name__)
LIMIT_S = 180.0
"""Seconds of silence after which a rank is given up. NFS may hide new files for 60."""
PLANNING, READY, WRITING, WRITTEN = "planning", "ready", "writing", "written"
CHECKING, CHECKED = "checking", "checked"
EXCHANGING = "exchanging"
IDLE, FAILED, ENDED = "idle", "failed", "ended"
_BEAT_S = 1.0
_LEAVING_S = (10.0, 60.0)
"""Seconds for which rank 0 waits, in the end, for ranks that never answered, and for those that still write"""


class Job:
    """This rank's view of a shared merge; a context manager around planning and writing it.

    Leaving the block with an error ends the merge on all ranks. Rank 0 raises the errors of all ranks; the others raise
    an error of the same exit code with `TailorError.is_reported`, so that only one process tells the user.

    Args:
        member: which rank this is.
        out: the output, which all ranks must name alike.
    """

    def __init__(self, member: Member, out: Path) -> None:
        self.member, self.out = member, out.absolute()
        self.limit_s = time_limit(LIMIT_S)
        self.lock = lock_of(self.out)
        """On rank 0, held from the beginning to the end"""
        self.on_progress: Callable[[int], None] = lambda num_bytes: None
        """On rank 0, gets the bytes that other ranks move"""
        self.needs_all = False
        """On rank 0, whether ranks have more to do when they have written their shares"""
        self.folder = staging_folder(self.out) / RANKS
        self._posts = Posts(self.folder)
        self._own: dict[str, Any] = {
            "launch": f"{member.launch} of {member.world_size}",
            "token": secrets.token_hex(8) if self.is_first else "",
            "nonce": secrets.token_hex(4),
            "answered": {},
            "process": f"process {os.getpid()} on {socket.gethostname()}",
            "stage": PLANNING,
            "beat": 0,
            "num_bytes": 0,
        }
        self._found: dict[int, dict[str, Any]] = {}
        """The latest posts of ranks that take part"""
        self._silent_s = dict.fromkeys(self._others, 0.0)
        self._told_bytes = 0
        self._cause: TailorError | None = None
        self._stop: Stop | None = None
        self._posting, self._writing, self._closed = threading.Lock(), threading.Lock(), threading.Event()
        self._poll_s = min(2.0, max(0.1, 0.02 * member.world_size))
        self._thread = threading.Thread(target=self._run, name="llmtailor-job", daemon=True)

    @property
    def is_first(self) -> bool:
        return self.member.rank == 0

    @property
    def _others(self) -> range:
        return range(1, self.member.world_size) if self.is_first else range(1)

    # --- from beginning to end -----------------------------------------------------------------------------------

    def __enter__(self) -> Job:
        if self.is_first:
            until = time.monotonic() + min(_LEAVING_S[0], self.limit_s)
            acquire(self.lock, self.out, until)  # the ranks of an earlier merge may just be leaving
        make_folder(self.folder)
        if self.is_first:
            self._say()
        self._thread.start()
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
            if self.is_first:
                release(self.lock, self.out)

    def attach(self, stop: Stop) -> None:
        """Stop the workers when the merge ends elsewhere."""
        self._stop = stop
        stop.failed = stop.failed or self._cause is not None

    def check(self) -> None:
        """Raise what has ended the merge, if anything has; Interrupted on request."""
        if self._cause is not None:
            raise self._cause
        if self._stop is not None and self._stop.requested:
            self._stop.check()

    def count(self, num_bytes: int) -> None:
        """Tell rank 0 that bytes were moved; from any thread."""
        with self._posting:
            self._own["num_bytes"] += num_bytes

    def say(self, stage: str, **facts: Any) -> None:
        """Tell the other ranks how far this one is."""
        with self._posting:
            self._own |= {"stage": stage, **facts}
        self._say()

    def wait(self, *stages: str, round_number: int = 0) -> dict[int, dict[str, Any]]:
        """Return the posts of all whom this rank waits for (rank 0: all others) once they are in one of these stages,
        or say that they have been in this round of an exchange.

        Raises what ends the merge.
        """

        def is_there(post: Mapping[str, Any]) -> bool:
            return post["stage"] in stages or (round_number > 0 and post.get("round") == round_number)

        while True:
            self.check()
            found = dict(self._found)
            idle = [rank for rank, post in found.items() if post["stage"] in (IDLE, ENDED) and not is_there(post)]
            if idle:
                what, fix = (
                    "it found nothing to write",
                    "check that all ranks see the same folders, then run this again",
                )
                raise SourceError.at(_name(idle), what, fix)
            if len(found) == len(self._others) and all(map(is_there, found.values())):
                return found
            time.sleep(self._poll_s / 2)

    def end(self, error: BaseException | None) -> None:
        """On rank 0: end the merge on all ranks, and wait until no one writes any more."""
        self.say(ENDED, **({} if error is None else _told(error)))
        began = time.monotonic()
        while waiting := [rank for rank in self._others if not self._has_left(rank, time.monotonic() - began)]:
            logger.debug("waiting until ranks %s have left", ranges(waiting))
            time.sleep(self._poll_s / 2)
        self._silence()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _has_left(self, rank: int, seconds: float) -> bool:
        post = self._found.get(rank)
        if post is None:
            return seconds > min(_LEAVING_S[0], self.limit_s)
        is_silent = self._silent_s[rank] > min(_LEAVING_S[0], self.limit_s)
        return post["stage"] == ENDED or is_silent or seconds > _LEAVING_S[1]

    def _leave(self, error: BaseException | None) -> None:
        """On the other ranks: say why this one can't go on, wait for the end, and raise what it was, if an error."""
        if error is not None and error is not self._cause:
            self.say(FAILED, **_told(error))
        elif self._own["stage"] not in (WRITTEN, CHECKED):
            self.say(IDLE)
        try:
            while self._cause is None and self._found.get(0, {}).get("stage") != ENDED:
                time.sleep(self._poll_s / 2)
        finally:
            self._silence()
            self.say(ENDED)
            if 0 not in self._found:
                _remove_if_empty(self.folder, self.member.rank)
        lead = self._found.get(0, {})
        if "code" in lead:
            raised = _error(lead["code"], _problems(lead))
            raised.is_reported = True
            raise raised from error
        elif self._cause is not None and self._cause is not error:
            raise self._cause from error

    def _silence(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    # --- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        looked = spoke = time.monotonic()
        while not self._closed.wait(self._poll_s):
            now = time.monotonic()
            # a process that was stopped itself has not looked, so the others were not silent
            passed, looked = min(now - looked, 2 * self._poll_s), now
            if now - spoke >= _BEAT_S:
                spoke = now
                with self._posting:
                    self._own["beat"] += 1
                self._say()
            try:
                cause = self._look(passed)
            except Exception as error:  # a bug must not look like silence
                cause = TailorError.at("", f"unexpected {type(error).__name__}: {error}", "please report it")
            if cause is not None and self._cause is None:
                logger.info("the merge ends: %s", cause)
                self._cause = cause
                if self._stop is not None:
                    self._stop.failed = True

    def _say(self) -> None:
        with self._writing:
            with self._posting:
                content = dict(self._own)
            if self.is_first or content["token"]:
                self._posts.write(self.member.rank, content)

    def _look(self, passed: float) -> TailorError | None:
        """Read the posts; return what ends the merge."""
        for rank in self._others:
            try:
                post = self._posts.read(rank)
            except FileNotFoundError:
                post = None
                if self._found:
                    return self._gone()
            self._silent_s[rank] += passed
            if post is None:
                continue
            before = self._found.get(rank)
            if not (self._is_answer(rank, post) if self.is_first else self._is_call(post)):
                if before is not None and not self.is_first:
                    return self._gone()
                continue
            if before is None or (post["beat"], post["stage"]) != (before["beat"], before["stage"]):
                self._silent_s[rank] = 0.0
            self._found[rank] = post
        if self.is_first:
            moved = sum(post["num_bytes"] for post in self._found.values())
            self.on_progress(moved - self._told_bytes)
            self._told_bytes = moved
        return self._failure() or self._silence_of_others()

    def _is_answer(self, rank: int, post: Mapping[str, Any]) -> bool:
        if post["launch"] != self._own["launch"] or post["token"] != self._own["token"]:
            return False
        listed = self._own["answered"]
        if str(rank) not in listed:
            with self._posting:  # another thread may be posting the old one
                self._own["answered"] = {**listed, str(rank): post["nonce"]}
            self._say()
        # if two processes have the same rank, the first one counts
        return bool(self._own["answered"][str(rank)] == post["nonce"])

    def _is_call(self, post: Mapping[str, Any]) -> bool:
        if post["launch"] != self._own["launch"]:
            return False
        if post["token"] != self._own["token"] and 0 not in self._found:
            self._own["token"] = post["token"]
            self._say()
        is_listed = post["answered"].get(str(self.member.rank)) == self._own["nonce"]
        return bool(is_listed and post["token"] == self._own["token"])

    def _failure(self) -> TailorError | None:
        """Return the error that another rank has told."""
        if not self.is_first:
            lead = self._found.get(0, {})
            return _error(lead["code"], _problems(lead)) if "code" in lead else None
        failed = {rank: post for rank, post in self._found.items() if post["stage"] == FAILED}
        if not failed:
            return None
        ranks_of: dict[Problem, list[int]] = {}
        for rank, post in sorted(failed.items()):
            for problem in _problems(post):
                ranks_of.setdefault(problem, []).append(rank)
        problems = [
            Problem(f"{_name(ranks)}: {one.where}" if one.where else _name(ranks), one.what, one.fix, one.code)
            for one, ranks in ranks_of.items()
        ]
        return _error(min(post["code"] for post in failed.values()), problems)

    def _silence_of_others(self) -> TailorError | None:
        """Return the error if a rank says nothing for too long. One that has written its share may be gone."""
        done = (CHECKED, FAILED, ENDED) if self.needs_all else (WRITTEN, FAILED, ENDED)
        gone = [
            rank
            for rank in self._others
            if self._silent_s[rank] > self.limit_s and self._found.get(rank, {}).get("stage") not in done
        ]
        if not gone:
            return None
        late = [rank for rank in gone if rank not in self._found]
        problems = []
        longer = f"set {TIME_LIMIT} above {self.limit_s:g} (seconds)"
        fix = f"read that rank's log, and run the same command again; if the rank was only slow, {longer}"
        if late:
            what = f"no sign of it in {self.folder} for {self.limit_s:g} s"
            start = f"check that all ranks were started and see this folder; if they start slowly, {longer}"
            problems.append(Problem(_name(late), what, start))
        for rank in gone:
            if rank not in late:
                where = f"{_name([rank])} ({self._found[rank]['process']})"
                problems.append(Problem(where, f"it died or hangs: no sign of life for {self.limit_s:g} s", fix))
        return Unanswered(problems)

    def _gone(self) -> TailorError:
        where = self._found[0]["process"] if 0 in self._found else str(self.out)
        what = "it has ended, or another merge has taken its place"
        return Unanswered.at(f"rank 0 ({where})", what, "see its log; then run the same command again")


def _name(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranges(ranks)}"


def _remove_if_empty(folder: Path, rank: int) -> None:
    """Remove what this rank made while it waited for a rank 0 that never came."""
    for name in ("0", str(rank)):
        with suppress(OSError):
            if name != "0" or not (folder / name).stat().st_size:
                (folder / name).unlink()
    for path in (folder, folder.parent):
        with suppress(OSError):
            path.rmdir()


def _told(error: BaseException) -> dict[str, Any]:
    """Return an error as a post tells it."""
    if isinstance(error, KeyboardInterrupt):
        error = Interrupted.at("", "interrupted", "run the same command again")
    elif isinstance(error, OSError):
        text = error.strerror or str(error)
        error = StorageError.at(error.filename or "", text, "check the disk")
    if not isinstance(error, TailorError):
        what = f"unexpected {type(error).__name__}: {error}"
        error = TailorError.at("", what, "this is a bug in llmtailor: please report it")
    problems = [
        {"where": str(one.where), "what": one.what, "fix": one.fix, "code": one.code.value} for one in error.problems
    ]
    return {"code": error.exit_code, "problems": problems}


def _problems(post: Mapping[str, Any]) -> list[Problem]:
    return [
        Problem(one["where"], one["what"], one["fix"], next(code for code in Code if code.value == one["code"]))
        for one in post.get("problems", ())
    ]


def _error(code: int, problems: list[Problem]) -> TailorError:
    kind = next((kind for kind in BRANCHES if kind.exit_code == code), TailorError)
    return kind(problems or [Problem("--distributed", "a rank failed", "see what that rank printed")])
