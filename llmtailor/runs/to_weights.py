"""Replaces a full checkpoint by one without optimizer states: its weights, config and tokenizer.

Files of weights stay as they are. A DCP folder has weights and optimizer states in the same files, so the weights are
written to new ones.
"""

from __future__ import annotations

import filecmp
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from llmtailor.checkpoint.index import DCP, FSDP, CheckpointIndex
from llmtailor.checkpoint.layout import Plan
from llmtailor.checkpoint.sources import Sources
from llmtailor.compose.fill import plan_composite
from llmtailor.containers.dcp import METADATA
from llmtailor.engine.copy import Context, Moved
from llmtailor.engine.moving import Clone
from llmtailor.engine.pool import Stop
from llmtailor.engine.space import check_space, space_for
from llmtailor.errors import VerificationError
from llmtailor.formats.clients import is_accelerates
from llmtailor.formats.dcp.read import MODEL_FOLDER
from llmtailor.formats.dcp.write import lay_out_model
from llmtailor.formats.rng import is_rng_file
from llmtailor.formats.trainer import OPTIMIZER, SCALER, SCHEDULER
from llmtailor.formats.zero.files import LATEST, LATEST_UNIVERSAL
from llmtailor.runs.folder import Kind, freed_bytes, link_or_copy, remove_replaced, staged
from llmtailor.runs.to_partial import BUG, check_crcs, check_unchanged, write_files
from llmtailor.storage.local import fsync_folder, replace_folder

_SCRIPT = re.compile(r"zero_to_\w+\.py")
_OF_A_RESUME = (LATEST, LATEST_UNIVERSAL, OPTIMIZER, SCHEDULER, SCALER)


def kept_files(index: CheckpointIndex) -> list[str]:
    """Return the files that stay as they are: all but the states that only a resume needs."""
    return [path for path in index.files if _is_kept(path, index)]


def _is_kept(path: str, index: CheckpointIndex) -> bool:
    if "/" in path:
        return index.family == FSDP and path.startswith(f"{MODEL_FOLDER}/")
    if index.family == DCP and (path == METADATA or path.endswith(".distcp")):
        return False  # its weights are written to other files
    return path not in _OF_A_RESUME and not (is_rng_file(path) or is_accelerates(path) or _SCRIPT.fullmatch(path))


def plan_weights(index: CheckpointIndex) -> Plan:
    """Return the plan of the files to be written: none, but for a DCP folder."""
    if index.family != DCP:
        return Plan((), ())
    names = dict.fromkeys([*index.params, *index.tied, *(state.param for state in index.held)], 0)
    return plan_composite(lay_out_model(index), [index], Sources(names), 0)


def freed_by_reduction(index: CheckpointIndex) -> int:
    """Return the bytes that `reduce_to_weights` frees."""
    kept = {*kept_files(index)}
    return freed_bytes(index.root / path for path in index.files if path not in kept) - plan_weights(index).num_bytes


def reduce_to_weights(
    index: CheckpointIndex,
    stop: Stop,
    clone: Clone = "never",
    on_progress: Callable[[int], None] = lambda n: None,
) -> Moved:
    """Replace a full checkpoint with one without optimizer states; files are linked where possible, else copied.

    Return how the bytes of these files got there.

    Raises VerificationError if the weights don't read back, SourceError if it changes in the meantime, StorageError,
    Interrupted, or OSError. It is complete until it is replaced.
    """
    root, plan = index.root, plan_weights(index)
    staging = staged(root, Kind.THINNING)
    check_space(root, space_for(plan, clone))

    try:
        context = Context(facts=[index.files], on_progress=on_progress, stop=stop, clone=clone)
        crcs, moved = write_files(plan, staging, context)
        for path in kept_files(index):
            (staging / path).parent.mkdir(exist_ok=True)
            link_or_copy(root / path, staging / path)
        for folder in {(staging / path).parent for path in (*kept_files(index), *crcs)} | {staging}:
            fsync_folder(folder)
        check_crcs(staging, crcs, stop, on_progress)
        if lost := [path for path in kept_files(index) if not _is_same(root / path, staging / path)]:
            raise VerificationError.at(index.name, f"{lost[0]} would be lost", BUG)
        check_unchanged(index)
        stop.check()
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    old = staged(root, Kind.OLD)
    replace_folder(staging, root, old)
    fsync_folder(root.parent)
    remove_replaced(root, now_at=staging if staging.exists() else old)
    return moved


def _is_same(one: Path, other: Path) -> bool:
    return one.samefile(other) or filecmp.cmp(one, other, shallow=False)
