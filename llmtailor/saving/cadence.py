"""When to save so that saving stays within an overhead: ``save_steps="auto"``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

FIRST = 10
"""The step of the first save: before it, there is nothing to measure."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What a training has measured."""

    step_s: float
    """Seconds of a step while nothing is saved"""
    save_s: float
    """Seconds that a save adds to the training"""
    write_s: float
    """Seconds until a save is complete"""


@dataclass(frozen=True, slots=True)
class SaveDecision:
    """What to do at a step of a training that saves as often as an overhead allows."""

    is_due: bool
    again: int
    """The next step to ask at, if no save is due"""
    save_steps: int | None = None
    """The steps between two saves; None if no costs are known"""
    lost_s: float = 0.0
    """Seconds of work that a failure costs on average: half of the steps between two saves, and those during which the
    newest save was not complete"""

    @classmethod
    def at(cls, step: int, saved: int, costs: Costs | None, overhead: float, *, is_busy: bool) -> SaveDecision:
        """Decide at a step; ``saved`` is the step of the last save, ``is_busy`` whether it is still in progress.

        Between two saves are as few steps as are needed for saving to take at most ``overhead`` of the time, and for a
        save to be written.
        """
        if is_busy or costs is None:
            return cls(False, step + 1)
        step_s = max(costs.step_s, 1e-9)
        save_steps = max(1, math.ceil(max(costs.save_s / overhead, costs.write_s) / step_s))
        due = saved + save_steps
        return cls(step >= due, max(due, step + 1), save_steps, save_steps * step_s / 2 + costs.write_s)


class StepTimer:
    """Measures the steps of a training, apart for those during which a save was in progress."""

    def __init__(self) -> None:
        self._idle: list[float] = []
        self._busy: list[float] = []
        self._last: float | None = None

    def step(self, now: float, *, is_busy: bool) -> None:
        """Record the end of a step at a time in seconds; ``is_busy`` if a save was in progress."""
        if self._last is not None:
            (self._busy if is_busy else self._idle).append(now - self._last)
        self._last = now

    def saved(self) -> None:
        """Forget the steps during the save before. The next step is left out: it may have waited for the save."""
        self._idle, self._busy, self._last = self._idle[-FIRST:], [], None

    def costs(self, save_s: float, write_s: float) -> Costs | None:
        """Return what saves cost; None before any step was measured.

        ``save_s`` is the time for which the last save stopped training. What slower steps during saves add to it is
        the difference of the medians of both kinds of steps.
        """
        if not self._idle and not self._busy:
            return None
        step_s = median(self._idle or self._busy)
        slower = max(0.0, median(self._busy) - step_s) * len(self._busy) if self._busy and self._idle else 0.0
        return Costs(step_s, save_s + slower, write_s)
