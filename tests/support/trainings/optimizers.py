"""Optimizers that people train with, from the real packages, and how a Trainer gets each."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Trainer

from llmtailor.param_groups import join_optimizers

Params = list[torch.nn.Parameter]


@dataclass(frozen=True)
class Made:
    """An optimizer: ``optim`` of the Trainer's arguments, or what makes it of the model."""

    optim: str = ""
    args: str = ""
    make: Callable[[Any], Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def given(self) -> dict[str, Any]:
        """Return arguments of `trainings.alone.train`."""
        if self.make is None:
            return {"optim": self.optim, **({"optim_args": self.args} if self.args else {}), **self.options}
        make = self.make

        def create_optimizer(trainer: Any, model: Any = None) -> Any:
            trainer.optimizer = make(model or trainer.model)
            return trainer.optimizer

        return {"kind": type("Custom", (Trainer,), {"create_optimizer": create_optimizer}), **self.options}


def of(path: str, /, **options: Any) -> Made:
    """An optimizer class by its path, with the Trainer's two groups."""
    module, _, name = path.rpartition(".")

    def make(model: Any) -> Any:
        kind = getattr(importlib.import_module(module), name)
        named = [(one, param) for one, param in model.named_parameters() if param.requires_grad]
        decayed = [param for one, param in named if "norm" not in one]
        others = [param for one, param in named if "norm" in one]
        return kind([{"params": decayed}, {"params": others, "weight_decay": 0.0}], **options)

    return Made(make=make)


class WithAdam(torch.optim.Optimizer):
    """Muon for matrices and Adam for the rest in one optimizer, as in the implementations that frameworks use."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if group["use_muon"]:
                    buffer = state.setdefault("momentum_buffer", torch.zeros_like(param))
                    buffer.lerp_(param.grad, 1 - group["momentum"])
                    left, _, right = torch.linalg.svd(buffer, full_matrices=False)
                    param.add_(left @ right, alpha=-group["lr"])
                    continue
                state["step"] = state.get("step", 0) + 1
                first = state.setdefault("exp_avg", torch.zeros_like(param))
                second = state.setdefault("exp_avg_sq", torch.zeros_like(param))
                first.lerp_(param.grad, 0.1)
                second.lerp_(param.grad**2, 0.05)
                param.addcdiv_(first, second.sqrt() + 1e-8, value=-group["lr"])


def matrices_and_rest(model: Any) -> list[dict[str, Any]]:
    """Return the params by name: those that Muon is for, and the others."""
    named, others = dict(model.named_parameters()), ("embed_tokens", "lm_head")
    matrices = [name for name, param in named.items() if param.ndim > 1 and not any(one in name for one in others)]
    return [{name: named[name] for name in named if (name in matrices) is wanted} for wanted in (True, False)]


def muon_with_adam(model: Any) -> Any:
    groups = [{"params": [*one.values()], "lt_params": [*one]} for one in matrices_and_rest(model)]
    return WithAdam([{**groups[0], "use_muon": True, "momentum": 0.9}, {**groups[1], "use_muon": False}])


def muon_and_adamw(model: Any) -> Any:
    """torch's Muon alone: the rest is frozen."""
    for name, param in model.named_parameters():
        param.requires_grad_(param.ndim > 1 and "embed" not in name and "lm_head" not in name)
    return torch.optim.Muon([param for param in model.parameters() if param.requires_grad], lr=1e-3)


def muon_beside_adamw(model: Any) -> Any:
    """Two optimizers, joined."""
    matrices, rest = matrices_and_rest(model)
    muon = torch.optim.Muon(matrices.values(), lr=1e-3)
    return join_optimizers(model, [muon, torch.optim.AdamW(rest.values(), lr=1e-3)])


def adam_mini(model: Any) -> Any:
    from adam_mini import Adam_mini

    return Adam_mini(model.named_parameters(), lr=1e-3, dim=16, n_heads=4)


TORCH = {
    "Adam": of("torch.optim.Adam"),
    "AdamW amsgrad": of("torch.optim.AdamW", amsgrad=True),
    "NAdam": of("torch.optim.NAdam"),
    "RAdam": of("torch.optim.RAdam"),
    "Adamax": of("torch.optim.Adamax"),
    "Adadelta": of("torch.optim.Adadelta"),
    "Adagrad": of("torch.optim.Adagrad"),
    "ASGD": of("torch.optim.ASGD"),
    "RMSprop": of("torch.optim.RMSprop"),
    "RMSprop centered": of("torch.optim.RMSprop", momentum=0.9, centered=True),
    "Rprop": of("torch.optim.Rprop"),
    "SGD": of("torch.optim.SGD", lr=1e-2),
    "SGD momentum": of("torch.optim.SGD", lr=1e-2, momentum=0.9),
    "Adafactor": of("torch.optim.Adafactor"),
    "Muon": Made(make=muon_and_adamw),
    "Muon with Adam": Made(make=muon_with_adam),
    "Muon beside AdamW": Made(make=muon_beside_adamw),
}
TRANSFORMERS = {
    name: Made(name)
    for name in (
        "adamw_torch", "sgd", "adagrad", "rmsprop", "adafactor", "adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit",
        "paged_adamw_32bit", "lion_32bit", "lion_8bit", "paged_lion_32bit", "paged_lion_8bit", "rmsprop_bnb",
        "rmsprop_bnb_8bit", "rmsprop_bnb_32bit", "ademamix", "ademamix_8bit", "paged_ademamix_32bit",
        "paged_ademamix_8bit", "schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd", "stable_adamw",
        "adamw_torch_8bit", "adamw_torch_4bit", "adamw_torch_fused",
    )
}  # fmt: skip
OTHERS = {
    "CAME": of("came_pytorch.CAME", lr=1e-3),
    "Adam-mini": Made(make=adam_mini),
    "optimi Lion": of("optimi.Lion", lr=1e-3),
    "optimi AdamW": of("optimi.AdamW", lr=1e-3),
    "optimi Adan": of("optimi.Adan", lr=1e-3),
    "torchao fp8": of("torchao.optim.AdamWFp8", lr=1e-3),
    "optimi SGD": of("optimi.SGD", lr=1e-3),
}
ALL = {**TORCH, **TRANSFORMERS, **OTHERS}

IN_LOOPS = {
    **TORCH,
    **OTHERS,
    "optimi StableAdamW": of("optimi.StableAdamW", lr=1e-3),
    "bnb Lion": of("bitsandbytes.optim.Lion32bit", lr=1e-3),
    "bnb AdamW 8-bit": of("bitsandbytes.optim.AdamW8bit", lr=1e-3, min_8bit_size=256),
    "transformers Adafactor": of(
        "transformers.optimization.Adafactor", lr=1e-3, relative_step=False, scale_parameter=False
    ),
}
"""What a loop makes of its model, before ZeRO or FSDP2 cuts the params"""
