"""``llmtailor thin`` and ``gc``"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmtailor.cli.command import command, notify, print_json, progress_bar, show_moved
from llmtailor.cli.options import CLONE, COUNT, JSON, MASTERS_AS, MOMENTS_AS, RUN_DIR, TRUST_UNRECORDED, YES
from llmtailor.errors import Problem, UsageError, size
from llmtailor.model.precision import PrecisionOptions

if TYPE_CHECKING:
    from llmtailor.copying.moving import Clone
    from llmtailor.model.precision import Masters, Moments
    from llmtailor.runs.gc import GcPlan
    from llmtailor.runs.prune import PruneAction, ThinOptions
    from llmtailor.runs.thin_plan import ThinPlan


@command(
    {
        0: "done, or without --yes: shown, or there is nothing to thin",
        4: "the newest checkpoint is not resumable, so older ones are not touched",
        5: "--reference, and the format has no files that others can link to",
        6: "a training or another llmtailor is writing to RUN_DIR",
        7: "the named checkpoints are unchanged; earlier changes stay",
        8: "earlier changes stay; rerun the same command to continue",
        130: "earlier changes stay; rerun the same command to continue",
    }
)
@RUN_DIR
@click.option(
    "--strategy",
    metavar="POLICY",
    help="Turn older full checkpoints into partial ones with the parts of a policy: parity, filter, "
    "filter:first=1,every=4, round_robin:4 or full. The oldest keeps all parts.",
)
@click.option(
    "--select",
    multiple=True,
    metavar="SELECTOR",
    help="The same with these parts; selectors as in a recipe. Repeatable. The oldest keeps all parts.",
)
@click.option(
    "--keep-full-last",
    type=COUNT,
    metavar="K",
    help="With --strategy or --select: leave the newest K full checkpoints unchanged (default 1).",
)
@click.option(
    "--keep-optimizer-last",
    type=COUNT,
    metavar="K",
    help="Reduce full checkpoints older than the newest K to weights, config and tokenizer, which can't be resumed "
    "from.",
)
@click.option(
    "--reference",
    is_flag=True,
    help="With --strategy or --select: older full checkpoints stay complete. What they don't keep are hard links to "
    "files of the one before. For FSDP and DCP folders.",
)
@MASTERS_AS
@MOMENTS_AS
@TRUST_UNRECORDED
@CLONE
@YES
@JSON
def thin(run: Path, trust_unrecorded: bool, clone: Clone, yes: bool, as_json: bool, **options: Any) -> None:
    """Free disk space in RUN_DIR by reducing its older full checkpoints.

    The newest are not changed. Every composable step stays composable (llmtailor merge --run RUN_DIR --at STEP), except
    with --keep-optimizer-last. A checkpoint is removed only after its replacement has been written and read back. If
    interrupted, rerun the same command to resume.

    \b
    Examples:
      llmtailor thin runs/x --strategy parity
      llmtailor thin runs/x --strategy filter --keep-full-last 2 --yes
      llmtailor thin runs/x --strategy moments_in_turn --reference --yes
      llmtailor thin runs/x --strategy moments_in_turn:8 --masters 24bit --moments 8bit --yes
      llmtailor thin runs/x --select last:2 --select lm_head --yes
      llmtailor thin runs/x --keep-optimizer-last 2 --yes
    """
    from llmtailor.frameworks.files import FOLDER
    from llmtailor.runs.guards import only_writer
    from llmtailor.runs.thin import thin as carry_out
    from llmtailor.runs.thin_plan import bytes_to_move, plan_thinning

    wanted = _options(**options)
    if yes and not (run / FOLDER).is_dir():  # a refusal leaves no new folder behind
        plan_thinning(run, wanted, trust_unrecorded=trust_unrecorded)
    with only_writer(run, make=not wanted.weights_only) if yes else nullcontext():
        plan = plan_thinning(run, wanted, trust_unrecorded=trust_unrecorded)
        _show(_thinning(plan) if as_json else _thinning_text(plan, yes), plan.scan.skipped)
        if not yes:
            click.echo("dry run: nothing was changed; use --yes to thin", err=True)
            return
        with progress_bar(bytes_to_move(plan), quiet=False, label="thinning") as on_progress:
            moved = carry_out(plan, _show_done, on_progress, clone)
        show_moved(moved, quiet=False)


@command(
    {
        0: "done, or without --yes: shown, or there is nothing to remove",
        4: "the newest checkpoint is not resumable, or no step is composable, so nothing is removed",
        6: "a training or another llmtailor is writing to RUN_DIR",
        8: "earlier removals stay; rerun the same command to continue",
        130: "earlier removals stay; rerun the same command to continue",
    }
)
@RUN_DIR
@click.option("--keep", type=COUNT, metavar="N", help="Keep only the newest N composable steps. Default: all.")
@TRUST_UNRECORDED
@YES
@JSON
def gc(run: Path, keep: int | None, trust_unrecorded: bool, yes: bool, as_json: bool) -> None:
    """Remove partial checkpoints that no composable step needs, and unfinished or abandoned folders, from RUN_DIR.

    Without --keep, every composable step stays composable from the same parts. Unfinished saves, abandoned attempts and
    leftovers of killed commands are always removed. Full checkpoints are never touched.

    \b
    Examples:
      llmtailor gc runs/x
      llmtailor gc runs/x --keep 2 --yes
    """
    from llmtailor.runs.gc import collect, plan_gc
    from llmtailor.runs.guards import only_writer

    with only_writer(run) if yes else nullcontext():
        plan = plan_gc(run, keep, trust_unrecorded=trust_unrecorded)
        in_use = (Problem(str(path), "another process is writing there", "wait until it ends") for path in plan.in_use)
        _show(_collection(plan) if as_json else _collection_text(plan, yes), [*plan.left_alone, *in_use])
        if not yes:
            click.echo("dry run: nothing was changed; use --yes to remove", err=True)
            return
        collect(plan, lambda removal: click.echo(f"removed {removal.path.name}", err=True))


def _options(
    *,
    strategy: str | None,
    select: tuple[str, ...],
    keep_full_last: int | None,
    keep_optimizer_last: int | None,
    masters: Masters | None,
    moments: Moments | None,
    reference: bool,
) -> ThinOptions:
    from llmtailor.runs.prune import ThinOptions

    problems = []
    given = [flag for flag, value in (("--strategy", strategy), ("--select", select)) if value]
    given += ["--keep-optimizer-last"] if keep_optimizer_last else []
    if len(given) != 1:
        what = f"{' and '.join(given)} can't be combined" if given else "it needs the parts that older checkpoints keep"
        fix = (
            "give one of --strategy parity (half of the layers each), --select SELECTOR (these parts) and "
            "--keep-optimizer-last 2 (only the weights); without --yes, the plan is only shown"
        )
        problems.append(Problem("thin", what, fix))
    if keep_optimizer_last and keep_full_last:
        fix = "omit it: the newest K of --keep-optimizer-last stay full"
        problems.append(Problem("--keep-full-last", "it needs --strategy or --select", fix))
    precision = PrecisionOptions(masters, moments)
    if keep_optimizer_last and precision:
        what = "they round optimizer states, of which none are kept"
        problems.append(Problem("--masters, --moments", what, "omit them, or give --strategy"))
    if keep_optimizer_last and reference:
        what = "nothing but the weights is kept, so nothing is left to link to"
        problems.append(Problem("--reference", what, "omit it, or give --strategy"))
    if problems:
        raise UsageError(problems)
    return ThinOptions(keep_optimizer_last or keep_full_last or 1, strategy, select, precision, reference)


def _show(plan: dict[str, Any] | str, left_alone: Iterable[Problem]) -> None:
    from llmtailor.findings import folded

    for what in folded(left_alone):
        notify(f"not touched: {what}")
    click.echo(plan) if isinstance(plan, str) else print_json(plan)


def _show_done(action: PruneAction) -> None:
    click.echo(f"{action.checkpoint.name}: done, {size(action.freed)} freed", err=True)


def _thinning(plan: ThinPlan) -> dict[str, Any]:
    from llmtailor.documents import document

    content = {
        "run": plan.scan.run,
        "checkpoints": [
            {
                "path": action.checkpoint.path,
                "step": action.checkpoint.step,
                "is": f"{'composite, ' if index.composite.states else ''}{index.format} on {index.world_size} rank"
                + "s" * (index.world_size > 1),
                "becomes": action.becomes,
                "why": action.why,
                "parts": action.parts,
                "masters": action.masters,
                "now_at": (action.successor or action.checkpoint).path,
                "links_to": action.links_to.path if action.links_to else None,
                "is_written": action.is_written,
                "num_bytes": sum(fact.num_bytes for fact in index.files.values()),
                "freed_bytes": action.freed,
            }
            for action in plan.actions
            for index in [plan.scan.indexes[action.checkpoint.path]]
        ],
        "left_behind": plan.left_behind,
        "skipped": plan.scan.skipped,
        **_steps(plan),
    }
    return document("thin/1", content)


def _collection(plan: GcPlan) -> dict[str, Any]:
    from llmtailor.documents import document

    content = {
        "run": plan.scan.run,
        "removed": [{"path": removal.path, "why": removal.why, "step": removal.step} for removal in plan.removals],
        "in_use": plan.in_use,
        "skipped": plan.left_alone,
        **_steps(plan),
    }
    return document("gc/1", content)


def _steps(plan: ThinPlan | GcPlan) -> dict[str, Any]:
    return {
        "composable_before": plan.before,
        "composable_after": [age.step for age in plan.ages],
        "ages": plan.ages,
        "freed_bytes": plan.freed,
    }


def _freed(num_bytes: int, is_done: bool) -> str:
    return f"{size(num_bytes)} {'freed' if is_done else 'would be freed'} ({num_bytes:,} bytes)"


def _thinning_text(plan: ThinPlan, yes: bool) -> str:
    from llmtailor.cli.tables import ages_text, steps_text, table
    from llmtailor.runs.prune import STAYS

    rows = [
        (action.checkpoint.name, row["is"], *_outcome(action), size(row["num_bytes"]), size(action.freed))
        for action, row in zip(plan.actions, _thinning(plan)["checkpoints"], strict=True)
    ]
    lines = [table(("checkpoint", "is", "becomes", "parts", "bytes", "freed"), rows, right=(4, 5)), ""]
    lines += [f"removed, left over from a killed thin: {path.name}" for path in plan.left_behind]
    lines.append(ages_text(plan.before, plan.ages))
    if lost := sorted(set(plan.before).difference(age.step for age in plan.ages)):
        lines.append(f"only the weights of step {steps_text(lost)} are kept: they can't be resumed from")
    if all(action.becomes == STAYS for action in plan.actions):
        lines.append(f"nothing to thin beyond the newest {plan.options.keep_full}, which stay full")
    if plan.freed < 0:
        lines.append("no gain: for such a small model, a partial checkpoint's manifest takes more space than it saves")
    return "\n".join([*lines, _freed(plan.freed, yes)])


def _outcome(action: PruneAction) -> tuple[str, str]:
    """Return the new form of a checkpoint, and the parts it keeps, in words."""
    from llmtailor.model.parts import condense
    from llmtailor.runs.prune import STAYS

    if action.becomes == STAYS:
        return (f"stays: {action.why}" if action.why else "stays"), "all"
    if action.successor is None:
        return "weights only, not resumable", "no optimizer states"
    where = f"{action.successor.path.parent.name}/{action.successor.name}"
    if action.links_to is not None:
        where = f"links to {action.links_to.name}"
    is_whole = action.successor.parts is None and action.links_to is None
    parts = "all" if is_whole else condense(action.parts)
    if action.masters:
        parts += "; the masters of the others"
    return where + ("" if action.is_written else ", already there"), parts


def _collection_text(plan: GcPlan, yes: bool) -> str:
    from llmtailor.cli.tables import ages_text, table
    from llmtailor.runs.folder import files_in, freed_bytes

    removed = {removal.path for removal in plan.removals}
    outcomes = [
        (checkpoint.path, "removed: no step needs it" if checkpoint.path in removed else "stays")
        for checkpoint in plan.scan.partial
    ]
    outcomes += [(removal.path, f"removed: {removal.why}") for removal in plan.removals if removal.step is None]
    rows = [(path.name, what, size(freed_bytes(files_in(path)))) for path, what in outcomes]
    lines = [table(("folder", "becomes", "bytes freed"), rows, right=(2,)), ""] if rows else []
    lines.append(ages_text(plan.before, plan.ages))
    lines += [] if plan.removals else ["nothing to remove"]
    return "\n".join([*lines, _freed(plan.freed, yes)])
