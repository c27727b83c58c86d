"""What a run keeps of its saves: the attempts, the log, and the checkpoints that are still needed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial

from llmtailor.checkpoint.lineage import Ledger, Past
from llmtailor.runs.folder import RunFolder, holds_unknown, remove_partial
from llmtailor.runs.retention import deletable
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
        line, retire = report.to_json(), partial(self._retire, ledger)
        if self.copier is not None:
            self.copier.add(Finished(save.step, save.save_id, began, line, retire))
        elif self._ranks.is_first:
            self.append(line)
            retire()

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
