"""What is in a folder, and changes of a file where it lies."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

TOLD = ("llmtailor.json", "README.md")
"""A composite's files that say when it was made, and of what"""


def names(folder: Path) -> set[str]:
    """Return the paths of all files, relative to the folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def contents(folder: Path, *but: str) -> dict[str, bytes]:
    """Return what the files hold, but for those of some names."""
    return {path: (folder / path).read_bytes() for path in sorted(names(folder)) if Path(path).name not in but}


def edit_json(path: Path, change: Callable[[Any], Any]) -> None:
    """Change the tree in place, or put what ``change`` returns in its place."""
    tree = json.loads(path.read_text())
    changed = change(tree)
    path.write_text(json.dumps(tree if changed is None else changed))


def flip(path: Path, at: int, bit: int = 0) -> None:
    """Flip a bit of a byte, as a disk does; ``at`` may count from the end."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def cut(path: Path, num_bytes: int | None = None) -> None:
    """Cut some bytes off the end, or half of them."""
    data = path.read_bytes()
    path.write_bytes(data[: -num_bytes if num_bytes else len(data) // 2])
