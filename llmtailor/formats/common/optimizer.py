"""``optimizer.pt`` as data (a torch optimizer's state dict, with its params as bare ids), and its checks. Pure.

::

    state          {id: {step, exp_avg, exp_avg_sq}}       tensors in the shape and dtype of the param
    param_groups   [{lr, betas, .., params: [ids]}]        an extra key may list the params' names

A stock resume checks little more than the number of ids: swapped states stay swapped in training (reading out of
bounds if their shapes differ), which is refused here. A param that has had no gradient yet has no state, and before the
first step none has. Adam would start from zeros, so these are its moments here, at step 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.optimizer import NAME_KEYS, SAVED_NAMES
from llmtailor.codes import Code
from llmtailor.containers.json import (
    FLOATING,
    Tensor,
    Trees,
    as_dict,
    check_kind,
    check_name,
    get,
    read_option,
    read_step,
    read_tensor,
)
from llmtailor.containers.unpickle import as_ints, as_tensor
from llmtailor.errors import COPY_FILE, PathIn, Problem, SourceError, UnsupportedCheckpoint, damaged, some
from llmtailor.findings import ERROR, Finding
from llmtailor.formats.other_optimizers import another, flattened, naming_others, refuse_others
from llmtailor.loaders.stock_fields import (
    ADAM_KINDS,
    EACH,
    Field,
    FieldType,
    Table,
    check_fields,
    decays_vectors_alone,
    find_refused,
    has,
    is_adam,
    is_number,
    keys_below,
    optimizer_fields,
)

_STEP = FieldType("step", lambda value: is_number(value) or as_tensor(value) is not None)


OPTIMIZER_TABLE: Table = (
    *optimizer_fields(),
    # some variants of Adam have the step in the param group
    Field("state.*.step", _STEP, applies=lambda tree: is_adam(tree) and has(tree, "state", EACH, "step")),
)


def _check_groups(
    groups: Sequence[Mapping[str, Any]],
    ids: Sequence[Sequence[int]],
    shapes: Mapping[int, tuple[int, ...] | None],
    where: str,
) -> Iterator[Finding]:
    """Yield what is impossible in param groups: ``ids`` are those of each, ``shapes`` their params', if known.

    A resume matches states by the order of the ids, not by their numbers, and torch numbers them in order.
    """
    listed = [number for group in ids for number in group]
    if any(second < first for first, second in pairwise(listed)):
        fix = f"a resume silently gives each state to the param in its place; {COPY_FILE}"
        yield Finding(where, "the ids of the params are out of order", fix, Code.FIELD_CONFLICT, ERROR)
    if decays_vectors_alone(groups, [[shape for number in group if (shape := shapes[number])] for group in ids]):
        what = "only vectors have weight decay, as if the hyperparameters of the param groups were swapped"
        fix = f"silent: a resume decays the norms, not the matrices; {COPY_FILE}"
        yield Finding(where, what, fix, Code.FIELD_CONFLICT, ERROR)


_OF_ADAM = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """A param group: its ids in order, and their names, if listed."""

    ids: tuple[int, ...]
    names: tuple[str, ...] | None
    hyper: Mapping[str, Any]
    """Everything else, the lists of names included"""


@dataclass(frozen=True, slots=True)
class SavedOptimizer:
    """The content of ``optimizer.pt``. All states have the same kinds."""

    groups: tuple[SavedGroup, ...]
    kinds: Mapping[int, Mapping[str, Tensor]]
    """id -> kind -> tensor; all kinds of an id have one shape. Empty for a param that has had no gradient yet"""
    steps: Mapping[int, float]
    """0 for a param that has had no gradient yet"""
    step_is_tensor: bool
    findings: tuple[Finding, ...] = ()
    """What makes a resume fail, or change, without preventing reading"""
    zeroed: tuple[str, ...] = ()
    """The kinds that a param gets with its first gradient, as zeros"""

    def shape(self, number: int) -> tuple[int, ...] | None:
        """Return the shape of the param with this id; None if it has no state."""
        return next((tensor.shape for tensor in self.kinds[number].values()), None)


def read_optimizer(trees: Trees, where: PathIn) -> SavedOptimizer:
    """Decode ``optimizer.pt``, or accelerate's ``optimizer.bin``; of its tensors only the 4 bytes of each ``step`` are
    read.

    Raises SourceError, or UnsupportedCheckpoint for an optimizer whose states can't be composed.
    """
    if where.path not in trees.inside and not (trees.root / where.path).exists():
        fix = "copy it back; without it a resume fails, or silently loads neither the optimizer nor the schedule"
        raise SourceError.at(where, "the file is missing", fix, Code.FILE_MISSING)
    return parse_optimizer(trees.root, read_tree(trees, where), where)


def read_tree(trees: Trees, where: PathIn) -> Any:
    """Return the object tree of a file with an optimizer's states. Raises what `naming_others` raises."""
    with naming_others(where):
        return trees.read(where.path, where).tree


def parse_optimizer(root: Path, tree: Any, where: str) -> SavedOptimizer:
    """Return an optimizer's state dict as data; only the 4 bytes of each ``step`` are read from files in ``root``.

    Raises what `read_optimizer` raises.
    """
    if isinstance(tree, dict) and isinstance(state := tree.get("state"), dict):
        kept = {number: flattened(one) if isinstance(one, dict) else one for number, one in state.items() if one != {}}
        tree = {**tree, "state": kept}
        _refuse_others(kept, keys_below(tree, "param_groups"), where)
    findings = [*find_refused(tree, where), *check_fields(tree, OPTIMIZER_TABLE, where)]
    try:
        saved = _read(root, tree, where)
    except SourceError as error:
        if wrong := [finding.problem for finding in findings if finding.severity == ERROR]:
            others = () if isinstance(error, UnsupportedCheckpoint) else error.problems
            raise SourceError([*wrong, *others]) from error
        raise
    shapes = {number: saved.shape(number) for number in saved.kinds}
    hyper, ids = [group.hyper for group in saved.groups], [group.ids for group in saved.groups]
    return replace(saved, findings=(*findings, *_check_groups(hyper, ids, shapes, where)))


