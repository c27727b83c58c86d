"""What DeepSpeed itself says that it loaded, asked between resume and the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from transformers import TrainerCallback

from trainings.common import MOMENTS


def asked(model: Any, zero: Any, stage: int, moments: bool) -> dict[str, dict[str, torch.Tensor]]:
    """Ask DeepSpeed for weights, masters and moments, all ranks at once."""
    told: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in ("weight", "master", *MOMENTS)}
    permuted = getattr(zero, "round_robin_gradients", False)  # DeepSpeed then gets its own mapping wrong
    for name, param in model.named_parameters():
        with deepspeed.zero.GatheredParameters(param, enabled=stage == 3):
            told["weight"][name] = param.detach().clone()
        if param.requires_grad and not permuted:
            told["master"][name] = safe_get_full_fp32_param(param)
            for moment in MOMENTS if moments else ():
                told[moment][name] = safe_get_full_optimizer_state(param, moment)
    return told


class Echo(TrainerCallback):  # type: ignore[misc]
    """Write ``echo.pt``: masters, moments, steps, weights and buffers by FQN, and the counters.

    With ZeRO-1/2 the moments can't be asked for before a first step; so there is also the folder ``echo``, with what
    ``engine.save_checkpoint`` writes back.
    """

    def __init__(self, trainer: Any, folder: Path) -> None:
        self.trainer = trainer
        self.folder = folder

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        engine = self.trainer.deepspeed
        zero = engine.optimizer
        stage = engine.zero_optimization_stage()
        echo: dict[str, Any] = {
            **asked(engine.module, zero, stage, moments=stage == 3),
            "buffer": {name: buffer.clone() for name, buffer in engine.module.named_buffers()},
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in zero.optimizer.param_groups],
            "global_steps": engine.global_steps,
            "skipped_steps": engine.skipped_steps,
            "scheduler": self.trainer.lr_scheduler.state_dict(),
            "global_step": state.global_step,
        }
        if stage == 3:
            names = {param: name for name, param in engine.module.named_parameters()}
            flats = enumerate(zero.fp16_groups)
            echo["step"] = {names[param]: _step(zero, flat_id) for flat_id, params in flats for param in params}
        if args.process_index == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            torch.save(echo, self.folder / "echo.pt")
        if stage < 3:
            engine.save_checkpoint(str(self.folder / "echo"))


def _step(zero: Any, flat_id: int) -> float | None:
    state = zero.optimizer.state[zero.fp32_partitioned_groups_flat[flat_id]]
    return float(state["step"]) if "step" in state else None
