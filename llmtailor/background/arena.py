"""The host memory that saves in the background are copied to, and how much of it there is."""

from __future__ import annotations

import logging
import math
import mmap
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from llmtailor.background.options import SavingOptions
from llmtailor.checkpoint.layout import BLOCK_BYTES
from llmtailor.copying.streams import huge_pages
from llmtailor.errors import UsageError
from llmtailor.live.training import Training
from llmtailor.model.precision import EXACT, Precision
from llmtailor.ranks.team import Ranks

logger = logging.getLogger("llmtailor.saving")
LEAST_BUFFER = 64 << 20
"""Less would make the copying wait for the disk without need."""
_BESIDE_STATES = 8 << 20
"""Of a save: step counts, buffers, gaps of alignment. If the buffer is full, the last copy waits for the disk."""


class Arena:
    """A ring of host memory, allocated once and used by one snapshot after another."""

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        size = max(num_bytes // BLOCK_BYTES, 8) * BLOCK_BYTES
        pages = huge_pages(size)
        with suppress(OSError, AttributeError):  # else each page would be copied while workers of a loader live
            pages.obj.madvise(mmap.MADV_DONTFORK)  # type: ignore[attr-defined]
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        memory.zero_()  # the kernel hands out pages when they are first written: not during a save
        if pinned:
            _pin(memory, self)
        start = -memory.data_ptr() % BLOCK_BYTES
        self.num_bytes = (size - start) // BLOCK_BYTES * BLOCK_BYTES
        self.memory = memory[start : start + self.num_bytes]
        self.streams: dict[torch.device, torch.cuda.Stream] = {}
        """Those that copy from GPUs: the same in all saves, because torch keeps memory for each stream"""


def _pin(memory: torch.Tensor, owner: object) -> None:
    """Let GPUs copy straight to memory until its owner is gone. torch's own pinned memory is rounded up to a power of
    2, and kept for good. Raises RuntimeError."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)))
    release = weakref.finalize(owner, lambda kept: runtime.cudaHostUnregister(kept.data_ptr()), memory)
    release.atexit = False  # CUDA may be gone by then


def allocate_arenas(
    options: SavingOptions,
    ranks: Ranks,
    writes_unseen: Callable[[], str | None],
    needed: Callable[[], tuple[int, bool]],
    count: int = 1,
) -> list[Arena]:
    """Return the memory for saves in the background, one for each that may be written at once; none if these are off or
    not possible, with the reason in the log.

    All ranks call it, and get the same answer. ``needed`` returns the bytes of this rank's states, and whether some are
    on a GPU.
    """
    made: list[Arena] = []

    def allocate() -> None:
        if why := writes_unseen():
            raise UsageError.at("background", why, "set background=False to silence this")
        states, pinned = needed()
        num_bytes = auto_bytes(states, count) if options.host_buffer == "auto" else options.host_buffer
        try:
            made.extend(Arena(num_bytes, pinned=pinned) for _ in range(count))
        except (RuntimeError, MemoryError, OSError, OverflowError) as error:
            what = f"there is no host memory of {num_bytes:,} bytes: {error}"
            raise UsageError.at("host_buffer", what, "give fewer bytes") from error

    if not options.background:
        return []
    try:
        ranks.run_on_all(allocate)
    except UsageError as error:
        logger.warning("saves stop training until they are complete: %s", error)
        return []
    return made


def needed_by(training: Training, precision: Precision) -> tuple[int, bool]:
    """Return the bytes of a rank's masters and two moments as they are copied, and whether they are on a GPU."""
    masters = [one.tensor for one in training.masters()]
    is_on_gpu = any(master.is_cuda for master in masters)
    precision = precision if is_on_gpu else EXACT  # in host memory, they are rounded behind the buffer
    per_element = precision.master_bytes(with_moments=True) + precision.moment_bytes
    return math.ceil(sum(master.numel() for master in masters) * per_element), is_on_gpu


def auto_bytes(states: int, count: int = 1) -> int:
    """Return the size of each of a rank's host buffers: a little more than its states, if there is enough memory."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
    return max(LEAST_BUFFER, min(states + _BESIDE_STATES, available_bytes() // 4 // ranks // count))


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
