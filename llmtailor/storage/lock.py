"""One writer at a time: a lock that the system gives back when its holder dies, or else a file with the holder's name.

The lock is taken on a file, opened for writing, because NFS refuses to lock a folder. File systems without locks
(Lustre as it is often mounted, NFS without its lock service) leave a file made exclusively. Nobody can see there
whether the holder still lives on some other node, so it is never taken for dead.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from datetime import datetime, timezone
from pathlib import Path

from llmtailor.storage.local import write_all

_WITHOUT_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL}


class Held(Exception):
    """Somebody else has the lock; the argument says who, as far as that is known."""


def acquire(fd: int, owner: Path) -> bool:
    """Lock an open file; closing it unlocks. Where there are no locks, make the file ``owner``, and return True.

    Raises Held, or OSError.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        raise Held("") from None
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    me = f"process {os.getpid()} on {socket.gethostname()}, since {now}"
    try:
        made = os.open(owner, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileExistsError:
        raise Held(_read(owner)) from None
    try:
        write_all(made, me.encode())
    finally:
        os.close(made)
    return True


def _read(owner: Path) -> str:
    try:
        return owner.read_text(errors="replace")[:200] or "an unknown process"
    except OSError:
        return "an unknown process"
