"""``llmtailor gc``"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmtailor.cli.command import Command
from llmtailor.cli.options import COUNT, JSON, RUN_DIR, YES

if TYPE_CHECKING:
    from llmtailor.runs.gc import GcPlan, Removal


@click.command(
    name="gc",
    cls=Command,
    exit_codes={
        0: "done; or, without --yes, shown; or there is nothing to remove",
        4: "nothing can resume from the newest checkpoint, or no step can be composed, so nothing is removed",
        6: "a training or another llmtailor is writing to RUN_DIR",
        8: "earlier removals stay; rerun the same command to continue",
        130: "earlier removals stay; rerun the same command to continue",
    },
)
@RUN_DIR
@click.option("--keep", type=COUNT, metavar="N", help="Keep only the newest N composable steps. Default: all.")
@YES
@JSON
def command(run: Path, keep: int | None, yes: bool, as_json: bool) -> None:
    """Remove partial checkpoints that no composable step needs, and unfinished or abandoned folders, from RUN_DIR.

    Without --keep, every composable step stays composable from exactly the same parts. Unfinished saves, abandoned
    attempts and leftovers of killed commands are always removed. Full checkpoints are never touched.

    \b
    Examples:
      llmtailor gc runs/x
      llmtailor gc runs/x --keep 2 --yes
    """
    from llmtailor.runs.folder import only_writer
    from llmtailor.runs.gc import collect, plan_gc

    if not yes:
        _show(plan_gc(run, keep), as_json)
        click.echo("dry run: nothing was changed; use --yes to remove", err=True)
        return
    with only_writer(run):
        plan = plan_gc(run, keep)
        _show(plan, as_json)
        collect(plan, _notify)


def _show(plan: GcPlan, as_json: bool) -> None:
    for problem in plan.left_alone:
        click.echo(f"note: left alone: {problem}", err=True)
    for path in plan.in_use:
        click.echo(f"note: left alone: {path}: another process is writing there", err=True)
    click.echo(json.dumps(_to_json(plan), indent=2) if as_json else _to_text(plan))


def _notify(removal: Removal) -> None:
    click.echo(f"removed {removal.path.name}", err=True)


def _to_json(plan: GcPlan) -> dict[str, Any]:
    return {
        "schema": "llmtailor.gc/1",
        "run": str(plan.run),
        "removed": [{"path": str(one.path), "why": one.why, "step": one.step} for one in plan.removals],
        "in_use": [str(path) for path in plan.in_use],
        "skipped": [problem.to_json() for problem in plan.left_alone],
        "composable_before": list(plan.reachable.before),
        "composable_after": [age.step for age in plan.ages],
        "ages": [asdict(age) for age in plan.ages],
        "freed_bytes": plan.freed,
    }


def _to_text(plan: GcPlan) -> str:
    from llmtailor.cli.tables import ages_text, size, steps_text, table
    from llmtailor.runs.folder import files_in, freed_bytes

    removed = {removal.path for removal in plan.removals}
    rows: list[tuple[str, str, str]] = []
    for one in plan.scan.partial:
        why = "removed: no step needs it" if one.path in removed else "stays"
        rows.append((one.name, why, size(freed_bytes(files_in(one.path)))))
    for removal in plan.removals:
        if removal.step is None:
            rows.append((removal.path.name, f"removed: {removal.why}", size(freed_bytes(files_in(removal.path)))))
    lines = [table(("folder", "becomes", "bytes freed"), rows, right=(2,)), ""] if rows else []
    lines.append(f"steps that can be composed now:        {steps_text(plan.reachable.before)}")
    lines.append(f"steps that can be composed afterwards: {steps_text([age.step for age in plan.ages])}")
    lines += ["", ages_text(plan.ages), ""] if plan.ages else []
    lines += [] if plan.removals else ["nothing to remove"]
    lines.append(f"{size(plan.freed)} freed ({plan.freed:,} bytes)")
    return "\n".join(lines)
