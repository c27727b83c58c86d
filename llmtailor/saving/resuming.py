"""What a training goes on from: the saver's record of saves, and what an attempt gives up that resumes earlier."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.lineage import Ledger, SaveRecord
from llmtailor.containers.json import read_json
from llmtailor.errors import SourceError, TargetError
from llmtailor.formats.attempt_mark import read_mark, stated_attempt
from llmtailor.formats.partial.manifest import read_manifest
from llmtailor.formats.partial.read import is_partial
from llmtailor.formats.trainer import MANIFEST, TRAINER_STATE
from llmtailor.runs.attempts import Attempt
from llmtailor.runs.folder import Folder, list_checkpoints
from llmtailor.runs.retention import lost_parts
from llmtailor.saving.report import give_up_after
from llmtailor.saving.training import Training

logger = logging.getLogger("llmtailor.saving")


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where an attempt begins."""

    ledger: Ledger
    """Of the new attempt, before its first save; empty but for its past if there is no record to go on from"""
    before: Path | None
    """The partial checkpoint of the step; None if there is none to go on from"""


def resume(
    folder: Folder, training: Training, step: int, lineage: str, trainer_state: Mapping[str, Any] | None
) -> Resumed:
    """Begin an attempt at a step: record it, and move what it gives up aside.

    ``trainer_state`` is the content of the ``trainer_state.json`` of what was resumed from; None if that is not known,
    then it is taken to be the run's newest state of that step. Raises TargetError if training starts from scratch
    where another run has saved, SourceError for a damaged record of attempts, StorageError.
    """
    if swept := folder.sweep():
        logger.warning("removed %s: these saves did not finish", ", ".join(swept))
    if step == 0 and (there := folder.complete()):
        what = f"another run has saved here, up to step {max(there)}"
        fix = "resume from it (llmtailor merge --run), or give this run another output_dir, or remove the folder"
        raise TargetError.at(folder.path, what, fix)
    resumed = _find(folder, training, step, lineage, trainer_state)
    begin_attempt(folder, resumed.ledger, step)
    _set_aside(folder, step, resumed.before)
    give_up_after(folder.path, step)
    return resumed


def begin_attempt(folder: Folder, ledger: Ledger, step: int) -> None:
    """Record that an attempt begins. Raises SourceError or StorageError."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    folder.record(Attempt(ledger.lineage, step, ledger.history, now))


def _find(
    folder: Folder, training: Training, step: int, lineage: str, trainer_state: Mapping[str, Any] | None
) -> Resumed:
    path = folder.at(step)
    stated = read_mark(trainer_state, step) if trainer_state is not None else None
    if not is_partial(path) or not _is_same_save(path, step, trainer_state):
        if trainer_state is None:
            stated = stated_attempt(folder.path.parent / f"checkpoint-{step}")
        history = {**stated.history, stated.lineage: step} if stated else {}
        return Resumed(Ledger(lineage, history), None)
    manifest = read_manifest(path, path.name)
    ledger = Ledger.from_json(manifest.ledger, path.name)
    resumed = ledger.resumed(lineage, step)
    if dict(manifest.params) != dict(training.params) or dict(manifest.tied) != dict(training.tied):
        logger.warning("%s is of another model or of other trained params; the next save is complete", path.name)
        return Resumed(Ledger(lineage, resumed.history), path)
    lost = lost_parts(ledger, read_records(folder))
    return Resumed(resumed.without(lost), path)


def _is_same_save(path: Path, step: int, trainer_state: Mapping[str, Any] | None) -> bool:
    """Whether the partial checkpoint of the step is of the attempt that was resumed from."""
    if trainer_state is None:
        return True
    try:
        saved = read_json(path / TRAINER_STATE, f"{path.name}/{TRAINER_STATE}")
    except SourceError:
        return False
    return read_mark(saved, step) == read_mark(trainer_state, step)


def _set_aside(folder: Folder, step: int, before: Path | None) -> None:
    """Move aside the partial checkpoints and composites that are given up; name full ones of the Trainer's."""
    later = [path for number, path in folder.complete().items() if number > step or (number == step and path != before)]
    run = folder.path.parent
    full = [path for number, path in sorted(list_checkpoints(run).items()) if number > step]
    composites = [path for path in full if (path / MANIFEST).is_file() and not path.is_symlink()]
    folder.set_aside([*later, *composites])
    if moved := [path.name for path in (*later, *composites)]:
        logger.warning("resuming at step %d: %s are given up, and have moved aside", step, ", ".join(moved))
    if left := [path.name for path in full if path not in composites]:
        what = "are of an attempt that is given up; llmtailor passes over them, resume_from_checkpoint=True would not"
        logger.warning("resuming at step %d: %s %s", step, ", ".join(left), what)


def read_records(folder: Folder) -> list[SaveRecord]:
    """Return what the folder's partial checkpoints say that they hold; one that is damaged gives nothing."""
    records = []
    for manifest in folder.manifests():
        try:
            records.append(SaveRecord.from_json(manifest.ledger, ""))
        except SourceError:
            continue
    return records
