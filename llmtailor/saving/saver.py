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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from llmtailor.attestation.check import announce
from llmtailor.attestation.compare import OFF
from llmtailor.attestation.hooks import PROCESS_HOOKS, AttestHooks
from llmtailor.background.arena import Arena, allocate_arenas, needed_by
from llmtailor.background.frozen import FrozenParams
from llmtailor.background.options import SAME_FIX, SavingOptions
from llmtailor.background.pending import PartialWork, PendingSave, save_error
from llmtailor.background.process_exit import finish_at_end, release
from llmtailor.background.report import SaveFailed, SaveReport
from llmtailor.background.run_record import RunRecord
from llmtailor.background.snapshot import ANY_STEP, DeltaBases, Snapshot, StepBarrier
from llmtailor.background.writing import carried_files, check_trees, describe_rounding, files_of, lay_out_share, publish
from llmtailor.checkpoint.lineage import Ledger
from llmtailor.codes import Code
from llmtailor.errors import UnsupportedCheckpoint, UsageError
from llmtailor.formats.optimizer_objects import UNSAVED_FIX
from llmtailor.formats.partial.manifest import BundleFact, Manifest
from llmtailor.live.attesting import attest_loop, attest_training
from llmtailor.live.model import (
    Drift,
    PartChanges,
    Samples,
    Sums,
    bias_correction,
    change_of,
    copies_of_weights,
    find_trained_parts,
    weigh,
)
from llmtailor.live.tensors import DTYPES, storage_of
from llmtailor.live.training import Training, TrainingObjects
from llmtailor.model.dtypes import D24
from llmtailor.model.parts import Part
from llmtailor.model.precision import ADAMS, EXACT
from llmtailor.model.roles import MASTER
from llmtailor.policies import (
    DEFAULT_POLICY,
    PartChoice,
    Policy,
    Situation,
    check_policy,
    choose,
    fitted,
    make_policy,
    precision_of,
    restore_state,
    saves_masters,
    setbacks,
    state_of,
)
from llmtailor.ranks.errors import as_error
from llmtailor.ranks.team import Ranks, check_same
from llmtailor.runs.folder import RunFolder
from llmtailor.saving.client_state import ClientState
from llmtailor.saving.restart import resume
from llmtailor.storage import casts
from llmtailor.storage.encoder import packer
from llmtailor.storage.local import as_path

logger = logging.getLogger("llmtailor.saving")


_MOST_SKIPPED = 100
"""Steps that an fp16 training may skip at its beginning, until the scale of the loss fits"""


_STUCK = "is stuck; the disk is not accepting writes"


@dataclass(frozen=True, slots=True)
class _RunningSave:
    """A save in progress, what it leaves if it is published, and what was before it, in case it fails."""

    save: PendingSave
    work: PartialWork
    arena: Arena | None
    ledger: Ledger
    samples: Samples
    linked: Path | None
    """The earlier save that it takes files of"""


@dataclass(frozen=True, slots=True)
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
    previous: str
    """What delays the oldest of the saves in progress; empty if there is room for another one"""
    save_id: str


