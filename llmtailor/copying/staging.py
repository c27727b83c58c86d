"""The staging folder next to the output, and the single rename that publishes it.

Until the rename the output does not exist (or is the old one, whole, if it may be replaced). An interrupted merge
leaves a hidden folder with a journal, from which the same merge resumes.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import TracebackType

from llmtailor.checkpoint.layout import Plan
from llmtailor.copying.journal import Identity, Journal, Unfinished, read_journal
from llmtailor.copying.moving import Clone, is_unfinished
from llmtailor.errors import Interrupted, StorageError, TailorError, TargetError, Unanswered, some
from llmtailor.storage.local import (
    Entries,
    Lock,
    LockHeld,
    OpenFile,
    added_since,
    check_own,
    disk_errors,
    fsync_folder,
    make_folder,
    rename_new,
    replace_folder,
)
from llmtailor.storage.remote import RemotePath, device_of

logger = logging.getLogger(__name__)
OUT, JOURNAL, OWNER, OLD = "out", "journal", "owner", "old"
MAX_JOURNAL_BYTES = 1 << 30
"""A journal has about 100 bytes for each file, and for each 256 MiB"""
_ATTEMPTS = 100
"""Attempts to lock a staging folder that other processes keep removing"""
_LEAVING_S, _RETRY_S = 10.0, 0.1
"""How long the ranks of an earlier merge may take to notice that it has ended, and the time between two checks"""
SPARE_BYTES = 16 << 20
"""Free space needed for folders, manifest and file system overhead, in addition to the bytes of a plan"""


def put_in_place(new: Path, target: Path, aside: Mapping[Path, Path]) -> None:
    """Rename a finished folder to ``target``, and other folders, possibly including ``target``, to other names.

    Nothing is deleted or copied, and from the first rename on, ``target`` always exists and is complete. All are in one
    folder. Raises TargetError if one of the new names is taken, StorageError if a rename fails.
    """
    try:
        if new != target:
            if target.exists():
                if aside[target].exists():
                    raise FileExistsError(errno.EEXIST, "it exists", str(aside[target]))
                replace_folder(new, target, aside[target])
                fsync_folder(target.parent)
                if new.exists():
                    rename_new(new, aside[target])
            else:
                rename_new(new, target)
            fsync_folder(target.parent)
        for folder, name in aside.items():
            if folder != target:
                rename_new(folder, name)
        fsync_folder(target.parent)
    except FileExistsError as error:
        raise TargetError.at(error.filename, "the name is already taken", "move that folder away") from error
    except OSError as error:
        fix = "check the disk and permissions"
        raise StorageError.at(target, f"can't rename: {error.strerror}", fix) from error


def check_old(folder: Path, out: Path, replaces: Entries) -> None:
    """Raise TargetError for anything added to an old output since it was found to be replaceable."""
    if added := added_since(folder, replaces):
        what = f"the output was not replaced: {some(added, 8)} appeared or changed in the meantime"
        raise TargetError.at(out, what, "move them elsewhere and rerun the command, or choose another output")


def replace_old(new: Path, out: Path, aside: Path, replaces: Entries) -> None:
    """Replace the old output with a finished one; the old one is then at ``new``, or else at ``aside``.

    The old one is checked before, and again afterwards, when no other process finds it. Raises TargetError if something
    was added to it, after putting it back; or OSError.
    """
    check_old(out, out, replaces)
    replace_folder(new, out, aside)
    old = new if new.exists() else aside
    try:
        check_old(old, out, replaces)
    except TargetError:
        replace_folder(old, out, new)
        raise


def check_target(out: Path, sources: list[Path], replace: bool) -> None:
    """Raise TargetError if ``out`` exists or replacing it would destroy a source: a checkpoint, or the recipe."""
    for source in sources:
        inner, outer = out.resolve(), source.resolve()
        if inner == outer or outer.is_relative_to(inner) or inner.is_relative_to(outer):
            relation = "is" if inner == outer else "contains" if outer.is_relative_to(inner) else "lies in"
            what = f"the output {relation} {source}, which is a source"
            raise TargetError.at(out, what, "choose another output folder")
    if out.name in ("", ".."):
        raise TargetError.at(out, "the output has no folder name", "name the new folder itself")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise TargetError.at(out, "the output exists and is not a folder", "choose another output, or move it away")
    if out.exists() and not replace and not is_unfinished(out):
        raise already_there(out)


def already_there(out: Path) -> TargetError:
    if isinstance(out, RemotePath):
        return TargetError.at(out, "the output already exists", "choose another one")
    fix = "choose another one, or use --force to replace it once the new one is complete"
    if (left := staging_folder(out)).exists():
        fix += f"; {left} was left over from an interrupted merge and may be removed"
    return TargetError.at(out, "the output already exists", fix)


def old_output(out: Path) -> Path:
    """Return the path of the output to replace: ``out``, unless a merge was cut off during the replacement."""
    old = staging_folder(out) / OLD
    return old if old.exists() and not out.exists() else out


def staging_folder(out: Path) -> Path:
    absolute = out.absolute()
    return absolute.parent / f".{absolute.name}.llmtailor-staging"


def peek(out: Path) -> Unfinished | None:
    """Return what an earlier merge into ``out`` left, without locking. Raises TargetError or StorageError."""
    path = staging_folder(out) / JOURNAL
    with disk_errors(path, "can't read", "check its permissions"), suppress(FileNotFoundError):
        _check_own(path.parent)
        found = _read(path)
        return found and found.with_marks_of(map(_read, rank_journals(path.parent)))
    return None


def _check_own(folder: Path) -> None:
    """Raise TargetError if something that no merge makes has a name in a staging folder, or of it. Raises OSError."""
    for path in (folder, folder / OUT, folder / OLD):
        check_own(path)
    check_own(folder / OWNER, is_file=True)
    for path in (folder / JOURNAL, *rank_journals(folder)):
        check_own(path, is_file=True)
        with suppress(FileNotFoundError):
            if (num_bytes := path.stat().st_size) > MAX_JOURNAL_BYTES:
                what = f"it has {num_bytes:,} bytes, but no journal of a merge has more than {MAX_JOURNAL_BYTES:,}"
                raise TargetError.at(path, what, "move it elsewhere, then rerun the command")


def rank_journal(folder: Path, rank: int) -> Path:
    """Return the path of the journal of a rank other than 0, in a staging folder."""
    return folder / f"{JOURNAL}-{rank}"


def rank_journals(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{JOURNAL}-*"))


def _read(journal: Path) -> Unfinished | None:
    file = OpenFile(journal)  # open as long as it has a name
    return read_journal(file.fd)


def lock_of(out: Path) -> Lock:
    """Return the lock of an output, not yet acquired."""
    folder = staging_folder(out)
    return Lock(folder / JOURNAL, folder / OWNER)


def acquire(lock: Lock, out: Path, until: float = 0.0) -> None:
    """Make the staging folder of an output, and lock it; keep trying until this monotonic time.

    Raises TargetError if another process has the lock, or something else has a name in the folder, or OSError.
    """
    folder, attempts = staging_folder(out), 0
    while True:
        _check_own(folder)
        make_folder(folder)
        try:
            return lock.acquire()
        except FileNotFoundError:  # its last owner has just removed the folder, or the journal that is now locked
            attempts += 1
            if attempts == _ATTEMPTS:
                raise _held(out, "") from None
        except LockHeld as held:
            if time.monotonic() >= until:
                raise _held(out, str(held)) from None
            time.sleep(_RETRY_S)


def _held(out: Path, holder: str) -> TargetError:
    what, fix = "another llmtailor is writing this output", "wait until it is done"
    if holder:
        what = f"{holder} was writing this output; this file system has no locks to show whether it still is"
        fix += f"; if it is dead, remove {staging_folder(out) / OWNER} and rerun the command"
    return TargetError.at(out, what, fix)


class Staging:
    """A locked folder next to ``out`` with a journal, and `path`, which `publish` renames to ``out``.

    ::

        .OUT.llmtailor-staging/
          journal       what is being written, and how far it is; this file is locked
          journal-N     the same of rank N, if several ranks share the merge; locked by that rank
          out/          becomes OUT
          old/          the old OUT during a replacement, where the file system can't exchange folders

    Leaving the block after an interrupt or a disk error keeps the folder if the journal has anything to resume from,
    and in any case if another rank did not answer. Otherwise it is removed.
    """

    def __init__(self, out: Path, replaces: Entries | None = None, patience_s: float = 0.0):
        """``replaces`` is what an existing ``out`` may hold (None: it must not exist); the lock is tried for
        ``patience_s``."""
        self.out = out.absolute()
        self.replaces = replaces
        self.folder = staging_folder(self.out)
        self.path = self.folder / OUT
        self.unfinished: Unfinished | None = None
        """What an earlier merge left"""
        self._lock, self._patience_s = lock_of(self.out), patience_s
        self._is_empty = False
        self._is_published = False

    def __enter__(self) -> Staging:
        try:
            with self._faults("can't make the staging folder", "choose an output where you may write"):
                acquire(self._lock, self.out, time.monotonic() + self._patience_s)
                self.journal = Journal(self._lock.fd)
                self._recover()
        except BaseException:
            if self._is_empty:
                self._remove()
            self._release()
            raise
        return self

    def _recover(self) -> None:
        """Restore the state after an earlier merge, while the lock keeps other processes out."""
        self.unfinished = read_journal(self._lock.fd)
        self._is_empty = self.unfinished is None
        self._take_in_other_ranks()
        if self.unfinished:
            self.journal.reached = {path: marks[-1].num_bytes for path, marks in self.unfinished.marks.items()}
        old = self.folder / OLD
        if old.exists() and not self.out.exists():  # cut off while OUT was being replaced
            old.rename(self.out)
            logger.info("restored %s: an earlier merge was interrupted while replacing it", self.out)
            fsync_folder(self.out.parent)
        if self.out.exists():
            if self.replaces is None:
                raise already_there(self.out)
            check_old(self.out, self.out, self.replaces)

    def _take_in_other_ranks(self) -> None:
        """Enter the marks of an earlier merge's other ranks into the journal, once they have stopped writing."""
        until = time.monotonic() + _LEAVING_S
        for path in rank_journals(self.folder):
            lock = Lock(path)
            while True:
                try:
                    lock.acquire(create=False)
                    break
                except LockHeld:
                    if time.monotonic() > until:
                        what = f"rank {path.name.rpartition('-')[2]} of an earlier merge is still writing this output"
                        raise TargetError.at(self.out, what, f"end that process: it has locked {path}") from None
                    time.sleep(_RETRY_S)
            try:
                found = read_journal(lock.fd)
                if self.unfinished and found and found.identity.digest() == self.unfinished.identity.digest():
                    self.journal.take_in(found.marks)
                    self.unfinished = self.unfinished.with_marks_of([found])
                path.unlink()
            finally:
                lock.release()

    @property
    def kept_bytes(self) -> int:
        """The durable bytes that the next merge can keep if this one ends now"""
        if self._is_published:
            return 0
        reached = dict(self.journal.reached)
        for path in rank_journals(self.folder):
            with suppress(OSError):
                found = _read(path)
                reached |= {name: marks[-1].num_bytes for name, marks in found.marks.items()} if found else {}
        return sum(reached.values())

    def reset(self, identity: Identity) -> None:
        """Discard what an earlier merge left, and start this one's journal. Raises StorageError."""
        with self._faults("can't make the staging folder"):
            self.unfinished = None
            self.journal.clear()
            self._empty({})
            self.path.mkdir(exist_ok=True)
            self.journal.begin(identity)
            fsync_folder(self.folder)

    def resume(self) -> None:
        """Keep only the files in the journal. Raises StorageError."""
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
                status = path.lstat()
                is_own = stat.S_ISREG(status.st_mode) and status.st_nlink == 1  # else writing changes other files
                if not is_own or str(path.relative_to(self.path)) not in keep:
                    path.unlink()
            if Path(folder) != self.path and not any(Path(folder).iterdir()):
                Path(folder).rmdir()

    def publish(self) -> None:
        """Make everything durable, then publish the whole output at once. Raises TargetError or StorageError."""
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
                fix = "choose another one, or use --force"
                raise TargetError.at(self.out, "the output appeared in the meantime", fix) from error
        self._is_published = True
        with self._faults("the output is complete, but the disk doesn't confirm that it is durable"):
            fsync_folder(self.out.parent)
            fsync_folder(self.folder)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_resumable = (Interrupted, StorageError, TargetError)
        is_refused = isinstance(error, TailorError) and not isinstance(error, is_resumable)
        if isinstance(error, Unanswered):  # the rank that hangs may go on, and its lock must be there
            logger.info("kept %s", self.folder)
        elif is_refused or not self.kept_bytes:
            self._remove()
        else:
            logger.info("kept %s, with %s bytes to resume from", self.folder, f"{self.kept_bytes:,}")
        self._release()

    def _remove(self) -> None:
        try:
            self.journal.clear()  # before the files it lists
            shutil.rmtree(self.path, ignore_errors=True)  # after a replacement it is the old output
            self._remove_old()
            for journal in rank_journals(self.folder):
                journal.unlink()
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

    def _faults(self, what: str, fix: str = "check the disk") -> AbstractContextManager[None]:
        return disk_errors(self.folder, what, fix)


