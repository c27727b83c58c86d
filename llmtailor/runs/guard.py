"""Who may touch a run's folder, and when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmtailor.errors import Problem, SourceError, StorageError, TailorError, TargetError
from llmtailor.findings import ERROR
from llmtailor.formats.partial.manifest import FOLDER
from llmtailor.formats.partial.read import is_partial
from llmtailor.formats.registry import display_name
from llmtailor.runs.folder import Folder
from llmtailor.runs.places import restore
from llmtailor.runs.scan import Scan, find_checkpoints
from llmtailor.verify.verify import verify_checkpoint


@contextmanager
def only_writer(run: Path, *, make: bool = False) -> Iterator[None]:
    """Keep a training that saves partial checkpoints, and other llmtailors, out of a run's folder.

    ``make`` also makes the folder of partial checkpoints, where the lock is; without that folder there is nobody to
    keep out. Raises SourceError if it is no run's folder, TargetError if somebody is in.
    """
    find_checkpoints(run, None)
    folder = Folder(run)
    try:
        if make or folder.path.is_dir():
            folder.lock()
    except TargetError as error:
        what = "a training is saving partial checkpoints here right now, or another llmtailor is at work"
        raise TargetError.at(display_name(folder.path), what, "wait until it has ended; nothing was touched") from error
    try:
        restore(run)
        yield
    finally:
        folder.unlock()


@contextmanager
def carrying_out(run: Path, what: str, fix: str) -> Iterator[None]:
    """Mark errors as late: something may have been written or removed already, and stays so.

    Raises StorageError, which says ``what`` and ``fix``, for an OSError.
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


def check_newest(scan: Scan) -> Path:
    """Return the newest checkpoint of a run's present attempt.

    Raises SourceError, with the reasons, if nothing can resume from it: what is older is all there is then. A full one
    is verified as a resume needs it, not only as a merge does.
    """
    folders = [folder for _, folder in find_checkpoints(scan.run, None) if folder not in scan.given_up]
    newest = next((folder for folder in folders if folder.parent.name != FOLDER or is_partial(folder)), scan.run)
    name = display_name(newest)
    if newest not in [one.path for one in scan.usable]:
        reasons = scan.refused.get(newest, ())
        what = "the newest checkpoint can't be used, so nothing older is touched"
    elif is_partial(newest) or (verdict := verify_checkpoint(newest)).is_resumable:
        return newest
    else:
        reasons = tuple(finding.problem for finding in verdict.of_severity(ERROR))
        what = "nothing can resume from the newest checkpoint, so nothing older is touched"
    fix = "wait if it is just being saved; otherwise mend or remove it, and run this again"
    raise SourceError([Problem(name, what, fix), *reasons])
