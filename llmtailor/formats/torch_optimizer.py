"""``optimizer.pt`` as data (a torch optimizer's state dict, with its params as bare ids), and its checks. Pure.

::

    state          {id: {step, exp_avg, exp_avg_sq}}       of Adam, tensors in the shape and dtype of the param
    param_groups   [{lr, betas, .., params: [ids]}]        an extra key may list the params' names

A stock resume checks little more than the number of ids: swapped states stay swapped in training (reading out of
bounds if their shapes differ), which is refused here. A param that has had no gradient yet has no state, and before the
first step none has. Adam would start from zeros, so these are its moments here, at step 0.

What other optimizers keep is read as it is, see `checkpoint.schema`: tensors of any shape, and scalars. Params may have
different kinds of state, as with Muon for the matrices and Adam for the rest.
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
    Tensor,
    Trees,
    as_dict,
    check_kind,
    check_name,
    get,
    is_name,
    read_option,
    read_step,
    read_tensor,
)
from llmtailor.containers.unpickle import Quantized, as_ints, as_tensor
from llmtailor.errors import COPY_FILE, PathIn, Problem, SourceError, UnsupportedCheckpoint, damaged, some
from llmtailor.findings import ERROR, Finding
from llmtailor.formats.optimizer_objects import flattened, naming_others, refuse_objects
from llmtailor.frameworks.stock_fields import (
    EACH,
    TORCH_KINDS,
    Field,
    FieldType,
    Table,
    check_fields,
    decays_vectors_alone,
    find_refused,
    has,
    has_adams_options,
    is_adam,
    is_number,
    keeps_as_adam,
    keys_below,
    optimizer_fields,
)
from llmtailor.model.dtypes import FLOATING

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
SHAPED_AS_PARAM = frozenset(("exp_avg", "state2", "z"))
"""States that have the shape of the param wherever they occur beside others: Adafactor's and CAME's first moment,
bitsandbytes' second state, and the point that schedule-free optimizers move"""


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """A param group: its ids in order, and their names, if listed."""

    ids: tuple[int, ...]
    names: tuple[str, ...] | None
    hyper: Mapping[str, Any]
    """Everything else, the lists of names included"""


@dataclass(frozen=True, slots=True)
class SavedOptimizer:
    """The content of ``optimizer.pt``."""

    groups: tuple[SavedGroup, ...]
    kinds: Mapping[int, Mapping[str, Tensor]]
    """id -> kind -> tensor. Empty for a param that has had no gradient yet, or of which the optimizer keeps nothing"""
    scalars: Mapping[int, Mapping[str, Any]]
    """id -> kind -> a number, None, or the node of a tensor without dimensions; without the step"""
    steps: Mapping[int, float | None]
    """0 for a param of Adam that has had no gradient yet; None for one whose steps are not counted"""
    step_is_tensor: bool
    step_dtype: str = "F32"
    findings: tuple[Finding, ...] = ()
    """What makes a resume fail, or change, without preventing reading"""
    is_zeroed: bool = False
    """Whether it is Adam, so that a param without states gets zeros with its first gradient"""

    def shape(self, number: int) -> tuple[int, ...] | None:
        """Return the shape of the param with this id; None if its states don't show it."""
        kinds = self.kinds[number]
        shapes = {tensor.shape for kind, tensor in kinds.items() if not kind.endswith(("_row", "_col"))}
        if len(shapes) > 1 or not SHAPED_AS_PARAM.isdisjoint(kinds):
            shapes = {kinds[kind].shape for kind in SHAPED_AS_PARAM if kind in kinds}
        return next(iter(shapes)) if len(shapes) == 1 else None


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
        refuse_objects(kept, where)
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


