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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from llmtailor.attestation.compare import OFF
from llmtailor.checkpoint.lineage import Ledger, Past
from llmtailor.errors import UnsupportedCheckpoint
from llmtailor.formats.other_optimizers import UNSAVED_FIX
from llmtailor.formats.partial.manifest import Manifest
from llmtailor.policies import (
    DEFAULT_POLICY,
    PartChoice,
    Policy,
    Situation,
    choose,
    make_policy,
    restore_state,
    setbacks,
    state_of,
)
from llmtailor.ranks.board import as_error
from llmtailor.runs.folder import RunFolder
from llmtailor.saving.attesting import attest_loop
from llmtailor.saving.client_state import ClientState
from llmtailor.saving.model import (
    Drift,
    PartChanges,
    Samples,
    Sums,
    change_of,
    find_trained_parts,
    limit_for,
    weigh,
)
from llmtailor.saving.options import SavingOptions
from llmtailor.saving.restart import resume, trainer_state_of
from llmtailor.saving.save import (
    PendingSave,
    RunRecord,
    SaveFailed,
    SaveReport,
    Work,
    check_chosen,
    finish_at_end,
    open_background,
    release,
    save_now,
)
from llmtailor.saving.snapshot import DTYPES
from llmtailor.saving.tiers import catch_up, open_tiers
from llmtailor.saving.training import Ranks, Training
from llmtailor.saving.writing import (
    CarriedFiles,
    Publication,
    SaveId,
    check_trees,
    files_of,
    lay_out_share,
    sample_frozen,
)

logger = logging.getLogger("llmtailor.saving")


def _setback(ledger: Ledger, step: int, expected_loss: Mapping[str, float]) -> dict[str, float]:
    """Return by how many steps training falls back with the last save of each part; ``ledger`` is that before the save.

    A resumed training has changed only since it was resumed.
    """
    resumed = max(ledger.history.values(), default=0)
    return setbacks(expected_loss, {part: step - max(held, resumed) for part, held in ledger.steps.items()})


_MOST_SKIPPED = 100
"""Steps that an fp16 training may skip at its beginning, until the scale of the loss fits"""


@dataclass(frozen=True, slots=True)
class _Vote:
    """What a rank knows before a save."""

    has_changed: bool
    """Whether the set of trained params has changed"""
    has_state: bool
    sums: Sums
    previous: str
    """What delays the save before; empty if it is published or has failed"""
    save_id: str


@dataclass(frozen=True, slots=True)
class _Commit:
    """What becomes true once a save is published."""

    ledger: Ledger
    samples: Samples
    policy_state: Mapping[str, Any] | None
    """The policy's state before the save, which is restored if it fails"""


