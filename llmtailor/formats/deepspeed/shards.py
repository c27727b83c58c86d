"""One rank's two files of a ZeRO checkpoint, decoded into checked facts.

Key trees, verified against DeepSpeed 0.19.8. ``optim_states``, one per rank, of ZeRO-3::

    optimizer_state_dict
      zero_stage, loss_scaler, dynamic_loss_scale, overflow, partition_count
      optimizer_state_dict    {state: {sub-group: {step, exp_avg, exp_avg_sq}}, param_groups: [{.., params: [..]}]}
      fp32_flat_groups        [flat tensor per sub-group]
    ds_config, ds_version

and of ZeRO-1 and ZeRO-2::

    optimizer_state_dict
      loss_scaler, dynamic_loss_scale, overflow, clip_grad
      base_optimizer_state                {state: {group: {step, exp_avg, exp_avg_sq}}, param_groups}
      single_partition_of_fp32_groups     [this rank's partition of each group's masters]
      zero_stage, group_paddings, param_alignment_paddings, partition_count [one per group], param_slice_mappings

Variants of the latter: BF16_Optimizer (ZeRO-1 with fp32 gradient accumulation) has neither ``zero_stage`` nor
``loss_scaler``, and its master weights keep their padding; elastic checkpoints have a list as ``base_optimizer_state``,
without param groups, and strip the moments too.

``model_states``: ``module``, ``param_shapes`` (one dict per sub-group, in the order of the flat tensors),
``frozen_param_shapes`` and ``frozen_param_fragments``, ``shared_params``, counters. ZeRO-3 has a file per rank, with
empty placeholders for params in ``module``, and full buffers; ZeRO-1/2 have one file for all ranks, with everything in
full.

`ShardReader` reads the files of all ranks. Files with the same bytes apart from the archive's name and tensor data, as
most ranks of ZeRO-3 have, are decoded once and share the result.

The tables list the fields that decide a training, except those that the readers refuse themselves: see
`frameworks.stock_fields`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from llmtailor.checkpoint.index import BF16_OPTIMIZER, ELASTIC, PLAIN
from llmtailor.codes import Code
from llmtailor.containers import json as decoding
from llmtailor.containers.json import Tensor, Trees, as_dict, check_name, get, get_count, is_count, read_tensor
from llmtailor.containers.torch_file import TorchFile
from llmtailor.containers.unpickle import Call, Ordered, Storage, as_ints, as_tensor, children
from llmtailor.errors import COPY_CHECKPOINT, AnotherOptimizer, PathIn, Problems, SourceError, counted, damaged, some
from llmtailor.findings import Finding
from llmtailor.formats.deepspeed.autotp import check_has_map
from llmtailor.formats.deepspeed.files import STATE_KEYS, ShardFiles, check_archive, unsupported_parallelism
from llmtailor.formats.optimizer_objects import flattened, naming_others, refuse_objects
from llmtailor.frameworks.scheduler import SchedulerFacts, read_scheduler
from llmtailor.frameworks.stock_fields import (
    ANYTHING,
    FLAG,
    FROM_ZERO,
    Field,
    FieldType,
    Table,
    check_fields,
    count,
    facts_of_rank,
    find,
    has_adams_options,
    is_a,
    keeps_as_adam,
    number,
    optimizer_fields,
)
from llmtailor.model.roles import MASTER

_OUTER = "optimizer_state_dict"
_SCALER_CLASSES = {"LossScaler", "DynamicLossScaler"}
_MOST_SCALE = 2.0**64
"""Any loss overflows in fp16 for dozens of steps if the loss scale is larger"""


def _class_of(value: Any) -> str:
    return getattr(value.func, "name", "") if isinstance(value, Call) else ""


def _is_dynamic(tree: Any) -> bool:
    return any(_class_of(one) == "DynamicLossScaler" for _, one in find(tree, (_OUTER, "loss_scaler")))


_SCALER = FieldType("loss scaler", lambda value: _class_of(value) in _SCALER_CLASSES)
_SCALE = number(f"number > 0, up to {_MOST_SCALE:g}", lambda value: 0 < value <= _MOST_SCALE)
_SCALER_FIELDS = (
    Field(f"{_OUTER}.loss_scaler", _SCALER, if_missing=None),
    Field(f"{_OUTER}.loss_scaler.cur_scale", _SCALE, is_alike=True),
    Field(f"{_OUTER}.loss_scaler.cur_iter", count(), is_alike=True, applies=_is_dynamic),
    Field(f"{_OUTER}.loss_scaler.scale_window", count("count from 1 up", 1), is_alike=True, applies=_is_dynamic),
)

ZERO3: Table = (
    *_SCALER_FIELDS,
    Field(f"{_OUTER}.dynamic_loss_scale", FLAG, is_alike=True),
    *optimizer_fields(f"{_OUTER}.optimizer_state_dict."),
)

ZERO12: Table = (
    *_SCALER_FIELDS,
    Field(f"{_OUTER}.dynamic_loss_scale", FLAG, if_missing=None, is_alike=True),
    Field(f"{_OUTER}.clip_grad", FROM_ZERO, if_missing=None, is_alike=True),
    Field(f"{_OUTER}.ds_version", FieldType("version", is_a(str)), if_missing=Code.VERSION_MISSING),
    *optimizer_fields(f"{_OUTER}.base_optimizer_state."),
)

MODEL: Table = (
    Field("mp_world_size", ANYTHING),
    Field("global_samples", count(), if_missing=None, is_alike=True),
    Field("lr_scheduler", ANYTHING, if_missing=None, is_alike=True),
    Field("lr_scheduler.last_batch_iteration", count("step", -1), if_missing=None),
)


_EXTRA = "_extra_state"
"""torch's name for what a module keeps besides tensors"""
STATES = frozenset(
    (*chain(*STATE_KEYS.values()), "group_paddings", "param_slice_mappings", "partition_count", "zero_stage")
)
"""Keys of ``optimizer_state_dict`` that depend on the layout"""
OF_SHARDS = frozenset(
    (
        *("Adam's step", "the kinds of optimizer state", "the dtype of a state", "param_alignment_paddings"),
        *("the order, names or shapes of params (param_shapes)", "the set of frozen params"),
        *("the set or dtypes of frozen fragments", "the set, shapes or dtypes of buffers"),
    )
)
"""Facts that are alike on the data-parallel ranks, but not on tensor-parallel ones, which have other shards"""
_PARAMS = frozenset(("module", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params"))


@dataclass(frozen=True, slots=True)
class DecodedShard:
    """What is decoded from a rank's file. Ranks whose files are alike share one."""

    path: str
    """The file that it was decoded from"""
    rest: Mapping[str, Any]
    """The tree without states, params and buffers"""
    facts: Mapping[str, object]
    """What must be alike in the files of all ranks"""
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class OptimShard(DecodedShard):
    """The content of one rank's ``optim_states``, or what a universal checkpoint has of it.

    A group of ZeRO-1/2 counts as one sub-group.
    """

    stage: int
    """BF16_Optimizer counts as 1"""
    variant: str
    """`PLAIN`, `BF16_OPTIMIZER` or `ELASTIC`"""
    groups: tuple[tuple[tuple[int, ...], Mapping[str, Any]], ...]
    """For each param group: the sub-groups that it owns, and its hyperparameters. Those of elastic checkpoints have
    none, which these do not store."""
    steps: Mapping[int, float | None]
    """Sub-group -> step; None for one whose steps are not counted"""
    step_is_tensor: bool
    """Whether the step is a tensor, rather than an int; True for an empty state, which shows neither"""
    ds_config: Mapping[str, Any] = field(default_factory=dict)
    partition_counts: tuple[int, ...] = ()
    """The number of ranks; ZeRO-1/2: per group"""
    flats: tuple[Mapping[str, Tensor], ...] = ()
    """Per sub-group: kind -> flat tensor; ``master`` and every elementwise state of the optimizer. In ZeRO-1/2, lengths
    differ by the padding saved with some kinds."""
    scalars: tuple[Mapping[str, Any], ...] = ()
    """Per sub-group: the optimizer's other single values"""
    gaps: tuple[tuple[int, ...], ...] = ()
    """Per group and param: elements of alignment after it (``parameter_alignment``)"""
    mappings: tuple[dict[str, tuple[Any, Any]], ...] = ()
    """Per group: param -> its elements on this rank, and their start in the partition, as DeepSpeed saves it (wrong
    under ``round_robin_gradients``); empty if the file has none"""
    has_group_step: bool = False
    """Elastic checkpoints only: whether the step that a resume needs exists. torch's AdamW does not save it"""


@dataclass(frozen=True, slots=True)
class ModelShard(DecodedShard):
    """The content of a ``model_states`` file."""

    param_shapes: tuple[Mapping[str, tuple[int, ...]], ...]
    """Per sub-group, in the order of the flat tensors"""
    names: tuple[str, ...]
    """Params, frozen params, buffers and tied names, in the order of the model"""
    module: Mapping[str, Tensor]
    """ZeRO-3: the buffers; ZeRO-1/2: all params and buffers, also under tied names"""
    buffer_names: frozenset[str]
    frozen_shapes: Mapping[str, tuple[int, ...]]
    """ZeRO-1 lists none: everything in the module that has no other role is frozen"""
    fragments: Mapping[str, Tensor]
    """ZeRO-3: the rank's slices of frozen params; ZeRO-2: the whole ones, a second time. A resume loads the module's
    first, then these."""
    tied: Mapping[str, str]
    tensor_parallel: int
    """Number of tensor-parallel ranks; 1 without AutoTP"""
    world_size: int
    """Number of ranks that have cut the states: the data-parallel ones"""
    global_steps: int
    skipped_steps: int
    scheduler: SchedulerFacts | None
    """DeepSpeed's own, or one handed to it; None if the Trainer keeps the scheduler"""


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a section of a ``ds_config``; empty if it is missing or not a dict."""
    found = config.get(key)
    return found if isinstance(found, dict) else {}


def read_optim_shard(file: TorchFile, root: Path, path: str, where: str, is_zero3: bool) -> OptimShard:
    """Return the content of one ``optim_states`` file. Raises SourceError or UnsupportedCheckpoint."""
    tree, table = file.tree, ZERO3 if is_zero3 else ZERO12
    check_archive(file.archive, path, where)
    outer = get(tree, "optimizer_state_dict", dict, where)
    if is_zero3:
        _check_zero3(outer, where)
    masters_key, inner_key = STATE_KEYS[is_zero3]
    masters = _read_masters(outer, masters_key, where)
    inner = outer.get(inner_key)
    is_elastic = isinstance(inner, list) and not is_zero3
    groups: tuple[_Group, ...] = tuple(((number,), {}) for number in range(len(masters)))
    state: dict[Any, Any] = dict(enumerate(inner)) if isinstance(inner, list) else {}
    if not is_elastic:
        groups, state = _read_groups(root, get(outer, inner_key, dict, where), len(masters), is_zero3, where)
    of_groups = _checked(state, len(masters), where)
    states = _read_states(root, masters, groups, of_groups, where, is_zero3=is_zero3, is_elastic=is_elastic)
    cut = _cut_of_zero3(outer, where) if is_zero3 else _cut_of_zero12(outer, where)
    counts = cut.partition_counts
    alike = {
        "zero_stage": cut.stage,
        "Adam's step": tuple(states.steps.values()),
        "partition_count": counts if len({*counts}) > 1 else counts[0] if counts else None,
        "the kinds of optimizer state": [sorted(flat) for flat in states.flats],
        "the dtype of a state": [{kind: tensor.dtype for kind, tensor in flat.items()} for flat in states.flats],
        "param_alignment_paddings": cut.gaps,
    }
    return OptimShard(
        path=path,
        rest={**tree, "optimizer_state_dict": {key: value for key, value in outer.items() if key not in STATES}},
        facts={**alike, **facts_of_rank(tree, table)},
        findings=tuple(check_fields(tree, table, where)),
        stage=cut.stage,
        variant=ELASTIC if is_elastic else PLAIN if "zero_stage" in outer else BF16_OPTIMIZER,
        partition_counts=counts,
        flats=tuple(states.flats),
        steps=states.steps,
        step_is_tensor=states.step_is_tensor,
        scalars=tuple(states.scalars),
        groups=groups,
        gaps=cut.gaps,
        mappings=_mappings(outer.get("param_slice_mappings")),
        has_group_step="base_optimizer_state_step" in outer,
        ds_config=as_dict(tree.get("ds_config", {}), "ds_config", where),
    )


_Group = tuple[tuple[int, ...], Mapping[str, Any]]
"""The sub-groups that a param group owns, and its hyperparameters"""


def _read_masters(outer: Mapping[str, Any], key: str, where: str) -> list[Tensor]:
    nodes = get(outer, key, list, where)
    masters = [read_tensor(node, f"{key}[{number}]", where) for number, node in enumerate(nodes)]
    for flat_id, master in enumerate(masters):
        if len(master.shape) != 1:
            what = f"{key}[{flat_id}] has shape {list(master.shape)} instead of being flat"
            raise damaged(where, what, Code.STATE_SIZE)
    return masters


def _read_groups(
    root: Path, inner: Mapping[str, Any], num_masters: int, is_zero3: bool, where: str
) -> tuple[tuple[_Group, ...], dict[Any, Any]]:
    """Return the param groups of ``num_masters`` flat masters, and the states by sub-group."""
    groups = tuple(read_param_group(root, group, where) for group in get(inner, "param_groups", list, where))
    state: dict[Any, Any] = get(inner, "state", dict, where)
    owned = [list(ids) for ids, _ in groups]
    if [*chain(*owned)] != [*range(num_masters)] or not (is_zero3 or len(groups) == num_masters):
        what = f"it has {counted(num_masters, 'flat master')}, but the param groups own {owned}, in this order"
        raise damaged(where, what, Code.FIELD_CONFLICT)
    return groups, state


def _checked(state: Mapping[Any, Any], num_masters: int, where: str) -> dict[Any, Any]:
    """Return the states by sub-group, flattened. Raises SourceError for those of a sub-group without masters, and
    AnotherOptimizer for objects."""
    states = {flat_id: flattened(node) if isinstance(node, dict) else node for flat_id, node in state.items()}
    refuse_objects(states, where)
    if unexpected := [key for key in states if key not in range(num_masters)]:
        what = f"it holds the optimizer state of {unexpected[0]!r}, which no param group owns"
        raise damaged(where, what, Code.FIELD_UNKNOWN)
    return states


@dataclass(slots=True)
class _States:
    """The states of all sub-groups; see `OptimShard`."""

    flats: list[Mapping[str, Tensor]] = field(default_factory=list)
    steps: dict[int, float | None] = field(default_factory=dict)
    scalars: list[Mapping[str, Any]] = field(default_factory=list)
    step_is_tensor: bool = True


def _read_states(
    root: Path,
    masters: Sequence[Tensor],
    groups: Sequence[_Group],
    state: Mapping[Any, Any],
    where: str,
    *,
    is_zero3: bool,
    is_elastic: bool,
) -> _States:
    found, options = _States(), {str(option) for _, hyper in groups for option in hyper}
    if not state:  # fp16, and every step so far has overflowed
        step = 0.0 if is_elastic or has_adams_options(options) else None
        flats: list[Mapping[str, Tensor]] = [{MASTER: master} for master in masters]
        return _States(flats, dict.fromkeys(range(len(masters)), step), [{} for _ in masters])
    for flat_id, master in enumerate(masters):
        if flat_id not in state:
            name = "sub-group" if is_zero3 else "group"
            what = f"the optimizer state of {name} {flat_id} is missing; a resume would restart Adam for it"
            raise damaged(where, what, Code.STATE_MISSING)
        states, numel = as_dict(state[flat_id], f"state[{flat_id}]", where), master.numel if is_zero3 else None
        kinds = decoding.read_elementwise(states, numel, flat_id, where)
        found.flats.append({MASTER: master, **kinds})
        step = states.get("step")
        rest = {str(kind): value for kind, value in states.items() if kind != "step" and kind not in kinds}
        found.scalars.append({kind: decoding.read_option(root, value, where) for kind, value in rest.items()})
        if step is None and keeps_as_adam(kinds, options) and "step" not in options:
            raise damaged(where, f"the step of sub-group {flat_id} is missing", Code.FIELD_MISSING)
        if step is not None:
            found.step_is_tensor = not isinstance(step, (int, float))
        found.steps[flat_id] = None if step is None else decoding.read_step(root, step, flat_id, where)
    distinct = {frozenset(flat) for flat in found.flats}
    for flat_id, flat in enumerate(found.flats):
        if lacking := next((other - flat.keys() for other in distinct if flat.keys() < other), ()):
            what = f"sub-group {flat_id} lacks the state {some(sorted(lacking))}, which others have"
            raise damaged(where, what, Code.STATE_MISSING)
    return found


class _StatedCut(NamedTuple):
    """How a file says that the params are cut over the ranks."""

    stage: int
    partition_counts: tuple[int, ...]
    gaps: tuple[tuple[int, ...], ...] = ()


def _cut_of_zero3(outer: Mapping[str, Any], where: str) -> _StatedCut:
    return _StatedCut(3, _counts([get_count(outer, "partition_count", where)], "partition_count", where))


def _cut_of_zero12(outer: Mapping[str, Any], where: str) -> _StatedCut:
    gaps = outer.get("param_alignment_paddings") or ()
    if not isinstance(gaps, (list, tuple)):
        raise damaged(where, "param_alignment_paddings is not a list", Code.FIELD_TYPE)
    counts = _counts(outer.get("partition_count"), "partition_count", where)
    stage = read_stage(outer, (1, 2), "with the layout of ZeRO-1 and ZeRO-2", where)
    return _StatedCut(stage, counts, tuple(_counts(entry, "param_alignment_paddings", where) for entry in gaps))


def _check_zero3(outer: dict[str, Any], where: str) -> None:
    if "base_optimizer_state" in outer:
        what = "it is an optimizer shard of ZeRO-1 or ZeRO-2, but its model states are of ZeRO-3"
        raise SourceError.at(where, what, "two runs have saved here; move the files of one to another folder")
    read_stage(outer, (3,), "with the name of a ZeRO-3 shard", where)
    if "loss_scaler" not in outer:
        what = "loss_scaler is missing; DeepSpeed refuses to resume without it"
        raise damaged(where, what, Code.FIELD_MISSING)
    if isinstance(outer.get("partition_count"), list) or "ds_zero_partition_groups" in outer:
        raise unsupported_parallelism(where, "expert parallelism", "its partition counts differ by group")


def read_stage(outer: Mapping[str, Any], known: tuple[int, ...], file: str, where: str) -> int:
    """Return the ZeRO stage; BF16_Optimizer, which counts as 1, states none. Raises SourceError for an unknown one."""
    if "zero_stage" not in outer and 1 in known:
        return 1
    stage = outer.get("zero_stage")
    number = stage.args[0] if isinstance(stage, Call) and stage.args else stage
    if type(number) is int and number in known:
        return number
    stated = number if type(number) is int else "not a number"
    raise damaged(where, f"zero_stage is {stated} in a file {file}", Code.FIELD_CONFLICT)


def read_param_group(root: Path, group: Any, where: str) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return the sub-groups that a param group owns, and its hyperparameters."""
    group = as_dict(group, "a param group", where)
    ids = as_ints(group.get("params"))
    if ids is None:
        raise damaged(where, "a param group's params are not a list of sub-groups", Code.FIELD_TYPE)
    if group.get("moe"):
        raise unsupported_parallelism(where, "DeepSpeed expert parallelism (MoE)", "a param group says moe: True")
    return ids, {key: decoding.read_option(root, value, where) for key, value in group.items() if key != "params"}


def _mappings(node: Any) -> tuple[dict[str, tuple[Any, Any]], ...]:
    """Return ``param_slice_mappings``, [{param: fragment_address(numel, start)}], without unreadable entries."""
    groups = [group if isinstance(group, dict) else {} for group in (node if isinstance(node, list) else ())]
    return tuple(
        {
            name: (state.get("numel"), state.get("start"))
            for name, call in group.items()
            if isinstance(state := getattr(call, "state", None), dict)
        }
        for group in groups
    )


def _counts(node: Any, what: str, where: str) -> tuple[int, ...]:
    if not isinstance(node, (list, tuple)) or not all(map(is_count, node)):
        raise damaged(where, f"{what} is not a list of counts", Code.FIELD_TYPE)
    return tuple(node)


def read_model_shard(
    file: TorchFile, root: Path, path: str, where: str, is_zero3: bool, is_adapter: bool = False
) -> ModelShard:
    """Return the content of one ``model_states`` file; ``is_adapter`` says that PEFT left out what is frozen.

    Raises SourceError or UnsupportedCheckpoint.
    """
    check_archive(file.archive, path, where)
    tree = as_dict(file.tree, "the file", where)
    _refuse_other_parallelism(tree, where)
    module = get(tree, "module", dict, where)
    shapes = tree.get("param_shapes") if is_zero3 else get(tree, "param_shapes", list, where)
    listed_shapes = shapes if isinstance(shapes, list) else [shapes]
    param_shapes = tuple(decoding.read_shapes(entry, "param_shapes", where) for entry in listed_shapes)
    frozen_shapes = decoding.read_shapes(tree.get("frozen_param_shapes") or {}, "frozen_param_shapes", where)
    tied = decoding.read_tied(tree.get("shared_params"), where)
    if not is_zero3 and is_adapter:  # PEFT drops frozen params, but not their other names
        lost = {name for name, stored in tied.items() if stored not in module}
        module = {name: node for name, node in module.items() if name not in lost}
        tied = {name: stored for name, stored in tied.items() if name not in lost}
    listed = decoding.read_names(tree.get("buffer_names"), "buffer_names", where)
    if is_zero3:
        _check_placeholders(module, listed, where)
    held = {
        check_name(name, "module", where): read_tensor(node, f"module[{name}]", where)
        for name, node in module.items()
        if name in listed or not is_zero3
    }
    fragments = _fragments(tree.get("frozen_param_fragments"), frozen_shapes, where, is_zero3)
    global_steps, skipped_steps = (get_count(tree, key, where) for key in ("global_steps", "skipped_steps"))
    world_size, scheduler = get_count(tree, "dp_world_size", where), tree.get("lr_scheduler")
    if not world_size:
        raise damaged(where, "dp_world_size is 0, not a valid count", Code.FIELD_RANGE)
    alike = {
        "global_steps": global_steps,
        "skipped_steps": skipped_steps,
        "dp_world_size": world_size,
        "the order, names or shapes of params (param_shapes)": [list(shapes.items()) for shapes in param_shapes],
        "the names in the module": tuple(module),
        "the set of frozen params": frozen_shapes,
        "the set or dtypes of frozen fragments": {name: piece.dtype for name, piece in fragments.items()},
        "the set, shapes or dtypes of buffers": {name: (tensor.dtype, tensor.shape) for name, tensor in held.items()},
    }
    return ModelShard(
        path=path,
        rest=_rest_of_model(tree, [name for name, tensor in held.items() if not tensor.numel]),
        facts={**alike, **facts_of_rank(tree, MODEL)},
        findings=tuple(check_fields(tree, MODEL, where)),
        param_shapes=param_shapes,
        names=tuple(module),
        module=held,
        buffer_names=listed,
        frozen_shapes=frozen_shapes,
        fragments=fragments,
        tied=tied,
        tensor_parallel=tree.get("mp_world_size", 1),
        world_size=world_size,
        global_steps=global_steps,
        skipped_steps=skipped_steps,
        scheduler=None if scheduler is None else read_scheduler(scheduler),
    )


def _rest_of_model(tree: Mapping[str, Any], empty: Container[str]) -> dict[str, Any]:
    """Return decoded ``model_states`` without params and buffers; tensors named in ``empty`` stay.

    ``frozen_param_fragments`` becomes True if there are any, and stays None where the run saved without them.
    """
    names = Ordered((name, node if name in empty else None) for name, node in tree["module"].items())
    names.attributes = getattr(tree["module"], "attributes", None)
    rest = {key: None if key in _PARAMS else value for key, value in tree.items()}
    if tree.get("frozen_param_fragments") is not None:
        rest["frozen_param_fragments"] = True
    return {**rest, "module": names}


def _fragments(node: Any, frozen: Mapping[str, tuple[int, ...]], where: str, is_zero3: bool) -> dict[str, Tensor]:
    """Return ``frozen_param_fragments``, if any. Raises SourceError if they are not those of all params."""
    if not node if is_zero3 else node is None:
        return {}
    nodes = as_dict(node, "frozen_param_fragments", where)
    if nodes.keys() != frozen.keys():
        what = "frozen_param_fragments and frozen_param_shapes list different params"
        raise damaged(where, what, Code.FIELD_CONFLICT)
    fragments = {name: read_tensor(one, f"frozen_param_fragments[{name}]", where) for name, one in nodes.items()}
    other = [name for name, fragment in fragments.items() if fragment.shape != frozen[name]]
    if other and not is_zero3:
        what = f"the fragments of the frozen {some(other)} have other shapes than frozen_param_shapes"
        raise damaged(where, what, Code.STATE_SIZE)
    return fragments


def _check_placeholders(module: dict[str, Any], listed: frozenset[str], where: str) -> None:
    """Raise SourceError unless the module has all buffers, and params are empty placeholders of shape (0,)."""
    if lost := sorted(listed - module.keys()):
        raise damaged(where, f"module lacks the buffers {some(lost)}; a resume would fail", Code.FIELD_MISSING)
    for name, node in module.items():
        check_name(name, "module", where)
        if name in listed:
            continue
        if (view := as_tensor(node)) is None and not name.endswith(_EXTRA):
            raise damaged(where, f"module[{name}] is not a tensor: a resume fails", Code.FIELD_TYPE)
        if view is not None and view.shape != (0,):
            have = "in full" if view.numel else f"with shape {list(view.shape)}"
            what = f"module holds {name} {have}, but ZeRO-3 leaves a placeholder; a resume would fail"
            raise damaged(where, what, Code.STATE_SIZE)


def _refuse_other_parallelism(tree: dict[str, Any], where: str) -> None:
    degrees = as_dict(tree.get("checkpoint_parallel_dimensions") or {}, "checkpoint_parallel_dimensions", where)
    config = as_dict(tree.get("ds_config") or {}, "ds_config", where)
    zero = section(config, "zero_optimization")
    on_nvme = any(section(zero, key).get("device") == "nvme" for key in ("offload_optimizer", "offload_param"))
    degree = tree.get("mp_world_size", 1)
    is_known = is_count(degree) and degree > 0
    signs = [
        (not is_known, "tensor (model) parallelism", "mp_world_size"),
        (degrees.get("tp_degree", degree) not in (0, degree), "tensor parallelism", "tp_degree"),
        (degrees.get("pp_degree", 1) not in (0, 1), "pipeline parallelism", "pp_degree"),
        (tree.get("module", 0) is None, "pipeline parallelism", "it has no module"),
        (bool(tree.get("num_experts")), "DeepSpeed expert parallelism (MoE)", "num_experts"),
        (bool(tree.get("ds_autoep_layers")), "expert parallelism (AutoEP)", "ds_autoep_layers"),
        (zero.get("mics_shard_size") not in (None, 0, -1), "MiCS sharding", "mics_shard_size"),
        (on_nvme, "optimizer state offloaded to NVMe", "offload device nvme in ds_config"),
    ]
    for present, kind, evidence in signs:
        if present:
            raise unsupported_parallelism(where, kind, evidence)
    if degree > 1:
        check_has_map(tree, where)


AnyShard = TypeVar("AnyShard", bound=DecodedShard)
_Read = Callable[[TorchFile, Path, str, str, bool], AnyShard]
Known = dict[bytes, Any]
"""Files that were read before, such as those of other tensor-parallel ranks, by what they are alike in"""


@dataclass(frozen=True, slots=True)
class ShardReader:
    """Reads the files of all ranks, and reports all damage."""

    trees: Trees
    files: ShardFiles
    name: str
    problems: Problems
    findings: list[Finding]
    """Gets those on each single file"""

    def read_all(self, read: _Read[AnyShard], paths: Sequence[str], known: Known) -> list[AnyShard | None]:
        """Read every rank's file, also after a bad one. Missing ones have been reported.

        Every fact that differs from most ranks' is reported, and such a file becomes None. Stock DeepSpeed compares
        none of this: each rank loads its own file and continues.
        """
        others: dict[str, AnotherOptimizer] = {}
        shards: list[AnyShard | None] = []
        for path in paths:
            try:
                shards.append(None if path in self.files.missing else self._read_one(read, path, known))
            except AnotherOptimizer as error:
                others[path] = error
                shards.append(None)
            except SourceError as error:
                self.problems.add(error)
                shards.append(None)
        is_damage = any(shard is not None for shard in shards)
        for path, other in others.items():
            if not is_damage:  # all ranks have the same optimizer, which is refused once
                self.problems.add(other)
                break
            what = "the optimizer states are of another kind than those of the other ranks"
            self.problems.add(SourceError.at(PathIn(self.name, path), what, COPY_CHECKPOINT, Code.RANKS_DIFFER))
        return _drop_unlike(shards, paths, self.name, self.problems)

    def _read_one(self, read: _Read[AnyShard], path: str, known: Known) -> AnyShard:
        where = PathIn(self.name, path)
        file = self.trees.open(path, where)
        shard: AnyShard | None = known.get(file.key) if file.key else None
        if shard is None:
            with naming_others(where) if path in self.files.optim else nullcontext():
                decoded = file.decode()
            shard = read(decoded, self.trees.root, path, where, self.files.is_zero3)
            if file.key and not _has_bytes(shard.rest):
                known[file.key] = shard
        else:
            check_archive(file.archive, path, where)
        of_another = shard.path != path
        self.findings.extend(replace(finding, where=where) if of_another else finding for finding in shard.findings)
        return shard


def _drop_unlike(
    shards: Sequence[AnyShard | None], paths: Sequence[str], name: str, problems: Problems
) -> list[AnyShard | None]:
    """Report every fact that differs from most ranks'; put None for such a file."""
    kinds: list[list[int]] = []
    there = {rank: shard for rank, shard in enumerate(shards) if shard is not None}
    for rank, shard in there.items():
        same = next((kind for kind in kinds if there[kind[0]] is shard or there[kind[0]].facts == shard.facts), None)
        if same is None:
            kinds.append(same := [])
        same.append(rank)
    usual = max(kinds, key=len, default=[])
    kept = set(usual)
    for rank, shard in there.items():
        if rank in kept:
            continue
        reference = there[usual[0]].facts
        for what in {**reference, **shard.facts}:
            value, usual_value = shard.facts.get(what), reference.get(what)
            if value != usual_value:
                detail = f" ({value} and {usual_value})" if len(f"{value}{usual_value}") < 80 else ""
                text = f"{what} differs from that of rank {usual[0]}{detail}"
                problems.add(SourceError.at(PathIn(name, paths[rank]), text, COPY_CHECKPOINT, Code.RANKS_DIFFER))
    return [shard if rank in kept else None for rank, shard in enumerate(shards)]


def _has_bytes(node: Any) -> bool:
    """Whether a tensor in a tree has elements, which may differ between ranks."""
    if isinstance(node, Storage):
        return node.numel > 0
    return any(_has_bytes(child) for child in children(node))
