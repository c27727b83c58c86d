"""One rank's two files of a ZeRO-3 checkpoint, decoded into checked facts.

``optim_states`` (key tree verified against DeepSpeed 0.19.8)::

    optimizer_state_dict
      zero_stage, loss_scaler, dynamic_loss_scale, overflow, partition_count
      optimizer_state_dict    {state: {sub-group: {step, exp_avg, exp_avg_sq}}, param_groups: [{.., params: [..]}]}
      fp32_flat_groups        [flat tensor per sub-group]
    ds_config, ds_version

``model_states``: ``module`` (empty placeholders for params, full buffers), ``param_shapes`` (one dict per sub-group, in
the order of the flat tensors), ``frozen_param_shapes`` and ``frozen_param_fragments``, ``shared_params``, counters.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmtailor.codes import Code
from llmtailor.containers.fields import (
    Tensor,
    as_dict,
    get,
    get_count,
    read_elementwise,
    read_masters,
    read_names,
    read_shapes,
    read_step,
    read_tensor,
    read_tied,
)
from llmtailor.containers.json import check_name
from llmtailor.containers.pickle_nodes import Call, Ordered, as_tensor
from llmtailor.errors import COPY_FILE, SourceError, some
from llmtailor.findings import Finding
from llmtailor.formats.format import Trees
from llmtailor.formats.resumed.tables import check_fields, facts_of_rank
from llmtailor.formats.scheduler import SchedulerFacts, read_scheduler
from llmtailor.formats.zero.files import read_param_group, read_shard, unsupported_parallelism
from llmtailor.formats.zero.tables import MODEL, ZERO3
from llmtailor.model.states import MASTER

_EXTRA = "_extra_state"
"""torch's name for what a module keeps besides tensors"""


@dataclass(frozen=True, slots=True)
class OptimShard:
    """The content of one rank's ``optim_states``."""

    partition_count: int
    flats: tuple[Mapping[str, Tensor], ...]
    """Per sub-group: kind -> flat tensor; ``master`` and every elementwise state of the optimizer"""
    steps: tuple[float, ...]
    """Per sub-group"""
    step_is_tensor: bool
    """Whether the step is a tensor, rather than an int; True for an empty state, which shows neither"""
    groups: tuple[tuple[tuple[int, ...], Mapping[str, Any]], ...]
    """For each param group: the sub-groups that it owns, and its hyperparameters"""
    rest: Mapping[str, Any]
    """The tree without the states"""
    ds_config: Mapping[str, Any]
    facts: Mapping[str, object]
    """What a resume reads besides states, and must be alike on all ranks"""
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Counters:
    """The content of ``model_states`` besides the model, for any stage."""

    global_steps: int
    skipped_steps: int
    scheduler: SchedulerFacts | None
    """DeepSpeed's own, or one handed to it; None if the Trainer keeps the scheduler"""


@dataclass(frozen=True, slots=True)
class ModelShard:
    """The content of one rank's ``model_states``."""

    param_shapes: tuple[Mapping[str, tuple[int, ...]], ...]
    """Per sub-group, in the order of the flat tensors"""
    frozen_shapes: Mapping[str, tuple[int, ...]]
    frozen_fragments: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    module_names: tuple[str, ...]
    """Params, frozen params, buffers and tied names, in the order of the model"""
    tied: Mapping[str, str]
    world_size: int
    counters: Counters
    rest: Mapping[str, Any]
    """The tree without params and buffers"""
    facts: Mapping[str, object]
    """What a resume reads besides states, and must be alike on all ranks"""
    findings: tuple[Finding, ...]


