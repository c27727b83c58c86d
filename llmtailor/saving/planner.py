"""Chooses the parts of a save, and lays out what this rank writes of them, without exchanging anything."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from llmtailor.background.bases import DeltaBases
from llmtailor.background.frozen import FrozenParams
from llmtailor.background.pending import PartialWork, SaverState, save_error
from llmtailor.background.report import SaveReport
from llmtailor.background.run_record import RunRecord
from llmtailor.background.writing import Share, ShareRequest, describe_rounding, files_of, lay_out_share, publish
from llmtailor.checkpoint.lineage import Ledger
from llmtailor.formats.partial.manifest import BundleFact, Manifest
from llmtailor.live.model import PartChanges
from llmtailor.live.tensors import DTYPES
from llmtailor.model.parts import Part
from llmtailor.model.precision import ADAMS, EXACT, Precision
from llmtailor.policies import DEFAULT_POLICY, PartChoice, Policy, Situation, choose, restore_state, setbacks, state_of
from llmtailor.ranks.team import Ranks
from llmtailor.saving.framework_state import FrameworkState
from llmtailor.saving.trained_parts import TrainedParts

logger = logging.getLogger("llmtailor.saving")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """What a save is to hold, and when it began, in seconds of the monotonic clock."""

    step: int
    save_id: str
    began: float
    changes: PartChanges
    write_state: Callable[[Path], None] | None
    """Writes ``trainer_state.json`` into a folder, on rank 0"""
    rng: Mapping[str, object] | None


class SavePlanner:
    """Plans one save after the other, each on what the saves before it hold.

    1) `resume` with the record to continue, if any. 2) `plan` a save, after `measure`; 3) `begun` when it is in
    progress; 4) `published` or `failed` with its outcome, oldest first. 5) `forget` if the next save must hold every
    part.
    """

    def __init__(
        self,
        trained: TrainedParts,
        policy: Policy,
        precision: Precision,
        beside: FrameworkState,
        ledger: Ledger,
        *,
        max_staleness: int,
        ranks: Ranks,
        keeps_bases: bool,
    ) -> None:
        self.trained, self.policy, self.precision = trained, policy, precision
        self._beside, self.ledger = beside, ledger
        self._max_staleness, self._ranks = max_staleness, ranks
        self._bases = DeltaBases() if keeps_bases else None
        self._base_of: dict[Part, str] = {}
        """Part -> ``save_id`` of the save that `_bases` has its masters of"""
        self._before: Path | None = None
        """The newest save that is known to be published"""
        self._frozen = FrozenParams(trained.training.frozen())

    def resume(self, ledger: Ledger, before: Path | None) -> None:
        """Continue a record of saves: each part has the state of its newest save, and the policy its own."""
        self.ledger, self._before = ledger, before
        if ledger.held_by:
            restore_state(self.policy, ledger.policy_state)
            drift = self.trained.drift
            drift.remember(drift.samples(self.trained.training.masters(), ledger.held_by))

    def forget(self) -> None:
        """Let the next save hold every part, as the first one."""
        self.trained.find()
        self._base_of = {}
        self.ledger = self.ledger.without(self.ledger.held_by.keys())

    def measure(self) -> None:
        """Find the sizes of the parts, once there are states, and say what is rounded. All ranks call it."""
        if not self.trained.measure():
            return
        if not {*ADAMS}.isdisjoint(self.trained.copies or ()):
            self.keep_moments_exact()
        if self._ranks.is_first:
            model, training = self.trained.model, self.trained.training
            if told := describe_rounding(self.precision, training.fragments(model.names_in(model.parts))):
                level = logging.WARNING if self.policy.name == DEFAULT_POLICY else logging.INFO
                logger.log(level, "saves hold %s (policy %s)", told, self.policy)

    def keep_moments_exact(self) -> None:
        self.precision = replace(self.precision, moments=EXACT.moments)

    def trees(self, rng: Mapping[str, object] | None) -> dict[str, Any]:
        """Return the object trees of all stock files that this rank would write."""
        return self._beside.trees(self.trained.training.trees(), self._ranks, rng)

    def begun(self, work: PartialWork) -> None:
        self.ledger = work.ledger
        self.trained.drift.remember(work.samples)

    def published(self, work: PartialWork) -> None:
        self._before = work.folder
        if self._bases is not None:
            self._bases.record_outcome(True)
            held = (part for part, step in work.ledger.steps.items() if step == work.report.step)
            self._base_of |= dict.fromkeys(held, work.save_id)

    def failed(self, work: PartialWork) -> None:
        """Return to what was before a save, and before those that build on it."""
        self.ledger = work.previous.ledger
        self.trained.drift.restore(work.previous.samples)
        restore_state(self.policy, work.previous.policy)
        if self._bases is not None:
            self._bases.record_outcome(False)

    def plan(self, request: SaveRequest, record: RunRecord) -> PartialWork:
        """Choose parts, and lay out what this rank writes of them.

        The other ranks learn of an error when all have written.
        """
        step, path, state = request.step, record.first.at(request.step), state_of(self.policy)
        work = PartialWork(
            save_id=request.save_id,
            began=request.began,
            report=SaveReport(step=step, path=path),
            folder=path,
            ledger=self.ledger,
            previous=SaverState(ledger=self.ledger, samples=self.trained.drift.kept(), policy=state),
            linked=self._before,
        )
        try:
            model, changes = self.trained.model, request.changes
            choice = self._choose(step, changes)
            ledger = self.ledger.after(step, choice.parts, model.parts, state_of(self.policy))
            share = self._lay_out(request, choice)
            report = replace(
                work.report,
                parts={str(part): why for part, why in choice.parts.items()},
                drift=changes.drift,
                expected_loss=changes.expected_loss,
                steps_behind=ledger.steps_behind(),
                masters=choice.masters,
                updates_missed=max(ledger.missed.values(), default=0),
            )
            samples = self.trained.drift.samples(self.trained.training.masters(), choice.parts)
            complete = self._publication(request, record, choice, ledger) if self._ranks.is_first else None
            return replace(work, report=report, ledger=ledger, samples=samples, share=share, publish=complete)
        except Exception as error:
            return replace(work, refusal=save_error(error, self._ranks))

    def _choose(self, step: int, changes: PartChanges) -> PartChoice:
        """Return the parts that the save at a step holds, with the reasons."""
        ledger, model = self.ledger, self.trained.model
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
        choice = choose(self.policy, situation, self._max_staleness)
        always = dict(model.always)
        if self.trained.copies:
            always |= dict.fromkeys(choice.masters, "the optimizer keeps a copy of the weights")
        if always.keys() - choice.parts.keys():
            reasons = {**always, **choice.parts}
            parts = {part: reasons[part] for part in model.parts if part in reasons}
            choice = replace(choice, parts=parts, masters=tuple(part for part in choice.masters if part not in parts))
        for problem in choice.problems if self._ranks.is_first else ():
            logger.warning("%s", problem)
        return choice

    def _lay_out(self, request: SaveRequest, choice: PartChoice) -> Share:
        model = self.trained.model
        based = [part for part in choice.masters if part in self._base_of]
        return lay_out_share(
            ShareRequest(
                save_id=request.save_id,
                step=request.step,
                training=self.trained.training,
                params=model.names_in(choice.parts),
                masters=model.names_in(choice.masters),
                trees=self.trees(request.rng),
                ranks=self._ranks,
                before=self._before,
                frozen_params=self._frozen,
                precision=self.precision,
                bases=self._bases,
                based=model.names_in(based),
                pieces=model.structure.pieces,
            )
        )

    def _publication(
        self, request: SaveRequest, record: RunRecord, choice: PartChoice, ledger: Ledger
    ) -> Callable[[Sequence[BundleFact]], None]:
        """Return what completes the save on rank 0."""
        step, changes, write_state = request.step, request.changes, request.write_state
        resumed = max(self.ledger.history.values(), default=0)  # what a resumed training has changed is newer
        changed_in = {str(part): step - max(saved, resumed) for part, saved in self.ledger.steps.items()}
        # of stale moments alone there is no estimate
        setback = setbacks(changes.expected_loss, changed_in) if not choice.masters else {}
        model, training = self.trained.model, self.trained.training
        pieces = model.structure.pieces
        names_of = {part: model.params_of[part] for part in (*choice.parts, *choice.masters)}
        manifest = Manifest(
            step=step,
            save_id=request.save_id,
            stage=training.stage,
            world_size=self._ranks.world_size,
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
                part: {piece.param: (piece.begin, piece.end) for name in names if (piece := pieces.get(name))}
                for part, names in names_of.items()
            },
            masters=choice.masters,
            bases={
                part: self._base_of[part]
                for part in choice.masters
                if part in self._base_of and any(name not in pieces for name in model.params_of[part])
            },
        )
        return partial(
            publish,
            record.first.at(step),
            manifest,
            policy={"name": self.policy.name, **self.policy.settings(), "max_staleness": self._max_staleness},
            num_bytes=dict(model.num_bytes),
            attempt=ledger.past(step),
            files={**self._beside.files(), **(files_of(write_state) if write_state is not None else {})},
            carried=record.carried(),
            before=self._before,
            elsewhere=copier.elsewhere if (copier := record.copier) is not None else (),
        )
