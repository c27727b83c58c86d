"""What a save holds besides model and optimizer, in the files of the framework that will resume."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from llmtailor.background.writing import files_of
from llmtailor.checkpoint.index import ACCELERATE, LIGHTNING, TRAINER
from llmtailor.formats.lightning_tree import OPTIMIZERS, STATE_DICT
from llmtailor.frameworks.files import OPTIMIZER, is_rng_file, rng_file
from llmtailor.frameworks.framework import FRAMEWORKS, Framework
from llmtailor.frameworks.rng import ACCELERATE_KEYS
from llmtailor.live.training import HasState, rng_tree
from llmtailor.ranks.team import Ranks

if TYPE_CHECKING:
    from accelerate import Accelerator

_MODEL_STATES = "model_states.pt"
_GPU_STATES = "torch_cuda_manual_seed"


class FrameworkState:
    """What a framework saves of a training besides model and optimizer, in its own files."""

    framework: ClassVar[Framework]
    scheduler: HasState | None = None
    """Unless the engine saves it"""

    def trees(self, trees: Mapping[str, Any], ranks: Ranks, rng: Mapping[str, object] | None) -> dict[str, Any]:
        """Return the object trees of all stock files that this rank would write; ``trees`` are the training's.

        ``rng`` are the random number states to save; None for the current ones.
        """
        if self.scheduler is None or not ranks.is_first:
            return dict(trees)
        return {**trees, self.framework.scheduler: self.scheduler.state_dict()}

    def files(self) -> Mapping[str, bytes]:
        """Return the other files of this step that rank 0 would write."""
        return {}


@dataclass(frozen=True)
class StateOfTrainer(FrameworkState):
    """For the Trainer, and for loops that load the files themselves."""

    framework = FRAMEWORKS[TRAINER]
    scheduler: HasState | None = None

    def trees(self, trees: Mapping[str, Any], ranks: Ranks, rng: Mapping[str, object] | None) -> dict[str, Any]:
        own = {rng_file(ranks.rank, ranks.world_size): rng_tree() if rng is None else rng}
        return super().trees({**trees, **own}, ranks, rng)


@dataclass(frozen=True)
class StateOfAccelerate(FrameworkState):
    """For ``Accelerator.load_state`` of accelerate 1.15."""

    framework = FRAMEWORKS[ACCELERATE]
    accelerator: Accelerator
    scheduler: HasState | None = None

    def trees(self, trees: Mapping[str, Any], ranks: Ranks, rng: Mapping[str, object] | None) -> dict[str, Any]:
        found = {(self.framework.optimizer if path == OPTIMIZER else path): tree for path, tree in trees.items()}
        states = {ACCELERATE_KEYS[key]: value for key, value in (rng or rng_tree()).items() if key in ACCELERATE_KEYS}
        if _GPU_STATES in states and not isinstance(states[_GPU_STATES], list):
            states[_GPU_STATES] = [states[_GPU_STATES]]
        path = rng_file(ranks.rank, ranks.world_size, self.framework.name)
        return super().trees({**found, path: {"step": self.accelerator.step, **states}}, ranks, rng)

    def files(self) -> Mapping[str, bytes]:
        """Return the states of data loaders, and of what was given to ``register_for_checkpointing``."""
        return {path: data for path, data in files_of(self._write).items() if not is_rng_file(path)}

    def _write(self, folder: Path) -> None:
        from accelerate.checkpointing import save_accelerator_state, save_custom_state

        one = self.accelerator
        save_accelerator_state(str(folder), [], [], [], one._dataloaders, 0, one.step)
        for number, custom in enumerate(one._custom_objects):
            save_custom_state(custom, str(folder), number)


@dataclass(frozen=True)
class StateOfLightning(FrameworkState):
    """For Lightning: ``dump`` returns what its Trainer saves, with or without model and optimizer."""

    framework = FRAMEWORKS[LIGHTNING]
    dump: Callable[[], Mapping[str, Any]]

    def trees(self, trees: Mapping[str, Any], ranks: Ranks, rng: Mapping[str, object] | None) -> dict[str, Any]:
        dumped = dict(self.dump())  # on every rank, as Lightning does
        names, found = dumped.pop(STATE_DICT, {}), dict(trees)
        dumped.pop(OPTIMIZERS, None)
        if (optimizer := found.pop(OPTIMIZER, None)) is not None:
            found[self.framework.optimizer] = {**dumped, STATE_DICT: dict.fromkeys(names), OPTIMIZERS: [optimizer]}
        return {path: {**tree, **dumped} if path.endswith(_MODEL_STATES) else tree for path, tree in found.items()}