def _read(root: Path, tree: Any, where: str) -> SavedOptimizer:
    state = get(tree, "state", dict, where)
    groups = _with_own_names([_read_group(root, group, where) for group in get(tree, "param_groups", list, where)])
    ids = [number for group in groups for number in group.ids]
    _check_ids(ids, state, where)
    options = keys_below(tree, "param_groups")
    nodes = {number: as_dict(state[number], f"state[{number}]", where) for number in ids if number in state}
    kinds = {number: _read_kinds(node, number, where) for number, node in nodes.items()}
    scalars = {number: _read_scalars(root, node, kinds[number], where) for number, node in nodes.items()}
    counted = {number: node["step"] for number, node in nodes.items() if "step" in node}
    _check_kinds(kinds, scalars, counted, groups, where)
    known = frozenset().union(*kinds.values(), *scalars.values())
    is_zeroed = keeps_as_adam(known, options) if known else has_adams_options(options)
    steps = {number: read_step(root, node, number, where) for number, node in counted.items()}
    step = next((view for node in counted.values() if (view := as_tensor(node)) is not None), None)
    return SavedOptimizer(
        groups,
        {number: kinds.get(number, {}) for number in ids},
        {number: scalars.get(number, {}) for number in ids},
        {number: steps.get(number, 0.0 if is_zeroed and number not in nodes else None) for number in ids},
        all(as_tensor(node) for node in counted.values()),
        "F32" if step is None else step.storage.dtype,
        is_zeroed=is_zeroed,
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


def _with_own_names(groups: Sequence[SavedGroup]) -> tuple[SavedGroup, ...]:
    """Return the groups; if each has one param and its own ``name``, as Adam-mini's have, with these as names."""
    stated = [group.hyper.get("name") for group in groups if len(group.ids) == 1]
    names = [str(name) for name in stated if is_name(name)]
    if len(set(names)) < len(groups) or len(groups) < 3 or any(group.names is not None for group in groups):
        return tuple(groups)
    return tuple(replace(group, names=(name,)) for group, name in zip(groups, names, strict=True))


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


def _read_kinds(state: dict[Any, Any], number: int, where: str) -> dict[str, Tensor]:
    """Return one id's tensors, without those that have no dimensions if others have; of quantized ones the inner
    tensors, as ``exp_avg.codes``."""
    state = with_inner(state)
    views = {kind: view for kind, node in state.items() if kind != "step" and (view := as_tensor(node)) is not None}
    has_dims = any(view.shape for view in views.values())
    kinds = {
        check_kind(kind, where): read_tensor(state[kind], f"state[{number}][{kind}]", where)
        for kind, view in views.items()
        if view.shape or not has_dims
    }
    if integers := [kind for kind in _OF_ADAM if kind in kinds and kinds[kind].dtype not in FLOATING]:
        what = f"{integers[0]} of id {number} is {kinds[integers[0]].dtype}, not floating-point"
        raise damaged(where, what, Code.STATE_DTYPE)
    return kinds


def _read_scalars(root: Path, state: dict[Any, Any], kinds: Collection[str], where: str) -> dict[str, Any]:
    scalars = {}
    for kind, value in state.items():
        if found := Quantized.of(value):
            scalars[check_kind(kind, where)] = found[0]
        elif kind != "step" and kind not in kinds:
            scalars[check_kind(kind, where)] = read_option(root, value, where)
    return scalars


def with_inner(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the states of a param with inner tensors in place of quantized ones."""
    found: dict[Any, Any] = {}
    for kind, value in state.items():
        quantized = Quantized.of(value)
        found |= {f"{kind}.{name}": one for name, one in quantized[1].items()} if quantized else {kind: value}
    return found


def deciding_options(hyper: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return whether a param group has each of the options that decide which states its params have."""
    return tuple(bool(hyper.get(option)) for option in ("amsgrad", "momentum", "centered", "use_muon"))


def _check_kinds(
    kinds: Mapping[int, Mapping[str, Tensor]],
    scalars: Mapping[int, Mapping[str, Any]],
    counted: Collection[int],
    groups: Sequence[SavedGroup],
    where: str,
) -> None:
    """Raise SourceError for states that are missing, or have another shape than others of the same param.

    An optimizer may keep other kinds of state for some params. Damage is what it never does: to keep less for a param
    than for another if all of it is elementwise or scalar, to count steps of some params with the same states only,
    and, of Adam and torch's other elementwise optimizers, states in another shape than the param's.
    """
    problems: list[Problem] = []
    options = {option for group in groups for option in group.hyper}
    decided = {number: deciding_options(group.hyper) for group in groups for number in group.ids}
    of_tensors = frozenset().union(*kinds.values())
    is_adam = keeps_as_adam(of_tensors, options)
    for number, tensors in kinds.items():
        shapes = {tensor.shape for tensor in tensors.values()}
        if single := scalars[number].keys() & {*_OF_ADAM} if has_adams_options(options) else ():
            problems.append(
                Problem(where, f"{min(single)} of id {number} is a single value", COPY_FILE, Code.STATE_SIZE)
            )
        if len(shapes) > 1 and (is_adam or TORCH_KINDS.issuperset(tensors)):
            listed = ", ".join(f"{kind} {list(tensor.shape)}" for kind, tensor in tensors.items())
            what = f"the states of id {number} have different shapes ({listed})"
            fix = f"{COPY_FILE}; an optimizer of your own that keeps them so needs other names for them than Adam's"
            problems.append(Problem(where, what, fix, Code.STATE_SIZE))
    by_kinds: dict[tuple[tuple[bool, ...], frozenset[str]], list[int]] = {}
    for number, tensors in kinds.items():
        plain = {kind for kind, value in scalars[number].items() if isinstance(value, (int, float))}
        # a number in place of a tensor that others have is damage
        have = frozenset((*tensors, *scalars[number])) - (plain & of_tensors)
        by_kinds.setdefault((decided[number], have), []).append(number)
    are_elementwise = all(len({tensor.shape for tensor in tensors.values()}) < 2 for tensors in kinds.values())
    for (by, have), numbers in by_kinds.items():
        uncounted = [number for number in numbers if number not in counted] if have else []
        # an optimizer of one's own may keep what Adam does, and count elsewhere
        needs_step = is_adam and has_adams_options(options) and "step" not in options
        if uncounted and (len(uncounted) < len(numbers) or needs_step):
            what = f"{_some(uncounted)} has no step of its own"
            problems.append(Problem(where, what, COPY_FILE, Code.STATE_MISSING))
        others = [other for decided_by, other in by_kinds if decided_by == by and have < other]
        if lacking := {kind for other in others for kind in other - have} if are_elementwise else ():
            what = f"the state of {_some(numbers)} lacks {some(sorted(lacking))}, which others have"
            problems.append(Problem(where, what, COPY_FILE, Code.STATE_MISSING))
    if problems:
        raise SourceError(problems)


def _some(ids: list[Any]) -> str:
    return f"id{'s' if len(ids) > 1 else ''} {some(map(str, ids), 5)}"
