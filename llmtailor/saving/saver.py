"""Saves the parts that a policy chooses, so that any step after the first save can be composed.

A save takes the same steps on every rank::

    exchange what each rank knows, once -> choose parts -> lay out this rank's files
    -> [training continues] copy the states, before the next optimizer step -> write and fsync the files
    -> rank 0 writes the manifest last, or removes everything

With ``background=False``, training stops until the end. A save that fails because of a full or faulty disk is abandoned
with a warning; training continues, and the record of older saves stays valid.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from llmtailor.checkpoint.lineage import Ledger, Past
from llmtailor.containers.json import read_json
from llmtailor.errors import UnsupportedCheckpoint
from llmtailor.formats.attempt_mark import read_mark, with_mark
from llmtailor.formats.partial.manifest import Manifest
from llmtailor.formats.rng import rng_file
from llmtailor.formats.trainer import SCHEDULER, TRAINER_STATE
from llmtailor.policies import Policy, Situation, check_policy, choose, make_policy, restore_state, state_of
from llmtailor.runs.folder import RunFolder, holds_unknown, remove_partial
from llmtailor.runs.retention import deletable
from llmtailor.saving import ending
from llmtailor.saving.drift import Drift, Samples, Sums, relative_change
from llmtailor.saving.levels import Copier, Finished, Level, Mirror, Node, SharedFolder, take_over, tensor_files
from llmtailor.saving.live import DTYPES
from llmtailor.saving.memory import auto_bytes
from llmtailor.saving.model import find_trained_parts, weigh
from llmtailor.saving.options import SavingOptions
from llmtailor.saving.pending import BackgroundSave, Board, PendingSave, SaveFailed, Work, check_same, save_now
from llmtailor.saving.ranks import Ranks, as_refusal
from llmtailor.saving.report import SaveReport, append
from llmtailor.saving.resuming import resume
from llmtailor.saving.snapshot import Arena, Snapshot, StepBarrier
from llmtailor.saving.training import HasState, Training, rng_tree
from llmtailor.saving.writing import CarriedFiles, Publication, SaveId, check_trees, files_of, lay_out_share

logger = logging.getLogger("llmtailor.saving")


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
        scheduler: the learning rate scheduler, unless the engine saves it.
        carried: objects whose ``save_pretrained`` is called at the first save: config, tokenizer.
        options: how to save.

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
        carried: Iterable[object] = (),
        options: SavingOptions | None = None,
    ) -> None:
        self.folder = RunFolder(Path(output_dir).absolute())
        staging = (options or SavingOptions()).staging_dir
        self.first = self.folder if staging is None else RunFolder(Path(staging).absolute())
        self.training = training
        self.scheduler = scheduler
        self.policy = make_policy(policy)
        self.options = options or SavingOptions()
        self.ranks = Ranks.here()
        self.carried = CarriedFiles([*carried])
        self.model = find_trained_parts(training, self.ranks)
        model, given = self.model, self.options.max_staleness
        self.max_staleness = check_policy(self.policy, model.structure, model.parts, model.num_bytes, given)
        self.drift = Drift(model.part_of)
        self.ledger = Ledger(self._new_id())
        self._before: Path | None = None
        self._pending: tuple[PendingSave, _Commit] | None = None
        self._reports: list[SaveReport] = []
        self._newest: SaveReport | None = None
        self._is_recorded = False
        self._is_weighed = all(self.ranks.together(training.has_state))
        self.ranks.together(lambda: check_trees(self._trees(None)))
        self.ranks.on_first(self.folder.lock)
        self._arena: Arena | None = None
        self._barrier: StepBarrier | None = None
        self._board: Board | None = None
        self._copier: Copier | None = None
        self._node: Node | None = None
        self._elsewhere: frozenset[str] = frozenset()
        if self.options.background:
            self._prepare_background()
        if self.options.staging_dir is not None or self.options.mirror is not None:
            self._prepare_levels()

    def _prepare_background(self) -> None:
        def allocate() -> tuple[str | None, Arena | None]:
            if why := self.training.writes_unseen():
                return why, None
            masters = [one.tensor for one in self.training.masters()]
            given = self.options.host_buffer
            num_bytes = auto_bytes(masters, self.options.moments) if given == "auto" else given
            try:
                return None, Arena(num_bytes, pinned=any(master.is_cuda for master in masters))
            except (RuntimeError, MemoryError) as error:
                return f"there is no host memory of {num_bytes} bytes: {error}", None

        mine: list[Arena | None] = []

        def why_not() -> str | None:
            why, arena = allocate()
            mine.append(arena)
            return why

        reasons = [why for why in self.ranks.together(why_not) if why]
        if reasons:
            logger.warning("saves stop training until they are complete: %s", reasons[0])
            return
        self._arena = mine[0]
        self._board, self._barrier = Board(self.ranks), StepBarrier()
        ending.finish_at_end(self, self._finish_until)

    def _prepare_levels(self) -> None:
        """Start copying to a second level; see `SavingOptions`."""
        mirror, node = self.options.mirror, Node.here(self.ranks)
        is_staging, is_leader = mirror is None, self.ranks.rank == node.ranks[0]
        last: list[Level] = []

        def prepare() -> None:
            last.append(SharedFolder(self.folder) if mirror is None else Mirror(mirror))
            if is_staging and is_leader:
                self.first.lock()
                self.first.sweep()

        self.ranks.together(prepare)
        if is_staging:
            others = [rank for rank in range(self.ranks.world_size) if rank not in node.ranks]
            self._elsewhere = frozenset(tensor_files(others, self.ranks.world_size))
        self._node, board = node, self._board or Board(self.ranks)
        self._copier = Copier(self.first, last[0], self.ranks, node, board, self._append, is_staging=is_staging)

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
        if self._copier is not None and self._node is not None:
            try:
                copied = take_over(self._copier, self.folder, self.ranks, self._node)
            except Exception as error:
                if self.options.mirror is None:
                    raise
                copied = []
                logger.warning("what the mirror lacks could not be copied: %s", error)
            if copied and self.ranks.is_first:
                logger.warning("copied saves that an earlier process had left: %s", ", ".join(map(str, copied)))
        resumed = self.ranks.on_first(
            lambda: resume(self.folder, self.training, step, lineage, _trainer_state(resumed_from))
        )
        self._is_recorded, self.ledger, self._before = True, resumed.ledger, resumed.before
        if not self.ledger.held_by:
            return False
        restore_state(self.policy, self.ledger.policy_state)
        if self.policy.needs_drift:
            # each part now has the state of its newest save
            self.drift.remember(self.drift.samples(self.training.masters(), self.ledger.held_by))
        return True

    def has_state(self) -> bool:
        """Return whether the optimizer has made a step on all ranks, so that there are moments to save.

        Call it after the first step to find out early: it raises UnsupportedCheckpoint, on every rank, if they cannot
        be saved.
        """
        return all(self.ranks.together(self._has_state))

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
        """
        began, policy_state = time.monotonic(), state_of(self.policy)
        try:
            agreed = self._agree(step, is_last)
            if agreed is None:
                return None
            policy_state = state_of(self.policy)
            return self._save(*agreed, write_state, rng, began)
        except Exception as error:
            restore_state(self.policy, policy_state)
            failed = SaveFailed(as_refusal(error, self.ranks.rank).problems)
            if self.ranks.is_first:
                self.log({"step": step, "failed": str(failed)})
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
            if self._barrier is not None:
                self._barrier.settle()
            if not save.wait_unless_stuck():
                logger.warning("the save at step %d is given up: its disk is stuck", save.step)
                save.give_up()

    def close(self) -> None:
        """Finish the save in progress, and release the lock on the folder, so that another run can save there."""
        self.finish()
        if self._copier is not None:
            self._copier.close(self.options.write_timeout)
            self._copier = None
            if self.first is not self.folder:
                self.first.unlock()
        ending.release(self)
        if self._barrier is not None:
            self._barrier.remove()
        self._arena = None
        self.folder.unlock()

    def _finish_until(self, until: float) -> None:
        """Finish the save in progress, or give it up at this time; without locks, for a signal handler."""
        if self._pending is None:
            return
        save = self._pending[0]
        with suppress(TimeoutError, SaveFailed):
            save.wait(until - time.monotonic())
        if not save.is_done:
            save.give_up()
            with suppress(TimeoutError, SaveFailed):
                save.wait(1.0)

    def _agree(self, step: int, is_last: bool) -> tuple[SaveId, dict[str, float]] | None:
        """Exchange what the ranks know. Return the save to make, with the drift; None if there is none to make."""
        if self._pending is not None:
            if self._barrier is not None:
                self._barrier.settle()  # only a save without a step in between is still copied
            if is_last or self.options.when_busy == "wait":
                self._pending[0].wait_unless_stuck()
        votes = self.ranks.together(self._vote)
        first = votes[0]
        if first.previous:
            logger.warning("step %d: nothing was saved: the save before %s", step, first.previous)
            return None
        if any(vote.previous for vote in votes):  # not everybody has heard yet that it is published
            if self._pending is not None:
                self._pending[0].wait_unless_stuck()
            votes = self.ranks.together(self._vote)
        if any(vote.has_changed for vote in votes):
            self._forget()
        if not all(vote.has_state for vote in votes):
            logger.warning("step %d: nothing was saved: the optimizer has not made a step yet", step)
            return None
        if not self._is_weighed:
            self.model, self._is_weighed = weigh(self.model, self.training, self.ranks), True
        return SaveId(first.save_id, step), relative_change([vote.sums for vote in votes])

    def _vote(self) -> _Vote:
        self._settle()
        previous = ""
        if self._pending is not None:
            is_stuck = self._pending[0].is_stuck
            previous = "is stuck: its disk accepts nothing" if is_stuck else "is still being written"
        has_changed, has_state = self.training.look_again(), self._has_state()
        sums = self.drift.sums(self.training.masters()) if self.policy.needs_drift and not has_changed else {}
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
        drift: dict[str, float],
        write_state: Callable[[Path], None] | None,
        rng: Mapping[str, object] | None,
        began: float,
    ) -> PendingSave:
        laid_out: list[tuple[Work, _Commit]] = []

        def lay_out() -> list[str]:
            laid_out.append(self._lay_out(save, drift, write_state, rng, began))
            return [*laid_out[0][0].report.parts]

        made: PendingSave
        if self._board is None:
            check_same(self.ranks.together(lay_out))
            ((work, commit),) = laid_out
            made = save_now(self.ranks, work, began)
            self._pending = made, commit
            self._settle()
        else:
            try:
                lay_out()
            except Exception as error:  # the others learn of it when all have written
                laid_out = [self._refused(save, error)]
            ((work, commit),) = laid_out
            snapshot = self._copy(work, began)
            timeout = self.options.write_timeout
            made = BackgroundSave(self.ranks, self._board, work, snapshot, began, timeout)
            self._pending = made, commit
        return made

    def _refused(self, save: SaveId, error: Exception) -> tuple[Work, _Commit]:
        """Return the work of a rank that has nothing to write."""
        report = SaveReport(save.step, {}, 0, 0.0, {}, {}, self.first.at(save.step))
        refusal = as_refusal(error, self.ranks.rank)
        if refusal is not error:
            logger.warning("a save failed on rank %d", self.ranks.rank, exc_info=error)
        work = Work(save, self.first, None, report, None, log=self.log, problems=refusal.problems)
        return work, _Commit(self.ledger, {}, state_of(self.policy))

    def _lay_out(
        self,
        save: SaveId,
        drift: Mapping[str, float],
        write_state: Callable[[Path], None] | None,
        rng: Mapping[str, object] | None,
        began: float,
    ) -> tuple[Work, _Commit]:
        """Choose parts, and lay out what this rank writes of them."""
        before, policy_state = self._before, state_of(self.policy)
        chosen = self._choose(save.step, drift)
        ledger = self.ledger.after(save.step, chosen, self.model.parts, state_of(self.policy))
        params = [name for part in chosen for name in self.model.params_of[part]]
        moments = {None: None, "bf16": torch.bfloat16}[self.options.moments]
        share = lay_out_share(save, self.training, params, self._trees(rng), self.ranks, before, moments)
        past, is_first = Past(save.step, ledger.lineage, ledger.history), self.ranks.is_first
        work = Work(
            save=save,
            share=share,
            report=SaveReport(
                step=save.step,
                parts=chosen,
                num_bytes=0,
                stall_s=0.0,
                drift=drift,
                steps_behind=ledger.steps_behind(),
                path=self.first.at(save.step),
            ),
            before=before,
            first=self.first,
            publication=self._publication(save, chosen, ledger, write_state) if is_first else None,
            elsewhere=self._elsewhere,
            record=partial(self._record, past),
            on_published=partial(self._on_published, save, ledger, began),
            log=self.log,
        )
        samples = self.drift.samples(self.training.masters(), chosen) if self.policy.needs_drift else {}
        return work, _Commit(ledger, samples, policy_state)

    def _copy(self, work: Work, began: float) -> Snapshot | None:
        """Start copying the states, before the next step of the optimizer; None if there is nothing to copy."""
        if work.share is None or self._arena is None or self._barrier is None:
            return None
        share, timeout = work.share, self.options.write_timeout
        snapshot = Snapshot(share.live, share.files, self._arena, timeout, began, share.check)
        masters = (one.tensor for one in self.training.masters())
        self._barrier.arm(snapshot, self.training.optimizers(), masters)
        return snapshot

    def _new_id(self) -> str:
        return self.ranks.from_first(uuid.uuid4().hex[:12])

    def _forget(self) -> None:
        """Continue with another set of trained params, which no earlier save covers."""
        logger.warning("the set of trained params has changed; the next save is complete")
        self.model = find_trained_parts(self.training, self.ranks)
        self.drift = Drift(self.model.part_of)
        self.ledger = self.ledger.without(self.ledger.held_by.keys())

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
        for problem in choice.problems if self.ranks.is_first else ():
            logger.warning("%s", problem)
        return dict(choice.parts)

    def _trees(self, rng: Mapping[str, object] | None) -> dict[str, Any]:
        """Return the object trees of all stock files that this rank would write."""
        path = rng_file(self.ranks.rank, self.ranks.world_size)
        trees = {**self.training.trees(), path: rng_tree() if rng is None else rng}
        if self.ranks.is_first and self.scheduler is not None:
            trees[SCHEDULER] = self.scheduler.state_dict()
        return trees

    def _publication(
        self, save: SaveId, chosen: Mapping[str, str], ledger: Ledger, write_state: Callable[[Path], None] | None
    ) -> Publication:
        training, model = self.training, self.model
        manifest = Manifest(
            step=save.step,
            save_id=save.save_id,
            stage=training.stage,
            world_size=self.ranks.world_size,
            precision=DTYPES[training.precision],
            tag=training.tag,
            parts=chosen,
            params_of={part: model.params_of[part] for part in chosen},
            params=training.params,
            tied=training.tied,
            saved_as=model.saved_as,
            bundles=(),
            shards=training.shards(),
            ledger=ledger.to_json(),
        )
        files = files_of(write_state) if write_state is not None else {}
        attempt = Past(save.step, ledger.lineage, ledger.history)
        state = json.loads(files[TRAINER_STATE]) if files else {"global_step": save.step}
        if not files or read_mark(state, save.step) != attempt:
            files[TRAINER_STATE] = (json.dumps(with_mark(state, attempt), indent=2, sort_keys=True) + "\n").encode()
        policy = {"name": self.policy.name, **self.policy.settings(), "max_staleness": self.max_staleness}
        return Publication(manifest, policy, dict(model.num_bytes), files, self.carried.contents())

    def _record(self, past: Past) -> None:
        if not self._is_recorded:  # a loop that never called `start`
            self.folder.record_attempt(past)
        self._is_recorded = True

    def log(self, line: Mapping[str, Any]) -> None:
        """Add a line to the run's log, after the lines of saves that are still being copied."""
        if self._copier is not None:
            self._copier.add(line)
        else:
            self._append(line)

    def _append(self, line: Mapping[str, Any]) -> None:
        if self.ranks.is_first:
            append(self.folder.partial, line)

    def _on_published(self, save: SaveId, ledger: Ledger, began: float, report: SaveReport) -> None:
        line, retire = report.to_json(), partial(self._retire, ledger)
        if self._copier is not None:
            self._copier.add(Finished(save.step, save.save_id, began, line, retire))
        elif self.ranks.is_first:
            self._append(line)
            retire()

    def _retire(self, ledger: Ledger) -> list[int]:
        """Delete checkpoints that are no longer needed, and return their steps; the next save retries failed ones."""
        made, deleted = [*self.carried.contents()], []
        if self.options.keep_composable is None:
            return []
        try:
            for step in deletable(self.folder.saves(), ledger, self.options.keep_composable):
                if holds_unknown(self.folder.at(step), made):
                    logger.warning("%s is kept: it holds files that no save wrote", self.folder.at(step).name)
                else:
                    remove_partial(self.folder.at(step))
                    deleted.append(step)
            self.folder.remove_abandoned(made)
        except OSError as error:
            logger.warning("old partial checkpoints could not be deleted: %s", error)
        return deleted


def _trainer_state(resumed_from: str | Path | Mapping[str, object] | None) -> Mapping[str, Any] | None:
    if resumed_from is None or isinstance(resumed_from, Mapping):
        return resumed_from
    path = Path(resumed_from) / TRAINER_STATE
    return read_json(path, str(path)) if path.is_file() else {}
