"""The trees of a ZeRO-3 checkpoint: one pair of files per rank, every param cut on its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmtailor.checkpoint.layout import Piece, Slot, Zeros
from llmtailor.checkpoint.optimizer import part_size
from llmtailor.containers.pickle_nodes import Ordered, make_tensor
from llmtailor.formats.zero.target import ZeroTarget, scaling_nodes, stage_node
from llmtailor.model.states import BUFFER, FROZEN, ITEMSIZE, MASTER, State

_PADDING = "ZeRO-3 padding"


def optim_tree(target: ZeroTarget, rank: int, rest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of one rank's ``optim_states``; ``rest`` is the base's."""
    cut = target.layout.sub_groups
    state = {
        number: {
            "step": target.step_node(number),
            **{kind: _flat_tensor(target, one.params, kind, rank) for kind in target.kinds},
        }
        for number, one in enumerate(cut)
    }
    made = {
        "zero_stage": stage_node(3),
        **scaling_nodes(rest),
        "partition_count": target.layout.world_size,
        "optimizer_state_dict": {"state": state if target.kinds else {}, "param_groups": target.group_nodes()},
        "fp32_flat_groups": [_flat_tensor(target, one.params, MASTER, rank) for one in cut],
    }
    return target.optim_tree(rest, (3,), made)


def model_tree(target: ZeroTarget, rank: int, rest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of one rank's ``model_states``; ``rest`` is the base's."""
    base, world_size = target.base, target.layout.world_size
    module = Ordered()
    for name, node in rest["module"].items():
        param = base.params.get(name)
        if param is None and name not in base.tied:  # PEFT left out the param that this is another name of
            continue
        if param is None or param.role != "buffer":  # params live in the optimizer's files
            module[name] = make_tensor(target.precision, (0,), ())
        elif param.numel:
            state = State(name, BUFFER)
            begin = rank * param.numel
            slot = Slot(state, target.dtype(state), begin, begin + param.numel)
            module[name] = make_tensor(slot.dtype, param.shape, (slot,))
        else:
            module[name] = node
    module.attributes = rest["module"].attributes
    fragments = Ordered()
    frozen = [param for param in base.params.values() if param.role == "frozen"]
    for param in frozen:
        state = State(param.name, FROZEN)
        if state in base.held:
            shape = (part_size(param.numel, world_size),)
            fragments[param.name] = make_tensor(target.dtype(state), shape, tuple(_slice(target, state, rank)))
    has_fragments = not target.excludes_frozen(rest) and (bool(fragments) or not frozen)
    return {
        **rest,
        "module": module,
        "param_shapes": [target.shapes_node(one.params) for one in target.layout.sub_groups],
        "frozen_param_shapes": target.shapes_node(param.name for param in frozen) if has_fragments else None,
        "shared_params": dict(base.tied) if rank == 0 else {},
        "frozen_param_fragments": fragments if has_fragments else None,
        "dp_world_size": world_size,
    }


def _flat_tensor(target: ZeroTarget, params: tuple[str, ...], kind: str, rank: int) -> Any:
    """Return the flat tensor of a sub-group on one rank: the slices of its params, one after the other."""
    content: list[Piece] = []
    numel, dtype = 0, "F32"
    for param in params:
        state = State(param, kind)
        dtype = target.dtype(state)
        numel += part_size(target.base.held[state].numel, target.layout.world_size)
        content += _slice(target, state, rank)
    return make_tensor(dtype, (numel,), tuple(content))


def _slice(target: ZeroTarget, state: State, rank: int) -> Iterator[Piece]:
    """Yield one rank's slice of a state: its elements, then padding."""
    numel, dtype = target.base.held[state].numel, target.dtype(state)
    part = part_size(numel, target.layout.world_size)
    begin, end = min(rank * part, numel), min((rank + 1) * part, numel)
    if begin < end:
        yield Slot(state, dtype, begin, end)
    if padding := part - (end - begin):
        yield Zeros(padding * ITEMSIZE[dtype], _PADDING)
