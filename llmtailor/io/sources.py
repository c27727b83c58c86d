"""Files that others wrote, opened so that nothing hangs and nothing swells: regular files only, small ones whole.

A symbolic link is followed, whatever it points to: copying reads what the user may read anyway. What is behind it
must be a regular file; a pipe would block for ever, and some devices act on being opened.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmtailor.codes import Code
from llmtailor.errors import SourceError

_COPY_AGAIN = "copy the file again from where it was saved, or leave this checkpoint out"
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class SourceFile:
    """An open regular file, and its size at the moment of opening."""

    def __init__(self, fd: int, num_bytes: int, where: str):
        self.fd = fd
        self.num_bytes = num_bytes
        self.where = where

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes ``start``..``stop``, which must lie within ``num_bytes``.

        Raises SourceError if they can't be read or are not there any more.
        """
        chunks = []
        while start < stop:
            try:
                chunk = os.pread(self.fd, stop - start, start)
            except OSError as error:
                raise _unreadable(self.where, error) from error
            if not chunk:
                what = f"the file ends before byte {stop}: it became shorter while it was read"
                raise SourceError.at(self.where, what, "stop what writes to it, and start again", Code.FILE_CHANGED)
            chunks.append(chunk)
            start += len(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)


@contextmanager
def open_source(path: Path, where: str) -> Iterator[SourceFile]:
    """Open a regular file to read it; messages call it ``where``. Raises SourceError for anything else."""
    try:
        check_regular(path.stat().st_mode, where)
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise SourceError.at(where, "the file is missing", _COPY_AGAIN, Code.FILE_MISSING) from error
    except ValueError as error:
        raise SourceError.at(
            where, f"no file can have this name ({error})", _COPY_AGAIN, Code.FILE_UNREADABLE
        ) from error
    except OSError as error:
        raise _unreadable(where, error) from error
    try:
        status = os.fstat(fd)
        check_regular(status.st_mode, where)
        yield SourceFile(fd, status.st_size, where)
    finally:
        os.close(fd)


def read_source(path: Path, where: str, max_bytes: int) -> bytes:
    """Return the content of a regular file. Raises SourceError for anything else, and for a file that is larger."""
    with open_source(path, where) as file:
        if file.num_bytes > max_bytes:
            what = f"the file has {file.num_bytes:,} bytes, and {max_bytes:,} are more than it ever needs"
            raise SourceError.at(where, what, _COPY_AGAIN)
        return file.read(0, file.num_bytes)


def check_regular(mode: int, where: str) -> None:
    """Raise SourceError unless a file's mode is that of a regular one; it says what it is instead."""
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no regular file")
        raise SourceError.at(where, f"this is {kind}, where a file belongs", _COPY_AGAIN, Code.NOT_A_FILE)


def _unreadable(where: str, error: OSError) -> SourceError:
    mend = "run as a user who may read it" if isinstance(error, PermissionError) else "check the disk"
    return SourceError.at(where, f"the file can't be read: {error.strerror or error}", mend, Code.FILE_UNREADABLE)
