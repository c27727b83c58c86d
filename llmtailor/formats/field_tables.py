"""What a stock resume reads, field by field, as data, and the checks that this drives. Pure.

A table says of every field of a file what it may hold, who reads it, and what stock software does where it is wrong: if
it is missing, has another type, has a value that no run has, or differs between the ranks' files. Where the table says
nothing, stock does not mind, or it cannot happen. A field is a place in a file's tree, as decoded by
`containers.torch_zip` or `containers.json`. docs/findings.md is made from the tables, and so are the damages of
tests/verify/test_fields.py. Each table is beside the other checks of its file; that of an optimizer's state (torch
2.13) is here, because files with DeepSpeed and without have it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmtailor.codes import Code
from llmtailor.containers.json import MAX_COUNT
from llmtailor.containers.pickle_nodes import Call, as_tensor
from llmtailor.errors import COPY_OR_ANOTHER
from llmtailor.findings import ERROR, WARNING, Finding

EACH = "*"
"""In a path: every entry of a list, or every value of a dict."""
MISSING, MISTYPED, BEYOND, UNLIKE = "missing", "of another type", "out of range", "different between ranks"
CODES = {
    MISSING: Code.FIELD_MISSING,
    MISTYPED: Code.FIELD_TYPE,
    BEYOND: Code.FIELD_RANGE,
    UNLIKE: Code.RANKS_DIFFER,
}
WAYS = tuple(CODES)
_ABSENT = object()
_WRAPPERS = ("optimizer_state_dict", "base_optimizer_state")
"""Not spelt out at the beginning of a path"""
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Says:
    """What stock does about a field that is off in one way, and how much that matters."""

    stock: str
    severity: str = ERROR
    read: bool = False
    """Told from the source only; else a resume was tried."""
    code: Code | None = None
    """Where the finding has another code than `CODES` gives: the reader of the file tells it."""


def warns(stock: str, read: bool = False) -> Says:
    return Says(stock, WARNING, read)


@dataclass(frozen=True, slots=True)
class Kind:
    """What a field may hold."""

    name: str
    is_type: Callable[[Any], bool]
    mistyped: tuple[Any, ...] = ()
    """Samples of what it may not be, for tests"""
    is_in_range: Callable[[Any], bool] = lambda value: True
    beyond: tuple[Any, ...] = ()
    """Samples of the right type and out of range, for tests"""
    other: Callable[[Any], Any] | None = None
    """Gives another value that would do, for tests"""


@dataclass(frozen=True, slots=True)
class Field:
    """A field that a stock resume reads."""

    path: tuple[str, ...]
    """Keys and attribute names from the root of the tree; `EACH` for every entry."""
    kind: Kind
    read_by: str
    """Where in which package"""
    off: Mapping[str, Says]
    """The way in which it is off -> what stock does"""
    told_by_reader: frozenset[str]
    """Ways that the file's reader refuses by itself, since without the field nothing can be made of the file"""
    only: str
    """In words: which files have it at all"""
    applies: Callable[[Any], bool]
    """The same for a tree"""

    def says(self, way: str) -> Says | None:
        return self.off.get(way)

    @property
    def name(self) -> str:
        return spell(self.path)


def field(
    path: str,
    kind: Kind,
    read_by: str,
    missing: Says | str = "",
    mistyped: Says | str = "",
    beyond: Says | str = "",
    unlike: Says | str = "",
    *,
    told_by_reader: Iterable[str] = (),
    only: str = "",
    applies: Callable[[Any], bool] = lambda tree: True,
) -> Field:
    """Return a field. Its path is given with dots, and what stock does as text, where it is an error."""
    ways = zip(WAYS, (missing, mistyped, beyond, unlike), strict=True)
    off = {way: Says(one) if isinstance(one, str) else one for way, one in ways if one}
    return Field(tuple(path.split(".")), kind, read_by, off, frozenset(told_by_reader), only, applies)


@dataclass(frozen=True, slots=True)
class Table:
    """The fields of one kind of file."""

    title: str
    file: str
    """Its name, as docs have it"""
    fields: tuple[Field, ...]
    unchecked: tuple[tuple[str, str], ...] = ()
    """Fields that a resume reads and `verify` does not check, and why; or that look as if they mattered, and don't"""


def check_fields(tree: Any, table: Table, where: str) -> Iterator[Finding]:
    """Yield a finding for every field that is off in a file by itself."""
    for one in table.fields:
        for path, value in find(tree, one.path) if one.applies(tree) else ():
            way, shown = _judge(one.kind, value)
            says = one.says(way)
            if says is not None and way not in one.told_by_reader:
                fix = f"{says.stock}; {COPY_OR_ANOTHER}"
                yield Finding(where, f"{spell(path)} is {shown}", fix, says.code or CODES[way], says.severity)


