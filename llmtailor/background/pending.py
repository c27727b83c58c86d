"""Saves in progress: each rank writes its share, in a thread or while training stops, and rank 0 publishes what all
ranks have written.

They exchange small messages through torch.distributed's key-value store, not by collectives, which would mix with those
of the training. The messages of a save, by key::

    SAVE_ID/begun    rank 0: the folder is there, or why not
    SAVE_ID/RANK     each rank: what it has written, or why not
    SAVE_ID/alive    a number that grows while any rank writes
    SAVE_ID/result   rank 0: the save is published, or why not
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from llmtailor.background.arena import Arena
from llmtailor.background.report import SaveFailed, SaveReport
from llmtailor.background.snapshot import STUCK, Snapshot
from llmtailor.background.writing import Share, write_share
from llmtailor.checkpoint.lineage import Ledger
from llmtailor.errors import Problem, StorageError, TailorError, UsageError
from llmtailor.formats.partial.manifest import BundleFact
from llmtailor.live.model import Samples
from llmtailor.ranks.errors import as_error, from_json, merged, to_json
from llmtailor.ranks.store import KeyValueStore, Pulse, await_messages, turns
from llmtailor.ranks.team import Ranks, check_same

logger = logging.getLogger("llmtailor.saving")
_LAST_S = 5.0
"""Seconds in which a save that is given up because the process ends may remove its files"""
_ENDING = Problem(
    "saving",
    "save aborted: the process ended before it was complete",
    "allow more time at exit, or wait for the last save first (PartialSaver.close)",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What this rank does in a save."""

    save_id: str
    began: float
    """Monotonic time"""
    report: SaveReport
    """Without what is known only at the end"""
    folder: Path
    """Where the files are written"""
    share: Share | None = None
    """None if laying it out failed: then the save fails on all ranks."""
    refusal: TailorError | None = None
    """Why there is no share"""
    publish: Callable[[Sequence[BundleFact]], None] | None = None
    """On rank 0: complete the save, given the files of all ranks"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaverState:
    """What a saver knew before a save, and knows again if that fails."""

    ledger: Ledger
    samples: Samples
    policy: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialWork(Work):
    """A partial checkpoint, and what becomes true once it is published."""

    ledger: Ledger
    """The record of saves that includes this one"""
    previous: SaverState
    linked: Path | None
    """The earlier save that it takes files of"""
    samples: Samples = field(default_factory=dict)
    """Of the masters that it holds"""


class SaveRecord(Protocol):
    """Where saves are, seen from `PendingSave`. All ranks make the calls; folders are rank 0's."""

    ranks: Ranks
    store: KeyValueStore
    write_timeout: float

    def begin(self, work: Any) -> None:
        """Make the folder of a save."""

    def remove(self, work: Any) -> None:
        """Remove what a failed save has written. Raises OSError."""

    def published(self, work: Any, report: SaveReport) -> None:
        """Take note of a save that is published."""

    def log(self, line: Mapping[str, object]) -> None:
        """Take note of a save that has failed."""


def check_chosen(chosen: Sequence[Sequence[str]]) -> None:
    """Raise UsageError if the policy chose different parts on different ranks."""
    choice, fix = "choice of parts by the policy", "make choose() depend only on its argument"
    check_same([{choice: [*parts]} for parts in chosen], {choice: (fix, UsageError)})


