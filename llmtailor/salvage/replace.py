"""Moves a salvaged composite to where an auto-resume looks, and moves aside what that must not find.

This takes several renames, which are first recorded in a file in the run's folder: if the process is killed between two
of them, the next one can tell the folders apart. Folders are identified by their files, not by their names.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.index import DEEPSPEED, CheckpointIndex
from llmtailor.checkpoint.step_names import ASIDE, DAMAGED, REPLACED, step_of
from llmtailor.containers.json import is_path_below, read_json
from llmtailor.copying.staging import put_in_place, remove_left_over
from llmtailor.errors import Problem, SourceError, StorageError, TargetError, some
from llmtailor.formats.registry import display_name
from llmtailor.frameworks.files import LATEST, tag_in
from llmtailor.runs.folder import FolderKind, RunFolder
from llmtailor.salvage.plan import Salvage
from llmtailor.storage.local import disk_errors, fsync_folder, list_files, replace_durably

RECORD = ".llmtailor-replacing"
SETTLED_S = 60.0
"""Seconds without a change after which no training is writing a checkpoint; it may pause between two files"""
_PREFIX = re.compile(f"({'|'.join(ASIDE)})?")
_SCHEMA = "llmtailor.replacing/1"


@dataclass(frozen=True, slots=True)
class Replacement:
    """The renames to make, all in the run's folder. Nothing is deleted."""

    new: Path
    """The folder that becomes `target`, or `target` itself if nothing was composed"""
    target: Path
    """From which to resume: ``checkpoint-STEP``, or the older checkpoint"""
    aside: Mapping[Path, Path]
    """Folder -> its new name, which does not begin with ``checkpoint-``: the Trainer's rotation deletes those."""
    latest: tuple[str, str] | None = None
    """The current and the new tag in DeepSpeed's file `LATEST` in the run's folder; None if it stays"""


def plan_replacement(salvage: Salvage) -> Replacement:
    """Return the renames. Raises TargetError if a name is taken."""
    run, base, composition = salvage.run, salvage.base, salvage.composition
    target = base.index.root if composition is None else run / f"checkpoint-{base.step}"
    aside = {}
    for entry in RunFolder(run).entries(FolderKind.FULL):
        path = entry.path
        if entry.step > base.step or (entry.step == base.step and composition is not None):
            whole = any(source.is_whole and source.index.root == path for source in salvage.sources)
            aside[path] = path.with_name(f"{REPLACED if whole else DAMAGED}{path.name}")
    for name in aside.values():
        if name.exists():
            fix = "move it away, or omit --replace and name the output when you resume"
            raise TargetError.at(name, "the name is taken by an earlier --replace", fix)
    tag = base.index.zero.tag
    latest = _point_at(base.index, run, tag if target.name == tag else f"{target.name}/{tag}")
    return Replacement(target if composition is None else composition.out, target, aside, latest)


def seen_in(run: Path) -> dict[Path, str]:
    """Return fingerprints of a run's full checkpoints for `check_settled`; call this before reading them."""
    return {entry.path: _fingerprint(entry.path) for entry in RunFolder(run).entries(FolderKind.FULL)}


def check_settled(
    replacement: Replacement, seen: Mapping[Path, str], on_wait: Callable[[str], None] = lambda what: None
) -> None:
    """Raise TargetError if a checkpoint that would be moved aside has changed since it was ``seen``.

    A training may be writing it, so one that was last changed less than `SETTLED_S` seconds ago is watched for as long.
    """
    age = time.time() - max(map(_last_change, replacement.aside), default=0)
    if 0 <= age < SETTLED_S:
        names = some(folder.name for folder in replacement.aside)
        on_wait(
            f"{names}: changed {age:.0f} s ago; watching for {SETTLED_S - age:.0f} s whether a training writes there"
        )
        time.sleep(SETTLED_S - age)
    if changed := [folder for folder in replacement.aside if _fingerprint(folder) != seen.get(folder)]:
        fix = "wait until the training has saved it, or stop the training; then rerun the command"
        raise TargetError(
            Problem(display_name(folder), "it is being written, so it is not moved aside", fix) for folder in changed
        )


def _last_change(path: Path) -> float:
    times = [path.lstat().st_ctime]
    for where, folders, names in os.walk(path):
        times += [(Path(where) / name).lstat().st_ctime for name in (*folders, *names)]
    return max(times)


def _point_at(base: CheckpointIndex, run: Path, tag: str) -> tuple[str, str] | None:
    """Return the change of ``latest`` where the run's checkpoints are tags of one folder; None if there is none."""
    path = run / LATEST
    if base.framework != DEEPSPEED or not path.is_file():
        return None
    current = tag_in(path)
    return None if current == tag else (current, tag)


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
        latest = tuple(map(str, record["latest"])) if record.get("latest") else None
        if latest is not None and (len(latest) != 2 or not is_path_below(latest[1])):
            raise ValueError(latest)
        names = {target, run / _name(record["new"]["from"]), *(run / _name(row["from"]) for row in record["aside"])}
    except (KeyError, TypeError, ValueError, SourceError) as error:
        fix = "check which folder is which, then move this file out of the run's folder"
        raise StorageError.at(path, "the record of interrupted renames is damaged", fix) from error
    now = {_fingerprint(folder): folder for folder in (*names, *aside.values()) if folder.exists()}
    left = {now[files]: to for files, to in aside.items() if files in now and now[files] != to}
    source = now.get(new, target)
    if source != target and target.exists() and target not in left:
        source = target  # another checkpoint has been put there
    if source == target:
        left.pop(target, None)
    return Replacement(source, target, left, latest)


def put_salvaged_in_place(replacement: Replacement) -> None:
    """Make the renames; a crash between two of them leaves every folder complete, under its old or new name.

    `unfinished_replacement` then returns the rest. Raises TargetError or StorageError.
    """
    run = replacement.target.parent
    with disk_errors(run, "can't remove leftovers of a merge"):
        remove_left_over(replacement.new)
    record = {
        "schema": _SCHEMA,
        "new": {"from": replacement.new.name, "files": _fingerprint(replacement.new)},
        "target": replacement.target.name,
        "aside": [
            {"from": folder.name, "to": name.name, "files": _fingerprint(folder)}
            for folder, name in replacement.aside.items()
        ],
        "latest": replacement.latest,
    }
    replace_durably(run / RECORD, json.dumps(record, indent=2).encode() + b"\n")
    fsync_folder(run)
    put_in_place(replacement.new, replacement.target, replacement.aside)
    _rewrite_latest(run, replacement.latest)
    (run / RECORD).unlink()
    fsync_folder(run)


def _rewrite_latest(run: Path, change: tuple[str, str] | None) -> None:
    """Rewrite DeepSpeed's file, unless a training has done so in the meantime. Raises StorageError."""
    path = run / LATEST
    if change is None or not path.is_file() or tag_in(path) != change[0]:
        return
    replace_durably(path, change[1].encode())
    fsync_folder(run)


def _name(value: Any) -> str:
    """Return a valid name in a record: that of a folder in the run's folder. Raises ValueError for anything else."""
    is_name = isinstance(value, str) and Path(value).name == value
    if not is_name or step_of(Path(_PREFIX.sub("", value, count=1))) is None:
        raise ValueError(value)
    return str(value)


def _fingerprint(folder: Path) -> str:
    """Return a digest of the names, sizes and times of a folder's files, which a rename does not change."""
    files = list_files(folder)
    if folder.is_file():
        status = folder.stat()
        files[""] = (status.st_size, status.st_mtime_ns)
    return hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()
