"""Layout of a torch optimizer's state dict, and of weights that are the master weights.

The groups list the names of their params, so that the checkpoint can be read again whatever its groups are: as the
base's do, and else under a key of ours; the Trainer keeps the key and saves it again.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Container
from dataclasses import replace
from typing import Any

from llmtailor.checkpoint.index import CheckpointIndex, TensorEntry
from llmtailor.checkpoint.layout import Bytes, FileLayout, Slot
from llmtailor.checkpoint.optimizer import SAVED_NAMES, OptimizerLayout, with_names
from llmtailor.containers.pickle_nodes import make_tensor
from llmtailor.containers.safetensors import WeightFile, lay_out_weight_files, lay_out_weights, read_weights
from llmtailor.errors import MismatchError, Problem, UnsupportedCheckpoint
from llmtailor.formats.common.read import BUFFERS_KEY, TIED_KEY
from llmtailor.formats.weights import adapter_file, new_weights
from llmtailor.loaders.files import ADAPTER, ADAPTER_CONFIG
from llmtailor.model.states import BUFFER, FROZEN, MASTER, MODULE, WEIGHT, State

_NOT_OF_THE_OPTIMIZER = {WEIGHT, MASTER, FROZEN, MODULE, BUFFER}


def check_masters(dtype: str | None, allow_split: bool) -> None:
    """Raise MismatchError for options that don't apply if the weights are the master weights."""
    problems = []
    if dtype not in (None, "F32"):
        what = "without DeepSpeed the weights are the master weights, and rounding them would lose what was trained"
        problems.append(Problem("dtype", what, "leave dtype out of the recipe, or use --stage 1, 2 or 3"))
    if allow_split:
        what = "without DeepSpeed, weights and master weights are the same and can't come from different checkpoints"
        problems.append(Problem("--allow-split", what, "leave it out"))
    if problems:
        raise MismatchError(problems)


def kinds_by_param(base: CheckpointIndex) -> dict[str, dict[str, TensorEntry]]:
    """Return the elementwise states of the optimizer, by param and kind."""
    kinds: dict[str, dict[str, TensorEntry]] = {}
    for state, held in base.held.items():
        if state.kind not in _NOT_OF_THE_OPTIMIZER:
            kinds.setdefault(state.param, {})[state.kind] = held
    return kinds


def optimizer_tree(base: CheckpointIndex, layout: OptimizerLayout, *, is_partial: bool = False) -> dict[str, Any]:
    """Return the tree of ``optimizer.pt``, or of a partial checkpoint, with its tensors bound to states."""
    kinds = kinds_by_param(base)
    state: dict[int, dict[str, Any]] = {}
    nodes = []
    steps = [one.step for one in layout.sub_groups]  # one for each param, through the groups
    for group in layout.groups:
        ids = list(range(len(state), len(state) + len(group.params)))
        for number, param in zip(ids, group.params, strict=True):
            state[number] = {
                "step": step_node(base, steps[number], param),
                **{kind: _tensor(State(param, kind), held, base) for kind, held in kinds[param].items()},
            }
        listed = {**group.hyper, SAVED_NAMES: [*group.params]} if is_partial else with_names(group.hyper, group.params)
        nodes.append({**listed, "params": ids})
    return {"state": state, "param_groups": nodes}


def step_node(base: CheckpointIndex, step: float, what: str) -> Any:
    """Return a param's step in the form of torch's AdamW, or as the number that the base has instead."""
    if not (base.form.has_masters or base.train.step_is_tensor):
        return int(step)
    return make_tensor("F32", (), (Bytes(struct.pack("<f", step), f"step of {what}"),))


def _tensor(state: State, held: TensorEntry, base: CheckpointIndex) -> Any:
    dtype = "F32" if base.form.has_masters else held.live_dtype  # the dtype of the param
    return make_tensor(dtype, held.shape, (Slot(state, dtype, 0, held.numel),) if held.numel else ())


def lay_out_master_weights(base: CheckpointIndex) -> list[FileLayout]:
    """Return the weight files, which hold the master weights. Raises UnsupportedCheckpoint for an unknown adapter."""
    dtype = "F32" if base.form.has_masters else None
    if ADAPTER_CONFIG in base.files:
        file = adapter_file(base)
        if file is None:
            what = f"{ADAPTER} has the master weights, but its names for the trained params are unknown"
            raise UnsupportedCheckpoint.at(base.name, what, "stay with DeepSpeed: use --stage 1, 2 or 3")
        return [lay_out_weights(_from_originals(file, base), dtype)]
    # a resume looks for the params' own names
    if base.form.has_masters or not base.has_weight_files or _is_renamed(base):
        files = new_weights(replace(base, partial=replace(base.partial, saved_as=None)), dtype=dtype)
        files = tuple(replace(file, metadata={**file.metadata, **_roles_in(file.tensors, base)}) for file in files)
    else:
        files = read_weights(base.root, base.name)
    return lay_out_weight_files(tuple(_from_originals(file, base) for file in files), None)


def _is_renamed(base: CheckpointIndex) -> bool:
    """Return whether the weight files' names differ from the params', and are known."""
    params = [param.name for param in base.params.values() if param.role != "buffer"]
    unnamed = [name for name in params if State(name, WEIGHT) not in base.held]
    return bool(unnamed) and all({State(name, MASTER), State(name, FROZEN)} & base.held.keys() for name in unnamed)


def _from_originals(file: WeightFile, base: CheckpointIndex) -> WeightFile:
    """Fill weights from the states that they copy; what has another name than any param stays a weight."""
    filled_by = {name: (State(name, WEIGHT), 0) for name in file.tensors} | dict(file.filled_by)
    for name, (weight, begin) in filled_by.items():
        states = (State(weight.param, kind) for kind in (MASTER, FROZEN, BUFFER))
        filled_by[name] = (next((state for state in states if state in base.held), weight), begin)
    return replace(file, filled_by=filled_by)


def _roles_in(shard: Container[str], base: CheckpointIndex) -> dict[str, str]:
    """Return the metadata of a weight file: what neither its tensors nor, of an added module, the config tells."""
    buffers = [name for name, param in base.params.items() if name in shard and param.role == "buffer"]
    tied = {name: stored for name, stored in base.tied.items() if stored in shard}
    listed = {BUFFERS_KEY: ",".join(buffers)} if buffers else {}
    return {**listed, TIED_KEY: json.dumps(tied)}
