"""What saves and failures cost a training, and how often to save. Pure.

The interval is that of J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps"
(2006), which for cheap saves is Young's sqrt(2 C M), with C the time that a save adds to a training, and M the mean
time between failures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from llmtailor.simulation.schedule import Schedule

LASTING = 0.5
"""Steps of work that are lost for good, for each step by which stale parts set training back: measured, see
docs/fidelity.md"""


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a training runs. Times are in seconds, speeds in bytes per second."""

    gpus: int
    write_speed: float
    """Of all GPUs together, until files are durable"""
    copy_speed: float
    """Of one GPU to host memory"""
    step_s: float
    mtbf_s: float
    """Mean time between failures of the whole training"""
    slowdown: float
    """By which share of their time steps are slower while a save is written in the background"""
    stall_per_byte: float | None = None
    """Measured: for how long background saves stopped training, per byte saved. Replaces ``copy_speed``."""


@dataclass(frozen=True, slots=True)
class Cost:
    """A training that saves at an interval, in the background or not."""

    in_background: bool
    stall_s: float
    """For which a save stops training"""
    save_s: float
    """That a save adds to the training: the stall, and slower steps"""
    publish_s: float
    """From the start of a save until it can be resumed from"""
    save_steps: int
    """Optimizer steps between two saves"""
    setback: float
    """Work that is lost because parts are stale, in periods"""
    step_s: float
    mtbf_s: float

    @property
    def period_s(self) -> float:
        """Seconds from one save to the next"""
        return self.save_steps * self.step_s + self.save_s

    @property
    def lost_s(self) -> float:
        """Seconds of work that a failure costs on average: half a period, the work done while the newest save was not
        complete, and the setback by stale parts"""
        return self.lost_with(self.period_s)

    def lost_with(self, period_s: float) -> float:
        """Return the same with another time between saves."""
        return period_s / 2 + self.publish_s - self.stall_s + self.setback * period_s

    @property
    def lost_s_per_hour(self) -> float:
        """Seconds of work lost to failures, per hour of training"""
        return 3600 * min(1.0, self.lost_s / self.mtbf_s)

    @property
    def time_lost(self) -> float:
        """The share of the time lost to saves and failures, at most 1"""
        return min(1.0, self.save_s / self.period_s + self.lost_s / self.mtbf_s)


def cost_of(schedule: Schedule, machine: Machine, *, in_background: bool, save_steps: int | None = None) -> Cost:
    """Return what a schedule costs, at the best interval unless one is given.

    A save in the background first copies to host memory while the next forward and backward run. The optimizer
    waits for what then is not copied yet. While the files are written, steps are slower. The next save begins when the
    one before is written.
    """
    publish_s = schedule.mean / machine.write_speed
    stall_s, least_s = publish_s, 0.0
    if in_background:
        if machine.stall_per_byte is None:
            copy_s = schedule.mean / (machine.gpus * machine.copy_speed)
            stall_s = max(0.0, copy_s - machine.step_s)
        else:
            stall_s = machine.stall_per_byte * schedule.mean
        stall_s = min(stall_s, publish_s)
        least_s = schedule.largest / machine.write_speed
    save_s = stall_s + machine.slowdown * (publish_s - stall_s)
    setback = LASTING * schedule.setback
    if save_steps is None:
        # a failure costs (1 / 2 + setback) periods instead of a half
        best = best_s(save_s, machine.mtbf_s / (1 + 2 * setback))
        save_steps = max(1, math.ceil(least_s / machine.step_s), round(best / machine.step_s))
    return Cost(in_background, stall_s, save_s, publish_s, save_steps, setback, machine.step_s, machine.mtbf_s)


def best_s(save_s: float, mtbf_s: float) -> float:
    """Return the seconds of work between two saves at which least time is lost (Daly 2006)."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s