def _judge(kind: Kind, value: Any) -> tuple[str, str]:
    """Return in which way a value is off, and how a message shows it; empty if it is not."""
    if value is _ABSENT:
        return MISSING, "missing"
    if not kind.is_type(value):
        return MISTYPED, f"a {_type(value)}, and no {kind.name}"
    return ("", "") if kind.is_in_range(value) else (BEYOND, f"{value!r:.{_SHOWN}}, and no {kind.name}")


def _type(value: Any) -> str:
    if isinstance(value, Call):
        return "tensor" if as_tensor(value) is not None else f"{value.func}"
    return "None" if value is None else type(value).__name__


def facts_of_rank(tree: Any, table: Table) -> dict[str, object]:
    """Return what must be alike in the files of all ranks: the field's name -> a value that compares."""
    return {
        spell(path): _comparable(value)
        for one in table.fields
        if UNLIKE in one.off and one.applies(tree)
        for path, value in find(tree, one.path)
    }


def find(tree: Any, path: Sequence[str]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the places that a path stands for, with what is there; where the way leads nowhere, nothing.

    The last step alone may be absent: then a mark that no kind takes for a value is yielded.
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


def spell(path: Iterable[Any]) -> str:
    """Return a path in words: ``param_groups[0].lr``."""
    text, keys = "", [*path]
    while len(keys) > 1 and keys[0] in _WRAPPERS:
        keys.pop(0)
    for key in keys:
        text += f"[{key}]" if isinstance(key, int) or key == EACH else f".{key}" if text else f"{key}"
    return text


def _comparable(value: Any) -> object:
    """Return something that equals the same of an equal value: NaN equals NaN, and where a tensor lies is no matter."""
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


NAN, INF = math.nan, math.inf


def is_a(*types: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, types)


def is_number(value: Any) -> bool:
    """Whether this computes as a number; what a tensor or a numpy scalar holds can't be told without reading it."""
    return (isinstance(value, (int, float)) and not isinstance(value, bool)) or isinstance(value, Call)


def number(
    name: str,
    accepts: Callable[[float], bool] = lambda value: True,
    beyond: tuple[float, ...] = (),
    other: Callable[[Any], Any] = lambda value: value * 3 + 1,
) -> Kind:
    """A finite number in some range."""

    def is_in_range(value: Any) -> bool:
        return isinstance(value, Call) or (math.isfinite(value) and accepts(value))

    return Kind(name, is_number, ("0.1", None, [0.1]), is_in_range, (NAN, INF, *beyond), other)


def count(name: str = "count", least: int = 0) -> Kind:
    """An int that counts something."""
    return Kind(
        name,
        lambda value: type(value) is int,
        ("4", None, 4.5),
        lambda value: least <= value < MAX_COUNT,
        (least - 1, MAX_COUNT),
        lambda value: value + 1,
    )


def optional(kind: Kind) -> Kind:
    """The same, or None."""
    return Kind(
        f"{kind.name} or null",
        lambda value: value is None or kind.is_type(value),
        tuple(value for value in kind.mistyped if value is not None),
        lambda value: value is None or kind.is_in_range(value),
        kind.beyond,
        kind.other,
    )


def _are_betas(value: Any) -> bool:
    first, second = value
    return any(map(is_a(Call), value)) or (0 <= first < 1 and 0 <= second < 1 and first**2 <= second)


FINITE = number("finite number")
FROM_ZERO = number("number from 0 up", lambda value: value >= 0, (-1.0,), lambda value: value * 3 + 0.1)
POSITIVE = number("number above 0", lambda value: value > 0, (0.0, -1.0))
FLAG = Kind("flag", is_a(bool, int, type(None)), ("no", [0.1]), other=lambda value: not value)
DICT = Kind("dict", is_a(dict), (None, [], "x"))
LIST = Kind("list", is_a(list, tuple), (None, {}, "x"))
ANYTHING = Kind("value", lambda value: True)
BETAS = Kind(
    "pair of numbers from 0 to below 1, the first squared not above the second",
    lambda value: isinstance(value, (list, tuple)) and len(value) == 2 and all(map(is_number, value)),
    (None, 0.9, (0.9,), (0.9, "0.999")),
    _are_betas,
    ((NAN, 0.999), (0.999, 0.9), (0.9, 1.0), (-0.1, 0.999), (0.9, INF)),
    lambda value: (value[0] / 2, value[1]),
)

FAILS, FAILS_AT_STEP = "a resume fails", "a resume fails at the first step"
FAILS_AT_END = "a resume fails at the end of the first step"
OTHER_RUN = "resumes; but the file is of another save or run than those of the other ranks"
_LOAD, _STEP = "torch.optim.Optimizer.load_state_dict", "torch.optim.AdamW.step"
_BY_DEFAULT = "torch.optim.Adam.__setstate__"
_EVERY_RANK_BY_ITS_OWN = "silent: every rank trains with its own value"
_HYPER = (FAILS_AT_STEP, FAILS_AT_STEP, "silent: the weights become NaN, or move uphill", _EVERY_RANK_BY_ITS_OWN)


def optimizer_fields(at: str = "") -> tuple[Field, ...]:
    """Return the fields of a state dict that lies at a path, which ends in a dot."""
    root = tuple(at.split(".")[:-1])
    group, state = f"{at}param_groups.*", f"{at}state.*"

    def of_adam(path: str, kind: Kind, read_by: str, *off: Says | str, **ways: Says | str) -> Field:
        adam = "Adam and its variants"
        return field(path, kind, read_by, *off, **ways, only=adam, applies=lambda tree: is_adam(tree, *root))  # type: ignore[arg-type]

    def of_amsgrad(tree: Any) -> bool:
        return any(value is True for _, value in find(tree, (*root, "param_groups", EACH, "amsgrad")))

    lost = Says(FAILS_AT_STEP, code=Code.STATE_MISSING)
    by_rank = "silent, or it fails on that rank and the others wait"
    flags = ("amsgrad", "maximize", "differentiable"), ("decoupled_weight_decay", "foreach", "capturable", "fused")
    return (
        field(f"{at}param_groups", LIST, _LOAD, FAILS, FAILS),
        field(f"{at}state", DICT, _LOAD, FAILS, FAILS),
        field(f"{group}.params", LIST, _LOAD, FAILS, FAILS),
        field(f"{group}.lr", FROM_ZERO, _STEP, *_HYPER),
        of_adam(f"{group}.betas", BETAS, _STEP, *_HYPER),
        of_adam(f"{group}.eps", POSITIVE, _STEP, *_HYPER),
        of_adam(f"{group}.weight_decay", FROM_ZERO, _STEP, *_HYPER),
        field(
            f"{group}.bias_correction",
            FLAG,
            "deepspeed.ops.adam.DeepSpeedCPUAdam.step",
            FAILS_AT_STEP,
            unlike=_EVERY_RANK_BY_ITS_OWN,
            only="DeepSpeedCPUAdam",
            applies=lambda tree: is_cpu_adam(tree, *root),
        ),
        field(f"{group}.initial_lr", FROM_ZERO, "nothing: the scheduler has base_lrs", unlike=OTHER_RUN),
        *(of_adam(f"{group}.{key}", FLAG, _BY_DEFAULT, mistyped=FAILS_AT_STEP, unlike=by_rank) for key in flags[0]),
        *(of_adam(f"{group}.{key}", FLAG, _BY_DEFAULT, unlike=OTHER_RUN) for key in flags[1]),
        *(of_adam(f"{state}.{key}", ANYTHING, _STEP, lost) for key in ("exp_avg", "exp_avg_sq")),
        field(f"{state}.max_exp_avg_sq", ANYTHING, _STEP, lost, only="with amsgrad", applies=of_amsgrad),
    )


def is_adam(tree: Any, *at: str) -> bool:
    """Whether a state dict is of Adam; see `keeps_as_adam`."""
    return keeps_as_adam(keys_below(tree, *at, "state"), keys_below(tree, *at, "param_groups"))


ADAM_KINDS = frozenset(("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"))


def keeps_as_adam(kinds: Collection[str], options: Collection[str]) -> bool:
    """Whether an optimizer is Adam, by all kinds of its states and all options of its param groups.

    A moment that no param has tells another optimizer, unless the options are those of torch's or DeepSpeed's Adam.
    """
    return ADAM_KINDS.issuperset(kinds) and ({"exp_avg", "exp_avg_sq"} <= {*kinds} or has_adams_options(options))


def has_adams_options(options: Collection[str]) -> bool:
    """Whether param groups have options that only torch's and DeepSpeed's Adam have together."""
    return "betas" in options and ("bias_correction" in options or {"amsgrad", "fused"} <= {*options})


def keys_below(tree: Any, *at: str) -> frozenset[str]:
    """Return the keys of all dicts in the list or dict at a path."""
    return frozenset(key for _, one in find(tree, (*at, EACH)) if isinstance(one, dict) for key in one)


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
    decays = [group.get("weight_decay") for group in groups]
    on = [len(shape) for decay, listed in zip(decays, shapes, strict=True) if decay for shape in listed]
    off = [len(shape) for decay, listed in zip(decays, shapes, strict=True) if decay == 0 for shape in listed]
    return bool(on and off) and max(on) < 2 <= max(off)
