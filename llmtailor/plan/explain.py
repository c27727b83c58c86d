"""A plan in words: rows for tables, and JSON with stable keys."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from llmtailor.core.anatomy import Anatomy
from llmtailor.core.index import CheckpointIndex
from llmtailor.core.plan import Convert, Copy, Plan, Sources
from llmtailor.core.report import SCHEMA_PLAN, FileRow, PartRow, Report, SourceRow, StepRow
from llmtailor.errors import Problem
from llmtailor.plan.steps import NOTICEABLE, StepChoice


def part_rows(
    plan: Plan, anatomy: Anatomy, indexes: Sequence[CheckpointIndex], sources: Sources, base: int
) -> tuple[PartRow, ...]:
    """Say for every part which source it comes from, how old it is and how many bytes it has."""
    num_bytes: dict[tuple[str, int], int] = defaultdict(int)
    for file in plan.files:
        for piece in file.pieces:
            if isinstance(piece, (Copy, Convert)) and piece.state is not None:
                num_bytes[anatomy.part_of[piece.state.param], piece.source] += piece.stop - piece.start
    rows = []
    for part in anatomy.parts:
        counts: dict[int, int] = defaultdict(int)
        for name in anatomy.names(part):
            for source in sources.of_any(name):
                counts[source] += 1
        for source, count in sorted(counts.items()):
            index = indexes[source]
            step = index.part_steps.get(part, index.global_step)
            staleness = indexes[base].global_step - step
            rows.append(
                PartRow(part, index.name, step, staleness, num_bytes[part, source], count, is_whole=len(counts) == 1)
            )
    return tuple(rows)


def source_rows(plan: Plan, indexes: Sequence[CheckpointIndex], base: int) -> tuple[SourceRow, ...]:
    """Say how many bytes of the output each source gives."""
    num_bytes: dict[int, int] = defaultdict(int)
    for file in plan.files:
        for piece in file.pieces:
            if isinstance(piece, (Copy, Convert)):
                num_bytes[piece.source] += piece.stop - piece.start
    return tuple(
        SourceRow(index.name, index.global_step, number == base, num_bytes[number])
        for number, index in enumerate(indexes)
    )


def step_rows(choices: Sequence[StepChoice]) -> tuple[StepRow, ...]:
    return tuple(StepRow(choice.flat_id, choice.step, choice.others) for choice in choices)


def file_rows(plan: Plan) -> tuple[FileRow, ...]:
    return tuple(FileRow(file.path, file.num_bytes) for file in plan.files)


def step_notices(choices: Sequence[StepChoice], base_name: str, rebased: bool = False) -> list[Problem]:
    """Warn where one flat id mixes params of several steps, with the size of the effect."""
    mixed = [choice for choice in choices if choice.others]
    if not mixed:
        return []
    worst = max(mixed, key=lambda choice: abs(choice.worst_factor - 1))
    others = sorted({step for choice in mixed for step in choice.others})
    if rebased:
        effect = "scaled so that their bias-corrected values are kept (--step rebase)"
    elif abs(worst.worst_factor - 1) > NOTICEABLE:
        effect = f"as they are: the first update after the resume is scaled by up to {worst.worst_factor:.3f}"
    else:
        effect = f"as they are: the effect on the first update is below {NOTICEABLE:.0%}"
    what = (
        f"{len(mixed)} of {len(choices)} flat ids hold moments from step "
        f"{', '.join(f'{step:g}' for step in others)} beside their own; they keep {worst.step:g}, the step of "
        f"{base_name}, and the moments {effect}"
    )
    fix = "" if rebased else "if that matters, say --step rebase, or use layer-aligned param groups (a step per layer)"
    return [Problem("optimizer step", what, fix)]


def to_json(report: Report) -> dict[str, Any]:
    """Return a report as JSON data; the keys are stable within a schema version."""
    return {
        "schema": SCHEMA_PLAN,
        "recipe": report.recipe,
        "out": report.out,
        "base": report.base,
        "global_step": report.global_step,
        "world_size": report.world_size,
        "parts": [asdict(row) for row in report.parts],
        "sources": [asdict(row) for row in report.sources],
        "optimizer_steps": [asdict(row) for row in report.steps],
        "files": [asdict(row) for row in report.files],
        "num_bytes": report.num_bytes,
        "needed_bytes": report.needed_bytes,
        "free_bytes": report.free_bytes,
        "notices": [notice.to_json() for notice in report.notices],
    }
