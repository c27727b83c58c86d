"""One writer at a time: a lock that the system releases when its holder dies, or else a file with the holder's name.

The lock is taken on a file opened for writing, because NFS refuses to lock a folder. On file systems without locks
(Lustre as it is often mounted, NFS without its lock service), an exclusively created file replaces it if the caller
names one. There, a holder on another node can't be checked, so it is never assumed dead.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import weakref
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

from llmtailor.storage.local import write_all

_WITHOUT_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL}


class Held(Exception):
    """Another process has the lock; the argument describes it, if known."""


class Lock:
    """A lock on a file, held by this process: forked children (data loader workers) neither have nor keep it."""

    def __init__(self, path: Path, owner: Path | None = None):
        """``owner`` is the file to create if there are no locks; without one, others are then not kept out."""
        self.path = path
        self.owner = owner
        self.fd = -1
        """The locked file, open for reading and writing; -1 if the lock is not held"""
        self._times = 0
        self._owns_file = False

    def acquire(self, *, create: bool = True) -> None:
        """Take the lock, or increment its count if held; ``create`` makes the file if it is missing.

        Raises Held, FileNotFoundError (also if the file was removed in the meantime), or another OSError.
        """
        if self.fd >= 0:
            self._times += 1
            return
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0), 0o666)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Held("") from None
            except OSError as error:
                if error.errno not in _WITHOUT_LOCKS:
                    raise
                self._own()
            if not os.path.samestat(os.fstat(fd), self.path.stat()):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
        except BaseException:
            os.close(fd)
            self._disown()
            raise
        self.fd, self._times = fd, 1
        _held.add(self)

    def release(self) -> None:
        """Undo one `acquire`; the last one releases the lock."""
        self._times = max(0, self._times - 1)
        if self.fd >= 0 and not self._times:
            self._disown()
            os.close(self.fd)
            self.fd = -1

    def _own(self) -> None:
        if self.owner is None:
            return
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        try:
            fd = os.open(self.owner, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            raise Held(_read(self.owner)) from None
        self._owns_file = True
        try:
            write_all(fd, f"process {os.getpid()} on {socket.gethostname()}, since {now}".encode())
        finally:
            os.close(fd)

    def _disown(self) -> None:
        if self._owns_file and self.owner is not None:
            with suppress(OSError):
                self.owner.unlink()
        self._owns_file = False


_held: weakref.WeakSet[Lock] = weakref.WeakSet()


def _forget() -> None:
    """Close the copies in a forked child, because an open one holds the lock."""
    for lock in list(_held):
        if lock.fd >= 0:
            os.close(lock.fd)
        lock.fd, lock._times, lock._owns_file = -1, 0, False


os.register_at_fork(after_in_child=_forget)


def _read(owner: Path) -> str:
    try:
        return owner.read_text(errors="replace")[:200] or "an unknown process"
    except OSError:
        return "an unknown process"
