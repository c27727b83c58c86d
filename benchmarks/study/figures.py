"""Writes the tables of benchmarks/fidelity.md and its pictures from the cells.

    python -m study.figures CACHE

Tables stand between ``<!-- study NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from study import failures, precision
from study.chart import Chart, Scale
from study.run import LIKE_FILTER, OTHER_ORDER, SETTINGS, SHORTER, Cells

DOCS = Path(__file__).parents[2] / "docs"
Cell = dict[str, Any]
_MARK = re.compile(r"(<!-- study (\S+) -->\n)(?:(?!<!-- ).*\n)*(<!-- end -->)")
KINDS = (("adaptive", "adaptive"), ("moments_in_turn", "moments_in_turn"), ("", "other policies"))
"""Beginning of a name -> what the legend says"""
SHORT = {"parity:aux_every=1": "parity + aux", "filter:aux_every=1": "filter + aux"}


def by_name(cells: Iterable[Cell]) -> dict[str, dict[str, dict[int, Cell]]]:
    """Return setting -> name -> seed -> cell."""
    found: dict[str, dict[str, dict[int, Cell]]] = defaultdict(lambda: defaultdict(dict))
    for cell in cells:
        found[cell["setting"]][cell["name"]][cell["seed"]] = cell
    return found


def spread(values: Sequence[float]) -> str:
    """Return the mean and the standard deviation, in thousandths of a nat."""
    around = f" +- {1000 * stdev(values):.1f}" if len(values) > 1 else ""
    return f"{1000 * fmean(values):+.1f}{around}"


def table(setting: str, names: Mapping[str, Mapping[int, Cell]]) -> str:
    """Return the table of a setting: gaps, paired differences from parity, and what full saves of the bytes cost."""
    rows = [
        "| saves | bytes | at once | at the end | less parity's | full saves | n |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    parity = names["parity"]
    policies = {name: cells for name, cells in names.items() if name not in (OTHER_ORDER, SHORTER)}
    shares = {name: fmean(cell["share"] for cell in cells.values()) for name, cells in policies.items()}
    for name in sorted(policies, key=lambda name: -shares[name]):
        cells, share = policies[name], shares[name]
        now = [fmean(cell["now"].values()) for cell in cells.values()]
        gaps = [cell["gap"] for cell in cells.values()]
        both = [cell["gap"] - parity[seed]["gap"] for seed, cell in cells.items() if seed in parity]
        paired = "" if name == "parity" or not both else spread(both)
        rival = f"{1000 * a_step(names) * lost_to_full(setting, share):+.1f}" if SHORTER in names else ""
        rows.append(f"| {name} | {share:.2f} | {spread(now)} | {spread(gaps)} | {paired} | {rival} | {len(cells)} |")
    if OTHER_ORDER in names:
        rows.append(f"| (other data order) | | 0 | {spread([c['gap'] for c in names[OTHER_ORDER].values()])} | | | |")
    if SHORTER in names:
        (steps,) = {cell["steps"] for cell in names[SHORTER].values()}
        gaps = [cell["gap"] for cell in names[SHORTER].values()]
        rows.append(f"| (a training of {steps} steps fewer) | | | {spread(gaps)} | | | {len(gaps)} |")
    ends = [cell["end"] for cell in parity.values()]
    if len(ends) > 1:
        rows.append(f"\nStandard deviation of the uninterrupted ends between seeds: {1000 * stdev(ends):.0f}.")
    return "\n".join(rows)


def a_step(names: Mapping[str, Mapping[int, Cell]]) -> float:
    """Return how much more loss a training with one step fewer ends with; the mean over seeds has less noise."""
    return fmean(cell["gap"] / cell["steps"] for cell in names[SHORTER].values())


def lost_to_full(setting: str, share: float) -> float:
    """Return how many more steps a failure costs on average if full saves, at longer intervals, take these bytes."""
    every = SETTINGS[setting].every
    return (every / share - every) / 2


def estimated(names: Mapping[str, Mapping[int, Cell]]) -> Iterator[Cell]:
    """Yield the cells with an estimate, each composite once: 'filter's bytes' may be those of another share."""
    for name, cells in names.items():
        for seed, cell in cells.items():
            twin = names["adaptive:0.67"].get(seed) if name == LIKE_FILTER else None
            if "expected" in cell and (twin is None or twin["now"] != cell["now"]):
                yield cell


def setbacks(names: Mapping[str, Mapping[int, Cell]]) -> list[tuple[float, float]]:
    """Return what was estimated and what was measured, in saves, for each composite."""
    found = []
    for cell in estimated(names):
        losses = {int(step): loss for step, loss in cell["losses"].items()}
        looks = sorted(losses)
        for before, step, after in zip(looks, looks[1:], looks[2:], strict=False):
            a_save = (losses[before] - losses[after]) / 6  # looks are three saves apart
            if a_save > 0 and cell["rate"][str(step)]:
                found.append((cell["expected"][str(step)] / cell["rate"][str(step)], cell["now"][str(step)] / a_save))
    return found


