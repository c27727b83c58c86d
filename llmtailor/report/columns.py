"""Saves in the columns of a chart: each is one save or, in a long run, several in a row. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from llmtailor.model.parts import expert_number, layer_of
from llmtailor.runs.save_log import LoggedSave

MOST = 100
"""Columns that are still told apart"""
MOST_EXPERTS = 48
"""Rows of experts that are still told apart"""


@dataclass(frozen=True, slots=True)
class Column:
    """Saves in a row; at least one."""

    saves: tuple[LoggedSave, ...]

    @property
    def first(self) -> int:
        """The step of its first save"""
        return self.saves[0].step

    @property
    def last(self) -> int:
        """The step of its last save"""
        return self.saves[-1].step

    def most(self, value: Callable[[LoggedSave], float]) -> float:
        return max(map(value, self.saves))

    def saved(self, part: str) -> bool:
        """Whether one of the saves holds a part"""
        return any(part in save.parts for save in self.saves)

    def age(self, part: str) -> float | None:
        """Return the mean age of a part after these saves, in steps; None if they don't know the part."""
        ages = [save.steps_behind[part] for save in self.saves if part in save.steps_behind]
        return fmean(ages) if ages else None

    def drift(self, part: str) -> float | None:
        """Return the mean change of a part that these saves measured; None if none did."""
        found = [save.drift[part] for save in self.saves if part in save.drift]
        return fmean(found) if found else None


def by_layers(saves: Sequence[LoggedSave]) -> tuple[LoggedSave, ...]:
    """Return the saves with the experts of a layer as one part, if there are too many for rows of their own.

    Such a part is as old as the oldest expert, and its change is the mean of theirs.
    """
    experts = {part for save in saves for part in (*save.steps_behind, *save.parts) if expert_number(part)}
    if len(experts) <= MOST_EXPERTS:
        return tuple(saves)
    name_of = {part: f"{layer_of(part)} experts" for part in experts}

    def join(values: Mapping[str, float], of_many: Callable[[Sequence[float]], float]) -> dict[str, float]:
        grouped: dict[str, list[float]] = {}
        for part, value in values.items():
            grouped.setdefault(name_of.get(part, part), []).append(value)
        return {part: of_many(found) for part, found in grouped.items()}

    return tuple(
        replace(
            save,
            parts={name_of.get(part, part): why for part, why in save.parts.items()},
            masters=tuple(dict.fromkeys(name_of.get(part, part) for part in save.masters)),
            drift=join(save.drift, fmean),
            steps_behind={part: int(age) for part, age in join(save.steps_behind, max).items()},
        )
        for save in saves
    )


def columns_of(saves: Sequence[LoggedSave]) -> list[Column]:
    """Return at most `MOST` columns with equally many saves, but for the last one."""
    each = -(-len(saves) // MOST) or 1
    return [Column(tuple(saves[start : start + each])) for start in range(0, len(saves), each)]


def is_one_each(columns: Sequence[Column]) -> bool:
    return all(len(column.saves) == 1 for column in columns)


def resumes_between(columns: Sequence[Column], resumed_at: Sequence[int]) -> Mapping[int, list[int]]:
    """Return number of a column -> the steps that the training resumed at before it; the first start is none."""
    found: dict[int, list[int]] = {}
    for step in resumed_at:
        at = next((number for number, column in enumerate(columns) if column.last > step), len(columns))
        if step:
            found.setdefault(at, []).append(step)
    return found
