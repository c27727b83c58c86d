"""The fields of a checkpoint's files that decide a training, as data, and their checks. Pure.

A table says what each field of a file may hold, whether it may be missing, and whether it is the same in the files of
all ranks. A field is a place in a file's tree, as decoded by `containers.torch_file` or `containers.json`. Each table
is next to the other checks of its file; that of an optimizer's state (torch 2.13) is here, because files with and
without DeepSpeed have one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmtailor.codes import Code
from llmtailor.containers.json import MAX_COUNT
from llmtailor.containers.unpickle import Call, Global, as_tensor, children
from llmtailor.errors import COPY_FILE, COPY_OR_ANOTHER
from llmtailor.findings import ERROR, Finding

_FIX = "a resume fails: torch.load considers it unsafe; copy the file again, or save it with plain numbers and tensors"
_LEAVES = (str, bytes, int, float, type(None))


def find_refused(tree: Any, where: str, of_numpy: frozenset[str] = frozenset()) -> list[Finding]:
    """Return findings on names that llmtailor accepts and ``torch.load`` refuses; ``of_numpy`` are not refused."""
    refused: dict[str, None] = {}
    seen: set[int] = set()
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, Global):
            module = node.module.partition(".")[0]
            if module == "deepspeed" or (module == "numpy" and node.name not in of_numpy):
                refused[str(node)] = None
        elif not isinstance(node, _LEAVES) and id(node) not in seen:
            seen.add(id(node))
            nodes += children(node)
    return [Finding(where, f"it names {name}", _FIX, Code.FIELD_TYPE, ERROR) for name in refused]


def check_file(
    tree: Any, table: Table, content: str, where: str, of_numpy: frozenset[str] = frozenset()
) -> Iterator[Finding]:
    """Yield findings on a file that a resume loads as a dict; ``content`` says what it is."""
    yield from find_refused(tree, where, of_numpy)
    if isinstance(tree, dict):
        yield from check_fields(tree, table, where)
    else:
        what, fix = f"it holds a {type(tree).__name__}, not {content}", f"a resume fails; {COPY_FILE}"
        yield Finding(where, what, fix, Code.FIELD_TYPE, ERROR)


EACH = "*"
"""In a path: every entry of a list, or every value of a dict."""
_ABSENT = object()
_WRAPPERS = ("optimizer_state_dict", "base_optimizer_state")
"""Left out at the beginning of a path in messages"""
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class FieldType:
    """What a field may hold."""

    name: str
    is_type: Callable[[Any], bool]
    is_in_range: Callable[[Any], bool] = lambda value: True


@dataclass(frozen=True, slots=True)
class Field:
    """A field that decides a training."""

    dotted: str
    """`path`, with dots"""
    type: FieldType
    if_missing: Code | None = Code.FIELD_MISSING
    """The code of the finding if it is missing; None if it may be, or the file's reader refuses that"""
    is_alike: bool = False
    """Whether it is the same in the files of all ranks"""
    severity: str = ERROR
    applies: Callable[[Any], bool] = lambda tree: True
    """Whether a tree has it at all"""

    @property
    def path(self) -> tuple[str, ...]:
        """Keys and attribute names from the root of the tree; `EACH` for every entry."""
        return tuple(self.dotted.split("."))

    @property
    def name(self) -> str:
        return format_path(self.path)


Table = tuple[Field, ...]
"""The fields of one kind of file"""


def check_fields(tree: Any, table: Table, where: str) -> Iterator[Finding]:
    """Yield a finding for every field that is missing, of another type or out of range."""
    for one in table:
        for path, value in find(tree, one.path) if one.applies(tree) else ():
            code, shown = _judge(one, value)
            if code is not None:
                yield Finding(where, f"{format_path(path)} is {shown}", COPY_OR_ANOTHER, code, one.severity)


def _judge(one: Field, value: Any) -> tuple[Code | None, str]:
    """Return what is wrong with a value, and how a message shows it; None if nothing is."""
    if value is _ABSENT:
        return one.if_missing, "missing"
    if not one.type.is_type(value):
        return Code.FIELD_TYPE, f"a {_type(value)}; expected a {one.type.name}"
    if not one.type.is_in_range(value):
        return Code.FIELD_RANGE, f"{value!r:.{_SHOWN}}; expected a {one.type.name}"
    return None, ""