def ends(setting: str, names: Mapping[str, Mapping[int, Cell]]) -> list[tuple[float, float]]:
    """Return what was estimated at the failure, and how many saves' steps the gap at the end is worth."""
    found = []
    every, crash = SETTINGS[setting].every, SETTINGS[setting].crash
    for cell in estimated(names):
        around = [step for step in cell["expected"] if abs(int(step) - crash) <= 2 * every]
        at_crash = fmean(cell["expected"][step] / cell["rate"][step] for step in around)
        found.append((at_crash, cell["gap"] / a_step(names) / every))
    return found


def about_setbacks(at_once: Sequence[tuple[float, float]], at_end: Sequence[tuple[float, float]]) -> str:
    """Return in words how good the estimates are."""
    lines = []
    for found, when in ((at_once, "at once"), (at_end, "at the end")):
        ratios = sorted(measured / estimated for estimated, measured in found if estimated > 0)
        low, high = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
        lines.append(
            f"- {when}, {len(ratios)} composites: {median(ratios):.2f} of the estimate in the median, half of them "
            f"between {low:.2f} and {high:.2f}"
        )
    return "\n".join(lines)


def picture(settings: Mapping[str, Mapping[str, Mapping[int, Cell]]]) -> str:
    """Return the gaps at the end over the bytes of a save, a panel for each setting, two in a row."""
    width, height = 470.0, 290.0
    shown = [name for name in SETTINGS if name in settings]
    chart = Chart("gap at the end over bytes", 30 + -(-len(shown) // 2) * height, 40 + 2 * width)
    for at, setting in enumerate(shown):
        row, column = divmod(at, 2)
        left, top = 40 + column * width, 40 + row * height
        points = {
            name: (fmean(c["share"] for c in cells.values()), 1000 * fmean(c["gap"] for c in cells.values()))
            for name, cells in settings[setting].items()
            if name not in (OTHER_ORDER, SHORTER, LIKE_FILTER)
        }
        gaps = [gap for _, gap in points.values()]
        x = Scale(0.2, 1.0, left, left + width - 110)
        y = Scale(min(0.0, *gaps), max(gaps), top + height - 70, top + 20)
        chart.axes(x, y, "share of the bytes", [(tick, f"{tick:g}") for tick in x.ticks()])
        chart.write(left, top, "strong", f"{setting}: gap at the end, 1/1000 nat")
        taken: list[tuple[float, float]] = []
        for name, (share, gap) in sorted(points.items(), key=lambda one: one[1][1]):
            kind = next(number for number, (begin, _) in enumerate(KINDS) if name.startswith(begin))
            chart.draw(f"dots c{kind}", [f"M{x.at(share):.1f} {y.at(gap):.1f}h0"])
            if kind == 2:
                above = y.at(gap) + 4
                while any(abs(above - y_of) < 13 and abs(x.at(share) - x_of) < 90 for x_of, y_of in taken):
                    above -= 3
                taken.append((x.at(share), above))
                chart.write(x.at(share) + 7, above, "dim", SHORT.get(name, name))
    for number, (_, text) in enumerate(KINDS):
        chart.draw(f"dots c{number}", [f"M{40 + 200 * number} 10h0"])
        chart.write(50 + 200 * number, 14, "", text)
    return chart.to_svg()


MEASURES: Mapping[str, Callable[[Cell], float]] = {
    "gap at the end, 1/1000 nat": lambda cell: 1000 * cell["gap"],
    "gap at once, 1/1000 nat": lambda cell: 1000 * cell["now"],
    "distance at the end, %": lambda cell: 100 * cell["distance"] / cell["moved"],
    "divergence at the end, 1/1,000,000 nat": lambda cell: 1e6 * cell["kl"],
}


def bytes_per_param(settings: Mapping[str, Mapping[str, Mapping[int, Cell]]]) -> str:
    """Return what fewer bytes per param cost: a table for each measure, with a column for each setting and number of
    failures."""
    columns = [key for name in precision.SETTINGS for number in (1, 2, 10) if (key := f"{name} x{number}") in settings]
    first, tables = settings[columns[0]], []
    tried = [name for name in ("parity", *precision.CANDIDATES) if name in first]
    sizes = {name: fmean(cell["bytes"] for cell in first[name].values()) for name in tried}
    for title, measure in MEASURES.items():
        lines = [f"| {title} | bytes | {' | '.join(columns)} |", "|---|---:" + "|---:" * len(columns) + "|"]
        for name in (*sorted(sizes, key=lambda name: -sizes[name]), OTHER_ORDER, precision.REVERSED):
            found = [[measure(cell) for cell in settings[key].get(name, {}).values()] for key in columns]
            shown = [around(values, is_signed="gap" in title) for values in found]
            lines.append(f"| {name} | {f'{sizes[name]:.2f}' if name in sizes else ''} | {' | '.join(shown)} |")
        tables.append("\n".join(lines))
    full = []
    for key in (key for key in columns if SHORTER in settings[key]):
        every = precision.SETTINGS[key.partition(" ")[0]].every
        lost = [a_step(settings[key]) * every * (12 / size - 1) / 2 for size in (6, sizes["24bit 8bit 8"])]
        full.append(f"{1000 * lost[0]:+.2f} and {1000 * lost[1]:+.2f} in {key}")
    seeds = ", ".join(f"{len(settings[key]['parity'])} for {key}" for key in columns)
    estimate = f"Full saves of 6 bytes and of those of `24bit 8bit 8`, at longer intervals: {', '.join(full)}."
    return "\n\n".join([*tables, estimate, f"Seeds: {seeds}."])


def after_failures(
    settings: Mapping[str, Mapping[str, Mapping[int, Cell]]], real: Mapping[str, Mapping[int, Cell]]
) -> str:
    """Return what policies cost after one failure and after ten, a table for each measure; ``real`` are the cells of
    the setting with real files."""
    tables = []
    for number in (1, 10):
        keys = [key for name in failures.SETTINGS if (key := f"{name} x{number}") in settings]
        columns = [f"{key.partition(' ')[0]} ({max(map(len, settings[key].values()))})" for key in keys]
        sizes = {n: c["bytes"] for key in keys for n, of in settings[key].items() for c in of.values() if "bytes" in c}
        for title, measure in MEASURES.items():
            if "at once" in title:
                continue
            told = f"{title}, {number} failure{'s' * (number > 1)}"
            lines = [f"| {told} | bytes | {' | '.join(columns)} |", "|---|---:" + "|---:" * len(columns) + "|"]
            for name in (*failures.CANDIDATES, OTHER_ORDER):
                found = [[measure(cell) for cell in settings[key].get(name, {}).values()] for key in keys]
                shown = [around(values, is_signed="gap" in title) for values in found]
                if any(shown):
                    size = f"{sizes[name]:.2f}" if name in sizes else ""
                    lines.append(f"| {name} | {size} | {' | '.join(shown)} |")
            tables.append("\n".join(lines))
    told = [*tables, "In brackets: the number of seeds; without a spread, there is one."]
    of_files = {name: real[name] for name in ("rounded", "moments_in_turn:4", "full") if name in real}
    if of_files:
        gaps = ", ".join(f"`{name}` {spread([one['gap'] for one in of.values()])}" for name, of in of_files.items())
        seeds = max(map(len, of_files.values()))
        told.append(
            f"With real files, in `zero3-bf16`, after one failure, {seeds} seeds, gap at the end, 1/1000 nat: {gaps}."
        )
    return "\n\n".join(told)


def around(values: Sequence[float], *, is_signed: bool) -> str:
    """Return the mean, and of numbers with a sign the standard deviation too, with two digits that count."""
    if not values:
        return ""
    size = max(abs(fmean(values)), 0.001)
    off = stdev(values) if is_signed and len(values) > 1 else size
    digits = max(0, 1 - math.floor(math.log10(max(min(size, off) if is_signed else size, 0.01))))
    mean = f"{fmean(values):{'+' if is_signed else ''},.{digits}f}"
    return f"{mean} +- {off:.{digits}f}" if is_signed and len(values) > 1 else mean


def main() -> None:
    cache = Path(sys.argv[1])
    settings = by_name(Cells(cache).all())
    made = {name: table(name, names) for name, names in settings.items() if "parity" in names}
    if at_end := [one for name, names in settings.items() if SHORTER in names for one in ends(name, names)]:
        made["setbacks"] = about_setbacks([one for names in settings.values() for one in setbacks(names)], at_end)
        (DOCS / "pictures" / "fidelity.svg").write_text(picture(settings), encoding="utf-8")
    if coarse := by_name(Cells(cache / "precision").all()):
        made["precision"] = bytes_per_param(coarse)
    if failed := by_name(Cells(cache / "failures").all()):
        made["failures"] = after_failures(failed, settings["zero3-bf16"])
    page = Path(__file__).parents[1] / "fidelity.md"
    text = page.read_text(encoding="utf-8")
    text = _MARK.sub(lambda m: f"{m[1]}\n{made[m[2]]}\n\n{m[3]}" if m[2] in made else m[0], text)
    page.write_text(text, encoding="utf-8")
    print("\n\n".join(f"{name}\n{text}" for name, text in made.items()))


if __name__ == "__main__":
    main()
