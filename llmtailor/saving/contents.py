"""What a save holds: the parts that the policy chooses, and everything else that a resume needs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.lineage import Ledger, Past
from llmtailor.formats.partial.manifest import Manifest
from llmtailor.formats.rng import rng_file
from llmtailor.formats.trainer import SCHEDULER
from llmtailor.policies import Policy, Situation, choose
from llmtailor.saving.live import DTYPES
from llmtailor.saving.model import TrainedModel
from llmtailor.saving.ranks import Ranks
from llmtailor.saving.training import HasState, Training, rng_tree
from llmtailor.saving.writing import CarriedFiles, Publication, SaveId, files_of

logger = logging.getLogger("llmtailor.saving")


@dataclass(frozen=True, slots=True)
class Contents:
    """Chooses and collects on each rank, without exchanging anything."""

    training: Training
    policy: Policy
    max_staleness: int
    scheduler: HasState | None
    """Unless the engine saves it"""
    carried: CarriedFiles
    ranks: Ranks

    def choose(self, model: TrainedModel, ledger: Ledger, step: int, drift: Mapping[str, float]) -> dict[str, str]:
        """Return the parts that the save at a step holds, with the reasons."""
        if not ledger.held_by:
            return dict.fromkeys(model.parts, "complete base")
        situation = Situation(
            step=step,
            save=ledger.saves,
            structure=model.structure,
            parts=model.parts,
            num_bytes=model.num_bytes,
            last=ledger.last,
            drift=drift if self.policy.needs_drift else None,
        )
        choice = choose(self.policy, situation, self.max_staleness)
        for problem in choice.problems if self.ranks.is_first else ():
            logger.warning("%s", problem)
        return dict(choice.parts)

    def trees(self, rng: Mapping[str, object] | None) -> dict[str, Any]:
        """Return the object trees of all stock files that this rank would write."""
        path = rng_file(self.ranks.rank, self.ranks.world_size)
        trees = {**self.training.trees(), path: rng_tree() if rng is None else rng}
        if self.ranks.is_first and self.scheduler is not None:
            trees[SCHEDULER] = self.scheduler.state_dict()
        return trees

    def publication(
        self,
        model: TrainedModel,
        save: SaveId,
        chosen: Mapping[str, str],
        ledger: Ledger,
        write_state: Callable[[Path], None] | None,
    ) -> Publication:
        """Return what rank 0 adds; ``write_state`` writes ``trainer_state.json`` into a folder."""
        training = self.training
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
        policy = {"name": self.policy.name, **self.policy.settings(), "max_staleness": self.max_staleness}
        return Publication(manifest, attempt, policy, dict(model.num_bytes), files, self.carried.contents())
