"""Reports what a composite is made of: tables, JSON, the manifest and the model card."""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.layout import Cast, Copy, Plan, Sources
from llmtailor.compose.adam_step import NOTICEABLE, StepChoice
from llmtailor.errors import Problem
from llmtailor.formats.trainer import CARD, MANIFEST
from llmtailor.model.parts import ModelStructure

SCHEMA_PLAN = "llmtailor.plan/1"
SCHEMA_MANIFEST = "llmtailor.manifest/1"


@dataclass(frozen=True, slots=True)
class PartRow:
    """A part, or the share of a part, that comes from one source."""

    part: str
    source: str
    step: int
    """The training step at which these values were saved."""
    staleness: int
    """Steps from ``step`` to the base; negative if the part is newer than the base."""
    num_bytes: int
    """Size in the output: weights, masters and moments, without padding"""
    num_tensors: int
    is_whole: bool
    """Whether the whole part comes from this source."""


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A source checkpoint: what it is, and how much of the output comes from it."""

    name: str
    global_step: int
    is_base: bool
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StepRow:
    """The optimizer's step of a sub-group."""

    flat_id: int
    step: float
    other_steps: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class FileRow:
    path: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Report:
    """What a user may want to know before or after the merge."""

    recipe: str
    out: str
    base: str
    global_step: int
    world_size: int
    parts: tuple[PartRow, ...]
    sources: tuple[SourceRow, ...]
    steps: tuple[StepRow, ...]
    files: tuple[FileRow, ...]
    num_bytes: int
    needed_bytes: int
    """Free space that the merge requires before it starts"""
    free_bytes: int
    notices: tuple[Problem, ...]


def part_rows(
    plan: Plan, structure: ModelStructure, indexes: Sequence[CheckpointIndex], sources: Sources, base: int
) -> tuple[PartRow, ...]:
    """Return the source, age and size of every part."""
    num_bytes: dict[tuple[str, int], int] = defaultdict(int)
    for file in plan.files:
        for piece in file.pieces:
            if isinstance(piece, (Copy, Cast)) and piece.state is not None:
                num_bytes[structure.part_of[piece.state.param], piece.source] += piece.num_bytes
    rows = []
    for part in structure.parts:
        counts: dict[int, int] = defaultdict(int)
        for name in structure.names(part):
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
    """Return the sources and how many bytes of the output each supplies."""
    num_bytes: dict[int, int] = defaultdict(int)
    for file in plan.files:
        for piece in file.pieces:
            if isinstance(piece, (Copy, Cast)):
                num_bytes[piece.source] += piece.num_bytes
    return tuple(
        SourceRow(index.name, index.global_step, number == base, num_bytes[number])
        for number, index in enumerate(indexes)
    )


def step_rows(choices: Sequence[StepChoice]) -> tuple[StepRow, ...]:
    return tuple(StepRow(choice.flat_id, choice.step, choice.others) for choice in choices)


def file_rows(plan: Plan) -> tuple[FileRow, ...]:
    return tuple(FileRow(file.path, file.num_bytes) for file in plan.files)


def step_notices(choices: Sequence[StepChoice], base_name: str, rebased: bool = False) -> list[Problem]:
    """Return a warning, with the size of the effect, if sub-groups mix params of several steps."""
    mixed = [choice for choice in choices if choice.others]
    if not mixed:
        return []
    worst = max(mixed, key=lambda choice: abs(choice.worst_factor - 1))
    others = sorted({step for choice in mixed for step in choice.others})
    if rebased:
        effect = "scaled so that their bias-corrected values are kept (--step rebase)"
    elif abs(worst.worst_factor - 1) > NOTICEABLE:
        effect = f"unchanged: the first update after the resume is scaled by up to {worst.worst_factor:.3f}"
    else:
        effect = f"unchanged: the effect on the first update is below {NOTICEABLE:.0%}"
    what = (
        f"{len(mixed)} of {len(choices)} sub-groups hold moments from step "
        f"{', '.join(f'{step:g}' for step in others)} besides their own; they keep {worst.step:g}, the step of "
        f"{base_name}, and the moments {effect}"
    )
    fix = "" if rebased else "if that matters, use --step rebase, or layer-aligned param groups (a step per layer)"
    return [Problem("optimizer step", what, fix)]


