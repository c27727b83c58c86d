"""A learning-rate scheduler's state for other param groups: ``scheduler.pt``, and ``lr_scheduler`` of DeepSpeed.

Schedulers keep lists with one entry per param group, in the order of the optimizer. torch's and transformers' are known
by their keys; DeepSpeed's own schedulers save a counter and no list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmtailor.codes import Code
from llmtailor.core.findings import ERROR, WARNING, Finding
from llmtailor.core.layout import FileLayout
from llmtailor.errors import SourceError
from llmtailor.formats.torchzip import lay_out_torch_file
from llmtailor.formats.trees import read_tree

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
_KEEP = "keep the param groups (--groups keep)"
_OTHER_SAVE = "copy the checkpoint again, whole; its files come from different saves"


@dataclass(frozen=True, slots=True)
class SchedulerFacts:
    """What a scheduler's state says."""

    lengths: Mapping[str, int] = field(default_factory=dict)
    """How many entries each list has that is known to be per param group."""
    last_rates: tuple[float, ...] = ()
    """The learning rates that it has set, per param group; empty if it does not keep them."""
    num_steps: int | None = None
    """How many steps it has counted; None where it may count something else."""


def read_scheduler(tree: Any) -> SchedulerFacts:
    """Return what a decoded scheduler's state says; of what is no scheduler's, nothing."""
    if not isinstance(tree, dict):
        return SchedulerFacts()
    lengths = {
        str(key): len(value) for key, value in tree.items() if key in _PER_GROUP and isinstance(value, (list, tuple))
    }
    for inner in tree.get(_NESTED) or ():
        lengths |= read_scheduler(inner).lengths
    rates = tree.get("_last_lr")
    # others may count epochs or evaluations
    counted = tree.get("last_epoch") if "lr_lambdas" in tree else None
    if type(tree.get("last_batch_iteration")) is int:  # DeepSpeed's count the batch, from -1
        counted = tree["last_batch_iteration"] + 1
    return SchedulerFacts(
        lengths,
        tuple(map(float, rates)) if isinstance(rates, list) and all(type(rate) is float for rate in rates) else (),
        counted if type(counted) is int else None,
    )


def compare_scheduler(
    facts: SchedulerFacts, where: str, rates: Sequence[object], expected_steps: int | None
) -> list[Finding]:
    """Hold a scheduler's state against the optimizer's: ``rates`` are the learning rates of its param groups.

    Stock compares neither. ``expected_steps`` is how many steps the run has made without skipped ones; None for a
    caller that compares them itself.
    """
    found = []
    for key, length in facts.lengths.items():
        if length != len(rates):
            what = f"it has {length} {_LISTED.get(key, key)} for {len(rates)} param groups"
            fix = f"a resume fails at the first scheduler step; {_OTHER_SAVE}"
            found.append(Finding(where, what, fix, Code.SCHEDULER_LENGTH, ERROR))
            break
    pairs = zip(facts.last_rates, rates, strict=False)
    if not found and (other := [(new, old) for new, old in pairs if type(old) is float and new != old]):
        what = f"it is at learning rate {other[0][0]:g}, the optimizer's param groups are at {other[0][1]:g}"
        fix = f"the first step after a resume takes the latter; {_OTHER_SAVE}"
        found.append(Finding(where, what, fix, Code.SCHEDULER_RATE, WARNING))
    if None not in (expected_steps, facts.num_steps) and facts.num_steps != expected_steps:
        what = f"the schedule is at step {facts.num_steps}, the run at step {expected_steps} (without skipped ones)"
        found.append(Finding(where, what, _OTHER_SAVE, Code.SCHEDULER_STEP, ERROR))
    return found


def lay_out_scheduler(root: Path, path: str, where: str, num_groups: int, from_group: Sequence[int]) -> FileLayout:
    """Lay out ``root/path``, a scheduler.pt, for other param groups. Raises what `regroup_scheduler` raises."""
    tree = read_tree(root, path, where)
    return lay_out_torch_file(path, regroup_scheduler(tree, where, num_groups, from_group))


def regroup_scheduler(tree: Any, where: str, num_groups: int, from_group: Sequence[int]) -> Any:
    """Return a scheduler's state for other param groups; the tree itself is not changed.

    ``num_groups`` is how many groups it was saved with, ``from_group`` says for each new group whose entries it takes.
    None (no scheduler) stays None. Raises SourceError if lists don't fit, or may be per group or not.
    """
    if tree is None:
        return None
    if not isinstance(tree, dict):
        raise SourceError.at(where, f"the scheduler's state is no dict but {_kind(tree)}, not to be re-laid", _KEEP)
    return {key: _entry(key, value, f"{where}: {key}", num_groups, from_group) for key, value in tree.items()}


def _entry(key: Any, value: Any, where: str, num_groups: int, from_group: Sequence[int]) -> Any:
    if key == _NESTED and isinstance(value, list):
        return [regroup_scheduler(inner, where, num_groups, from_group) for inner in value]
    if not isinstance(value, (list, tuple)) or key in _OTHER_LISTS:
        return value
    if key in _PER_GROUP:
        if len(value) != num_groups:
            what = f"there are {len(value)} entries for {num_groups} param groups"
            raise SourceError.at(
                where, what, "copy the file again: it is not of the save that the shards are of", Code.SCHEDULER_LENGTH
            )
        return type(value)(value[number] for number in from_group)
    if len(value) == num_groups:
        what = f"as many entries as param groups ({num_groups}), in a scheduler that is not known: maybe one for each"
        raise SourceError.at(where, what, _KEEP)
    return value


def _kind(node: Any) -> str:
    return f"{getattr(node, 'func', type(node).__name__)}"
