"""The host memory that background saves may use."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch

MIN_BYTES = 64 << 20
"""Less would make the copying wait for the disk without need."""


def auto_bytes(masters: Iterable[torch.Tensor], moments: str | None) -> int:
    """Return the size of a rank's host buffer in bytes: its masters and two moments, if there is enough memory."""
    per_element = 4 + 2 * (2 if moments == "bf16" else 4)
    states = sum(master.numel() for master in masters) * per_element
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
    return max(MIN_BYTES, min(states, available_bytes() // 4 // ranks))


def available_bytes() -> int:
    """Return the memory that this process and the others of its container can still get, in bytes."""
    amounts = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            amounts.append(int(line.split()[1]) << 10)
    limit, used = (_lines(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if limit and used and limit[0].isdecimal():
        amounts.append(max(0, int(limit[0]) - int(used[0])))
    return min(amounts)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
