"""Reads an output back before it is published, and an outline of it (`prove`) before any state is moved."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.layout import Bytes, Copy, FileLayout, Segment
from llmtailor.codes import Code
from llmtailor.compose.manifest import make_manifest
from llmtailor.compose.plan import MergePlan
from llmtailor.containers.json import MAX_BYTES
from llmtailor.errors import PathIn, Problem, SourceError, VerificationError
from llmtailor.findings import ERROR, Finding
from llmtailor.formats.registry import display_name
from llmtailor.frameworks.files import MANIFEST
from llmtailor.storage.local import open_source
from llmtailor.verify.verify import verify_checkpoint

_INHERITED = "the output would not be resumable, because its sources have these errors"
_MEND = "mend the sources, use others, or publish the output as it is with --allow-errors"


def _kind(finding: Finding) -> tuple[object, ...]:
    """Return what the same finding of the same file has in common in a source and in the composite."""
    return finding.code, finding.severity, finding.path, finding.params


def check_written(composition: MergePlan, staging: Path) -> None:
    """Verify the output like any other checkpoint, and compare it with the plan.

    Errors that it has from its sources, which were reported as notices, are refused unless they are allowed.
    """
    wanted, out = composition.indexes[composition.base], display_name(composition.out)
    known = {_kind(notice) for notice in composition.report.notices if isinstance(notice, Finding)}
    try:
        verdict = verify_checkpoint(staging, name=out)
    except SourceError as error:
        raise VerificationError(error.problems) from error
    errors, is_allowed = verdict.of_severity(ERROR), composition.options.allow_errors
    # a loop that sets learning rates itself has saved another rate than its schedule's, and sets it again
    passed = {kind for kind in known if is_allowed or kind[0] is Code.SCHEDULER_RATE}
    if new := [finding for finding in errors if _kind(finding) not in passed]:
        inherited = [finding for finding in new if _kind(finding) in known]
        raise VerificationError([*new, *([Problem("--allow-errors", _INHERITED, _MEND)] if inherited else [])])
    written = verdict.index
    assert written is not None, "a checkpoint without an index has errors"
    wanted_groups = composition.target.sub_groups
    pairs = zip(written.groups, composition.target.groups, strict=False)
    if (
        written.params != wanted.params
        or (written.world_size, written.tp) != (composition.target.world_size, composition.target.tp)
        or [(one.params, one.step) for one in written.sub_groups] != [(one.params, one.step) for one in wanted_groups]
        or not _is_equal([one.scalars for one in written.sub_groups], [one.scalars for one in wanted_groups])
        or len(written.groups) != len(composition.target.groups)
        # a format may add hyperparameters that its loader asks for
        or any({**have.hyper, **want.hyper} != have.hyper for have, want in pairs)
        or any(written.files[file.path].num_bytes != file.num_bytes for file in composition.plan.files)
    ):
        raise VerificationError.at(
            out, "the output does not read back as planned", "this is a bug in llmtailor: please report it"
        )


def _is_equal(one: Any, other: Any) -> bool:
    """Return whether two values are equal, and NaN where the other has it."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    return bool(one == other) or (one != one and other != other)


def prove(composition: MergePlan) -> None:
    """Write the outline of a composite into a temporary folder, and read it back like the composite.

    The files have their full size, with holes where states will be, so they take as much space as headers and pickles
    do. Raises what `write` raises if the output does not read back, and OSError if the folder can't be written.
    """
    with tempfile.TemporaryDirectory(prefix="llmtailor-") as name:
        folder = Path(name)
        for file in composition.plan.files:
            _outline(folder / file.path, file, composition.indexes)
        manifest = make_manifest(composition, (), {}, b"", "", "")
        (folder / MANIFEST).write_text(json.dumps(manifest))
        check_written(composition, folder)


def _outline(path: Path, file: FileLayout, sources: Sequence[CheckpointIndex]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    at = 0
    with path.open("wb") as out:
        for piece in file.pieces:
            if known := _known(piece, sources):
                out.seek(at)
                out.write(known)
            at += piece.num_bytes
        out.truncate(at)


def _known(piece: Segment, sources: Sequence[CheckpointIndex]) -> bytes:
    """Return the bytes of a piece, nothing for those of states, which a reader does not look at."""
    if isinstance(piece, Bytes):
        return piece.data
    if isinstance(piece, Copy) and piece.state is None and piece.num_bytes <= MAX_BYTES:  # files other than the states
        index, extent = sources[piece.source], piece.extent
        with open_source(index.root / extent.path, PathIn(index.name, extent.path)) as source:
            return bytes(source.read(extent.start, extent.stop))
    return b""
