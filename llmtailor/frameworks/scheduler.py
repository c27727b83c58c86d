"""A learning-rate scheduler's state: ``scheduler.pt``, and ``lr_scheduler`` of DeepSpeed (torch 2.13).

Schedulers keep lists with one entry per param group, in the order of the optimizer. torch's and transformers' are known
by their keys; DeepSpeed's own schedulers save a counter and no list.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmtailor.codes import Code
from llmtailor.containers.json import MAX_COUNT
from llmtailor.errors import SourceError
from llmtailor.findings import ERROR, Finding
from llmtailor.frameworks.stock_fields import Field, FieldType, Table, check_file, is_number, number

_PER_GROUP = frozenset(
    (
        *("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs"),
        "_init_lrs",  # transformers' GreedyLR
        *("base_momentums", "max_momentums"),  # CyclicLR
    )
)
_NESTED = "_schedulers"  # SequentialLR and ChainedScheduler
_OTHER_LISTS = frozenset(("_schedule_phases", "_milestones"))  # OneCycleLR, SequentialLR
_LISTED = {"base_lrs": "learning rates", "_last_lr": "learning rates"}
_FIRST = "a resume makes its first step with the latter, and all others by the schedule"
_NO_STEP = "a resume follows the former"
_KEEP = "keep the param groups (--groups keep)"
_OTHER_SAVE = "copy the whole checkpoint again; its files come from different saves"


@dataclass(frozen=True, slots=True)
class SchedulerFacts:
    """The facts in a scheduler's state."""

    lengths: Mapping[str, int]
    """The length of each list known to have one entry per param group"""
    last_rates: tuple[float, ...]
    """The learning rates that it has set, per param group; empty if it does not keep them"""
    base_rates: tuple[float, ...]
    """The learning rates that it computes them from; empty if it does not keep them, or they change"""
    num_steps: int | None
    """The number of steps it has counted; None if it may count something else"""


def read_scheduler(tree: Any) -> SchedulerFacts:
    """Return the facts in a decoded scheduler's state; none if it is not a scheduler's."""
    if not isinstance(tree, dict):
        return SchedulerFacts({}, (), (), None)
    lengths = {
        str(key): len(value) for key, value in tree.items() if key in _PER_GROUP and isinstance(value, (list, tuple))
    }
    nested = tree.get(_NESTED)
    for inner in nested if isinstance(nested, (list, tuple)) else ():
        lengths |= read_scheduler(inner).lengths
    # others may count epochs or evaluations
    counted = tree.get("last_epoch") if "lr_lambdas" in tree else None
    if type(tree.get("last_batch_iteration")) is int:  # DeepSpeed's schedulers count batches, from -1
        counted = tree["last_batch_iteration"] + 1
    is_whole = type(counted) is int or (isinstance(counted, float) and counted.is_integer())
    base = () if "max_lrs" in tree else _rates(tree.get("base_lrs"))  # CyclicLR alternates between two
    return SchedulerFacts(lengths, _rates(tree.get("_last_lr")), base, int(counted or 0) if is_whole else None)


def _rates(value: Any) -> tuple[float, ...]:
    """Return learning rates; tensors are not read."""
    known = isinstance(value, (list, tuple)) and all(type(rate) in (int, float) for rate in value)
    return tuple(map(float, value)) if known else ()


_BASE_KEYS = frozenset(
    ("base_lrs", "last_epoch", "_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial", "verbose")
)
"""What every scheduler of torch saves"""


def is_torch_scheduler(tree: Any) -> bool:
    """Whether this is the state of a scheduler that sets rates by counting."""
    return isinstance(tree, dict) and bool({"lr_lambdas", "base_lrs", "_step_count"} & tree.keys())


def _is_lambda(tree: Any) -> bool:
    """Whether this is the state of a LambdaLR, which all of the Trainer's schedules are but two, or was one."""
    return is_torch_scheduler(tree) and ("lr_lambdas" in tree or not tree.keys() - _BASE_KEYS)


def _in_range(rates: Any) -> bool:
    return all(not isinstance(rate, (int, float)) or (math.isfinite(rate) and rate >= 0) for rate in rates)


