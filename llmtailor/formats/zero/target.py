"""What all files of a ZeRO checkpoint to be written have in common, for any stage.

Everything that is not a state (hyperparameters, loss scaler, counters, ds_config, DeepSpeed's classes by name) is
copied from the base. If the base was trained without DeepSpeed, it is what DeepSpeed 0.19.8 would have written; what
a resume takes from its own config is left out rather than invented: ``clip_grad`` and ``global_samples``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmtailor.checkpoint.index import CheckpointIndex, TrainState
from llmtailor.checkpoint.layout import Bytes
from llmtailor.checkpoint.optimizer import OptimizerLayout
from llmtailor.containers.pickle_nodes import Call, Global, Ordered, make_tensor
from llmtailor.formats.trainer import ADAPTER_CONFIG
from llmtailor.model.states import BUFFER, FROZEN, MASTER, WEIGHT, State

DS_VERSION = "0.19.8"
_STAGE = Global("deepspeed.runtime.zero.config", "ZeroStageEnum")
_SCALER = Global("deepspeed.runtime.fp16.loss_scaler", "LossScaler")
_MADE = frozenset(("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad", "ds_version"))
_NOT_MOMENTS = (WEIGHT, MASTER, FROZEN, BUFFER)


@dataclass(frozen=True, slots=True)
class ZeroTarget:
    """A ZeRO checkpoint to be written, modelled on a base."""

    base: CheckpointIndex
    layout: OptimizerLayout
    precision: str
    """Dtype of the weights in training"""
    kinds: tuple[str, ...]
    """Elementwise states of the optimizer; none in fp16 while every step so far has overflowed"""

    @classmethod
    def of(cls, base: CheckpointIndex, layout: OptimizerLayout, precision: str) -> ZeroTarget:
        trained = next((param for one in base.sub_groups for param in one.params), None)
        kinds = (state.kind for state in base.held if state.param == trained and state.kind not in _NOT_MOMENTS)
        return cls(base, layout, precision, tuple(kinds))

    @property
    def tag(self) -> str:
        return self.base.tag or f"global_step{self.base.global_step}"

    def dtype(self, state: State) -> str:
        """Return the dtype that a state is written in: under DeepSpeed, master weights and moments are fp32."""
        if self.base.has_masters or state.kind == BUFFER:
            return self.base.held[state].dtype
        return self.precision if state.kind == FROZEN else "F32"

    def group_nodes(self) -> list[dict[str, Any]]:
        """Return the param groups."""
        return [{**group.hyper, "params": self.layout.of_group(at)} for at, group in enumerate(self.layout.groups)]

    def step_node(self, number: int) -> Any:
        """Return the step of a sub-group, in the form of torch's AdamW or of DeepSpeedCPUAdam."""
        step = self.layout.sub_groups[number].step
        if not self.base.train.step_is_tensor:
            return int(step)
        return make_tensor("F32", (), (Bytes(struct.pack("<f", step), f"step of sub-group {number}"),))

    def optim_tree(self, rest: Mapping[str, Any], stages: Sequence[int], made: Mapping[str, Any]) -> dict[str, Any]:
        """Return an ``optim_states``: ``made``, and the rest of the base's.

        Unknown keys are copied if the base is of one of ``stages``.
        """
        around = {key: value for key, value in rest.items() if key != "optimizer_state_dict"}
        if "ds_config" in around:
            around["ds_config"] = self.adapt_config(around["ds_config"] or {})
        more = {key: value for key, value in rest["optimizer_state_dict"].items() if key not in _MADE}
        return {**around, "optimizer_state_dict": {**(more if self.base.stage in stages else {}), **made}}

    def adapt_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a ``ds_config`` with the target's stage, and the batch size of a step on its ranks."""
        adapted = dict(config)
        total = adapted.get("train_batch_size")
        if type(total) is int and total % self.base.world_size == 0:
            adapted["train_batch_size"] = total // self.base.world_size * self.layout.world_size
        zero = adapted.get("zero_optimization")
        if isinstance(zero, dict):
            adapted["zero_optimization"] = {**zero, "stage": self.layout.stage}
        return adapted

    def excludes_frozen(self, model_states: Mapping[str, Any]) -> bool:
        """Return whether the run saved without its frozen params, as the Trainer does with PEFT.

        A resume needs every frozen param of the model if ``frozen_param_fragments`` exists, even empty, and loads
        none if it is None. ZeRO-1 always has None.
        """
        lacks = self.base.stage > 1 and model_states.get("frozen_param_fragments") is None
        return lacks or ADAPTER_CONFIG in self.base.files

    def shapes_node(self, params: Iterable[str]) -> Ordered:
        """Return ``param_shapes`` of some params."""
        return Ordered((param, Call(Global("torch", "Size"), (self.base.params[param].shape,))) for param in params)


def scaling_nodes(rest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the loss scaler of an ``optim_states``. BF16_Optimizer saves none; the others need one."""
    outer = rest["optimizer_state_dict"]
    static = Call(_SCALER, (), new=True, state={"cur_scale": 1.0, "dynamic": False}, has_state=True)
    return {
        "loss_scaler": outer.get("loss_scaler") or static,
        "dynamic_loss_scale": outer.get("dynamic_loss_scale", False),
        "overflow": outer.get("overflow", False),
    }


def stage_node(stage: int) -> Call:
    return Call(_STAGE, (stage,))


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
        "skipped_steps": base.skipped_steps,
        "global_steps": base.global_step,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": config,
        "ds_version": DS_VERSION,
    }
    return TrainState(optim=(optim,), model=(model,))
