"""The parts of a live model: which states they have, their sizes, and how far they have moved."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from llmtailor.errors import UnsupportedCheckpoint
from llmtailor.formats.optimizer_objects import UNSAVED_FIX
from llmtailor.live.model import Drift, Sums, bias_correction, copies_of_weights, find_trained_parts, weigh
from llmtailor.live.tensors import storage_of
from llmtailor.live.training import Training
from llmtailor.model.roles import MASTER
from llmtailor.ranks.team import Ranks

logger = logging.getLogger("llmtailor.saving")
MOST_SKIPPED = 100
"""Steps that an fp16 training may skip at its beginning, until the scale of the loss fits"""


class TrainedParts:
    """What a saver knows of the training. All ranks make the calls but `look_for_state` and `sums`.

    1) `begin`. 2) Before each save, `find_state`; `look_for_state` and `sums` give what a rank votes with. 3) `measure`
    once there are states. 4) `find` again if the model has changed.
    """

    def __init__(self, live: Training, ranks: Ranks, experts: str | None) -> None:
        self.live, self._ranks, self._experts = live, ranks, experts
        self.copies: Sequence[str] | None = None
        """States with the names of moments that are copies of the weights; None until `measure`"""
        self.begun_at: int | None = None
        """The step that training began at, if the saver's ``start`` was called"""
        self._has_state = self._is_weighed = False
        self._masters: frozenset[int] = frozenset()
        self.find()

    def find(self) -> None:
        """Find the parts, of which nothing is recorded as saved."""
        self.model, self.training = find_trained_parts(self.live, self._ranks, self._experts)
        self.drift = Drift(self.model.part_of)

    def begin(self) -> None:
        """Find out whether there are states already, as after a resume."""
        self._is_weighed = self._has_state = all(self._ranks.run_on_all(self.training.has_state))

    def find_state(self, step: int | None, most_skipped: int) -> bool:
        """Return whether the optimizer has states on all ranks; it may have left out ``most_skipped`` of the training's
        steps until ``step``. Raises UnsupportedCheckpoint on every rank if it never makes any."""
        if not self._has_state:
            made = step - self.begun_at if step is not None and self.begun_at is not None else 0
            self._has_state = all(self._ranks.run_on_all(lambda: self.look_for_state(made - most_skipped)))
            if self._has_state and self._ranks.is_first and self._keeps_nothing():
                logger.info("the optimizer keeps no states of the params, so that saves hold the weights alone")
        return self._has_state

    def _keeps_nothing(self) -> bool:
        params = [name for name, fact in self.training.params.items() if fact.role == "trainable"]
        return {fragment.kind for fragment in self.live.fragments(params)} == {MASTER}

    def look_for_state(self, num_missing: int = 0) -> bool:
        """Return whether this rank has moments to save. Raises UnsupportedCheckpoint if it can't save any, or if they
        are ``num_missing`` steps late."""
        has_state, training = self.training.has_state(), self.training
        if has_state:
            return True
        where = "the optimizer" + "".join(f" {type(optimizer).__name__}" for optimizer in training.optimizers())
        if training.has_stepped():
            raise UnsupportedCheckpoint.at(where, "it has made a step but has no moments", UNSAVED_FIX)
        if num_missing > 0:
            what = "training never calls its step(), so its states are unknown"
            raise UnsupportedCheckpoint.at(where, what, UNSAVED_FIX)
        return False

    def sums(self) -> Sums:
        """Return this rank's share of what is measured of the parts since they were last saved."""
        fragments = self.training.fragments(self.drift.part_of.keys())
        return self.drift.sums(fragments, bias_correction(self.training.optimizers()))

    def measure(self) -> bool:
        """Find the sizes of the parts, and which states are copies of the weights; return whether this was new."""
        if not self._is_weighed:
            self.model, self._is_weighed = weigh(self.model, self.training, self._ranks), True
        if self.copies is not None:
            return False
        self.copies = copies_of_weights(self.training, self.model.names_in(self.model.parts), self._ranks)
        if self.copies and self._ranks.is_first:
            what = "%s of the optimizer is a copy of the weights: each save that holds masters holds it, too"
            logger.warning(what, ", ".join(self.copies))
        return True

    def masters(self, written_with: frozenset[int]) -> frozenset[int]:
        """Return the storages of the masters, which are looked up again if ``written_with`` has others."""
        if not written_with <= self._masters:
            self._masters = frozenset(storage_of(fragment.tensor) for fragment in self.live.masters())
        return self._masters
