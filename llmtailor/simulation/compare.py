"""Compares policies for a model and a machine: rows of a table, JSON data, and a chart. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmtailor.charts.axes import STYLE, Scale, axes, line
from llmtailor.charts.markup import Element, element, style, svg
from llmtailor.policies import Policy, make_policy
from llmtailor.simulation.costs import Cost, Machine, cost_of
from llmtailor.simulation.model import ModelSize
from llmtailor.simulation.schedule import NUM_SAVES, Schedule, simulate, trainer_schedule

TRAINER = "Trainer, full"
"""The row of what happens without llmtailor"""
FULL = "full"


@dataclass(frozen=True, slots=True)
class Row:
    """A policy, its saves, and what they cost if training stops for them, and if it continues."""

    policy: str
    schedule: Schedule
    costs: tuple[Cost, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Policies for a model on a machine."""

    model: ModelSize
    machine: Machine
    keep: int
    rows: tuple[Row, ...]
    """The Trainer's full save first, then the policy ``full``"""
    origin: Mapping[str, str]
    """Figure of the machine -> ``given``, ``measured`` or ``assumed``"""
    is_measured: bool
    """Whether what the changes of parts mean for the loss was measured; otherwise all params are taken to be alike"""

    @property
    def trainer(self) -> Row:
        return self.rows[0]

    @property
    def full(self) -> Row:
        return self.rows[1]

    def lost_at_equal_bytes(self, row: Row, cost: Cost) -> float:
        """Return the seconds of work that a failure costs on average if as many bytes are written per hour as by
        `full` at its best interval, which is that of training in the background or not, as ``cost`` is.

        In the background, the interval is never shorter than the time to write the largest save.
        """
        other = next(one for one in self.full.costs if one.in_background == cost.in_background)
        period_s = other.period_s * row.schedule.mean / self.full.schedule.mean
        if cost.in_background:
            period_s = max(period_s, row.schedule.largest / self.machine.write_speed)
        return cost.lost_with(period_s)

    def ranking(self) -> list[tuple[str, float]]:
        """Return the policies and what a failure costs at equal bytes, in seconds, the least first; saves in the
        background."""
        lost = [(row.policy, self.lost_at_equal_bytes(row, row.costs[-1])) for row in self.rows[1:]]
        return sorted(lost, key=lambda one: one[1])


def compare_policies(
    model: ModelSize,
    machine: Machine,
    specs: Sequence[str],
    keep: int,
    max_staleness: int | None = None,
    drift: Mapping[str, float] | None = None,
    expected_loss: Mapping[str, float] | None = None,
    origin: Mapping[str, str] | None = None,
) -> Comparison:
    """Simulate policies, and full saves besides them. Raises UsageError with the problems of a policy."""
    policies: dict[str, Policy] = {spec: make_policy(spec) for spec in dict.fromkeys((FULL, *specs))}
    rows = [_row(TRAINER, trainer_schedule(model, keep), machine, in_background=(False,))]
    for spec, policy in policies.items():
        limit = None if spec == FULL else max_staleness
        schedule = simulate(policy, model, keep, limit, drift, expected_loss)
        rows.append(_row(spec, schedule, machine, in_background=(False, True)))
    return Comparison(model, machine, keep, tuple(rows), origin or {}, bool(expected_loss))


def _row(name: str, schedule: Schedule, machine: Machine, in_background: Sequence[bool]) -> Row:
    return Row(name, schedule, tuple(cost_of(schedule, machine, in_background=mode) for mode in in_background))


def to_json(found: Comparison) -> dict[str, Any]:
    """Return the comparison as JSON data; the keys are stable within a schema version."""
    machine = found.machine
    return {
        "schema": "llmtailor.policy/1",
        "model": found.model.name,
        "num_params": found.model.total,
        "num_parts": len(found.model.parts),
        "saves": NUM_SAVES,
        "keep": found.keep,
        "machine": {
            "gpus": machine.gpus,
            "write_bytes_per_s": machine.write_speed,
            "copy_bytes_per_s": machine.copy_speed,
            "step_s": machine.step_s,
            "mtbf_s": machine.mtbf_s,
            "slowdown": machine.slowdown,
            "stall_s_per_byte": machine.stall_per_byte,
        },
        "origin": dict(found.origin),
        "policies": [_row_to_json(row, found) for row in found.rows],
    }