@contextmanager
def left_over(out: Path) -> Iterator[bool]:
    """Yield whether an output's staging folder can be removed, and keep merges out within the block.

    It can't be while a merge is running, or if it has the only copy of a replaced output. Raises OSError.
    """
    folder = staging_folder(out)
    if (folder / OLD).exists() and not out.exists():
        yield False
        return
    lock, is_unused = lock_of(out), True
    try:
        lock.acquire(create=False)
    except FileNotFoundError:  # killed before it began, unless another one is just starting
        is_unused = not (folder / JOURNAL).exists()
    except LockHeld:
        is_unused = False
    try:
        yield is_unused
    finally:
        lock.release()


def remove_left_over(out: Path) -> None:
    """Remove leftovers of a merge that was killed after it published an output. Raises TargetError or OSError."""
    _check_own(staging_folder(out))
    with left_over(out) as is_unused:
        if is_unused and staging_folder(out).exists():
            shutil.rmtree(staging_folder(out))


def space_for(plan: Plan, clone: Clone) -> int:
    """Return the bytes that the files of a plan take; only ``clone="require"`` promises that some are shared."""
    shared = plan.shareable_bytes if clone == "require" else sum(file.num_bytes for file in plan.links)
    return plan.num_bytes - shared + SPARE_BYTES


