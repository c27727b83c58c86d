"""Computes the tables and charts of a report's page; templates/ has its words and its look."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from llmtailor._version import __version__
from llmtailor.codes import Code
from llmtailor.compose.report import fold_experts
from llmtailor.errors import UsageError, printable, size, some
from llmtailor.model.parts import Part
from llmtailor.report.chart import bars, curve, ranges_of, shade_of
from llmtailor.report.gather import PartChange, RunFacts
from llmtailor.runs.save_log import LoggedSave
from llmtailor.verify.diff import Change, kinds_of, sums_by

if TYPE_CHECKING:
    from jinja2 import Environment

_MOST_COLUMNS, _MOST_ROWS, _MOST_EXPERTS, _MOST_SAVES = 100, 400, 48, 200
_FEW_COLUMNS = 18
"""The most columns of charts, parts, experts, and saves that are shown one by one; the most columns with numbers"""
_FOREIGN = {None: "of the run", Code.ABANDONED: "abandoned", Code.UNRECORDED: "not stated"}

Columns = Sequence[Sequence[LoggedSave]]
Rows = Mapping[str, Sequence[str]]
"""Row of a chart -> its parts"""


@cache
def templates() -> Environment:
    """Return the templates. Raises UsageError if jinja2 is not installed.

    Whatever a run's folder holds is text: all values are escaped, and control characters are made visible, because
    HTML can't hold them.
    """
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as error:
        raise UsageError.at("report", f"jinja2 is missing: {error}", "pip install 'llmtailor[report]'") from error
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: printable(value) if isinstance(value, str) and not hasattr(value, "__html__") else value,
    )
    environment.filters["size"] = size
    return environment


def page(facts: RunFacts) -> str:
    """Return the page: one file that loads nothing and needs no JavaScript."""
    saves = facts.log.saves
    each = -(-len(saves) // _MOST_COLUMNS) or 1
    columns = [saves[start : start + each] for start in range(0, len(saves), each)]
    resumed = _resumed(columns, facts)
    rows = _rows(saves)
    report = facts.report
    kinds = [kind for _, kind, _ in facts.folders]
    return (
        templates()
        .get_template("report.html.j2")
        .render(
            facts=facts,
            version=__version__,
            summary=_summary(facts),
            oldest=_oldest(facts),
            composite=[
                (row.label, row.source, row.steps, f"{row.staleness:,}", size(row.num_bytes))
                for row in fold_experts(report.parts if report else ())
            ],
            in_folder=", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)),
            verdicts=[
                (
                    verdict.name,
                    ("✓ " if verdict.is_intact else "✗ " if verdict.is_judged else "? ") + verdict.level,
                    _FOREIGN.get(checked.foreign) or checked.foreign,
                    len(verdict.findings),
                )
                for checked in facts.checked
                for verdict in [checked.verdict]
            ],
            resumes=[
                (
                    f"{resume.step:,}",
                    resume.checkpoint,
                    "✓ the training that was saved" if resume.is_same else "✗ not the training that was saved",
                    f"{resume.num_same:,} of {resume.num_states:,}",
                    "every byte" if resume.how == "full" else "a sample",
                    resume.cause,
                )
                for resume in facts.log.attested[-50:]
            ],
            saves=_saves(columns, facts, resumed) if saves else None,
            ages=_ages(columns, rows, saves, resumed),
            drift=_drift(columns, rows, resumed),
            changes=_changes(facts.changes) if facts.changes else None,
            loss=_loss(facts),
            attempts=[
                (number, attempt.started, f"{attempt.resumed_at:,}" if attempt.resumed_at else "from the beginning")
                for number, attempt in enumerate(facts.attempts, 1)
            ],
        )
    )


def _summary(facts: RunFacts) -> dict[str, str]:
    saves = facts.log.saves
    shown = {
        "saves": f"{len(saves):,}",
        "newest step": f"{saves[-1].step:,}" if saves else "-",
        "written": size(sum(save.num_bytes for save in saves)),
        "training stopped for": _seconds(sum(save.stall_s for save in saves)),
        "failed saves": str(len(facts.log.failed)),
        "attempts": str(len(facts.attempts)),
    }
    return shown | ({"resumes at step": f"{facts.report.global_step:,}"} if facts.report else {})


def _seconds(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def _oldest(facts: RunFacts) -> str:
    parts = facts.report.parts if facts.report else ()
    oldest = max((row.staleness for row in parts), default=0)
    if not oldest:
        return "All parts are of that step."
    old = [row.label + (" moments" * (row.masters_step is not None)) for row in parts if row.staleness == oldest]
    return f"The oldest parts are {oldest:,} steps older: {some(old)}."


def _resumed(columns: Columns, facts: RunFacts) -> list[int]:
    """Return the columns before which the training resumed; the first start is not a resume."""
    return [_column_of(columns, attempt.resumed_at + 1) for attempt in facts.attempts[1:] if attempt.resumed_at]


def _column_of(columns: Columns, step: int) -> int:
    return next((number for number, column in enumerate(columns) if column[-1].step >= step), len(columns))


def _rows(saves: Sequence[LoggedSave]) -> Rows:
    """Return the rows of charts, in the order of the log, which is that of the model.

    If there are too many experts for rows of their own, the experts of a layer are one row.
    """
    parts = list(dict.fromkeys(Part(part) for save in saves for part in (*save.steps_behind, *save.parts)))
    are_many = sum(part.expert is not None for part in parts) > _MOST_EXPERTS
    rows: dict[str, list[str]] = {}
    for part in parts:
        name = f"{part.whole} experts" if are_many and part.expert is not None else part
        rows.setdefault(name, []).append(part)
    return dict([*rows.items()][:_MOST_ROWS])


def _saves(columns: Columns, facts: RunFacts, resumed: Sequence[int]) -> dict[str, Any]:
    saves, heads = facts.log.saves, [column[0].step for column in columns]

    def most(value: Callable[[LoggedSave], float]) -> list[float]:
        return [max(map(value, column)) for column in columns]

    whole = [save.num_bytes for save in saves if save.steps_behind and {*save.parts} >= {*save.steps_behind}]
    written = sum(save.num_bytes for save in saves)
    times = {
        "stall": [save.stall_s for save in saves],
        "copied after": [save.copy_s for save in saves],
        "files durable after": [save.write_s for save in saves],
        "published after": [save.publish_s for save in saves],
    }
    layers = [
        ("outline", most(lambda save: save.publish_s)),
        ("box c5", most(lambda save: save.write_s)),
        ("box c0", most(lambda save: save.copy_s)),
    ]
    seconds, stalls, sizes = "{:.3g} s".format, most(lambda save: save.stall_s), most(lambda save: save.num_bytes)
    failed = [_column_of(columns, save.step) for save in facts.log.failed]
    full = (float(max(whole)), "a save of every part") if whole else None
    return {
        "most": max(map(len, columns)),
        "times": bars("seconds from the start of a save", heads, layers, seconds, resumed=resumed, crosses=failed),
        "stalls": bars("seconds that training stopped", heads, [("box c1", stalls)], seconds, resumed=resumed),
        "sizes": bars(
            "bytes of a save", heads, [("box c0", sizes)], lambda value: size(int(value)), resumed=resumed, line=full
        ),
        "medians": ", ".join(
            f"{name} {_seconds(median(values))} (at most {_seconds(max(values))})" for name, values in times.items()
        ),
        "written": written,
        "would": max(whole) * len(saves) if whole and written else 0,
        "rows": [
            (
                f"{save.step:,}",
                len(save.parts),
                size(save.num_bytes),
                *(f"{value:.3g}" for value in (save.stall_s, save.copy_s, save.write_s, save.publish_s)),
            )
            for save in reversed(saves[-_MOST_SAVES:])
        ],
    }


def _ages(columns: Columns, rows: Rows, saves: Sequence[LoggedSave], resumed: Sequence[int]) -> dict[str, Any] | None:
    def behind(save: LoggedSave, parts: Sequence[str]) -> int | None:
        return max((save.steps_behind[part] for part in parts if part in save.steps_behind), default=None)

    cells = {row: [_mean(behind(save, parts) for save in column) for column in columns] for row, parts in rows.items()}
    values = [age for of_row in cells.values() for age in of_row if age is not None]
    if not any(values):
        return {"grid": None} if values else None
    dots = {row: [any(part in column[0].parts for part in rows[row]) for column in columns] for row in rows}
    has_dots = len(columns) == len(saves)
    whose = "the moments of a part were" if any(save.masters for save in saves) else "a part was"
    title = f"steps since {whose} saved, after each save"
    table = []
    for row, parts in rows.items():
        ages = [behind(save, parts) for save in saves]
        holding = [save.step for save in saves if any(part in save.parts for part in parts)]
        masters = [save.step for save in saves if any(part in save.parts or part in save.masters for part in parts)]
        newest = [f"{steps[-1]:,}" if steps and steps[-1] is not None else "-" for steps in (holding, masters, ages)]
        table.append((row, f"{len(holding):,}", *newest, f"{max((age or 0 for age in ages), default=0):,}"))
    return {
        "has_dots": has_dots,
        "grid": _grid(title, columns, cells, "{:,.0f}".format, resumed, dots if has_dots else {}),
        "rows": table,
        "missed": saves[-1].updates_missed,
    }


def _drift(columns: Columns, rows: Rows, resumed: Sequence[int]) -> dict[str, Any] | None:
    cells = {
        row: [_mean(save.drift[part] for save in column for part in parts if part in save.drift) for column in columns]
        for row, parts in rows.items()
    }
    title = "relative change of a part's master weights since it was saved, before each save"
    has_drift = any(drift is not None for drifts in cells.values() for drift in drifts)
    return _grid(title, columns, cells, _change, resumed, {}) if has_drift else None


def _grid(
    title: str,
    columns: Columns,
    cells: Mapping[str, Sequence[float | None]],
    text: Callable[[float], str],
    resumed: Sequence[int],
    dots: Mapping[str, Sequence[bool]],
) -> dict[str, Any]:
    """Return a table of shaded cells, with dots, or with numbers if there are few columns."""
    values = [value for of_row in cells.values() for value in of_row if value is not None]
    shade, are_few = shade_of(values), len(columns) <= _FEW_COLUMNS

    def cell(row: str, number: int, value: float | None) -> tuple[int | None, str]:
        level = None if value is None else shade(value)
        if row in dots and dots[row][number]:
            return level, "•"
        return level, text(value) if are_few and value is not None and level is not None else ""

    return {
        "title": title,
        "heads": [f"{column[0].step:,}" for column in columns],
        "resumed": resumed,
        "rows": {row: [cell(row, *numbered) for numbered in enumerate(cells[row])] for row in cells},
        "legend": {
            f"h{at}": " to ".join(dict.fromkeys(map(text, ends))) for at, ends in ranges_of(values, shade).items()
        },
    }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _change(value: float) -> str:
    return f"{value:.1e}" if math.isfinite(value) else "inf"


def _changes(changes: Sequence[PartChange]) -> dict[str, Any]:
    """Return a table of the changes between the newest two states of each part, by kind of state."""
    states = [state for change in changes for state in change.states]
    by_part, kinds = sums_by(lambda state: state.part, states), kinds_of(states)
    return {
        "head": ["part", "steps", *kinds],
        "rows": [
            (
                change.part,
                "{:,} → {:,}".format(*change.steps),
                *(_cell(by_part[change.part].get(kind)) for kind in kinds),
            )
            for change in changes[:_MOST_ROWS]
        ],
    }


def _cell(change: Change | None) -> str:
    return "-" if change is None else _change(change.relative) if change.changed else "="


def _loss(facts: RunFacts) -> dict[str, Any] | None:
    losses = facts.losses
    if losses is None:
        return None
    steps = [attempt.resumed_at for attempt in facts.attempts[1:] if attempt.resumed_at]
    marks = {float(step): f"resumed at {step:,}" for step in steps}
    legend = {"c0": "training loss"} | ({"c1": "evaluation loss (points)"} if losses.evaluation else {})
    chart = curve("training loss over steps", losses.train, losses.evaluation, marks)
    return {"chart": chart, "legend": legend, "last": losses.train[-1]}
