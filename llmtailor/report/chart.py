"""The charts of a report as shapes with coordinates. Pure; templates/charts.j2 writes them as SVG, with colours."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

WIDTH, LEFT, RIGHT, TOP = 960.0, 120.0, 950.0, 42.0
SHADES = 5
_BARS, _CURVES = 200.0, 260.0
_POINTS = 600
"""The most points of a line that are drawn"""

Points = Sequence[tuple[float, float]]
Shade = Callable[[float], int | None]


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values from ``low`` to ``high`` to coordinates from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return about five round values in the scale's range."""
        least = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(least)) if least > 0 else 1.0
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


@dataclass(slots=True)
class Chart:
    title: str
    """Also the text for screen readers"""
    height: float
    width: float = WIDTH
    paths: list[tuple[str, str]] = field(default_factory=list)
    """Classes, and the commands of an SVG path, which are made of numbers only"""
    texts: list[tuple[float, float, str, str]] = field(default_factory=list)
    """x, y, classes and text"""

    def draw(self, look: str, commands: Iterable[str]) -> None:
        if joined := "".join(commands):
            self.paths.append((look, joined))

    def write(self, x: float, y: float, look: str, text: str) -> None:
        self.texts.append((x, y, look, text))

    def axes(
        self,
        x: Scale,
        y: Scale,
        x_title: str,
        x_labels: Iterable[tuple[float, str]],
        y_text: Callable[[float], str] = "{:g}".format,
    ) -> None:
        """Draw the axes at the left and the bottom, with a grid; ``x_labels`` are values of x with their texts."""
        self.draw("grid", (f"M{x.start:.1f} {y.at(tick):.1f}H{x.end:.1f}" for tick in y.ticks()))
        self.draw("axis", [f"M{x.start:.1f} {y.end:.1f}V{y.start:.1f}H{x.end:.1f}"])
        for tick in y.ticks():
            self.write(x.start - 6, y.at(tick) + 4, "dim end", y_text(tick))
        self.label(x, y.start, x_title, x_labels)

    def label(self, x: Scale, bottom: float, title: str, labels: Iterable[tuple[float, str]]) -> None:
        """Write labels below a chart, and a title below these."""
        for value, text in labels:
            self.write(x.at(value), bottom + 17, "dim middle", text)
        self.write((x.start + x.end) / 2, bottom + 35, "middle", title)

    def mark(self, x: Scale, top: float, bottom: float, marks: Mapping[float, str]) -> None:
        """Draw dashed lines at values of x, with their texts above."""
        self.draw("resume", (f"M{x.at(value):.1f} {top:.1f}V{bottom:.1f}" for value in marks))
        for value, text in marks.items():
            self.write(x.at(value), top - 4, "dim middle", text)


def _box(x: float, y: float, width: float, height: float) -> str:
    return f"M{x:.1f} {y:.1f}h{width:.1f}v{height:.1f}h-{width:.1f}z"


def _every_few(heads: Sequence[int]) -> list[tuple[float, str]]:
    each = -(-len(heads) // 12)
    return [(number + 0.5, f"{head:,}") for number, head in enumerate(heads) if number % each == 0]


def bars(
    title: str,
    heads: Sequence[int],
    layers: Sequence[tuple[str, Sequence[float]]],
    text: Callable[[float], str],
    resumed: Mapping[float, str],
    *,
    crosses: Iterable[int] = (),
    reference: tuple[float, str] | None = None,
) -> Chart:
    """Return bars over the saves whose steps are ``heads``.

    Args:
        layers: classes and heights of bars that stand before one another, the highest first.
        resumed: between which columns to draw a line, and what to write there.
        crosses: columns to cross out above.
        reference: a height that gets a line, with its name.
    """
    highest = max([value for _, values in layers for value in values] + [reference[0] if reference else 0.0])
    x, y = Scale(0, len(heads), LEFT, RIGHT), Scale(0, highest or 1.0, TOP + _BARS, TOP)
    width = max(1.0, (RIGHT - LEFT) / len(heads) * 0.8)
    chart = Chart(title, y.start + 44)
    chart.write(0, 16, "strong", title)
    chart.axes(x, y, "step of the save", _every_few(heads), text)
    for look, values in layers:
        tops = [(x.at(number + 0.5) - width / 2, y.at(value)) for number, value in enumerate(values)]
        chart.draw(look, (_box(left, top, width, max(0.5, y.start - top)) for left, top in tops))
    if reference is not None:
        at = y.at(reference[0])
        chart.draw("line dashed c1", [f"M{LEFT:.1f} {at:.1f}H{RIGHT:.1f}"])
        chart.write(RIGHT, at - 5 if at > TOP + 20 else at + 15, "end", reference[1])
    chart.mark(x, TOP, y.start, resumed)
    chart.draw(
        "line c1", (f"M{x.at(column) - 5:.1f} {TOP + 4:.1f}l10 10m0 -10l-10 10" for column in sorted({*crosses}))
    )
    return chart


def curve(title: str, line: Points, points: Points, marks: Mapping[float, str]) -> Chart:
    """Return a line over steps, and single points; ``marks`` are steps with texts."""
    every = [*line, *points]
    steps, values = [step for step, _ in every], [value for _, value in every]
    margin = (max(values) - min(values)) * 0.05 or abs(values[0]) * 0.1 or 1.0
    x = Scale(min(steps), max(max(steps), min(steps) + 1), LEFT, RIGHT)
    y = Scale(min(values) - margin, max(values) + margin, TOP + _CURVES, TOP)
    chart = Chart(title, y.start + 44)
    chart.write(0, 16, "strong", title)
    chart.axes(x, y, "step", [(tick, f"{tick:,.0f}") for tick in x.ticks()], "{:.4g}".format)
    chart.draw("line c0", ["M" + "L".join(f"{x.at(step):.1f} {y.at(value):.1f}" for step, value in _thinned(line))])
    chart.draw("dots c1", (f"M{x.at(step):.1f} {y.at(value):.1f}h0" for step, value in points[-_POINTS:]))
    chart.mark(x, y.end, y.start, {step: text for step, text in marks.items() if x.low <= step <= x.high})
    return chart


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
