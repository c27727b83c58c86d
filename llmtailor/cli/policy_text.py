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
_ALIKE = (
    " Without the measurements of a run, all params are taken to be alike, so adaptive is not better here than a "
    "schedule of its size."
)
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))


def policy_text(found: Comparison) -> str:
    """Return the bytes that each policy saves, what they cost, and what was assumed."""
    model = found.model
    about_bytes = (
        f"Over {NUM_SAVES} saves after the complete first one. on disk: the most at once, if what the newest "
        f"{found.keep} steps need is kept. Trainer's, full: how many times less than its full save "
        f"({TRAINER_BYTES} bytes per param) and than `full` ({PARTIAL_BYTES}). oldest: age of the oldest part after a "
        "save, in saves. back: by how many saves stale parts set training back, on average."
    )
    about_costs = (
        "training: whether it goes on during a save. adds: time that a save costs, with slower steps. every, min: "
        "steps and minutes between saves at which least time is lost. failure: minutes of work that one costs on "
        "average, with the setback by stale parts. lost: time lost to saves and failures. equal: minutes that a "
        "failure costs if as many bytes are saved per hour as by `full`."
    )
    ranking = ", then ".join(f"{policy} ({_minutes(lost)} min)" for policy, lost in found.ranking())
    blocks = [
        f"{model.name}: {model.total:,} trained params in {len(model.parts)} parts",
        _bytes(found),
        fill(about_bytes, _WIDTH),
        _costs(found),
        fill(about_costs, _WIDTH),
        fill(f"At equal bytes, a failure costs least with {ranking}.{'' if found.is_measured else _ALIKE}", _WIDTH),
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
            f"{row.schedule.setback:.1f}",
        )
        for row in found.rows
    ]
    head = ("policy", f"{unit} a save", "largest", "on disk", "Trainer's", "full", "oldest", "back")
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
            _minutes(found.lost_at_equal_bytes(row, cost)),
        )
        for row in found.rows
        for cost in row.costs
    ]
    head = ("policy", "training", "stall", "adds", "every", "min", "failure", "lost", "equal")
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
