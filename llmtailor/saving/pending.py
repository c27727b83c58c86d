"""Saves in progress: each rank writes its share in a thread, and rank 0 publishes what all ranks have written.

The threads exchange small messages through torch.distributed's key-value store, never by collectives, which would mix
with those of the training. The messages of a save, by key::

    SAVE_ID/begun    rank 0: the folder is there, or why not
    SAVE_ID/RANK     each rank: what it has written, or why not
    SAVE_ID/alive    a number that grows while any rank writes
    SAVE_ID/result   rank 0: the save is published, or why not
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmtailor.errors import Problem, StorageError, TailorError, UsageError
from llmtailor.formats.partial.manifest import BundleFact
from llmtailor.ranks.board import Pulse, StoreBoard, await_messages, turns
from llmtailor.ranks.codec import as_error, from_json, merged, to_json
from llmtailor.ranks.team import check_same
from llmtailor.runs.folder import RunFolder, remove_partial
from llmtailor.saving.ranks import Ranks
from llmtailor.saving.report import SaveReport
from llmtailor.saving.snapshot import STUCK, Snapshot
from llmtailor.saving.writing import Publication, SaveId, Share, publish, write_share

logger = logging.getLogger("llmtailor.saving")
_LAST_S = 5.0
"""Seconds that a save gets to remove what it has written, if it is given up because the process ends"""
_ENDING = Problem(
    "saving",
    "the save was given up: the process ended before it was complete",
    "give the process more time to end, or wait for the last save before you end it (PartialSaver.close)",
)


class SaveFailed(StorageError):
    """A save failed; nothing of it remains, and training can continue."""


@dataclass(frozen=True, slots=True)
class Work:
    """What this rank does in a save."""

    save: SaveId
    first: RunFolder
    """Where the files are written: the run's folder, or a staging folder on the node"""
    share: Share | None
    """None if laying it out failed: then the save fails on all ranks."""
    report: SaveReport
    """Without what is known only in the end"""
    before: Path | None
    publication: Publication | None = None
    """On rank 0"""
    elsewhere: Collection[str] = ()
    """Files on disks of other nodes"""
    record: Callable[[], None] = lambda: None
    """On rank 0: records the attempt of a loop that did not call `start`."""
    on_published: Callable[[SaveReport], None] = lambda report: None
    """Called on every rank when the save is published"""
    log: Callable[[Mapping[str, Any]], None] = lambda line: None
    """On rank 0: adds a line to the run's log."""
    refusal: TailorError | None = None
    """Why there is no share"""

    def tell(self, report: SaveReport) -> None:
        """Call ``on_published``. The save is there, so whatever goes wrong now does not make it fail."""
        try:
            self.on_published(report)
        except Exception as error:
            logger.warning("after the save at step %d: %s", report.step, error, exc_info=error)


def save_now(ranks: Ranks, work: Work, began: float) -> PendingSave:
    """Make a save while training stands still; return it finished. ``began`` is monotonic time.

    Raises what goes wrong on any rank, on all of them. Nothing of the save remains then.
    """
    path, share = work.report.path, work.share
    assert share is not None, "else it would have been refused before"
    ranks.on_first(lambda: _begin(work))
    try:
        facts = ranks.together(lambda: write_share(path, share, work.before))
        written, bundles = time.monotonic() - began, _in_order(facts)
        ranks.on_first(lambda: _publish(work, bundles))
    except Exception:
        if ranks.is_first:
            remove_partial(path)
        raise
    now = time.monotonic() - began
    num_bytes = sum(fact.num_bytes for fact in bundles)
    report = replace(work.report, num_bytes=num_bytes, stall_s=now, write_s=written, publish_s=now)
    work.tell(report)
    save = PendingSave(report.step, path, report.parts)
    save.finish(report)
    return save


def _begin(work: Work) -> None:
    work.record()
    work.first.begin(work.report.step)


def _publish(work: Work, bundles: Sequence[BundleFact]) -> None:
    assert work.publication is not None, "on rank 0"
    publish(work.report.path, work.publication, bundles, work.before, work.elsewhere)


def _in_order(ranks: Iterable[Sequence[BundleFact]]) -> list[BundleFact]:
    """Return the files of all ranks as a manifest lists them: the rank shards, then the files of frozen params."""
    facts = [*ranks]
    return [one[0] for one in facts] + [fact for one in facts for fact in one[1:]]


def check_chosen(chosen: Sequence[Sequence[str]]) -> None:
    """Raise UsageError if the policy chose different parts on different ranks."""
    choice, fix = "choice of parts by the policy", "make choose() depend only on its argument"
    check_same([{choice: [*parts]} for parts in chosen], {choice: (fix, UsageError)})


class PendingSave:
    """A save that may still be in progress; `PartialSaver.save` returns it."""

    def __init__(self, step: int, path: Path, parts: Mapping[str, str]) -> None:
        self.step = step
        self.path = path
        self.parts = parts
        """Saved part -> reason"""
        self.stall_s = 0.0
        """Seconds for which `PartialSaver.save` stopped training"""
        self._outcome: SaveReport | SaveFailed | None = None

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
        """Whether it is in progress, but nothing has moved for too long."""
        return False

    def give_up(self, why: Problem = STUCK) -> None:
        """End the save soon, without publishing it."""

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

    def finish(self, outcome: SaveReport | SaveFailed) -> None:
        self._outcome = outcome


