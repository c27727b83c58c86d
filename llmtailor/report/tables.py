"""The tables and lists of a report, as HTML. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from llmtailor.charts.markup import Element, Node, element
from llmtailor.codes import Code
from llmtailor.compare.diff import KINDS, Compared
from llmtailor.compare.values import Change
from llmtailor.compose.report import fold_experts
from llmtailor.errors import Problem, size
from llmtailor.model.states import MASTER
from llmtailor.report.gather import Checked, PartChange, RunFacts
from llmtailor.report.pictures import shade_of

_MOST_ROWS = 200
_MOST_FINDINGS = 50


def table(head: Sequence[str], rows: Iterable[Sequence[Node]], right: Sequence[int] = ()) -> Element:
    """Return a table; cells that are ``td`` elements already stay as they are. Columns in ``right`` are numbers."""
    made = element("tbody")
    for row in rows:
        cells = [
            cell
            if isinstance(cell, Element) and cell.tag == "td"
            else element("td", cell, class_="number" if number in right else None)
            for number, cell in enumerate(row)
        ]
        made.append(element("tr", *cells))
    titles = [element("th", text, scope="col", class_="number" if n in right else None) for n, text in enumerate(head)]
    return element("div", element("table", element("thead", element("tr", *titles)), made), class_="wide")


def problems_list(problems: Iterable[Problem]) -> Element:
    """Return problems with their fixes."""
    made = element("ul")
    for problem in problems:
        fix = element("span", f" Fix: {problem.fix}", class_="dim") if problem.fix else None
        made.append(
            element(
                "li",
                element("code", problem.where) if problem.where else None,
                f"{': ' if problem.where else ''}{problem.what}.",
                fix,
            )
        )
    return made


def composite_table(facts: RunFacts) -> Element:
    """Return the source and the age of every part of what ``merge --run`` would compose."""
    assert facts.composite is not None
    rows = [
        (row.label, row.source, row.steps, f"{row.staleness:,}", size(row.num_bytes))
        for row in fold_experts(facts.composite.report.parts)
    ]
    return table(("part", "source", "step", "steps behind", "bytes"), rows, right=(2, 3, 4))


_FOREIGN = {Code.GIVEN_UP: "abandoned", Code.UNRECORDED: "not stated"}


def verdicts_section(checked: Sequence[Checked]) -> list[Element]:
    """Return the verdict on each checkpoint, and its findings."""
    made = [table(("checkpoint", "verdict", "attempt", "findings"), [_verdict_row(one) for one in checked], right=(3,))]
    for one in (found.verdict for found in checked):
        if one.findings:
            shown = one.findings[:_MOST_FINDINGS]
            listed = problems_list(
                Problem(found.where, f"{found.severity}: {found.what}", found.fix, found.code) for found in shown
            )
            more = len(one.findings) - len(shown)
            rest = element("p", f"and {more} more; llmtailor verify lists them") if more else None
            made.append(element("section", element("h3", one.name), listed, rest))
    return made


def _verdict_row(one: Checked) -> tuple[Node, ...]:
    mark = "✓ " if one.verdict.is_intact else "✗ "
    attempt = "of the run" if one.foreign is None else _FOREIGN.get(one.foreign, one.foreign.value)
    return one.verdict.name, mark + one.verdict.level, attempt, str(len(one.verdict.findings))


def parts_table(parts: Sequence[str], facts: RunFacts) -> Element:
    """Return when each part was saved, according to the log."""
    times = dict.fromkeys(parts, 0)
    newest: dict[str, int] = {}
    masters: dict[str, int] = {}
    oldest = dict.fromkeys(parts, 0)
    for save in facts.log.saves:
        for part in save.parts:
            if part in times:
                times[part] += 1
                newest[part] = save.step
        masters |= dict.fromkeys((*save.parts, *save.masters), save.step)
        for part, behind in save.steps_behind.items():
            if part in oldest:
                oldest[part] = max(oldest[part], behind)
    has_masters = any(save.masters for save in facts.log.saves)
    behind_now = facts.log.saves[-1].steps_behind if facts.log.saves else {}
    rows = [
        (
            part,
            f"{times[part]:,}",
            f"{newest[part]:,}" if part in newest else "-",
            f"{behind_now[part]:,}" if part in behind_now else "-",
            f"{oldest[part]:,}",
            *((f"{masters[part]:,}" if part in masters else "-",) if has_masters else ()),
        )
        for part in parts
    ]
    head = ["part", "saves", "newest at step", "steps behind", "most steps behind"]
    head += ["masters at step"] if has_masters else []
    return table(head, rows, right=range(1, len(head)))


def saves_table(facts: RunFacts) -> list[Element]:
    """Return the newest saves of the log, one per row."""
    saves = facts.log.saves[-_MOST_ROWS:]
    rows = [
        (
            f"{save.step:,}",
            str(len(save.parts)),
            size(save.num_bytes),
            *(f"{value:.3g}" for value in (save.stall_s, save.copy_s, save.write_s, save.publish_s)),
        )
        for save in reversed(saves)
    ]
    head = ("step", "parts", "bytes", "stall s", "copied s", "written s", "published s")
    made = [table(head, rows, right=range(7))]
    if len(saves) < len(facts.log.saves):
        made.append(element("p", f"The newest {len(saves)} of {len(facts.log.saves):,} saves.", class_="dim"))
    return made


def changes_tables(changes: Sequence[PartChange]) -> list[Element]:
    """Return how much the newest state of each part differs from the one before, and by module of a layer."""
    by_part = {change.part: _summed(change.states, lambda one: one.state.kind) for change in changes}
    found = {kind for kinds in by_part.values() for kind in kinds}
    kinds = [*(kind for kind in KINDS if kind in found), *sorted(found - {*KINDS})]
    rows: list[tuple[Node, ...]] = []
    shades = {kind: _shading(kinds_of.get(kind) for kinds_of in by_part.values()) for kind in kinds}
    for change in changes:
        cells = [_cell(by_part[change.part].get(kind), shades[kind]) for kind in kinds]
        rows.append((change.part, f"{change.steps[0]:,} → {change.steps[1]:,}", *cells))
    made = [table(("part", "steps", *kinds), rows, right=(1, *range(2, len(kinds) + 2)))]
    main = MASTER if MASTER in kinds else kinds[0] if kinds else ""
    layers = [change for change in changes if any(one.layer is not None for one in change.states)]
    cells_of = {
        change.part: _summed((one for one in change.states if one.state.kind == main), lambda one: one.module)
        for change in layers
    }
    modules = list(dict.fromkeys(module for of_layer in cells_of.values() for module in of_layer))
    if modules:
        shade = _shading(change for of_layer in cells_of.values() for change in of_layer.values())
        inner: list[tuple[Node, ...]] = [
            (part, *(_cell(of.get(module), shade) for module in modules)) for part, of in cells_of.items()
        ]
        made.append(element("h3", f"{main} by module"))
        made.append(table(("layer", *modules), inner, right=range(1, len(modules) + 1)))
    return made


def _summed(states: Iterable[Compared], key: Callable[[Compared], str]) -> dict[str, Change]:
    found: dict[str, Change] = {}
    for one in states:
        found[key(one)] = found.get(key(one), Change()) + one.change
    return found


def _shading(changes: Iterable[Change | None]) -> Callable[[float], int | None]:
    return shade_of([change.relative for change in changes if change is not None], is_log=True)


def _cell(change: Change | None, shade: Callable[[float], int | None]) -> Element:
    if change is None:
        return element("td", "-", class_="number")
    level = shade(change.relative)
    name = "number" if level is None else f"number h{level}"
    return element("td", change_text(change.relative) if change.changed else "=", class_=name)


def change_text(value: float) -> str:
    """Return a relative change as short text."""
    return f"{value:.1e}" if math.isfinite(value) else "inf"
