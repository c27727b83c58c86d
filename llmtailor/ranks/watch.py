"""How ranks watch each other while each works for long, and no collective of the main threads is due."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from llmtailor.errors import TailorError, Unanswered, ranks_text
from llmtailor.ranks.errors import as_error
from llmtailor.ranks.store import KeyValueStore, turns
from llmtailor.storage.threads import start
from llmtailor.timing import TIME_LIMIT

_T = TypeVar("_T")
TICK_S = 0.25
SIGN_S = 2.0
"""How long the other ranks may take to notice that one is lost"""


class Stoppable(Protocol):
    """The workers of this process, see `copying.pool.Stop`."""

    requested: bool
    failed: bool


class Watch:
    """Notices within seconds that another rank has failed, died or hangs, while this one works for long.

    Call order, the same on all ranks:

    1) `during` starts a thread and makes the call.
    2) Several times a second, the threads add up who has failed, who is done, and the bytes moved (an all_reduce on a
       process group of their own, which fails at once if the process of another rank ends).
    3) If a rank has failed, the others' workers are stopped; if one is lost, all raise.
    4) When all are done, the threads end, and `during` returns.
    """

    def __init__(self, rank: int, world_size: int, store: KeyValueStore, limit_s: float) -> None:
        import torch.distributed as dist

        self.rank, self.world_size = rank, world_size
        self._store, self._limit_s = store, limit_s
        self._group, self._parent = dist.new_group(backend="gloo"), os.getppid()
        self.reporter = 0
        """The rank that tells the user about an error"""

    def during(
        self,
        call: Callable[[Callable[[int], None]], tuple[_T, Exception | None]],
        stop: Stoppable,
        on_progress: Callable[[int], None],
    ) -> tuple[_T, Exception | None]:
        """Make a call, which gets a callback for bytes moved and returns a result and an error; return both.

        Without an error if it was only stopped because of another rank. Raises Unanswered if a rank is lost.
        """
        run = _Watched(self, stop, on_progress)
        start(run.thread)
        result, error = call(run.count)
        run.has_failed, run.is_done = error is not None, True
        while run.thread.is_alive():
            run.thread.join(TICK_S)  # so that signals are heard
        if run.lost is not None:
            raise self.name_lost() from run.lost
        if error is None and stop.requested:  # after this rank's call was done
            error = as_error(KeyboardInterrupt())
        return result, None if run.others_failed and not isinstance(error, (TailorError, OSError)) else error

    def sum(self, numbers: list[int]) -> list[int]:
        """Return the sums of all ranks' numbers. Raises RuntimeError if a rank is lost."""
        import torch
        import torch.distributed as dist

        tensor, until = torch.tensor(numbers), time.monotonic() + self._limit_s
        work = dist.all_reduce(tensor, group=self._group, async_op=True)
        for _ in turns(work.is_completed):
            if os.getppid() != self._parent or time.monotonic() > until or self._store.get("lost") is not None:
                raise RuntimeError("torchrun has ended, or a rank hangs")
        work.wait()
        return [int(number) for number in tensor.tolist()]

    def name_lost(self) -> Unanswered:
        """Return the error that names the ranks which give no sign, once the others had time to give theirs."""
        ranks = range(self.world_size)
        try:
            self._store.set("lost", True)
            self._store.set(f"present/{self.rank}", True)
            time.sleep(SIGN_S * (1 if self.rank else 1.5))  # rank 0 may serve the store
            lost = [rank for rank in ranks if self._store.get(f"present/{rank}") is None]
        except RuntimeError:  # the store is gone with the process that serves it
            lost = [] if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else [0]
        self.reporter = min(set(ranks).difference(lost), default=self.rank)
        fix = "read that rank's log and torchrun's report, then rerun the same command"
        if os.getppid() != self._parent or not lost:
            return Unanswered.at("torchrun", "it has ended, or the ranks have lost their connection", fix)
        longer = f"; if the rank was only slow, set {TIME_LIMIT} above {self._limit_s:g} (seconds)"
        return Unanswered.at(ranks_text(tuple(lost)), "it has died or hangs", fix + longer)


class _Watched:
    """One call of `Watch.during`, and its thread."""

    def __init__(self, watch: Watch, stop: Stoppable, on_progress: Callable[[int], None]) -> None:
        self._watch, self._stop, self._on_progress = watch, stop, on_progress
        self._lock, self._num_bytes = threading.Lock(), 0
        self.is_done = self.has_failed = self.others_failed = False
        self.lost: Exception | None = None
        self.thread = threading.Thread(target=self._run, name="llmtailor-ranks", daemon=True)

    def count(self, num_bytes: int) -> None:
        """Report bytes that this rank has moved; from any thread."""
        with self._lock:
            self._num_bytes += num_bytes
        if self._watch.rank == 0:
            self._on_progress(num_bytes)

    def _run(self) -> None:
        reported = 0
        """Bytes of other ranks"""
        try:
            while True:
                is_done, own = self.is_done, self._num_bytes
                has_failed = self.has_failed or self._stop.failed or self._stop.requested
                num_done, num_failed, num_bytes = self._watch.sum([is_done, has_failed, own])
                if num_failed and not has_failed:
                    self.others_failed = self._stop.failed = True
                if self._watch.rank == 0:
                    self._on_progress(num_bytes - own - reported)
                    reported = num_bytes - own
                if num_done == self._watch.world_size:
                    return
                time.sleep(TICK_S)
        except Exception as error:
            self.lost, self._stop.failed = error, True