class BackgroundSave(PendingSave):
    """A save whose files are written in a thread of its own.

    Args:
        work: what to write.
        snapshot: the tensors; None if there is nothing to write.
        began: when the save began, in monotonic time.
        timeout: see ``write_timeout`` of `SavingOptions`.
    """

    def __init__(
        self,
        ranks: Ranks,
        board: StoreBoard,
        work: Work,
        snapshot: Snapshot | None,
        began: float,
        timeout: float,
    ) -> None:
        super().__init__(work.save.step, work.report.path, work.report.parts)
        self._ranks = ranks
        self._board = board
        self._work = work
        self._snapshot = snapshot
        self._timeout = timeout
        self._began = began
        self._progress = time.monotonic()
        self._pulse = Pulse(board, self._key("alive"))
        self._given_up: Problem | None = None
        """Why it is"""
        self._has_begun = False
        self.stall_s = self._progress - began
        # a daemon: a write that never returns must not keep the process from ending
        self._thread = threading.Thread(target=self._run, name="llmtailor-save", daemon=True)
        self._thread.start()

    @property
    def is_stuck(self) -> bool:
        progress = max(self._progress, self._snapshot.progress if self._snapshot is not None else 0.0)
        return not self.is_done and time.monotonic() - progress > self._timeout

    def give_up(self, why: Problem = STUCK) -> None:
        self._given_up = self._given_up or why
        if self._snapshot is not None:
            self._snapshot.give_up(why)

    def _key(self, name: object) -> str:
        return f"{self._work.save.save_id}/{name}"

    def _run(self) -> None:
        try:
            self._board.post(self._key(self._ranks.rank), self._written())
            result = self._conclude() if self._ranks.is_first else self._await("result")[0]
        except Exception as error:  # the other ranks are gone, and the store with them
            result = self._refusal(error)
        if "error" in result:
            self.finish(SaveFailed(from_json(result["error"]).problems))
        else:
            report = replace(self._work.report, **result["measured"])
            self._work.tell(report)
            self.finish(report)

    def _written(self) -> dict[str, Any]:
        """Write this rank's share; return its message."""
        work, snapshot = self._work, self._snapshot
        try:
            if snapshot is not None:
                snapshot.start()  # here, because who starts a thread waits until it runs
            self._begin()
            if work.refusal is not None:
                return {"error": to_json(work.refusal)}
            assert work.share is not None and snapshot is not None, "else there is a refusal"
            facts = write_share(work.report.path, work.share, work.before, snapshot, self._count)
            snapshot.conclude()
            done = time.monotonic()
            return {
                "facts": [[fact.path, fact.num_bytes, fact.crc32] for fact in facts],
                "parts": [*work.report.parts],
                "measured": {
                    "stall_s": self.stall_s + snapshot.stall_s,
                    "copy_s": snapshot.copy_s,
                    "write_s": done - self._began,
                    "buffer_bytes": snapshot.high_water,
                },
            }
        except Exception as error:
            return self._refusal(error)
        finally:
            if snapshot is not None:
                snapshot.close()

    def _begin(self) -> None:
        """Make the folder; the other ranks wait for it."""
        path = self._work.report.path
        if self._ranks.is_first:
            try:
                _begin(self._work)
                self._has_begun = True
            except Exception as error:
                self._board.post(self._key("begun"), self._refusal(error))
                raise
            self._board.post(self._key("begun"), {})
        else:
            (begun,) = self._await("begun")
            if "error" in begun:
                raise from_json(begun["error"])
            # NFS may remember that there was none, unless it is asked to make it
            path.mkdir(parents=True, exist_ok=True)

    def _refusal(self, error: Exception) -> dict[str, Any]:
        if not isinstance(error, (TailorError, OSError)):
            logger.warning("a save failed on rank %d", self._ranks.rank, exc_info=error)
        return {"error": to_json(as_error(error, "saving"))}

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
            if (why := self._given_up) is not None:
                what = f"another rank's share was not complete; {why.what}"
                raise StorageError.at("saving", what, "see that rank's log")
            if self._pulse.is_new():
                self._progress = time.monotonic()

        return await_messages(self._board, [self._key(name) for name in names], check)

    def _conclude(self) -> dict[str, Any]:
        """Publish the save, or remove it, once no rank writes any more; return rank 0's last message."""
        work, ranks = self._work, range(self._ranks.world_size)
        try:
            result = self._publish(self._await(*ranks))
        except Exception as error:
            result = self._refusal(error)
        if "error" in result:
            failed = SaveFailed(from_json(result["error"]).problems)
            if self._has_begun:
                with suppress(OSError):
                    remove_partial(work.report.path)
            work.log({"step": self.step, "failed": str(failed)})
            more = "" if self._given_up is _ENDING else "; training continues without it"
            logger.warning("the save at step %d failed%s: %s", self.step, more, failed)
        self._board.post(self._key("result"), result)
        self._board.remove(*map(self._key, [*ranks, "begun", "alive"]))
        return result

    def _publish(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        if errors := {at: from_json(one["error"]) for at, one in enumerate(messages) if "error" in one}:
            raise merged(errors, self._ranks.world_size)
        check_chosen([message["parts"] for message in messages])
        self._check()
        bundles = _in_order([BundleFact(*fact) for fact in message["facts"]] for message in messages)
        _publish(self._work, bundles)
        measured = [message["measured"] for message in messages]
        return {
            "measured": {
                **{key: max(one[key] for one in measured) for key in measured[0]},
                "num_bytes": sum(fact.num_bytes for fact in bundles),
                "publish_s": time.monotonic() - self._began,
            }
        }