def _type(value: Any) -> str:
    if isinstance(value, Call):
        return "tensor" if as_tensor(value) is not None else f"{value.func}"
    return "None" if value is None else type(value).__name__


def facts_of_rank(tree: Any, table: Table) -> dict[str, object]:
    """Return what must be alike in the files of all ranks: the field's name -> a value that compares."""
    return {
        format_path(path): _comparable(value)
        for one in table
        if one.is_alike and one.applies(tree)
        for path, value in find(tree, one.path)
    }


def find(tree: Any, path: Sequence[str]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the places that a path stands for, with their values; nothing if a step before the last one is missing.

    If only the last one is missing, the value is ``_ABSENT``, which no `FieldType` accepts.
    """
    if not path:
        yield (), tree
        return
    key, rest = path[0], path[1:]
    holder = tree.state if isinstance(tree, Call) else tree
    steps: Iterable[tuple[Any, Any]] = ()
    if key == EACH and not isinstance(tree, Call):
        steps = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    elif isinstance(holder, dict) and (key in holder or not rest):
        steps = [(key, holder.get(key, _ABSENT))]
    for name, inner in steps:
        for tail, value in find(inner, rest):
            yield (name, *tail), value


def has(tree: Any, *path: str) -> bool:
    """Whether there is something at a path."""
    return any(value is not _ABSENT for _, value in find(tree, path))


def format_path(path: Iterable[Any]) -> str:
    """Return a path in words: ``param_groups[0].lr``."""
    text, keys = "", [*path]
    while len(keys) > 1 and keys[0] in _WRAPPERS:
        keys.pop(0)
    for key in keys:
        text += f"[{key}]" if isinstance(key, int) or key == EACH else f".{key}" if text else f"{key}"
    return text


def _comparable(value: Any) -> object:
    """Return a value that compares as needed: NaN equals NaN, and a tensor's place does not matter."""
    if value is _ABSENT:
        return "absent"
    if (view := as_tensor(value)) is not None:
        return "tensor", view.storage.dtype, view.shape
    if isinstance(value, Mapping):
        return {f"{key}": _comparable(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_comparable(inner) for inner in value]
    if isinstance(value, Call):
        return f"{value.func}", _comparable(value.args), _comparable(value.state)
    return "nan" if isinstance(value, float) and value != value else value


def is_a(*types: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, types)


def is_number(value: Any) -> bool:
    """Whether this computes as a number; the value of a tensor or a numpy scalar is not read."""
    return (isinstance(value, (int, float)) and not isinstance(value, bool)) or isinstance(value, Call)


def number(name: str, accepts: Callable[[float], bool]) -> FieldType:
    """A finite number in some range."""
    return FieldType(
        name, is_number, lambda value: isinstance(value, Call) or (math.isfinite(value) and accepts(value))
    )


def count(name: str = "count", least: int = 0) -> FieldType:
    """An int that counts something."""
    return FieldType(name, lambda value: type(value) is int, lambda value: least <= value < MAX_COUNT)


FROM_ZERO = number("number >= 0", lambda value: value >= 0)
POSITIVE = number("number > 0", lambda value: value > 0)
FLAG = FieldType("flag", is_a(bool, int, type(None)))
DICT = FieldType("dict", is_a(dict))
ANYTHING = FieldType("value", lambda value: True)
BETAS = FieldType(
    "pair of numbers from 0 to below 1",
    lambda value: isinstance(value, (list, tuple)) and len(value) == 2 and all(map(is_number, value)),
    lambda value: any(map(is_a(Call), value)) or all(0 <= beta < 1 for beta in value),
)


def optimizer_fields(at: str = "") -> tuple[Field, ...]:
    """Return the fields of a state dict that lies at a path, which ends in a dot."""
    root = tuple(at.split(".")[:-1])
    group, state = f"{at}param_groups.*", f"{at}state.*"

    def of_adam(path: str, type: FieldType, code: Code = Code.FIELD_MISSING) -> Field:
        return Field(path, type, if_missing=code, applies=lambda tree: is_adam(tree, *root))

    def decays(tree: Any) -> bool:
        groups = [one for _, one in find(tree, (*root, "param_groups", EACH)) if isinstance(one, dict)]
        return is_adam(tree, *root) and not any(map(is_sparse_adams, groups))

    def of_amsgrad(tree: Any) -> bool:
        stated = [value for _, value in find(tree, (*root, "param_groups", EACH, "amsgrad"))]
        return bool(stated) and all(value is True for value in stated)

    return (
        Field(f"{group}.*", ANYTHING, is_alike=True),
        Field(f"{group}.lr", FROM_ZERO),
        of_adam(f"{group}.betas", BETAS),
        of_adam(f"{group}.eps", POSITIVE),
        Field(f"{group}.weight_decay", FROM_ZERO, applies=decays),
        *(of_adam(f"{state}.{key}", ANYTHING, Code.STATE_MISSING) for key in ("exp_avg", "exp_avg_sq")),
        Field(f"{state}.max_exp_avg_sq", ANYTHING, if_missing=Code.STATE_MISSING, applies=of_amsgrad),
    )


def is_adam(tree: Any, *at: str) -> bool:
    """Whether a state dict is of Adam; see `keeps_as_adam`."""
    return keeps_as_adam(keys_below(tree, *at, "state"), keys_below(tree, *at, "param_groups"))


ADAM_KINDS = frozenset(("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"))
TORCH_KINDS = ADAM_KINDS.union(
    ("sum", "square_avg", "grad_avg", "momentum_buffer", "acc_delta", "exp_inf", "prev", "step_size", "ax")
)
"""States of torch's other optimizers too (2.13), but for Adafactor's: all have the param's shape"""


def is_muons(hyper: Mapping[str, Any], kind: str) -> bool:
    """Return whether a state is the momentum of Muon, which DeepSpeed keeps in the dtype of the gradients."""
    return hyper.get("use_muon") is True and kind == "momentum_buffer"


def keeps_as_adam(kinds: Collection[str], options: Collection[str]) -> bool:
    """Whether an optimizer is Adam, by all kinds of its states and all options of its param groups.

    A moment that no param has means another optimizer, unless the options are those of torch's or DeepSpeed's Adam.
    Param groups without any of Adam's options mean another one, too.
    """
    has_moments = {"exp_avg", "exp_avg_sq"} <= {*kinds} and not {"betas", "eps", "weight_decay"}.isdisjoint(options)
    return ADAM_KINDS.issuperset(kinds) and (has_moments or has_adams_options(options))


def adams_first_kinds(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the kinds of state, all zeros, that Adam gives a param with its first gradient, by its group's options."""
    return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if options.get("amsgrad") else ()))


def has_adams_options(options: Collection[str]) -> bool:
    """Whether param groups have options that only torch's and DeepSpeed's Adam have together."""
    return "betas" in options and ("bias_correction" in options or {"amsgrad", "fused"} <= {*options})


def is_sparse_adams(group: Mapping[str, Any]) -> bool:
    """Return whether a param group is of torch's SparseAdam, which keeps Adam's states, but has no weight decay."""
    return {"betas", "maximize"} <= group.keys() and group.keys().isdisjoint({"amsgrad", "weight_decay"})


def keys_below(tree: Any, *at: str) -> frozenset[str]:
    """Return the keys of all dicts in the list or dict at a path."""
    return frozenset(key for _, one in find(tree, (*at, EACH)) if isinstance(one, dict) for key in one)


def decays_vectors_alone(groups: Sequence[Mapping[str, Any]], shapes: Sequence[Sequence[tuple[int, ...]]]) -> bool:
    """Whether weight decay is the wrong way round: on norms and biases alone, and not on matrices.

    ``shapes`` are those of each group's params.
    """
    decays = [group.get("weight_decay") for group in groups]
    on = [len(shape) for decay, listed in zip(decays, shapes, strict=True) if decay for shape in listed]
    off = [len(shape) for decay, listed in zip(decays, shapes, strict=True) if decay == 0 for shape in listed]
    return bool(on and off) and max(on) < 2 <= max(off)
