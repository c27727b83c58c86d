"""What a save holds: the parts that the policy chooses, and everything else that a resume needs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.lineage import Ledger, Past
from llmtailor.formats.partial.manifest import Manifest
from llmtailor.policies import Choice, Policy, Situation, choose, setbacks
from llmtailor.saving.beside import Beside
from llmtailor.saving.drift import Change
from llmtailor.saving.live import DTYPES
from llmtailor.saving.model import TrainedModel
from llmtailor.saving.ranks import Ranks
from llmtailor.saving.training import Training
from llmtailor.saving.writing import CarriedFiles, Publication, SaveId, files_of

logger = logging.getLogger("llmtailor.saving")


@dataclass(frozen=True, slots=True)
class Contents:
    """Chooses and collects on each rank, without exchanging anything."""

    training: Training
    policy: Policy
    max_staleness: int
    beside: Beside
    carried: CarriedFiles
    ranks: Ranks

    def choose(self, model: TrainedModel, ledger: Ledger, step: int, change: Change) -> Choice:
        """Return the parts that the save at a step holds, with the reasons."""
        if not ledger.held_by:
            return Choice(dict.fromkeys(model.parts, "complete base"), frozenset())
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

    def trees(self, rng: Mapping[str, object] | None) -> dict[str, Any]:
        """Return the object trees of all stock files that this rank would write."""
        return self.beside.trees(self.training.trees(), self.ranks, rng)

    def publication(
        self,
        model: TrainedModel,
        save: SaveId,
        choice: Choice,
        before: Ledger,
        ledger: Ledger,
        change: Change,
        write_state: Callable[[Path], None] | None,
    ) -> Publication | None:
        """Return what rank 0 adds, None on the others; ``write_state`` writes ``trainer_state.json`` into a folder.

        ``before`` and ``ledger`` are the ledgers before and after this save.
        """
        if not self.ranks.is_first:
            return None
        # of stale moments alone there is no estimate
        setback = {} if choice.masters else _setback(before, save.step, change.expected_loss)
        training, pieces = self.training, model.structure.pieces
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
        files = {**self.beside.files(), **(files_of(write_state) if write_state is not None else {})}
        attempt = Past(save.step, ledger.lineage, ledger.history)
        policy = {"name": self.policy.name, **self.policy.settings(), "max_staleness": self.max_staleness}
        return Publication(manifest, attempt, policy, dict(model.num_bytes), files, self.carried.contents())


def _setback(ledger: Ledger, step: int, expected_loss: Mapping[str, float]) -> dict[str, float]:
    """Return by how many steps training falls back with the last save of each part; ``ledger`` is that before the save.

    A resumed training has changed only since it was resumed.
    """
    resumed = max(ledger.history.values(), default=0)
    return setbacks(expected_loss, {part: step - max(held, resumed) for part, held in ledger.steps.items()})
