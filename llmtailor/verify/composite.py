"""Is a composite still what the merge has written? Pure."""

from __future__ import annotations

from collections.abc import Iterator

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.codes import Code
from llmtailor.errors import PathIn
from llmtailor.findings import ERROR, WARNING, Finding
from llmtailor.formats.manifest import ManifestFacts
from llmtailor.formats.trainer import MANIFEST, OPTIMIZER, is_weight_file

_COPY_AGAIN = "copy the composite again, or merge again"
_ON_PURPOSE = "nothing, if you changed it yourself"


def check_manifest(index: CheckpointIndex, manifest: ManifestFacts) -> Iterator[Finding]:
    """Compare a composite with its manifest: counters, Adam's steps, and the size of every file."""
    where = PathIn(index.name, MANIFEST)
    for what, have, written in (
        ("global_step", index.global_step, manifest.global_step),
        ("the world size", index.world_size, manifest.world_size),
    ):
        if have != written:
            yield Finding(
                where, f"{what} was {written} when it was written, and is {have}", _COPY_AGAIN, Code.MANIFEST, ERROR
            )
    for flat_id, flat in enumerate(index.sub_groups):
        if flat.step != (written_step := manifest.steps.get(flat_id, flat.step)):
            what = f"Adam's step of flat id {flat_id} was {written_step:g} when it was written, and is {flat.step:g}"
            yield Finding(where, what, _COPY_AGAIN, Code.MANIFEST, ERROR)
    for path, (num_bytes, _) in manifest.files.items():
        fact = index.files.get(path)
        matters = is_resumed_from(path, index)
        if fact is None:
            severity, fix = (ERROR, _COPY_AGAIN) if matters else (WARNING, _ON_PURPOSE)
            yield Finding(
                PathIn(index.name, path), "the file is missing since it was written", fix, Code.FILE_MISSING, severity
            )
        elif fact.num_bytes != num_bytes:
            severity, fix = (ERROR, _COPY_AGAIN) if matters else (WARNING, _ON_PURPOSE)
            what = f"it had {num_bytes:,} bytes when it was written, and has {fact.num_bytes:,}"
            yield Finding(PathIn(index.name, path), what, fix, Code.MANIFEST, severity)


def is_resumed_from(path: str, index: CheckpointIndex) -> bool:
    """Whether a resume, or in its stead a composite of a partial checkpoint, takes states from a file."""
    if index.is_partial:
        return path.endswith(".safetensors")
    return "/" in path or path == OPTIMIZER or (index.stage == 0 and is_weight_file(path))
