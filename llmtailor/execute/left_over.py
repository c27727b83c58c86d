"""What merges have left behind, and whether it can go."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmtailor.execute.commit import JOURNAL, OLD, OWNER, staging_folder
from llmtailor.execute.lock import Held, acquire


@contextmanager
def left_over(out: Path) -> Iterator[bool]:
    """Tell whether what lies in an output's staging folder can go, and keep merges out for as long as the block lasts.

    It can't while a merge is at work there, or if it has the only copy of an output that was being replaced. Raises
    OSError.
    """
    folder = staging_folder(out)
    if (folder / OLD).exists() and not out.exists():
        yield False
        return
    try:
        fd = os.open(folder / JOURNAL, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:  # killed before it began
        yield True
        return
    owner_is_ours, is_unused = False, True
    try:
        try:
            owner_is_ours = acquire(fd, folder / OWNER)
        except Held:
            is_unused = False
        yield is_unused
    finally:
        if owner_is_ours:
            (folder / OWNER).unlink(missing_ok=True)
        os.close(fd)


def remove_left_over(out: Path) -> None:
    """Remove what the merge that has published an output was killed before it could remove. Raises OSError."""
    with left_over(out) as is_unused:
        if is_unused and staging_folder(out).exists():
            shutil.rmtree(staging_folder(out))
