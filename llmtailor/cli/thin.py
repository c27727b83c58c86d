"""``llmtailor thin``"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmtailor.cli.command import Command
from llmtailor.cli.options import COUNT, JSON, RUN_DIR, YES
from llmtailor.cli.running import progress_bar
from llmtailor.errors import Problem, UsageError

if TYPE_CHECKING:
    from llmtailor.runs.pruning import PruneAction, ThinOptions
    from llmtailor.runs.thin import ThinPlan


@click.command(
    name="thin",
    cls=Command,
    exit_codes={
        0: "done; or, without --yes, shown; or there is nothing to thin out",
        4: "nothing can resume from the newest checkpoint, so nothing older is touched",
        6: "a training or another llmtailor is writing to RUN_DIR",
        7: "the named checkpoints are unchanged; earlier changes stay",
        8: "earlier changes stay; rerun the same command to continue",
        130: "earlier changes stay; rerun the same command to continue",
    },
)
@RUN_DIR
@click.option(
    "--strategy",
    metavar="POLICY",
    help="Older full checkpoints become partial ones with the parts that a policy chooses: parity, filter, "
    "filter:first=1,every=4, round_robin:4 or full. The oldest keeps all parts.",
)
@click.option(
    "--select",
    multiple=True,
    metavar="SELECTOR",
    help="The same with these parts, as in a recipe; repeatable. The oldest keeps all parts.",
)
@click.option(
    "--keep-full-last",
    type=COUNT,
    metavar="K",
    help="With --strategy or --select: the newest K full checkpoints stay unchanged (default 1).",
)
@click.option(
    "--keep-optimizer-last",
    type=COUNT,
    metavar="K",
    help="Full checkpoints older than the newest K lose their optimizer states: weights, config and tokenizer stay, "
    "but nothing can resume from them.",
)
@YES
@JSON
def command(run: Path, yes: bool, as_json: bool, **options: Any) -> None:
    """Free disk space in RUN_DIR by thinning out its older full checkpoints.

    The newest stay whole. Every composable step stays composable (llmtailor merge --run RUN_DIR --at STEP), except
    those that lose their optimizer states on request. A checkpoint is removed only after its replacement has been
    written and read back. If interrupted, rerun the same command to resume.

    \b
    Examples:
      llmtailor thin runs/x --strategy parity
      llmtailor thin runs/x --strategy filter --keep-full-last 2 --yes
      llmtailor thin runs/x --select last:2 --select lm_head --yes
      llmtailor thin runs/x --keep-optimizer-last 2 --yes
    """
    from llmtailor.runs.folder import only_writer
    from llmtailor.runs.thin import bytes_to_move, plan_thinning, thin

    wanted = _options(**options)
    if not yes:
        _show(plan_thinning(run, wanted), as_json)
        click.echo("dry run: nothing was changed; use --yes to thin out", err=True)
        return
    with only_writer(run, make=not wanted.weights_only):
        plan = plan_thinning(run, wanted)
        _show(plan, as_json)
        with progress_bar(bytes_to_move(plan), quiet=False, label="thinning") as on_progress:
            thin(plan, _notify, on_progress)


def _options(
    strategy: str | None, select: tuple[str, ...], keep_full_last: int | None, keep_optimizer_last: int | None
) -> ThinOptions:
    from llmtailor.runs.pruning import ThinOptions

    problems = []
    given = [flag for flag, value in (("--strategy", strategy), ("--select", select)) if value]
    given += ["--keep-optimizer-last"] if keep_optimizer_last else []
    if len(given) != 1:
        what = f"{' and '.join(given)} can't be combined" if given else "it needs to know what older checkpoints keep"
        fix = "give one of --strategy, --select and --keep-optimizer-last"
        problems.append(Problem("thin", what, fix))
    if keep_optimizer_last and keep_full_last:
        fix = "omit it: the newest K of --keep-optimizer-last stay full"
        problems.append(Problem("--keep-full-last", "it needs --strategy or --select", fix))
    if problems:
        raise UsageError(problems)
    return ThinOptions(keep_optimizer_last or keep_full_last or 1, strategy, select)


def _show(plan: ThinPlan, as_json: bool) -> None:
    for problem in plan.scan.skipped:
        click.echo(f"note: left alone: {problem}", err=True)
    click.echo(json.dumps(_to_json(plan), indent=2) if as_json else _to_text(plan))


def _notify(action: PruneAction) -> None:
    click.echo(f"{action.checkpoint.name}: done, {_signed(action.freed)} freed", err=True)


def _to_json(plan: ThinPlan) -> dict[str, Any]:
    return {
        "schema": "llmtailor.thin/1",
        "run": str(plan.run),
        "checkpoints": [
            {
                "path": str(action.checkpoint.path),
                "step": action.checkpoint.step,
                "is": action.kind,
                "becomes": action.becomes,
                "why": action.why,
                "parts": dict(action.parts),
                "now_at": str((action.successor or action.checkpoint).path),
                "is_written": action.conversion is not None,
                "num_bytes": action.num_bytes,
                "freed_bytes": action.freed,
            }
            for action in plan.actions
        ],
        "left_behind": [str(path) for path in plan.left_behind],
        "skipped": [problem.to_json() for problem in plan.scan.skipped],
        "composable_before": list(plan.before),
        "composable_after": list(plan.after),
        "ages": [asdict(age) for age in plan.ages],
        "freed_bytes": plan.freed,
    }


def _to_text(plan: ThinPlan) -> str:
    from llmtailor.cli.tables import ages_text, size, steps_text, table
    from llmtailor.runs.pruning import STAYS

    rows = [
        (action.checkpoint.name, action.kind, *_words(action), size(action.num_bytes), _signed(action.freed))
        for action in plan.actions
    ]
    lines = [table(("checkpoint", "is", "becomes", "parts", "bytes", "freed"), rows, right=(4, 5)), ""]
    lines += [f"left by a killed thin, removed: {path.name}" for path in plan.left_behind]
    before, after = plan.before, plan.after
    lines.append(f"steps that can be composed now:        {steps_text(before)}")
    lines.append(f"steps that can be composed afterwards: {steps_text(after)}")
    lines += ["", ages_text(plan.ages), ""] if plan.ages else []
    if lost := [step for step in before if step not in after]:
        lines.append(f"only the weights of step {steps_text(lost)} are kept: nothing can resume from them")
    if all(action.becomes == STAYS for action in plan.actions):
        lines.append(f"nothing to thin out beyond the newest {plan.options.keep_full}, which stay full")
    if plan.freed < 0:
        lines.append("no gain: for such a small model, a partial checkpoint's manifest takes more space than it saves")
    lines.append(f"{_signed(plan.freed)} freed ({plan.freed:,} bytes)")
    return "\n".join(lines)


def _words(action: PruneAction) -> tuple[str, str]:
    """Return the outcome for a checkpoint, and the parts it keeps."""
    from llmtailor.model.parts import condense
    from llmtailor.runs.pruning import STAYS

    if action.becomes == STAYS:
        return (f"stays: {action.why}" if action.why else "stays"), "all"
    if action.successor is None:
        return "weights only, not resumable", "no optimizer states"
    where = f"{action.successor.path.parent.name}/{action.successor.name}"
    is_whole = action.successor.parts is None
    return where + ("" if action.conversion else ", already there"), "all" if is_whole else condense(action.parts)


def _signed(num_bytes: int) -> str:
    from llmtailor.cli.tables import size

    return size(num_bytes) if num_bytes >= 0 else f"-{size(-num_bytes)}"
