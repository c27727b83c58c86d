"""Renames that neither overwrite nor leave a gap, with flags of Linux's renameat2 that the standard library lacks.

File systems without them (NFS, some that run in user space), and other systems, get the closest that POSIX has.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

_AT_FDCWD = -100
_NOREPLACE = 1
_EXCHANGE = 2


def rename_new(source: Path, target: Path) -> None:
    """Rename to a name that nothing has, not even an empty folder. Raises FileExistsError, or OSError."""
    if _renameat2(source, target, _NOREPLACE):
        return
    if target.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    source.rename(target)


def replace_folder(source: Path, target: Path, aside: Path) -> None:
    """Put one folder in the place of another, which is then at ``source``, or else at ``aside``. Raises OSError.

    Without renameat2 there is a moment in which nothing is at ``target``, and the old folder is at ``aside``.
    """
    if not _renameat2(source, target, _EXCHANGE):
        target.rename(aside)
        try:
            source.rename(target)
        except OSError:
            aside.rename(target)
            raise


def _renameat2(source: Path, target: Path, flag: int) -> bool:
    """Return False where this can't be done at all."""
    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):  # no such C library, or no such function in it
        return False
    if function(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flag) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(target))
