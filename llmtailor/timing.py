"""How long the stages of a command take, and how long a helper process may take."""

from __future__ import annotations

import math
import os
import time

from llmtailor.errors import Unanswered, UsageError


class Stopwatch:
    """Starts when it is made."""

    def __init__(self) -> None:
        self._begun = time.monotonic()

    def lap(self) -> str:
        """Return the time since the last lap, in words, and begin the next one."""
        begun, self._begun = self._begun, time.monotonic()
        return f"{self._begun - begun:.2f} s"


TIME_LIMIT = "LLMTAILOR_TIMEOUT"
"""The environment variable, in seconds"""


def time_limit(default: float) -> float:
    """Return the seconds that such a process may take. Raises UsageError if the variable is no number of seconds."""
    text = os.environ.get(TIME_LIMIT) or str(default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= 1e6:
        raise UsageError.at(
            TIME_LIMIT, f"{text!r:.40} is no number of seconds", "give one from 0 to 1000000, or unset it"
        )
    return seconds


def too_slow(where: object, what: str, seconds: float) -> Unanswered:
    """Build the error for a process that was not done in time."""
    fix = f"run it again when the machine is less busy, or set {TIME_LIMIT} to more than {seconds:g} seconds"
    return Unanswered.at(where, f"{what}: not done after {seconds:g} s, which says nothing about the checkpoint", fix)