def read_optim_shard(trees: Trees, path: str, where: str) -> OptimShard:
    """Return the content of one ``optim_states`` file. Raises SourceError or UnsupportedCheckpoint."""
    tree = read_shard(trees, path, where)
    outer = get(tree, "optimizer_state_dict", dict, where)
    _check_stage(outer, where)
    partition_count = outer.get("partition_count")
    if isinstance(partition_count, list) or "ds_zero_partition_groups" in outer:
        raise unsupported_parallelism(where, "expert parallelism", "its partition counts differ by group")
    inner = get(outer, "optimizer_state_dict", dict, where)
    masters = read_masters(get(outer, "fp32_flat_groups", list, where), "fp32_flat_groups", where)
    groups = tuple(read_param_group(group, where) for group in get(inner, "param_groups", list, where))
    ids = [flat_id for owned, _ in groups for flat_id in owned]
    if ids != list(range(len(masters))):
        raise SourceError.at(
            where,
            f"{len(masters)} master tensors, but the param groups own {ids}, in this order",
            COPY_FILE,
            Code.FIELD_CONFLICT,
        )
    state = get(inner, "state", dict, where)
    if unexpected := [key for key in state if key not in range(len(masters))]:
        raise SourceError.at(
            where,
            f"it holds the optimizer state of {unexpected[0]!r}, which no param group owns",
            COPY_FILE,
            Code.FIELD_UNKNOWN,
        )
    flats, steps, step_is_tensor = [], [], True
    for flat_id, master in enumerate(masters):
        if not state:  # Adam has not made a step yet; `zero3` checks this
            flats.append({MASTER: master})
            steps.append(0.0)
            continue
        if flat_id not in state:
            raise SourceError.at(
                where,
                f"the optimizer state of sub-group {flat_id} is missing; a resume would restart Adam for it",
                COPY_FILE,
                Code.STATE_MISSING,
            )
        kinds, step_node = read_elementwise(
            as_dict(state[flat_id], f"state[{flat_id}]", where), master.numel, flat_id, where
        )
        flats.append({MASTER: master, **kinds})
        step_is_tensor = not isinstance(step_node, (int, float))
        steps.append(read_step(trees.root, step_node, flat_id, where))
    return OptimShard(
        partition_count=get_count(outer, "partition_count", where),
        flats=check_alike(flats, where),
        steps=tuple(steps),
        step_is_tensor=step_is_tensor,
        groups=groups,
        rest=rest_of_optim(tree),
        ds_config=as_dict(tree.get("ds_config", {}), "ds_config", where),
        facts=facts_of_rank(tree, ZERO3),
        findings=tuple(check_fields(tree, ZERO3, where)),
    )


