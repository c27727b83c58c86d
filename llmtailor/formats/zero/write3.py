"""The trees of a ZeRO-3 checkpoint: one pair of files per rank, every param cut on its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from llmtailor.checkpoint.index import CheckpointIndex, Held
from llmtailor.checkpoint.layout import Fill, Segment, Slot
from llmtailor.checkpoint.optimizer import Target
from llmtailor.containers.pickle_nodes import Ordered, make_tensor
from llmtailor.formats.zero.base_trees import (
    Carried,
    excludes_frozen,
    group_nodes,
    shapes_node,
    stage_node,
    step_node,
)
from llmtailor.formats.zero.read3 import part_size
from llmtailor.model.states import BUFFER, FROZEN, ITEMSIZE, MASTER, State

_PADDING = "ZeRO-3 padding"


def optim_tree(base: CheckpointIndex, target: Target, rank: int, steps: Sequence[float], carried: Carried) -> Any:
    """Return the tree of one rank's ``optim_states``."""
    state = {
        flat_id: {
            "step": step_node(steps[flat_id], carried.step_is_tensor, flat_id),
            **{kind: _flat_tensor(base, flat.params, kind, target, rank) for kind in carried.kinds},
        }
        for flat_id, flat in enumerate(target.flats)
    }
    ids = [[at for at, flat in enumerate(target.flats) if flat.group == group] for group in range(len(target.groups))]
    outer = {
        **carried.more_if(3),
        "zero_stage": stage_node(3),
        "loss_scaler": carried.loss_scaler,
        "dynamic_loss_scale": carried.dynamic_loss_scale,
        "overflow": carried.overflow,
        "partition_count": target.world_size,
        "optimizer_state_dict": {
            "state": state if carried.has_state else {},
            "param_groups": group_nodes(target, ids),
        },
        "fp32_flat_groups": [_flat_tensor(base, flat.params, MASTER, target, rank) for flat in target.flats],
    }
    return {**carried.around, "optimizer_state_dict": outer}


def model_tree(tree: Any, base: CheckpointIndex, target: Target, rank: int) -> Any:
    """Turn the tree of the base's ``model_states`` into that of one rank."""
    module = Ordered()
    for name, node in tree["module"].items():
        param = base.params.get(name)
        if param is None and name not in base.tied:  # PEFT left out what it is another name of
            continue
        if param is None or param.role != "buffer":  # params live in the optimizer's files
            module[name] = make_tensor(base.precision, (0,), ())
        elif param.numel:
            state = State(name, BUFFER)
            begin = rank * param.numel
            slot = Slot(state, base.held[state].dtype, begin, begin + param.numel)
            module[name] = make_tensor(slot.dtype, param.shape, (slot,))
        else:
            module[name] = node
    module.attributes = getattr(tree["module"], "attributes", None)
    fragments = Ordered()
    frozen = [param for param in base.params.values() if param.role == "frozen"]
    for param in frozen:
        state = State(param.name, FROZEN)
        if state in base.held:
            held = base.held[state]
            content = tuple(_slice(state, held, rank, target.world_size))
            fragments[param.name] = make_tensor(held.dtype, (part_size(held.numel, target.world_size),), content)
    has_fragments = not excludes_frozen(tree, base) and (bool(fragments) or not frozen)
    return {
        **tree,
        "module": module,
        "param_shapes": [shapes_node(base, flat.params) for flat in target.flats],
        "frozen_param_shapes": shapes_node(base, [param.name for param in frozen]) if has_fragments else None,
        "shared_params": dict(base.tied) if rank == 0 else {},
        "frozen_param_fragments": fragments if has_fragments else None,
        "dp_world_size": target.world_size,
    }


def _flat_tensor(base: CheckpointIndex, params: tuple[str, ...], kind: str, target: Target, rank: int) -> Any:
    """The flat tensor of one flat id on one rank: the slices of its params, one after the other."""
    content: list[Segment] = []
    numel, dtype = 0, "F32"
    for param in params:
        state = State(param, kind)
        held = base.held[state]
        dtype = held.dtype
        numel += part_size(held.numel, target.world_size)
        content += _slice(state, held, rank, target.world_size)
    return make_tensor(dtype, (numel,), tuple(content))


def _slice(state: State, held: Held, rank: int, world_size: int) -> Iterator[Segment]:
    """One rank's slice of a state: its elements, then padding."""
    part = part_size(held.numel, world_size)
    begin, end = min(rank * part, held.numel), min((rank + 1) * part, held.numel)
    if begin < end:
        yield Slot(state, held.dtype, begin, end)
    if padding := part - (end - begin):
        yield Fill(padding * ITEMSIZE[held.dtype], _PADDING)
