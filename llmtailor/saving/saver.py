"""Saves the parts that a policy chooses, so that any step after the first save can be composed.

A save takes the same steps on every rank::

    measure drift -> choose parts (rank 0, sent to all) -> each rank writes its bundle, fsynced
    -> all report success or failure -> rank 0 writes the manifest last, or removes everything

A save that fails because of a full or faulty disk is abandoned with a warning; training continues, and the record of
older saves stays valid.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.lineage import Ledger, Past
from llmtailor.containers.json import read_json
from llmtailor.errors import Problem, StorageError, TailorError, UnsupportedCheckpoint
from llmtailor.formats.attempt_mark import read_mark, with_mark
from llmtailor.formats.partial.manifest import BundleFact
from llmtailor.formats.rng import rng_file
from llmtailor.formats.trainer import SCHEDULER, TRAINER_STATE
from llmtailor.policies import Policy, Situation, check_policy, choose, make_policy, restore_state, state_of
from llmtailor.runs.folder import RunFolder, holds_unknown, remove_partial
from llmtailor.runs.retention import check_keep, deletable
from llmtailor.saving.drift import Drift
from llmtailor.saving.model import find_trained_parts, weigh
from llmtailor.saving.ranks import Ranks
from llmtailor.saving.report import SaveReport, append
from llmtailor.saving.resuming import resume
from llmtailor.saving.training import HasState, Training, rng_tree
from llmtailor.saving.writing import CarriedFiles, SaveId, check_trees, publish, write_frozen, write_rank

logger = logging.getLogger("llmtailor.saving")


class SaveFailed(StorageError):
    """A save failed; nothing of it remains, and training can continue."""


class PartialSaver:
    """Writes partial checkpoints of a training to ``<output_dir>/partial``. All ranks make the same calls.

    `saver_for` makes one.

    Args:
        output_dir: the run's folder, on a file system that all ranks share.
        training: the live model and optimizer.
        policy: which parts each save holds; see `make_policy`.
        scheduler: the learning rate scheduler, unless the engine saves it.
        max_staleness: the maximum age of a part, in saves. A part that the policy leaves out for longer is added. None
            means the maximum that the policy promises.
        keep_composable: after each save, delete partial checkpoints that this number of newest composable steps does
            not need. None keeps all.
        carried: objects whose ``save_pretrained`` is called at the first save: config, tokenizer.

    Raises, the same on every rank:
        UsageError: the policy cannot guarantee that every saved step is composable, or an option is out of range.
        UnsupportedCheckpoint: the training's states cannot be saved in parts.
        TargetError: another run saves into the same folder.
    """

    def __init__(
        self,
        output_dir: str | Path,
        training: Training,
        policy: str | Mapping[str, object] | Policy = "parity",
        *,
        scheduler: HasState | None = None,
        max_staleness: int | None = None,
        keep_composable: int | None = None,
        carried: Iterable[object] = (),
    ) -> None:
        check_keep(keep_composable)
        self.folder = RunFolder(Path(output_dir).absolute())
        self.training = training
        self.scheduler = scheduler
        self.policy = make_policy(policy)
        self.keep_composable = keep_composable
        self.ranks = Ranks.here()
        self.carried = CarriedFiles(*carried)
        self.model = find_trained_parts(training, self.ranks)
        model = self.model
        self.max_staleness = check_policy(self.policy, model.structure, model.parts, model.num_bytes, max_staleness)
        self.drift = Drift(model.part_of, self.ranks)
        self.ledger = Ledger(self._new_id())
        self._before: Path | None = None
        self._begun: int | None = None
        self._is_recorded = False
        self._is_weighed = all(self.ranks.together(training.has_state))
        self.ranks.together(lambda: check_trees(self._trees(None)))
        self.ranks.on_first(self.folder.lock)

    def start(self, step: int, resumed_from: str | Path | Mapping[str, object] | None = None) -> bool:
        """Start an attempt: call it once, before the first save. Return whether an earlier record of saves continues.

        Without such a record, or if the set of trained params has changed, the next save holds every part. Checkpoints
        of later steps belong to an abandoned attempt: partial checkpoints and composites of them are moved aside.

        Args:
            step: the optimizer step that training resumes from, 0 for a training from scratch.
            resumed_from: the checkpoint, or the content of its ``trainer_state.json``. None means the run's newest
                checkpoint of that step.

        Raises, the same on every rank:
            TargetError: training starts from scratch in a folder where another run has saved.
            SourceError, StorageError: the record of attempts cannot be read or written.
        """
        lineage = self._new_id()
        resumed = self.ranks.on_first(
            lambda: resume(self.folder, self.training, step, lineage, _trainer_state(resumed_from))
        )
        self._is_recorded, self.ledger, self._before = True, resumed.ledger, resumed.before
        if not self.ledger.held_by:
            return False
        restore_state(self.policy, self.ledger.policy_state)
        # each part now has the state of its newest save
        self.drift.remember(self.training.masters(), self.ledger.held_by)
        return True

    def has_state(self) -> bool:
        """Return whether the optimizer has made a step on all ranks, so that there are moments to save.

        Call it after the first step to find out early: it raises UnsupportedCheckpoint, on every rank, if they cannot
        be saved.
        """
        return all(self.ranks.together(self._has_state))

    def save(
        self, step: int, write_state: Callable[[Path], None] | None = None, rng: Mapping[str, object] | None = None
    ) -> SaveReport | None:
        """Save the parts that the policy chooses. Call it between two optimizer steps, on every rank.

        Returns None, with a warning, if the optimizer has not made a step yet.

        Args:
            step: the number of optimizer steps made so far.
            write_state: called on rank 0 with the folder, to write ``trainer_state.json`` into it.
            rng: random number states to save; None takes the current ones of this process.

        Raises:
            SaveFailed: on every rank, whatever went wrong. Nothing of the save remains, and training can continue.
        """
        began, policy_state = time.monotonic(), state_of(self.policy)
        try:
            report = self._save(step, write_state, rng, began)
        except Exception as error:
            restore_state(self.policy, policy_state)
            problems = error.problems if isinstance(error, TailorError) else [_as_problem(error, self.ranks.rank)]
            failed = SaveFailed(problems)
            if self.ranks.is_first:
                if self._begun == step:
                    remove_partial(self.folder.at(step))
                append(self.folder.partial, {"step": step, "failed": str(failed)})
            raise failed from error
        finally:
            self._begun = None
        if report is not None and self.ranks.is_first:
            append(self.folder.partial, report.to_json())
            self._retire()
        return report

    def _save(
        self, step: int, write_state: Callable[[Path], None] | None, rng: Mapping[str, object] | None, began: float
    ) -> SaveReport | None:
        if any(self.ranks.together(self.training.look_again)):
            self._forget()
        if not self.has_state():
            logger.warning("step %d: nothing was saved: the optimizer has not made a step yet", step)
            return None
        if not self._is_weighed:
            self.model, self._is_weighed = weigh(self.model, self.training, self.ranks), True
        masters = list(self.training.masters())
        drift = self.drift.measure(masters)
        chosen = self.ranks.on_first(lambda: self._choose(step, drift))
        save = SaveId(self.ranks.from_first(uuid.uuid4().hex), step)
        folder = self.folder.at(step)
        ledger = self.ledger.after(step, chosen, self.model.parts, state_of(self.policy))
        self.ranks.on_first(lambda: self._begin(step))
        facts = self.ranks.together(lambda: self._write(folder, save, chosen, rng))
        flat = [fact for kind in zip(*facts, strict=True) for fact in kind if fact is not None]
        self.ranks.on_first(lambda: self._publish(folder, save, chosen, flat, ledger, write_state))
        self.ledger, self._before = ledger, folder
        self.drift.remember(masters, chosen)
        return SaveReport(
            step=step,
            parts=chosen,
            num_bytes=sum(fact.num_bytes for fact in flat),
            stall_s=time.monotonic() - began,
            drift=drift,
            steps_behind=ledger.steps_behind(),
            path=folder,
        )

    def close(self) -> None:
        """Release the lock on the folder, so that another run can save there."""
        self.folder.unlock()

    def _new_id(self) -> str:
        return self.ranks.from_first(uuid.uuid4().hex[:12])

    def _forget(self) -> None:
        """Continue with another set of trained params, which no earlier save covers."""
        logger.warning("the set of trained params has changed; the next save is complete")
        self.model = find_trained_parts(self.training, self.ranks)
        self.drift = Drift(self.model.part_of, self.ranks)
        self.ledger = self.ledger.without(self.ledger.held_by.keys())

    def _begin(self, step: int) -> None:
        if not self._is_recorded:  # a loop that never called `start`
            self.folder.record_attempt(Past(step, self.ledger.lineage, self.ledger.history))
            self._is_recorded = True
        self.folder.begin(step)
        self._begun = step

    def _has_state(self) -> bool:
        """Return whether this rank has moments to save. Raises UnsupportedCheckpoint if it can't save any."""
        has_state = self.training.has_state()
        if not has_state and self.training.has_stepped():
            fix = "use AdamW or another optimizer with moments"
            raise UnsupportedCheckpoint.at("the optimizer", "it has made a step but has no moments", fix)
        return has_state

    def _choose(self, step: int, drift: Mapping[str, float]) -> dict[str, str]:
        if not self.ledger.held_by:
            return dict.fromkeys(self.model.parts, "complete base")
        situation = Situation(
            step=step,
            save=self.ledger.saves,
            structure=self.model.structure,
            parts=self.model.parts,
            num_bytes=self.model.num_bytes,
            last=self.ledger.last,
            drift=drift if self.policy.needs_drift else None,
        )
        choice = choose(self.policy, situation, self.max_staleness)
        for problem in choice.problems:
            logger.warning("%s", problem)
        return dict(choice.parts)

    def _trees(self, rng: Mapping[str, object] | None) -> dict[str, Any]:
        """Return the object trees of all stock files that this rank would write."""
        path = rng_file(self.ranks.rank, self.ranks.world_size)
        trees = {**self.training.trees(), path: rng_tree() if rng is None else rng}
        if self.ranks.is_first and self.scheduler is not None:
            trees[SCHEDULER] = self.scheduler.state_dict()
        return trees

    def _write(
        self, folder: Path, save: SaveId, chosen: Iterable[str], rng: Mapping[str, object] | None
    ) -> tuple[BundleFact, BundleFact | None]:
        params = [name for part in chosen for name in self.model.params_of[part]]
        bundle = write_rank(folder, save, self.training, params, self._trees(rng), self.ranks)
        return bundle, write_frozen(folder, self.training, self._before)

    def _publish(
        self,
        folder: Path,
        save: SaveId,
        chosen: Mapping[str, str],
        facts: Sequence[BundleFact],
        ledger: Ledger,
        write_state: Callable[[Path], None] | None,
    ) -> None:
        """Write rank 0's files, the manifest last."""
        self.carried.put(folder)
        if write_state is not None:
            write_state(folder)
        path, attempt = folder / TRAINER_STATE, Past(save.step, ledger.lineage, ledger.history)
        content = {"global_step": save.step} if write_state is None else read_json(path, str(path))
        if read_mark(content, save.step) != attempt:
            path.write_text(json.dumps(with_mark(content, attempt), indent=2, sort_keys=True) + "\n")
        policy = {"name": self.policy.name, **self.policy.settings(), "max_staleness": self.max_staleness}
        publish(folder, save, self.training, self.model, policy, chosen, facts, ledger, self.ranks.world_size)

    def _retire(self) -> None:
        """Delete checkpoints that are no longer needed; the next save retries failed deletions."""
        if self.keep_composable is None:
            return
        made = {path.name for path in self.carried.written}
        try:
            for step in deletable(self.folder.saves(), self.ledger, self.keep_composable):
                if holds_unknown(self.folder.at(step), made):
                    logger.warning("%s is kept: it holds files that no save wrote", self.folder.at(step).name)
                else:
                    remove_partial(self.folder.at(step))
            self.folder.remove_abandoned(made)
        except OSError as error:
            logger.warning("old partial checkpoints could not be deleted: %s", error)


def _trainer_state(resumed_from: str | Path | Mapping[str, object] | None) -> Mapping[str, Any] | None:
    if resumed_from is None or isinstance(resumed_from, Mapping):
        return resumed_from
    path = Path(resumed_from) / TRAINER_STATE
    return read_json(path, str(path)) if path.is_file() else {}


def _as_problem(error: Exception, rank: int) -> Problem:
    fix = "this is a bug in llmtailor, or in what it saves: please report it with the traceback"
    return Problem("llmtailor.saving", f"rank {rank} raised {error!r:.500}", fix)
