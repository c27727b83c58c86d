"""What a resume reads of an optimizer's and a scheduler's state (torch 2.13), with DeepSpeed or without."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from llmtailor.codes import Code
from llmtailor.containers.json import MAX_COUNT
from llmtailor.findings import ERROR, WARNING
from llmtailor.formats.resumed.tables import (
    ANYTHING,
    BETAS,
    DICT,
    EACH,
    FINITE,
    FLAG,
    INF,
    LIST,
    NAN,
    POSITIVE,
    RATE,
    Field,
    Kind,
    Says,
    Table,
    find,
    has,
    is_number,
    number,
)

FAILS = Says(ERROR, "a resume fails")
FAILS_AT_STEP = Says(ERROR, "a resume fails at the first step")
_EVERY_RANK_BY_ITS_OWN = Says(ERROR, "silent: every rank trains with its own value")
OTHER_RUN = Says(ERROR, "resumes; but the file is of another save or run than those of the other ranks")
_DIVERGES = Says(ERROR, "silent: the weights become NaN, or move uphill")
_STEP = "torch.optim.AdamW.step"
_BY_DEFAULT = "torch.optim.Adam.__setstate__"


def optimizer_fields(*at: str) -> tuple[Field, ...]:
    """Return the fields of a state dict that lies at a path."""

    def of_adam(tree: Any) -> bool:
        return is_adam(tree, *at)

    def of_amsgrad(tree: Any) -> bool:
        return any(value is True for _, value in find(tree, (*group, "amsgrad")))

    def of_cpu_adam(tree: Any) -> bool:
        return is_cpu_adam(tree, *at)

    group, state = (*at, "param_groups", EACH), (*at, "state", EACH)
    like_adam = {"only": "Adam and its variants", "applies": of_adam}
    hyper = {"missing": FAILS_AT_STEP, "mistyped": FAILS_AT_STEP, "beyond": _DIVERGES, "unlike": _EVERY_RANK_BY_ITS_OWN}
    flag = {"mistyped": FAILS_AT_STEP, "unlike": Says(ERROR, "silent, or it fails on that rank and the others wait")}
    lost = Says(ERROR, "a resume fails at the first step", code=Code.STATE_MISSING)
    return (
        Field((*at, "param_groups"), LIST, "torch.optim.Optimizer.load_state_dict", FAILS, FAILS),
        Field((*at, "state"), DICT, "torch.optim.Optimizer.load_state_dict", FAILS, FAILS),
        Field((*group, "params"), LIST, "torch.optim.Optimizer.load_state_dict", FAILS, FAILS),
        Field((*group, "lr"), RATE, _STEP, **hyper),  # type: ignore[arg-type]
        Field((*group, "betas"), BETAS, _STEP, **hyper, **like_adam),  # type: ignore[arg-type]
        Field((*group, "eps"), POSITIVE, _STEP, **hyper, **like_adam),  # type: ignore[arg-type]
        Field((*group, "weight_decay"), RATE, _STEP, **hyper, **like_adam),  # type: ignore[arg-type]
        Field(
            (*group, "bias_correction"),
            FLAG,
            "deepspeed.ops.adam.DeepSpeedCPUAdam.step",
            missing=FAILS_AT_STEP,
            unlike=_EVERY_RANK_BY_ITS_OWN,
            only="DeepSpeedCPUAdam",
            applies=of_cpu_adam,
        ),
        Field((*group, "initial_lr"), RATE, "nothing: the scheduler has base_lrs", unlike=OTHER_RUN),
        *(
            Field((*group, key), FLAG, _BY_DEFAULT, **flag, **like_adam)  # type: ignore[arg-type]
            for key in ("amsgrad", "maximize", "differentiable")
        ),
        *(
            Field((*group, key), FLAG, _BY_DEFAULT, unlike=OTHER_RUN, **like_adam)  # type: ignore[arg-type]
            for key in ("decoupled_weight_decay", "foreach", "capturable", "fused")
        ),
        *(
            Field((*state, key), ANYTHING, _STEP, missing=lost, **like_adam)  # type: ignore[arg-type]
            for key in ("exp_avg", "exp_avg_sq")
        ),
        Field((*state, "max_exp_avg_sq"), ANYTHING, _STEP, missing=lost, only="with amsgrad", applies=of_amsgrad),
    )


def is_adam(tree: Any, *at: str) -> bool:
    """Whether a state dict is of Adam or one of its kin, by its states or its hyperparameters."""
    keys = (*at, "state", EACH), (*at, "param_groups", EACH)
    return any(has(tree, *keys[0], kind) for kind in ("exp_avg", "exp_avg_sq")) or all(
        has(tree, *keys[1], name) for name in ("betas", "weight_decay")
    )


def is_cpu_adam(tree: Any, *at: str) -> bool:
    """Whether a state dict is of DeepSpeed's Adam for the CPU: it counts steps by int, and has not torch's flags."""
    if has(tree, *at, "param_groups", EACH, "maximize"):
        return False
    steps = [value for _, value in find(tree, (*at, "state", EACH, "step"))]
    return is_adam(tree, *at) and any(type(step) is int for step in steps)


def decays_vectors_alone(groups: Sequence[Mapping[str, Any]], shapes: Sequence[Sequence[tuple[int, ...]]]) -> bool:
    """Whether weight decay is the wrong way round: on norms and biases alone, and not on matrices.

    ``shapes`` are those of each group's params.
    """
    decaying = [index for index, group in enumerate(groups) if group.get("weight_decay")]
    resting = [index for index, group in enumerate(groups) if group.get("weight_decay") == 0]
    on = [len(shape) for index in decaying for shape in shapes[index]]
    off = [len(shape) for index in resting for shape in shapes[index]]
    return bool(on and off) and max(on) < 2 <= max(off)


_BASE_KEYS = frozenset(
    ("base_lrs", "last_epoch", "_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial", "verbose")
)
"""What every scheduler of torch saves"""


def is_torch_scheduler(tree: Any) -> bool:
    """Whether this is the state of a scheduler that sets rates by counting."""
    return isinstance(tree, dict) and bool({"lr_lambdas", "base_lrs", "_step_count"} & tree.keys())


def is_lambda(tree: Any) -> bool:
    """Whether this is the state of a LambdaLR, which all of the Trainer's schedules are but two, or was one."""
    if not is_torch_scheduler(tree):
        return False
    return "lr_lambdas" in tree or not tree.keys() - _BASE_KEYS


