"""The trees of a ZeRO-1 or ZeRO-2 checkpoint: one vector per group, cut into equal partitions, and one model file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmtailor.checkpoint.layout import Piece, Slot, Zeros
from llmtailor.checkpoint.optimizer import SubGroup, Vector, lay_out_vector
from llmtailor.containers.pickle_nodes import Call, Global, Ordered, make_tensor
from llmtailor.formats.zero.target import ZeroTarget, scaling_nodes, stage_node
from llmtailor.model.states import BUFFER, FROZEN, ITEMSIZE, MASTER, MODULE, State

_PADDING = "ZeRO-1/2 padding and alignment"
_FRAGMENT = Global("deepspeed.utils.tensor_fragment", "fragment_address")


def optim_tree(target: ZeroTarget, rank: int, rest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of one rank's ``optim_states``: plain, or as BF16_Optimizer writes it; ``rest`` is the base's."""
    base, layout = target.base, target.layout
    cut = [(one, _vector(target, one)) for one in layout.sub_groups]
    bf16_optimizer = base.settings.fp32_gradients and layout.stage == 1
    state = {
        number: {
            "step": target.step_node(number),
            **{kind: _partition(target, one, vector, kind, rank, strip=False) for kind in target.kinds},
        }
        for number, (one, vector) in enumerate(cut)
    }
    clipping = rest.get("ds_config", {}) or {}
    clip_grad = rest["optimizer_state_dict"].get("clip_grad", clipping.get("gradient_clipping", 0.0))
    made = {
        **({} if bf16_optimizer else scaling_nodes(rest)),
        **({"clip_grad": clip_grad} if base.train.optim else {}),
        "base_optimizer_state": {"state": state if target.kinds else {}, "param_groups": target.group_nodes()},
        "single_partition_of_fp32_groups": [
            _partition(target, one, vector, MASTER, rank, strip=not bf16_optimizer) for one, vector in cut
        ],
        **({} if bf16_optimizer else {"zero_stage": stage_node(layout.stage)}),
        "group_paddings": [vector.padding(rank) for _, vector in cut],
        "partition_count": [layout.world_size] * len(layout.groups),
        "ds_version": rest.get("ds_version"),
        "param_slice_mappings": [_mapping(target, one, vector, rank) for one, vector in cut],
    }
    tree = target.optim_tree(rest, () if bf16_optimizer else (1, 2), made)
    outer = tree["optimizer_state_dict"]
    if "param_alignment_paddings" in outer or any(one.gaps for one, _ in cut):
        outer["param_alignment_paddings"] = [list(one.gaps or (0,) * len(one.params)) for one, _ in cut]
    return tree


def model_tree(target: ZeroTarget, rank: int, rest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of the ``model_states`` of all ranks. Its params are the rounded master weights."""
    base = target.base
    module = Ordered()
    for name, node in rest["module"].items():
        param = base.params.get(name)
        if param is None:
            continue
        kind = {"buffer": BUFFER, "frozen": FROZEN}.get(param.role, MODULE)
        dtype = target.precision if kind == MODULE else target.dtype(State(name, kind))
        slots = (Slot(State(name, kind), dtype, 0, param.numel),)
        module[name] = make_tensor(dtype, param.shape, slots) if param.numel else node or make_tensor(dtype, (0,), ())
    stored = {name: base.tied.get(name, name) for name in rest["module"]}
    ordered = Ordered((name, module[own]) for name, own in stored.items() if own in module)
    ordered.attributes = rest["module"].attributes
    frozen = [param.name for param in base.params.values() if param.role == "frozen"]
    has_frozen = target.layout.stage == 2 and not target.excludes_frozen(rest)
    return {
        **rest,
        "module": ordered,
        "param_shapes": [target.shapes_node(one.params) for one in target.layout.sub_groups],
        "frozen_param_shapes": target.shapes_node(frozen) if has_frozen else None,
        "shared_params": dict(base.tied),
        "frozen_param_fragments": Ordered((name, module[name]) for name in frozen) if has_frozen else None,
        "dp_world_size": target.layout.world_size,
    }


def _vector(target: ZeroTarget, one: SubGroup) -> Vector:
    numels = [target.base.params[param].numel for param in one.params]
    return lay_out_vector(numels, one.gaps, target.layout.world_size)


def _runs(target: ZeroTarget, one: SubGroup, vector: Vector, rank: int) -> Iterator[tuple[str, int, int, int]]:
    """Yield (param, begin, end, offset in the partition) of the params that overlap a rank's partition."""
    low, high = rank * vector.partition, (rank + 1) * vector.partition
    for param, offset in zip(one.params, vector.offsets, strict=True):
        begin, end = max(low, offset), min(high, offset + target.base.params[param].numel)
        if begin < end:
            yield param, begin - offset, end - offset, begin - low


def _partition(target: ZeroTarget, one: SubGroup, vector: Vector, kind: str, rank: int, strip: bool) -> Any:
    """Return one rank's partition of a kind, without the padding at its end if ``strip``."""
    length = vector.partition - (vector.padding(rank) if strip else 0)
    dtype = next((target.dtype(State(param, kind)) for param in one.params), "F32")
    content: list[Piece] = []
    at = 0
    for param, begin, end, offset in _runs(target, one, vector, rank):
        if at < offset:
            content.append(Zeros((offset - at) * ITEMSIZE[dtype], _PADDING))
        content.append(Slot(State(param, kind), dtype, begin, end))
        at = offset + end - begin
    if at < length:
        content.append(Zeros((length - at) * ITEMSIZE[dtype], _PADDING))
    return make_tensor(dtype, (length,), tuple(content))


def _mapping(target: ZeroTarget, one: SubGroup, vector: Vector, rank: int) -> Ordered:
    """Return the places of params in a rank's partition; right even with round_robin_gradients, unlike stock's."""
    return Ordered(
        (param, Call(_FRAGMENT, (), new=True, state={"numel": end - begin, "start": offset}, has_state=True))
        for param, begin, end, offset in _runs(target, one, vector, rank)
    )
