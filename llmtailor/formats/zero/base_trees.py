"""What a composite's shards take over from the base's as it is, whatever the stages of both."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.layout import Literal
from llmtailor.checkpoint.optimizer import Target
from llmtailor.containers.pickle_nodes import Call, Global, Ordered, make_tensor
from llmtailor.formats.trainer import ADAPTER_CONFIG

_STAGE = Global("deepspeed.runtime.zero.config", "ZeroStageEnum")
_SCALER = Global("deepspeed.runtime.fp16.loss_scaler", "LossScaler")
_MADE = {  # laid out anew
    *("zero_stage", "loss_scaler", "dynamic_loss_scale", "overflow", "partition_count", "optimizer_state_dict"),
    *("fp32_flat_groups", "clip_grad", "base_optimizer_state", "single_partition_of_fp32_groups", "group_paddings"),
    *("ds_version", "param_slice_mappings"),
}


@dataclass(frozen=True, slots=True)
class Carried:
    """Parts of one rank's ``optim_states`` of the base."""

    stage: int
    around: Mapping[str, Any]
    """What stands beside ``optimizer_state_dict``: ds_config, ds_version."""
    more: Mapping[str, Any]
    """Keys of ``optimizer_state_dict`` that we know nothing of, and ``param_alignment_paddings``."""
    loss_scaler: Any
    dynamic_loss_scale: Any
    overflow: Any
    clip_grad: Any
    kinds: tuple[str, ...]
    """Elementwise states of the optimizer."""
    has_state: bool
    """False in fp16 while every step so far has overflowed."""
    step_is_tensor: bool

    def more_if(self, *stages: int) -> Mapping[str, Any]:
        """Return the unknown keys if the base was saved with one of these stages."""
        return self.more if self.stage in stages else {}


def group_nodes(target: Target, ids: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Return the param groups of a target, owning these flat ids."""
    return [{**group.hyper, "params": list(owned)} for group, owned in zip(target.groups, ids, strict=True)]


def read_carried(tree: Any, base: CheckpointIndex, target: Target) -> Carried:
    """Take from a decoded ``optim_states`` what the composite keeps."""
    outer = tree["optimizer_state_dict"]
    inner = outer["optimizer_state_dict"] if base.stage == 3 else outer["base_optimizer_state"]
    states = list(inner["state"].values())
    config = tree.get("ds_config") or {}
    return Carried(
        stage=base.stage,
        around={
            **{key: value for key, value in tree.items() if key != "optimizer_state_dict"},
            **({"ds_config": adapt_config(config, base, target)} if "ds_config" in tree else {}),
        },
        more={key: value for key, value in outer.items() if key not in _MADE},
        loss_scaler=outer.get("loss_scaler") or _static_scaler(),
        dynamic_loss_scale=outer.get("dynamic_loss_scale", False),
        overflow=outer.get("overflow", False),
        clip_grad=outer.get("clip_grad", config.get("gradient_clipping", 0.0)),
        kinds=tuple(kind for kind in states[0] if kind != "step") if states else (),
        has_state=bool(states),
        step_is_tensor=all(flat.step_is_tensor for flat in base.flat_ids),
    )


def _static_scaler() -> Call:
    """BF16_Optimizer saves no loss scaler; the others need one, and for bf16 it is this."""
    return Call(_SCALER, (), new=True, state={"cur_scale": 1.0, "dynamic": False}, has_state=True)


def adapt_config(config: Mapping[str, Any], base: CheckpointIndex, target: Target) -> dict[str, Any]:
    """Return the ``ds_config`` of a composite: its stage, and the batch of a step on its ranks."""
    adapted = dict(config)
    total = adapted.get("train_batch_size")
    if type(total) is int and total % base.world_size == 0:
        adapted["train_batch_size"] = total // base.world_size * target.world_size
    zero = adapted.get("zero_optimization")
    if isinstance(zero, dict):
        adapted["zero_optimization"] = {**zero, "stage": target.stage}
    return adapted


def excludes_frozen(model_states: Mapping[str, Any], base: CheckpointIndex) -> bool:
    """Whether the run saved without its frozen params, as the Trainer does with PEFT.

    A resume demands every frozen param of the model if ``frozen_param_fragments`` is there, even empty, and takes none
    if it is None. ZeRO-1 always has None.
    """
    return ADAPTER_CONFIG in base.files or (base.stage > 1 and model_states.get("frozen_param_fragments") is None)


def stage_node(stage: int) -> Call:
    return Call(_STAGE, (stage,))


def step_node(step: float, as_tensor: bool, flat_id: int) -> Any:
    """Return a step as torch's AdamW keeps it, or as DeepSpeedCPUAdam does."""
    if not as_tensor:
        return int(step)
    return make_tensor("F32", (), (Literal(struct.pack("<f", step), f"step of flat id {flat_id}"),))


def shapes_node(base: CheckpointIndex, params: Iterable[str]) -> Ordered:
    """Return ``param_shapes`` of some params."""
    return Ordered((param, Call(Global("torch", "Size"), (base.params[param].shape,))) for param in params)
