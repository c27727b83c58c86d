"""What DeepSpeed itself says that it loaded, asked between resume and the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from transformers import TrainerCallback

MOMENTS = ("exp_avg", "exp_avg_sq")


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
        names = {param: name for name, param in engine.module.named_parameters()}
        echo: dict[str, Any] = {
            "master": {},
            "weight": {},
            "buffer": {name: buffer.clone() for name, buffer in engine.module.named_buffers()},
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in zero.optimizer.param_groups],
            "global_steps": engine.global_steps,
            "skipped_steps": engine.skipped_steps,
            "scheduler": self.trainer.lr_scheduler.state_dict(),
            "global_step": state.global_step,
        }
        if stage == 3:
            echo |= {moment: {} for moment in MOMENTS}
            echo["loss_scaler"] = vars(zero.loss_scaler)
            echo["step"] = {
                names[param]: _step(zero, flat_id)
                for flat_id, params in enumerate(zero.fp16_groups)
                for param in params
            }
        permuted = getattr(zero, "round_robin_gradients", False)  # DeepSpeed then gets its own mapping wrong
        for param, name in names.items():  # each of these asks all ranks
            with deepspeed.zero.GatheredParameters(param, enabled=stage == 3):
                echo["weight"][name] = param.detach().clone()
            if param.requires_grad and not permuted:
                echo["master"][name] = safe_get_full_fp32_param(param)
            if param.requires_grad and stage == 3:
                for moment in MOMENTS:
                    echo[moment][name] = safe_get_full_optimizer_state(param, moment)
        if args.process_index == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            torch.save(echo, self.folder / "echo.pt")
        if stage < 3:
            engine.save_checkpoint(str(self.folder / "echo"))


def _step(zero: Any, flat_id: int) -> float | None:
    state = zero.optimizer.state[zero.fp32_partitioned_groups_flat[flat_id]]
    return float(state["step"]) if "step" in state else None
