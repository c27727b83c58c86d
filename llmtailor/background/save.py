"""Saves in progress: each rank writes its share, in a thread or while training stops, and rank 0 publishes what all
ranks have written.

They exchange small messages through torch.distributed's key-value store, not by collectives, which would mix with those
of the training. The messages of a save, by key::

    SAVE_ID/begun    rank 0: the folder is there, or why not
    SAVE_ID/RANK     each rank: what it has written, or why not
    SAVE_ID/alive    a number that grows while any rank writes
    SAVE_ID/result   rank 0: the save is published, or why not

If the process ends, normally, by an exception or by SIGTERM, the saves in progress are finished first.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from llmtailor.background.options import SavingOptions
from llmtailor.background.snapshot import STUCK, Arena, Snapshot
from llmtailor.background.tiers import Finished, open_tier
from llmtailor.background.writing import Share, write_share
from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.lineage import Ledger
from llmtailor.containers.json import decode
from llmtailor.errors import Problem, StorageError, TailorError, TargetError, Unanswered, UsageError
from llmtailor.formats.partial.manifest import BundleFact
from llmtailor.formats.registry import index_checkpoint
from llmtailor.live.model import Samples
from llmtailor.live.training import Training
from llmtailor.model.precision import EXACT, Precision
from llmtailor.ranks.errors import as_error, from_json, merged, to_json
from llmtailor.ranks.store import KeyValueStore, Pulse, await_messages, turns
from llmtailor.ranks.team import Ranks, check_same
from llmtailor.runs.folder import RunFolder, holds_unknown, remove_partial
from llmtailor.runs.gc import deletable
from llmtailor.runs.save_log import ABANDONED_LOG, LOG, LoggedSave, lines_of
from llmtailor.runs.scan import prove_step
from llmtailor.storage.local import append_line, check_own, replace_durably


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport(LoggedSave):
    """A finished save."""

    path: Path
    """The partial checkpoint"""
    buffer_bytes: int = 0
    """The most host memory that the copies occupied at once on one rank, in bytes"""

    def to_json(self) -> dict[str, object]:
        """Return the save as a line of ``saves.jsonl``."""
        return {
            "step": self.step,
            "parts": dict(self.parts),
            **({"masters": [*self.masters]} if self.masters else {}),
            **({"updates_missed": self.updates_missed} if self.updates_missed else {}),
            "num_bytes": self.num_bytes,
            **{name: round(getattr(self, name), 6) for name in ("stall_s", "copy_s", "write_s", "publish_s")},
            "buffer_bytes": self.buffer_bytes,
            **{name: dict(getattr(self, name)) for name in ("drift", "expected_loss", "steps_behind")},
        }

    def metrics(self) -> dict[str, float]:
        """Return the values for the Trainer's logger."""
        names = ("step", "stall_s", "copy_s", "write_s", "publish_s", "buffer_bytes")
        return {
            "checkpoint/bytes": self.num_bytes,
            **{f"checkpoint/{name}": getattr(self, name) for name in names},
            "checkpoint/stalest_part_steps": max(self.steps_behind.values(), default=0),
        }


def abandon_after(folder: Path, step: int) -> None:
    """Move the lines of later saves to `ABANDONED_LOG`: the run resumes at ``step``. A truncated line is dropped."""
    with suppress(OSError, TailorError):
        check_own(folder / LOG, is_file=True)
        lines, kept, later = [*lines_of(folder / LOG)], list[bytes](), list[bytes]()
        for line in lines:
            with suppress(ValueError, KeyError, TypeError, RecursionError):  # a kill truncated it
                (kept if decode(line)["step"] <= step else later).append(line)
        if later:
            append_line(folder / ABANDONED_LOG, b"\n".join(later))
        if kept != lines:
            replace_durably(folder / LOG, b"".join(line + b"\n" for line in kept))


logger = logging.getLogger("llmtailor.saving")
_LAST_S = 5.0
"""Seconds in which a save that is given up because the process ends may remove its files"""
_ENDING = Problem(
    "saving",
    "save aborted: the process ended before it was complete",
    "allow more time at exit, or wait for the last save first (PartialSaver.close)",
)


class SaveFailed(StorageError):
    """A save failed; nothing of it remains, and training can continue."""


