"""The keys of a DCP folder: which value belongs to which state. Pure.

``dcp.save`` joins the keys of nested dicts with dots, and keeps the path of each. Seen so far::

    model.<param>                                 {"model": model.state_dict()}
    <param>                                       torchtitan: the model's state dict beside the other keys
    optim.state.<param>.<kind>                    get_state_dict, FSDP.optim_state_dict
    optim.param_groups.<number>.<option>          options of a group; ``params`` lists the names of its params
    optim.param_groups.<param>.<option>           flatten_optimizer_state_dict: options of each param, no groups
    optim.param_groups                            torch 2.3 and before: the list of groups

accelerate and transformers say ``optimizer`` instead of ``optim``. All of them may be below further keys, as in
``{"app": AppState(model, optimizer)}``. The names of params are those of the model's state dict, whatever wraps its
modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from llmtailor.checkpoint.index import DcpEntry
from llmtailor.checkpoint.optimizer import ParamGroup, without_names
from llmtailor.codes import Code
from llmtailor.containers.dcp import KeyPath
from llmtailor.containers.json import check_kind
from llmtailor.errors import COPY_CHECKPOINT, Problem, SourceError, UnsupportedCheckpoint, some
from llmtailor.findings import ERROR, Finding
from llmtailor.formats.dcp.folder import Stored
from llmtailor.frameworks.stock_fields import adams_first_kinds, has_adams_options, keeps_as_adam

STATE, GROUPS = "state", "param_groups"
BUFFERS = ("llmtailor", "buffers")
"""Path of the names of buffers, in what llmtailor writes: a training saves them like params"""
TIED = ("llmtailor", "tied")
"""The same of tied names with the names that have their values: both are saved"""
_USUAL = (("optimizer",), ("optim",))
MAX_GROUPS = 100_000
_MAX_DEPTH = 8
"""Of model and optimizer in nested dicts"""
ADAMW = {
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
"""Options of torch 2.13's AdamW, and their defaults"""
_PARTIAL_LOAD = "with allow_partial_load; copy the checkpoint again"
_IN_ALL = ("lr", "initial_lr", "param_names")
"""Options that torch gives to all param groups or to none; Adam's groups have Adam's too"""


