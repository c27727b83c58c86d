#!/usr/bin/env python3
"""Draws docs/pictures/rooms.svg: the rooms of the package, and which imports which.

docs/make/rooms.py            draws it
docs/make/rooms.py --check    writes nothing; exits with 1 if the file is out of date

A room is a folder or a file of the package. Each has a row above those that it imports. An arrow is drawn only if no
other room is in between. Names, roles and arrows come from the code.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "llmtailor"
PICTURE = ROOT / "docs" / "pictures" / "rooms.svg"
WIDTH, HEIGHT, ROW, LANE, MARGIN, LETTER = 92, 26, 40, 100, 12, 6.7
STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2328; }
  .name { fill: #ffffff; font-weight: 600; text-anchor: middle; }
  .room { fill: #0072b2; } .way { fill: none; stroke: #818b98; stroke-width: 1.5; } .tip { fill: #818b98; }
  @media (prefers-color-scheme: dark) { text { fill: #f0f6fc; } .name { fill: #ffffff; } }
"""


def rooms() -> dict[str, set[str]]:
    """Return each room and the rooms that it imports."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room.startswith("__"):
            continue
        imports = found.setdefault(room, set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("llmtailor."):
                imports.add(node.module.split(".")[1])
            elif isinstance(node, ast.Import):
                imports |= {one.name.split(".")[1] for one in node.names if one.name.startswith("llmtailor.")}
        imports.discard(room)
    return found


def role(room: str) -> str:
    """Return the first sentence of a room's docstring."""
    path = PACKAGE / room / "__init__.py" if (PACKAGE / room).is_dir() else PACKAGE / f"{room}.py"
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split()).split(". ")[0].rstrip(".").replace("`", "")


def in_order(imports: dict[str, set[str]]) -> list[tuple[str, list[str]]]:
    """Return the rooms, importing ones first, and which others each imports directly: not through another of them."""

    @cache
    def reached(room: str) -> frozenset[str]:
        return frozenset(imports[room]).union(*map(reached, imports[room]))

    @cache
    def floor(room: str) -> int:
        return 1 + max(map(floor, imports[room]), default=-1)

    ordered = sorted(imports, key=lambda room: (-floor(room), room))
    return [
        (room, [one for one in ordered if one in imports[room] and not any(one in reached(o) for o in imports[room])])
        for room in ordered
    ]


def lanes(rows: list[tuple[str, list[str]]]) -> dict[str, int]:
    """Give each room a column: 0 to those of a longest chain, to others the first that none of their arrows shares."""
    direct, at = dict(rows), {room: number for number, (room, _) in enumerate(rows)}
    chain = [rows[0][0]]
    while direct[chain[-1]]:
        chain.append(min(direct[chain[-1]], key=lambda room: at[room]))
    given = dict.fromkeys(chain, 0)
    taken: dict[int, list[tuple[int, int]]] = {}
    for room in direct:
        if room in given:
            continue
        used = [at[other] for other in direct if room in direct[other] and given.get(other) == 0]
        first, last = min([at[room], *used]), max([at[room], *(at[one] for one in direct[room])])
        lane = 1
        while any(begin <= last and first <= end for begin, end in taken.get(lane, [])):
            lane += 1
        taken.setdefault(lane, []).append((first, last))
        given[room] = lane
    return given


def draw() -> str:
    rows = in_order(rooms())
    lane, at = lanes(rows), {room: number for number, (room, _) in enumerate(rows)}
    left = MARGIN + (max(lane.values()) + 1) * LANE

    def middle(room: str) -> tuple[float, float]:
        return MARGIN + lane[room] * LANE + WIDTH / 2, MARGIN + at[room] * ROW + HEIGHT / 2

    ways, boxes = [], []
    for room, direct in rows:
        x, y = middle(room)
        for other in direct:
            to_x, to_y = middle(other)
            if lane[room] == 0:  # sideways first, then down onto the other
                ways.append(f"M {x:g} {y:g} H {to_x:g} V {to_y - HEIGHT / 2 - 5:g}")
                boxes.append(_tip(to_x, to_y - HEIGHT / 2, 0, 1))
            else:  # down first, then sideways into the other
                side = 1 if x > to_x else -1
                ways.append(f"M {x:g} {y:g} V {to_y:g} H {to_x + side * (WIDTH / 2 + 5):g}")
                boxes.append(_tip(to_x + side * WIDTH / 2, to_y, -side, 0))
        corner = f'x="{x - WIDTH / 2:g}" y="{y - HEIGHT / 2:g}"'
        boxes.append(f'<rect {corner} width="{WIDTH}" height="{HEIGHT}" rx="4" class="room"/>')
        boxes.append(f'<text x="{x:g}" y="{y + 5:g}" class="name">{room}</text>')
        boxes.append(f'<text x="{left}" y="{y + 5:g}">{escape(role(room))}</text>')
    width = left + max(len(role(room)) for room in at) * LETTER + MARGIN
    height = 2 * MARGIN + (len(rows) - 1) * ROW + HEIGHT
    label = "The rooms of the package; each imports only rooms below it"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img" aria-label="{label}">\n'
        f"<title>{label}</title>\n<style>{STYLE}</style>\n"
        + "".join(f'<path d="{way}" class="way"/>\n' for way in ways)
        + "\n".join(boxes)
        + "\n</svg>\n"
    )


def _tip(x: float, y: float, along: int, down: int) -> str:
    """Return the tip of an arrow that ends at a point, in the direction given."""
    back, wide = 7, 4
    corners = [
        (x, y),
        (x - along * back - down * wide, y - down * back - along * wide),
        (x - along * back + down * wide, y - down * back + along * wide),
    ]
    return f'<path d="M {" L ".join(f"{a:g} {b:g}" for a, b in corners)} Z" class="tip"/>'


if __name__ == "__main__":
    from pictures import keep

    keep(PICTURE, draw, "rooms.py", __doc__)