def _row_to_json(row: Row, found: Comparison) -> dict[str, Any]:
    schedule = row.schedule
    return {
        "policy": row.policy,
        "bytes_mean": schedule.mean,
        "bytes_largest": schedule.largest,
        "bytes_on_disk": schedule.on_disk,
        "oldest_part_saves": schedule.oldest,
        "mean_age_saves": schedule.mean_age,
        "setback_saves": schedule.setback,
        "costs": [
            {
                "in_background": cost.in_background,
                "stall_s": cost.stall_s,
                "save_s": cost.save_s,
                "publish_s": cost.publish_s,
                "save_steps": cost.save_steps,
                "period_s": cost.period_s,
                "lost_s_per_failure": cost.lost_s,
                "lost_s_per_hour": cost.lost_s_per_hour,
                "lost_s_per_failure_at_equal_bytes": found.lost_at_equal_bytes(row, cost),
                "time_lost": cost.time_lost,
                "oldest_part_steps": schedule.oldest * cost.save_steps,
                "mean_age_steps": schedule.mean_age * cost.save_steps,
            }
            for cost in row.costs
        ],
    }


_WIDTH, _HEIGHT, _LEFT, _TOP, _PLOT = 840.0, 360.0, 56.0, 52.0, 460.0
_POINTS = 80


def chart(found: Comparison) -> Element:
    """Return a chart of the time lost to saves and failures over the interval, with the best one marked."""
    shown = [(row, row.costs[-1]) for row in found.rows]
    best = [cost.save_steps for _, cost in shown]
    low, high = max(1.0, min(best) / 8), max(best) * 8.0
    x = Scale(low, high, _LEFT, _LEFT + _PLOT, is_log=True)
    lost = [max(cost.time_lost, 1e-9) for _, cost in shown]
    y = Scale(min(lost) / 2, min(1.0, 4 * max(lost)), _HEIGHT - 50, _TOP, is_log=True)
    made = [
        style(STYLE),
        element("text", f"{found.model.name}: time lost to saves and failures", x=0, y=16, class_="strong"),
        *axes(x, y, ("steps between two saves", "time lost"), y_text=lambda share: f"{100 * share:g}%"),
    ]
    for number, (row, cost) in enumerate(shown):
        made += _curve(row, cost, found.machine, number, x, y)
    return svg(_WIDTH, max(_HEIGHT, _TOP + 44 * len(shown) + 10), "time lost over steps between two saves", *made)


def _curve(row: Row, best: Cost, machine: Machine, number: int, x: Scale, y: Scale) -> list[Element]:
    points = []
    for point in range(_POINTS + 1):
        steps = max(1, round(x.low * (x.high / x.low) ** (point / _POINTS)))
        cost = cost_of(row.schedule, machine, in_background=best.in_background, save_steps=steps)
        is_allowed = not best.in_background or steps * machine.step_s * machine.write_speed >= row.schedule.largest
        if is_allowed and y.low <= cost.time_lost <= y.high:
            points.append((x.at(steps), y.at(cost.time_lost)))
    at_x, at_y, legend = x.at(best.save_steps), y.at(best.time_lost), _TOP + 44 * number
    right = _LEFT + _PLOT + 20
    how = "training continues" if best.in_background else "training stops"
    return [
        *([line(points, number)] if points else []),
        element("circle", cx=at_x, cy=at_y, r=4.0, class_=f"f{number % 6}"),
        line([(right, legend), (right + 34, legend)], number),
        element("circle", cx=right + 17, cy=legend, r=4.0, class_=f"f{number % 6}"),
        element("text", row.policy, x=right + 42, y=legend + 4, class_="strong"),
        element(
            "text",
            f"{best.time_lost:.2%} at {best.save_steps:,} steps; {how}",
            x=right + 42,
            y=legend + 21,
            class_="dim",
        ),
    ]
