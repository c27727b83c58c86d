"""Copies one thing after the other in a thread, oldest first, until the process ends."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from llmtailor.errors import TailorError

logger = logging.getLogger("llmtailor.saving")
PAUSE_S = (1.0, 60.0)
"""Seconds between two attempts: first and longest"""
_WAKE_UP_S = 0.2


class RetryingQueue(threading.Thread):
    """What is to be copied. If that fails, it is tried again with growing pauses, as long as training runs.

    1) ``start``. 2) `add`. 3) `close`.

    ``copy`` copies one, and updates `progress`; ``title`` names one in messages.
    """

    def __init__(self, name: str, copy: Callable[[Any], None], title: Callable[[Any], str]) -> None:
        super().__init__(name=name, daemon=True)
        self._waiting: deque[Any] = deque()
        self._copy, self._title = copy, title
        self.progress = time.monotonic()
        self.closing = threading.Event()

    def add(self, item: Any) -> None:
        self.progress = time.monotonic()
        self._waiting.append(item)

    def close(self, timeout: float) -> list[Any]:
        """Finish copying; give up after this number of seconds without progress, and return what is left."""
        while self._waiting and time.monotonic() - self.progress < timeout:
            time.sleep(_WAKE_UP_S)
        self.closing.set()
        return [*self._waiting]

    def run(self) -> None:
        while not self.closing.is_set():
            if not self._waiting:
                self.closing.wait(_WAKE_UP_S)
            elif self._has_copied(self._waiting[0]):
                self._waiting.popleft()
                self.progress = time.monotonic()

    def _has_copied(self, item: Any) -> bool:
        """Copy one; return False if the process ends before that."""
        pause, longest = PAUSE_S
        has_failed = False
        while not self.closing.is_set():
            try:
                self._copy(item)
                if has_failed:
                    logger.warning("%s copied after retries", self._title(item))
                return True
            except Exception as error:
                if not has_failed:
                    why = error if isinstance(error, (TailorError, OSError)) else repr(error)
                    logger.warning("copying %s failed, retrying: %s", self._title(item), why)
                has_failed = True
                self.closing.wait(pause)
                pause = min(2 * pause, longest)
        return False
