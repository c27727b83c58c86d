"""What is in a folder: names, sizes and times, to notice later changes."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class FileFact:
    """A file as indexed; a later change means that the source changed during the run."""

    num_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    """Also change with a new hard link or a mount, so they are a reason to compare contents, not to refuse"""

    @classmethod
    def of(cls, stat: os.stat_result) -> FileFact:
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)

    def is_like(self, other: FileFact) -> bool:
        """Return whether size and modification time agree."""
        return (self.num_bytes, self.mtime_ns) == (other.num_bytes, other.mtime_ns)


Entries = Mapping[str, FileFact | None]
"""Relative path -> size and time of a regular file, None for anything else. Folders' paths end in ``/``."""


def list_entries(folder: Path) -> dict[str, FileFact | None]:
    """Return the direct entries of a folder, sorted by name; links are not followed. Raises OSError."""
    found: dict[str, FileFact | None] = {}
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda one: one.name):
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                found[f"{entry.name}/"] = None
            else:
                found[entry.name] = FileFact.of(status) if stat.S_ISREG(status.st_mode) else None
    return found


def added_since(folder: Path, before: Entries) -> list[str]:
    """Return the entries of a folder, at any depth, that are new or changed since ``before``. Raises OSError.

    A new folder is listed without its content.
    """
    found: list[str] = []
    for name, fact in list_entries(folder).items():
        known = before.get(name)
        if name not in before or not (fact.is_like(known) if fact and known else fact is known):
            found.append(name)
        elif name.endswith("/"):
            inside = {path[len(name) :]: old for path, old in before.items() if path.startswith(name) and path != name}
            found += [name + path for path in added_since(folder / name, inside)]
    return found


def list_files(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and modification time of every file at any depth, without following links, by relative path."""
    found = {}
    for where, _, names in os.walk(folder):
        for name in names:
            path = Path(where) / name
            status = path.lstat()
            found[str(path.relative_to(folder))] = (status.st_size, status.st_mtime_ns)
    return found
