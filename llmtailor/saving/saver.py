"""Saves the parts that a policy chooses, so that any step after the first save can be composed.

A save takes the same steps on every rank::

    exchange what each rank knows, once -> choose parts -> lay out this rank's files
    -> [training continues] copy the states, before the next optimizer step -> write and fsync the files
    -> rank 0 writes the manifest last, or removes everything

With ``background=False``, training stops until the end. A save that fails because of a full or faulty disk is abandoned
with a warning; training continues, and the record of older saves stays valid.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

from llmtailor.attestation.check import announce
from llmtailor.attestation.compare import OFF
from llmtailor.attestation.hooks import PROCESS_HOOKS, AttestHooks
from llmtailor.background.arena import needed_by
from llmtailor.background.options import SAME_FIX, SavingOptions
from llmtailor.background.packing import ANY_STEP
from llmtailor.background.pending import PartialWork, PendingSave
from llmtailor.background.process_exit import finish_at_end
from llmtailor.background.report import SaveFailed, SaveReport
from llmtailor.background.run_record import RunRecord
from llmtailor.background.saver import STUCK, BackgroundSaver
from llmtailor.background.writing import Share, carried_files, check_trees
from llmtailor.checkpoint.lineage import Ledger
from llmtailor.codes import Code
from llmtailor.errors import UsageError
from llmtailor.live.attesting import attest_loop, attest_training
from llmtailor.live.model import (
    PartChanges,
    Sums,
    TrainedModel,
    change_of,
)
from llmtailor.live.tensors import DTYPES
from llmtailor.live.training import Training, TrainingObjects
from llmtailor.model.dtypes import D24
from llmtailor.model.precision import EXACT, Precision
from llmtailor.policies import (
    DEFAULT_POLICY,
    Policy,
    check_policy,
    fitted,
    make_policy,
    precision_of,
    restore_state,
    saves_masters,
    state_of,
)
from llmtailor.ranks.errors import as_error
from llmtailor.ranks.team import Ranks, check_same
from llmtailor.runs.folder import RunFolder
from llmtailor.saving.framework_state import FrameworkState
from llmtailor.saving.planner import SavePlanner, SaveRequest
from llmtailor.saving.restart import resume
from llmtailor.saving.trained_parts import MOST_SKIPPED, TrainedParts
from llmtailor.storage import rounding, zstd
from llmtailor.storage.local import as_path

logger = logging.getLogger("llmtailor.saving")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Vote:
    """What a rank knows before a save."""

    in_flight: tuple[str, ...]
    """The ids of the saves that are not done"""
    has_changed: str
    """What has changed of the model since the last save; empty if nothing has"""
    has_state: bool
    sums: Sums
    is_composable: bool
    """Of rank 0: whether the run could be composed with the last save that was tested"""
    busy: str
    """What delays the oldest of the saves in progress; empty if there is room for another one"""
    save_id: str


def _not_everywhere(votes: Sequence[_Vote]) -> set[str]:
    """Return the saves that are in progress for some ranks, and done for others."""
    first, *others = (set(vote.in_flight) for vote in votes)
    return first.union(*others) - first.intersection(*others)


def _work_of(save: PendingSave) -> PartialWork:
    return cast(PartialWork, save.work)


def _precision(policy: Policy, options: SavingOptions, training: Training) -> Precision:
    """Return what is rounded. Raises UsageError if a package is missing that this needs."""
    weights = DTYPES[training.precision] if training.rounds_masters else "F32"
    precision = precision_of(policy, options.precision, weights)
    if precision != EXACT:
        rounding.loops()  # so that they are not compiled during a save
    if D24 in precision.dtypes(with_moments=False).values():
        zstd.check_installed("masters")
    return precision


class PartialSaver(BackgroundSaver):
    """Writes partial checkpoints of a training to ``<output_dir>/partial``. All ranks make the same calls.

    1) `saver_for` makes one. 2) `start` an attempt. 3) `save` between two optimizer steps; `reports` says which saves
    have finished. 4) `close`.

    Args:
        output_dir: the run's folder, on a file system that all ranks share.
        training: the live model and optimizer.
        policy: which parts each save holds; see `make_policy`.
        beside: what a save holds besides model and optimizer; see `saver_for`.
        carried: objects whose ``save_pretrained`` is called at the first save: config, tokenizer.
        options: how to save.
        is_tested: whether `check_policy` was called for this model before.
        hooks: what ``llmtailor attest`` does; by default, what it does in this process.

    Raises, the same on every rank:
        UsageError: the policy cannot guarantee that every saved step is composable, or an option is out of range.
        UnsupportedCheckpoint: the training's states cannot be saved in parts.
        TargetError: another run saves into the same folder.
    """

    def __init__(
        self,
        output_dir: str | Path,
        training: Training,
        policy: str | Mapping[str, object] | Policy = DEFAULT_POLICY,
        *,
        beside: FrameworkState,
        carried: Iterable[object] = (),
        options: SavingOptions | None = None,
        is_tested: bool = False,
        hooks: AttestHooks | None = None,
    ) -> None:
        self.options, self.ranks = options or SavingOptions(), Ranks.here()
        self.folder = RunFolder(Path(output_dir).absolute())
        self.policy = fitted(make_policy(policy), weights_are_masters=not training.rounds_masters)
        self._hooks, self._beside = hooks or PROCESS_HOOKS, beside
        self._trained = TrainedParts(training, self.ranks, self.options.experts)
        model, given = self._trained.model, self.options.max_staleness
        max_staleness = check_policy(
            self.policy, model.structure, model.parts, model.num_bytes, given, is_tested=is_tested
        )
        precision = _precision(self.policy, self.options, training)
        keeps_bases = precision.has_differences and saves_masters(self.policy)
        self._planner = SavePlanner(
            self._trained,
            self.policy,
            precision,
            beside,
            Ledger(self._new_id()),
            max_staleness=max_staleness,
            ranks=self.ranks,
            keeps_bases=keeps_bases,
        )
        self._reports: list[SaveReport] = []
        self._newest: SaveReport | None = None
        self._has_moved = False
        """Whether frozen params have changed, and the cost was logged"""
        self._trained.begin()
        self.ranks.run_on_all(lambda: check_trees(self._planner.trees(None)))
        mine = {"attest": self.options.attest, "on_mismatch": self.options.on_mismatch}  # ranks branch on these
        check_same(self.ranks.all_gather(mine), dict.fromkeys(mine, (SAME_FIX, UsageError)))
        self.ranks.run_on_first(self.folder.lock)
        self.record = RunRecord(self.folder, self.ranks, self.options, carried_files([*carried]))
        if keeps_bases and self.options.in_flight > 1:
            what = "masters that are differences need the save before to be complete"
            raise UsageError.at("in_flight", what, 'omit it, or use masters="24bit"')
        super().__init__(
            self.options, self.ranks, self.record, training.writes_unseen, lambda: needed_by(training, precision)
        )
        self.record.linked = lambda: {
            work.linked for work in map(_work_of, [*self._running]) if work.linked is not None
        }
        if self._arenas:
            finish_at_end(self, self._finish_until)

    @property
    def model(self) -> TrainedModel:
        return self._trained.model

    @property
    def training(self) -> Training:
        return self._trained.training

    @property
    def ledger(self) -> Ledger:
        return self._planner.ledger

    def start(
        self, step: int, resumed_from: str | Path | Mapping[str, object] | None = None, *, is_retry: bool = False
    ) -> bool:
        """Start an attempt: call it once, before the first save. Return whether an earlier record of saves continues.

        Without such a record, or if the set of trained params has changed, the next save holds every part. Checkpoints
        of later steps belong to an abandoned attempt: partial checkpoints and composites of them are moved aside.

        Args:
            step: the optimizer step that training resumes from, 0 for a training from scratch.
            resumed_from: the checkpoint, or the content of its ``trainer_state.json``. None means the run's newest
                checkpoint of that step.
            is_retry: whether the same training begins once more in this process, maybe from scratch, after an earlier
                saver was closed.

        Raises, the same on every rank:
            NotTheSame: the training does not hold ``resumed_from``, a path, and ``on_mismatch`` is ``stop``.
            TargetError: training starts from scratch in a folder where another run has saved.
            SourceError, StorageError: the record of attempts cannot be read or written.
            UsageError: the staging folder or the mirror holds saves of another run.
        """
        named = f"{resumed_from}" if isinstance(resumed_from, (str, Path)) else None
        if self.options.attest != OFF and (checkpoint := self.ranks.broadcast(named)) is not None:
            self._attest(step, as_path(checkpoint))
        if self._hooks.before_saving is not None:
            self._hooks.before_saving()
        lineage, self._trained.begun_at = self._new_id(), step
        copier = self.record.copier
        if copier is not None and copier.is_staging:  # what it brings may be the save to continue
            copier.catch_up(self.folder)
        ledger, before = self.ranks.run_on_first(
            lambda: resume(
                self.folder,
                self.training,
                parts=self.model.parts,
                step=step,
                lineage=lineage,
                resumed_from=resumed_from,
                is_retry=is_retry,
                policy=self.policy.settings(),
            )
        )
        self.record.is_begun = True
        if copier is not None and not copier.is_staging:
            copier.catch_up(self.folder)
        self._planner.resume(ledger, before)
        return bool(ledger.held_by)

    def _attest(self, step: int, checkpoint: Path) -> None:
        """Compare the training with the checkpoint that its loop names, before the first step."""
        objects = TrainingObjects(scheduler=self._beside.scheduler)
        attest = partial(attest_training, self._trained.live, checkpoint, self.options.attest, objects)
        say = self._hooks.take or announce
        attest_loop(attest, checkpoint, self.options.on_mismatch, step, self.record.append, say)

    def has_state(self, step: int | None = None) -> bool:
        """Return whether the optimizer has made a step on all ranks, so that there are moments to save.

        Call it after the first step to find out early: it raises UnsupportedCheckpoint, on every rank, if they cannot
        be saved, or if the optimizer has made none although training is at ``step``.
        """
        return self._trained.find_state(step, MOST_SKIPPED if self.training.may_skip else 0)

    def save(
        self,
        step: int,
        write_state: Callable[[Path], None] | None = None,
        rng: Mapping[str, object] | None = None,
        *,
        is_last: bool = False,
    ) -> PendingSave | None:
        """Save the parts that the policy chooses. Call it between two optimizer steps, on every rank.

        In the background, it returns before anything is written. If writing fails, that is logged, and is in the
        result; the next save holds what this one should have held. Weights and optimizer states may be changed only by
        the next optimizer step, not before it.

        Returns None, with a warning, if the optimizer has not made a step yet, if ``in_flight`` saves are still being
        written and ``when_busy`` is ``skip``, or if the disk of one of these saves is stuck.

        Args:
            step: the number of optimizer steps made so far.
            write_state: called on rank 0 with a folder, to write ``trainer_state.json`` into it.
            rng: random number states to save; None takes the current ones of this process.
            is_last: whether to wait for the oldest save in progress, whatever ``when_busy`` is.

        Raises:
            SaveFailed: on every rank, for any failure. Nothing of the save remains, and training can continue.
            UnsupportedCheckpoint: before the first save, for an optimizer that can't be saved; see `has_state`.
        """
        began, policy_state = time.monotonic(), state_of(self.policy)
        self._trained.find_state(step, MOST_SKIPPED)  # the loop may have a scaler that the saver does not know
        try:
            agreed = self._agree(step, is_last)
            if agreed is None:
                return None
            policy_state = state_of(self.policy)
            save_id, changes = agreed
            request = SaveRequest(
                step=step, save_id=save_id, began=began, changes=changes, write_state=write_state, rng=rng
            )
            work = self._planner.plan(request, self.record)
            save = self._start_save(work)
            self._planner.begun(work)
            if not self._arenas:
                self._collect_finished()
                if save.failure is not None:
                    raise save.failure
            elif work.share is not None and work.share.moving:
                if not self._has_moved:
                    what = "each save stops training to copy the frozen params that change: %s, %d in total"
                    logger.warning(what, work.share.moving[0], len(work.share.moving))
                self._has_moved = True
                self._barrier.wait_frozen_copied()
            return save
        except Exception as error:
            restore_state(self.policy, policy_state)
            failed = SaveFailed(as_error(error, "saving").problems)
            self.record.log({"step": step, "failed": str(failed)})
            raise failed from error

    def reports(self) -> list[SaveReport]:
        """Return the saves that this rank knows to have finished since the last call."""
        self._collect_finished()
        reports, self._reports = self._reports, []
        return reports

    @property
    def is_busy(self) -> bool:
        """Whether this rank knows of a save in progress."""
        return any(not save.is_done for save in self._running)

    @property
    def newest(self) -> SaveReport | None:
        """The newest save of this process that this rank knows to be published"""
        return next((save.report for save in reversed(self._running) if save.report), self._newest)

    def close(self) -> None:
        """Finish the save in progress, and release the lock on the folder, so that another run can save there."""
        super().close()
        self.record.close()

    def _step_writers(self, share: Share) -> tuple[Collection[object], frozenset[int]]:
        written_with = frozenset(tensor.written_with for tensor in share.live.tensors) - {0, ANY_STEP}
        return self._trained.live.optimizers(), self._trained.masters(written_with)

    def _agree(self, step: int, is_last: bool) -> tuple[str, PartChanges] | None:
        """Exchange what the ranks know. Return the id of the save to make, and how parts have changed; None if there is
        none."""
        self._wait_for_room(may_wait=is_last or self.options.when_busy == "wait")
        if any(save.failure is not None for save in self._running):  # the saves after it fail, too
            self._wait_for([save.work.save_id for save in self._running])
        votes = self.ranks.run_on_all(self._vote)
        busy = votes[0].busy
        while not busy and (unlike := _not_everywhere(votes)):
            # some ranks have not heard yet that these are published, or have failed
            self._wait_for(unlike)
            votes = self.ranks.run_on_all(self._vote)
            busy = STUCK if any(vote.busy == STUCK for vote in votes) else ""
        if busy:
            logger.warning("step %d: save skipped: the previous save %s", step, busy)
            return None
        if changes := [vote.has_changed for vote in votes if vote.has_changed]:
            logger.warning("the model has changed: %s; this save holds every part", changes[0])
            self._forget()
        ledger = self.ledger
        if not votes[0].is_composable and ledger.held_by and set(ledger.steps.values()) != {ledger.step}:
            logger.warning("the run can't be composed with the last save; this one holds every part")
            self._forget()
        if not all(vote.has_state for vote in votes):
            logger.warning("step %d: save skipped: the optimizer has not made a step yet", step)
            return None
        self._planner.measure()
        return votes[0].save_id, change_of([vote.sums for vote in votes])

    def _vote(self) -> _Vote:
        self._collect_finished()
        has_changed, has_state = self.training.refresh(), self._trained.look_for_state()
        return _Vote(
            in_flight=tuple(save.work.save_id for save in self._running if not save.is_done),
            has_changed=has_changed,
            has_state=has_state,
            sums=self._trained.sums() if has_state and not has_changed else {},
            is_composable=self.record.is_composable,
            busy=self._why_busy(),
            save_id=uuid.uuid4().hex,
        )

    def _take_note(self, save: PendingSave) -> None:
        if save.report is not None:
            self._planner.published(_work_of(save))
            self._reports.append(save.report)
            self._newest = save.report
            return
        self._planner.failed(_work_of(save))
        if save.failure is not None and any(one.code is Code.NOT_ROUNDABLE for one in save.failure.problems):
            self._planner.keep_moments_exact()

    def _forget(self) -> None:
        """Let the next save hold every part, as the first one."""
        self._planner.forget()
        self.record.planned.clear()

    def _new_id(self) -> str:
        return self.ranks.broadcast(uuid.uuid4().hex[:12])
