"""Reports what a composite is made of: tables, JSON and the model card."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmtailor.checkpoint.index import DCP, DEEPSPEED, FSDP, MEGATRON, TRAINER, UNIVERSAL, VERL, CheckpointIndex
from llmtailor.checkpoint.layout import Plan
from llmtailor.checkpoint.optimizer import count_ranks
from llmtailor.checkpoint.sources import Sources
from llmtailor.codes import Code
from llmtailor.compose.averages import StepChoice, describe, matters
from llmtailor.documents import document, encode
from llmtailor.errors import Problem, counted
from llmtailor.findings import folded
from llmtailor.frameworks.files import MANIFEST
from llmtailor.frameworks.framework import Framework
from llmtailor.model.parts import ModelStructure, Part, condense, group_shares
from llmtailor.recipe import ONLY_MOMENTS


@dataclass(frozen=True, slots=True)
class PartRow:
    """A part, or the share of a part, that comes from one source."""

    part: Part
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
    only: str | None = None
    """``moments``: they alone come from this source, and the rest of the part from that of the row without"""
    masters_step: int | None = None
    """The step of the masters, if they are newer than ``step``: of a part of a composite"""
    setback: float | None = None
    """By how many steps training falls back because the part is stale, as the training estimated it; None if it did
    not"""

    @property
    def label(self) -> str:
        """The part, and what of it comes from this source"""
        share = "" if self.is_whole else f" ({self.num_tensors} tensor{'s' * (self.num_tensors != 1)})"
        return self.part + (f" {self.only}" if self.only else "") + share

    @property
    def steps(self) -> str:
        """The step, and that of the masters if it is another"""
        return str(self.step) if self.masters_step is None else f"{self.step} (masters {self.masters_step})"


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
    mesh: Mapping[str, int]
    """The same by kind of parallelism"""
    parts: tuple[PartRow, ...]
    sources: tuple[SourceRow, ...]
    steps: tuple[StepRow, ...]
    files: tuple[FileRow, ...]
    num_bytes: int
    needed_bytes: int
    """Free space that the merge requires before it starts"""
    free_bytes: int
    notices: tuple[Problem, ...]

    @property
    def shown_notices(self) -> list[Problem]:
        """The notices that a command prints. That states are rounded was chosen, and the saver has said it."""
        return folded(notice for notice in self.notices if notice.code is not Code.ROUNDED)


def part_rows(
    plan: Plan, structure: ModelStructure, indexes: Sequence[CheckpointIndex], sources: Sources, base: int
) -> tuple[PartRow, ...]:
    """Return the source, age and size of every part."""
    num_bytes: dict[tuple[str, int, str], int] = defaultdict(int)
    averages = {name: describe(mix, indexes) for name, mix in sources.averages.items()}
    pieces_of = structure.pieces_of
    for (param, source), moved in plan.summary.moved.items():
        if param in pieces_of:  # each element has the same number of bytes, two thirds of them for moments
            own: dict[str, int] = {}
            for one in pieces_of[param]:
                main = sources.of_name[one]
                kinds = (main, *[sources.of_moments.get(one, main)] * 2).count(source)
                own[one] = kinds * structure.pieces[one].numel
            total = sum(own.values())
            for one, share in own.items() if total else ():
                num_bytes[structure.part_of[one], source, ""] += moved * share // total
        elif param is not None:
            num_bytes[structure.part_of[param], source, averages.get(param, "")] += moved
    moments: dict[str, Counter[int]] = defaultdict(Counter)
    for name, source in sources.of_moments.items():
        moments[structure.part_of[name]][source] += 1
    rows = []
    for part in structure.parts:
        counts = Counter(
            (source, averages.get(name, "")) for name in structure.names(part) for source in sources.of_any(name)
        )
        for (source, average), count in sorted(counts.items()):
            newest = indexes[source].master_step_of(part)
            step = newest if part in moments else indexes[source].step_of(part)
            staleness, moved = indexes[base].global_step - step, num_bytes[part, source, average]
            name = average or indexes[source].name
            setback = indexes[base].setback_with(part, step) if len(counts) == 1 and not average else None
            of_masters = newest if newest != step and not average else None
            is_whole = len(counts) == 1
            rows.append(PartRow(part, name, step, staleness, moved, count, is_whole, None, of_masters, setback))
    for part in filter(moments.__contains__, structure.parts):
        for source, count in sorted(moments[part].items()):
            step = indexes[source].step_of(part)
            staleness, moved = indexes[base].global_step - step, num_bytes[part, source, ""]
            is_whole = len(moments[part]) == 1
            rows.append(PartRow(part, indexes[source].name, step, staleness, moved, count, is_whole, ONLY_MOMENTS))
    return tuple(rows)


def total_setback(of_parts: Iterable[float | None]) -> float | None:
    """Return by how many steps training falls back with several parts; None if it is unknown for one of them."""
    steps = [*of_parts]
    known = [one for one in steps if one is not None]
    return math.fsum(known) if len(known) == len(steps) else None


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
    """Return a note, with the size of the effect, if moments are not of the updates that are counted and it matters."""
    if rebased or not matters(choices):
        return []
    worst = max(choices, key=lambda choice: abs(choice.worst_factor - 1))
    which = "more" if worst.most_missed < 0 else "fewer"
    what = (
        f"moments are of up to {abs(worst.most_missed):g} {which} updates than the {worst.step:g} that {base_name} "
        f"counts, which scales the first steps by up to {worst.worst_factor:.2f}; --step rebase corrects that"
    )
    fix = ""  # it is in the sentence, so that the note is one line
    return [Problem("optimizer step", what, fix)]


def to_json(report: Report) -> dict[str, Any]:
    """Return the report as a `document`."""
    content = {"optimizer_steps" if key == "steps" else key: value for key, value in encode(report).items()}
    return document("plan/1", content)


_UNIVERSAL = 'DeepSpeed with "checkpoint": {"load_universal": true}'
_WITH = {
    DEEPSPEED: " and DeepSpeed",
    UNIVERSAL: f" and {_UNIVERSAL}",
    TRAINER: ", without DeepSpeed",
    FSDP: " and FSDP",
    DCP: "",
    VERL: " and FSDP2",
    MEGATRON: "",
}
"""Format -> what its framework resumes it with"""


def card(report: Report, tool_version: str, to_format: str, stage: int, framework: Framework) -> str:
    """Return the README of a composite: a model card with the table of its parts. Stage 0 is without DeepSpeed."""
    if framework.name == DEEPSPEED:
        resumes = _UNIVERSAL if to_format == UNIVERSAL else framework.title
    else:
        resumes = ("Hugging Face Trainer" if framework.name == TRAINER else framework.title) + _WITH[to_format]
    has_masters = to_format in (DEEPSPEED, UNIVERSAL, MEGATRON)
    holds = "weights, fp32 master weights and optimizer moments" if has_masters else "weights and optimizer moments"
    ranks = count_ranks(report.mesh)
    rows = "\n".join(
        f"| {row.label} | `{row.source}` | {row.step} | {row.staleness} | {row.num_bytes:,} |"
        for row in fold_layers(report.parts)
    )
    notices = "\n".join(f"- {notice.where}: {notice.what}" for notice in folded(report.notices)) or "- none"
    sources = counted(len(report.sources), "checkpoint")
    return f"""---
