"""Room on disk: what an output needs, what there is."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from llmtailor.checkpoint.layout import Plan
from llmtailor.engine.moving import Clone
from llmtailor.engine.staging import staging_folder
from llmtailor.errors import StorageError

SPARE_BYTES = 16 << 20
"""Free space needed for folders, manifest and file system overhead, in addition to the bytes of a plan"""


def space_for(plan: Plan, clone: Clone) -> int:
    """Return the bytes that the files of a plan take; only ``clone="require"`` promises that some are shared."""
    return plan.num_bytes - (plan.shareable_bytes if clone == "require" else 0) + SPARE_BYTES


def check_space(out: Path, num_bytes: int) -> None:
    """Raise StorageError if the file system of ``out`` has fewer bytes free."""
    free = free_bytes(out)
    if free < num_bytes:
        raise StorageError.at(
            out,
            f"{num_bytes:,} bytes are needed, but {free:,} are free",
            f"free {num_bytes - free:,} bytes, or choose an output on another disk",
        )


def free_bytes(out: Path) -> int:
    """Return the bytes free for this user on the file system where ``out`` will be."""
    there = out.absolute()
    while not there.exists():
        there = there.parent
    stat = os.statvfs(there)
    return stat.f_bavail * stat.f_frsize


def occupied_bytes(out: Path) -> int:
    """Return the space that an earlier merge into ``out`` takes and the next one reuses."""
    total = 0
    for folder, _, names in os.walk(staging_folder(out)):
        for name in names:
            with suppress(FileNotFoundError):  # another merge is running during a dry run
                total += (Path(folder) / name).lstat().st_blocks * 512
    return total
