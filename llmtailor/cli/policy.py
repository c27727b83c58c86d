"""``llmtailor policy``"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmtailor.cli.command import command, notify, print_json
from llmtailor.cli.options import COUNT, JSON, MASTERS_AS, MOMENTS_AS, PATH, STEP, MeshType
from llmtailor.errors import SourceError, UsageError, some
from llmtailor.model.precision import EXACT, PrecisionOptions
from llmtailor.model.roles import ADAM_BYTES

if TYPE_CHECKING:
    from llmtailor.checkpoint.optimizer import Mesh
    from llmtailor.model.precision import Masters, Moments
    from llmtailor.runs.simulate import Cost, Hardware, ModelSize, SimulatedSaves

_POLICIES = ("rounded", "moments_in_turn", "adaptive", "adaptive:0.25", "parity", "round_robin:4", "filter")
_TRAINER, _FULL = "Trainer, full", "full"
"""The rows of full saves: the Trainer's own, and those of llmtailor"""


class _Number(click.FloatRange):
    """A number from ``least`` to a billion, and not NaN."""

    def __init__(self, least: float) -> None:
        super().__init__(min=least, max=1e9)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


_POSITIVE, _SHARE = _Number(1e-6), _Number(0)


@command(
    {
        0: "the comparison is printed",
        2: "also if attach would refuse a policy",
        4: "MODEL has no config.json, or transformers does not know the model",
    }
)
@click.argument("model", type=PATH)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="SPEC",
    help=f"A policy as for attach: filter:aux_every=2. Repeatable. Default: {', '.join(_POLICIES)}.",
)
@click.option(
    "--mesh",
    type=MeshType("tp", "dp", "dp_replicate"),
    metavar="tp=N,dp=M,dp_replicate=R",
    help="Ranks of the training: tp share a model by tensor parallelism, dp cut what each of them has (FSDP2), "
    "dp_replicate copy all of these (HSDP). Default: those that saved MODEL, if it is a checkpoint.",
)
@click.option(
    "--write-gbps",
    type=_POSITIVE,
    metavar="GB/S",
    default=2.0,
    show_default=True,
    help="Write speed of all ranks together.",
)
@click.option(
    "--step-seconds", type=_POSITIVE, metavar="S", default=5.0, show_default=True, help="Time of an optimizer step."
)
@click.option(
    "--mtbf-hours",
    type=_POSITIVE,
    metavar="H",
    default=24.0,
    show_default=True,
    help="Mean time between failures of the whole training.",
)
@click.option(
    "--slowdown",
    type=_SHARE,
    metavar="PERCENT",
    default=10.0,
    show_default=True,
    help="Slowdown of steps while a save is written in the background.",
)
@click.option(
    "--keep", type=COUNT, metavar="N", default=2, show_default=True, help="Number of newest steps that stay composable."
)
@click.option("--max-staleness", type=STEP, metavar="N", help="Maximum age of a part, in saves, as for attach.")
@click.option(
    "--state-bytes",
    type=_SHARE,
    metavar="BYTES",
    default=ADAM_BYTES,
    show_default=True,
    help="Bytes of the optimizer's states per param: 8 for AdamW, 2 for 8-bit AdamW, 4 for Muon and Lion, 0 for SGD.",
)
@MASTERS_AS
@MOMENTS_AS
@click.option("--experts", is_flag=True, help='Make each expert of a layer a part, as with attach(experts="parts").')
@JSON
def policy(
    model: Path,
    policies: tuple[str, ...],
    as_json: bool,
    *,
    mesh: Mesh | None,
    experts: bool,
    state_bytes: float,
    masters: Masters | None,
    moments: Moments | None,
    keep: int,
    max_staleness: int | None,
    **speeds: float,
) -> None:
    """Compare policies for MODEL: bytes per save, best interval, and the cost of saves and failures.

    MODEL is a config.json or a folder with one, such as a checkpoint. The policies are simulated over 600 saves and
    compared with full saves. Nothing is trained, and no tensor is read.

    Assumptions: a partial checkpoint takes 4 bytes per param for the fp32 master, and those of the optimizer's states
    (--state-bytes), unless --masters and --moments round them; a full one of the Trainer takes the exact ones and 2
    more for the bf16 weight; a blocking save stops training until it is
    written; a background save slows steps down until it is written, and the next one waits for it; failures are
    independent of time. Parts that are n saves old set training back by n intervals, times their share of the params;
    half of that is lost permanently (benchmarks/fidelity.md). Restarting the job is not counted.

    Of the ranks of a mesh, rank 0 writes the most: it has the copy that is saved of what tensor parallelism does not
    cut. Which params that is, transformers' plan for the model says. Replicas write no states.

    \b
    Examples:
      llmtailor policy config.json --write-gbps 5 --step-seconds 8 --mtbf-hours 12
      llmtailor policy config.json --policy parity --policy filter:every=10
      llmtailor policy config.json --policy moments_in_turn:8 --masters 24bit --moments 8bit
      llmtailor policy config.json --mesh tp=8,dp=16
      llmtailor policy runs/x/checkpoint-100 --policy adaptive:0.25 --json
    """
    from llmtailor.policies import Budget, make_policy, precision_of
    from llmtailor.runs.simulate import cost_of, simulate, to_json, trainer_schedule

    if moments not in (None, EXACT.moments) and state_bytes != ADAM_BYTES:
        what = "only AdamW's fp32 moments are rounded, 8 bytes per param"
        raise UsageError.at("--moments", what, "omit --moments, or omit --state-bytes")
    compared = {spec: make_policy(spec) for spec in dict.fromkeys((_FULL, *(policies or _POLICIES)))}
    options = PrecisionOptions(masters, moments)
    precisions = {spec: precision_of(policy, options) for spec, policy in compared.items()}
    size = replace(_size(model, mesh, experts), state_bytes=state_bytes)
    schedules = {_TRAINER: trainer_schedule(size, keep)}
    for spec, policy in compared.items():
        limit = None if spec == _FULL else max_staleness
        schedules[spec] = simulate(policy, replace(size, precision=precisions[spec]), keep, limit)
    machine = _machine(**speeds)
    results = {}
    for name, schedule in schedules.items():
        modes = (False,) if name == _TRAINER else (False, True)  # the Trainer has no background saves
        results[name] = schedule, tuple(cost_of(schedule, machine, in_background=mode) for mode in modes)
    if as_json:
        print_json(to_json(size, machine, keep, results))
    else:
        budgets = [str(policy) for policy in compared.values() if isinstance(policy, Budget)]
        click.echo(_text(size, machine, results, budgets))


