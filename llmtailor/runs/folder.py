"""The folder of a training run: what lies in it, one writer at a time, and partial checkpoints complete or absent.

::

    RUN/checkpoint-100                              a full checkpoint of the Trainer, or a composite
    RUN/abandoned-checkpoint-200                    a composite of an attempt that was given up
    RUN/.NAME.llmtailor-staging                     what `engine.staging` puts together
    RUN/.checkpoint-100.llmtailor-thinning          a checkpoint without optimizer while it is put together
    RUN/.checkpoint-100.llmtailor-old               the full one, briefly, where folders can't be exchanged
    RUN/.checkpoint-100.llmtailor-thinned           a full one that was replaced, while it is removed
    RUN/partial/step-00000100                       a partial checkpoint; without a manifest, an unfinished save
    RUN/partial/step-00000100.abandoned             one of an attempt that was given up
    RUN/partial/.step-00000100.llmtailor-thinning   a partial checkpoint while ``thin`` writes it
    RUN/partial/attempts.json                       the record of attempts, see `runs.attempts`
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.lineage import Past, RunCheckpoint, read_past
from llmtailor.codes import Code
from llmtailor.containers.json import read_json, step_of
from llmtailor.errors import SourceError, StorageError, TailorError, TargetError
from llmtailor.formats.known_files import survey_contents
from llmtailor.formats.partial.manifest import FOLDER, MANIFEST, folder_name, read_manifest, step_in_name
from llmtailor.formats.partial.read import is_partial
from llmtailor.formats.registry import display_name
from llmtailor.storage.local import UNFINISHED, fsync_file, fsync_folder, replace_durably
from llmtailor.storage.lock import Held, Lock

_LOCK = ".lock"
_locks: dict[Path, Lock] = {}
"""Of this process"""
_ATTEMPTS = "attempts.json"
_SCHEMA = "llmtailor.attempts/1"
_ABANDONED = re.compile(r"(step-\d{8,}\.abandoned)(-\d+)?")
_HIDDEN = re.compile(r"\.(.+)\.llmtailor-(staging|thinning|old|thinned)")


class Kind(Enum):
    """What a folder in a run's folder is."""

    FULL = "full"
    PARTIAL = "partial"
    UNFINISHED = "unfinished"
    """A partial checkpoint without a manifest"""
    ABANDONED = "abandoned"
    """A partial checkpoint of an attempt that was given up"""
    STAGING = "staging"
    THINNING = "thinning"
    OLD = "old"
    THINNED = "thinned"


@dataclass(frozen=True, slots=True)
class Entry:
    """A folder in a run's folder, and its step (-1: it has none)."""

    path: Path
    kind: Kind
    step: int = -1

    @property
    def target(self) -> Path:
        """Of one that is being put together or removed: the folder that it becomes, or was."""
        match = _HIDDEN.fullmatch(self.path.name)
        assert match
        return self.path.with_name(match[1])


