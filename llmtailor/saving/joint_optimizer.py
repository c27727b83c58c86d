"""Several optimizers as one, so that their states are in one checkpoint: Muon for matrices and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from llmtailor.checkpoint.optimizer import NAMES_KEY
from llmtailor.errors import UsageError


class JointOptimizer(torch.optim.Optimizer):
    """Implements `llmtailor.training.join_optimizers`. Its param groups are those of the optimizers, in their order."""

    def __init__(self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        names = {param: name for name, param in model.named_parameters()}
        groups = [group for one in optimizers for group in one.param_groups]
        if lost := [number for number, group in enumerate(groups) if not names.keys() >= {*group["params"]}]:
            what = f"param group {lost[0]} has params that are not the model's"
            raise UsageError.at("join_optimizers", what, "give the model that the optimizers were made for")
        for group in groups:
            group[NAMES_KEY] = [names[param] for param in group["params"]]
        self.optimizers = [*optimizers]
        super().__init__(groups, {})  # raises ValueError for a param in two groups; keeps the dicts, which are shared
        self._share()

    def _share(self) -> None:
        """Make groups and states the same objects here and in the optimizers."""
        self.param_groups = [group for one in self.optimizers for group in one.param_groups]
        for one in self.optimizers:
            self.state.update(one.state)
        for one in self.optimizers:
            one.state = self.state

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else closure()
        for one in self.optimizers:
            one.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned: each optimizer its own part, with what it does to states."""
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise ValueError(f"loaded state dict has {len(groups)} param groups instead of {len(self.param_groups)}")
        first = 0
        self.state.clear()
        for one in self.optimizers:
            own = groups[first : first + len(one.param_groups)]
            numbers = {number for group in own for number in group["params"]}
            state = {number: kept for number, kept in state_dict["state"].items() if number in numbers}
            one.load_state_dict({"state": state, "param_groups": own})
            first += len(own)
        self._share()