def _size(model: Path, mesh: Mesh | None, experts: bool) -> ModelSize:
    """Return the model's size over the ranks of a mesh; without one, over those that saved the model."""
    from llmtailor.runs.simulate import mesh_of, size_of_config

    if experts and mesh:
        what = "what a rank has of an expert is not known"
        raise UsageError.at("--experts and --mesh", what, "omit one of them")
    mesh_of_model = None
    if mesh is None and not experts:
        try:
            mesh_of_model = mesh_of(model)
        except SourceError as error:
            notify(f"its ranks are not known, so give --mesh: {error.problems[0]}")
    size = size_of_config(model, experts, mesh or mesh_of_model)
    if size.mesh_problems and mesh:
        raise UsageError(size.mesh_problems)
    for problem in size.mesh_problems:
        notify(f"what its ranks have is not known: {problem.what}")
    if size.spread and size.spread.packed:
        notify(f"tensor parallelism cuts {some(size.spread.packed)} into several boxes per rank, which attach refuses")
    return size


def _machine(write_gbps: float, step_seconds: float, mtbf_hours: float, slowdown: float) -> Hardware:
    from llmtailor.runs.simulate import Hardware

    return Hardware(write_gbps * 1e9, step_seconds, mtbf_hours * 3600, slowdown / 100)


def _text(
    model: ModelSize, machine: Hardware, results: dict[str, tuple[SimulatedSaves, tuple[Cost, ...]]], budgets: list[str]
) -> str:
    from llmtailor.cli.tables import table
    from llmtailor.errors import size

    full = results[_FULL][0]
    saves = [
        (
            name,
            size(round(schedule.mean)),
            size(schedule.largest),
            size(schedule.on_disk),
            f"{full.mean / schedule.mean:.2f}x",
            f"{schedule.oldest}{' (moments)' if schedule.oldest and not schedule.setback else ''}",
        )
        for name, (schedule, _) in results.items()
    ]
    costs = [
        (
            name,
            "background" if cost.in_background else "blocking",
            f"{cost.save_s:.2g} s" if cost.save_s < 10 else f"{cost.save_s:.0f} s",
            f"{cost.save_steps:,}",
            _minutes(cost.period_s),
            f"{_minutes(cost.lost_s_per_failure)} min",
            f"{cost.time_lost:.2%}",
        )
        for name, (_, of_both) in results.items()
        for cost in of_both
    ]
    head = ("policy", "mean save", "largest save", "on disk", "reduction", "oldest part (saves)")
    cost_head = ("policy", "mode", "cost/save", "interval (steps)", "interval (min)", "lost/failure", "overhead")
    return "\n\n".join(
        (
            f"{model.name}: {model.total:,} params in {len(model.parts)} parts",
            table(head, saves, right=range(1, len(head))),
            *_of_ranks(model, {name: schedule for name, (schedule, _) in results.items()}),
            *budgets,
            table(cost_head, costs, right=range(2, len(cost_head))),
            f"Assumed: {size(round(machine.write_bytes_per_s))}/s written by all ranks together, {machine.step_s:g} s "
            f"per step,\na failure every {machine.mtbf_s / 3600:g} h, steps {machine.slowdown:.0%} slower during a "
            "background save.",
        )
    )


def _of_ranks(model: ModelSize, schedules: dict[str, SimulatedSaves]) -> tuple[str, ...]:
    """Return a line and a table on the bytes of each rank; nothing if the mesh is unknown."""
    from llmtailor.checkpoint.optimizer import count_ranks
    from llmtailor.cli.tables import table
    from llmtailor.errors import about, size

    if (spread := model.spread) is None:
        return ()
    rows = []
    for name, schedule in schedules.items():
        if (most := schedule.on_rank_0_mean) is not None:
            mean = schedule.mean / spread.ranks
            rows.append((name, size(round(mean)), size(round(most)), f"{about(most / mean)}x"))
    head = ("policy", "mean of a rank", "rank 0", "rank 0 / mean")
    return (
        f"{count_ranks(spread.mesh)} have a file each; {spread.num_writing:,} write states, rank 0 the most",
        table(head, rows, right=range(1, len(head))),
    )


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f}" if seconds >= 6 else f"{seconds / 60:.2g}"
