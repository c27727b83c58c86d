"""Layout of files of each rank, with DTensors; `rank_files` reads them.

torch compares the mesh in a file with that of the run, so the mesh is the base's, or one of all ranks; its fields are
those of torch 2.13 or 2.15.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.layout import FileLayout
from llmtailor.checkpoint.optimizer import ParamGroup, with_names
from llmtailor.checkpoint.schema import kinds_by_param
from llmtailor.containers.dcp import cut_rows
from llmtailor.containers.dtensor import MESH_FIELDS, DeviceMesh
from llmtailor.containers.torch_file import lay_out_torch_file
from llmtailor.containers.unpickle import Ordered, state_tensor
from llmtailor.errors import MismatchError, UnsupportedCheckpoint, some
from llmtailor.formats.dcp.target import DcpTarget
from llmtailor.formats.torch_states import state_nodes, written_dtype
from llmtailor.frameworks.files import is_rng_file
from llmtailor.model.roles import State


def check_mesh(base: CheckpointIndex, ranks: int) -> None:
    """Raise UnsupportedCheckpoint for a mesh that can't be written, MismatchError for ranks that don't fit it."""
    mesh = base.dcp.mesh if base.dcp else None
    if mesh is None:
        return
    if mesh.cuts not in ((0,), (None, 0)):
        what = f"its mesh {' x '.join(mesh.names)} is neither FSDP's nor HSDP's"
        raise UnsupportedCheckpoint.at(base.name, what, "use --to dcp")
    if mesh.fields != MESH_FIELDS:
        odd = some(sorted(mesh.fields ^ MESH_FIELDS))
        what = f"its DTensors are neither of torch 2.13 nor of 2.15 ({odd} of DeviceMesh), so it would not load these"
        raise UnsupportedCheckpoint.at(base.name, what, "use --to dcp, or save it again with one of these")
    if len(mesh.shape) == 2 and ranks > mesh.shape[1] and ranks % mesh.shape[1]:
        what = f"{ranks} ranks are not a multiple of the {mesh.shape[1]} that its tensors are cut over (HSDP)"
        raise MismatchError.at("--num-gpu", what, f"choose a multiple of {mesh.shape[1]}, or fewer")


Owned = Callable[[ParamGroup, int], tuple[str, ...]]
"""Returns the names behind the ids of a param group, by its number; None writes names instead of ids"""


def lay_out_ranks(
    target: DcpTarget, paths: Callable[[int], tuple[str, str]], owned: Owned | None = None
) -> list[FileLayout]:
    """Return the files of all ranks with their pieces of model and optimizer; ``paths`` returns those of a rank."""
    return [
        lay_out_torch_file(path, tree)
        for rank in range(target.wanted.layout.world_size)
        for path, tree in zip(paths(rank), _on_rank(target, _mesh(target, rank), owned), strict=True)
    ]


def _mesh(target: DcpTarget, rank: int) -> DeviceMesh:
    """Return the mesh as a rank has it: the base's, for as many ranks as are wanted."""
    ranks = target.wanted.layout.world_size
    own = target.base.dcp.mesh if target.base.dcp else None
    if own is None:  # random states show whether it has trained on GPUs
        rng = [tree for path, tree in target.base.train.trees.items() if is_rng_file(path) and isinstance(tree, dict)]
        on_cpu = rng and not any("cuda" in key for tree in rng for key in tree)
        return DeviceMesh("cpu" if on_cpu else "cuda", ("fsdp",), (ranks,), rank)
    shards = own.shape[-1] if len(own.shape) == 2 else ranks
    shape = (ranks // shards, shards) if ranks > shards else (ranks,)
    groups = own.groups[rank] if shape == own.shape else ()
    return DeviceMesh(own.device, own.names[-len(shape) :], shape, rank, groups, own.preserves_order)


def _on_rank(target: DcpTarget, mesh: DeviceMesh, owned: Owned | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a rank has of the model and of the optimizer."""
    at, shards = mesh.at[-1], mesh.shape[-1]

    def cut(state: State, dtype: str, shape: tuple[int, ...]) -> Any:
        low, high = cut_rows(shape[0], shards)[at]
        local = state_tensor(state, dtype, (high - low, *shape[1:]), low * math.prod(shape[1:]))
        return mesh.wrap(local, dtype, shape)

    model, made = Ordered(), dict[State, Any]()
    for name, dtype, shape, state, is_cut in target.weights():  # tied names share one
        if state not in made:
            made[state] = cut(state, dtype, shape) if is_cut else state_tensor(state, dtype, shape)
        model[name] = made[state]
    layout, states, groups, first = target.wanted.layout, dict[Any, Any](), [], 0
    kinds = kinds_by_param(target.base)
    numbers: dict[str, int | str] = {}
    for number, group in enumerate(layout.groups):
        options, ids = (
            target.options(group, number),
            dict[str, int | str](zip(group.params, group.params, strict=True)),
        )
        if owned is not None:
            names = owned(group, number)
            options, ids = with_names(options, names), {name: at for at, name in enumerate(names, first)}
        numbers |= ids
        first += len(ids)
        groups.append({**options, "params": [*ids.values()]})
    for param, node in state_nodes(target.base, layout).items():
        shape = target.base.params[param].shape
        for kind, held in kinds.get(param, {}).items():
            if kind in node and held.shape == shape:
                node[kind] = cut(State(param, kind), written_dtype(target.base, held), shape)
        if node:
            states[numbers[param]] = node
    return model, {"state": states, "param_groups": groups}
