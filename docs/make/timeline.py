#!/usr/bin/env python3
"""Draws docs/pictures/background-save.svg: what training and the saver's threads do during a save.

docs/make/timeline.py            draws it
docs/make/timeline.py --check    writes nothing; exits with 1 if the file is out of date

The lengths are chosen to be readable, not measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "pictures" / "background-save.svg"
LEFT, TOP, HEIGHT, ROW, MARGIN, LETTER = 196, 72, 30, 54, 12, 7.2
STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2328; }
  .name { font-weight: 600; } .small { font-size: 12px; fill: #59636e; }
  .in { fill: #ffffff; font-size: 12px; text-anchor: middle; }
  .at { font-size: 12px; text-anchor: middle; }
  .step { fill: #0072b2; } .update { fill: #004a75; } .wait { fill: #b34700; } .saver { fill: #00664b; }
  .mark { stroke: #59636e; stroke-width: 1.5; stroke-dasharray: 4 3; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; } .small { fill: #9198a1; } .in { fill: #ffffff; }
    .mark { stroke: #9198a1; } .update { fill: #33709e; }
  }
"""


@dataclass(frozen=True, slots=True)
class Bar:
    """What a thread does from one point in time to another."""

    kind: str
    begin: int
    end: int
    words: str = ""


SAVED, RETURNED, UPDATE, COPIED, PUBLISHED, END = 100, 140, 318, 344, 688, 880
"""Times of the save, in units of the picture: its begin, `save` has returned, the next update is due, ..."""
LANES: dict[tuple[str, str], list[Bar]] = {
    ("training", ""): [
        Bar("step", 0, 48, "..."),
        Bar("update", 50, SAVED - 2, "step"),
        Bar("wait", SAVED, RETURNED, "save"),
        Bar("step", RETURNED + 2, 222, "forward"),
        Bar("step", 224, UPDATE - 2, "backward"),
        Bar("wait", UPDATE, COPIED, ""),
        Bar("update", COPIED + 2, 394, "step"),
        Bar("step", 396, 478, "forward"),
        Bar("step", 480, 574, "backward"),
        Bar("update", 576, 624, "step"),
        Bar("step", 626, 708, "forward"),
        Bar("step", 710, 804, "backward"),
        Bar("update", 806, 854, "step"),
        Bar("step", 856, END, ""),
    ],
    ("copy", "a thread on each rank"): [Bar("saver", RETURNED, COPIED, "states to host memory")],
    ("write", "a thread on each rank"): [
        Bar("saver", RETURNED + 30, 610, "from host memory to files, fsync"),
        Bar("saver", 612, PUBLISHED, "manifest"),
    ],
    ("second level", "with staging_dir or mirror"): [Bar("saver", PUBLISHED, END - 20, "to the second level")],
    ("background=False", "training stops"): [
        Bar("step", 0, 48, "..."),
        Bar("update", 50, SAVED - 2, "step"),
        Bar("wait", SAVED, 596, "save: files, fsync, manifest"),
        Bar("step", 598, 680, "forward"),
        Bar("step", 682, 776, "backward"),
        Bar("update", 778, 826, "step"),
        Bar("step", 828, END, "..."),
    ],
}
MARKS = [
    (RETURNED, "save() returns", 0),
    (COPIED, "everything is copied: the optimizer may write", 1),
    (PUBLISHED, "published: from now on the save exists", 0),
]

LEGEND = {
    "update": "the optimizer's step",
    "wait": "training waits for the save",
    "saver": "in the background",
}


def draw() -> str:
    out = []
    bottom = TOP + (len(LANES) - 1) * ROW - 14
    for time, words, line in MARKS:
        y = 24 + 22 * line
        out.append(f'<line x1="{LEFT + time}" y1="{y + 6}" x2="{LEFT + time}" y2="{bottom}" class="mark"/>')
        out.append(f'<text x="{LEFT + time}" y="{y}" class="at">{escape(words)}</text>')
    for number, ((name, note), bars) in enumerate(LANES.items()):
        y = TOP + number * ROW
        middle = y + 20 if not note else y + 13
        out.append(f'<text x="{MARGIN}" y="{middle}" class="name">{escape(name)}</text>')
        if note:
            out.append(f'<text x="{MARGIN}" y="{y + 29}" class="small">{escape(note)}</text>')
        for bar in bars:
            assert len(bar.words) * LETTER <= bar.end - bar.begin, f"{bar.words!r} does not fit into its bar"
            corner = f'x="{LEFT + bar.begin}" y="{y}"'
            size = f'width="{bar.end - bar.begin}" height="{HEIGHT}"'
            out.append(f'<rect {corner} {size} rx="3" class="{bar.kind}"/>')
            if bar.words:
                center = LEFT + (bar.begin + bar.end) / 2
                out.append(f'<text x="{center:g}" y="{y + 20}" class="in">{escape(bar.words)}</text>')
    y = TOP + len(LANES) * ROW + 4
    x = LEFT
    for kind, words in LEGEND.items():
        out.append(f'<rect x="{x}" y="{y}" width="14" height="14" rx="3" class="{kind}"/>')
        out.append(f'<text x="{x + 22}" y="{y + 12}" class="small">{words}</text>')
        x += 22 + int(len(words) * LETTER) + 24
    label = "A save in the background: copied while forward and backward run, and written while training continues"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + END + MARGIN} {y + 14 + MARGIN}" role="img" '
        f'aria-label="{label}">\n<title>{label}</title>\n<style>{STYLE}</style>\n' + "\n".join(out) + "\n</svg>\n"
    )


if __name__ == "__main__":
    from pictures import keep

    keep(PICTURE, draw, "timeline.py", __doc__)
