"""The interval that is called the best is the best, and costs are what they are said to be."""

from __future__ import annotations

import pytest

from llmtailor.simulation.costs import Machine, cost_of
from llmtailor.simulation.schedule import Schedule

GB = 10**9
HALF = Schedule((40 * GB, 60 * GB), 0.5, 1, 200 * GB, 0.25)


def machine(**others: float) -> Machine:
    given = {"gpus": 8, "write_speed": 2.0 * GB, "copy_speed": 10.0 * GB, "step_s": 5.0, "mtbf_s": 36_000.0}
    return Machine(**{**given, "slowdown": 0.1, **others})  # type: ignore[arg-type]


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize(
    "others", [{}, {"mtbf_s": 3600.0}, {"step_s": 0.2}, {"write_speed": 50.0 * GB, "slowdown": 0.5}, {"slowdown": 0.0}]
)
def test_no_other_interval_loses_less(in_background, others):
    where = machine(**others)
    best = cost_of(HALF, where, in_background=in_background)
    least = 60 * GB / where.write_speed / where.step_s if in_background else 1
    others_lose = [
        cost_of(HALF, where, in_background=in_background, save_steps=steps).time_lost
        for steps in range(max(1, round(least + 0.5)), 40 * best.save_steps)
    ]
    assert best.time_lost <= min(others_lose) * 1.005  # Daly's is an approximation
    assert best.save_steps >= least


def test_costs():
    stops = cost_of(HALF, machine(), in_background=False, save_steps=100)
    assert (stops.stall_s, stops.save_s, stops.publish_s) == (25.0, 25.0, 25.0)
    assert stops.period_s == 525
    assert stops.lost_s == 262.5 + 0.125 * 525
    assert stops.time_lost == pytest.approx(25 / 525 + stops.lost_s / 36_000)
    goes_on = cost_of(HALF, machine(), in_background=True, save_steps=100)
    assert goes_on.stall_s == 0  # copied in 0.6 s, during a step of 5 s
    assert goes_on.save_s == 2.5
    assert goes_on.lost_s == 502.5 / 2 + 25 + 0.125 * 502.5
    assert goes_on.lost_s_per_hour == pytest.approx(goes_on.lost_s / 10)
    slow_copy = cost_of(HALF, machine(copy_speed=0.5 * GB), in_background=True, save_steps=100)
    assert slow_copy.stall_s == 12.5 - 5
    measured = cost_of(HALF, machine(stall_per_byte=1e-11), in_background=True, save_steps=100)
    assert measured.stall_s == pytest.approx(0.5)


def test_failures_more_often_than_saves():
    cost = cost_of(HALF, machine(mtbf_s=5.0), in_background=False)
    assert cost.save_steps == 1
    assert cost.time_lost == 1
