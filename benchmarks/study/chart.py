"""A chart as shapes with coordinates, and its SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2328; }
  .dim { fill: #59636e; color: #59636e; } .end { text-anchor: end; } .middle { text-anchor: middle; }
  .strong { font-weight: 600; } .axis { stroke: #818b98; fill: none; } .grid { stroke: #d1d9e0; fill: none; }
  .c0 { color: #0072b2; } .c1 { color: #d55e00; } .c2 { color: #009e73; } .c5 { color: #56b4e9; }
  .line { fill: none; stroke: currentColor; stroke-width: 2; } .dashed { stroke-dasharray: 7 3; }
  .dots { stroke: currentColor; stroke-width: 6; stroke-linecap: round; fill: none; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; } .dim { fill: #9198a1; color: #9198a1; } .grid { stroke: #3d444d; } .h4 { color: #0b3f8c; }
  }
"""


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
    width: float
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

    def to_svg(self) -> str:
        paths = "".join(f'<path class="{look}" d="{commands}"/>' for look, commands in self.paths)
        texts = "".join(
            f'<text x="{round(x, 1)}" y="{round(y, 1)}" class="{look}">{escape(text)}</text>'
            for x, y, look, text in self.texts
        )
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        label = f'role="img" aria-label="{escape(self.title)}" xmlns="http://www.w3.org/2000/svg"'
        return f"<svg {size} {label}><style>{STYLE}</style>{paths}{texts}</svg>\n"
