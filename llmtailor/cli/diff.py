"""``llmtailor diff``, and what it prints: a table of changes, and a heat map of layers and modules."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmtailor.cli.command import command, print_json, progress_bar
from llmtailor.cli.main import DIFFERENT
from llmtailor.cli.options import COUNT, JSON, LOCATION
from llmtailor.cli.tables import table
from llmtailor.model.roles import MASTER, WEIGHT
from llmtailor.verify.diff import Change

if TYPE_CHECKING:
    from llmtailor.verify.diff import Compared, Diff

_LABELS: dict[str, Callable[[Compared], str]] = {
    "part": lambda compared: compared.part,
    "module": lambda compared: compared.module,
    "tensor": lambda compared: compared.state.param,
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
def diff(a: Path, b: Path, *, by: str, kinds: tuple[str, ...], sort: str, top: int | None, as_json: bool) -> int:
    """Show how checkpoint B differs from checkpoint A: counters, hyperparameters and other settings, then the values.

    Both may have any format, full or partial. Values are streamed in constant memory. A change is relative: the L2 norm
    of the difference, divided by that of A. If the dtypes differ, the wider one is rounded first.

    \b
    Examples:
      llmtailor diff runs/x/checkpoint-300 runs/x/checkpoint-400
      llmtailor diff runs/x/checkpoint-300 runs/x/checkpoint-400 --by tensor --kind master --sort relative --top 20
      llmtailor diff runs/x/checkpoint-400 copy/checkpoint-400 >/dev/null && echo "the copy is exact"
    """
    from llmtailor.formats.registry import index_checkpoint
    from llmtailor.verify.diff import diff_indexes, to_json

    index_a, index_b = index_checkpoint(a), index_checkpoint(b)
    with progress_bar(None, quiet=False, label="reading") as on_progress:
        differences = diff_indexes(index_a, index_b, kinds, on_progress)
    if as_json:
        print_json(to_json(differences, _LABELS[by]))
    else:
        click.echo(diff_text(differences, differences.by(_LABELS[by]), by, sort, top))
        heat_map(differences)
    return 0 if differences.is_equal else DIFFERENT


_WIDTH = 9
"""Of a column of the heat map"""
_SHADES = ("#440154", "#3b528b", "#21918c", "#5ec962", "#fde725")
"""From small to large. Their lightness grows, so they also differ without color."""
_PIPED_WIDTH = 120


def diff_text(differences: Diff, rows: Mapping[str, Mapping[str, Change]], by: str, sort: str, top: int | None) -> str:
    lines = [f"A: {differences.a}, step {differences.steps[0]}", f"B: {differences.b}, step {differences.steps[1]}", ""]
    for matters, title in ((True, "different"), (False, "stored differently")):
        rows_of = [(fact.what, fact.a, fact.b) for fact in differences.training if fact.matters == matters]
        if rows_of:
            lines += [table((title, "A", "B"), rows_of), ""]
    labels = _sorted(rows, sort)
    kinds = differences.kinds
    if len(kinds) == 1:
        head, cells, right = _all_of_one_kind(labels, rows, kinds[0], by)
    else:
        head, cells, right = _change_of_each_kind(differences, labels, rows, kinds, by)
    lines += [table(head, cells[:top], right=right)]
    if top is not None and top < len(cells):
        lines += [f"and {len(cells) - top} more"]
    unclean = sum(compared.change.not_finite for compared in differences.states)
    if unclean:
        lines += ["", f"{unclean:,} elements are NaN or infinite, and left out of the changes"]
    lines += ["", _verdict(differences)]
    return "\n".join(lines)


def _verdict(differences: Diff) -> str:
    if differences.is_equal and differences.chosen:
        return f"equal in {', '.join(differences.chosen)}; other kinds of states were not compared"
    if differences.is_equal:
        return (
            f"equal: all {len(differences.states)} states compared, and everything else that a training continues from"
        )
    changed = sum(1 for compared in differences.states if compared.change.changed)
    num_others = sum(fact.matters for fact in differences.training)
    more = f", and {num_others} other difference{'s' * (num_others > 1)}" if num_others else ""
    return f"different: {changed} of {len(differences.states)} states{more}"


def _sorted(rows: Mapping[str, Mapping[str, Change]], sort: str) -> list[str]:
    keys = {
        "relative": lambda change: change.relative,
        "largest": lambda change: change.largest,
        "changed": lambda change: change.share,
    }
    if sort not in keys:
        return list(rows)
    return sorted(rows, key=lambda label: -max(keys[sort](change) for change in rows[label].values()))


Table = tuple[tuple[str, ...], list[tuple[object, ...]], Sequence[int]]


def _change_of_each_kind(
    differences: Diff, labels: list[str], rows: Mapping[str, Mapping[str, Change]], kinds: list[str], by: str
) -> Table:
    masters, moments = differences.master_steps, differences.part_steps
    has_steps = by == "part" and any(a != b for a, b in (*masters.values(), *moments.values()))
    has_moments = has_steps and masters != moments
    steps = (*(("A step", "B step") if has_steps else ()), *(("A moments at", "B moments at") if has_moments else ()))
    head = (by, *steps, *kinds, "changed")
    cells: list[tuple[object, ...]] = []
    for label in labels:
        total = sum(rows[label].values(), Change())
        changes = (relative_text(rows[label].get(kind)) for kind in kinds)
        of_moments = moments[label] if rows[label].keys() - {WEIGHT, MASTER} else ("-", "-")  # one has none
        saved = (*(masters[label] if has_steps else ()), *(of_moments if has_moments else ()))
        cells.append((label, *saved, *changes, _share(total)))
    return head, cells, range(1, len(head))


def _all_of_one_kind(labels: list[str], rows: Mapping[str, Mapping[str, Change]], kind: str, by: str) -> Table:
    head = (by, kind, "largest", "cosine", "changed", "elements")
    cells: list[tuple[object, ...]] = []
    for label in labels:
        change = rows[label][kind]
        cosine = "" if change.cosine is None else f"{change.cosine:.6f}"
        largest = f"{change.largest:.3g}"
        cells.append((label, relative_text(change), largest, cosine, _share(change), f"{change.numel:,}"))
    return head, cells, range(1, len(head))


def relative_text(change: Change | None) -> str:
    """Return a relative change: ``=`` if every bit is the same, ``-`` if it was not compared."""
    if change is None:
        return "-"
    return f"{change.relative:.2e}" if change.changed else "="


def _share(change: Change) -> str:
    if 0 < change.share < 0.001:
        return "<0.1%"
    return f"{change.share:.1%}" if change.changed else "0"


def heat_map(differences: Diff) -> None:
    """Print the relative change of each layer's modules, with shades in a terminal."""
    kind = MASTER if MASTER in differences.kinds else differences.kinds[0]
    cells: dict[tuple[int, str], Change] = {}
    for compared in differences.states:
        if compared.layer is not None and compared.state.kind == kind:
            at = (compared.layer, compared.module)
            cells[at] = cells.get(at, Change()) + compared.change
    finite = [change.relative for change in cells.values() if 0 < change.relative < math.inf]
    if not finite:
        return
    from rich.console import Console
    from rich.text import Text

    low, high = math.log(min(finite)), math.log(max(finite))
    is_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if is_terminal else _PIPED_WIDTH
    console = Console(width=width, highlight=False, soft_wrap=True)
    layers, modules = sorted({layer for layer, _ in cells}), list(dict.fromkeys(module for _, module in cells))
    per_block = max(1, (width - 6) // (_WIDTH + 1))
    click.echo(f"\nrelative change of {kind}, layers x modules")
    for start in range(0, len(modules), per_block):
        block = modules[start : start + per_block]
        console.print(Text("layer " + " ".join(_head(module).rjust(_WIDTH) for module in block)))
        for layer in layers:
            line = Text(f"{layer:>5} ")
            for number, module in enumerate(block):
                change = cells.get((layer, module))
                line.append(" " * bool(number))
                line.append(relative_text(change).rjust(_WIDTH), style=_style(change, low, high))
            console.print(line)
    heads = [_head(module) for module in modules]
    for head, module in zip(heads, modules, strict=True):
        if head != module.rpartition(".")[2] or heads.count(head) > 1:
            click.echo(f"{head}: {module}")


def _head(module: str) -> str:
    return module.rpartition(".")[2][:_WIDTH]


def _style(change: Change | None, low: float, high: float) -> str:
    if change is None or not 0 < change.relative < math.inf:
        return ""
    share = (math.log(change.relative) - low) / (high - low) if high > low else 1.0
    shade = _SHADES[min(int(share * len(_SHADES)), len(_SHADES) - 1)]
    return f"{'black' if share >= 0.6 else 'white'} on {shade}"
