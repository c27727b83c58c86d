"""What merges record of composites, in ``llmtailor.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.index import PartSteps
from llmtailor.codes import Code
from llmtailor.containers.json import check_name, is_count, read_json
from llmtailor.errors import PathIn, SourceError
from llmtailor.frameworks.files import MANIFEST
from llmtailor.model.parts import Part


def read_part_steps(root: Path, name: str) -> PartSteps:
    """Return the step of each part of a composite, and that of its masters; empty for another checkpoint.

    A part that is split over several sources gets the oldest step. Raises SourceError for a damaged manifest.
    """
    steps: dict[Part, int] = {}
    masters: dict[Part, int] = {}
    if not (root / MANIFEST).is_file():
        return PartSteps()
    where = PathIn(name, MANIFEST)
    content = read_json(root / MANIFEST, where)
    rows = content.get("parts")
    for row in rows if isinstance(rows, list) else [None]:
        if not isinstance(row, dict) or not is_count(row.get("step")):
            fix = "copy the checkpoint again; without the file, the true age of its parts is unknown"
            raise SourceError.at(
                where, "the manifest is damaged: it does not state the step of each part", fix, Code.MANIFEST
            )
        part, step = Part(check_name(row.get("part"), "a part", where)), row["step"]
        steps[part] = min(step, steps.get(part, step))
        stated: Any = row.get("masters_step")  # absent in older ones
        of_masters = int(stated) if is_count(stated) else step
        if row.get("only") is None:
            masters[part] = min(of_masters, masters.get(part, of_masters))
    unclear = content.get("unclear")  # absent if nothing is
    names = frozenset(map(str, unclear)) if isinstance(unclear, list) else frozenset[str]()
    return PartSteps(steps, masters, content.get("is_converted") is True, names)


def read_merge(root: Path) -> str | None:
    """Return the digest of the merge that wrote a composite; None if it is not stated."""
    try:
        found = read_json(root / MANIFEST, MANIFEST).get("merge")
    except SourceError:
        return None
    return found if isinstance(found, str) else None


@dataclass(frozen=True, slots=True)
class ManifestFacts:
    """The manifest's facts about an llmtailor checkpoint. A partial one has only files: those of tensors."""

    global_step: int
    world_size: int
    steps: Mapping[int, float]
    """The optimizer's step by sub-group"""
    files: Mapping[str, tuple[int, int | None]]
    """Path -> size in bytes and CRC-32, as written; a hard link has no CRC"""
    digests: Mapping[Part, str]
    """Part -> digest of its states; see `storage.checksums.part_digest`. Layers are whole."""
    is_split: bool
    """Whether weights and optimizer states of a part come from different checkpoints, as requested"""
    ranges: Mapping[str, Sequence[tuple[int, int, int]]] = field(default_factory=dict)
    """Start, stop and CRC-32 of what merges read of the files of a partial checkpoint"""
    carried: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """The other files of a partial checkpoint: path -> size and CRC-32"""
    links: Mapping[str, int] = field(default_factory=dict)
    """The files that were made as hard links, with their `containers.dcp.checksum_of_save`"""


def read_composite(root: Path, name: str) -> ManifestFacts | None:
    """Return what a merge recorded of a composite; None for another checkpoint. Raises SourceError for a damaged
    manifest."""
    if not (root / MANIFEST).is_file():
        return None
    where = PathIn(name, MANIFEST)
    content = read_json(root / MANIFEST, where)
    try:
        return ManifestFacts(
            global_step=int(content["global_step"]),
            world_size=int(content["world_size"]),
            steps={int(row["flat_id"]): float(row["step"]) for row in content["optimizer_steps"]},
            files={
                str(row["path"]): (int(row["num_bytes"]), None if "linked" in row else int(row["crc32"], 16))
                for row in content["files"]
            },
            digests={Part(str(row["part"])).whole: str(row["digest"]) for row in content["parts"] if row["digest"]},
            is_split=any(notice.get("code") == Code.SPLIT_WEIGHTS.value for notice in content["notices"]),
            links={str(row["path"]): int(row["linked"]["checksum"], 16) for row in content["files"] if "linked" in row},
        )
    except (KeyError, TypeError, ValueError) as error:
        fix = "copy the checkpoint again; without the file, nothing is compared with it"
        raise SourceError.at(where, f"the manifest is damaged ({error!r})", fix, Code.MANIFEST) from error