class PendingSave:
    """A save that may still be in progress; `PartialSaver.save` returns it.

    1) Made on all ranks by the training thread. Each rank's thread then writes its share and tells rank 0, which
    publishes the save or removes it, and tells all. 2) `wait`, `wait_unless_stuck` or `is_done`, on any thread;
    `give_up` ends it soon. 3) `report` or `failure` is the outcome.

    Args:
        work: what to write.
        snapshot: the tensors; None to write the live ones.
        stops_training: whether to return only when the save is done, instead of writing in a thread.
        after: the save before it, if that is in progress. This one is published after it, and fails if it fails.
    """

    def __init__(
        self,
        record: SaveRecord,
        work: Work,
        snapshot: Snapshot | None,
        *,
        stops_training: bool,
        after: PendingSave | None = None,
    ) -> None:
        self.step = work.report.step
        self.path = work.folder
        self.parts = work.report.parts
        """Saved part -> reason"""
        self.work = work
        self._record, self._ranks, self._store = record, record.ranks, record.store
        self._snapshot = snapshot
        self._progress = time.monotonic()
        self._pulse = Pulse(self._store, self._key("alive"))
        self._given_up: Problem | None = None
        """Why it is"""
        self._has_begun = False
        self._outcome: SaveReport | SaveFailed | None = None
        self.stall_s = self._progress - work.began
        """Seconds for which `PartialSaver.save` stopped training"""
        self._stops_training = stops_training
        self._after = after
        if stops_training:
            self._run()
            self.stall_s = time.monotonic() - work.began
        else:
            # a daemon: a write that never returns must not keep the process from ending
            threading.Thread(target=self._run, name="llmtailor-save", daemon=True).start()

    @property
    def arena(self) -> Arena | None:
        """The host memory that it uses"""
        return self._snapshot.arena if self._snapshot is not None else None

    @property
    def is_done(self) -> bool:
        """Whether the save is published or has failed."""
        return self._outcome is not None

    @property
    def report(self) -> SaveReport | None:
        """The finished save; None while it is in progress, or if it failed."""
        return self._outcome if isinstance(self._outcome, SaveReport) else None

    @property
    def failure(self) -> SaveFailed | None:
        """Why the save failed; None while it is in progress, or if it was published."""
        return self._outcome if isinstance(self._outcome, SaveFailed) else None

    @property
    def is_stuck(self) -> bool:
        """Whether it is in progress, but has made no progress for ``write_timeout``."""
        progress = max(self._progress, self._snapshot.progress if self._snapshot is not None else 0.0)
        return not self.is_done and time.monotonic() - progress > self._record.write_timeout

    def give_up(self, why: Problem | None = None) -> None:
        """End the save soon, without publishing it; ``why`` is reported. None: its disk is stuck."""
        self._given_up = self._given_up or why or STUCK
        if self._snapshot is not None:
            self._snapshot.give_up(self._given_up)

    def wait_unless_stuck(self) -> bool:
        """Wait until the save is done, but not for a disk that accepts nothing. Return whether it is done."""
        for _ in turns(lambda: self.is_done or self.is_stuck):
            pass
        return self.is_done

    def finish_until(self, until: float) -> None:
        """Wait until the save is done, and give it up at this monotonic time; without locks, for a signal handler."""
        with suppress(TimeoutError, SaveFailed):
            self.wait(until - time.monotonic())
        if not self.is_done:
            self.give_up(_ENDING)
            with suppress(TimeoutError, SaveFailed):
                self.wait(_LAST_S)

    def wait(self, timeout: float = float("inf")) -> SaveReport:
        """Wait until the save is published.

        Raises SaveFailed if it fails, TimeoutError if it is still in progress after this number of seconds.
        """
        until = time.monotonic() + timeout
        for _ in turns(lambda: self.is_done or time.monotonic() > until):
            pass
        if self._outcome is None:
            raise TimeoutError(f"the save at step {self.step} is still in progress")
        if isinstance(self._outcome, SaveFailed):
            raise self._outcome
        return self._outcome

    def _key(self, name: object) -> str:
        return f"{self.work.save_id}/{name}"

    def _run(self) -> None:
        try:
            self._store.set(self._key(self._ranks.rank), self._written())
            self.work = replace(self.work, share=None)  # whose tensors may be copies
            result = self._conclude() if self._ranks.is_first else self._await("result")[0]
            self._follow()  # here, too, so that all ranks copy saves to a second level in their order
        except Exception as error:  # the other ranks are gone, and the store with them
            result = self._refusal(error)
        if "error" in result:
            self._outcome = SaveFailed(from_json(result["error"]).problems)
            return
        report = replace(self.work.report, **result["measured"])
        try:
            self._record.published(self.work, report)
        except Exception as error:  # the save is there, so this does not make it fail
            logger.warning("after the save at step %d: %s", self.step, error, exc_info=error)
        self._outcome = report

    def _written(self) -> dict[str, Any]:
        """Write this rank's share; return its message."""
        work, snapshot = self.work, self._snapshot
        try:
            if snapshot is not None:
                snapshot.start()  # here, because who starts a thread waits until it runs
            self._begin()
            if work.refusal is not None:
                return {"error": to_json(work.refusal)}
            assert work.share is not None, "else there is a refusal"
            facts = write_share(self.path, work.share, snapshot, self._count)
            if snapshot is not None:
                snapshot.conclude()
            return {
                "facts": [[fact.path, fact.num_bytes, fact.crc32, fact.ranges] for fact in facts],
                "parts": [*self.parts],
                "measured": {
                    "stall_s": self.stall_s + (snapshot.stall_s if snapshot is not None else 0.0),
                    "copy_s": snapshot.copy_s if snapshot is not None else 0.0,
                    "write_s": time.monotonic() - work.began,
                    "buffer_bytes": snapshot.high_water if snapshot is not None else 0,
                },
            }
        except Exception as error:
            return self._refusal(error)
        finally:
            if snapshot is not None:
                snapshot.close()

    def _begin(self) -> None:
        """Make the folder; the other ranks wait for it."""
        if self._ranks.is_first:
            try:
                self._record.begin(self.work)
                self._has_begun = True
            except Exception as error:
                self._store.set(self._key("begun"), self._refusal(error))
                raise
            self._store.set(self._key("begun"), {})
        else:
            (begun,) = self._await("begun")
            if "error" in begun:
                raise from_json(begun["error"])
            # NFS may have cached that it does not exist; creating it here ends that
            self.path.mkdir(parents=True, exist_ok=True)

    def _refusal(self, error: Exception) -> dict[str, Any]:
        return {"error": to_json(save_error(error, self._ranks))}

    def _check(self) -> None:
        if self._given_up is not None:
            raise StorageError(self._given_up)

    def _count(self, num_bytes: int) -> None:
        self._check()
        self._progress = time.monotonic()
        self._pulse.beat()

    def _await(self, *names: object) -> list[Any]:
        """Return the messages of these names once they are there."""

        def check() -> None:
            if self._stops_training and self._ranks.is_first and self.is_stuck:  # the others hear of it
                self.give_up()
            if (why := self._given_up) is not None:
                what = f"another rank's share was not complete; {why.what}"
                raise StorageError.at("saving", what, "see that rank's log")
            if self._pulse.is_new():
                self._progress = time.monotonic()

        return await_messages(self._store, [self._key(name) for name in names], check)

    def _conclude(self) -> dict[str, Any]:
        """Publish the save, or remove it, once no rank writes any more; return rank 0's last message."""
        ranks = range(self._ranks.world_size)
        try:
            result = self._publish(self._await(*ranks))
        except Exception as error:
            result = self._refusal(error)
        if "error" in result:
            if self._has_begun:
                with suppress(OSError, TailorError):
                    self._record.remove(self.work)
            if not self._stops_training:  # else `PartialSaver.save` raises it
                failed = SaveFailed(from_json(result["error"]).problems)
                self._record.log({"step": self.step, "failed": str(failed)})
                more = "" if self._given_up is _ENDING else "; training continues without it"
                logger.warning("the save at step %d failed%s: %s", self.step, more, failed)
        self._store.set(self._key("result"), result)
        self._store.remove(*map(self._key, [*ranks, "begun", "alive"]))
        return result

    def _follow(self) -> None:
        """Wait for the save before this one. Raises StorageError if it failed."""
        before, self._after = self._after, None  # which must not keep all saves before it
        if before is None:
            return
        for _ in turns(lambda: before.is_done):
            self._check()
            if not before.is_stuck:
                self._count(0)
        if before.failure is not None:
            what = f"save aborted: the save at step {before.step}, on which it builds, failed"
            raise StorageError.at("saving", what, "see the log")

    def _publish(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        if errors := {at: from_json(one["error"]) for at, one in enumerate(messages) if "error" in one}:
            raise merged(errors, self._ranks.world_size)
        self._follow()
        check_chosen([message["parts"] for message in messages])
        self._check()
        facts = [[BundleFact(*fact) for fact in message["facts"]] for message in messages]
        # as a manifest lists them: the rank shards, then the files of frozen params
        bundles = [fact for one in facts for fact in one[:1]] + [fact for one in facts for fact in one[1:]]
        assert self.work.publish is not None, "on rank 0"
        self.work.publish(bundles)
        measured = [message["measured"] for message in messages]
        found = {key: max(one[key] for one in measured) for key in measured[0]}
        found |= {"num_bytes": sum(fact.num_bytes for fact in bundles)}
        found |= {"publish_s": time.monotonic() - self.work.began}
        return {"measured": found | ({"stall_s": found["publish_s"]} if self._stops_training else {})}


def save_error(error: Exception, ranks: Ranks) -> TailorError:
    """Return an exception as the error of a save; that of an unexpected one is logged with its traceback."""
    if not isinstance(error, (TailorError, OSError)):
        logger.warning("a save failed on rank %d", ranks.rank, exc_info=error)
    return as_error(error, "saving")