def _refuse_others(state: Mapping[Any, Any], options: Collection[str], where: str) -> None:
    states = [one for one in state.values() if isinstance(one, dict)]
    has_objects = any(kind != "step" and as_tensor(value) is None for one in states for kind, value in one.items())
    refuse_others([{*map(str, one)} for one in states], {*map(str, options)}, where, has_objects=has_objects)


def _read(root: Path, tree: Any, where: str) -> SavedOptimizer:
    state = get(tree, "state", dict, where)
    groups = tuple(_read_group(root, group, where) for group in get(tree, "param_groups", list, where))
    ids = [number for group in groups for number in group.ids]
    _check_ids(ids, state, where)
    options = keys_below(tree, "param_groups")
    kinds = _read_all(state, [number for number in ids if number in state], options, where)
    wanted = next(iter(kinds.values()), dict.fromkeys(_OF_ADAM)).keys()
    if others := [number for number, tensors in kinds.items() if tensors.keys() != wanted]:
        raise damaged(where, f"the state of {_some(others)} has other kinds than {', '.join(wanted)}")
    if len(kinds) < len(ids) and not ADAM_KINDS.issuperset(wanted):
        what = "some params have no states yet, and what the optimizer starts from is not known"
        raise another(wanted, options, where, what)
    steps = {
        number: read_step(root, state[number]["step"], number, where) if number in kinds else 0.0 for number in ids
    }
    return SavedOptimizer(
        groups,
        {number: kinds.get(number, {}) for number in ids},
        steps,
        all(as_tensor(state[number]["step"]) for number in kinds),
        zeroed=tuple(wanted),
    )


def _read_group(root: Path, node: Any, where: str) -> SavedGroup:
    group = as_dict(node, "a param group", where)
    ids = as_ints(group.get("params"))
    if ids is None:
        raise damaged(where, "a param group's params are not a list of ids")
    names = None
    if key := next((key for key in (SAVED_NAMES, *NAME_KEYS) if group.get(key) is not None), ""):
        listed = group[key]
        if not isinstance(listed, (list, tuple)):
            raise damaged(where, f"{key} of a param group is not a list of names")
        if len(listed) != len(ids):
            raise damaged(where, f"a param group has {len(ids)} ids and {len(listed)} names in {key}")
        names = tuple(check_name(name, key, where) for name in listed)
    options = ((key, value) for key, value in group.items() if key not in ("params", SAVED_NAMES))
    return SavedGroup(ids, names, {key: read_option(root, value, where) for key, value in options})


def _check_ids(ids: list[int], state: Mapping[Any, Any], where: str) -> None:
    owned = Counter(ids)
    checks = (
        ("the param groups own {} twice", sorted(number for number, count in owned.items() if count > 1)),
        ("it holds the state of {}, which no param group owns", [number for number in state if number not in owned]),
    )
    problems = [Problem(where, text.format(_some(found)), COPY_FILE) for text, found in checks if found]
    if not ids:
        problems.append(Problem(where, "its param groups are empty", COPY_FILE))
    if problems:
        raise SourceError(problems)


def _read_all(
    state: Mapping[Any, Any], ids: list[int], options: Collection[str], where: str
) -> dict[int, dict[str, Tensor]]:
    """Return all states. Non-elementwise ones are damage if only some are; if all are, it is another optimizer."""
    kinds: dict[int, dict[str, Tensor]] = {}
    others: list[Problem] = []
    for number in ids:
        found = _read_kinds(as_dict(state[number], f"state[{number}]", where), number, where)
        if isinstance(found, Problem):
            others.append(found)
        else:
            kinds[number] = found
    if others and not kinds:
        raise another(frozenset().union(*(state[number] for number in ids)), options, where, others[0].what)
    if others:
        raise SourceError(others)
    return kinds


def _read_kinds(state: dict[Any, Any], number: int, where: str) -> dict[str, Tensor] | Problem:
    """Return one id's tensors except the step, or why they are not the states of an optimizer like Adam."""
    kinds: dict[str, Tensor] = {}
    for kind, node in state.items():
        if kind == "step":
            continue
        if as_tensor(node) is None:
            return Problem(where, f"state {kind} of id {number} is not a tensor", COPY_FILE, Code.STATE_SIZE)
        kinds[check_kind(kind, where)] = read_tensor(node, f"state[{number}][{kind}]", where)
    if "step" not in state or not kinds:
        what = f"id {number} has no {'moments' if 'step' in state else 'step of its own'}"
        return Problem(where, what, COPY_FILE, Code.STATE_SIZE)
    if integers := [kind for kind in _OF_ADAM if kind in kinds and kinds[kind].dtype not in FLOATING]:
        what = f"{integers[0]} of id {number} is {kinds[integers[0]].dtype}, not floating-point"
        raise damaged(where, what, Code.STATE_DTYPE)
    if len({tensor.shape for tensor in kinds.values()}) > 1:
        shapes = ", ".join(f"{kind} {list(tensor.shape)}" for kind, tensor in kinds.items())
        what = f"the states of id {number} have different shapes ({shapes})"
        return Problem(where, what, COPY_FILE, Code.STATE_SIZE)
    return kinds


def _some(ids: list[Any]) -> str:
    return f"id{'s' if len(ids) > 1 else ''} {some(map(str, ids), 5)}"
