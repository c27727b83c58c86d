"""Context managers around work in a run's folder: one writer at a time, and errors that say what happened meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from llmtailor.errors import SourceError, StorageError, TailorError, TargetError, some
from llmtailor.formats.registry import display_name
from llmtailor.runs.folder import RunFolder


@contextmanager
def only_writer(run: Path, *, make: bool = False) -> Iterator[None]:
    """Keep a training that saves partial checkpoints, and other llmtailor processes, out of a run's folder.

    The lock file is in the folder of partial checkpoints, which ``make`` creates; without that folder no process has to
    be kept out. Raises SourceError if there are no checkpoints, TargetError if another process holds the lock.
    """
    folder = RunFolder(run)
    folder.checkpoints_until(None)
    try:
        if make or folder.partial.is_dir():
            folder.lock()
    except TargetError as error:
        what = "a training is saving partial checkpoints here, or another llmtailor is running"
        fix = "wait until it ends; nothing was changed"
        raise TargetError.at(display_name(folder.partial), what, fix) from error
    try:
        folder.restore()
        yield
    finally:
        folder.unlock()


@contextmanager
def explain_deletions(run: Path, also: Sequence[Path] = ()) -> Iterator[None]:
    """Say so if reading fails because checkpoints of a run are deleted meanwhile, as a training with a limit does."""
    folder = RunFolder(run, also)

    def there() -> list[Path]:
        partial = (path for place in (folder, *folder.also) for path in place.complete().values())
        return [*folder.full().values(), *partial]

    before = there()
    try:
        yield
    except (SourceError, OSError) as error:
        left = {*there()}
        if not (gone := [display_name(path) for path in before if path not in left]):
            raise
        what = f"deleted while they were read: {some(gone)}; a running training does that with keep_composable"
        again = SourceError.at(display_name(run), what, "rerun the same command")
        again.is_reported = isinstance(error, TailorError) and error.is_reported
        raise again from error


@contextmanager
def mark_errors_as_late(run: Path, what: str, fix: str) -> Iterator[None]:
    """Mark errors as late: files may already have been written or removed.

    Turns an OSError into a StorageError with ``what`` and ``fix``.
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
