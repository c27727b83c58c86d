"""What lies in a folder, so that it can be told later whether something came or changed."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from llmtailor.core.index import FileFact

Entries = Mapping[str, FileFact | None]
"""Relative path -> size and time of a regular file; None for all else. Those of folders end in ``/``."""


def list_entries(folder: Path) -> dict[str, FileFact | None]:
    """Return what lies directly in a folder, sorted by name; links are not followed. Raises OSError."""
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
    """Return what lies in a folder, at any depth, and was not there, or not the same, ``before``. Raises OSError.

    A folder that was not there is named, and not looked into.
    """
    found: list[str] = []
    for name, fact in list_entries(folder).items():
        if name not in before or not _is_like(fact, before[name]):
            found.append(name)
        elif name.endswith("/"):
            inside = {path[len(name) :]: old for path, old in before.items() if path.startswith(name) and path != name}
            found += [name + path for path in added_since(folder / name, inside)]
    return found


def _is_like(fact: FileFact | None, other: FileFact | None) -> bool:
    return fact is other if fact is None or other is None else fact.is_like(other)


def list_files(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of change of every file at any depth, links as they are, by relative path."""
    found = {}
    for where, _, names in os.walk(folder):
        for name in names:
            path = Path(where) / name
            status = path.lstat()
            found[str(path.relative_to(folder))] = (status.st_size, status.st_mtime_ns)
    return found
