"""The staging folder beside the output, and the one rename that publishes it.

Until the rename the output does not exist (or is the old one, whole, if it may be replaced). An interrupted merge
leaves a hidden folder with a journal, from which the same merge resumes.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from llmtailor.engine.journal import Identity, Journal, Unfinished, read_journal
from llmtailor.engine.placing import check_old, replace_old
from llmtailor.errors import Interrupted, StorageError, TailorError, TargetError, Unanswered
from llmtailor.storage.local import Entries, fsync_folder, make_folder, rename_new
from llmtailor.storage.lock import Held, Lock

logger = logging.getLogger(__name__)
JOURNAL, OWNER, OLD = "journal", "owner", "old"
_ATTEMPTS = 100
"""To lock a staging folder that others keep removing."""


def check_target(out: Path, sources: list[Path], replace: bool) -> None:
    """Raise TargetError if ``out`` exists or replacing it would destroy a source: a checkpoint, or the recipe."""
    for source in sources:
        inner, outer = out.resolve(), source.resolve()
        if inner == outer or outer.is_relative_to(inner) or inner.is_relative_to(outer):
            relation = "is" if inner == outer else "contains" if outer.is_relative_to(inner) else "lies in"
            what = f"the output {relation} {source}, which is read"
            raise TargetError.at(out, what, "choose another output folder")
    if out.name in ("", ".."):
        raise TargetError.at(out, "the output has no name of its own", "name the new folder itself")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise TargetError.at(out, "the output exists and is no folder", "choose another output, or remove it")
    if out.exists() and not replace:
        raise already_there(out)


def already_there(out: Path) -> TargetError:
    """Build the refusal of an output that exists."""
    fix = "choose another one, or say --force to replace it once the new one is complete"
    if (left := staging_folder(out)).exists():
        fix += f"; {left} is what an interrupted merge has left, and may be removed"
    return TargetError.at(out, "the output exists already", fix)


def old_output(out: Path) -> Path:
    """Return where the output that is to be replaced lies: at ``out``, unless a merge was cut off right then."""
    old = staging_folder(out) / OLD
    return old if old.exists() and not out.exists() else out


def staging_folder(out: Path) -> Path:
    """Return where an output is put together."""
    absolute = out.absolute()
    return absolute.parent / f".{absolute.name}.llmtailor-staging"


def peek(out: Path) -> Unfinished | None:
    """Return what an earlier merge into ``out`` has left, without a lock. Raises StorageError."""
    path = staging_folder(out) / JOURNAL
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return read_journal(fd)
        finally:
            os.close(fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError.at(path, f"can't read: {error.strerror}", "check its permissions") from error


def occupied_bytes(out: Path) -> int:
    """Return the space that an earlier merge into ``out`` takes, and the next one uses again."""
    total = 0
    for folder, _, names in os.walk(staging_folder(out)):
        for name in names:
            with suppress(FileNotFoundError):  # another merge is at work, and a dry run looks on
                total += (Path(folder) / name).lstat().st_blocks * 512
    return total


def check_space(out: Path, num_bytes: int) -> None:
    """Raise StorageError if the file system of ``out`` has not that many bytes free."""
    free = free_bytes(out)
    if free < num_bytes:
        raise StorageError.at(
            out,
            f"{num_bytes:,} bytes are needed and {free:,} are free",
            f"free {num_bytes - free:,} bytes, or choose an output on another disk",
        )


def free_bytes(out: Path) -> int:
    """Return what is free, for us, on the file system where ``out`` will be."""
    there = out.absolute()
    while not there.exists():
        there = there.parent
    stat = os.statvfs(there)
    return stat.f_bavail * stat.f_frsize


class Staging:
    """A locked folder beside ``out`` with a journal, and `path`, which `publish` makes ``out``.

    ::

        .OUT.llmtailor-staging/
          journal       what is being written, and how far it is; the lock is on it
          out/          becomes OUT
          old/          what OUT was, while it is being replaced where the file system can't exchange folders

    Leaving the block after an interrupt or a fault of the disk keeps the folder, if the journal has anything to go on
    with. Otherwise it is removed.
    """

    def __init__(self, out: Path, replaces: Entries | None = None):
        """``replaces`` is all that ``out`` may hold if it is there; None: it must not be there."""
        self.out = out.absolute()
        self.replaces = replaces
        self.folder = staging_folder(self.out)
        self.path = self.folder / "out"
        self.unfinished: Unfinished | None = None
        """What an earlier merge has left."""
        self._lock = Lock(self.folder / JOURNAL, self.folder / OWNER)
        self._is_empty = False
        self._is_published = False

    def __enter__(self) -> Staging:
        try:
            with self._faults("can't make the staging folder", "choose an output where you may write"):
                self._acquire()
                self.journal = Journal(self._lock.fd)
                self._recover()
        except BaseException:
            if self._is_empty:
                self._remove()
            self._release()
            raise
        return self

    def _acquire(self) -> None:
        for _ in range(_ATTEMPTS):
            make_folder(self.folder)
            try:
                return self._lock.acquire()
            except FileNotFoundError:  # its last owner has just removed the folder, or the journal that is locked now
                continue
            except Held as held:
                raise self._held(str(held)) from None
        raise self._held("")

    def _held(self, holder: str) -> TargetError:
        what, fix = "another llmtailor is writing this output right now", "wait until it is done"
        if holder:
            what = f"{holder} is writing this output; this file system has no locks that would tell whether it still is"
            fix += f"; if it is dead, remove {self.folder / OWNER} and run this again"
        return TargetError.at(self.out, what, fix)

    def _recover(self) -> None:
        """See what is there, now that nobody else changes it."""
        self.unfinished = read_journal(self._lock.fd)
        self._is_empty = self.unfinished is None
        if self.unfinished:
            self.journal.reached = {path: marks[-1].num_bytes for path, marks in self.unfinished.marks.items()}
        old = self.folder / OLD
        if old.exists() and not self.out.exists():  # cut off while OUT was being replaced
            old.rename(self.out)
            logger.info("put %s back: an earlier merge was cut off while it was being replaced", self.out)
            fsync_folder(self.out.parent)
        if self.out.exists():
            if self.replaces is None:
                raise already_there(self.out)
            check_old(self.out, self.out, self.replaces)

    @property
    def kept_bytes(self) -> int:
        """Durable bytes that a merge which ends now leaves to the next one."""
        return 0 if self._is_published else self.journal.num_bytes

    def reset(self, identity: Identity) -> None:
        """Discard what an earlier merge has left, and start the journal of this one. Raises StorageError."""
        with self._faults("can't make the staging folder"):
            self.unfinished = None
            self.journal.clear()
            self._empty({})
            self.path.mkdir(exist_ok=True)
            self.journal.begin(identity)
            fsync_folder(self.folder)

    def resume(self) -> None:
        """Keep what the journal knows of, and nothing else. Raises StorageError."""
        assert self.unfinished is not None
        with self._faults("can't resume"):
            self.path.mkdir(exist_ok=True)
            self._empty(self.unfinished.marks)

    def _empty(self, keep: Collection[str]) -> None:
        self._remove_old()
        for folder, folders, files in os.walk(self.path, topdown=False):
            links = (name for name in folders if (Path(folder) / name).is_symlink())
            for name in (*files, *links):
                path = Path(folder) / name
                if str(path.relative_to(self.path)) not in keep or path.is_symlink():
                    path.unlink()
            if Path(folder) != self.path and not any(Path(folder).iterdir()):
                Path(folder).rmdir()

    def publish(self) -> None:
        """Make everything durable, then let the output appear at once, whole. Raises TargetError or StorageError."""
        with self._faults("can't publish the output"):
            for folder, _, _ in os.walk(self.path):
                fsync_folder(Path(folder))
            try:
                if self.replaces is not None and self.out.exists():
                    replace_old(self.path, self.out, self.folder / OLD, self.replaces)
                else:
                    rename_new(self.path, self.out)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
                fix = "choose another one, or say --force"
                raise TargetError.at(self.out, "the output has appeared in the meantime", fix) from error
        self._is_published = True
        with self._faults("the output is complete, but the disk doesn't confirm that it stays"):
            fsync_folder(self.out.parent)
            fsync_folder(self.folder)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        goes_on = (Interrupted, StorageError, TargetError, Unanswered)
        is_refused = isinstance(error, TailorError) and not isinstance(error, goes_on)
        if is_refused or not self.kept_bytes:
            self._remove()
        else:
            logger.info("kept %s, with %s bytes to resume from", self.folder, f"{self.kept_bytes:,}")
        self._release()

    def _remove(self) -> None:
        try:
            self.journal.clear()  # before what it vouches for
            shutil.rmtree(self.path, ignore_errors=True)  # after a replacement it is the old output
            self._remove_old()
            (self.folder / JOURNAL).unlink()
        except OSError:
            pass  # the next merge into this output removes the rest

    def _remove_old(self) -> None:
        if self.out.exists():  # otherwise it is the only one
            shutil.rmtree(self.folder / OLD, ignore_errors=True)

    def _release(self) -> None:
        self._lock.release()
        with suppress(OSError):  # not empty, if there is something to resume
            self.folder.rmdir()

    @contextmanager
    def _faults(self, what: str, fix: str = "check the disk") -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError.at(self.folder, f"{what}: {error.strerror}", fix) from error


@contextmanager
def left_over(out: Path) -> Iterator[bool]:
    """Tell whether what lies in an output's staging folder can go, and keep merges out for as long as the block lasts.

    It can't while a merge is at work there, or if it has the only copy of an output that was being replaced. Raises
    OSError.
    """
    folder = staging_folder(out)
    if (folder / OLD).exists() and not out.exists():
        yield False
        return
    lock, is_unused = Lock(folder / JOURNAL, folder / OWNER), True
    try:
        lock.acquire(create=False)
    except FileNotFoundError:  # killed before it began; unless another one begins just now
        is_unused = not (folder / JOURNAL).exists()
    except Held:
        is_unused = False
    try:
        yield is_unused
    finally:
        lock.release()


def remove_left_over(out: Path) -> None:
    """Remove what the merge that has published an output was killed before it could remove. Raises OSError."""
    with left_over(out) as is_unused:
        if is_unused and staging_folder(out).exists():
            shutil.rmtree(staging_folder(out))
