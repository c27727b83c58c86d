"""Worker threads and how they stop: on Ctrl-C or SIGTERM, between two chunks, never in the middle of a step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, wait
from contextlib import contextmanager
from typing import Any, TypeVar

from llmtailor.errors import Interrupted, StorageError
from llmtailor.storage.threads import Threads

T = TypeVar("T")
MAX_WORKERS = 4
MAX_WRITERS = 8
_WAKE_UP_S = 0.5


class Stop:
    """Whether to stop. Plain attributes, because a signal handler must not take a lock."""

    def __init__(self) -> None:
        self.requested = False
        """By the user"""
        self.failed = False
        """Whether a worker has failed, so that the others stop too"""

    def check(self) -> None:
        """Raise Interrupted if requested, or `Abandoned` if another worker's error will be raised."""
        if self.requested:
            raise Interrupted.at("", "interrupted", "rerun the same command")
        if self.failed:
            raise Abandoned


class Abandoned(Exception):
    """Another worker failed."""


@contextmanager
def stoppable() -> Iterator[Stop]:
    """Turn Ctrl-C and SIGTERM into a stop request within the block.

    A KeyboardInterrupt could come between any two instructions, even right after the rename that publishes. The
    process's own handlers still run, but a KeyboardInterrupt that they raise becomes a request. Outside the main
    thread, which alone gets signals, nothing changes.
    """
    stop = Stop()
    previous: dict[int, Callable[..., Any]] = {}

    def handle(number: int, frame: object) -> None:
        try:
            previous[number](number, frame)
        except KeyboardInterrupt:
            stop.requested = True

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            if callable(handler):
                previous[number] = handler
                signal.signal(number, handle)
    try:
        yield stop
    finally:
        for restored, handler in previous.items():
            signal.signal(restored, handler)


class Inline(Executor):
    """Makes each call at once, in the calling thread."""

    def submit(self, call: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        future.set_result(call(*args, **kwargs))
        return future


def num_workers() -> int:
    return min(MAX_WORKERS, os.cpu_count() or 1)


def num_writers() -> int:
    """Return how many files are written at once: more than there are cores, because each waits for the disk."""
    return min(MAX_WRITERS, 2 * (os.cpu_count() or 1))


def run_all(jobs: Iterable[Callable[[], T]], workers: int, stop: Stop) -> list[T]:
    """Run all jobs in threads, starting with the first; return their results.

    The first failure sets ``stop.failed`` and is raised once all threads have stopped. Raises Interrupted on request,
    and StorageError if there are fewer threads to be had.
    """
    numbered, lock = enumerate(jobs), threading.Lock()
    results: dict[int, T] = {}

    def take() -> tuple[int, Callable[[], T]] | None:
        with lock:
            return next(numbered, None)

    def run() -> None:
        try:
            while taken := take():
                number, job = taken
                stop.check()
                results[number] = job()
        except BaseException:
            stop.failed = True
            raise

    with Threads(workers) as pool:
        try:
            futures = [pool.submit(run) for _ in range(workers)]
        except StorageError:  # no thread to be had
            stop.failed = True
            raise
        # the kernel may give a signal to any thread, and Python's handlers run only when the main thread next wakes up
        while wait(futures, timeout=_WAKE_UP_S, return_when=FIRST_EXCEPTION).not_done and not stop.failed:
            pass
    failures = [failure for failure in (future.exception() for future in futures) if failure is not None]
    try:
        if failures:
            raise min(failures, key=_rank)
    finally:
        del futures, failures  # else a failure's traceback refers to itself, and keeps the files of its frames open
    return [results[number] for number in sorted(results)]


def _rank(failure: BaseException) -> int:
    return 2 if isinstance(failure, Abandoned) else 1 if isinstance(failure, Interrupted) else 0
