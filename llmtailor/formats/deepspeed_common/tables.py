"""The fields of DeepSpeed's files that decide a training (deepspeed 0.19.8); see `loaders.stock_fields`.

What the readers of the files refuse on their own is not listed.
"""

from __future__ import annotations

from typing import Any

from llmtailor.codes import Code
from llmtailor.containers.pickle_nodes import Call
from llmtailor.loaders.stock_fields import (
    ANYTHING,
    FLAG,
    FROM_ZERO,
    FieldType,
    Table,
    count,
    field,
    find,
    is_a,
    number,
    optimizer_fields,
)

_OUTER = "optimizer_state_dict"
_SCALER_CLASSES = {"LossScaler", "DynamicLossScaler"}
_MOST_SCALE = 2.0**64
"""A loss scale beyond this overflows in fp16 for dozens of steps, whatever the loss."""


def _class_of(value: Any) -> str:
    return getattr(value.func, "name", "") if isinstance(value, Call) else ""


def _is_dynamic(tree: Any) -> bool:
    """Whether the loss scaler is one that adapts."""
    return any(_class_of(one) == "DynamicLossScaler" for _, one in find(tree, (_OUTER, "loss_scaler")))


_SCALER = FieldType("loss scaler", lambda value: _class_of(value) in _SCALER_CLASSES)
_SCALE = number(f"number > 0, up to {_MOST_SCALE:g}", lambda value: 0 < value <= _MOST_SCALE)
_SCALER_FIELDS = (
    field(f"{_OUTER}.loss_scaler", _SCALER, if_missing=None),
    field(f"{_OUTER}.loss_scaler.cur_scale", _SCALE, is_alike=True),
    field(f"{_OUTER}.loss_scaler.cur_iter", count(), is_alike=True, applies=_is_dynamic),
    field(f"{_OUTER}.loss_scaler.scale_window", count("count from 1 up", 1), is_alike=True, applies=_is_dynamic),
)
_OPTIM_FILE = "TAG/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt"

ZERO3 = Table(
    "ZeRO-3, optimizer states",
    _OPTIM_FILE,
    (
        *_SCALER_FIELDS,
        field(f"{_OUTER}.dynamic_loss_scale", FLAG, is_alike=True),
        *optimizer_fields(f"{_OUTER}.optimizer_state_dict."),
    ),
)

ZERO12 = Table(
    "ZeRO-1 and ZeRO-2, optimizer states",
    _OPTIM_FILE,
    (
        *_SCALER_FIELDS,
        field(f"{_OUTER}.dynamic_loss_scale", FLAG, if_missing=None, is_alike=True),
        field(f"{_OUTER}.clip_grad", FROM_ZERO, if_missing=None, is_alike=True),
        field(f"{_OUTER}.ds_version", FieldType("version", is_a(str)), if_missing=Code.VERSION_MISSING),
        *optimizer_fields(f"{_OUTER}.base_optimizer_state."),
    ),
)

MODEL = Table(
    "Model states, all stages",
    "TAG/[zero_pp_rank_R_]mp_rank_00_model_states.pt",
    (
        field("mp_world_size", ANYTHING),
        field("global_samples", count(), if_missing=None, is_alike=True),
        field("lr_scheduler", ANYTHING, if_missing=None, is_alike=True),
        field("lr_scheduler.last_batch_iteration", count("step", -1), if_missing=None),
    ),
)
TABLES = (ZERO3, ZERO12, MODEL)