tags:
- llmtailor
- checkpoint
---
# Composite training checkpoint at step {report.global_step}

Composed by llmtailor {tool_version} from {sources} of one training run. It holds {holds},
and resumes on {ranks} with an unpatched {resumes}:

    {framework.call.format(framework.takes("this folder", stage))}

| part | source | saved at step | steps behind the base | bytes |
|---|---|---:|---:|---:|
{rows}

Hyperparameters, scheduler, RNG and trainer state come from the base, `{report.base}`. The recipe, the digests of
the parts and the checksums of all files are in `{MANIFEST}`.

Notices:

{notices}
"""


def fold_layers(rows: Sequence[PartRow]) -> list[PartRow]:
    """Join neighbouring layers with the same source and step into one row, ``layer 0-7``, and likewise experts."""
    folded: list[PartRow] = []
    first = last = None
    for row in fold_experts(rows):
        number = None if row.part.is_share else row.part.layer
        if number is not None and number - 1 == last and _facts(folded[-1]) == _facts(row) and row.is_whole:
            folded[-1] = replace(_sum_of([folded[-1], row]), part=Part(f"layer {first}-{number}"))
        else:
            folded.append(row)
            first = number
        last = number
    return folded


def fold_experts(rows: Sequence[PartRow]) -> list[PartRow]:
    """Join experts with the same source and step into one row, ``layer 3 experts 0-4``."""
    facts = [_facts(row) if row.is_whole else number for number, row in enumerate(rows)]
    groups = group_shares([row.part for row in rows], facts)
    return [_sum_of([rows[at] for at in group]) for group in groups]


def _facts(row: PartRow) -> tuple[str, int, str | None, bool]:
    return row.source, row.step, row.only, row.is_whole


def _sum_of(rows: Sequence[PartRow]) -> PartRow:
    return replace(
        rows[0],
        part=Part(condense(row.part for row in rows)),
        num_bytes=sum(row.num_bytes for row in rows),
        num_tensors=sum(row.num_tensors for row in rows),
        setback=total_setback(row.setback for row in rows),
    )
