"""The trees of a ZeRO-1 or ZeRO-2 checkpoint: one vector per group, cut into equal partitions, and one model file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.layout import Fill, Segment, Slot
from llmtailor.checkpoint.optimizer import Target, TargetFlat
from llmtailor.checkpoint.sharding import Vector, lay_out_vector
from llmtailor.containers.pickle_nodes import Call, Global, Ordered, make_tensor
from llmtailor.formats.zero.base_trees import (
    Carried,
    excludes_frozen,
    group_nodes,
    shapes_node,
    stage_node,
    step_node,
)
from llmtailor.model.states import BUFFER, FROZEN, ITEMSIZE, MASTER, MODULE, State

_PADDING = "ZeRO-1/2 padding and alignment"
_FRAGMENT = Global("deepspeed.utils.tensor_fragment", "fragment_address")


def optim_tree(base: CheckpointIndex, target: Target, rank: int, steps: Sequence[float], carried: Carried) -> Any:
    """Return the tree of one rank's ``optim_states``: plain, or as BF16_Optimizer writes it."""
    vectors = [_vector(base, flat, target.world_size) for flat in target.flats]
    bf16_optimizer = base.settings.fp32_gradients and target.stage == 1
    whole = [
        {kind: _partition(base, flat, vector, kind, rank, strip=False) for kind in carried.kinds}
        for flat, vector in zip(target.flats, vectors, strict=True)
    ]
    state = {
        group: {"step": step_node(steps[group], carried.step_is_tensor, group), **kinds}
        for group, kinds in enumerate(whole)
    }
    masters = [
        _partition(base, flat, vector, MASTER, rank, strip=not bf16_optimizer)
        for flat, vector in zip(target.flats, vectors, strict=True)
    ]
    scaling = {
        "loss_scaler": carried.loss_scaler,
        "dynamic_loss_scale": carried.dynamic_loss_scale,
        "overflow": carried.overflow,
    }
    outer = {
        **({} if bf16_optimizer else carried.more_if(1, 2)),
        **({} if bf16_optimizer else scaling),
        "clip_grad": carried.clip_grad,
        "base_optimizer_state": {
            "state": state if carried.has_state else {},
            "param_groups": group_nodes(target, [[group] for group in range(len(target.groups))]),
        },
        "single_partition_of_fp32_groups": masters,
        **({} if bf16_optimizer else {"zero_stage": stage_node(target.stage)}),
        "group_paddings": [vector.padding(rank) for vector in vectors],
        "partition_count": [target.world_size] * len(target.groups),
        "ds_version": carried.around.get("ds_version"),
        "param_slice_mappings": [
            _mapping(base, flat, vector, rank) for flat, vector in zip(target.flats, vectors, strict=True)
        ],
    }
    if "param_alignment_paddings" in outer or any(flat.gaps for flat in target.flats):
        outer["param_alignment_paddings"] = [list(flat.gaps or (0,) * len(flat.params)) for flat in target.flats]
    return {**carried.around, "optimizer_state_dict": outer}


def model_tree(tree: Any, base: CheckpointIndex, target: Target) -> Any:
    """Turn the tree of the base's ``model_states`` into that of all ranks. Its params are the rounded masters."""
    module = Ordered()
    for name, node in tree["module"].items():
        param = base.params.get(name)
        if param is None:
            continue
        if param.role == "buffer":
            kind, dtype = BUFFER, base.held[State(name, BUFFER)].dtype
        elif param.role == "frozen":
            kind, dtype = FROZEN, base.held[State(name, FROZEN)].dtype
        else:
            kind, dtype = MODULE, base.precision
        slots = (Slot(State(name, kind), dtype, 0, param.numel),) if param.numel else ()
        module[name] = make_tensor(dtype, param.shape, slots) if slots else node
    stored = {name: base.tied.get(name, name) for name in tree["module"]}
    ordered = Ordered((name, module[own]) for name, own in stored.items() if own in module)
    ordered.attributes = getattr(tree["module"], "attributes", None)
    frozen = [param.name for param in base.params.values() if param.role == "frozen"]
    has_frozen = target.stage == 2 and not excludes_frozen(tree, base)
    return {
        **tree,
        "module": ordered,
        "param_shapes": [shapes_node(base, flat.params) for flat in target.flats],
        "frozen_param_shapes": shapes_node(base, frozen) if has_frozen else None,
        "shared_params": dict(base.tied),
        "frozen_param_fragments": Ordered((name, module[name]) for name in frozen) if has_frozen else None,
        "dp_world_size": target.world_size,
    }


def _vector(base: CheckpointIndex, flat: TargetFlat, world_size: int) -> Vector:
    return lay_out_vector([base.params[param].numel for param in flat.params], flat.gaps, world_size)


def _runs(base: CheckpointIndex, flat: TargetFlat, vector: Vector, rank: int) -> Iterator[tuple[str, int, int, int]]:
    """Yield (param, begin, end, offset in the partition) of the params that meet a rank's partition."""
    low, high = rank * vector.partition, (rank + 1) * vector.partition
    for param, offset in zip(flat.params, vector.offsets, strict=True):
        begin, end = max(low, offset), min(high, offset + base.params[param].numel)
        if begin < end:
            yield param, begin - offset, end - offset, begin - low


def _partition(base: CheckpointIndex, flat: TargetFlat, vector: Vector, kind: str, rank: int, strip: bool) -> Any:
    """One rank's partition of a kind, without the padding at its end if ``strip``."""
    length = vector.partition - (vector.padding(rank) if strip else 0)
    dtype = next((base.held[State(param, kind)].dtype for param in flat.params), "F32")
    content: list[Segment] = []
    at = 0
    for param, begin, end, offset in _runs(base, flat, vector, rank):
        if at < offset:
            content.append(Fill((offset - at) * ITEMSIZE[dtype], _PADDING))
        content.append(Slot(State(param, kind), dtype, begin, end))
        at = offset + end - begin
    if at < length:
        content.append(Fill((length - at) * ITEMSIZE[dtype], _PADDING))
    return make_tensor(dtype, (length,), tuple(content))


def _mapping(base: CheckpointIndex, flat: TargetFlat, vector: Vector, rank: int) -> Ordered:
    """Where the params lie in a rank's partition; right also under round_robin_gradients, where stock is wrong."""
    return Ordered(
        (param, Call(_FRAGMENT, (), new=True, state={"numel": end - begin, "start": offset}, has_state=True))
        for param, begin, end, offset in _runs(base, flat, vector, rank)
    )