@dataclass(slots=True)
class Optimizer:
    """An optimizer's values, by the names of the params."""

    prefix: KeyPath
    """What the paths of its values begin with"""
    tensors: dict[str, dict[str, Stored]] = field(default_factory=dict)
    """Param -> kind, ``step`` included -> tensor"""
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Param -> kind -> a state that is not a tensor: a number, None"""
    groups: tuple[ParamGroup, ...] = ()
    is_flat: bool = False

    @property
    def zeroed(self) -> dict[str, tuple[str, ...]]:
        """Adam: the params without states, which it makes with the first gradient, and the kinds that it makes"""
        kinds = {kind for states in (*self.tensors.values(), *self.numbers.values()) for kind in states}
        if not keeps_as_adam(kinds - {"step"}, {option for group in self.groups for option in group.hyper}):
            return {}
        return {
            param: adams_first_kinds(group.hyper)
            for group in self.groups
            for param in group.params
            if param not in self.tensors and param not in self.numbers
        }


def sort_keys(
    tensors: Mapping[str, Stored], objects: Mapping[str, tuple[KeyPath, Any]], where: str, option: Callable[[Any], Any]
) -> tuple[Optimizer, dict[str, DcpEntry | Stored]]:
    """Return the optimizer, and everything else by key; ``option`` reads the value of a param group's option.

    Raises SourceError for options that contradict each other, and UnsupportedCheckpoint if there is no optimizer, or
    more than one.
    """
    paths = {key: stored.path for key, stored in tensors.items()} | {key: path for key, (path, _) in objects.items()}
    prefix = _find_prefix(paths, where)
    optimizer, rest = Optimizer(prefix), dict[str, DcpEntry | Stored]()
    by_number: dict[int, dict[str, Any]] = {}
    by_param: dict[str, dict[str, Any]] = {}
    for key, path in paths.items():
        section, words = _inside(path, prefix)
        value = tensors[key] if key in tensors else objects[key][1]
        if section == STATE and "." in (name := ".".join(map(str, words))):
            param, _, kind = name.rpartition(".")
            check_kind(kind, where)
            into = optimizer.tensors if isinstance(value, Stored) else optimizer.numbers
            into.setdefault(param, {})[kind] = value
        elif section == GROUPS and not words and isinstance(value, list):
            checked = [group if isinstance(group, dict) else {} for group in value]
            by_number |= {at: {key: option(one) for key, one in group.items()} for at, group in enumerate(checked)}
        elif section == GROUPS and len(words) > 1 and isinstance(words[0], int):
            by_number.setdefault(words[0], {})[".".join(map(str, words[1:]))] = option(value)
        elif section == GROUPS and "." in (name := ".".join(map(str, words))):
            param, _, last = name.rpartition(".")
            by_param.setdefault(param, {})[last] = option(value)
        elif isinstance(value, Stored):
            rest[key] = value
        else:
            rest[key] = DcpEntry(path, value)
    alike = [ParamGroup((param,), options) for param, options in by_param.items()]
    optimizer.groups = _groups(by_number, where) if by_number else tuple(merge_alike(alike))
    optimizer.is_flat = bool(by_param) and not by_number
    _check_owned(optimizer, where)
    return optimizer, rest


def _find_prefix(paths: Mapping[str, KeyPath], where: str) -> KeyPath:
    found: dict[str, dict[KeyPath, None]] = {STATE: {}, GROUPS: {}}
    for path in paths.values():
        for prefix in _beginnings(path):
            if section := _inside(path, prefix)[0]:
                found[section][prefix] = None
    # a data loader may have a ``state`` too, but no groups
    prefixes = [prefix for prefix in found[STATE] if prefix in found[GROUPS]] or [*found[STATE]]
    if not prefixes:
        what = f"it holds no optimizer states: its keys begin with {_beginning(paths.values())}"
        fix = "use a full checkpoint of the training; weights alone can't resume one"
        raise UnsupportedCheckpoint.at(where, what, fix)
    if usual := [prefix for prefix in _USUAL if prefix in prefixes]:
        return usual[0]
    prefixes = [prefix for prefix in prefixes if prefix[-1:] in _USUAL] or prefixes
    if len(prefixes) > 1:
        what = f"it holds several optimizers: {some(sorted('.'.join(map(str, prefix)) for prefix in prefixes))}"
        raise UnsupportedCheckpoint.at(where, what, "save the optimizer that you want to compose as `optim`")
    return prefixes[0]


def _beginnings(path: KeyPath) -> Iterator[KeyPath]:
    """Yield what a value may be below; longer ones would take a time that grows with the square of their length."""
    return (path[:length] for length in range(min(len(path), _MAX_DEPTH)))


def _beginning(paths: Iterable[KeyPath]) -> str:
    """Return what the keys begin with, for a message."""
    return some(dict.fromkeys(".".join(map(str, path[:2])) for path in paths))


def _inside(path: KeyPath, prefix: KeyPath) -> tuple[str, Sequence[str | int]]:
    """Return the section of a key of the optimizer, ``state`` or ``param_groups``, and the rest of its path."""
    if path[: len(prefix)] != prefix or len(path) == len(prefix):
        return "", ()
    first, *others = path[len(prefix) :]
    for section in (STATE, GROUPS):
        if first == section:
            return section, others
        if isinstance(first, str) and first.startswith(f"{section}."):  # flattened
            return section, (first.removeprefix(f"{section}."), *others)
    return "", ()


def _groups(by_number: Mapping[int, Mapping[str, Any]], where: str) -> tuple[ParamGroup, ...]:
    groups = []
    if not 0 <= min(by_number) <= max(by_number) < MAX_GROUPS:
        raise SourceError.at(where, "the numbers of its param groups are not those of a list", COPY_CHECKPOINT)
    for number in range(max(by_number) + 1):
        options = dict(by_number.get(number, {}))
        params = options.pop("params", None)
        if not isinstance(params, list) or not all(isinstance(param, str) for param in params):
            what = f"param group {number} does not list the names of its params"
            raise SourceError.at(where, what, COPY_CHECKPOINT, Code.FIELD_MISSING)
        groups.append(ParamGroup(tuple(params), options))
    return tuple(groups)


def merge_alike(groups: Iterable[ParamGroup]) -> list[ParamGroup]:
    """Return groups with equal options as one, in order of appearance. Lists of names are left out."""
    merged: list[ParamGroup] = []
    for group in (ParamGroup(one.params, without_names(one.hyper)) for one in groups):
        at = next((at for at, one in enumerate(merged) if one.hyper == group.hyper), None)
        if at is None:
            merged.append(group)
        else:
            merged[at] = ParamGroup((*merged[at].params, *group.params), group.hyper)
    return merged


def _check_owned(optimizer: Optimizer, where: str) -> None:
    owned = Counter(param for group in optimizer.groups for param in group.params)
    states = {**optimizer.numbers, **optimizer.tensors}
    problems = []
    if twice := [param for param, count in owned.items() if count > 1]:
        what = f"the param groups own {some(twice)} twice"
        problems.append(Problem(where, what, COPY_CHECKPOINT, Code.FIELD_CONFLICT))
    stateless = [(group, [param for param in group.params if param not in states]) for group in optimizer.groups]
    # an optimizer may keep nothing of a whole group, as SGD without momentum
    lost = [param for group, lacking in stateless if len(lacking) < len(group.params) for param in lacking]
    if lost and not optimizer.zeroed:
        what = f"the optimizer has no states of {some(lost)}: they had no gradient yet, or were lost"
        fix = "use a checkpoint of a later step, or train them in a param group of their own"
        problems.append(Problem(where, what, fix, Code.STATE_MISSING))
    if extra := [param for param in states if param not in owned]:
        what = f"it holds the optimizer states of {some(extra)}, which are in no param group"
        problems.append(Problem(where, what, COPY_CHECKPOINT, Code.FIELD_UNKNOWN))
    if problems:
        raise SourceError(problems)


def check_options(optimizer: Optimizer, where: str) -> Iterator[Finding]:
    """Yield a finding for each option that some param groups lack: ``dcp.load`` raises for keys that are not there.

    Groups with other states may have other options, as with Muon for the matrices and Adam for the rest.
    """
    kinds = [{*chain(*(optimizer.tensors.get(param, ()) for param in group.params))} for group in optimizer.groups]
    if any(one != kinds[0] for one in kinds):
        return
    is_adam = has_adams_options({option for group in optimizer.groups for option in group.hyper})
    # others may have an option of their user in some groups, as weight_decay without a use for it
    for key in (*_IN_ALL, *(ADAMW if is_adam else ())):
        lacking = [number for number, group in enumerate(optimizer.groups) if key not in group.hyper]
        if 0 < len(lacking) < len(optimizer.groups):
            what = f"{key} of param group {lacking[0]} is missing, which other groups have"
            yield Finding(where, what, f"a resume fails; {COPY_CHECKPOINT}", Code.FIELD_MISSING, ERROR)


def split_model(
    rest: Mapping[str, DcpEntry | Stored], trained: Iterable[str], where: str, *, root: KeyPath, is_alone: bool
) -> tuple[KeyPath, dict[str, Stored], dict[str, DcpEntry]]:
    """Return what the paths of the model begin with, its tensors by name, and everything else by key.

    All paths of the training begin with ``root``. ``is_alone`` says that only the model is in these keys. Raises
    SourceError for missing weights.
    """
    trained = list(trained)
    tensors = {key: value for key, value in rest.items() if isinstance(value, Stored)}
    counts: dict[KeyPath, int] = {(): 0}
    names = {*trained}
    for stored in tensors.values():
        for prefix in _beginnings(stored.path):
            counts[prefix] = counts.get(prefix, 0) + (".".join(map(str, stored.path[len(prefix) :])) in names)
    prefix = max(counts, key=lambda one: (counts[one], one[:-1] == root, one[-1:] == ("model",)))
    model = {
        ".".join(map(str, stored.path[len(prefix) :])): stored
        for stored in tensors.values()
        if stored.path[: len(prefix)] == prefix and (prefix or is_alone or len(stored.path) == 1)
    }
    if trained and not counts[prefix]:
        others = (
            f"its other keys begin with {_beginning(value.path for value in rest.values())}"
            if rest
            else "no other keys"
        )
        what = f"it holds no weights under the names that its optimizer has, such as {trained[0]}: {others}"
        fix = "save the model's state_dict() beside the optimizer's, under the same names"
        raise SourceError.at(where, what, fix, Code.STATE_MISSING)
    if lost := [param for param in trained if param not in model]:
        what = f"the weights of {some(lost)} are missing"
        fix = f"a resume fails, or silently keeps their initial values {_PARTIAL_LOAD}"
        raise SourceError.at(where, what, fix, Code.STATE_MISSING)
    taken = {id(stored) for stored in model.values()}
    return prefix, model, carried({key: value for key, value in rest.items() if id(value) not in taken})


def carried(rest: Mapping[str, DcpEntry | Stored]) -> dict[str, DcpEntry]:
    """Return values that belong to neither model nor optimizer."""
    return {key: _carried(value) if isinstance(value, Stored) else value for key, value in rest.items()}


def _carried(stored: Stored) -> DcpEntry:
    boxes = tuple((chunk.offsets, chunk.sizes, extent) for chunk, extent in stored.boxes())
    return DcpEntry(stored.path, (stored.held.dtype, stored.held.shape, boxes), is_tensor=True)
