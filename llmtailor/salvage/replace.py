"""Moves a salvaged composite to where the Trainer's auto-resume looks, and moves aside what it must not find.

This takes several renames, which are first recorded in a file in the run's folder: if the process is killed between two
of them, the next one can tell the folders apart. Folders are identified by their files, not by their names.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtailor.containers.json import read_json
from llmtailor.engine.placing import put_in_place
from llmtailor.engine.staging import remove_left_over
from llmtailor.errors import SourceError, StorageError, TargetError
from llmtailor.runs.folder import RunFolder
from llmtailor.salvage.plan import Salvage
from llmtailor.storage.listing import list_files
from llmtailor.storage.local import fsync_folder, replace_durably

RECORD = ".llmtailor-replacing"
_NAME = re.compile(r"(salvaged-|damaged-|replaced-)?checkpoint-[0-9]+")
_SCHEMA = "llmtailor.replacing/1"


@dataclass(frozen=True, slots=True)
class Replacement:
    """The renames to make, all in the run's folder. Nothing is deleted."""

    new: Path
    """The folder that becomes `target`, or `target` itself if nothing was composed"""
    target: Path
    """``checkpoint-STEP``, from which to resume"""
    aside: Mapping[Path, Path]
    """Folder -> its new name, which does not begin with ``checkpoint-``: the Trainer's rotation deletes those."""


def plan_replacement(salvage: Salvage) -> Replacement:
    """Return the renames. Raises TargetError if a name is taken."""
    run, base = salvage.run, salvage.base
    target = run / f"checkpoint-{base.step}"
    aside = {}
    for step, path in RunFolder(run).full().items():
        if step > base.step or (step == base.step and salvage.composition is not None):
            whole = any(holder.is_whole and holder.index.root == path for holder in salvage.holders)
            aside[path] = path.with_name(f"{'replaced' if whole else 'damaged'}-{path.name}")
    for name in aside.values():
        if name.exists():
            fix = "move it away, or omit --replace and name the output when you resume"
            raise TargetError.at(name, "the name is taken by an earlier --replace", fix)
    return Replacement(target if salvage.composition is None else salvage.composition.out, target, aside)


def unfinished_replacement(run: Path) -> Replacement | None:
    """Return the remaining renames of an interrupted replacement whose folders are unchanged.

    Raises StorageError if its record can't be read.
    """
    path = run / RECORD
    if not path.exists():
        return None
    try:
        record = read_json(path, str(path))
        new, target = str(record["new"]["files"]), run / _name(record["target"])
        aside = {str(row["files"]): run / _name(row["to"]) for row in record["aside"]}
        names = {target, run / _name(record["new"]["from"]), *(run / _name(row["from"]) for row in record["aside"])}
    except (KeyError, TypeError, ValueError, SourceError) as error:
        fix = "check which folder is which, then remove this file"
        raise StorageError.at(path, "the record of interrupted renames is damaged", fix) from error
    now = {_fingerprint(folder): folder for folder in (*names, *aside.values()) if folder.is_dir()}
    left = {now[files]: to for files, to in aside.items() if files in now and now[files] != to}
    source = now.get(new, target)
    if source != target and target.exists() and target not in left:
        source = target  # another checkpoint has been put there
    if source == target:
        left.pop(target, None)
    return Replacement(source, target, left)


def put_salvaged_in_place(replacement: Replacement) -> None:
    """Make the renames; a crash between two of them leaves every folder complete, under its old or new name.

    `unfinished_replacement` then returns the rest. Raises TargetError or StorageError.
    """
    run = replacement.target.parent
    try:
        remove_left_over(replacement.new)
    except OSError as error:
        raise StorageError.at(run, f"can't remove what a merge left: {error.strerror}", "check the disk") from error
    record = {
        "schema": _SCHEMA,
        "new": {"from": replacement.new.name, "files": _fingerprint(replacement.new)},
        "target": replacement.target.name,
        "aside": [
            {"from": folder.name, "to": name.name, "files": _fingerprint(folder)}
            for folder, name in replacement.aside.items()
        ],
    }
    replace_durably(run / RECORD, json.dumps(record, indent=2).encode() + b"\n")
    fsync_folder(run)
    put_in_place(replacement.new, replacement.target, replacement.aside)
    (run / RECORD).unlink()
    fsync_folder(run)


def _name(value: Any) -> str:
    """Return a valid name in a record: that of a folder in the run's folder. Raises ValueError for anything else."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError(value)
    return value


def _fingerprint(folder: Path) -> str:
    """Return a digest of the names, sizes and times of a folder's files, which a rename does not change."""
    return hashlib.sha256(repr(sorted(list_files(folder).items())).encode()).hexdigest()