class RunRecord:
    """The run's folder, its log, and what is deleted there; with a second tier, both follow the copies.

    All ranks make the calls, and rank 0 writes.

    Args:
        carried: returns the files in a partial checkpoint that the user's objects have written.
    """

    def __init__(
        self, folder: RunFolder, ranks: Ranks, options: SavingOptions, carried: Callable[[], Collection[str]]
    ) -> None:
        self.folder, self.ranks, self.store = folder, ranks, ranks.store()
        staging = options.staging_dir
        self.first = folder if staging is None else RunFolder(Path(staging).absolute())
        """Where saves are written"""
        self.copier = open_tier(folder, self.first, options, ranks, self.store, self.append)
        self.write_timeout = options.write_timeout
        self.keep_composable = options.keep_composable
        self.is_begun = False
        """Whether the attempt is recorded"""
        self.is_composable = True
        """Whether the run can be composed with the last save that was tested; rank 0 knows"""
        self.linked: Callable[[], Collection[Path]] = tuple
        """Returns the earlier saves that those in progress take files of"""
        self._carried = carried
        self._proof: threading.Thread | None = None
        self._indexes: dict[Path, CheckpointIndex] = {}
        """Of the saves that were tested"""
        self.planned: set[Hashable] = set()
        """The choices of parts whose composites were planned; of others like them, the indexes are compared"""

    def begin(self, work: PartialWork) -> None:
        """Make the folder of a save; record the attempt of a loop that did not call `PartialSaver.start`."""
        step, ledger = work.report.step, work.ledger
        if not self.is_begun and work.refusal is None:
            self.folder.record_attempt(ledger.past(step))
            self.is_begun = True
        self.first.begin(step)

    def log(self, line: Mapping[str, object]) -> None:
        """Add a line to the run's log."""
        if self.copier is not None:
            self.copier.add(line)
        else:
            self.append(line)

    def append(self, line: Mapping[str, object]) -> None:
        """Add a line now; ignore errors of the disk."""
        if self.ranks.is_first:
            with suppress(OSError, TargetError):
                append_line(self.folder.partial / LOG, json.dumps(line).encode())

    def remove(self, work: PartialWork) -> None:
        remove_partial(work.folder)

    def published(self, work: PartialWork, report: SaveReport) -> None:
        """Log a save, and delete what is no longer needed; copy it first if there is a second tier."""
        line, retire = report.to_json(), partial(self._retire, work.ledger, report)
        if self.copier is not None:
            self.copier.add(Finished(report.step, work.save_id, work.began, line, retire))
        elif self.ranks.is_first:
            self.append(line)
            retire()

    def close(self) -> None:
        """Wait for the copies and for the proof, and release the folders, so that another run can save there."""
        if self.copier is not None:
            self.copier.close(self.write_timeout)
            self.copier = None
            if self.first is not self.folder:
                self.first.unlock()
        if self._proof is not None:
            self._proof.join()
        self.folder.unlock()

    def _prove(self, step: int, choice: Hashable) -> None:
        """Plan a composite; log an error if that fails. Training continues: what is saved may still be of use."""
        there = self.folder.complete()
        self._indexes = {path: index for path, index in self._indexes.items() if path in there.values()}
        try:
            prove_step(self.folder.run, step, self._index, plans=choice not in self.planned)
            self.is_composable = True
            self.planned.add(choice)
        except (OSError, StorageError, Unanswered) as error:
            logger.info("could not check whether step %d can be composed: %s", step, error)
        except Exception as error:
            if there.keys() - self.folder.complete().keys():  # deleted meanwhile; the next save is tested
                return
            logger.error(
                "the save at step %d is complete, but can't be composed into a checkpoint: %s. Training continues, and "
                "the next save holds every part; also keep full checkpoints until this is solved",
                step,
                error,
                exc_info=None if isinstance(error, TailorError) else error,
            )
            self.append({"step": step, "not_composable": str(error)})
            self.is_composable = False

    def _index(self, path: Path) -> CheckpointIndex:
        """Return the index of a checkpoint, which does not change."""
        if path not in self._indexes:
            self._indexes[path] = index_checkpoint(path)
        return self._indexes[path]

    def _retire(self, ledger: Ledger, report: SaveReport) -> list[int]:
        """Prove the save to be composable, in a thread, unless an earlier one is still being tested; delete checkpoints
        that are no longer needed.

        Return their steps; the next save retries failed ones.
        """
        if self._proof is None or not self._proof.is_alive():
            args = (report.step, (frozenset(report.parts), frozenset(report.masters)))
            self._proof = threading.Thread(target=self._prove, args=args, name="llmtailor-proof", daemon=True)
            self._proof.start()
        if self.keep_composable is None:
            return []
        folder, made, deleted = self.folder, [*self._carried()], []
        try:
            # later saves are not copied yet
            saves = [save for save in folder.saves() if save.step <= (ledger.step or 0)]
            linked = self.linked()
            for step in deletable(saves, ledger, self.keep_composable):
                if folder.at(step) in linked:
                    continue  # the next save does it
                if holds_unknown(folder.at(step), made):
                    logger.warning("%s is kept: it is a link, or contains unknown files", folder.at(step).name)
                else:
                    remove_partial(folder.at(step))
                    deleted.append(step)
            folder.remove_abandoned(made)
        except OSError as error:
            logger.warning("old partial checkpoints could not be deleted: %s", error)
        return deleted


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
class PartialWork(Work):
    """A partial checkpoint, and what becomes true once it is published."""

    ledger: Ledger
    """The record of saves that includes this one"""
    policy_state: Mapping[str, Any] | None
    """The policy's state before the save, which is restored if it fails"""
    samples: Samples = field(default_factory=dict)


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


LEAST_BUFFER = 64 << 20
"""Less would make the copying wait for the disk without need."""
_BESIDE_STATES = 8 << 20
"""Of a save: step counts, buffers, gaps of alignment. If the buffer is full, the last copy waits for the disk."""


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


GRACE_S = 20.0
"""Seconds that saves in progress get. torchrun kills its ranks 30 s after SIGTERM, and so do many schedulers."""

_open: dict[int, Callable[[float], object]] = {}
"""What finishes the saves of each saver by a point in monotonic time, by the saver's id"""
_owner = os.getpid()


def finish_at_end(saver: object, finish: Callable[[float], object]) -> None:
    """Call ``finish`` with a deadline if the process ends before `release`.

    A handler for SIGTERM is installed only from the main thread, and if there is none.
    """
    global _owner
    _owner = os.getpid()
    _open[id(saver)] = finish
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_sigterm)


def release(saver: object) -> None:
    """Forget a saver that was closed."""
    _open.pop(id(saver), None)
    is_main = threading.current_thread() is threading.main_thread()
    if not _open and is_main and signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@atexit.register
def _finish_all() -> None:
    if os.getpid() != _owner:  # a fork, such as a worker of a DataLoader, has no threads of ours
        return
    until = time.monotonic() + GRACE_S
    for finish in list(_open.values()):
        with suppress(Exception):
            finish(until)


def _on_sigterm(number: int, frame: object) -> None:
    _finish_all()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
