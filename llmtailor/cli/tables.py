"""Reports as plain text, for terminals and log files."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from llmtailor.checkpoint.optimizer import count_ranks
from llmtailor.compose.report import Report, fold_layers, total_setback
from llmtailor.errors import Problem, about, counted, printable, ranges, size
from llmtailor.findings import folded
from llmtailor.frameworks.files import adapters_among
from llmtailor.model.parts import condense, group_shares
from llmtailor.model.roles import MASTER

if TYPE_CHECKING:
    from llmtailor.runs.retention import Age, StepAge
    from llmtailor.salvage.plan import Salvage
    from llmtailor.verify.inspect import Inspection, PartFacts


_USUAL = ("elementwise", "scalar")
"""Kinds of states that need no mention"""


def parts_text(report: Report) -> str:
    setback = total_setback(row.setback for row in report.parts)
    parts = [
        (
            row.label,
            row.source,
            row.steps,
            _staleness(row.staleness),
            *(() if setback is None else (about(row.setback or 0.0),)),
            size(row.num_bytes),
        )
        for row in fold_layers(report.parts)
    ]
    ranks = count_ranks(report.mesh)
    head = f"{report.recipe} -> {report.out}\nresumes at step {report.global_step} on {ranks}\n"
    columns = ["part", "source", "step", "staleness", "bytes"]
    if {row.source for row in report.parts} == {report.base} and not any(row.staleness for row in report.parts):
        return f"{head}every part is from {report.base}, which is complete: nothing is older\n"
    if setback is not None:
        head += f"estimated setback by stale parts: {about(setback)} steps\n"
        columns.insert(4, "setback")
    return head + "\n" + table(columns, parts, right=range(2, len(columns)))


def plan_text(report: Report) -> str:
    """Return the whole plan of a merge: parts, sources, files, bytes and free space."""
    sources = [
        (row.name + (" (base)" if row.is_base else ""), row.global_step, size(row.num_bytes)) for row in report.sources
    ]
    files = [(row.path, size(row.num_bytes)) for row in report.files]
    return "\n".join(
        [
            parts_text(report),
            "",
            table(("source", "step", "bytes taken"), sources, right=(1, 2)),
            "",
            table(("file", "bytes"), files, right=(1,)),
            "",
            f"{len(report.files)} files, {size(report.num_bytes)} ({report.num_bytes:,} bytes); "
            f"{size(report.needed_bytes)} free space needed, {size(report.free_bytes)} available",
        ]
    )


def salvage_text(salvage: Salvage) -> str:
    """Return which checkpoint each part comes from, and why not from the newest."""
    from llmtailor.salvage.plan import fold, rows

    cells = [(row.label, row.source, row.step, _staleness(row.steps_back), row.why) for row in fold(rows(salvage))]
    base = salvage.base
    head = f"schedule, random number states and trainer state from {base.name}: resumes at step {base.step}\n\n"
    return head + table(("part", "source", "step", "steps back", "why"), cells, right=(2, 3))


def inspection_text(content: Inspection) -> str:
    is_adapter = adapters_among(file["path"] for file in content["files"])
    tensors = content["num_tensors"]
    unsaved = "those of an adapter" if is_adapter else "not saved"
    counted_steps = ", ".join(f"{step:g}" for step in content["optimizer_steps"])
    lines = [
        f"{content['name']}: {content['format']} (ZeRO stage {content['zero_stage']}), step {content['global_step']}, "
        f"saved by {count_ranks(content['mesh'])}"
        + ("" if content["framework"] in ("trainer", "dcp") else f", resumed by {content['framework']}"),
        f"trained in {content['precision']}, weights {', '.join(content['weights_dtype']) or unsaved}, "
        f"optimizer {content['optimizer']}"
        + (f" at step {counted_steps}" if counted_steps else "")
        + (f", {counted(content['skipped_steps'], 'step')} skipped" if content["skipped_steps"] else ""),
        f"{counted(content['num_layers'], 'layer')}, {content['num_params']:,} params in {tensors['trainable']} "
        f"trainable and {tensors['frozen']} frozen tensors, {counted(tensors['buffer'], 'buffer')}",
    ]
    unusual = {name: kind for name, kind in content["optimizer_states"].items() if kind not in _USUAL}
    lines += [f"optimizer states: {', '.join(f'{name} ({kind})' for name, kind in unusual.items())}"] if unusual else []
    lines += [f"tied: {name} is {stored}" for name, stored in content["tied"].items()]
    if missed := [part for part in content["parts"] if part["updates_missed"]]:
        which, most = condense(part["part"] for part in missed), max(part["updates_missed"] for part in missed)
        lines.append(f"second moments lack up to {counted(most, 'update')} that Adam counts, in {which}")
    groups = [
        (
            number,
            group["num_params"],
            ranges(group["flat_ids"]) or "none",
            *(str(group.get(key, "")) for key in ("lr", "weight_decay", "betas")),
        )
        for number, group in enumerate(content["param_groups"])
    ]
    listed = content["parts"]
    facts = [
        (part["step"], part["masters_step"], *part["optimizer_steps"], part["held"], _has_masters(part))
        for part in listed
    ]
    has_newer = any(part["masters_step"] for part in listed)
    parts = [
        (
            condense(part["part"] for part in group),
            sum(part["num_tensors"] for part in group),
            group[0]["masters_step"] or group[0]["step"],
            *((group[0]["step"],) if has_newer else ()),
            ", ".join(f"{step:g}" for step in group[0]["optimizer_steps"]),
            _held(group),
        )
        for at in group_shares([part["part"] for part in listed], facts)
        for group in [[listed[number] for number in at]]
    ]
    head = ("part", "tensors", "step", *(("moments at",) if has_newer else ()), "optimizer step", "bytes")
    lines += [
        "",
        table(("group", "params", "sub-groups", "lr", "weight decay", "betas"), groups, right=(0, 1)),
        "",
        table(head, parts, right=range(1, len(head))),
        "",
        f"{len(content['files'])} files, {size(content['num_bytes'])} ({content['num_bytes']:,} bytes)",
    ]
    noted = folded(Problem(item["where"] or "", item["what"] or "", item["fix"] or "") for item in content["findings"])
    findings = [f"note: {problem.where}: {problem.what} ({problem.fix})" for problem in noted]
    return "\n".join(lines + (findings or ["nothing is missing or unusual"]))


def table(head: Sequence[str], rows: Sequence[Sequence[object]], right: Collection[int] = ()) -> str:
    """Return rows in columns as wide as their widest cell; columns in ``right`` are right-aligned."""
    cells = [tuple(head), *(tuple(printable(str(cell)) for cell in row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def steps_text(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps)) or "none"


def ages_text(before: Sequence[int], ages: Sequence[StepAge]) -> str:
    """Return which steps can be composed, and how old their parts are, now and afterwards."""
    rows = [(age.step, _age(age.now), _age(age.afterwards)) for age in ages]
    lines = [
        f"steps that can be composed now:        {steps_text(before)}",
        f"steps that can be composed afterwards: {steps_text([age.step for age in ages])}",
    ]
    if ages:
        lines += ["", table(("step", "oldest parts now", "oldest parts afterwards"), rows, right=(0,)), ""]
    return "\n".join(lines)


def _age(age: Age | None) -> str:
    if age is None:
        return "can't be composed"
    what = f"{age.only} of " if age.only else ""
    return f"{age.steps_back} steps back: {what}{condense(age.parts)}" if age.steps_back else "all of that step"


def _staleness(steps: int) -> str:
    return f"{-steps} newer" if steps < 0 else str(steps)


def _has_masters(part: PartFacts) -> bool:
    return MASTER in part["num_bytes_by_kind"]


def _held(group: Sequence[PartFacts]) -> str:
    if not (group[0]["held"] or _has_masters(group[0])):
        return "not held"
    return size(sum(part["num_bytes"] for part in group)) + ("" if group[0]["held"] else " without moments")
