"""What ``merge`` and ``convert`` do alike: plan, show, write.

A bar that counts bytes, on stderr, silent when that is no terminal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmtailor.cli.tables import parts_text, plan_text
from llmtailor.compose.plan import Options, plan_merge
from llmtailor.compose.report import to_json
from llmtailor.compose.resume import foresee, settle_output
from llmtailor.compose.write import bytes_to_move, check_room, write
from llmtailor.recipe.recipe import Recipe


@contextmanager
def progress_bar(total_bytes: int | None, *, quiet: bool, label: str = "writing") -> Iterator[Callable[[int], None]]:
    """Yield a function to be told how many bytes are done, from any thread; ``total_bytes`` is None if not known."""
    if quiet or not sys.stderr.isatty():
        yield lambda num_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(label, *columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total_bytes)
        yield lambda num_bytes: progress.advance(task, num_bytes)


_STAGES = {"keep": None, "none": 0, "1": 1, "2": 2, "3": 3}


@dataclass(frozen=True, slots=True)
class Told:
    """The options of `cli.options.target_options`, sorted."""

    options: Options
    dry_run: bool
    as_json: bool
    quiet: bool


def take_target(given: dict[str, Any], *, allow_split: bool = False) -> Told:
    """Take the options of `target_options` out of a command's keywords."""
    stage = given.pop("stage")
    options = Options(
        world_size=given.pop("world_size"),
        stage=_STAGES[stage],
        groups=given.pop("groups"),
        step=given.pop("step"),
        replace=given.pop("force"),
        copy_tokenizer=given.pop("copy_tokenizer"),
        allow_split=allow_split,
        restart=given.pop("restart"),
        checksum=given.pop("checksum"),
    )
    return Told(options, given.pop("dry_run"), given.pop("as_json"), given.pop("quiet"))


def run_merge(recipe: Recipe | Path, out: Path | None, told: Told) -> None:
    """Plan, print what is planned, and write it unless this is a dry run."""
    composition, there = plan_merge(recipe, out, told.options), None
    if told.options.reuse:
        composition, there = settle_output(composition)
    report = composition.report
    idle = there is not None
    for notice in report.notices:
        click.echo(f"note: {notice}", err=True)
    if told.as_json:
        # what to resume from, whether it has to be written or is there
        named = {"out": there, "is_there_already": True} if idle else {"is_there_already": False}
        click.echo(json.dumps({**to_json(report), **named}, indent=2))
    elif told.dry_run:
        click.echo(plan_text(report))
    elif not told.quiet and not idle:
        click.echo(parts_text(report))
    if idle:
        what = f"{there} is complete and has the newest of every part: nothing to merge"
        click.echo(what, err=told.as_json or told.dry_run)
        return
    if told.dry_run:
        if sentence := foresee(composition):
            _tell(sentence)
        check_room(composition)
        click.echo("dry run: nothing was written", err=True)
        return
    with progress_bar(bytes_to_move(composition), quiet=told.quiet) as observe:
        write(composition, observe, _tell)
    click.echo(f"wrote {report.out}", err=told.as_json)


def _tell(sentence: str) -> None:
    click.echo(f"note: {sentence}", err=True)


if TYPE_CHECKING:
    pass
