"""Where things lie in a run's folder while it is thinned out, and what was left there by a process that was killed.

::

    RUN/partial/.step-00000100.llmtailor-thinning   a partial checkpoint while it is written
    RUN/.checkpoint-100.llmtailor-thinning          a checkpoint without optimizer while it is put together
    RUN/.checkpoint-100.llmtailor-old               the full one, for a moment, where folders can't be exchanged
    RUN/.checkpoint-100.llmtailor-thinned           a full one that has been replaced, while it is removed
"""

from __future__ import annotations

import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from llmtailor.formats.partial.manifest import FOLDER
from llmtailor.runs.folder import sync

_MAKING, _OLD, _REPLACED = "thinning", "old", "thinned"
_LEFT = re.compile(rf"\.(.+)\.llmtailor-({_MAKING}|{_OLD}|{_REPLACED})")


def making(path: Path) -> Path:
    """Return where the folder that will be ``path`` is put together."""
    return _beside(path, _MAKING)


def old(path: Path) -> Path:
    return _beside(path, _OLD)


def remove_replaced(path: Path, now_at: Path | None = None) -> None:
    """Remove a folder that has been replaced; it lies at ``now_at``, or still at ``path``. Raises OSError.

    It disappears by a rename first, so that it is never there by half.
    """
    aside = _beside(path, _REPLACED)
    if aside.exists():
        shutil.rmtree(aside)
    (now_at or path).rename(aside)
    sync(path.parent)
    shutil.rmtree(aside)
    sync(path.parent)


def restore(run: Path) -> None:
    """Put a full checkpoint back in its place if a killed process had just taken it away. Raises OSError."""
    for folder, path, kind in _find(run):
        if kind == _OLD and not path.exists():
            folder.rename(path)
            sync(path.parent)


def left_behind(run: Path) -> list[Path]:
    """Return what a killed process has left and nobody needs."""
    return [folder for folder, path, kind in _find(run) if kind != _OLD or path.exists()]


def freed_bytes(files: Iterable[Path]) -> int:
    """Return the bytes that removing these files frees: one with further links elsewhere frees nothing."""
    links: dict[tuple[int, int], int] = defaultdict(int)
    stats: dict[tuple[int, int], os.stat_result] = {}
    for path in files:
        stat = path.lstat()
        links[stat.st_dev, stat.st_ino] += 1
        stats[stat.st_dev, stat.st_ino] = stat
    return sum(stat.st_size for key, stat in stats.items() if links[key] >= stat.st_nlink)


def files_in(folder: Path) -> Iterator[Path]:
    """Yield every file below a folder."""
    for where, _, names in os.walk(folder):
        yield from (Path(where) / name for name in names)


def _beside(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.llmtailor-{kind}")


def _find(run: Path) -> list[tuple[Path, Path, str]]:
    """Return folders left behind, the checkpoint that each belongs to, and the kind."""
    found = []
    for parent in (run, run / FOLDER):
        for folder in sorted(parent.iterdir()) if parent.is_dir() else ():
            if (match := _LEFT.fullmatch(folder.name)) and folder.is_dir():
                found.append((folder, parent / match[1], match[2]))
    return found
