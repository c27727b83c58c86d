"""``llmtailor.json`` and the README of a composite: what it was made of."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmtailor.codes import Code
from llmtailor.core.report import SCHEMA_MANIFEST, PartRow, Report
from llmtailor.errors import PathIn, SourceError
from llmtailor.formats.json_files import read_json
from llmtailor.formats.names import check_name, is_count
from llmtailor.formats.partial.container import is_partial
from llmtailor.formats.partial.manifest import read_manifest as read_partial_manifest
from llmtailor.formats.trainer import CARD, MANIFEST

_LAYER = re.compile(r"layer ([0-9]+)")

"""Where the notice is about that says that weights and optimizer states of a part differ in source."""


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

    ``digests`` are those of the parts (see `io.checksums.part_digest`), ``checksums`` the CRC-32 of every file and what
    else was taken of it, by the name of the checksum; ``card`` is the README, so that an edited one can be told;
    ``merge`` is a digest of what was merged, so that the same merge can be told.
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


def read_part_steps(root: Path, name: str) -> dict[str, int]:
    """Return the step each part of a composite comes from; empty for a checkpoint that is none.

    A part that is split over several sources counts with its oldest. Raises SourceError for a damaged manifest.
    """
    if not (root / MANIFEST).is_file():
        return {}
    where = PathIn(name, MANIFEST)
    steps: dict[str, int] = {}
    rows = read_json(root / MANIFEST, where).get("parts")
    for row in rows if isinstance(rows, list) else [None]:
        if not isinstance(row, dict) or not is_count(row.get("step")):
            fix = "copy the checkpoint again; without the file, the true age of its parts is unknown"
            raise SourceError.at(
                where, "the manifest is damaged: it does not say the step of each part", fix, Code.MANIFEST
            )
        part, step = check_name(row.get("part"), "a part", where), row["step"]
        steps[part] = min(step, steps.get(part, step))
    return steps


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


def read_merge(root: Path) -> str | None:
    """Return the digest of the merge that has written a composite; None if that is not told."""
    try:
        found = read_json(root / MANIFEST, MANIFEST).get("merge")
    except SourceError:
        return None
    return found if isinstance(found, str) else None


@dataclass(frozen=True, slots=True)
class ManifestFacts:
    """What its manifest says of a checkpoint of ours. A partial one has no more than files: those of tensors."""

    global_step: int
    world_size: int
    steps: Mapping[int, float]
    """The optimizer's step by flat id."""
    files: Mapping[str, tuple[int, int]]
    """Path -> size in bytes and CRC-32, as they were written."""
    digests: Mapping[str, str]
    """Part -> digest of its states; see `io.checksums.part_digest`."""
    is_split: bool
    """Whether weights and optimizer states of a part come from different checkpoints, as asked for."""


def read_manifest(root: Path, name: str) -> ManifestFacts | None:
    """Read what a merge has noted of a composite, or a save of a partial checkpoint; None if this is neither.

    Raises SourceError for a damaged manifest.
    """
    if is_partial(root):  # it may carry the manifest of the composite that it was made of
        saved = read_partial_manifest(root, name)
        files = {bundle.path: (bundle.num_bytes, bundle.crc32) for bundle in saved.bundles}
        return ManifestFacts(saved.step, saved.world_size, {}, files, {}, is_split=False)
    if not (root / MANIFEST).is_file():
        return None
    where = PathIn(name, MANIFEST)
    content = read_json(root / MANIFEST, where)
    try:
        return ManifestFacts(
            global_step=int(content["global_step"]),
            world_size=int(content["world_size"]),
            steps={int(row["flat_id"]): float(row["step"]) for row in content["optimizer_steps"]},
            files={str(row["path"]): (int(row["num_bytes"]), int(row["crc32"], 16)) for row in content["files"]},
            digests={str(row["part"]): str(row["digest"]) for row in content["parts"] if row["digest"]},
            is_split=any(notice.get("code") == Code.SPLIT_WEIGHTS.value for notice in content["notices"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        fix = "copy the checkpoint again, or remove the file, if nothing shall be held against it"
        raise SourceError.at(where, f"the manifest is damaged ({error!r})", fix, Code.MANIFEST) from error