class RunFolder:
    """The output folder of a training run, which holds ``checkpoint-N`` and ``partial/step-N``."""

    def __init__(self, run: Path) -> None:
        self.run = Path(run)
        self.partial = self.run / FOLDER

    def at(self, step: int) -> Path:
        """Return where the partial checkpoint of a step lies, or would."""
        return self.partial / folder_name(step)

    def entries(self, *kinds: Kind) -> list[Entry]:
        """Return the folders of these kinds, sorted by name; those of the run's folder come before the partial ones."""
        found = []
        for parent in (self.run, self.partial):
            for path in sorted(parent.iterdir()) if parent.is_dir() else ():
                entry = _classify(path, parent is self.partial)
                if entry is not None and entry.kind in kinds:
                    found.append(entry)
        return found

    def full(self) -> dict[int, Path]:
        """Return the ``checkpoint-N`` by ascending step, whatever is in them.

        Raises SourceError if there is no such folder.
        """
        if not self.run.is_dir():
            fix = "name the folder that holds checkpoint-N"
            raise SourceError.at(display_name(self.run), "there is no such folder", fix, Code.NO_CHECKPOINT)
        return dict(sorted((entry.step, entry.path) for entry in self.entries(Kind.FULL)))

    def complete(self) -> dict[int, Path]:
        """Return the complete partial checkpoints by ascending step."""
        return dict(sorted((entry.step, entry.path) for entry in self.entries(Kind.PARTIAL)))

    def checkpoints(self) -> list[tuple[int, Path]]:
        """Return all checkpoints with the steps in their names, full and partial, whatever is in them.

        The newest come first; of one step the full one. Raises SourceError if there is no such folder.
        """
        full = [(step, False, path) for step, path in self.full().items()]
        saves = [(entry.step, True, entry.path) for entry in self.entries(Kind.PARTIAL, Kind.UNFINISHED)]
        return [(step, path) for step, _, path in sorted([*full, *saves], key=lambda one: (-one[0], one[1]))]

    def checkpoints_until(self, at: int | None) -> list[tuple[int, Path]]:
        """Return the `checkpoints` up to a step. Raises SourceError if there is none."""
        found = self.checkpoints()
        if not found:
            fix = "name the folder that holds checkpoint-N, or partial/"
            raise SourceError.at(display_name(self.run), "there is no checkpoint-N in this folder", fix)
        wanted = [(step, path) for step, path in found if at is None or step <= at]
        if not wanted:
            what = f"there is no checkpoint at or before step {at}; the first is {found[-1][0]}"
            raise SourceError.at(display_name(self.run), what, "give a later step")
        return wanted

    def left_by_thin(self) -> list[Path]:
        """Return what a killed ``thin`` left and nobody needs."""
        found = self.entries(Kind.THINNING, Kind.OLD, Kind.THINNED)
        return [entry.path for entry in found if entry.kind is not Kind.OLD or entry.target.exists()]

    def restore(self) -> None:
        """Put a full checkpoint back in its place if a killed ``thin`` had just taken it away. Raises OSError."""
        for entry in self.entries(Kind.OLD):
            if not entry.target.exists():
                entry.path.rename(entry.target)
                fsync_folder(entry.path.parent)

    def saves(self) -> list[RunCheckpoint]:
        """Return what the complete partial checkpoints record of themselves; a damaged one gives nothing."""
        found = []
        for path in self.complete().values():
            with suppress(TailorError):
                found.append(RunCheckpoint.from_json(path, read_manifest(path, path.name).ledger, path.name))
        return found

    def attempts(self) -> list[Past]:
        """Return where each attempt of the run began, oldest first. Raises SourceError for a damaged record."""
        return [past for past, _ in self._attempts()]

    def record_attempt(self, past: Past) -> None:
        """Record durably that an attempt begins. Raises SourceError or StorageError."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        listed = [
            {"lineage": past.lineage, "resumed_at": past.step, "history": dict(past.history), "started": started}
            for past, started in [*self._attempts(), (past, now)]
        ]
        content = {"schema": _SCHEMA, "attempts": listed}
        replace_durably(self.partial / _ATTEMPTS, json.dumps(content, indent=1).encode() + b"\n")
        fsync_folder(self.partial)

    def _attempts(self) -> list[tuple[Past, str]]:
        path, where = self.partial / _ATTEMPTS, f"{FOLDER}/{_ATTEMPTS}"
        if not path.exists():
            return []
        content = read_json(path, where)
        try:
            listed = content.get("attempts") if content.get("schema") == _SCHEMA else None
            if not isinstance(listed, list):
                raise ValueError(f"it is no record of attempts by {_SCHEMA!r}")
            return list(map(_read_attempt, listed))
        except ValueError as error:
            fix = "copy it back; or remove it, if the run was never resumed at an earlier step than its newest save"
            raise SourceError.at(where, f"the record of attempts is damaged: {error}", fix) from error

    def lock(self) -> None:
        """Keep other processes out until this one unlocks as often as it has locked, or ends.

        File systems without locks keep nobody out: a training that was killed must be able to start again by itself.
        Raises TargetError if another process is in, or StorageError.
        """
        try:
            self.partial.mkdir(parents=True, exist_ok=True)
            _locks.setdefault(self.partial.absolute(), Lock(self.partial / _LOCK)).acquire()
        except Held as error:
            what = "another run is saving partial checkpoints here right now"
            raise TargetError.at(self.partial, what, "give this run an output_dir of its own") from error
        except OSError as error:
            raise StorageError.at(self.partial, f"can't lock: {error.strerror}", "check the disk") from error

    def unlock(self) -> None:
        if (lock := _locks.get(self.partial.absolute())) is not None:
            lock.release()

    def begin(self, step: int) -> Path:
        """Make the empty folder of a new save. One that an abandoned attempt left at this step moves aside."""
        path = self.at(step)
        if path.exists():
            if is_partial(path) or holds_unknown(path):
                self.set_aside([path])
            else:
                shutil.rmtree(path)
        path.mkdir(parents=True)
        return path

    def set_aside(self, paths: Iterable[Path]) -> None:
        """Rename partial checkpoints and composites so that nothing looks for them any more.

        The new name of a composite does not begin with ``checkpoint-``: the Trainer's rotation deletes what does.
        """
        for path in paths:
            name = f"{path.name}.abandoned" if path.parent == self.partial else f"abandoned-{path.name}"
            path.rename(_unused(path.with_name(name)))

    def sweep(self) -> list[str]:
        """Remove what unfinished saves left, except folders with files of unknown making; return their names."""
        names = []
        for entry in self.entries(Kind.UNFINISHED):
            if not holds_unknown(entry.path):
                shutil.rmtree(entry.path, ignore_errors=True)
                names.append(entry.path.name)
        return names

    def remove_abandoned(self, made: Collection[str] = ()) -> None:
        """Remove the partial checkpoints that were set aside, except those with files of unknown making.

        ``made`` are known, too.
        """
        for entry in self.entries(Kind.ABANDONED):
            if not holds_unknown(entry.path, made):
                shutil.rmtree(entry.path, ignore_errors=True)


def _classify(path: Path, in_partial: bool) -> Entry | None:
    if match := _HIDDEN.fullmatch(path.name):
        entry = None if in_partial and match[2] == Kind.STAGING.value else Entry(path, Kind(match[2]))
    elif not in_partial:
        step = step_of(path)
        entry = None if step is None else Entry(path, Kind.FULL, step)
    elif (step := step_in_name(path.name)) is not None:
        entry = Entry(path, Kind.PARTIAL if is_partial(path) else Kind.UNFINISHED, step)
    else:
        entry = Entry(path, Kind.ABANDONED) if _ABANDONED.fullmatch(path.name) else None
    return entry if entry is not None and path.is_dir() else None


def _read_attempt(content: Any) -> tuple[Past, str]:
    values = content if isinstance(content, dict) else {}
    past = read_past(values.get("resumed_at"), values.get("lineage"), values.get("history"))
    started = values.get("started")
    if past is None or not isinstance(started, str):
        raise ValueError(f"it lists {content!r:.200}")
    return past, started


def _unused(path: Path) -> Path:
    number, candidate = 1, path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def staged(path: Path, kind: Kind) -> Path:
    """Return where a folder lies while it is put together, replaced or removed."""
    return path.with_name(f".{path.name}.llmtailor-{kind.value}")


def remove_partial(path: Path) -> None:
    """Remove a partial checkpoint: first its manifest, so that it is never there incomplete. Raises OSError."""
    (path / MANIFEST).unlink(missing_ok=True)
    fsync_folder(path)
    shutil.rmtree(path, ignore_errors=True)


def remove_replaced(path: Path, now_at: Path | None = None) -> None:
    """Remove a folder that was replaced; it lies at ``now_at``, or still at ``path``. Raises OSError.

    A rename hides it first, so that it is never there incomplete.
    """
    aside = staged(path, Kind.THINNED)
    if aside.exists():
        shutil.rmtree(aside)
    (now_at or path).rename(aside)
    fsync_folder(path.parent)
    shutil.rmtree(aside)
    fsync_folder(path.parent)


def holds_unknown(path: Path, made: Collection[str] = ()) -> bool:
    """Whether a folder has entries that neither a training nor llmtailor is known to make; ``made`` are known, too."""
    unknown = survey_contents(path).unknown
    return any(name not in made and not UNFINISHED.fullmatch(name) for name in unknown)


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
    """Yield every file below a folder."""
    for where, _, names in os.walk(folder):
        yield from (Path(where) / name for name in names)


def link_or_copy(source: Path, target: Path) -> None:
    """Make ``target`` the same file as ``source``, or a copy where links are not possible. Raises OSError."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS, errno.EACCES):
            raise
        shutil.copyfile(source, target)
        fsync_file(target)


