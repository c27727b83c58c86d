"""Finishes the saves in progress if the process ends: normally, by an exception or by SIGTERM."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

GRACE_S = 20.0
"""Seconds that saves in progress get. torchrun kills its ranks 30 s after SIGTERM, and so do many schedulers."""

_open: dict[int, Callable[[float], object]] = {}
"""What finishes the saves of each saver by a point in monotonic time, by the saver's id"""
_owner = os.getpid()


def finish_at_end(saver: object, finish: Callable[[float], object]) -> None:
    """Call ``finish`` with a deadline if the process ends before `release`.

    A handler for SIGTERM is installed only from the main thread, and if there is none.
    """
    global _owner
    _owner = os.getpid()
    _open[id(saver)] = finish
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_sigterm)


def release(saver: object) -> None:
    """Forget a saver that was closed."""
    _open.pop(id(saver), None)
    is_main = threading.current_thread() is threading.main_thread()
    if not _open and is_main and signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@atexit.register
def _finish_all() -> None:
    if os.getpid() != _owner:  # a fork, such as a worker of a DataLoader, has no threads of ours
        return
    until = time.monotonic() + GRACE_S
    for finish in list(_open.values()):
        with suppress(Exception):
            finish(until)


def _on_sigterm(number: int, frame: object) -> None:
    _finish_all()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
