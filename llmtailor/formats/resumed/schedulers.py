"""``scheduler.pt``: what a resume reads of the state of a scheduler of torch 2.13."""

from __future__ import annotations

import math
from typing import Any

from llmtailor.core.findings import ERROR, WARNING
from llmtailor.formats.names import MAX_COUNT
from llmtailor.formats.resumed.kinds import FINITE, INF, NAN, is_number, number
from llmtailor.formats.resumed.model import Field, Kind, Says, Table

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
        Says(ERROR, "silent: the schedule begins anew"),
        Says(ERROR, "a resume fails at the end of the first step"),
        Says(ERROR, "silent: the schedule goes on from elsewhere"),
        only="all but ChainedScheduler",
        applies=lambda tree: is_torch_scheduler(tree) or is_by_metric(tree),
    ),
    Field(
        ("base_lrs",),
        RATES,
        f"{_SCHEDULER}.LambdaLR.get_lr",
        Says(WARNING, "a resume takes the rates that the new run is told, whatever the old one had"),
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
        ("_get_lr_called_within_step, _is_initial, verbose", "set anew before they are read"),
        ("all else of schedulers that are not LambdaLR", "their classes are known by their keys only"),
        ("a whole file of another class", "which class the run uses is known to its script alone"),
    ),
)
SCHEDULER_OWN_NAMES = frozenset(
    (
        *("optimizer", "step", "get_lr", "get_last_lr", "state_dict", "load_state_dict", "_update_lr"),
        *("_initial_step", "_get_closed_form_lr", "__class__", "__dict__"),
    )
)
"""Attributes of a scheduler that its state must not replace: all keys of a state become attributes"""