@contextmanager
def only_writer(run: Path, *, make: bool = False) -> Iterator[None]:
    """Keep a training that saves partial checkpoints, and other llmtailors, out of a run's folder.

    The lock lies in the folder of partial checkpoints, which ``make`` creates; without that folder there is nobody to
    keep out. Raises SourceError if there are no checkpoints, TargetError if another process holds the lock.
    """
    folder = RunFolder(run)
    folder.checkpoints_until(None)
    try:
        if make or folder.partial.is_dir():
            folder.lock()
    except TargetError as error:
        what = "a training is saving partial checkpoints here right now, or another llmtailor is at work"
        fix = "wait until it has ended; nothing was touched"
        raise TargetError.at(display_name(folder.partial), what, fix) from error
    try:
        folder.restore()
        yield
    finally:
        folder.unlock()


@contextmanager
def carrying_out(run: Path, what: str, fix: str) -> Iterator[None]:
    """Mark errors as late: something may already have been written or removed, and stays so.

    Turns an OSError into a StorageError that says ``what`` and ``fix``.
    """
    try:
        yield
    except TailorError as error:
        error.came_late = True
        raise
    except OSError as error:
        late = StorageError.at(error.filename or run, f"{what}: {error.strerror or error}", fix)
        late.came_late = True
        raise late from error
