"""How long the stages of a command take, for the log."""

from __future__ import annotations

import time


class Stopwatch:
    """Starts when it is made."""

    def __init__(self) -> None:
        self._begun = time.monotonic()

    def lap(self) -> str:
        """Return the time since the last lap, in words, and begin the next one."""
        begun, self._begun = self._begun, time.monotonic()
        return f"{self._begun - begun:.2f} s"
