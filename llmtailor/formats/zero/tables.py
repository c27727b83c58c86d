"""What a stock resume reads in DeepSpeed's files, as data (deepspeed 0.19.8); see `formats.field_tables`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from llmtailor.codes import Code
from llmtailor.containers.pickle_nodes import Call
from llmtailor.formats.field_tables import (
    ANYTHING,
    DICT,
    FAILS,
    FAILS_AT_STEP,
    FLAG,
    FROM_ZERO,
    LIST,
    MISSING,
    OTHER_RUN,
    POSITIVE,
    WAYS,
    Field,
    Kind,
    Says,
    Table,
    count,
    field,
    find,
    is_a,
    number,
    optimizer_fields,
    warns,
)

_OUTER = "optimizer_state_dict"
_READER = WAYS[:3]
_SCALER_CLASSES = {"LossScaler", "DynamicLossScaler"}
_OLDEST = (0, 3, 17)
MOST_SCALE = 2.0**64
"""A loss scale beyond this overflows in fp16 for dozens of steps, whatever the loss."""
_OWN_SCHEDULE = "silent: each rank follows its own schedule"
_LATER = Says("silent, or a resume fails when the scale is next updated", read=True)


def _class_of(value: Any) -> str:
    return getattr(value.func, "name", "") if isinstance(value, Call) else ""


def is_dynamic(tree: Any) -> bool:
    """Whether the loss scaler is one that adapts."""
    return any(_class_of(one) == "DynamicLossScaler" for _, one in find(tree, (_OUTER, "loss_scaler")))


def _version(text: str) -> tuple[int, ...]:
    match = re.match(r"v?(\d+(?:\.\d+)*)(?:[-_.+]?[a-z0-9]+)*$", text)
    return tuple(map(int, match[1].split("."))) if match else (0,)


SCALER = Kind("loss scaler", lambda value: _class_of(value) in _SCALER_CLASSES, (None, 1.0, {}))
SCALE = number(
    f"number above 0, up to {MOST_SCALE:g}",
    *(lambda value: 0 < value <= MOST_SCALE, (0.0, -1.0, 1e30)),
    lambda value: value * 2,
)
VERSION = Kind(
    *("version from 0.3.17 on", is_a(str), (None, 7, [0, 19, 8])),
    lambda value: _version(value) >= _OLDEST,
    ("", "unknown", "0.3.0"),
)
_FROM_ONE = count("count from 1 up", least=1)
_FACTOR = number("number above 1", lambda value: value > 1, (1.0, 0.5))


def _scaler(key: str, kind: Kind, missing: Says | str = FAILS_AT_STEP, mistyped: Says | str = FAILS_AT_STEP) -> Field:
    drift = Says("silent: the scales of the ranks drift apart", read=True)
    return field(
        *(f"{_OUTER}.loss_scaler.{key}", kind, "deepspeed.runtime.fp16.loss_scaler", missing, mistyped, _LATER, drift),
        only="fp16 with a dynamic scale",
        applies=is_dynamic,
    )


_SCALER_FIELDS = (
    field(
        *(f"{_OUTER}.loss_scaler.cur_scale", SCALE, "deepspeed.runtime.fp16.loss_scaler", FAILS_AT_STEP, FAILS_AT_STEP),
        *("silent: gradients overflow or vanish", "silent: gradients of different scales are added up"),
    ),
    _scaler("cur_iter", count()),
    _scaler("last_overflow_iter", count("step", least=-1)),
    _scaler("scale_factor", _FACTOR),
    _scaler("scale_window", _FROM_ONE),
    _scaler("min_scale", POSITIVE),
    _scaler("delayed_shift", _FROM_ONE, mistyped=_LATER),
    _scaler("cur_hysteresis", _FROM_ONE, _LATER, _LATER),
    _scaler("consecutive_hysteresis", FLAG, mistyped=_LATER),
    _scaler("raise_error_at_min_scale", FLAG, _LATER, _LATER),
)


def _optimizer(key: str) -> Iterable[Field]:
    """Yield the fields of an optimizer's state dict. The files' reader refuses some by itself."""
    for one in optimizer_fields(f"{_OUTER}.{key}."):
        is_told = one.path[-1] in ("param_groups", "state", "params")
        yield replace(one, told_by_reader=frozenset(_READER)) if is_told else one


_LOAD3 = "deepspeed.runtime.zero.stage3._rigid_load_state_dict"
_LOAD12 = "deepspeed.runtime.zero.stage_1_and_2._load_legacy_checkpoint"
_GLOBAL12 = "deepspeed.runtime.zero.stage_1_and_2._load_global_state"
_ENGINE = "deepspeed.runtime.engine._load_checkpoint"
_OPTIM_FILE = "TAG/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt"
_NOT_READ = (
    ("ds_config, ds_version (of the file)", "not read: the resumed run has its own settings"),
    ("overflow", "overwritten at every step; ZeRO-3 wants it to be there"),
)
_BY_TOOLS = ("partition_count, zero_stage", "not read by a resume, but by DeepSpeed's tools: a warning, an error")

ZERO3 = Table(
    "ZeRO-3, optimizer states",
    _OPTIM_FILE,
    (
        field(_OUTER, DICT, _LOAD3, FAILS, FAILS, told_by_reader=_READER),
        field(f"{_OUTER}.loss_scaler", SCALER, _LOAD3, FAILS, FAILS_AT_STEP, told_by_reader=[MISSING]),
        *_SCALER_FIELDS,
        field(f"{_OUTER}.dynamic_loss_scale", FLAG, _LOAD3, FAILS, unlike=OTHER_RUN),
        field(f"{_OUTER}.overflow", ANYTHING, _LOAD3, FAILS),
        field(f"{_OUTER}.fp32_flat_groups", LIST, _LOAD3, FAILS, FAILS, told_by_reader=_READER),
        *_optimizer("optimizer_state_dict"),
    ),
    (*_NOT_READ, _BY_TOOLS),
)

ZERO12 = Table(
    "ZeRO-1 and ZeRO-2, optimizer states",
    _OPTIM_FILE,
    (
        field(_OUTER, DICT, _LOAD12, FAILS, FAILS, told_by_reader=_READER),
        field(f"{_OUTER}.loss_scaler", SCALER, _GLOBAL12, mistyped=FAILS_AT_STEP),
        *_SCALER_FIELDS,
        field(f"{_OUTER}.dynamic_loss_scale", FLAG, _GLOBAL12, unlike=OTHER_RUN),
        field(
            *(f"{_OUTER}.clip_grad", FROM_ZERO, _GLOBAL12, "", FAILS),
            *("silent: gradients are not clipped, or become NaN", "silent: every rank clips at its own value"),
        ),
        field(f"{_OUTER}.ds_version", VERSION, _GLOBAL12, Says(FAILS, code=Code.VERSION_MISSING), FAILS, FAILS),
        field(f"{_OUTER}.single_partition_of_fp32_groups", LIST, _LOAD12, FAILS, FAILS, told_by_reader=_READER),
        *_optimizer("base_optimizer_state"),
    ),
    (
        *_NOT_READ,
        (
            "param_alignment_paddings",
            "a layout other than the run's fails; if it is missing, lengths do not fit, which is an error",
        ),
        ("group_paddings", "read only for elastic checkpoints"),
        ("param_slice_mappings", "not read; `verify` uses it to tell whose file it is"),
        _BY_TOOLS,
    ),
)

_COUNT, _STEP = count(), count("step", least=-1)
_APART = Says("silent: each rank counts separately", read=True)


def _counter(key: str, beyond: str) -> Field:
    off = (FAILS, FAILS_AT_STEP, Says(beyond, read=True), _APART)
    return field(key, _COUNT, _ENGINE, *off, told_by_reader=_READER)


MODEL = Table(
    "Model states, all stages",
    "TAG/[zero_pp_rank_R_]mp_rank_00_model_states.pt",
    (
        field("module", replace(DICT, mistyped=([], "x")), _ENGINE, FAILS, FAILS, told_by_reader=_READER),
        field("dp_world_size", _COUNT, _ENGINE, FAILS, FAILS, FAILS, told_by_reader=_READER),
        field("mp_world_size", ANYTHING, _ENGINE, FAILS),
        _counter("global_steps", "silent: the tags of later saves follow it"),
        _counter("skipped_steps", "silent: a wrong count"),
        field(
            *("global_samples", _COUNT, _ENGINE, "", FAILS_AT_STEP, warns("only logs follow it", read=True)),
            Says("only logs follow it; but the file is of another save", read=True),
        ),
        field("lr_scheduler", ANYTHING, _ENGINE, unlike=_OWN_SCHEDULE),
        field(
            *("lr_scheduler.last_batch_iteration", _STEP, "deepspeed.runtime.lr_schedules"),
            *("", FAILS_AT_STEP, "", _OWN_SCHEDULE),
            only="with a scheduler of DeepSpeed's",
        ),
    ),
    (
        ("ds_config, ds_version", "not read: the resumed run has its own settings"),
        (
            "param_shapes, shared_params, buffer_names, frozen_param_shapes",
            "not read by a resume, but required by DeepSpeed's tools and by `merge`",
        ),
        ("optimizer, data_sampler, random_ltd", "read without ZeRO, or with curriculum learning and random LTD only"),
        ("checkpoint_parallel_dimensions", "not read; other than 1 it is a kind of checkpoint that is refused"),
    ),
)
TABLES = (ZERO3, ZERO12, MODEL)