def to_json(report: Report) -> dict[str, Any]:
    """Return the report as JSON data; the keys are stable within a schema version."""
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


_LAYER = re.compile(r"layer ([0-9]+)")

"""Location of the notice that weights and optimizer states of a part come from different sources"""


def manifest(
    report: Report,
    *,
    tool_version: str,
    created: str,
    recipe_text: str,
    source_facts: Sequence[Mapping[str, Any]],
    digests: Mapping[str, str],
    checksums: Mapping[str, Mapping[str, str]],
    card: bytes,
    merge: str,
) -> dict[str, Any]:
    """Return the content of ``llmtailor.json``.

    ``digests`` are those of the parts (see `storage.checksums.part_digest`); ``checksums`` are the CRC-32 and any other
    checksums of every file, by name; ``card`` is the README, to detect later edits; ``merge`` is a digest of what was
    merged, to recognize the same merge.
    """
    return {
        "schema": SCHEMA_MANIFEST,
        "llmtailor_version": tool_version,
        "merge": merge,
        "created": created,
        "base": report.base,
        "global_step": report.global_step,
        "world_size": report.world_size,
        "recipe": {"name": report.recipe, "text": recipe_text},
        "sources": list(source_facts),
        "parts": [{**asdict(row), "digest": digests.get(row.part)} for row in report.parts],
        "optimizer_steps": [asdict(row) for row in report.steps],
        "files": [{"path": row.path, "num_bytes": row.num_bytes, **checksums[row.path]} for row in report.files],
        "card": {"path": CARD, "num_bytes": len(card), "crc32": f"{zlib.crc32(card):08x}"},
        "notices": [notice.to_json() for notice in report.notices],
    }


def card(report: Report, tool_version: str, stage: int) -> str:
    """Return the README of a composite: a model card with the table of its parts.

    ``stage`` is the ZeRO stage, 0 for a checkpoint without DeepSpeed.
    """
    holds = "weights, fp32 master weights and optimizer moments" if stage else "weights and optimizer moments"
    trainer = "Trainer and DeepSpeed" if stage else "Trainer, without DeepSpeed"
    ranks = f"{report.world_size} rank{'s' if report.world_size != 1 else ''}"
    rows = "\n".join(
        f"| {row.part} | `{row.source}` | {row.step} | {row.staleness} | {row.num_bytes:,} |"
        for row in fold_layers(report.parts)
    )
    notices = "\n".join(f"- {notice.where}: {notice.what}" for notice in report.notices) or "- none"
    sources = f"{len(report.sources)} checkpoint{'s' if len(report.sources) != 1 else ''}"
    return f"""---
tags:
- llmtailor
- checkpoint
---
# Composite training checkpoint at step {report.global_step}

Composed by llmtailor {tool_version} from {sources} of one training run. It holds {holds},
and resumes on {ranks} with an unpatched Hugging Face {trainer}:

    trainer.train(resume_from_checkpoint="this folder")

| part | source | saved at step | steps behind the base | bytes |
|---|---|---:|---:|---:|
{rows}

Hyperparameters, scheduler, RNG and trainer state come from the base, `{report.base}`. The recipe, the digests of
the parts and the checksums of all files are in `{MANIFEST}`.

Notices:

{notices}
"""


def fold_layers(rows: Sequence[PartRow]) -> list[PartRow]:
    """Join neighbouring layers with the same source and step into one row, ``layer 0-7``."""
    folded: list[PartRow] = []
    first = last = 0
    for row in rows:
        match = _LAYER.fullmatch(row.part)
        number = int(match[1]) if match else None
        if folded and number is not None and row.is_whole and number == last + 1 and _alike(folded[-1], row):
            last = number
            above = folded.pop()
            folded.append(
                PartRow(
                    f"layer {first}-{last}",
                    row.source,
                    row.step,
                    row.staleness,
                    above.num_bytes + row.num_bytes,
                    above.num_tensors + row.num_tensors,
                    is_whole=True,
                )
            )
            continue
        folded.append(row)
        first = last = number if number is not None else -2
    return folded


def _alike(above: PartRow, row: PartRow) -> bool:
    return (above.is_whole, above.source, above.step) == (True, row.source, row.step)
