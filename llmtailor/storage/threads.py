"""Threads, where a system that gives none is an error of the system, not a bug."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from llmtailor.errors import StorageError

T = TypeVar("T")


class Threads(ThreadPoolExecutor):
    """A pool whose `submit` raises StorageError if there is no thread to be had."""

    def submit(self, call: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        with _thread_errors():
            return super().submit(call, *args, **kwargs)


def start(thread: threading.Thread) -> None:
    """Start a thread. Raises StorageError if there is none to be had."""
    with _thread_errors():
        thread.start()


@contextmanager
def _thread_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        fix = "end other processes, or raise the limits on processes and memory (ulimit -u, ulimit -v)"
        raise StorageError.at("this process", f"the system gives it no further thread ({error})", fix) from error