_RATES = FieldType(
    "list of learning rates", lambda value: isinstance(value, (list, tuple)) and all(map(is_number, value)), _in_range
)
_STEPS = number("count", lambda value: 0 <= value < MAX_COUNT and value == int(value))
SCHEDULER_TABLE: Table = (
    Field("last_epoch", _STEPS, applies=is_torch_scheduler),
    Field("base_lrs", _RATES, if_missing=None, applies=_is_lambda),
    Field("_last_lr", _RATES, if_missing=None, applies=_is_lambda),
)


def check_scheduler(tree: Any, where: str) -> Iterator[Finding]:
    """Yield findings on fields for which a resume rejects ``scheduler.pt``."""
    yield from check_file(tree, SCHEDULER_TABLE, "a scheduler state", where)


def compare_scheduler(
    facts: SchedulerFacts, where: str, groups: Sequence[Mapping[str, Any]], expected_steps: int | None
) -> list[Finding]:
    """Compare a scheduler's state with the optimizer's: ``groups`` are the hyperparameters of its param groups.

    Stock software does not compare them. ``expected_steps`` is the number of steps of the run without skipped ones;
    None if the caller compares them itself.
    """
    found = []
    for key, length in facts.lengths.items():
        if length != len(groups):
            what = f"it has {length} {_LISTED.get(key, key)} for {len(groups)} param groups"
            fix = f"a resume fails at the first scheduler step; {_OTHER_SAVE}"
            found.append(Finding(where, what, fix, Code.SCHEDULER_LENGTH, ERROR))
            break
    if not found:
        found += _compare_rates(where, groups, "lr", facts.last_rates, "it is at learning rate", _FIRST)
        start = "it starts from learning rate"
        found += _compare_rates(where, groups, "initial_lr", facts.base_rates, start, _NO_STEP)
    if None not in (expected_steps, facts.num_steps) and facts.num_steps != expected_steps:
        what = f"the schedule is at step {facts.num_steps}, the run at step {expected_steps} (without skipped ones)"
        found.append(Finding(where, what, _OTHER_SAVE, Code.SCHEDULER_STEP, ERROR))
    return found


def _compare_rates(
    where: str, groups: Sequence[Mapping[str, Any]], key: str, rates: Sequence[float], says: str, stock: str
) -> Iterator[Finding]:
    """Yield a finding for the first rate that differs in a param group. Non-numbers are reported elsewhere."""
    for rate, group in zip(rates, groups, strict=False):
        other = group.get(key)
        if type(other) in (int, float) and rate != other and not (rate != rate and other != other):
            what = f"{says} {rate:g}, but {key} of the optimizer's param groups is {other:g}"
            fix = f"silent: {stock}; {_OTHER_SAVE}"
            yield Finding(where, what, fix, Code.SCHEDULER_RATE, ERROR)
            return


def regroup_scheduler(tree: Any, where: str, num_groups: int, from_group: Sequence[int]) -> Any:
    """Return a scheduler's state for other param groups; the tree itself is not changed.

    ``num_groups`` is the number of groups that it was saved with, ``from_group`` maps each new group to the one whose
    entries it takes. None (no scheduler) stays None. Raises SourceError for lists that don't fit, or that may be per
    group.
    """
    if tree is None:
        return None
    if not isinstance(tree, dict):
        kind = getattr(tree, "func", type(tree).__name__)
        raise SourceError.at(where, f"the scheduler's state is {kind}, not a dict", _KEEP)
    return {key: _entry(key, value, f"{where}: {key}", num_groups, from_group) for key, value in tree.items()}


def _entry(key: Any, value: Any, where: str, num_groups: int, from_group: Sequence[int]) -> Any:
    if key == _NESTED and isinstance(value, list):
        return [regroup_scheduler(inner, where, num_groups, from_group) for inner in value]
    if not isinstance(value, (list, tuple)) or key in _OTHER_LISTS:
        return value
    if key in _PER_GROUP:
        if len(value) != num_groups:
            what = f"there are {len(value)} entries for {num_groups} param groups"
            fix = "copy the file again: it is not of the same save as the shards"
            raise SourceError.at(where, what, fix, Code.SCHEDULER_LENGTH)
        return type(value)(value[number] for number in from_group)
    if len(value) == num_groups:
        what = f"as many entries as param groups ({num_groups}) in an unknown scheduler: maybe one for each"
        raise SourceError.at(where, what, _KEEP)
    return value
