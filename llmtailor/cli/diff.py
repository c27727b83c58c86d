"""``llmtailor diff``"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmtailor.cli.command import command, print_json, progress_bar
from llmtailor.cli.main import DIFFERENT
from llmtailor.cli.options import COUNT, JSON, LOCATION

if TYPE_CHECKING:
    from llmtailor.verify.diff import Compared

_LABELS: dict[str, Callable[[Compared], str]] = {
    "part": lambda one: one.part,
    "module": lambda one: one.module,
    "tensor": lambda one: one.state.param,
}


@command(
    {
        0: "training continues from B exactly as from A; with --kind, these states are equal",
        2: "also if a --kind is not in both checkpoints",
        5: "the checkpoints have no state in common",
        DIFFERENT: "the checkpoints differ",
    }
)
@click.argument("a", type=LOCATION)
@click.argument("b", type=LOCATION)
@click.option("--by", type=click.Choice([*_LABELS]), default="part", show_default=True, help="Content of a table row.")
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    metavar="KIND",
    help="Compare only this kind of state: weight, master, exp_avg, exp_avg_sq, ... Repeatable. With a single kind, "
    "the table has more columns.",
)
@click.option(
    "--sort",
    type=click.Choice(["model", "relative", "largest", "changed"]),
    default="model",
    show_default=True,
    help="Order of the rows: as in the model, or largest first.",
)
@click.option("--top", type=COUNT, metavar="N", help="Show only the first N rows.")
@JSON
def diff(a: Path, b: Path, by: str, kinds: tuple[str, ...], sort: str, top: int | None, as_json: bool) -> int:
    """Show how checkpoint B differs from checkpoint A: counters, hyperparameters and other settings, then the values.

    Both may have any format, full or partial. Values are streamed in constant memory. A change is relative: the L2 norm
    of the difference, divided by that of A. If the dtypes differ, the wider one is rounded first.

    \b
    Examples:
      llmtailor diff runs/x/checkpoint-300 runs/x/checkpoint-400
      llmtailor diff runs/x/checkpoint-300 runs/x/checkpoint-400 --by tensor --kind master --sort relative --top 20
      llmtailor diff runs/x/checkpoint-400 copy/checkpoint-400 >/dev/null && echo "the copy is exact"
    """
    from llmtailor.cli.diff_text import diff_text, heat_map
    from llmtailor.formats.registry import index_checkpoint
    from llmtailor.verify.diff import diff_indexes, to_json

    one, two = index_checkpoint(a), index_checkpoint(b)
    with progress_bar(None, quiet=False, label="reading") as on_progress:
        found = diff_indexes(one, two, kinds, on_progress)
    if as_json:
        print_json(to_json(found, _LABELS[by]))
    else:
        click.echo(diff_text(found, found.by(_LABELS[by]), by, sort, top))
        heat_map(found)
    return 0 if found.is_equal else DIFFERENT
