"""The folder of a training run: its contents, one writer at a time, and partial checkpoints complete or absent.

::

    RUN/checkpoint-100                              a full checkpoint of the Trainer, or a composite
    RUN/step-100, RUN/step_100, RUN/step=100        a full checkpoint of a loop, such as torchtitan's
    RUN/global_step100                              a full checkpoint of a DeepSpeed engine in a loop: a tag folder
    RUN/epoch=1-step=100.ckpt                       a full checkpoint of Lightning, a file or, with DeepSpeed, a folder
    RUN/abandoned-checkpoint-200                    a composite of an abandoned attempt
    RUN/.NAME.llmtailor-staging                     an output that `copying.staging` is writing
    RUN/.checkpoint-100.llmtailor-thinning          a checkpoint without optimizer while it is written
    RUN/.checkpoint-100.llmtailor-old               the full one, briefly, where folders can't be exchanged
    RUN/.checkpoint-100.llmtailor-thinned           a replaced full one while it is removed
    RUN/partial/step-00000100                       a partial checkpoint; without a manifest, an unfinished save
    RUN/partial/step-00000100.abandoned             one of an abandoned attempt
    RUN/partial/.step-00000100.llmtailor-thinning   a partial checkpoint while ``thin`` writes it
    RUN/partial/attempts.json                       the record of attempts, see `RunFolder.attempts`
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.lineage import Past, RunCheckpoint, read_past
from llmtailor.checkpoint.step_names import ABANDONED, NAMES, step_of
from llmtailor.codes import Code
from llmtailor.containers.json import read_json
from llmtailor.errors import PathIn, SourceError, TailorError, TargetError
from llmtailor.formats.partial.manifest import folder_name, read_manifest, step_in_name
from llmtailor.formats.registry import display_name, is_checkpoint
from llmtailor.frameworks.files import FOLDER, PARTIAL_MANIFEST, TRAINER_STATE
from llmtailor.frameworks.framework import is_or_may_be_partial, is_partial, survey_contents
from llmtailor.storage.local import (
    UNFINISHED,
    Lock,
    LockHeld,
    absolute,
    as_path,
    check_own,
    check_regular,
    disk_errors,
    fsync_file,
    fsync_folder,
    replace_durably,
    try_link,
)

_LOCK = ".lock"


_locks: dict[Path, Lock] = {}
"""The locks that this process holds"""


ATTEMPTS = "attempts.json"
Start = tuple[Past, str]
"""Where an attempt began, and when (ISO 8601)"""
_SCHEMA = "llmtailor.attempts/1"
_ABANDONED = re.compile(r"(step-\d{8,}\.abandoned)(-\d+)?")
_HIDDEN = re.compile(r"\.(.+)\.llmtailor-(staging|thinning|old|thinned)")


class FolderKind(Enum):
    FULL = "full"
    PARTIAL = "partial"
    UNFINISHED = "unfinished"
    """A partial checkpoint without a manifest"""
    ABANDONED = "abandoned"
    """A partial checkpoint of an abandoned attempt"""
    STAGING = "staging"
    THINNING = "thinning"
    OLD = "old"
    THINNED = "thinned"


@dataclass(frozen=True, slots=True)
class FolderEntry:
    """A folder in a run's folder, and its step (-1: none)."""

    path: Path
    kind: FolderKind
    step: int = -1

    @property
    def target(self) -> Path:
        """The folder that one being written will become, or that one being removed was"""
        match = _HIDDEN.fullmatch(self.path.name)
        assert match
        return self.path.with_name(match[1])


