"""Files and folders that survive a power cut."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from llmtailor.errors import StorageError

UNFINISHED = re.compile(r"\..+\.llmtailor-new")
"""Names of what `replace_durably` was writing when it was killed"""


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all of it, in as many calls as the system takes. Raises OSError."""
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def write_durably(path: Path, data: bytes) -> None:
    """Write a new file and fsync it. Raises StorageError."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise StorageError.at(path, f"can't write: {error.strerror}", "check the disk") from error


def replace_durably(path: Path, data: bytes) -> None:
    """Write a file, new or not, so that it is either the old one or the new one, whole. Raises StorageError."""
    beside = path.with_name(f".{path.name}.llmtailor-new")
    try:
        beside.unlink(missing_ok=True)
        write_durably(beside, data)
        beside.replace(path)
    except OSError as error:
        raise StorageError.at(path, f"can't write: {error.strerror}", "check the disk") from error


def make_folder(path: Path) -> None:
    """Make a folder and what is missing above it, durably; it may be there already. Raises OSError."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        fsync_folder(folder.parent)


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the file system can. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems have no fsync for folders
            raise
    finally:
        os.close(fd)
