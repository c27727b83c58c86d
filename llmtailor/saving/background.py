"""What saves in the background need on a rank: host memory, the barrier before the optimizer's step, and messages."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

import torch

from llmtailor.errors import UsageError
from llmtailor.ranks.board import StoreBoard
from llmtailor.saving.live import ANY_STEP
from llmtailor.saving.options import SavingOptions
from llmtailor.saving.pending import BackgroundSave, Work
from llmtailor.saving.ranks import Ranks
from llmtailor.saving.snapshot import Arena, Snapshot, StepBarrier, storage_of
from llmtailor.saving.training import Training

logger = logging.getLogger("llmtailor.saving")
MIN_HOST_BUFFER = 64 << 20
"""Less would make the copying wait for the disk without need."""


class Background:
    """Saves of a training in the background, one at a time. All ranks make one.

    Raises UsageError if that is not possible, on every rank, with the reason.
    """

    def __init__(self, training: Training, options: SavingOptions, ranks: Ranks, board: StoreBoard) -> None:
        self._training = training
        self._options = options
        self._ranks = ranks
        self._board = board
        made: list[Arena] = []
        ranks.together(lambda: made.append(self._allocate()))
        (self._arena,) = made
        self._barrier = StepBarrier()
        self._masters: frozenset[int] = frozenset()
        """Storages of the masters, as of a save that had others than known before"""

    def _allocate(self) -> Arena:
        if why := self._training.writes_unseen():
            raise UsageError.at("background", why, "set background=False to silence this")
        masters = [one.tensor for one in self._training.masters()]
        given = self._options.host_buffer
        num_bytes = auto_bytes(masters, self._options.moments) if given == "auto" else given
        try:
            return Arena(num_bytes, pinned=any(master.is_cuda for master in masters))
        except (RuntimeError, MemoryError, OSError, OverflowError) as error:
            what = f"there is no host memory of {num_bytes:,} bytes: {error}"
            raise UsageError.at("host_buffer", what, "give fewer bytes") from error

    def start(self, work: Work, began: float) -> BackgroundSave:
        """Start a save; the next step of the optimizer waits for what is not copied yet."""
        snapshot, share, timeout = None, work.share, self._options.write_timeout
        if share is not None:
            snapshot = Snapshot(share.live, share.files, self._arena, timeout, began, share.check)
            if not {one.written_with for one in share.live.tensors} - {0, ANY_STEP} <= self._masters:
                self._masters = frozenset(storage_of(one.tensor) for one in self._training.masters())
            self._barrier.arm(snapshot, self._training.optimizers(), self._masters)
        return BackgroundSave(self._ranks, self._board, work, snapshot, began, timeout)

    def settle(self) -> None:
        """Wait until everything is copied."""
        self._barrier.settle()

    def settle_frozen(self) -> None:
        """Wait until the frozen params of the save are copied."""
        self._barrier.settle_frozen()

    def close(self) -> None:
        self._barrier.remove()


def open_background(training: Training, options: SavingOptions, ranks: Ranks, board: StoreBoard) -> Background | None:
    """Return what saves in the background need; None, with a line in the log, if they are off or not possible."""
    try:
        return Background(training, options, ranks, board) if options.background else None
    except UsageError as error:
        logger.warning("saves stop training until they are complete: %s", error)
        return None


def auto_bytes(masters: Iterable[torch.Tensor], moments: str | None) -> int:
    """Return the size of a rank's host buffer in bytes: its masters and two moments, if there is enough memory."""
    per_element = 4 + 2 * (2 if moments == "bf16" else 4)
    states = sum(master.numel() for master in masters) * per_element
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
    return max(MIN_HOST_BUFFER, min(states, available_bytes() // 4 // ranks))


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
