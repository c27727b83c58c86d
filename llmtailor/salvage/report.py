"""The sources of a salvage's parts, as rows for a table and as JSON data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from llmtailor.compose.report import to_json as plan_to_json
from llmtailor.engine.copy import Moved
from llmtailor.formats.registry import display_name
from llmtailor.model.parts import condense, group_shares, layer_of
from llmtailor.recipe import ONLY_MOMENTS
from llmtailor.salvage.plan import Salvage

SCHEMA = "llmtailor.salvage/1"


@dataclass(frozen=True, slots=True)
class Row:
    """A part, or the share of a part that comes from one checkpoint."""

    part: str
    source: str
    step: int
    steps_back: int
    """Steps behind the newest checkpoint of the run, usable or not"""
    share: float
    """Of the part's elements, 0..1"""
    why: str
    only: str | None = None
    """``moments``: they alone come from this checkpoint"""

    @property
    def label(self) -> str:
        """The part, and what of it comes from this checkpoint"""
        return self.part + (f" {self.only}" if self.only else "")


def rows(salvage: Salvage) -> list[Row]:
    """Return the rows in model order; the newest share of a mixed part comes first."""
    newest, _ = salvage.newest
    found = []
    for choice in salvage.choice.parts:
        total = sum(choice.shares.values())
        given = [(number, numel / total if total else 1.0) for number, numel in choice.shares.items()]
        if choice.masters is not None:
            given.insert(0, (choice.masters, 1.0))
        for at, (number, share) in enumerate(given):
            holder = salvage.holders[number]
            step = holder.index.step_of(choice.part)
            only = ONLY_MOMENTS if at and choice.masters is not None else None
            why = choice.why if number and not (only is None and choice.masters is not None) else ""
            if number == 0 and holder.step < newest:
                why = f"the newest usable one; {display_name(salvage.newest[1])} is not"
            found.append(Row(choice.part, holder.name, step, newest - step, share, why, only))
    return found


def fold(listed: Sequence[Row]) -> list[Row]:
    """Join identical rows of consecutive layers into one, ``layer 0-7``; likewise experts."""
    folded: list[tuple[str, list[Row]]] = []
    facts = [row.part if row.share < 1 else _without_part(row) for row in listed]
    groups = [[listed[at] for at in group] for group in group_shares([row.part for row in listed], facts)]
    listed = [replace(group[0], part=condense(row.part for row in group)) for group in groups]
    for part, group in groupby(listed, lambda row: row.part):
        own = list(group)
        above, rows_above = folded[-1] if folded else ("", [])
        first, _, last = above.removeprefix("layer ").partition("-")
        number = part.removeprefix("layer ")
        follows = (last or first).isdigit() and number == str(int(last or first) + 1)
        if follows and [_without_part(row) for row in rows_above] == [_without_part(row) for row in own]:
            folded[-1] = (f"layer {first}-{number}", own)
        else:
            folded.append((part, own))
    return [replace(row, part=part) for part, own in folded for row in own]


def _without_part(row: Row) -> Row:
    return replace(row, part="", share=round(row.share, 2))


def gain(salvage: Salvage) -> float:
    """Return the share of all elements that ``--fragments`` would take from a newer checkpoint, 0..1."""
    if salvage.deeper is None:
        return 0.0
    taken: dict[str, list[Counter[int]]] = {}
    for at, choice in enumerate((salvage.choice, salvage.deeper)):
        for row in choice.parts:
            taken.setdefault(layer_of(row.part), [Counter(), Counter()])[at].update(row.shares)
    newer = sum((other - own)[number] for own, other in taken.values() for number in other if number < max(own))
    total = sum(own.total() for own, _ in taken.values())
    return newer / total if total else 0.0


def to_json(salvage: Salvage, resume_from: Path, moved: Moved | None = None) -> dict[str, Any]:
    """Return the salvage as JSON data; the keys are stable within a schema version."""
    composition = salvage.composition
    return {
        "schema": SCHEMA,
        "run": str(salvage.run),
        "newest": {"step": salvage.newest[0], "path": str(salvage.newest[1])},
        "outcome": "composite" if composition else "intact" if salvage.is_intact else "older",
        "base": salvage.base.name,
        "resume_from": str(resume_from),
        "fragments": salvage.fragments,
        "fragments_would_gain": gain(salvage),
        "parts": [asdict(row) for row in rows(salvage)],
        "damage": [problem.to_json() for problem in dict.fromkeys([*salvage.damage, *salvage.refused])],
        "plan": plan_to_json(composition.report) if composition else None,
        "moved": moved and asdict(moved),
    }
