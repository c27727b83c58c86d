"""The folder of a run's partial checkpoints: one writer at a time, complete or absent.

A training run's folder: the ``checkpoint-N`` that the Trainer writes into it.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from llmtailor.codes import Code
from llmtailor.containers.json import read_json, step_of
from llmtailor.errors import SourceError, StorageError, TailorError, TargetError
from llmtailor.formats.known_files import survey_contents
from llmtailor.formats.partial.manifest import FOLDER, MANIFEST, Manifest, folder_name, read_manifest, step_in_name
from llmtailor.formats.partial.read import is_partial
from llmtailor.formats.registry import display_name
from llmtailor.runs.attempts import FILE, Attempt, attempts_json, read_attempts
from llmtailor.storage.local import UNFINISHED, replace_durably
from llmtailor.storage.lock import Held, Lock

_LOCK = ".lock"
ABANDONED = ".abandoned"
_locks: dict[Path, Lock] = {}
"""Of this process"""


class Folder:
    """``<output_dir>/partial``."""

    def __init__(self, output_dir: Path) -> None:
        self.path = Path(output_dir).absolute() / FOLDER

    def at(self, step: int) -> Path:
        return self.path / folder_name(step)

    def lock(self) -> None:
        """Keep other processes out until this one unlocks as often as it has locked, or ends.

        File systems without locks keep nobody out: a training that was killed must be able to start again by itself.
        Raises TargetError if another process is in, or StorageError.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            _locks.setdefault(self.path, Lock(self.path / _LOCK)).acquire()
        except Held as error:
            what = "another run is saving partial checkpoints here right now"
            raise TargetError.at(self.path, what, "give this run an output_dir of its own") from error
        except OSError as error:
            raise StorageError.at(self.path, f"can't lock: {error.strerror}", "check the disk") from error

    def unlock(self) -> None:
        if self.path in _locks:
            _locks[self.path].release()

    def complete(self) -> dict[int, Path]:
        """Return the complete partial checkpoints by step."""
        return {step: path for step, path in self._all() if is_partial(path)}

    def manifests(self) -> Iterator[Manifest]:
        """Yield the manifests that can be read."""
        for path in self.complete().values():
            try:
                yield read_manifest(path, path.name)
            except TailorError:
                continue

    def attempts(self) -> list[Attempt]:
        """Return the run's attempts, oldest first. Raises SourceError if the record of them is damaged."""
        path = self.path / FILE
        if not path.exists():
            return []
        where = f"{FOLDER}/{FILE}"
        try:
            return read_attempts(read_json(path, where))
        except ValueError as error:
            fix = "copy it back; or remove it, if the run was never resumed at an earlier step than its newest save"
            raise SourceError.at(where, f"the record of attempts is damaged: {error}", fix) from error

    def record(self, attempt: Attempt) -> None:
        """Note durably that an attempt begins. Raises SourceError or StorageError."""
        content = attempts_json([*self.attempts(), attempt])
        replace_durably(self.path / FILE, json.dumps(content, indent=1).encode() + b"\n")
        sync(self.path)

    def begin(self, step: int) -> Path:
        """Make the empty folder of a new save. One that an abandoned attempt left at this step moves aside."""
        path = self.at(step)
        if path.exists():
            if is_partial(path) or holds_unknown(path):
                _move_aside(path)
            else:
                shutil.rmtree(path)
        path.mkdir(parents=True)
        return path

    def set_aside(self, paths: Iterable[Path]) -> None:
        """Rename partial checkpoints, and composites beside this folder, so that nothing looks for them any more.

        The new name of a composite does not begin with ``checkpoint-``: the Trainer's rotation deletes what does.
        """
        for path in paths:
            if path.parent == self.path:
                _move_aside(path)
            else:
                path.rename(_unused(path.with_name(f"abandoned-{path.name}")))

    def remove_abandoned(self, made: Collection[str] = ()) -> None:
        """Remove what was set aside here, but for folders with files of unknown making; ``made`` are known, too."""
        for path in self.path.glob(f"step-*{ABANDONED}*"):
            if not holds_unknown(path, made):
                shutil.rmtree(path, ignore_errors=True)

    def sweep(self) -> list[str]:
        """Remove what unfinished saves left, but for folders with files of unknown making; return their names."""
        names = []
        for _, path in list(self._all()):
            if not is_partial(path) and not holds_unknown(path):
                shutil.rmtree(path, ignore_errors=True)
                names.append(path.name)
        return names

    def remove(self, step: int) -> None:
        """Remove a partial checkpoint: first its manifest, so that it is never there by half."""
        path = self.at(step)
        (path / MANIFEST).unlink(missing_ok=True)
        sync(path)
        shutil.rmtree(path, ignore_errors=True)

    def _all(self) -> Iterator[tuple[int, Path]]:
        if self.path.is_dir():
            for path in sorted(self.path.iterdir()):
                if (step := step_in_name(path.name)) is not None and path.is_dir():
                    yield step, path


def holds_unknown(path: Path, made: Collection[str] = ()) -> bool:
    """Whether a folder has entries that neither a training nor we made, as far as is known; ``made`` are ours."""
    unknown = survey_contents(path).unknown
    return any(name not in made and not UNFINISHED.fullmatch(name) for name in unknown)


def link_or_copy(source: Path, target: Path) -> None:
    """Make ``target`` the same file as ``source``, or a copy where links are not possible. Raises OSError."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS, errno.EACCES):
            raise
        shutil.copyfile(source, target)
        sync(target)


def sync(path: Path) -> None:
    """Make a file's content, or a folder's entries, survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _move_aside(path: Path) -> None:
    path.rename(_unused(path.with_name(path.name + ABANDONED)))


def _unused(path: Path) -> Path:
    number, candidate = 1, path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def list_checkpoints(run: Path) -> dict[int, Path]:
    """Return the checkpoint folders by step, whatever is in them. Raises SourceError if there is no such folder."""
    if not run.is_dir():
        raise SourceError.at(
            display_name(run), "there is no such folder", "name the folder that holds checkpoint-N", Code.NO_CHECKPOINT
        )
    folders = ((step_of(path), path) for path in run.iterdir())
    return {step: path for step, path in folders if step is not None and path.is_dir()}
