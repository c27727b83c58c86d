"""What ``llmtailor policy`` prints."""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import fill
from typing import TYPE_CHECKING

from llmtailor.cli.tables import table
from llmtailor.errors import size
from llmtailor.simulation.schedule import NUM_SAVES, PARTIAL_BYTES, TRAINER_BYTES

if TYPE_CHECKING:
    from llmtailor.simulation.compare import Comparison

_WIDTH = 79
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))


def policy_text(found: Comparison) -> str:
    """Return the bytes that each policy saves, what they cost, and what was assumed."""
    model = found.model
    about_bytes = (
        f"Over {NUM_SAVES} saves after the complete first one. on disk: the most at once, if what the newest "
        f"{found.keep} steps need is kept. Trainer's, full: how many times less than its full save "
        f"({TRAINER_BYTES} bytes per param) and than `full` ({PARTIAL_BYTES}). oldest, mean: age of parts after a "
        "save, in saves; the mean is weighted by params."
    )
    about_costs = (
        "training: whether it goes on during a save. adds: time that a save costs, with slower steps. every, min: "
        "steps and minutes between saves at which least time is lost. redone: minutes of work that a failure costs on "
        "average. lost: time lost to saves and failures. oldest: steps by which the oldest part of a resumed state "
        "is older; not counted as lost."
    )
    blocks = [
        f"{model.name}: {model.total:,} trained params in {len(model.parts)} parts",
        _bytes(found),
        fill(about_bytes, _WIDTH),
        _costs(found),
        fill(about_costs, _WIDTH),
        _assumptions(found),
    ]
    return "\n\n".join(blocks)


def _bytes(found: Comparison) -> str:
    divisor, unit = _unit(row.schedule.largest for row in found.rows)
    rows = [
        (
            row.policy,
            f"{row.schedule.mean / divisor:.1f}",
            f"{row.schedule.largest / divisor:.1f}",
            f"{row.schedule.on_disk / divisor:.1f}",
            f"{found.trainer.schedule.mean / row.schedule.mean:.2f}x",
            f"{found.full.schedule.mean / row.schedule.mean:.2f}x" if row is not found.trainer else "",
            row.schedule.oldest,
            f"{row.schedule.mean_age:.1f}",
        )
        for row in found.rows
    ]
    head = ("policy", f"{unit} a save", "largest", "on disk", "Trainer's", "full", "oldest", "mean")
    return table(head, rows, right=range(1, len(head)))


def _unit(sizes: Iterable[float]) -> tuple[float, str]:
    largest = max(sizes)
    return next((one for one in _UNITS if largest >= one[0]), _UNITS[-1])


def _costs(found: Comparison) -> str:
    rows = [
        (
            row.policy,
            "goes on" if cost.in_background else "stops",
            _seconds(cost.stall_s),
            _seconds(cost.save_s),
            f"{cost.save_steps:,}",
            _minutes(cost.period_s),
            _minutes(cost.lost_s),
            f"{cost.time_lost:.2%}",
            f"{row.schedule.oldest * cost.save_steps:,}",
        )
        for row in found.rows
        for cost in row.costs
    ]
    head = ("policy", "training", "stall", "adds", "every", "min", "redone", "lost", "oldest")
    return table(head, rows, right=range(2, len(head)))


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 0.1 or not seconds else f"{seconds:.2g} s"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f}" if seconds >= 6 else f"{seconds / 60:.2g}"


def _assumptions(found: Comparison) -> str:
    machine, origin = found.machine, found.origin
    copying = f"{size(round(machine.copy_speed))}/s by each GPU"
    if machine.stall_per_byte is not None:
        copying = f"{machine.stall_per_byte * 1e9:.3g} s of stall per GB saved"
    rows = [
        ("GPUs", machine.gpus, origin["gpus"]),
        ("writing", f"{size(round(machine.write_speed))}/s by all GPUs together", origin["write_gbps"]),
        ("copying to host memory", copying, origin["copy_gbps"]),
        ("an optimizer step", f"{machine.step_s:.3g} s", origin["step_seconds"]),
        ("slower steps during a save", f"{machine.slowdown:.0%}", origin["slowdown"]),
        ("mean time between failures", f"{machine.mtbf_s / 3600:g} h", origin["mtbf_hours"]),
    ]
    return table(("machine", "", "is"), rows)
