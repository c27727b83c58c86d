"""What savers have in common: host memory for copies, the wait before the optimizer's step, and saves in progress."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

from llmtailor.background.arena import Arena, allocate_arenas
from llmtailor.background.options import SavingOptions
from llmtailor.background.pending import PendingSave, SaveRecord, Work
from llmtailor.background.process_exit import release
from llmtailor.background.snapshot import Snapshot, StepBarrier
from llmtailor.background.writing import Share
from llmtailor.ranks.team import Ranks

logger = logging.getLogger("llmtailor.saving")
STUCK = "is stuck; the disk is not accepting writes"


class BackgroundSaver(ABC):
    """The base of savers. All ranks make the same calls, between two optimizer steps.

    1) ``__init__`` allocates the memory. 2) For each save, `_wait_for_room`, then `_why_busy`, about which the ranks
    vote; then `_start_save`. 3) `finish` waits for the saves in progress, `_finish_until` for as long as there is time
    when the process ends.
    4) `close`.

    Args:
        writes_unseen: see `live.training.Training.writes_unseen`.
        needed: returns the bytes of this rank's states, and whether some are on a GPU.
    """

    def __init__(
        self,
        options: SavingOptions,
        ranks: Ranks,
        record: SaveRecord,
        writes_unseen: Callable[[], str | None],
        needed: Callable[[], tuple[int, bool]],
    ) -> None:
        self.options, self.ranks, self._save_record = options, ranks, record
        self._arenas = allocate_arenas(options, ranks, writes_unseen, needed, options.in_flight)
        """None if a save stops training until it is complete"""
        self._barrier = StepBarrier(waits=bool(self._arenas))
        self._running: list[PendingSave] = []
        """The saves in progress, oldest first; one that is done stays until the saver has taken note of its outcome"""

    @abstractmethod
    def _step_writers(self, share: Share) -> tuple[Collection[object], frozenset[int]]:
        """Return the optimizers that write what is saved, and the storages of the masters."""

    def _wait_for_room(self, *, may_wait: bool) -> None:
        """Wait for the oldest save in progress if there is no room for another one, and if this ``may_wait``."""
        if self._running:
            self._barrier.wait_copied()  # only a save without a step in between is still copied
            if may_wait and len(self._running) >= self.options.in_flight:
                self._running[0].wait_unless_stuck()

    def _why_busy(self) -> str:
        """Return what delays the oldest save in progress; empty if there is room for another one."""
        if self._running and self._running[0].is_stuck:
            return STUCK
        return "is still being written" if len(self._running) >= self.options.in_flight else ""

    def _start_save(self, work: Work) -> PendingSave:
        """Start a save; without arenas, complete it. The optimizer's next step waits until it is copied."""
        after = self._running[-1] if self._running else None
        save = PendingSave(self._save_record, work, self._snapshot(work), stops_training=not self._arenas, after=after)
        self._running.append(save)
        return save

    def _snapshot(self, work: Work) -> Snapshot | None:
        share, arena = work.share, self._free_arena()
        if share is None or arena is None or not share.live.tensors:
            return None
        snapshot = Snapshot(share.live, share.copied, arena, self.options.write_timeout, work.began, share.check)
        self._barrier.arm(snapshot, *self._step_writers(share))
        return snapshot

    def _free_arena(self) -> Arena | None:
        used = [save.arena for save in self._running]
        return next((arena for arena in self._arenas if all(arena is not other for other in used)), None)

    def _collect_finished(self) -> None:
        """Take note of the outcomes of earlier saves, oldest first."""
        while self._running and self._running[0].is_done:
            save = self._running.pop(0)
            while save.failure is not None and self._running:  # they build on it, and fail with it
                later = self._running.pop(0)
                if not later.wait_unless_stuck():
                    later.give_up()
            self._take_note(save)

    def _take_note(self, save: PendingSave) -> None:  # noqa: B027 - a saver may know enough
        """Called once with each save that is done, but not with those that failed because this one did."""

    def _wait_for(self, save_ids: Collection[str]) -> None:
        for save in self._running:
            if save.work.save_id in save_ids:
                save.wait_unless_stuck()

    def finish(self) -> None:
        """Wait until no save is in progress. One whose disk is stuck is given up."""
        if self._running:
            self._barrier.wait_copied()
        for save in self._running:
            if not save.wait_unless_stuck():
                logger.warning("the save at step %d was aborted: its disk is stuck", save.step)
                save.give_up()

    def close(self) -> None:
        """Finish the saves in progress, and free the host memory."""
        self.finish()
        self._collect_finished()
        self._running, self._arenas = [], []
        self._barrier.remove()
        release(self)

    def _finish_until(self, until: float) -> None:
        for save in [*self._running]:
            save.finish_until(until)