class RunFolder:
    """The output folder of a training run, which holds full checkpoints and ``partial/step-N``.

    ``also`` are staging folders of the same run, whose partial checkpoints count if the run's folder lacks them.
    """

    def __init__(self, run: str | Path, also: Sequence[Path] = ()) -> None:
        self.run = as_path(run)
        self.partial = self.run / FOLDER
        self.also = tuple(RunFolder(staging) for staging in also)

    def at(self, step: int) -> Path:
        """Return the path of a step's partial checkpoint, which need not exist."""
        return self.partial / folder_name(step)

    def entries(self, *kinds: FolderKind) -> list[FolderEntry]:
        """Return the folders of these kinds, sorted by name; those in the run's folder come before the partial ones."""
        entries = []
        for parent in (self.run, self.partial):
            for path in sorted(parent.iterdir()) if parent.is_dir() else ():
                entry = _classify(path, parent is self.partial)
                if entry is not None and entry.kind in kinds:
                    entries.append(entry)
        return entries

    def full(self) -> dict[int, Path]:
        """Return every full checkpoint by ascending step; of several with one step, ``checkpoint-N``.

        Raises SourceError if the run's folder does not exist.
        """
        if not self.run.is_dir():
            fix = f"name the folder that holds {NAMES}"
            raise SourceError.at(display_name(self.run), "the folder does not exist", fix, Code.NO_CHECKPOINT)
        by_step = {entry.step: entry.path for entry in reversed(self.entries(FolderKind.FULL))}  # that name sorts first
        return dict(sorted(by_step.items()))

    def complete(self) -> dict[int, Path]:
        """Return the complete partial checkpoints by ascending step."""
        return dict(sorted((entry.step, entry.path) for entry in self.entries(FolderKind.PARTIAL)))

    def checkpoints(self) -> list[tuple[int, Path]]:
        """Return all checkpoints, full and partial, with the steps in their names, whatever they contain.

        The newest come first, and a step's full one before its partial one. Raises SourceError if the run's folder does
        not exist, or one of ``also`` has no partial checkpoints.
        """
        self.full()
        full = [(entry.step, False, entry.path) for entry in self.entries(FolderKind.FULL)]
        saves = [(entry.step, True, entry.path) for entry in self.entries(FolderKind.PARTIAL, FolderKind.UNFINISHED)]
        complete = self.complete()
        for staging in self.also:
            if not staging.partial.is_dir():
                fix = "name the staging folder, or a copy of it, which holds partial/"
                raise SourceError.at(display_name(staging.run), "the folder has no partial checkpoints", fix)
            saves += [(step, True, path) for step, path in staging.complete().items() if step not in complete]
        ordered = sorted([*full, *saves], key=lambda entry: (-entry[0], entry[1]))
        return [(step, path) for step, _, path in ordered]

    def checkpoints_until(self, at: int | None) -> list[tuple[int, Path]]:
        """Return the `checkpoints` up to a step. Raises SourceError if there are none."""
        everything = self.checkpoints()
        if not everything:
            fix = f"name the folder that holds {NAMES}, or partial/"
            if (around := self._run_around()) is not None:
                fix = f"name the folder of the run: {shlex.quote(display_name(around))}"
            raise SourceError.at(display_name(self.run), "the folder has no checkpoint", fix)
        wanted = [(step, path) for step, path in everything if at is None or step <= at]
        if not wanted:
            what = f"there is no checkpoint at or before step {at}; the first is {everything[-1][0]}"
            raise SourceError.at(display_name(self.run), what, "use --at with a later step, or omit it")
        return wanted

    def _run_around(self) -> Path | None:
        """Return the run that this folder is part of: a checkpoint, its tag folder, or the folder of partial ones."""
        near = list(absolute(self.run).parents)[:3]
        runs = [path for path in near if any(RunFolder(path).entries(FolderKind.FULL, FolderKind.PARTIAL))]
        return next((path for path in runs if step_of(path) is None or path.parent not in runs), None)

    def left_by_thin(self) -> list[Path]:
        """Return what a killed ``thin`` left and nothing needs."""
        leftovers = self.entries(FolderKind.THINNING, FolderKind.OLD, FolderKind.THINNED)
        return [entry.path for entry in leftovers if entry.kind is not FolderKind.OLD or entry.target.exists()]

    def restore(self) -> None:
        """Move a full checkpoint back if a killed ``thin`` had just moved it away. Raises OSError."""
        for entry in self.entries(FolderKind.OLD):
            if not entry.target.exists():
                entry.path.rename(entry.target)
                fsync_folder(entry.path.parent)

    def saves(self) -> list[RunCheckpoint]:
        """Return what the manifests of the complete partial checkpoints record; damaged ones are left out."""
        saves = []
        for path in self.complete().values():
            with suppress(TailorError):
                manifest = read_manifest(path, path.name)
                save = RunCheckpoint.from_json(
                    path, manifest.ledger, path.name, manifest.masters, manifest.save_id, manifest.bases
                )
                saves.append(replace(save, is_thinned=manifest.is_thinned))
        return saves

    def attempts(self) -> list[Past]:
        """Return where each attempt of the run began, oldest first. Raises SourceError for a damaged record."""
        return [past for past, _ in self.starts()]

    def record_attempt(self, past: Past) -> None:
        """Durably record the start of an attempt. Raises SourceError or StorageError."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        replace_durably(self.partial / ATTEMPTS, starts_json([*self.starts(), (past, now)]))
        fsync_folder(self.partial)

    def starts(self) -> list[Start]:
        """Return where each attempt began, and when, oldest first. Raises SourceError as `attempts`."""
        path, where = self.partial / ATTEMPTS, f"{FOLDER}/{ATTEMPTS}"
        return read_starts(read_json(path, where), where) if path.exists() else []

    def lock(self) -> None:
        """Keep other processes out until this one has unlocked as often as it locked, or ends.

        Without locks in the file system, other processes are not kept out: a killed training must be able to restart.
        Raises TargetError if another process holds the lock, or StorageError.
        """
        try:
            with disk_errors(self.partial, "can't lock"):
                self.partial.mkdir(parents=True, exist_ok=True)
                _locks.setdefault(self.partial.absolute(), Lock(self.partial / _LOCK)).acquire()
        except LockHeld as error:
            what = "another run is saving partial checkpoints here"
            raise TargetError.at(self.partial, what, "give this run its own output_dir") from error

    def unlock(self) -> None:
        if (lock := _locks.get(self.partial.absolute())) is not None:
            lock.release()

    def begin(self, step: int) -> Path:
        """Make the empty folder of a new save; move aside one that an abandoned attempt left at this step."""
        path = self.at(step)
        if os.path.lexists(path):
            if is_partial(path) or holds_unknown(path):
                self.set_aside([path])
            else:
                shutil.rmtree(path)
        path.mkdir(parents=True)
        return path

    def set_aside(self, paths: Iterable[Path]) -> None:
        """Rename partial checkpoints and composites so that nothing finds them any more.

        The new name of a composite does not begin with ``checkpoint-``, because the Trainer's rotation deletes those.
        """
        for path in paths:
            name = f"{path.name}.abandoned" if path.parent == self.partial else f"{ABANDONED}{path.name}"
            path.rename(_unused(path.with_name(name)))

    def sweep(self) -> list[str]:
        """Remove unfinished saves, except those with files of unknown origin; return their names."""
        return self._remove(FolderKind.UNFINISHED)

    def remove_abandoned(self, also_known: Collection[str] = ()) -> None:
        """Remove the partial checkpoints that were set aside, except those with files of unknown origin.

        ``also_known`` are further names of known origin.
        """
        self._remove(FolderKind.ABANDONED, also_known)

    def _remove(self, kind: FolderKind, also_known: Collection[str] = ()) -> list[str]:
        paths = [entry.path for entry in self.entries(kind) if not holds_unknown(entry.path, also_known)]
        for path in paths:
            shutil.rmtree(path, ignore_errors=True)
        return [path.name for path in paths if not path.exists()]


def _classify(path: Path, in_partial: bool) -> FolderEntry | None:
    if match := _HIDDEN.fullmatch(path.name):
        is_foreign = path.is_symlink() or (in_partial and match[2] == FolderKind.STAGING.value)
        entry = None if is_foreign else FolderEntry(path, FolderKind(match[2]))
    elif not in_partial:
        step = step_of(path)
        entry = None if step is None or not _is_full(path) else FolderEntry(path, FolderKind.FULL, step)
    elif (step := step_in_name(path.name)) is not None:
        entry = FolderEntry(path, FolderKind.PARTIAL if is_partial(path) else FolderKind.UNFINISHED, step)
    else:
        entry = FolderEntry(path, FolderKind.ABANDONED) if _ABANDONED.fullmatch(path.name) else None
    is_there = path.is_dir() or (path.suffix == ".ckpt" and path.is_file())
    return entry if entry is not None and is_there else None


def _is_full(path: Path) -> bool:
    """Return whether a folder or file with a step in its name is a full checkpoint, if its name leaves that open."""
    return path.name.startswith("checkpoint-") or (is_checkpoint(path) and not is_or_may_be_partial(path))


def starts_json(starts: Iterable[Start]) -> bytes:
    """Return the content of a record of attempts."""
    listed = [
        {"lineage": past.lineage, "resumed_at": past.step, "history": dict(past.history), "started": started}
        for past, started in starts
    ]
    return json.dumps({"schema": _SCHEMA, "attempts": listed}, indent=1).encode() + b"\n"


def read_starts(content: Mapping[str, Any], where: str) -> list[Start]:
    """Read the output of `starts_json`; ``where`` names the file. Raises SourceError."""
    try:
        listed = content.get("attempts") if content.get("schema") == _SCHEMA else None
        if not isinstance(listed, list):
            raise ValueError(f"its schema is not {_SCHEMA!r}")
        return list(map(_read_attempt, listed))
    except ValueError as error:
        fix = "restore it; or move it away, if the run never resumed from a step before its newest save"
        raise SourceError.at(where, f"the attempt record is damaged: {error}", fix) from error


def _read_attempt(content: Any) -> Start:
    values = content if isinstance(content, dict) else {}
    past = read_past(values.get("resumed_at"), values.get("lineage"), values.get("history"))
    started = values.get("started")
    if past is None or not isinstance(started, str):
        raise ValueError(f"unexpected entry {content!r:.200}")
    return past, started


def _unused(path: Path) -> Path:
    number, candidate = 1, path
    while os.path.lexists(candidate):
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def staged(path: Path, kind: FolderKind) -> Path:
    """Return the path of a folder while it is written, replaced or removed."""
    return path.with_name(f".{path.name}.llmtailor-{kind.value}")


def remove_partial(path: Path) -> None:
    """Remove a partial checkpoint, its manifest first so that it never looks complete.

    Raises TargetError for a link, or OSError.
    """
    check_own(path)
    (path / PARTIAL_MANIFEST).unlink(missing_ok=True)
    fsync_folder(path)
    shutil.rmtree(path)


def remove_replaced(path: Path, now_at: Path | None = None) -> None:
    """Remove a folder that was replaced; it is at ``now_at``, or still at ``path``. Raises TargetError or OSError.

    A rename hides it first, so that it is never visible incomplete.
    """
    aside = staged(path, FolderKind.THINNED)
    check_own(aside)
    if aside.exists():
        shutil.rmtree(aside)
    (now_at or path).rename(aside)
    fsync_folder(path.parent)
    shutil.rmtree(aside)
    fsync_folder(path.parent)


def holds_unknown(path: Path, also_known: Collection[str] = ()) -> bool:
    """Return whether a folder is a link, or has entries not known to come from a training or llmtailor.

    ``also_known`` are further names of known origin.
    """
    if path.is_symlink():
        return True
    unknown = survey_contents(path).unknown
    return any(name not in also_known and not UNFINISHED.fullmatch(name) for name in unknown)


def freed_bytes(files: Iterable[Path]) -> int:
    """Return the bytes that removing these files frees: a file with links elsewhere frees nothing."""
    links: dict[tuple[int, int], int] = defaultdict(int)
    stats: dict[tuple[int, int], os.stat_result] = {}
    for path in files:
        stat = path.lstat()
        links[stat.st_dev, stat.st_ino] += 1
        stats[stat.st_dev, stat.st_ino] = stat
    return sum(stat.st_size for key, stat in stats.items() if links[key] >= stat.st_nlink)


def files_in(folder: Path) -> Iterator[Path]:
    for where, _, names in os.walk(folder):
        yield from (Path(where) / name for name in names)


def log_entries(checkpoint: Path, name: str) -> list[dict[str, Any]]:
    """Return what the Trainer has logged in ``trainer_state.json``. Raises SourceError if it can't be read."""
    log = read_json(checkpoint / TRAINER_STATE, PathIn(name, TRAINER_STATE)).get("log_history")
    return [entry for entry in log if isinstance(entry, dict)] if isinstance(log, list) else []


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link ``target`` to ``source``, or copy it where links are not possible. Raises OSError or SourceError."""
    if not try_link(source, target):
        check_regular(source.stat().st_mode, f"{source}")
        shutil.copyfile(source, target)
        fsync_file(target)
