"""For training scripts: layer-aligned param groups, a Trainer mixin that keeps them under DeepSpeed, and several
optimizers as one.

>>> class LayerTrainer(LayerGroupsMixin, Trainer): ...

They are the groups that ``--groups layer`` creates from a checkpoint: both call `arrange`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from llmtailor.checkpoint.layout import LAYER, NO_DECAY, arrange
from llmtailor.checkpoint.optimizer import NAMES_KEY
from llmtailor.errors import UsageError
from llmtailor.model.find_parts import find_parts
from llmtailor.model.parts import ModelStructure

__all__ = ["LayerGroupsMixin", "join_optimizers", "layer_param_groups"]
_GROUPING = {"params", "model", "optimizer_dict"}
"""Arguments of optimizers with param groups of their own (GaLore, LOMO)"""


def layer_param_groups(
    model: nn.Module, weight_decay: float, decays: Collection[str] | None = None
) -> list[dict[str, list[nn.Parameter] | list[str] | float]]:
    """Return the param groups of a model for any torch optimizer: two for each layer and each part outside the layers.

    Each group has ``params``, ``weight_decay`` and ``lt_params``, the names of its params, which a torch optimizer
    saves and restores unchanged. Frozen params are left out.

    Args:
        model: the model, whole or partitioned by ZeRO-3.
        weight_decay: weight decay of the params in ``decays``; all others get 0.
        decays: names of params. None means all but norms and biases, as in the Trainer of transformers 5.23.
    """
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    decays = decaying_names(model) if decays is None else decays
    return [
        {
            "params": [params[name] for name in names],
            "weight_decay": weight_decay if names[0] in decays else 0.0,
            NAMES_KEY: list(names),
        }
        for names in arrange(params, live_structure(model), decays, LAYER)
    ]


def join_optimizers(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Return one optimizer that steps several, such as Muon for matrices and AdamW for the rest.

    Give it to a Trainer (``optimizers=(joint, scheduler)``), to a scheduler and to the saver. Its ``state_dict`` has
    the groups and states of all, in their order, and the names of the params, so that checkpoints can be composed.

    Args:
        model: the model, from which the names are.
        optimizers: torch optimizers of different params of the model, without DeepSpeed.

    Raises:
        UsageError: an optimizer has params that are not the model's.
        ValueError: a param is in two optimizers.
    """
    return _JointOptimizer(model, optimizers)


class _JointOptimizer(torch.optim.Optimizer):
    """The optimizer that `join_optimizers` returns. Its param groups are those of the optimizers, in their order."""

    def __init__(self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        names = {param: name for name, param in model.named_parameters()}
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
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
        self.param_groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        for optimizer in self.optimizers:
            self.state.update(optimizer.state)
        for optimizer in self.optimizers:
            optimizer.state = self.state

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def train(self) -> None:
        """Prepare for training steps those optimizers that distinguish them, such as schedule-free ones."""
        for optimizer in self.optimizers:
            getattr(optimizer, "train", bool)()

    def eval(self) -> None:
        """Prepare for evaluation, likewise."""
        for optimizer in self.optimizers:
            getattr(optimizer, "eval", bool)()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict that `state_dict` returned: each optimizer loads, and adapts, its own part."""
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise ValueError(f"loaded state dict has {len(groups)} param groups instead of {len(self.param_groups)}")
        sizes = [[len(group["params"]) for group in each] for each in (groups, self.param_groups)]
        if sizes[0] != sizes[1]:  # before anything is changed
            raise ValueError(f"loaded param groups have {sizes[0]} params instead of {sizes[1]}")
        first = 0
        self.state.clear()
        for optimizer in self.optimizers:
            own = groups[first : first + len(optimizer.param_groups)]
            numbers = {number for group in own for number in group["params"]}
            state = {
                number: state_of_param for number, state_of_param in state_dict["state"].items() if number in numbers
            }
            optimizer.load_state_dict({"state": state, "param_groups": own})
            first += len(own)
        self._share()


def decaying_names(model: nn.Module) -> set[str]:
    """Return the params with weight decay in transformers 5.23: all but norms and biases."""
    norms = [f"{name}." for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)]
    names = [name for name, _ in model.named_parameters()]
    return {name for name in names if not NO_DECAY.search(name) and not name.startswith(tuple(norms))}


def live_structure(model: nn.Module) -> ModelStructure:
    """Return the parts of a model, the same as those of its checkpoints."""
    first: dict[int, str] = {}
    numels: dict[str, int] = {}
    tied: dict[str, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if (stored := first.setdefault(id(param), name)) != name:
            tied[name] = stored
        else:
            # Under ZeRO-3 a param is empty here; DeepSpeed keeps its real size in ds_numel.
            numels[name] = getattr(param, "ds_numel", param.numel())
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    config = dict(to_dict()) if to_dict else None
    if config is not None:  # transformers adds the class only when it saves
        config["architectures"] = config.get("architectures") or [type(model).__name__]
    return find_parts([*numels, *tied], tied, numels, config)


class LayerGroupsMixin:
    """Makes a Trainer optimize layer-aligned param groups: ``class LayerTrainer(LayerGroupsMixin, Trainer): ...``

    Under DeepSpeed a Trainer silently drops ``optimizers=(optimizer, None)`` and calls ``create_optimizer``, so the
    mixin overrides that method. The training arguments name the optimizer. The DeepSpeed config must not contain an
    ``optimizer``: DeepSpeed would build that one, with a single group.
    """

    optimizer: Any
    optimizer_cls_and_kwargs: Any
    accelerator: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        plugin = getattr(self.accelerator.state, "deepspeed_plugin", None)
        if plugin is not None and "optimizer" in plugin.deepspeed_config:
            raise ValueError(
                "the DeepSpeed config has an optimizer, so the Trainer's layer-aligned param groups would be ignored; "
                "remove it from the config and name it in the training arguments (optim=...)"
            )

    def create_optimizer(self, model: Any = None) -> Any:
        trainer: Any = self
        given = self.optimizer_cls_and_kwargs
        if self.optimizer is None:
            live = trainer.model if model is None else model
            kind, kwargs = given or trainer.get_optimizer_cls_and_kwargs(trainer.args, live)
            if taken := _GROUPING & kwargs.keys():
                raise ValueError(f"{trainer.args.optim} defines its own param groups ({', '.join(sorted(taken))})")
            decays = set(trainer.get_decay_parameter_names(live))
            groups = layer_param_groups(live, trainer.args.weight_decay, decays)
            self.optimizer_cls_and_kwargs = (kind, {**kwargs, "params": groups})
        try:
            # The stock method uses "params" in place of its own groups.
            return super().create_optimizer(*([] if model is None else [model]))  # type: ignore[misc]
        finally:
            self.optimizer_cls_and_kwargs = given
