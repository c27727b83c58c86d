"""What a stock resume reads in DeepSpeed's files, as data; see `formats.resumed`. Checked against deepspeed 0.19.8."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from llmtailor.codes import Code
from llmtailor.containers.pickle_nodes import Call
from llmtailor.findings import ERROR, WARNING
from llmtailor.formats.resumed.optimizers import FAILS, FAILS_AT_STEP, OTHER_RUN, optimizer_fields
from llmtailor.formats.resumed.tables import (
    ANYTHING,
    BEYOND,
    DICT,
    FLAG,
    LIST,
    MISSING,
    MISTYPED,
    POSITIVE,
    Field,
    Kind,
    Says,
    Table,
    count,
    find,
    number,
)

_OUTER = "optimizer_state_dict"
_READER = frozenset((MISSING, MISTYPED, BEYOND))
_SCALER_CLASSES = {"LossScaler", "DynamicLossScaler"}
_OLDEST = (0, 3, 17)
MOST_SCALE = 2.0**64
"""A loss scale beyond this overflows in fp16 for dozens of steps, whatever the loss."""
_OWN_SCHEDULE = Says(ERROR, "silent: each rank follows its own schedule")
_OWN_SCALE = Says(ERROR, "silent: gradients of different scales are added up")
_DRIFT = Says(ERROR, "silent: the scales of the ranks drift apart", read=True)
_SCALES_WRONG = Says(ERROR, "silent: gradients overflow or vanish")


_LATER = Says(ERROR, "silent, or a resume fails when the scale is next updated", read=True)


def is_dynamic(tree: Any) -> bool:
    """Whether the loss scaler is one that adapts."""
    found = [value for _, value in find(tree, (_OUTER, "loss_scaler"))]
    return any(isinstance(one, Call) and getattr(one.func, "name", "") == "DynamicLossScaler" for one in found)


def _version(text: str) -> tuple[int, ...] | None:
    match = re.match(r"v?(\d+(?:\.\d+)*)(?:[-_.+]?[a-z0-9]+)*$", text)
    return tuple(map(int, match[1].split("."))) if match else None


SCALER = Kind(
    "loss scaler",
    lambda value: isinstance(value, Call) and getattr(value.func, "name", "") in _SCALER_CLASSES,
    lambda value: True,
    mistyped=(None, 1.0, {}),
)
SCALE = number(
    f"number above 0, up to {MOST_SCALE:g}",
    lambda value: 0 < value <= MOST_SCALE,
    (0.0, -1.0, 1e30),
    lambda value: value * 2,
)
VERSION = Kind(
    "version from 0.3.17 on",
    lambda value: isinstance(value, str),
    lambda value: (_version(value) or (0,)) >= _OLDEST,
    mistyped=(None, 7, [0, 19, 8]),
    beyond=("", "unknown", "0.3.0"),
)
_CLIP = number("number from 0 up", lambda value: value >= 0, (-1.0,), lambda value: value / 2 + 0.1)


def _scaler(
    key: str,
    kind: Kind,
    only_dynamic: bool = True,
    beyond: Says = _LATER,
    missing: Says = FAILS_AT_STEP,
    mistyped: Says = FAILS_AT_STEP,
) -> Field:
    return Field(
        (_OUTER, "loss_scaler", key),
        kind,
        "deepspeed.runtime.fp16.loss_scaler",
        missing=missing,
        mistyped=mistyped,
        beyond=beyond,
        unlike=_DRIFT if only_dynamic else _OWN_SCALE,
        only="fp16 with a dynamic scale" if only_dynamic else "",
        applies=is_dynamic if only_dynamic else lambda tree: True,
    )


_SCALER_FIELDS = (
    _scaler("cur_scale", SCALE, only_dynamic=False, beyond=_SCALES_WRONG),
    _scaler("cur_iter", count()),
    _scaler("last_overflow_iter", count("step", least=-1)),
    _scaler("scale_factor", number("number above 1", lambda value: value > 1, (1.0, 0.5))),
    _scaler("scale_window", count("count from 1 up", least=1)),
    _scaler("min_scale", POSITIVE),
    _scaler("delayed_shift", count("count from 1 up", least=1), mistyped=_LATER),
    _scaler("cur_hysteresis", count("count from 1 up", least=1), missing=_LATER, mistyped=_LATER),
    _scaler("consecutive_hysteresis", FLAG, mistyped=_LATER),
    _scaler("raise_error_at_min_scale", FLAG, missing=_LATER, mistyped=_LATER),
)


def _told(field: Field, *ways: str) -> Field:
    """The file's reader refuses it by itself."""
    return replace(field, told_by_reader=frozenset(ways) or _READER)


_LOAD3 = "deepspeed.runtime.zero.stage3._rigid_load_state_dict"
_LOAD12 = "deepspeed.runtime.zero.stage_1_and_2._load_legacy_checkpoint"
_GLOBAL12 = "deepspeed.runtime.zero.stage_1_and_2._load_global_state"
_ENGINE = "deepspeed.runtime.engine._load_checkpoint"
_NOT_READ = (
    ("ds_config, ds_version (of the file)", "not read: the resumed run has its own settings"),
    ("overflow", "overwritten at every step; ZeRO-3 wants it to be there"),
)

