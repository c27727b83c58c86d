"""Reports what a composite is made of: tables, JSON and the model card."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from llmtailor.checkpoint.index import DCP, DEEPSPEED, FSDP, TRAINER, UNIVERSAL, CheckpointIndex
from llmtailor.checkpoint.layout import Plan
from llmtailor.checkpoint.sources import Sources
from llmtailor.compose.adam_step import NOTICEABLE, StepChoice
from llmtailor.compose.averages import describe
from llmtailor.errors import Problem
from llmtailor.formats.trainer import MANIFEST
from llmtailor.model.parts import ModelStructure, layer_number

SCHEMA_PLAN = "llmtailor.plan/1"


@dataclass(frozen=True, slots=True)
class PartRow:
    """A part, or the share of a part, that comes from one source."""

    part: str
    source: str
    """A checkpoint, or ``average of A (0.25), B (0.75)``"""
    step: int
    """The training step at which these values were saved; of an average the newest"""
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
    num_bytes: dict[tuple[str, int, str], int] = defaultdict(int)
    averages = {name: describe(mix, indexes) for name, mix in sources.averages.items()}
    for (param, source), moved in plan.summary.moved.items():
        if param is not None:
            num_bytes[structure.part_of[param], source, averages.get(param, "")] += moved
    rows = []
    for part in structure.parts:
        counts = Counter(
            (source, averages.get(name, "")) for name in structure.names(part) for source in sources.of_any(name)
        )
        for (source, average), count in sorted(counts.items()):
            step = indexes[source].part_steps.get(part, indexes[source].global_step)
            staleness, moved = indexes[base].global_step - step, num_bytes[part, source, average]
            name = average or indexes[source].name
            rows.append(PartRow(part, name, step, staleness, moved, count, len(counts) == 1))
    return tuple(rows)


def source_rows(plan: Plan, indexes: Sequence[CheckpointIndex], base: int) -> tuple[SourceRow, ...]:
    """Return the sources and how many bytes of the output each supplies; averaged ones count for every source."""
    num_bytes = Counter(plan.summary.shared)
    for (_, source), moved in plan.summary.moved.items():
        num_bytes[source] += moved
    return tuple(
        SourceRow(index.name, index.global_step, number == base, num_bytes[number])
        for number, index in enumerate(indexes)
    )


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
    content = asdict(replace(report, notices=()))
    content["notices"] = [notice.to_json() for notice in report.notices]
    return {"schema": SCHEMA_PLAN} | {"optimizer_steps" if key == "steps" else key: content[key] for key in content}


_OF_TRAINER = 'trainer.train(resume_from_checkpoint="this folder")'
_RESUMES = {
    DEEPSPEED: ("Hugging Face Trainer and DeepSpeed", _OF_TRAINER),
    UNIVERSAL: ('Hugging Face Trainer and DeepSpeed with "checkpoint": {"load_universal": true}', _OF_TRAINER),
    TRAINER: ("Hugging Face Trainer, without DeepSpeed", _OF_TRAINER),
    FSDP: ("Hugging Face Trainer and FSDP", _OF_TRAINER),
    DCP: ("torch.distributed.checkpoint", 'torch.distributed.checkpoint.load(state_dict, checkpoint_id="this folder")'),
}
"""Family of formats -> what resumes it, and how"""


def card(report: Report, tool_version: str, family: str) -> str:
    """Return the README of a composite: a model card with the table of its parts."""
    has_masters = family in (DEEPSPEED, UNIVERSAL)
    holds = "weights, fp32 master weights and optimizer moments" if has_masters else "weights and optimizer moments"
    trainer, call = _RESUMES[family]
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
and resumes on {ranks} with an unpatched {trainer}:

    {call}

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
        number = layer_number(row.part)
        if folded and number is not None and number == last + 1 and _alike(folded[-1], row):
            above, last = folded[-1], number
            num_bytes, num_tensors = above.num_bytes + row.num_bytes, above.num_tensors + row.num_tensors
            folded[-1] = replace(row, part=f"layer {first}-{last}", num_bytes=num_bytes, num_tensors=num_tensors)
        else:
            folded.append(row)
            first = last = -2 if number is None else number
    return folded


def _alike(above: PartRow, row: PartRow) -> bool:
    return above.is_whole and row.is_whole and (above.source, above.step) == (row.source, row.step)
