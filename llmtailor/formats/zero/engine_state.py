"""What DeepSpeed stores besides states: as in a base, or for a training that ran without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmtailor.checkpoint.index import CheckpointIndex, TrainState
from llmtailor.containers.pickle_nodes import Call, Global, Ordered

DS_VERSION = "0.19.8"
_STAGE = Global("deepspeed.runtime.zero.config", "ZeroStageEnum")
_SCALER = Global("deepspeed.runtime.fp16.loss_scaler", "LossScaler")
_MADE = frozenset(("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad", "ds_version"))


def make_stage(stage: int) -> Call:
    """Return DeepSpeed's object for a ZeRO stage."""
    return Call(_STAGE, (stage,))


def clipping_node(rest: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``clip_grad`` of an ``optim_states``, if the base's or its config states it.

    ZeRO-1/2 clip at the checkpoint's value; without one, at that of the run's own config (1.0 if that has none, too).
    """
    config = rest.get("ds_config")
    clip_grad = config.get("gradient_clipping") if isinstance(config, dict) else None
    stated = rest["optimizer_state_dict"].get("clip_grad", clip_grad if type(clip_grad) in (int, float) else None)
    return {} if stated is None else {"clip_grad": stated}


def unknown(outer: Mapping[str, Any], is_kept: bool) -> dict[str, Any]:
    """Return what is not known of a base's ``optimizer_state_dict``, if it is kept."""
    return {key: value for key, value in outer.items() if is_kept and key not in _MADE}


def scaling_nodes(outer: Mapping[str, Any], is_needed: bool) -> dict[str, Any]:
    """Return the loss scaler of an ``optim_states``, if the base's states it, or a resume can't do without.

    If it is made, it is that of DeepSpeed for bf16 and fp32. BF16_Optimizer saves none.
    """
    if not is_needed and "loss_scaler" not in outer:
        return {}
    static = Call(_SCALER, (), new=True, state={"cur_scale": 1.0, "dynamic": False}, has_state=True)
    return {
        "loss_scaler": outer.get("loss_scaler") or static,
        "dynamic_loss_scale": outer.get("dynamic_loss_scale", False),
        "overflow": outer.get("overflow", False),
    }


def new_engine(base: CheckpointIndex, stage: int, precision: str) -> TrainState:
    """Return what DeepSpeed would have stored for a training that ran without it."""
    config = {
        "bf16": {"enabled": precision == "BF16"},
        "fp16": {"enabled": False},
        "zero_optimization": {"stage": stage},
    }
    optim = {"ds_config": config, "ds_version": DS_VERSION, "optimizer_state_dict": {}}
    model = {
        "module": Ordered((name, None) for name in (*base.params, *base.tied)),
        "buffer_names": [param.name for param in base.params.values() if param.role == "buffer"],
        "optimizer": None,
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": base.zero.skipped_steps,
        "global_steps": base.global_step,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": config,
        "ds_version": DS_VERSION,
    }
    return TrainState(optim=(optim,), model=(model,))
