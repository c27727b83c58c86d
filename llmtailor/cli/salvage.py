"""``llmtailor salvage``"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmtailor.cli.command import command, notify, print_json, progress_bar, show_moved
from llmtailor.cli.options import AT, CLONE, DRY_RUN, FORCE, JSON, PATH, QUIET, RUN_DIR, TRUST_UNRECORDED
from llmtailor.errors import UsageError

if TYPE_CHECKING:
    from llmtailor.salvage.plan import Salvage
    from llmtailor.salvage.replace import Replacement


@command(
    {
        0: "OUT is complete, or not needed because an intact checkpoint is as good",
        4: "the intact data does not make a complete checkpoint",
        6: "OUT exists; with --replace: a name is taken, or a checkpoint to be moved aside is being written",
        8: "also with --dry-run, if the output does not fit",
    }
)
@RUN_DIR
@click.option("-o", "--out", type=PATH, help="Default: RUN_DIR/salvaged-checkpoint-STEP.")
@AT
@click.option(
    "--deep", is_flag=True, help="Also read every tensor: non-finite values and checksum errors count as lost."
)
@click.option(
    "--replace", is_flag=True, help="Make OUT the checkpoint that auto-resume takes, and move damaged ones aside."
)
@TRUST_UNRECORDED
@FORCE
@CLONE
@DRY_RUN
@JSON
@QUIET
def salvage(
    run: Path,
    out: Path | None,
    *,
    replace: bool,
    force: bool,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Compose a checkpoint from the intact data of RUN_DIR when its newest checkpoint is damaged or incomplete.

    Every part (weights, master weights and moments) comes from the newest full or partial checkpoint that has it
    intact. Schedule, trainer state and random number states come from the newest source that has them. If the newest
    checkpoint is intact, nothing is written.

    \b
    Examples:
      llmtailor salvage runs/x --dry-run
      llmtailor salvage runs/x --deep -o out/checkpoint-400
      llmtailor salvage runs/x --replace
    """
    from llmtailor.compose.write import check_room, write
    from llmtailor.frameworks.framework import framework_of
    from llmtailor.salvage.plan import plan_salvage, to_json
    from llmtailor.salvage.replace import check_settled, plan_replacement, seen_in, unfinished_replacement

    if replace and out is not None:
        raise UsageError.at("--replace", "it determines the output folder", "omit -o")
    if (left := unfinished_replacement(run.absolute())) is not None:
        if replace and not dry_run:
            _put_in_place(left, as_json)
        else:
            notify("an earlier --replace was interrupted; run salvage --replace to finish it")
    seen = seen_in(run.absolute())
    with progress_bar(None, quiet=quiet or not options["deep"], label="reading") as on_progress:
        options |= {"replace_out": force, "in_place": replace, "on_progress": on_progress}
        salvage = plan_salvage(run, out, **options)
    replacement = plan_replacement(salvage) if replace else None
    if salvage.is_intact and replacement is not None and replacement.latest is None:
        replacement = None
    composition = salvage.composition
    resume_from = composition.out if composition else salvage.base.index.root
    resume_from = replacement.target if replacement else resume_from
    resume_from = Path(framework_of(salvage.base.index).takes(str(resume_from), salvage.base.index.form.stage))
    is_written = composition is not None and not salvage.is_written and not dry_run
    if as_json and not is_written:
        print_json(to_json(salvage, resume_from))
    elif not as_json and not quiet:
        _show(salvage)
    if dry_run:
        if composition is not None:
            check_room(composition)
        is_done = composition is None and replacement is None
        _show_how_to_resume(salvage, resume_from, replace, as_json, options["deep"], is_done)
        click.echo("dry run: nothing was written", err=True)
        return
    if replacement is not None:
        check_settled(replacement, seen, notify)
    if composition is not None and is_written:
        with progress_bar(composition.report.num_bytes, quiet=quiet) as on_progress:
            moved = write(composition, on_progress, notify)
        show_moved(moved, quiet)
        click.echo(f"wrote {composition.report.out}", err=as_json)
        if as_json:
            print_json(to_json(salvage, resume_from, moved))
    if replacement is not None:
        check_settled(replacement, seen, notify)
        _put_in_place(replacement, as_json)
    _show_how_to_resume(salvage, resume_from, replace, as_json, options["deep"])


def _put_in_place(replacement: Replacement, as_json: bool) -> None:
    from llmtailor.salvage.replace import put_salvaged_in_place

    put_salvaged_in_place(replacement)
    for folder, name in replacement.aside.items():
        click.echo(f"{folder.name} is now {name.name}", err=as_json)
    if replacement.latest is not None:
        click.echo(f"latest now names {replacement.latest[1]} instead of {replacement.latest[0]}", err=as_json)


def _show(salvage: Salvage) -> None:
    from llmtailor.cli.tables import salvage_text
    from llmtailor.findings import folded

    for problem in folded(salvage.damage):
        click.echo(f"damaged: {problem.where}: {problem.what}", err=True)
    for problem in folded(salvage.refused):
        click.echo(f"not used: {problem.where}: {problem.what}", err=True)
    if salvage.composition is not None:
        damage = {*salvage.damage, *salvage.refused}
        for notice in folded(notice for notice in salvage.composition.report.notices if notice not in damage):
            notify(notice)
        click.echo(salvage_text(salvage))


def _show_how_to_resume(
    salvage: Salvage, resume_from: Path, is_replaced: bool, as_json: bool, is_deep: bool, is_done: bool = True
) -> None:
    from llmtailor.checkpoint.index import DEEPSPEED, TRAINER
    from llmtailor.formats.registry import display_name
    from llmtailor.frameworks.framework import framework_of

    newest = display_name(salvage.newest[1])
    state = "intact" if is_deep else "complete as far as its headers show (--deep reads all of it)"
    if salvage.is_intact:
        click.echo(f"{newest} is {state}: nothing to salvage", err=as_json)
        return
    if salvage.composition is None:
        click.echo(f"{salvage.base.name} is {state}, and no newer checkpoint is usable: resume from it", err=as_json)
    base, name = salvage.base.index, display_name(resume_from)
    if base.framework == TRAINER:
        how = f"--resume_from_checkpoint {shlex.quote(name)}"
        how += ", or use auto-resume" if is_replaced else f"; without --replace, auto-resume would take {newest}"
    elif base.framework == DEEPSPEED and resume_from.name == base.zero.tag:
        how = f'engine.load_checkpoint("{display_name(resume_from.parent)}", tag="{base.zero.tag}")'
    else:
        how = framework_of(base).call.format(name)
    click.echo(f"{'' if is_done else 'then '}resume with {how}", err=as_json)