def check_space(out: Path, num_bytes: int) -> None:
    """Raise StorageError if the file system of ``out`` has fewer bytes free."""
    free = free_bytes(out)
    if free < num_bytes:
        raise StorageError.at(
            out,
            f"{num_bytes:,} bytes are needed, but {free:,} are free",
            f"free {num_bytes - free:,} bytes, or choose an output on another disk",
        )


def free_bytes(out: Path) -> int:
    """Return the bytes free for this user on the file system where ``out`` will be."""
    there = out.absolute()
    while not there.exists():
        there = there.parent
    stat = os.statvfs(there)
    return stat.f_bavail * stat.f_frsize


def check_device(plan: Plan, out: Path) -> None:
    """Raise TargetError if a plan has hard links, and ``out`` is not on the file system of their files."""
    there = device_of(out.absolute())
    linked = {plan.path(file.origin.source, file.origin.extent.path): None for file in plan.links}
    if others := [path for path in linked if device_of(path) != there or there is None]:
        what = f"--reference: {others[0]} is on another file system, or one without hard links"
        raise TargetError.at(out, what, "leave out --reference, or choose another output")


def occupied_bytes(out: Path) -> int:
    """Return the space that an earlier merge into ``out`` takes and the next one reuses."""
    total = 0
    for folder, _, names in os.walk(staging_folder(out)):
        for name in names:
            with suppress(FileNotFoundError):  # another merge is running during a dry run
                total += (Path(folder) / name).lstat().st_blocks * 512
    return total
