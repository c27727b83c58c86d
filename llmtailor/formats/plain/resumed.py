"""What a resume without DeepSpeed reads of ``optimizer.pt``, and what must hold within it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from llmtailor.codes import Code
from llmtailor.core.findings import ERROR, Finding
from llmtailor.formats.pickle_nodes import as_tensor
from llmtailor.formats.resumed.kinds import is_number
from llmtailor.formats.resumed.model import EACH, Field, Kind, Says, Table, has
from llmtailor.formats.resumed.optimizers import FAILS_AT_STEP, decays_vectors_alone, is_adam, optimizer_fields

_GROUP, _STATE = ("param_groups", EACH), ("state", EACH)
_STEP = "torch.optim.AdamW.step"
_OFF = Kind(
    "false, as in every run that lowers its loss",
    lambda value: isinstance(value, bool),
    lambda value: not value,
    ("x", None),
    (True,),
)
_OFF_OR_NONE = Kind(
    _OFF.name, lambda value: value is None or isinstance(value, bool), lambda value: not value, ("x",), (True,)
)
_COUNTER = Kind(
    "step", lambda value: is_number(value) or as_tensor(value) is not None, lambda value: True, (None, "x", [4.0])
)


def _counts_by_param(tree: Any) -> bool:
    """Some kin of Adam's keep their step in the param group."""
    return is_adam(tree) and has(tree, *_STATE, "step")


OPTIMIZER_TABLE = Table(
    "optimizer.pt (without DeepSpeed)",
    "optimizer.pt",
    (
        *optimizer_fields(),
        Field(
            (*_GROUP, "maximize"), _OFF, _STEP, None, FAILS_AT_STEP, Says(ERROR, "silent: the weights move uphill"),
            only="Adam and its kin", applies=is_adam,
        ),
        Field(
            (*_GROUP, "differentiable"), _OFF, _STEP, None, FAILS_AT_STEP, FAILS_AT_STEP,
            only="Adam and its kin", applies=is_adam,
        ),
        Field(
            (*_STATE, "step"), _COUNTER, _STEP,
            Says(ERROR, "a resume fails"), Says(ERROR, "a resume fails"),
            only="Adam and its kin, where some state has it", applies=_counts_by_param,
        ),
    ),
    (
        ("initial_lr", "not read once the schedule is there; compared with its base_lrs"),
        ("foreach, fused, capturable", "ways to compute the same, to rounding"),
        ("a hyperparameter changed alike in all groups", "what the run is told to begin with does not count any more"),
    ),
)  # fmt: skip
_FIX = "copy the file again, or leave this checkpoint out"


def check_groups(
    groups: Sequence[Mapping[str, Any]],
    ids: Sequence[Sequence[int]],
    shapes: Mapping[int, tuple[int, ...]],
    where: str,
) -> Iterator[Finding]:
    """Yield what can't be right about param groups: ``ids`` are those of each, ``shapes`` their params'.

    A resume takes states by the places of their ids, not by their numbers, and torch numbers them in order.
    """
    listed = [number for group in ids for number in group]
    if any(second < first for first, second in pairwise(listed)):
        fix = f"a resume gives each state to the param in its place, silently; {_FIX}"
        yield Finding(where, "the ids of the params are out of order", fix, Code.FIELD_CONFLICT, ERROR)
    if decays_vectors_alone(groups, [[shapes[number] for number in group] for group in ids]):
        what = "weight decay is on vectors alone, as if the hyperparameters of the param groups were swapped"
        fix = f"silent: a resume decays the norms, and not the matrices; {_FIX}"
        yield Finding(where, what, fix, Code.FIELD_CONFLICT, ERROR)
    for number, group in enumerate(groups):
        if not isinstance(group.get("amsgrad", False), bool):
            what = f"param_groups[{number}].amsgrad is {group['amsgrad']!r:.40}, and no flag"
            yield Finding(where, what, f"a resume fails at the first step; {_FIX}", Code.FIELD_TYPE, ERROR)
