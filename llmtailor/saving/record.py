"""What a run keeps of its saves: the attempts, the log, and the checkpoints that are still needed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from functools import partial

from llmtailor.checkpoint.lineage import Ledger, Past
from llmtailor.errors import StorageError, TailorError, Unanswered
from llmtailor.runs.folder import RunFolder, holds_unknown, remove_partial
from llmtailor.runs.gc import deletable
from llmtailor.runs.newest import prove_step
from llmtailor.saving.levels import Copier, Finished
from llmtailor.saving.ranks import Ranks
from llmtailor.saving.report import SaveReport, append
from llmtailor.saving.writing import CarriedFiles, SaveId

logger = logging.getLogger("llmtailor.saving")


class RunRecord:
    """Writes on rank 0 only; every rank makes the calls. With a second level, lines and deletions follow the copies.

    Args:
        keep_composable: see `SavingOptions`.
        carried: files in a partial checkpoint that the user's objects have written.
    """

    def __init__(self, folder: RunFolder, ranks: Ranks, keep_composable: int | None, carried: CarriedFiles) -> None:
        self.copier: Copier | None = None
        self.is_begun = False
        """Whether the attempt is recorded"""
        self._folder = folder
        self._ranks = ranks
        self.keep_composable = keep_composable
        self._carried = carried
        self.is_proven = False
        """Whether a save of this process was found to be composable, or was reported not to be"""
        self._proof: threading.Thread | None = None

    def begin(self, past: Past) -> None:
        """Record the attempt of a loop that did not call `PartialSaver.start`."""
        if not self.is_begun:
            self._folder.record_attempt(past)
        self.is_begun = True

    def log(self, line: Mapping[str, object]) -> None:
        """Add a line to the run's log."""
        if self.copier is not None:
            self.copier.add(line)
        else:
            self.append(line)

    def append(self, line: Mapping[str, object]) -> None:
        """Add a line now."""
        if self._ranks.is_first:
            append(self._folder.partial, line)

    def published(self, save: SaveId, ledger: Ledger, began: float, report: SaveReport) -> None:
        """Log a save, and delete what is no longer needed; copy it first if there is a second level."""
        line, retire = report.to_json(), partial(self._complete, ledger, save.step)
        if self.copier is not None:
            self.copier.add(Finished(save.step, save.save_id, began, line, retire))
        elif self._ranks.is_first:
            self.append(line)
            retire()

    def close(self) -> None:
        """Wait for the proof, if it is under way."""
        if self._proof is not None:
            self._proof.join()

    def _complete(self, ledger: Ledger, step: int) -> list[int]:
        """Prove the first save to be composable, in a thread of its own, and do what `_retire` does."""
        if not self.is_proven and (self._proof is None or not self._proof.is_alive()):
            self._proof = threading.Thread(target=self._prove, args=(step,), name="llmtailor-proof", daemon=True)
            self._proof.start()
        return self._retire(ledger)

    def _prove(self, step: int) -> None:
        """Plan a composite, and say so if that fails. Training continues: what is saved may be of use all the same."""
        there = self._folder.complete().keys()
        try:
            prove_step(self._folder.run, step)
        except (OSError, StorageError, Unanswered) as error:
            logger.info("whether step %d can be composed is not known: %s", step, error)
        except Exception as error:
            if there - self._folder.complete().keys():  # deleted meanwhile; the next save is looked at
                return
            logger.error(
                "the save at step %d is complete, but can't be composed into a checkpoint: %s. Training continues and "
                "saves; keep full checkpoints, too, until this is solved",
                step,
                error,
                exc_info=None if isinstance(error, TailorError) else error,
            )
            self.append({"step": step, "not_composable": str(error)})
        self.is_proven = True

    def _retire(self, ledger: Ledger) -> list[int]:
        """Delete checkpoints that are no longer needed, and return their steps; the next save retries failed ones."""
        if self.keep_composable is None:
            return []
        folder, made, deleted = self._folder, [*self._carried.contents()], []
        try:
            saves = [
                save for save in folder.saves() if save.step <= (ledger.step or 0)
            ]  # later ones are not copied yet
            for step in deletable(saves, ledger, self.keep_composable):
                if holds_unknown(folder.at(step), made):
                    logger.warning("%s is kept: it holds files that no save wrote", folder.at(step).name)
                else:
                    remove_partial(folder.at(step))
                    deleted.append(step)
            folder.remove_abandoned(made)
        except OSError as error:
            logger.warning("old partial checkpoints could not be deleted: %s", error)
        return deleted