_STATES = frozenset(
    (
        *("optimizer_state_dict", "base_optimizer_state", "fp32_flat_groups", "single_partition_of_fp32_groups"),
        *("group_paddings", "param_slice_mappings", "partition_count", "zero_stage"),
    )
)
_PARAMS = frozenset(("module", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params"))


def rest_of_optim(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a decoded ``optim_states`` without the states and what follows from their layout."""
    outer = {key: value for key, value in tree["optimizer_state_dict"].items() if key not in _STATES}
    return {**tree, "optimizer_state_dict": outer}


def rest_of_model(tree: Mapping[str, Any], empty: Container[str]) -> dict[str, Any]:
    """Return decoded ``model_states`` without params and buffers; tensors named in ``empty`` stay.

    ``frozen_param_fragments`` becomes True if there are any, and stays None where the run saved without them.
    """
    names = Ordered((name, node if name in empty else None) for name, node in tree["module"].items())
    names.attributes = getattr(tree["module"], "attributes", None)
    rest = {key: None if key in _PARAMS else value for key, value in tree.items()}
    if tree.get("frozen_param_fragments") is not None:
        rest["frozen_param_fragments"] = True
    return {**rest, "module": names}


def _check_stage(outer: dict[str, Any], where: str) -> None:
    if "base_optimizer_state" in outer:
        what = "it is an optimizer shard of ZeRO-1 or ZeRO-2, but its model states are of ZeRO-3"
        raise SourceError.at(where, what, "two runs have saved here; remove the files of the wrong one")
    stage = outer.get("zero_stage")
    number = stage.args[0] if isinstance(stage, Call) and stage.args else stage
    if type(number) is not int or number != 3:
        stated = number if type(number) is int else "not a number"
        raise SourceError.at(
            where, f"zero_stage is {stated} in a file with the name of a ZeRO-3 shard", COPY_FILE, Code.FIELD_CONFLICT
        )
    if "loss_scaler" not in outer:
        raise SourceError.at(
            where, "loss_scaler is missing; DeepSpeed refuses to resume without it", COPY_FILE, Code.FIELD_MISSING
        )


def read_model_shard(trees: Trees, path: str, where: str) -> ModelShard:
    """Return the content of one ``model_states`` file. Raises SourceError or UnsupportedCheckpoint."""
    tree = as_dict(read_shard(trees, path, where), "the file", where)
    refuse_other_parallelism(tree, where)
    module = get(tree, "module", dict, where)
    shapes = tree.get("param_shapes")
    param_shapes = tuple(
        read_shapes(entry, "param_shapes", where) for entry in (shapes if isinstance(shapes, list) else [shapes])
    )
    frozen_shapes = read_shapes(tree.get("frozen_param_shapes") or {}, "frozen_param_shapes", where)
    frozen_fragments = as_dict(tree.get("frozen_param_fragments") or {}, "frozen_param_fragments", where)
    if frozen_fragments and frozen_fragments.keys() != frozen_shapes.keys():
        raise SourceError.at(
            where,
            "frozen_param_fragments and frozen_param_shapes list different params",
            COPY_FILE,
            Code.FIELD_CONFLICT,
        )
    buffers = _buffers(module, read_names(tree.get("buffer_names"), "buffer_names", where), where)
    return ModelShard(
        param_shapes=param_shapes,
        frozen_shapes=frozen_shapes,
        frozen_fragments={
            name: read_tensor(node, f"frozen_param_fragments[{name}]", where) for name, node in frozen_fragments.items()
        },
        buffers=buffers,
        module_names=tuple(module),
        tied=read_tied(tree.get("shared_params"), where),
        world_size=get_count(tree, "dp_world_size", where),
        counters=read_counters(tree, where),
        rest=rest_of_model(tree, [name for name, buffer in buffers.items() if not buffer.numel]),
        facts=facts_of_rank(tree, MODEL),
        findings=tuple(check_fields(tree, MODEL, where)),
    )


def read_counters(tree: dict[str, Any], where: str) -> Counters:
    scheduler = tree.get("lr_scheduler")
    return Counters(
        global_steps=get_count(tree, "global_steps", where),
        skipped_steps=get_count(tree, "skipped_steps", where),
        scheduler=None if scheduler is None else read_scheduler(scheduler),
    )


def refuse_other_parallelism(tree: dict[str, Any], where: str) -> None:
    degrees = as_dict(tree.get("checkpoint_parallel_dimensions") or {}, "checkpoint_parallel_dimensions", where)
    config = as_dict(tree.get("ds_config") or {}, "ds_config", where)
    zero = config.get("zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    offload = [zero.get(key) for key in ("offload_optimizer", "offload_param")]
    signs = [
        (tree.get("mp_world_size", 1) != 1, "tensor (model) parallelism", "mp_world_size"),
        (degrees.get("tp_degree", 1) not in (0, 1), "tensor parallelism", "tp_degree"),
        (degrees.get("pp_degree", 1) not in (0, 1), "pipeline parallelism", "pp_degree"),
        (tree.get("module", 0) is None, "pipeline parallelism", "it has no module"),
        (bool(tree.get("num_experts")), "DeepSpeed expert parallelism (MoE)", "num_experts"),
        (bool(tree.get("ds_autoep_layers")), "expert parallelism (AutoEP)", "ds_autoep_layers"),
        (zero.get("mics_shard_size") not in (None, 0, -1), "MiCS sharding", "mics_shard_size"),
        (
            any(isinstance(entry, dict) and entry.get("device") == "nvme" for entry in offload),
            "optimizer state offloaded to NVMe",
            "offload device nvme in ds_config",
        ),
    ]
    for present, kind, evidence in signs:
        if present:
            raise unsupported_parallelism(where, kind, evidence)


def check_alike(flats: Sequence[Mapping[str, Tensor]], where: str) -> tuple[Mapping[str, Tensor], ...]:
    """Return ``flats``. Raises SourceError if not all of them hold the same kinds of state."""
    for flat_id, flat in enumerate(flats):
        if flat.keys() != flats[0].keys():
            what = f"sub-group {flat_id} has the states {', '.join(flat)}, but sub-group 0 has {', '.join(flats[0])}"
            raise SourceError.at(where, what, COPY_FILE, Code.STATE_MISSING)
    return tuple(flats)


def _buffers(module: dict[str, Any], listed: frozenset[str], where: str) -> dict[str, Tensor]:
    """Return the persistent buffers; params are empty placeholders of shape (0,) in ZeRO-3."""
    if lost := sorted(listed - module.keys()):
        raise SourceError.at(
            where, f"module lacks the buffers {some(lost)}; a resume would fail", COPY_FILE, Code.FIELD_MISSING
        )
    buffers = {}
    for name, node in module.items():
        check_name(name, "module", where)
        if name in listed:
            buffers[name] = read_tensor(node, f"module[{name}]", where)
        elif (view := as_tensor(node)) is None and not name.endswith(_EXTRA):
            raise SourceError.at(where, f"module[{name}] is not a tensor: a resume fails", COPY_FILE, Code.FIELD_TYPE)
        elif view is not None and view.shape != (0,):
            have = "in full" if view.numel else f"with shape {list(view.shape)}"
            what = f"module holds {name} {have}, but ZeRO-3 leaves a placeholder; a resume would fail"
            raise SourceError.at(where, what, COPY_FILE, Code.STATE_SIZE)
    return buffers
