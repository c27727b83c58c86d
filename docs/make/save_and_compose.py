#!/usr/bin/env python3
"""Draws docs/pictures/save-and-compose.svg: what two policies save, and what a merge makes of it.

docs/make/save_and_compose.py            draws it
docs/make/save_and_compose.py --check    exits with 1 if the file is not what would be drawn

What each save holds, and where each part of the composite comes from, is computed by the package itself.
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from llmtailor.model.parts import EMBED, HEAD, ModelStructure  # noqa: E402
from llmtailor.policies import DEFAULT_POLICY, Situation, make_policy  # noqa: E402

PICTURE = ROOT / "docs" / "pictures" / "save-and-compose.svg"
STEPS = (50, 100, 150)
POLICIES = {DEFAULT_POLICY: "everything, half of the bytes", "parity": "half of the parts"}
LAYERS = 4
CELL, GAP, LEFT, TOP, COLUMN = 26, 7, 120, 96, 74
STYLE = """
  text { font: 14px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2328; }
  .head { font-weight: 600; } .small { font-size: 12px; fill: #59636e; }
  .saved { fill: #0072b2; } .taken { stroke: #d55e00; stroke-width: 3; } .absent { fill: none; stroke: #afb8c1; }
  .mark { fill: #ffffff; font-size: 12px; text-anchor: middle; }
  .lost { stroke: #59636e; stroke-width: 2; stroke-dasharray: 5 4; }
  .way { fill: none; stroke: #59636e; stroke-width: 2; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; } .small { fill: #9198a1; } .mark { fill: #ffffff; }
    .absent { stroke: #656c76; } .lost, .way { stroke: #9198a1; }
  }
"""


def saves(name: str) -> tuple[list[str], dict[int, list[str]]]:
    """Return the parts of a small model, and which of them a policy saves at each step; the first save holds all."""
    names = {f"model.layers.{number}.w": f"layer {number}" for number in range(LAYERS)}
    names = {"model.embed_tokens.weight": EMBED, **names, "model.norm.weight": "norm", "lm_head.weight": HEAD}
    parts = list(names.values())
    structure = ModelStructure(names, tuple(parts), LAYERS, tied=False)
    policy, held = make_policy(name), {STEPS[0]: parts}
    last = dict.fromkeys(parts, 0)
    for number, step in enumerate(STEPS[1:], 1):
        chosen = policy.choose(
            Situation(
                step=step,
                save=number,
                structure=structure,
                parts=tuple(parts),
                num_bytes=dict.fromkeys(parts, 1),
                last=last,
            )
        )
        held[step] = [part for part in parts if part in chosen]
        last |= dict.fromkeys(held[step], number)
    return parts, held


def draw() -> str:
    parts, _ = saves(DEFAULT_POLICY)
    rows = {part: TOP + number * (CELL + GAP) for number, part in enumerate(parts)}
    bottom = TOP + len(parts) * (CELL + GAP)
    crash = LEFT + len(POLICIES) * (len(STEPS) * COLUMN + 24) - 4
    made = crash + 74
    out: list[str] = []

    def text(x: float, y: float, words: str, kind: str = "") -> None:
        out.append(
            f'<text x="{x:g}" y="{y:g}"{f" class={kind!r}" if kind else ""}>{escape(words)}</text>'.replace("'", '"')
        )

    def cell(x: float, y: float, kind: str, mark: str = "") -> None:
        out.append(f'<rect x="{x:g}" y="{y:g}" width="{CELL * 2}" height="{CELL}" rx="4" class="{kind}"/>')
        if mark:
            text(x + CELL, y + 18, mark, "mark")

    text(LEFT, 24, "While training: smaller saves", "head")
    text(made, 24, "After a failure: llmtailor merge --run", "head")
    for part, y in rows.items():
        text(8, y + 18, part)
    for number, (name, what) in enumerate(POLICIES.items()):
        left, (_, held) = LEFT + number * (len(STEPS) * COLUMN + 24), saves(name)
        newest = {part: max(step for step in STEPS if part in held[step]) for part in parts}
        text(left, 48, name + (", the default" if name == DEFAULT_POLICY else ""))
        text(left, 66, what, "small")
        for step, x in zip(STEPS, range(left, left + len(STEPS) * COLUMN, COLUMN), strict=True):
            text(x, 86, f"step {step}", "small")
            for part, y in rows.items():
                is_saved, is_taken = part in held[step], newest[part] == step
                cell(
                    x, y, f"saved{' taken' if is_taken else ''}" if is_saved else "absent", "saved" if is_saved else ""
                )
        at = made + number * COLUMN
        text(at, 86, name, "small")
        for part, y in rows.items():
            cell(at, y, "saved taken", str(newest[part]))
    out.append(f'<line x1="{crash}" y1="40" x2="{crash}" y2="{bottom}" class="lost"/>')
    text(crash - 20, bottom + 18, "failure", "small")
    out.append(f'<path d="M {crash + 14} {(TOP + bottom) / 2:g} h 40 m -9 -6 l 9 6 l -9 6" class="way"/>')
    text(made, 48, f"checkpoint-{STEPS[-1]}")
    text(made, 66, "complete; each part from the step shown", "small")
    text(LEFT, bottom + 18, "framed: the newest save of a part", "small")
    width, height = made + 310, bottom + 34
    label = "Saves of two policies, and the checkpoint that is made of the newest save of every part after a failure"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">\n'
        f"<title>{label}</title>\n<style>{STYLE}</style>\n" + "\n".join(out) + "\n</svg>\n"
    )


if __name__ == "__main__":
    from pictures import keep

    keep(PICTURE, draw, "save_and_compose.py", __doc__)
