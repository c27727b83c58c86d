"""Scales, axes and the look of charts. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmtailor.charts.markup import Element, element, path_of

STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2328; }
  .dim { fill: #59636e; } .end { text-anchor: end; } .middle { text-anchor: middle; } .strong { font-weight: 600; }
  .axis { stroke: #818b98; fill: none; } .grid { stroke: #d1d9e0; fill: none; }
  .line { fill: none; stroke-width: 2; } .mark { stroke: #1f2328; stroke-width: 1.5; fill: none; }
  .dot { fill: #1f2328; }
  .s0 { stroke: #0072b2; } .s1 { stroke: #d55e00; } .s2 { stroke: #009e73; } .s3 { stroke: #cc79a7; }
  .s4 { stroke: #e69f00; } .s5 { stroke: #56b4e9; }
  .f0 { fill: #0072b2; } .f1 { fill: #d55e00; } .f2 { fill: #009e73; } .f3 { fill: #cc79a7; }
  .f4 { fill: #e69f00; } .f5 { fill: #56b4e9; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; } .dim { fill: #9198a1; } .grid { stroke: #3d444d; }
    .mark { stroke: #f0f6fc; } .dot { fill: #f0f6fc; }
  }
"""
"""Colours that the colour-blind tell apart (Okabe and Ito); every series also has a dash pattern of its own."""
DASHES = (None, "7 3", "2 3", "10 3 2 3", "12 4", "4 2")
SERIES = len(DASHES)


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values from ``low`` to ``high`` to coordinates from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        low, high, value = (math.log(one) if self.is_log else one for one in (self.low, self.high, value))
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)

    def ticks(self, wanted: int = 5) -> list[float]:
        """Return round values in the scale's range."""
        if self.is_log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            steps = (1, 2, 5) if last - first <= 3 else (1,)
            found = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        else:
            step = _round_step((self.high - self.low) / wanted)
            count = math.floor(self.high / step + 1e-9)
            found = [number * step for number in range(math.ceil(self.low / step - 1e-9), count + 1)]
        return [one for one in found if self.low <= one * (1 + 1e-9) and one <= self.high * (1 + 1e-9)]


def _round_step(least: float) -> float:
    if least <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least * (1 - 1e-9))


def axes(
    x: Scale,
    y: Scale,
    titles: tuple[str, str],
    x_text: Callable[[float], str] = "{:g}".format,
    y_text: Callable[[float], str] = "{:g}".format,
) -> list[Element]:
    """Return the axes at the left and the bottom, with a grid; ``titles`` are those of x and y."""
    left, right, bottom, top = x.start, x.end, y.start, y.end
    lines = [f"M{left:g} {y.at(tick):.1f}H{right:g}" for tick in y.ticks()]
    made = [_classed(path_of("".join(lines)), "grid")]
    made.append(_classed(path_of(f"M{left:g} {top:g}V{bottom:g}H{right:g}"), "axis"))
    made += [element("text", y_text(tick), x=left - 6, y=y.at(tick) + 4, class_="dim end") for tick in y.ticks()]
    made += [element("text", x_text(tick), x=x.at(tick), y=bottom + 17, class_="dim middle") for tick in x.ticks()]
    made.append(element("text", titles[0], x=(left + right) / 2, y=bottom + 35, class_="middle"))
    made.append(element("text", titles[1], x=0, y=top - 10))
    return made


def _classed(made: Element, name: str) -> Element:
    made.set("class", name)
    return made


def line(points: Sequence[tuple[float, float]], series: int, dash: str | None = None) -> Element:
    """Return a line through points in coordinates; ``series`` gives its colour and dashes.

    After `SERIES` of them, colours come again with other dashes.
    """
    made = path_of("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points))
    made.set("class", f"line s{series % SERIES}")
    if (pattern := dash or DASHES[(series + series // SERIES) % SERIES]) is not None:
        made.set("stroke-dasharray", pattern)
    return made


def boxes(corners: Sequence[tuple[float, float, float, float]], name: str) -> Element | None:
    """Return rectangles of one look as one path; each is x, y, width and height."""
    drawn = "".join(f"M{x:.1f} {y:.1f}h{width:.1f}v{height:.1f}h-{width:.1f}z" for x, y, width, height in corners)
    return _classed(path_of(drawn), name) if drawn else None
