"""The numbers of a report's charts, as shares of their height and width. Pure; templates/charts.j2 draws them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

SHADES = 5
_POINTS = 600
"""The most points of a line that are drawn"""
_TICKS = (0.0, 0.25, 0.5, 0.75, 1.0)

Points = Sequence[tuple[float, float]]
Shade = Callable[[float], int | None]
Layers = Sequence[tuple[str, Sequence[float]]]


def bars(
    title: str,
    heads: Sequence[int],
    layers: Layers,
    text: Callable[[float], str],
    *,
    resumed: Sequence[int],
    crosses: Sequence[int] = (),
    line: tuple[float, str] | None = None,
) -> dict[str, Any]:
    """Return bars over the saves whose steps are ``heads``.

    Args:
        layers: classes and heights of bars that stand before one another, the highest first.
        text: returns the label of a height.
        resumed: the columns before which the training resumed.
        crosses: columns to cross out.
        line: a height that gets a line, with its name.
    """
    highest = max([value for _, values in layers for value in values] + [line[0] if line else 0.0]) or 1.0
    return {
        "title": title,
        "x_title": "step of the save",
        "heads": [f"{head:,}" for head in heads],
        "layers": [(look, [value / highest for value in values]) for look, values in layers],
        "ticks": [(share, text(share * highest)) for share in _TICKS],
        "resumed": resumed,
        "crosses": crosses,
        "line": line and (line[0] / highest, line[1]),
    }


def curve(title: str, line: Points, points: Points, marks: Mapping[float, str]) -> dict[str, Any]:
    """Return a line over steps, and single points; ``marks`` are steps with texts."""
    steps, values = [step for step, _ in (*line, *points)], [value for _, value in (*line, *points)]
    margin = (max(values) - min(values)) * 0.05 or abs(values[0]) * 0.1 or 1.0
    first, last = min(steps), max(max(steps), min(steps) + 1)
    low, high = min(values) - margin, max(values) + margin

    def x(step: float) -> float:
        return (step - first) / (last - first)

    def y(value: float) -> float:
        return (value - low) / (high - low)

    return {
        "title": title,
        "x_title": "step",
        "line": [(x(step), y(value)) for step, value in _thinned(line)],
        "points": [(x(step), y(value)) for step, value in points[-_POINTS:]],
        "x_ticks": [(share, f"{first + share * (last - first):,.0f}") for share in _TICKS],
        "y_ticks": [(share, f"{low + share * (high - low):.4g}") for share in _TICKS],
        "marks": [(x(step), text) for step, text in marks.items() if first <= step <= last],
    }


def _thinned(line: Points) -> Points:
    """Return the least and the greatest value of each run of points if there are too many of them."""
    each, height = -(-2 * len(line) // _POINTS), itemgetter(1)
    runs = [line[start : start + each] for start in range(0, len(line), each)] if each > 2 else []
    return [point for run in runs for point in sorted({min(run, key=height), max(run, key=height)})] or line


def shade_of(values: Iterable[float]) -> Shade:
    """Return the function from values to shades, on a log scale from the smallest to the largest positive finite value.

    Zero has no shade; infinite values get the darkest one.
    """
    finite = [value for value in values if 0 < value < math.inf]
    high = max(finite, default=1.0)
    low = min([*finite, high / 10]) or high  # what is almost the same gets the same shade

    def shade(value: float) -> int | None:
        if value <= 0:
            return None
        share = (math.log(value) - math.log(low)) / (math.log(high) - math.log(low)) if value < high else 1.0
        return min(int(share * SHADES), SHADES - 1)

    return shade


def ranges_of(values: Iterable[float], shade: Shade) -> dict[int, tuple[float, float]]:
    """Return the smallest and the largest of the values in each shade that occurs."""
    ranges: dict[int, tuple[float, float]] = {}
    for value in sorted(values):
        if (at := shade(value)) is not None:
            ranges[at] = (ranges.get(at, (value, value))[0], value)
    return ranges
