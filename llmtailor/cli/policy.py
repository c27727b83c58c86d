"""``llmtailor policy``"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmtailor.cli.command import command
from llmtailor.cli.options import COUNT, JSON, PATH, STEP, check_output
from llmtailor.errors import SourceError, UsageError

if TYPE_CHECKING:
    from llmtailor.simulation.compare import Comparison

_POLICIES = ("moments_in_turn", "adaptive", "adaptive:0.25", "parity", "round_robin:4", "filter")


class _Number(click.FloatRange):
    """A number of a magnitude that can occur; NaN is none."""

    def __init__(self, least: float) -> None:
        super().__init__(min=least, max=1e9)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = float(super().convert(value, param, ctx))
        if math.isnan(found):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return found


_POSITIVE, _SHARE = _Number(1e-6), _Number(0)
_GB, _HOUR = 1e9, 3600
_ASSUMED = {"gpus": 8, "write_gbps": 2.0, "copy_gbps": 10.0, "step_seconds": 5.0, "mtbf_hours": 24.0, "slowdown": 10.0}
"""What neither an option nor a run says"""


@command(
    {
        0: "the comparison is printed",
        2: "also if a policy would be refused in a training",
        4: "MODEL has no config.json, transformers does not know the model, or the run has not saved",
        6: "the file of --svg exists",
    }
)
@click.argument("model", type=PATH)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="SPEC",
    help=f"A policy, as attach takes it: filter:aux_every=2. Can be repeated. Default: {', '.join(_POLICIES)}.",
)
@click.option("--gpus", type=COUNT, metavar="N", help=f"GPUs of the training (default {_ASSUMED['gpus']}).")
@click.option(
    "--write-gbps",
    type=_POSITIVE,
    metavar="GB/S",
    help=f"Gigabytes that all GPUs together write per second (default {_ASSUMED['write_gbps']:g}).",
)
@click.option(
    "--copy-gbps",
    type=_POSITIVE,
    metavar="GB/S",
    help=f"Gigabytes that one GPU copies to host memory per second (default {_ASSUMED['copy_gbps']:g}).",
)
@click.option(
    "--step-seconds",
    type=_POSITIVE,
    metavar="S",
    help=f"Time of an optimizer step (default {_ASSUMED['step_seconds']:g}).",
)
@click.option(
    "--mtbf-hours",
    type=_POSITIVE,
    metavar="H",
    help=f"Mean time between failures of the whole training (default {_ASSUMED['mtbf_hours']:g}).",
)
@click.option(
    "--slowdown",
    type=_SHARE,
    metavar="PERCENT",
    help="How much longer a step takes while a save is written in the background "
    f"(default {_ASSUMED['slowdown']:g}, as in docs/benchmarks.md).",
)
@click.option(
    "--keep", type=COUNT, metavar="N", default=2, show_default=True, help="Newest steps that stay composable."
)
@click.option("--max-staleness", type=STEP, metavar="N", help="How old a part may become, in saves, as for attach.")
@click.option(
    "--drift",
    type=_SHARE,
    metavar="X",
    help="Relative change of every part from one save to the next, for the policy update.",
)
@click.option("--experts", is_flag=True, help='Each expert of a layer is a part, as with experts="parts" of attach.')
@click.option("--svg", "picture", type=PATH, metavar="FILE", help="Draw time lost over the interval to FILE.")
@click.option("--force", is_flag=True, help="Replace FILE.")
@JSON
def policy(
    model: Path,
    policies: tuple[str, ...],
    keep: int,
    max_staleness: int | None,
    drift: float | None,
    experts: bool,
    picture: Path | None,
    force: bool,
    as_json: bool,
    **machine: float | None,
) -> None:
    """Show what policies would save of MODEL, how often to save, and what saves and failures would cost.

    MODEL is a config.json, a folder with one, or the folder of a run that has saved; then the run's own figures are
    used instead of defaults. The policies are run, not estimated, over 600 saves, next to full saves. Nothing is
    trained, and no tensor is read.

    Assumptions: a partial checkpoint takes 12 bytes per param and a full one of the Trainer 14; in the background, a
    save first copies while the next step runs, and the host buffers hold all of it; a save begins when the one before
    is written; failures are independent of time; parts that are n saves old set training back by n intervals, times
    their share of the params or, for a run, of what the changes of all parts cost; half of a setback is lost for good,
    as in docs/fidelity.md. Resuming itself is not counted.

    \b
    Examples:
      llmtailor policy config.json --gpus 64 --write-gbps 5 --step-seconds 8 --mtbf-hours 12
      llmtailor policy config.json --policy parity --policy filter:every=10 --svg policies.svg
      llmtailor policy runs/x --policy update:threshold=0.01 --json
    """
    from llmtailor.cli.policy_text import policy_text
    from llmtailor.simulation.compare import chart, to_json

    if picture is not None:
        check_output(picture, force)
    found = _compare(model, policies or _POLICIES, machine, keep, max_staleness, drift, experts)
    if picture is not None:
        from llmtailor.charts.markup import to_svg
        from llmtailor.storage.local import replace_durably

        replace_durably(picture, to_svg(chart(found)).encode())
    click.echo(json.dumps(to_json(found), indent=2) if as_json else policy_text(found))
    if picture is not None:
        click.echo(f"wrote {picture}", err=True)


def _compare(
    path: Path,
    policies: tuple[str, ...],
    given: dict[str, float | None],
    keep: int,
    max_staleness: int | None,
    drift: float | None,
    experts: bool,
) -> Comparison:
    from llmtailor.simulation.compare import compare_policies
    from llmtailor.simulation.costs import Machine
    from llmtailor.simulation.measured import measure
    from llmtailor.simulation.model import FIX, is_run, newest_of_run, size_of_checkpoint, size_of_config

    measured: dict[str, float | None] = {}
    stall_per_byte, change, expected = None, None, None
    if is_run(path):
        index, own = newest_of_run(path), measure(path)
        model = size_of_checkpoint(index, experts)
        write_gbps = own.write_speed / _GB if own.write_speed else None
        measured = {"gpus": index.world_size, "write_gbps": write_gbps, "step_seconds": own.step_s}
        change, expected = own.drift, own.expected_loss
        if given["copy_gbps"] is None:
            stall_per_byte = own.stall_per_byte
    elif not path.exists():
        raise SourceError.at(str(path), "it does not exist", FIX)
    else:
        model = size_of_config(path, experts)
    values: dict[str, float] = dict(_ASSUMED)
    origin = dict.fromkeys(_ASSUMED, "assumed")
    for source, found in (("measured", measured), ("given", given)):
        for name, value in found.items():
            if value is not None:
                values[name], origin[name] = value, source
    if stall_per_byte is not None:
        origin["copy_gbps"] = "measured"
    machine = Machine(
        int(values["gpus"]),
        values["write_gbps"] * _GB,
        values["copy_gbps"] * _GB,
        values["step_seconds"],
        values["mtbf_hours"] * _HOUR,
        values["slowdown"] / 100,
        stall_per_byte,
    )
    if drift is not None:
        change = dict.fromkeys(model.parts, drift)
    if not model.numels:
        raise UsageError.at(str(path), "the model has no trained params", "name another model")
    return compare_policies(model, machine, policies, keep, max_staleness, change, expected, origin)
