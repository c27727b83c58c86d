"""The common part of ``merge`` and ``convert``: plan, show, write; and a progress bar on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from llmtailor.cli.tables import parts_text, plan_text
from llmtailor.compose.plan import Options, plan_merge
from llmtailor.compose.report import to_json
from llmtailor.compose.write import bytes_to_move, check_room, preview, settle_output, write
from llmtailor.recipe.recipe import Recipe

_STAGES = {"keep": None, "none": 0, "1": 1, "2": 2, "3": 3}


@contextmanager
def progress_bar(total_bytes: int | None, *, quiet: bool, label: str = "writing") -> Iterator[Callable[[int], None]]:
    """Yield a function that takes numbers of bytes done, from any thread; silent if stderr is not a terminal.

    ``total_bytes`` is None if unknown.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda num_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(label, *columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total_bytes)
        yield lambda num_bytes: progress.advance(task, num_bytes)


@dataclass(frozen=True, slots=True)
class Target:
    """The options of `cli.options.target_options`, grouped by use."""

    options: Options
    dry_run: bool
    as_json: bool
    quiet: bool


def take_target(given: dict[str, Any], *, allow_split: bool = False) -> Target:
    """Return the options of `target_options` among a command's keywords."""
    shown = {name: given.pop(name) for name in ("dry_run", "as_json", "quiet")}
    names = ("world_size", "groups", "step", "copy_tokenizer", "restart", "checksum")
    options = Options(
        stage=_STAGES[given.pop("stage")],
        replace=given.pop("force"),
        allow_split=allow_split,
        **{name: given.pop(name) for name in names},
    )
    return Target(options, **shown)


def run_merge(recipe: Recipe | Path, out: Path | None, target: Target) -> None:
    """Plan, print the plan, and write the output unless this is a dry run."""
    composition, there = plan_merge(recipe, out, target.options), None
    if target.options.reuse:
        composition, there = settle_output(composition)
    report = composition.report
    for notice in report.notices:
        notify(notice)
    if target.as_json:
        # the path to resume from, whether written now or already there
        named = {"out": there, "is_there_already": True} if there else {"is_there_already": False}
        click.echo(json.dumps({**to_json(report), **named}, indent=2))
    elif target.dry_run:
        click.echo(plan_text(report))
    elif not target.quiet and not there:
        click.echo(parts_text(report))
    if there:
        what = f"{there} is complete and has the newest of every part: nothing to merge"
        click.echo(what, err=target.as_json or target.dry_run)
    elif target.dry_run:
        if sentence := preview(composition):
            notify(sentence)
        check_room(composition)
        click.echo("dry run: nothing was written", err=True)
    else:
        with progress_bar(bytes_to_move(composition), quiet=target.quiet) as on_progress:
            write(composition, on_progress, notify)
        click.echo(f"wrote {report.out}", err=target.as_json)


def notify(what: object) -> None:
    """Print a note on stderr."""
    click.echo(f"note: {what}", err=True)
