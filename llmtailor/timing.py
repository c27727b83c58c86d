"""The duration of a command's stages, and the time limit of helper processes and of ranks."""

from __future__ import annotations

import math
import os
import time

from llmtailor.errors import Unanswered, UsageError


def unreported(_: object) -> None:
    """Take progress that nobody shows."""


class Stopwatch:
    """A timer that starts when it is created."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def lap(self) -> str:
        """Return the time since the last lap as text, and start the next lap."""
        started, self._started = self._started, time.monotonic()
        return f"{self._started - started:.2f} s"


TIME_LIMIT = "LLMTAILOR_TIMEOUT"
"""The environment variable, in seconds"""


def time_limit(default: float) -> float:
    """Return the time limit of another process in seconds. Raises UsageError if the variable is not a valid number."""
    text = os.environ.get(TIME_LIMIT) or str(default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= 1e6:
        raise UsageError.at(
            TIME_LIMIT, f"{text!r:.40} is not a number of seconds", "give one from 0 to 1000000, or unset it"
        )
    return seconds


def too_slow(where: object, what: str, seconds: float) -> Unanswered:
    """Return the error for a process that did not finish in time."""
    fix = f"rerun the command when the machine is less busy, or set {TIME_LIMIT} to more than {seconds:g} seconds"
    return Unanswered.at(where, f"{what}: no result after {seconds:g} s; this says nothing about the checkpoint", fix)
