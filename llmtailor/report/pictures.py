"""The charts of a report. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from llmtailor.charts.axes import Scale, axes, boxes, line
from llmtailor.charts.markup import Element, Node, element, path_of, svg
from llmtailor.report.columns import Column, resumes_between
from llmtailor.report.gather import Attempt, Losses

WIDTH, LEFT, RIGHT, TOP = 960.0, 120.0, 950.0, 42.0
_BARS, _LOSS = 200.0, 260.0
_ROW, _SMALL_ROW, _LABELLED = 19.0, 7.0, 90
_POINTS = 600
"""Points of a line that are still told apart"""
SHADES = 5
GRID_STYLE = """
  .h0 { fill: #e7f0f8; background: #e7f0f8; color: #1f2328; }
  .h1 { fill: #b5d4ea; background: #b5d4ea; color: #1f2328; }
  .h2 { fill: #6baed6; background: #6baed6; color: #1f2328; }
  .h3 { fill: #2171b5; background: #2171b5; color: #ffffff; }
  .h4 { fill: #08306b; background: #08306b; color: #ffffff; }
  .on0, .on1, .on2 { fill: #1f2328; font-size: 11px; text-anchor: middle; }
  .on3, .on4 { fill: #ffffff; font-size: 11px; text-anchor: middle; }
  .outline { fill: none; stroke: #0072b2; stroke-width: 1.2; }
  .resume { stroke: #d55e00; stroke-dasharray: 4 3; fill: none; }
  .dots { stroke: #1f2328; stroke-width: 6; stroke-linecap: round; fill: none; } .small { stroke-width: 3; }
  @media (prefers-color-scheme: dark) { .dots { stroke: #f0f6fc; } .h4 { fill: #0b3f8c; background: #0b3f8c; } }
  .failed { stroke: #d55e00; stroke-width: 2; fill: none; }
"""
"""Shades from little to much. They get darker, so that they are told apart without colour, too."""

Layer = tuple[str, Callable[[Column], float]]
"""A class of `charts.axes.STYLE` or `GRID_STYLE`, and the height of a bar"""


def bars(
    title: str,
    columns: Sequence[Column],
    layers: Sequence[Layer],
    text: Callable[[float], str],
    attempts: Sequence[Attempt],
    failed: Sequence[int] = (),
    reference: tuple[float, str] | None = None,
) -> Element:
    """Return bars over the saves, the layers before one another, the highest first.

    ``failed`` are steps that get a cross; ``reference`` is a height that gets a line, with its name.
    """
    highest = max([value(column) for column in columns for _, value in layers] + [(reference or (0.0, ""))[0]])
    x = Scale(0, len(columns), LEFT, RIGHT)
    y = Scale(0, highest or 1.0, TOP + _BARS, TOP)
    width = max(1.0, (RIGHT - LEFT) / len(columns) * 0.8)
    made: list[Node] = [element("text", title, x=0, y=16, class_="strong"), *_vertical(columns, x, y, text)]
    for name, value in layers:
        corners = []
        for number, column in enumerate(columns):
            top = y.at(value(column))
            corners.append((x.at(number + 0.5) - width / 2, top, width, max(0.5, y.start - top)))
        made.append(boxes(corners, name))
    if reference is not None:
        at = y.at(reference[0])
        made.append(line([(LEFT, at), (RIGHT, at)], 1, "7 3"))
        made.append(element("text", reference[1], x=RIGHT, y=at - 5 if at > TOP + 20 else at + 15, class_="end"))
    made += _resumes(columns, attempts, x, y.end, y.start)
    made += _crosses(columns, failed, x, y.end)
    return svg(WIDTH, TOP + _BARS + 44, title, *made)


def _vertical(columns: Sequence[Column], x: Scale, y: Scale, text: Callable[[float], str]) -> list[Element]:
    """Return the axes; the ticks of x are the steps of saves."""
    flat = Scale(x.low, x.high, x.start, x.end)
    made = axes(flat, y, ("step of the save", ""), x_text=lambda _: "", y_text=text)
    return [one for one in made if one.tag != "text" or one.text] + _steps(columns, x, y.start + 17)


def _steps(columns: Sequence[Column], x: Scale, y: float) -> list[Element]:
    every = -(-len(columns) // 12)
    return [
        element("text", f"{column.first:,}", x=x.at(number + 0.5), y=y, class_="dim middle")
        for number, column in enumerate(columns)
        if number % every == 0
    ]


def _resumes(
    columns: Sequence[Column], attempts: Sequence[Attempt], x: Scale, top: float, bottom: float
) -> list[Element]:
    made = []
    for number, steps in resumes_between(columns, [one.resumed_at for one in attempts[1:]]).items():
        mark = path_of(f"M{x.at(number):.1f} {top:.1f}V{bottom:.1f}")
        mark.set("class", "resume")
        mark.append(element("title", f"resumed at step {', '.join(map(str, steps))}"))
        made += [mark, element("text", "resumed", x=x.at(number), y=top - 4, class_="dim middle")]
    return made


def _crosses(columns: Sequence[Column], failed: Sequence[int], x: Scale, y: float) -> list[Element]:
    at = {next((n for n, column in enumerate(columns) if column.last >= step), len(columns)) for step in failed}
    if not at:
        return []
    drawn = "".join(f"M{x.at(n) - 5:.1f} {y + 4:.1f}l10 10m0 -10l-10 10" for n in sorted(at))
    mark = path_of(drawn)
    mark.set("class", "failed")
    return [mark]


def grid(
    title: str,
    rows: Sequence[str],
    columns: Sequence[Column],
    value: Callable[[Column, str], float | None],
    text: Callable[[float], str],
    shade: Callable[[float], int | None],
    attempts: Sequence[Attempt],
    dotted: Callable[[Column, str], bool] | None = None,
) -> Element:
    """Return a grid of rows and saves. Cells are shaded, with a dot where ``dotted``; few columns also get numbers."""
    row_height = _ROW if len(rows) <= _LABELLED else _SMALL_ROW
    x, top = Scale(0, len(columns), LEFT, RIGHT), TOP + 14
    width = (RIGHT - LEFT) / len(columns)
    cells: dict[int, list[tuple[float, float, float, float]]] = {}
    dots, numbers = [], []
    for at, row in enumerate(rows):
        y = top + at * row_height
        for number, column in enumerate(columns):
            found = value(column, row)
            level = None if found is None else shade(found)
            if level is not None:
                cells.setdefault(level, []).append((x.at(number), y, width - (width > 4), row_height - 1))
            if dotted and dotted(column, row):
                dots.append(f"M{x.at(number) + width / 2:.1f} {y + row_height / 2 - 0.5:.1f}h0")
            elif found is not None and level is not None and width >= 44 and row_height == _ROW:
                middle = x.at(number) + width / 2
                numbers.append(element("text", text(found), x=middle, y=y + 13, class_=f"on{level}"))
    mark = path_of("".join(dots)) if dots else None
    if mark is not None:
        mark.set("class", "dots" if row_height == _ROW else "dots small")
    every = 1 if row_height == _ROW else 3
    bottom = top + len(rows) * row_height
    labels = [
        element("text", _short(row), x=LEFT - 8, y=top + (at + 0.5) * row_height + 4, class_="end")
        for at, row in enumerate(rows)
        if at % every == 0
    ]
    made = [
        element("text", title, x=0, y=16, class_="strong"),
        *(boxes(corners, f"h{level}") for level, corners in sorted(cells.items())),
        mark,
        *numbers,
        *labels,
        *_resumes(columns, attempts, x, top, bottom),
        *_steps(columns, x, bottom + 17),
        element("text", "step of the save", x=(LEFT + RIGHT) / 2, y=bottom + 35, class_="middle"),
    ]
    return svg(WIDTH, bottom + 44, title, *made)


def _short(name: str, most: int = 16) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def ranges_of(values: Iterable[float], shade: Callable[[float], int | None]) -> dict[int, tuple[float, float]]:
    """Return the smallest and the largest of the positive values in each shade that occurs."""
    found: dict[int, tuple[float, float]] = {}
    for value in sorted(one for one in values if one > 0):
        at = shade(value)
        if at is not None:
            found[at] = (found.get(at, (value, value))[0], value)
    return found


def shade_of(values: Sequence[float], is_log: bool = False) -> Callable[[float], int | None]:
    """Return what maps values to shades 0..4 between the smallest and the largest finite one; None for no shade.

    With ``is_log``, zero has no shade. Infinite values get the darkest one.
    """
    finite = [one for one in values if math.isfinite(one) and one > 0]
    high = max(finite, default=1.0)
    low = min(min(finite, default=1.0), high / 10)  # what is almost the same gets the same shade

    def shade(value: float) -> int | None:
        if value <= 0:
            return None if is_log else 0
        if not math.isfinite(value):
            return SHADES - 1
        span = math.log(high) - math.log(low)
        share = (math.log(value) - math.log(low)) / span if is_log else value / high
        return min(int(share * SHADES), SHADES - 1)

    return shade


def loss_chart(losses: Sequence[Losses], attempts: Sequence[Attempt]) -> Element | None:
    """Return the losses over steps, with those of abandoned attempts and the resumes; None without any."""
    shown = [(one, _thinned(one.train)) for one in losses if one.train]
    if not shown:
        return None
    own = next((one for one, _ in shown if not one.is_abandoned), None)
    evaluation = own.evaluation if own else ()
    points = [point for _, series in shown for point in series] + [*evaluation]
    steps, values = [step for step, _ in points], [value for _, value in points]
    margin = (max(values) - min(values)) * 0.05 or abs(values[0]) * 0.1 or 1.0
    x = Scale(min(steps), max(max(steps), min(steps) + 1), LEFT, RIGHT)
    y = Scale(min(values) - margin, max(values) + margin, TOP + _LOSS, TOP)
    made: list[Node] = [element("text", "loss", x=0, y=16, class_="strong")]
    made += axes(x, y, ("step", ""), x_text=lambda step: f"{step:,.0f}", y_text=lambda value: f"{value:.4g}")
    for one, series in shown:
        places = [(x.at(step), y.at(value)) for step, value in series]
        made.append(line(places, 4 if one.is_abandoned else 0, "2 3" if one.is_abandoned else None))
    shown_points = evaluation[-_POINTS:]
    made += [element("circle", cx=x.at(step), cy=y.at(value), r=3.5, class_="f1") for step, value in shown_points]
    for attempt in attempts[1:]:
        if x.low <= attempt.resumed_at <= x.high and attempt.resumed_at:
            mark = path_of(f"M{x.at(attempt.resumed_at):.1f} {TOP:g}V{TOP + _LOSS:g}")
            mark.set("class", "resume")
            label = f"resumed at {attempt.resumed_at:,}"
            made += [mark, element("text", label, x=x.at(attempt.resumed_at) - 4, y=TOP + 12, class_="dim end")]
    return svg(WIDTH, TOP + _LOSS + 44, "training loss over steps", *made)


def _thinned(series: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the least and the greatest value of each run of points if there are too many of them."""
    each = -(-2 * len(series) // _POINTS)
    if each <= 2:
        return [*series]
    found: list[tuple[int, float]] = []
    for start in range(0, len(series), each):
        run = series[start : start + each]
        found += sorted({min(run, key=lambda point: point[1]), max(run, key=lambda point: point[1])})
    return found


def legend(entries: Mapping[str, str]) -> Element:
    """Return what the looks of bars and shades mean: class -> text."""
    x, made = 0.0, []
    for name, text in entries.items():
        made += [
            element("rect", x=x + 1, y=3.0, width=14.0, height=12.0, class_=name),
            element("text", text, x=x + 21, y=14.0),
        ]
        x += 36 + 7.4 * len(text)
    return svg(max(WIDTH, x), 20.0, f"legend: {', '.join(entries.values())}", *made)
