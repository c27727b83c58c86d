"""The record of a run on the disk: its folder and log, the proof of each save, and what is deleted."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Collection, Hashable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from llmtailor.background.options import SavingOptions
from llmtailor.background.pending import PartialWork
from llmtailor.background.report import SaveReport
from llmtailor.background.tiers import Finished, open_tier
from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.lineage import Ledger
from llmtailor.errors import StorageError, TailorError, TargetError, Unanswered
from llmtailor.formats.registry import index_checkpoint
from llmtailor.ranks.team import Ranks
from llmtailor.runs.composing import prove_step
from llmtailor.runs.folder import RunFolder, holds_unknown, remove_partial
from llmtailor.runs.retention import deletable
from llmtailor.runs.save_log import LOG
from llmtailor.storage.local import append_line

logger = logging.getLogger("llmtailor.saving")


class RunRecord:
    """The run's folder, its log, and what is deleted there; with a second tier, both follow the copies.

    All ranks make the calls, and rank 0 writes. 1) `begin` a save. 2) `published`, or `remove` and `log`. 3) `close`.

    Args:
        carried: returns the files in a partial checkpoint that the user's objects have written.
    """

    def __init__(
        self, folder: RunFolder, ranks: Ranks, options: SavingOptions, carried: Callable[[], Mapping[str, bytes]]
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
        self.carried = carried
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
            self.copier.add(
                Finished(step=report.step, save_id=work.save_id, began=work.began, line=line, retire=retire)
            )
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
        folder, made, deleted = self.folder, [*self.carried()], []
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