class PartialSaver:
    """Writes partial checkpoints of a training to ``<output_dir>/partial``. All ranks make the same calls.

    `saver_for` makes one.

    Args:
        output_dir: the run's folder, on a file system that all ranks share.
        training: the live model and optimizer.
        policy: which parts each save holds; see `make_policy`.
        beside: what a save holds besides model and optimizer; see `saver_for`.
        carried: objects whose ``save_pretrained`` is called at the first save: config, tokenizer.
        options: how to save.
        is_tested: whether `check_policy` was called for this model before.

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
        beside: ClientState,
        carried: Iterable[object] = (),
        options: SavingOptions | None = None,
        is_tested: bool = False,
    ) -> None:
        self.options = options or SavingOptions()
        staging = self.options.staging_dir
        self.folder = RunFolder(Path(output_dir).absolute())
        self.first = self.folder if staging is None else RunFolder(Path(staging).absolute())
        self._training = training
        self.policy = make_policy(policy)
        self.ranks = Ranks.here()
        self.carried = CarriedFiles([*carried])
        self.model, self.training = find_trained_parts(training, self.ranks, self.options.experts)
        self.drift = Drift(self.model.part_of)
        self.max_staleness = limit_for(self.policy, self.model, self.options.max_staleness, is_tested)
        self._client = beside
        self.ledger = Ledger(self._new_id())
        self._before: Path | None = None
        self._pending: tuple[PendingSave, _Commit] | None = None
        self._reports: list[SaveReport] = []
        self._newest: SaveReport | None = None
        self._frozen: Mapping[str, int] = sample_frozen(self.training.frozen())
        self._has_moved = False
        """Whether frozen params have changed, so that it was said what that costs"""
        self._is_weighed = self._has_state = all(self.ranks.together(training.has_state))
        self._begun_at: int | None = None
        """The step that training began at, if `start` was called"""
        self.ranks.together(lambda: check_trees(self._trees(None)))
        self.ranks.on_first(self.folder.lock)
        self.record = RunRecord(self.folder, self.ranks, self.options.keep_composable, self.carried)
        board = self.ranks.board()
        if self.options.staging_dir is not None or self.options.mirror is not None:
            self.record.copier = open_tiers(
                self.folder, self.first, self.options, self.ranks, board, self.record.append
            )
        self._background = open_background(training, self.options, self.ranks, board)
        if self._background is not None:
            finish_at_end(self, self._finish_until)

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
        """
        if isinstance(resumed_from, (str, Path)) and self.options.attest != OFF:
            self._attest(step, Path(resumed_from))
        lineage, parts, self._begun_at = self._new_id(), self.model.parts, step
        if self.record.copier is not None:
            catch_up(self.record.copier, self.folder, self.ranks)
        self.ledger, self._before = self.ranks.on_first(
            lambda: resume(self.folder, self.training, parts, step, lineage, trainer_state_of(resumed_from), is_retry)
        )
        self.record.is_begun = True
        if not self.ledger.held_by:
            return False
        restore_state(self.policy, self.ledger.policy_state)
        # each part now has the state of its newest save
        self.drift.remember(self.drift.samples(self.training.masters(), self.ledger.held_by))
        return True

    def _attest(self, step: int, checkpoint: Path) -> None:
        """Compare the training with the checkpoint that its loop names, before the first step."""

        def write(found: Mapping[str, object]) -> None:
            self.record.log({"step": step, "attested": found})

        scheduler = getattr(self._client, "scheduler", None)
        attest_loop(self._training, checkpoint, self.options, scheduler, write)

    def has_state(self, step: int | None = None) -> bool:
        """Return whether the optimizer has made a step on all ranks, so that there are moments to save.

        Call it after the first step to find out early: it raises UnsupportedCheckpoint, on every rank, if they cannot
        be saved, or if the optimizer has made none although training is at ``step``.
        """
        return self._find_state(step, _MOST_SKIPPED if self.training.may_skip else 0)

    def save(
        self,
        step: int,
        write_state: Callable[[Path], None] | None = None,
        rng: Mapping[str, object] | None = None,
        *,
        is_last: bool = False,
    ) -> PendingSave | None:
        """Save the parts that the policy chooses. Call it between two optimizer steps, on every rank.

        In the background, it returns before anything is written. A failure of the writing is logged, and is in the
        result; what the save should have held is due at the next one. Until the next optimizer step, only that step
        may change weights and optimizer states.

        Returns None, with a warning, if the optimizer has not made a step yet, or if the previous save is still being
        written and ``when_busy`` is ``skip``, or its disk is stuck.

        Args:
            step: the number of optimizer steps made so far.
            write_state: called on rank 0 with a folder, to write ``trainer_state.json`` into it.
            rng: random number states to save; None takes the current ones of this process.
            is_last: whether to wait for the previous save, whatever ``when_busy`` says.

        Raises:
            SaveFailed: on every rank, whatever went wrong. Nothing of the save remains, and training can continue.
            UnsupportedCheckpoint: before the first save, for an optimizer that can't be saved; see `has_state`.
        """
        began, policy_state = time.monotonic(), state_of(self.policy)
        self._find_state(step, _MOST_SKIPPED)  # the loop may have a scaler that the saver does not know
        try:
            agreed = self._agree(step, is_last)
            if agreed is None:
                return None
            policy_state = state_of(self.policy)
            return self._save(*agreed, write_state, rng, began)
        except Exception as error:
            restore_state(self.policy, policy_state)
            failed = SaveFailed(as_error(error, "saving").problems)
            self.record.log({"step": step, "failed": str(failed)})
            raise failed from error

    def reports(self) -> list[SaveReport]:
        """Return the saves that have finished since the last call, as far as this rank knows."""
        self._settle()
        reports, self._reports = self._reports, []
        return reports

    @property
    def is_busy(self) -> bool:
        """Whether a save is in progress, as far as this rank knows."""
        return self._pending is not None and not self._pending[0].is_done

    @property
    def newest(self) -> SaveReport | None:
        """The newest published save of this process, as far as this rank knows"""
        return (self._pending and self._pending[0].report) or self._newest

    def finish(self) -> None:
        """Wait until no save is in progress. One whose disk is stuck is given up."""
        if self._pending is not None:
            save = self._pending[0]
            if self._background is not None:
                self._background.settle()
            if not save.wait_unless_stuck():
                logger.warning("the save at step %d was aborted: its disk is stuck", save.step)
                save.give_up()

    def close(self) -> None:
        """Finish the save in progress, and release the lock on the folder, so that another run can save there."""
        self.finish()
        release(self)
        if self.record.copier is not None:
            self.record.copier.close(self.options.write_timeout)
            self.record.copier = None
            if self.first is not self.folder:
                self.first.unlock()
        self.record.close()
        if self._background is not None:
            self._background.close()
            self._background = None
        self.folder.unlock()

    def _finish_until(self, until: float) -> None:
        if self._pending is not None:
            self._pending[0].finish_until(until)

    def _agree(self, step: int, is_last: bool) -> tuple[SaveId, PartChanges] | None:
        """Exchange what the ranks know. Return the save to make, with the change of parts; None if there is none."""
        if self._pending is not None:
            if self._background is not None:
                self._background.settle()  # only a save without a step in between is still copied
            if is_last or self.options.when_busy == "wait":
                self._pending[0].wait_unless_stuck()
        votes = self.ranks.together(self._vote)
        first = votes[0]
        if first.previous:
            logger.warning("step %d: save skipped: the previous save %s", step, first.previous)
            return None
        if any(vote.previous for vote in votes):  # not everybody has heard yet that it is published
            if self._pending is not None:
                self._pending[0].wait_unless_stuck()
            votes = self.ranks.together(self._vote)
        if any(vote.has_changed for vote in votes):
            self._forget()
        if not all(vote.has_state for vote in votes):
            logger.warning("step %d: save skipped: the optimizer has not made a step yet", step)
            return None
        if not self._is_weighed:
            self.model, self._is_weighed = weigh(self.model, self.training, self.ranks), True
        return SaveId(first.save_id, step), change_of([vote.sums for vote in votes])

    def _vote(self) -> _Vote:
        self._settle()
        previous = ""
        if self._pending is not None:
            is_stuck = self._pending[0].is_stuck
            previous = "is stuck; the disk is not accepting writes" if is_stuck else "is still being written"
        has_changed, has_state = self.training.refresh_params(), self._look_for_state()
        sums = self.drift.measure(self.training) if has_state and not has_changed else {}
        return _Vote(has_changed, has_state, sums, previous, uuid.uuid4().hex)

    def _settle(self) -> None:
        """Take the outcome of the previous save into account, if it has one."""
        if self._pending is None or not self._pending[0].is_done:
            return
        save, commit = self._pending
        self._pending = None
        if save.failure is None:
            self.ledger, self._before = commit.ledger, save.path
            self.drift.remember(commit.samples)
        else:
            restore_state(self.policy, commit.policy_state)
        if save.report is not None:
            self._reports.append(save.report)
            self._newest = save.report

    def _save(
        self,
        save: SaveId,
        change: PartChanges,
        write_state: Callable[[Path], None] | None,
        rng: Mapping[str, object] | None,
        began: float,
    ) -> PendingSave:
        laid_out: list[tuple[Work, _Commit]] = []

        def lay_out() -> list[str]:
            laid_out.append(self._lay_out(save, change, write_state, rng, began))
            return [*laid_out[0][0].report.parts]

        made: PendingSave
        if self._background is None:
            check_chosen(self.ranks.together(lay_out))
            ((work, commit),) = laid_out
            made = save_now(self.ranks, work)
            self._pending = made, commit
            self._settle()
        else:
            try:
                lay_out()
            except Exception as error:  # the others learn of it when all have written
                laid_out = [self._refused(save, began, error)]
            ((work, commit),) = laid_out
            made = self._background.start(work)
            self._pending = made, commit
            if work.share is not None and work.share.moving:
                self._say_frozen_move(work.share.moving)
                self._background.settle_frozen()
        return made

    def _say_frozen_move(self, names: Sequence[str]) -> None:
        if not self._has_moved:
            what = "each save stops training to copy the frozen params that change: %s, %d in total"
            logger.warning(what, names[0], len(names))
        self._has_moved = True

    def _refused(self, save: SaveId, began: float, error: Exception) -> tuple[Work, _Commit]:
        """Return the work of a rank that has nothing to write."""
        report = SaveReport(save.step, {}, 0, 0.0, {}, {}, {}, self.first.at(save.step))
        refusal = as_error(error, "saving")
        if refusal is not error:
            logger.warning("a save failed on rank %d", self.ranks.rank, exc_info=error)
        work = Work(save, began, self.first, self.record, self.ledger, report, refusal=refusal)
        return work, _Commit(self.ledger, {}, state_of(self.policy))

    def _lay_out(
        self,
        save: SaveId,
        change: PartChanges,
        write_state: Callable[[Path], None] | None,
        rng: Mapping[str, object] | None,
        began: float,
    ) -> tuple[Work, _Commit]:
        """Choose parts, and lay out what this rank writes of them, without exchanging anything."""
        policy_state, choice = state_of(self.policy), self._choose(save.step, change)
        ledger = self.ledger.after(save.step, choice.parts, self.model.parts, state_of(self.policy))
        params, masters = map(self.model.names_in, (choice.parts, choice.masters))
        share = lay_out_share(
            save,
            self.training,
            params,
            masters,
            self._trees(rng),
            self.ranks,
            before=self._before,
            seen=self._frozen,
            moments=torch.bfloat16 if self.options.moments == "bf16" else None,
            pieces=self.model.structure.pieces,
        )
        self._frozen = share.samples
        report = SaveReport(
            step=save.step,
            parts=choice.parts,
            num_bytes=0,
            stall_s=0.0,
            drift=change.drift,
            expected_loss=change.expected_loss,
            steps_behind=ledger.steps_behind(),
            path=self.first.at(save.step),
            masters=choice.masters,
        )
        publication = self._publication(save, choice, ledger, change, write_state) if self.ranks.is_first else None
        work = Work(save, began, self.first, self.record, ledger, report, share, self._before, publication)
        return work, _Commit(ledger, self.drift.samples(self.training.masters(), choice.parts), policy_state)

    def _choose(self, step: int, change: PartChanges) -> PartChoice:
        """Return the parts that the save at a step holds, with the reasons."""
        ledger, model = self.ledger, self.model
        if not ledger.held_by:
            return PartChoice(dict.fromkeys(model.parts, "complete base"), frozenset())
        situation = Situation(
            step=step,
            save=ledger.saves,
            structure=model.structure,
            parts=model.parts,
            num_bytes=model.num_bytes,
            last=ledger.last,
            drift=change.drift if self.policy.needs_drift else None,
            expected_loss=change.expected_loss if self.policy.needs_drift else None,
        )
        choice = choose(self.policy, situation, self.max_staleness)
        for problem in choice.problems if self.ranks.is_first else ():
            logger.warning("%s", problem)
        return choice

    def _trees(self, rng: Mapping[str, object] | None) -> dict[str, Any]:
        """Return the object trees of all stock files that this rank would write."""
        return self._client.trees(self.training.trees(), self.ranks, rng)

    def _publication(
        self,
        save: SaveId,
        choice: PartChoice,
        ledger: Ledger,
        change: PartChanges,
        write_state: Callable[[Path], None] | None,
    ) -> Publication:
        """Return what rank 0 adds; ``write_state`` writes ``trainer_state.json`` into a folder, ``ledger`` is the new
        one."""
        # of stale moments alone there is no estimate
        setback = {} if choice.masters else _setback(self.ledger, save.step, change.expected_loss)
        model, training, pieces = self.model, self.training, self.model.structure.pieces
        names_of = {part: model.params_of[part] for part in (*choice.parts, *choice.masters)}
        manifest = Manifest(
            step=save.step,
            save_id=save.save_id,
            stage=training.stage,
            world_size=self.ranks.world_size,
            precision=DTYPES[training.precision],
            tag=training.tag,
            parts=choice.parts,
            params_of={part: [name for name in names if name not in pieces] for part, names in names_of.items()},
            params=training.params,
            tied=training.tied,
            saved_as=model.saved_as,
            bundles=(),
            shards=training.shards(),
            ledger=ledger.to_json(),
            setback={part: steps for part, steps in setback.items() if part not in choice.parts},
            pieces_of={
                part: {one.param: (one.begin, one.end) for name in names if (one := pieces.get(name))}
                for part, names in names_of.items()
            },
            masters=choice.masters,
        )
        files = {**self._client.files(), **(files_of(write_state) if write_state is not None else {})}
        attempt = Past(save.step, ledger.lineage, ledger.history)
        policy = {"name": self.policy.name, **self.policy.settings(), "max_staleness": self.max_staleness}
        return Publication(manifest, attempt, policy, dict(model.num_bytes), files, self.carried.contents())

    def _new_id(self) -> str:
        return self.ranks.from_first(uuid.uuid4().hex[:12])

    def _forget(self) -> None:
        """Continue with another set of trained params, which no earlier save covers."""
        logger.warning("the set of trained params has changed; the next save holds every part")
        self.model, self.training = find_trained_parts(self._training, self.ranks, self.options.experts)
        self.drift = Drift(self.model.part_of)
        self.record.is_proven = False
        self.ledger = self.ledger.without(self.ledger.held_by.keys())

    def _find_state(self, step: int | None, most_skipped: int) -> bool:
        """Return what `has_state` does; the optimizer may have left out ``most_skipped`` steps of the training."""
        made = step - self._begun_at if step is not None and self._begun_at is not None else 0
        if not self._has_state:
            self._has_state = all(self.ranks.together(lambda: self._look_for_state(made - most_skipped)))
        return self._has_state

    def _look_for_state(self, num_missing: int = 0) -> bool:
        """Return whether this rank has moments to save. Raises UnsupportedCheckpoint if it can't save any, or if they
        are ``num_missing`` steps late."""
        has_state, training = self.training.has_state(), self.training
        if has_state:
            return True
        where = "the optimizer" + "".join(f" {type(one).__name__}" for one in training.optimizers())
        if training.has_stepped():
            raise UnsupportedCheckpoint.at(where, "it has made a step but has no moments", UNSAVED_FIX)
        if num_missing > 0:
            what = "training never calls its step(), so its states are unknown"
            raise UnsupportedCheckpoint.at(where, what, UNSAVED_FIX)
        return False