def is_by_metric(tree: Any) -> bool:
    """Whether this is the state of ReduceLROnPlateau."""
    return isinstance(tree, dict) and "num_bad_epochs" in tree


def _are_rates(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(map(is_number, value))


def _rates_in_range(value: Any) -> bool:
    return all(not isinstance(rate, (int, float)) or (math.isfinite(rate) and rate >= 0) for rate in value)


RATES = Kind(
    "list of learning rates",
    _are_rates,
    _rates_in_range,
    (None, "x", 0.1, {}, ["x", "x"], [None, None]),
    ([NAN, NAN], [INF, INF], [-1.0, -1.0]),
)
LAST_RATES = Kind(
    RATES.name, _are_rates, lambda value: bool(value) and _rates_in_range(value), RATES.mistyped, (*RATES.beyond, [])
)
LAMBDAS = Kind(
    "list of None and dicts",
    lambda value: isinstance(value, (list, tuple)) and all(one is None or isinstance(one, dict) for one in value),
    lambda value: True,
    (None, "x", 3, [1, 2]),
)
STEPS = number(
    "count", lambda value: 0 <= value < MAX_COUNT and value == int(value), (-1, 10**30, 3.5), lambda value: value + 1
)
MODE = Kind("min or max", lambda value: isinstance(value, str), lambda one: one in ("min", "max"), (None, 3), ("x",))
_SCHEDULER = "torch.optim.lr_scheduler"

SCHEDULER_FIELDS = (
    Field(
        ("last_epoch",),
        STEPS,
        f"{_SCHEDULER}.LRScheduler.step",
        Says(ERROR, "silent: the schedule starts over"),
        Says(ERROR, "a resume fails at the end of the first step"),
        Says(ERROR, "silent: the schedule continues from elsewhere"),
        only="all but ChainedScheduler",
        applies=lambda tree: is_torch_scheduler(tree) or is_by_metric(tree),
    ),
    Field(
        ("base_lrs",),
        RATES,
        f"{_SCHEDULER}.LambdaLR.get_lr",
        Says(WARNING, "a resume uses the rates of the new run's arguments, not those of the old run"),
        Says(ERROR, "a resume fails at the end of the first step"),
        Says(ERROR, "silent: the weights become NaN, or move uphill"),
        only="LambdaLR",
        applies=is_lambda,
    ),
    Field(
        ("_last_lr",),
        LAST_RATES,
        "Trainer._get_learning_rate",
        Says(WARNING, "a resume works, and logs a wrong learning rate at the first step"),
        Says(ERROR, "a resume fails at the first step, or logs no learning rate there"),
        Says(ERROR, "a resume fails at the first step, or logs no learning rate there"),
        only="LambdaLR",
        applies=is_lambda,
    ),
    Field(
        ("lr_lambdas",),
        LAMBDAS,
        f"{_SCHEDULER}.LambdaLR.load_state_dict",
        Says(ERROR, "a resume with any schedule of the Trainer's fails"),
        Says(ERROR, "a resume fails"),
        only="LambdaLR",
        applies=is_lambda,
    ),
    Field(
        ("_step_count",),
        FINITE,
        f"{_SCHEDULER}.LRScheduler.step",
        None,
        Says(ERROR, "a resume fails at the end of the first step"),
        applies=is_torch_scheduler,
    ),
    Field(
        ("mode",),
        MODE,
        f"{_SCHEDULER}.ReduceLROnPlateau.load_state_dict",
        None,
        Says(ERROR, "a resume fails"),
        Says(ERROR, "a resume fails"),
        only="ReduceLROnPlateau",
        applies=is_by_metric,
    ),
)
SCHEDULER_TABLE = Table(
    "scheduler.pt",
    "scheduler.pt",
    SCHEDULER_FIELDS,
    (
        ("_get_lr_called_within_step, _is_initial, verbose", "reset before they are read"),
        ("everything else of schedulers that are not LambdaLR", "their classes are known by their keys only"),
        ("a whole file of another class", "only the run's script knows which class it uses"),
    ),
)
SCHEDULER_OWN_NAMES = frozenset(
    (
        *("optimizer", "step", "get_lr", "get_last_lr", "state_dict", "load_state_dict", "_update_lr"),
        *("_initial_step", "_get_closed_form_lr", "__class__", "__dict__"),
    )
)
"""Attributes of a scheduler that its state must not replace: all keys of a state become attributes"""