ZERO3 = Table(
    "ZeRO-3, optimizer states",
    "TAG/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt",
    (
        _told(Field((_OUTER,), DICT, _LOAD3, missing=FAILS, mistyped=FAILS)),
        _told(Field((_OUTER, "loss_scaler"), SCALER, _LOAD3, missing=FAILS, mistyped=FAILS_AT_STEP), MISSING),
        *_SCALER_FIELDS,
        Field((_OUTER, "dynamic_loss_scale"), FLAG, _LOAD3, missing=FAILS, unlike=OTHER_RUN),
        Field((_OUTER, "overflow"), ANYTHING, _LOAD3, missing=FAILS),
        _told(Field((_OUTER, "fp32_flat_groups"), LIST, _LOAD3, missing=FAILS, mistyped=FAILS)),
        *(
            _told(field) if field.path[-1] in ("param_groups", "state", "params") else field
            for field in optimizer_fields(_OUTER, "optimizer_state_dict")
        ),
    ),
    (
        *_NOT_READ,
        ("partition_count, zero_stage", "not read by a resume, but by DeepSpeed's tools: a warning, an error"),
    ),
)

ZERO12 = Table(
    "ZeRO-1 and ZeRO-2, optimizer states",
    "TAG/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt",
    (
        _told(Field((_OUTER,), DICT, _LOAD12, missing=FAILS, mistyped=FAILS)),
        Field((_OUTER, "loss_scaler"), SCALER, _GLOBAL12, mistyped=FAILS_AT_STEP),
        *_SCALER_FIELDS,
        Field((_OUTER, "dynamic_loss_scale"), FLAG, _GLOBAL12, unlike=OTHER_RUN),
        Field(
            (_OUTER, "clip_grad"),
            _CLIP,
            _GLOBAL12,
            mistyped=FAILS,
            beyond=Says(ERROR, "silent: gradients are not clipped, or become NaN"),
            unlike=Says(ERROR, "silent: every rank clips at its own value"),
        ),
        Field(
            (_OUTER, "ds_version"),
            VERSION,
            _GLOBAL12,
            missing=Says(ERROR, "a resume fails", code=Code.VERSION_MISSING),
            mistyped=FAILS,
            beyond=FAILS,
        ),
        _told(Field((_OUTER, "single_partition_of_fp32_groups"), LIST, _LOAD12, missing=FAILS, mistyped=FAILS)),
        *(
            _told(field) if field.path[-1] in ("param_groups", "state", "params") else field
            for field in optimizer_fields(_OUTER, "base_optimizer_state")
        ),
    ),
    (
        *_NOT_READ,
        (
            "param_alignment_paddings",
            "a layout other than the run's fails; if it is missing, lengths do not fit, which is an error",
        ),
        ("group_paddings", "read only for elastic checkpoints"),
        ("param_slice_mappings", "not read; `verify` uses it to tell whose file it is"),
        ("partition_count, zero_stage", "not read by a resume, but by DeepSpeed's tools: a warning, an error"),
    ),
)

_COUNT = count()
MODEL = Table(
    "Model states, all stages",
    "TAG/[zero_pp_rank_R_]mp_rank_00_model_states.pt",
    (
        _told(Field(("module",), replace(DICT, mistyped=([], "x")), _ENGINE, missing=FAILS, mistyped=FAILS)),
        _told(Field(("dp_world_size",), _COUNT, _ENGINE, missing=FAILS, mistyped=FAILS, beyond=FAILS)),
        Field(("mp_world_size",), ANYTHING, _ENGINE, missing=FAILS),
        _told(
            Field(
                ("global_steps",),
                _COUNT,
                _ENGINE,
                missing=FAILS,
                mistyped=FAILS_AT_STEP,
                beyond=Says(ERROR, "silent: the tags of later saves follow it", read=True),
                unlike=Says(ERROR, "silent: each rank counts separately", read=True),
            )
        ),
        _told(
            Field(
                ("skipped_steps",),
                _COUNT,
                _ENGINE,
                missing=FAILS,
                mistyped=FAILS_AT_STEP,
                beyond=Says(ERROR, "silent: a wrong count", read=True),
                unlike=Says(ERROR, "silent: each rank counts separately", read=True),
            )
        ),
        Field(
            ("global_samples",),
            _COUNT,
            _ENGINE,
            mistyped=FAILS_AT_STEP,
            beyond=Says(WARNING, "only logs follow it", read=True),
            unlike=Says(ERROR, "only logs follow it; but the file is of another save", read=True),
        ),
        Field(("lr_scheduler",), ANYTHING, _ENGINE, unlike=_OWN_SCHEDULE),
        Field(
            ("lr_scheduler", "last_batch_iteration"),
            count("step", least=-1),
            "deepspeed.runtime.lr_schedules",
            mistyped=FAILS_AT_STEP,
            unlike=_OWN_SCHEDULE,
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
