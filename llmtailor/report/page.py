"""Assembles the page of a report from what was read. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from llmtailor import __version__
from llmtailor.charts.axes import STYLE
from llmtailor.charts.markup import Element, Node, element, style, to_html
from llmtailor.errors import size, some
from llmtailor.report import pictures, tables
from llmtailor.report.columns import Column, by_layers, columns_of, is_one_each
from llmtailor.report.gather import RunFacts
from llmtailor.runs.save_log import LoggedSave

_MOST_PARTS = 400
_MOST_PROBLEMS = 30
_PAGE_STYLE = """
  :root { color-scheme: light dark; }
  body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; color: #1f2328;
    background: #ffffff; max-width: 1000px; margin: 0 auto; padding: 16px; }
  h1 { font-size: 24px; overflow-wrap: anywhere; }
  h2 { font-size: 19px; margin-top: 36px; border-bottom: 1px solid #d1d9e0; }
  h3 { font-size: 15px; } svg { max-width: 100%; height: auto; display: block; margin: 10px 0; overflow: visible; }
  code { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 13px; overflow-wrap: anywhere; }
  .wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; }
  th, td { padding: 2px 10px; text-align: left; white-space: nowrap; border-bottom: 1px solid #d1d9e0; }
  .number { text-align: right; font-variant-numeric: tabular-nums; }
  p.dim, span.dim { color: #59636e; }
  dl { display: flex; flex-wrap: wrap; gap: 8px 28px; margin: 12px 0; } dt { color: #59636e; font-size: 13px; }
  dd { margin: 0; font-size: 18px; }
  @media (prefers-color-scheme: dark) {
    body { color: #f0f6fc; background: #0d1117; } h2, th, td { border-color: #3d444d; }
    dt, p.dim, span.dim { color: #9198a1; }
  }
"""


def page(facts: RunFacts) -> str:
    """Return the page: one file that loads nothing and needs no JavaScript."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content="default-src 'none'; style-src 'unsafe-inline'"),
        element("title", f"llmtailor report: {facts.run}"),
        style(_PAGE_STYLE + STYLE + pictures.GRID_STYLE),
    )
    by_layer = replace(facts, log=replace(facts.log, saves=by_layers(facts.log.saves)))
    parts = parts_of(by_layer)
    made = f"Made by llmtailor {__version__} at {facts.made.isoformat(sep=' ', timespec='seconds')}."
    body = element(
        "body",
        element("h1", facts.run),
        _text(f"{made} The page shows the state of that time.", "dim"),
        _summary(facts),
        _problems(facts),
        _section("What a resume would start from", *_composite(facts)),
        _section("Checkpoints", *_checkpoints(facts)),
        _section("Saves", *_saves(facts)),
        _section("Age of parts", *_ages(by_layer, parts)),
        _section("How much parts changed", *_drift(by_layer, parts)),
        _section("Loss", *_loss(facts)),
        _section("Attempts", *_attempts(facts)),
    )
    return to_html(element("html", head, body, lang="en"))


def parts_of(facts: RunFacts) -> list[str]:
    """Return the parts that the log knows, in its order, which is that of the model."""
    logged: dict[str, None] = {}
    for save in facts.log.saves:
        logged |= dict.fromkeys((*save.steps_behind, *save.parts))
    return [*logged][:_MOST_PARTS]


def _section(title: str, *content: Node) -> Element:
    return element("section", element("h2", title), *content)


def _text(text: str, class_: str | None = None) -> Element:
    return element("p", text, class_=class_)


def _summary(facts: RunFacts) -> Element:
    saves = facts.log.saves
    values = {
        "saves": f"{len(saves):,}",
        "newest step": f"{saves[-1].step:,}" if saves else "-",
        "written": size(sum(save.num_bytes for save in saves)),
        "training stopped for": _seconds(sum(save.stall_s for save in saves)),
        "failed saves": str(len(facts.log.failed)),
        "attempts": str(len(facts.attempts)),
    }
    if facts.composite is not None:
        values["resumes at step"] = f"{facts.composite.report.global_step:,}"
    return element("dl", *(element("div", element("dt", name), element("dd", text)) for name, text in values.items()))


def _problems(facts: RunFacts) -> Element | None:
    problems = list(dict.fromkeys(facts.problems))
    if not problems:
        return None
    more = len(problems) - _MOST_PROBLEMS
    rest = _text(f"and {more} more") if more > 0 else None
    return _section("What could not be read", tables.problems_list(problems[:_MOST_PROBLEMS]), rest)


def _composite(facts: RunFacts) -> list[Node]:
    if facts.composite is None:
        problems = facts.not_composed
        more = len(problems) - _MOST_PROBLEMS
        rest = _text(f"and {more} more") if more > 0 else None
        return [_text("Nothing can be composed now:"), tables.problems_list(problems[:_MOST_PROBLEMS]), rest]
    found = facts.composite
    oldest = max((row.staleness for row in found.report.parts), default=0)
    old = [
        row.label + ("" if row.masters_step is None else " moments")
        for row in found.report.parts
        if row.staleness == oldest
    ]
    age = f"The oldest parts are {oldest:,} steps older: {some(old)}." if oldest else "All parts are of that step."
    if found.there is not None:
        what = f"{found.there} is complete and has the newest of every part. It resumes at step "
        what += f"{found.report.global_step:,}. {age}"
        return [_text(what), tables.composite_table(facts)]
    report = found.report
    what = f" would compose {report.out} from {len(report.sources)} checkpoints, {size(report.num_bytes)}. It "
    what += f"resumes at step {report.global_step:,} with world size {report.world_size}. {age}"
    command = element("code", f"llmtailor merge --run {facts.run}")
    return [
        element("p", command, what),
        tables.composite_table(facts),
        tables.problems_list(found.report.notices) if found.report.notices else None,
    ]


def _checkpoints(facts: RunFacts) -> list[Node]:
    if not facts.folders:
        return [_text("The folder holds no checkpoint.")]
    kinds = [kind for _, kind, _ in facts.folders]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    text = f"In the folder: {counts}. The newest, and the sources above, checked by their headers:"
    return [_text(text), *tables.verdicts_section(facts.checked)]


def _saves(facts: RunFacts) -> list[Node]:
    saves, log = facts.log.saves, facts.log
    failed = _failed(facts)
    if not saves:
        return [_text("No save is logged in partial/saves.jsonl."), *failed]
    columns = columns_of(saves)
    steps, seconds = [one.step for one in log.failed], "{:.3g} s".format
    most = max(len(column.saves) for column in columns)
    many = _text(f"A bar stands for up to {most} saves and shows the greatest value.", "dim") if most > 1 else None
    whole = [save.num_bytes for save in saves if set(save.parts) >= set(save.steps_behind) and save.steps_behind]
    reference = (float(max(whole)), "a save of every part") if whole else None
    times = _bars(
        "seconds from the start of a save",
        facts,
        [
            ("outline", lambda save: save.publish_s),
            ("f5", lambda save: save.write_s),
            ("f0", lambda save: save.copy_s),
        ],
        seconds,
        steps,
    )
    stalls = _bars("seconds that training stopped", facts, [("f1", lambda save: save.stall_s)], seconds, ())
    sizes = _bars(
        "bytes of a save", facts, [("f0", lambda save: save.num_bytes)], lambda value: size(int(value)), (), reference
    )
    return [
        many,
        times,
        pictures.legend({"f0": "copied to host memory", "f5": "files durable", "outline": "published"}),
        _text(_times(saves)),
        stalls,
        sizes,
        _text(_against_full(saves, reference[0] if reference else None)),
        *failed,
        element("details", element("summary", "All figures of each save"), *tables.saves_table(facts)),
    ]


def _bars(
    title: str,
    facts: RunFacts,
    layers: Sequence[tuple[str, Callable[[LoggedSave], float]]],
    text: Callable[[float], str],
    failed: Sequence[int],
    reference: tuple[float, str] | None = None,
) -> Element:
    def highest(value: Callable[[LoggedSave], float]) -> Callable[[Column], float]:
        return lambda column: column.most(value)

    shown = [(name, highest(value)) for name, value in layers]
    return pictures.bars(title, columns_of(facts.log.saves), shown, text, facts.attempts, failed, reference)


def _times(saves: Sequence[LoggedSave]) -> str:
    told = []
    for name, values in (
        ("stall", [save.stall_s for save in saves]),
        ("copied after", [save.copy_s for save in saves]),
        ("files durable after", [save.write_s for save in saves]),
        ("published after", [save.publish_s for save in saves]),
    ):
        told.append(f"{name} {_seconds(median(values))} (at most {_seconds(max(values))})")
    return f"Median of all saves: {', '.join(told)}."


def _against_full(saves: Sequence[LoggedSave], full: float | None) -> str:
    written = sum(save.num_bytes for save in saves)
    if full is None or not written:
        return f"{size(written)} were written. No logged save holds every part, so full saves can't be compared."
    would = int(full * len(saves))
    return (
        f"{size(written)} were written. {len(saves):,} saves of every part, as large as the largest such save, would "
        f"have been {size(would)}: {would / written:.2f} times as much."
    )


def _failed(facts: RunFacts) -> list[Element]:
    made = []
    if facts.log.failed:
        listed = element("ul", *(element("li", f"step {one.step:,}: {one.why}") for one in facts.log.failed[-20:]))
        made += [_text(f"Saves that failed: {len(facts.log.failed)}, marked with a cross above. The newest:"), listed]
    if facts.log.unreadable:
        made.append(_text(f"Lines of saves.jsonl that are not valid: {facts.log.unreadable}. A kill may leave one."))
    if facts.abandoned.saves:
        made.append(_text(f"Saves of abandoned attempts, not shown: {len(facts.abandoned.saves):,}."))
    return made


def _ages(facts: RunFacts, parts: Sequence[str]) -> list[Node]:
    columns = columns_of(facts.log.saves)
    values = [age for column in columns for part in parts if (age := column.age(part)) is not None]
    is_one = is_one_each(columns)
    if not values:
        return [_text("The log has no ages of parts.")]
    shade = pictures.shade_of(values)
    what = "A dot is a save of the part." if is_one else "A cell is the mean over the saves of its column."
    has_masters = any(save.masters for save in facts.log.saves)
    whose = "the moments of a part were" if has_masters else "a part was"
    chart = pictures.grid(
        f"steps since {whose} saved, after each save",
        parts,
        columns,
        lambda column, part: column.age(part),
        lambda value: f"{value:,.0f}",
        lambda value: shade(value) if value > 0 else None,
        facts.attempts,
        (lambda column, part: column.saved(part)) if is_one else None,
    )
    shades = {
        f"h{at}": f"{low:,.0f} to {high:,.0f} steps" for at, (low, high) in pictures.ranges_of(values, shade).items()
    }
    return [
        _text(f"{what} The darker the cell, the older the part's newest save."),
        _text("Saves also held the masters of other parts: the numbers say of which step.") if has_masters else None,
        chart,
        pictures.legend(shades) if shades else None,
        element("details", element("summary", "The same in numbers"), tables.parts_table(parts, facts)),
    ]


def _drift(facts: RunFacts, parts: Sequence[str]) -> list[Node]:
    made: list[Node] = []
    columns = columns_of(facts.log.saves)
    drifts = [drift for column in columns for part in parts if (drift := column.drift(part)) is not None]
    if drifts:
        made.append(
            pictures.grid(
                "relative change of a part's master weights since it was saved, before each save",
                parts,
                columns,
                lambda column, part: column.drift(part),
                tables.change_text,
                pictures.shade_of(drifts, is_log=True),
                facts.attempts,
            )
        )
        finite = [one for one in drifts if 0 < one < float("inf")] or [0.0]
        made.append(_text(f"The darker, the more; from {min(finite):.2e} to {max(finite):.2e}, on a log scale."))
    if facts.changes:
        made.append(_text("The newest state of each part against the one before: |new - old| / |old|."))
        made += tables.changes_tables(facts.changes[:_MOST_PARTS])
        if len(facts.changes) > _MOST_PARTS:
            made.append(_text(f"The first {_MOST_PARTS} of {len(facts.changes):,} parts.", "dim"))
    elif facts.changes is not None:
        made.append(_text("No part is held by two usable checkpoints of different steps: nothing to compare."))
    if not made:
        made.append(_text("The saves measured no changes. --values compares checkpoints."))
    return made


def _loss(facts: RunFacts) -> list[Node]:
    chart = pictures.loss_chart(facts.losses, facts.attempts)
    if chart is None:
        return [_text("No trainer_state.json in the folder logs a loss.")]
    entries = {"f0": "training loss"}
    if any(one.evaluation for one in facts.losses if not one.is_abandoned):
        entries["f1"] = "evaluation loss (points)"
    if any(one.is_abandoned and one.train for one in facts.losses):
        entries["f4"] = "abandoned attempts (dotted)"
    last = next((one.train[-1] for one in facts.losses if one.train and not one.is_abandoned), None)
    text = _text(f"The last logged loss is {last[1]:.4g}, at step {last[0]:,}.") if last else None
    return [chart, pictures.legend(entries), text]


def _attempts(facts: RunFacts) -> list[Node]:
    if not facts.attempts:
        return [_text("No attempts are recorded.")]
    rows = [
        (str(number), one.started, f"{one.resumed_at:,}" if one.resumed_at else "from the beginning")
        for number, one in enumerate(facts.attempts, 1)
    ]
    return [tables.table(("attempt", "started", "resumed at step"), rows[-100:], right=(0, 2))]


def _seconds(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