def _not_everywhere(votes: Sequence[_Vote]) -> set[str]:
    """Return the saves that are in progress for some ranks, and done for others."""
    known = [set(vote.in_flight) for vote in votes]
    return {save_id for one in known for save_id in one if not all(save_id in other for other in known)}


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
        hooks: what ``llmtailor attest`` does in this process.

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
        hooks: AttestHooks = PROCESS_HOOKS,
    ) -> None:
        self._hooks = hooks
        self.options = options or SavingOptions()
        self.folder = RunFolder(Path(output_dir).absolute())
        self.live = training
        """The training itself; `training` cuts experts that are parts of their own"""
        self.policy = fitted(make_policy(policy), weights_are_masters=not training.rounds_masters)
        self.ranks = Ranks.here()
        self.carried = carried_files([*carried])
        self.model, self.training = find_trained_parts(training, self.ranks, self.options.experts)
        self.drift = Drift(self.model.part_of)
        model, given = self.model, self.options.max_staleness
        self.max_staleness = check_policy(
            self.policy, model.structure, model.parts, model.num_bytes, given, is_tested=is_tested
        )
        weights = DTYPES[training.precision] if training.rounds_masters else "F32"
        self.precision = precision_of(self.policy, self.options.precision, weights)
        if self.precision != EXACT:
            casts.loops()  # so that they are not compiled during a save
        if D24 in self.precision.dtypes(with_moments=False).values():
            packer()
        differ = self.precision.has_differences and saves_masters(self.policy)
        self._bases = DeltaBases() if differ else None
        self._based: dict[Part, str] = {}
        """Part -> ``save_id`` of the save that `_bases` has its masters of"""
        self._client = beside
        self.ledger = Ledger(self._new_id())
        self._before: Path | None = None
        self._flights: list[_RunningSave] = []
        """The saves in progress, oldest first"""
        self._reports: list[SaveReport] = []
        self._newest: SaveReport | None = None
        self._frozen = FrozenParams(self.training.frozen())
        self._has_moved = False
        """Whether frozen params have changed, and the cost was logged"""
        self._is_weighed = self._has_state = all(self.ranks.run_on_all(training.has_state))
        self._copies: Sequence[str] | None = None
        """States with the names of moments that are copies of the weights; None until the first save"""
        self._begun_at: int | None = None
        """The step that training began at, if `start` was called"""
        self.ranks.run_on_all(lambda: check_trees(self._trees(None)))
        mine = {"attest": self.options.attest, "on_mismatch": self.options.on_mismatch}  # ranks branch on these
        check_same(self.ranks.all_gather(mine), dict.fromkeys(mine, (SAME_FIX, UsageError)))
        self.ranks.run_on_first(self.folder.lock)
        self.record = RunRecord(self.folder, self.ranks, self.options, self.carried)
        if self._bases is not None and self.options.in_flight > 1:
            what = "masters that are differences need the save before to be complete"
            raise UsageError.at("in_flight", what, 'omit it, or use masters="24bit"')
        self._arenas = allocate_arenas(
            self.options,
            self.ranks,
            training.writes_unseen,
            lambda: needed_by(training, self.precision),
            self.options.in_flight,
        )
        """None if a save stops training until it is complete"""
        self.record.linked = lambda: {one.linked for one in [*self._flights] if one.linked is not None}
        self._masters: frozenset[int] = frozenset()
        """Storages of the masters, as of a save that had others than known before"""
        self._barrier = StepBarrier(waits=bool(self._arenas))
        if self._arenas:
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
            UsageError: the staging folder or the mirror holds saves of another run.
        """
        named = f"{resumed_from}" if isinstance(resumed_from, (str, Path)) else None
        if self.options.attest != OFF and (checkpoint := self.ranks.broadcast(named)) is not None:
            self._attest(step, as_path(checkpoint))
        if self._hooks.before_saving is not None:
            self._hooks.before_saving()
        lineage, self._begun_at = self._new_id(), step
        copier = self.record.copier
        if copier is not None and copier.is_staging:  # what it brings may be the save to continue
            copier.catch_up(self.folder)
        self.ledger, self._before = self.ranks.run_on_first(
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
        if not self.ledger.held_by:
            return False
        restore_state(self.policy, self.ledger.policy_state)
        # each part now has the state of its newest save
        self.drift.remember(self.drift.samples(self.training.masters(), self.ledger.held_by))
        return True

    def _attest(self, step: int, checkpoint: Path) -> None:
        """Compare the training with the checkpoint that its loop names, before the first step."""
        held = TrainingObjects(scheduler=self._client.scheduler)
        attest = partial(attest_training, self.live, checkpoint, self.options.attest, held)
        say = self._hooks.take or announce
        attest_loop(attest, checkpoint, self.options.on_mismatch, step, self.record.append, say)

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

        Returns None, with a warning, if the optimizer has not made a step yet, or if ``in_flight`` saves are still
        being written and ``when_busy`` is ``skip``, or their disk is stuck.

        Args:
            step: the number of optimizer steps made so far.
            write_state: called on rank 0 with a folder, to write ``trainer_state.json`` into it.
            rng: random number states to save; None takes the current ones of this process.
            is_last: whether to wait for the oldest of them regardless of ``when_busy``.

        Raises:
            SaveFailed: on every rank, for any failure. Nothing of the save remains, and training can continue.
            UnsupportedCheckpoint: before the first save, for an optimizer that can't be saved; see `has_state`.
        """
        began, policy_state = time.monotonic(), state_of(self.policy)
        self._find_state(step, _MOST_SKIPPED)  # the loop may have a scaler that the saver does not know
        try:
            agreed = self._agree(step, is_last)
            if agreed is None:
                return None
            policy_state = state_of(self.policy)
            work = self._lay_out(step, *agreed, write_state, rng, began)
            used = [one.arena for one in self._flights]
            arena = next((one for one in self._arenas if not any(one is other for other in used)), None)
            snapshot, stops_training = self._snapshot(work, arena), not self._arenas
            after = self._flights[-1].save if self._flights else None
            save = PendingSave(self.record, work, snapshot, stops_training=stops_training, after=after)
            self._flights.append(_RunningSave(save, work, arena, self.ledger, self.drift.kept(), self._before))
            self.ledger = work.ledger
            self.drift.remember(work.samples)
            if stops_training:
                self._settle()
                if save.failure is not None:
                    raise save.failure
            elif work.share is not None and work.share.moving:
                if not self._has_moved:
                    what = "each save stops training to copy the frozen params that change: %s, %d in total"
                    logger.warning(what, work.share.moving[0], len(work.share.moving))
                self._has_moved = True
                self._barrier.settle_frozen()
            return save
        except Exception as error:
            restore_state(self.policy, policy_state)
            failed = SaveFailed(as_error(error, "saving").problems)
            self.record.log({"step": step, "failed": str(failed)})
            raise failed from error

    def reports(self) -> list[SaveReport]:
        """Return the saves that this rank knows to have finished since the last call."""
        self._settle()
        reports, self._reports = self._reports, []
        return reports

    @property
    def is_busy(self) -> bool:
        """Whether this rank knows of a save in progress."""
        return any(not one.save.is_done for one in self._flights)

    @property
    def newest(self) -> SaveReport | None:
        """The newest save of this process that this rank knows to be published"""
        return next((one.save.report for one in reversed(self._flights) if one.save.report), self._newest)

    def finish(self) -> None:
        """Wait until no save is in progress. One whose disk is stuck is given up."""
        if self._flights:
            self._barrier.settle()
        for save in [one.save for one in self._flights]:
            if not save.wait_unless_stuck():
                logger.warning("the save at step %d was aborted: its disk is stuck", save.step)
                save.give_up()

    def close(self) -> None:
        """Finish the save in progress, and release the lock on the folder, so that another run can save there."""
        self.finish()
        self._settle()  # a save that is done holds the host buffer
        self._arenas = []
        release(self)
        self.record.close()
        self._barrier.remove()

    def _finish_until(self, until: float) -> None:
        for one in [*self._flights]:
            one.save.finish_until(until)

    def _agree(self, step: int, is_last: bool) -> tuple[str, PartChanges] | None:
        """Exchange what the ranks know. Return the id of the save to make, and how parts have changed; None if there is
        none."""
        if self._flights:
            self._barrier.settle()  # only a save without a step in between is still copied
            is_full = len(self._flights) >= self.options.in_flight
            if is_full and (is_last or self.options.when_busy == "wait"):
                self._flights[0].save.wait_unless_stuck()
            if any(one.save.failure is not None for one in self._flights):  # what follows would fail, too
                self._wait_for([one.work.save_id for one in self._flights])
        votes = self.ranks.run_on_all(self._vote)
        first = votes[0]
        if first.previous:
            logger.warning("step %d: save skipped: the previous save %s", step, first.previous)
            return None
        while unlike := _not_everywhere(votes):  # not everybody has heard yet that they are published, or have failed
            self._wait_for(unlike)
            votes = self.ranks.run_on_all(self._vote)
            first = votes[0]
            if any(vote.previous == _STUCK for vote in votes):
                logger.warning("step %d: save skipped: the previous save %s", step, _STUCK)
                return None
        if changes := [vote.has_changed for vote in votes if vote.has_changed]:
            logger.warning("the model has changed: %s; this save holds every part", changes[0])
            self._forget()
        if not first.is_composable and self.ledger.held_by and set(self.ledger.steps.values()) != {self.ledger.step}:
            logger.warning("the run can't be composed with the last save; this one holds every part")
            self._forget()
        if not all(vote.has_state for vote in votes):
            logger.warning("step %d: save skipped: the optimizer has not made a step yet", step)
            return None
        if not self._is_weighed:
            self.model, self._is_weighed = weigh(self.model, self.training, self.ranks), True
        if self._copies is None:
            self._copies = copies_of_weights(self.training, self.model.names_in(self.model.parts), self.ranks)
            if self._copies and self.ranks.is_first:
                what = "%s of the optimizer is a copy of the weights: each save that holds masters holds it, too"
                logger.warning(what, ", ".join(self._copies))
            if not {*ADAMS}.isdisjoint(self._copies):
                self.precision = replace(self.precision, moments=EXACT.moments)
            if self.ranks.is_first:
                fragments = self.training.fragments(self.model.names_in(self.model.parts))
                if told := describe_rounding(self.precision, fragments):
                    level = logging.WARNING if self.policy.name == DEFAULT_POLICY else logging.INFO
                    logger.log(level, "saves hold %s (policy %s)", told, self.policy)
        return first.save_id, change_of([vote.sums for vote in votes])

    def _wait_for(self, save_ids: Collection[str]) -> None:
        for save in [one.save for one in self._flights if one.work.save_id in save_ids]:
            save.wait_unless_stuck()

    def _vote(self) -> _Vote:
        self._settle()
        previous = ""
        if self._flights and self._flights[0].save.is_stuck:
            previous = _STUCK
        elif len(self._flights) >= self.options.in_flight:
            previous = "is still being written"
        has_changed, has_state = self.training.refresh(), self._look_for_state()
        sums: Sums = {}
        if has_state and not has_changed:
            fragments = self.training.fragments(self.drift.part_of.keys())
            sums = self.drift.sums(fragments, bias_correction(self.training.optimizers()))
        in_flight = tuple(one.work.save_id for one in self._flights if not one.save.is_done)
        is_composable = self.record.is_composable
        return _Vote(in_flight, has_changed, has_state, sums, is_composable, previous, uuid.uuid4().hex)

    def _settle(self) -> None:
        """Take the outcomes of earlier saves into account, oldest first."""
        while self._flights and self._flights[0].save.is_done:
            self._land(self._flights.pop(0))

    def _land(self, flight: _RunningSave) -> None:
        save, work = flight.save, flight.work
        if save.failure is None:
            self._before = save.path
        else:
            while self._flights:  # they build on it, and fail with it
                later = self._flights.pop(0).save
                if not later.wait_unless_stuck():
                    later.give_up()
            if any(problem.code is Code.NOT_ROUNDABLE for problem in save.failure.problems):
                self.precision = replace(self.precision, moments=EXACT.moments)
            self.ledger = flight.ledger
            self.drift.restore(flight.samples)
            restore_state(self.policy, work.policy_state)
        if self._bases is not None:
            self._bases.settle(save.failure is None)
            held = (part for part, step in work.ledger.steps.items() if step == save.step)
            self._based |= dict.fromkeys(held, work.save_id) if save.failure is None else {}
        if save.report is not None:
            self._reports.append(save.report)
            self._newest = save.report

    def _lay_out(
        self,
        step: int,
        save_id: str,
        changes: PartChanges,
        write_state: Callable[[Path], None] | None,
        rng: Mapping[str, object] | None,
        began: float,
    ) -> PartialWork:
        """Choose parts, and lay out what this rank writes of them, without exchanging anything.

        The other ranks learn of an error when all have written.
        """
        path = self.record.first.at(step)
        work = PartialWork(
            save_id=save_id,
            began=began,
            report=SaveReport(step=step, path=path),
            folder=path,
            ledger=self.ledger,
            policy_state=state_of(self.policy),
        )
        try:
            choice = self._choose(step, changes)
            ledger = self.ledger.after(step, choice.parts, self.model.parts, state_of(self.policy))
            share = lay_out_share(
                save_id,
                step,
                self.training,
                params=self.model.names_in(choice.parts),
                masters=self.model.names_in(choice.masters),
                trees=self._trees(rng),
                ranks=self.ranks,
                before=self._before,
                frozen_params=self._frozen,
                precision=self.precision,
                bases=self._bases,
                based=self.model.names_in([part for part in choice.masters if part in self._based]),
                pieces=self.model.structure.pieces,
            )
            report = replace(
                work.report,
                parts={str(part): why for part, why in choice.parts.items()},
                drift=changes.drift,
                expected_loss=changes.expected_loss,
                steps_behind=ledger.steps_behind(),
                masters=choice.masters,
                updates_missed=max(ledger.missed.values(), default=0),
            )
            samples = self.drift.samples(self.training.masters(), choice.parts)
            complete = None
            if self.ranks.is_first:
                complete = self._publication(save_id, step, choice, ledger, changes, write_state)
            return replace(work, report=report, ledger=ledger, samples=samples, share=share, publish=complete)
        except Exception as error:
            return replace(work, refusal=save_error(error, self.ranks))

    def _snapshot(self, work: PartialWork, arena: Arena | None) -> Snapshot | None:
        """Return what copies the tensors of a save in the background; the next step of the optimizer waits for it."""
        share = work.share
        if share is None or arena is None:
            return None
        snapshot = Snapshot(share.live, share.copied, arena, self.options.write_timeout, work.began, share.check)
        if not {one.written_with for one in share.live.tensors} - {0, ANY_STEP} <= self._masters:
            self._masters = frozenset(storage_of(one.tensor) for one in self.live.masters())
        self._barrier.arm(snapshot, self.live.optimizers(), self._masters)
        return snapshot

    def _choose(self, step: int, changes: PartChanges) -> PartChoice:
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
            drift=changes.drift if self.policy.needs_drift else None,
            expected_loss=changes.expected_loss if self.policy.needs_drift else None,
        )
        choice = choose(self.policy, situation, self.max_staleness)
        always = dict(model.always)
        if self._copies:
            always |= dict.fromkeys(choice.masters, "the optimizer keeps a copy of the weights")
        if always.keys() - choice.parts.keys():
            reasons = {**always, **choice.parts}
            parts = {part: reasons[part] for part in model.parts if part in reasons}
            choice = replace(choice, parts=parts, masters=tuple(part for part in choice.masters if part not in parts))
        for problem in choice.problems if self.ranks.is_first else ():
            logger.warning("%s", problem)
        return choice

    def _trees(self, rng: Mapping[str, object] | None) -> dict[str, Any]:
        """Return the object trees of all stock files that this rank would write."""
        return self._client.trees(self.training.trees(), self.ranks, rng)

    def _publication(
        self,
        save_id: str,
        step: int,
        choice: PartChoice,
        ledger: Ledger,
        changes: PartChanges,
        write_state: Callable[[Path], None] | None,
    ) -> Callable[[Sequence[BundleFact]], None]:
        """Return what completes the save on rank 0; ``write_state`` writes ``trainer_state.json`` into a folder."""
        resumed = max(self.ledger.history.values(), default=0)  # what a resumed training has changed is newer
        changed_in = {str(part): step - max(held, resumed) for part, held in self.ledger.steps.items()}
        # of stale moments alone there is no estimate
        setback = setbacks(changes.expected_loss, changed_in) if not choice.masters else {}
        model, training, pieces = self.model, self.training, self.model.structure.pieces
        names_of = {part: model.params_of[part] for part in (*choice.parts, *choice.masters)}
        manifest = Manifest(
            step=step,
            save_id=save_id,
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
            setback={Part(part): steps for part, steps in setback.items() if part not in choice.parts},
            pieces_of={
                part: {one.param: (one.begin, one.end) for name in names if (one := pieces.get(name))}
                for part, names in names_of.items()
            },
            masters=choice.masters,
            bases={
                part: self._based[part]
                for part in choice.masters
                if part in self._based and any(name not in pieces for name in model.params_of[part])
            },
        )
        return partial(
            publish,
            self.record.first.at(step),
            manifest,
            policy={"name": self.policy.name, **self.policy.settings(), "max_staleness": self.max_staleness},
            num_bytes=dict(model.num_bytes),
            attempt=ledger.past(step),
            files={**self._client.files(), **(files_of(write_state) if write_state is not None else {})},
            carried=self.carried(),
            before=self._before,
            elsewhere=copier.elsewhere if (copier := self.record.copier) is not None else (),
        )

    def _new_id(self) -> str:
        return self.ranks.broadcast(uuid.uuid4().hex[:12])

    def _forget(self) -> None:
        """Let the next save hold every part, as the first one."""
        self.model, self.training = find_trained_parts(self.live, self.ranks, self.options.experts)
        self.drift = Drift(self.model.part_of)
        self._based = {}
        self.record.planned.clear()
        self.ledger = self.ledger.without(self.ledger.held_by.keys())

    def _find_state(self, step: int | None, most_skipped: int) -> bool:
        """Return what `has_state` does; the optimizer may have left out ``most_skipped`` steps of the training."""
        made = step - self._begun_at if step is not None and self._begun_at is not None else 0
        if not self._has_state:
            self._has_state = all(self.ranks.run_on_all(lambda: self._look_for_state(made - most_skipped)))
            if self._has_state and self.ranks.is_first and self._keeps_nothing():
                logger.info("the optimizer keeps no states of the params, so that saves hold the weights alone")
        return self._has_state

    def _keeps_nothing(self) -> bool:
        params = [name for name, fact in self.training.params.items() if fact.role == "trainable"]
        return {one.kind for one in self.live.fragments(params)} == {MASTER}

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
