"""Layout of checkpoints of FSDP trainings, from any base. `read` describes them."""

from __future__ import annotations

import json

from llmtailor.checkpoint.index import FSDP, FULL, RANKS, SHARDS, CheckpointIndex, DcpKeyLayout, TensorEntry
from llmtailor.checkpoint.layout import FileLayout
from llmtailor.checkpoint.placement import Absent
from llmtailor.checkpoint.wanted import Wanted
from llmtailor.containers.dcp import cut_rows
from llmtailor.containers.safetensors import WeightFile, lay_out_weights
from llmtailor.containers.torch_file import lay_out_torch_file
from llmtailor.containers.unpickle import state_tensor
from llmtailor.errors import Problem
from llmtailor.formats.dcp.builder import FolderBuilder
from llmtailor.formats.dcp.folder import MODEL_FOLDER, OPTIMIZER_FOLDER, SHARDING
from llmtailor.formats.dcp.links import has_linkable_files
from llmtailor.formats.dcp.rank_layout import check_mesh, lay_out_ranks
from llmtailor.formats.dcp.target import DcpTarget, check_states
from llmtailor.formats.format import Writer
from llmtailor.formats.fsdp.read import MODEL_FILE, MODEL_OF_RANK, OPTIMIZER_FILE, OPTIMIZER_OF_RANK
from llmtailor.formats.torch_states import lay_out_master_weights, state_nodes
from llmtailor.frameworks.files import ENGINE_FILES, SCALER
from llmtailor.frameworks.write import lay_out_trainer_files, synthesize_files

_USUAL = DcpKeyLayout(model=("model",), optimizer=("optimizer",))


def lay_out(base: CheckpointIndex, wanted: Wanted) -> tuple[list[FileLayout], list[Problem]]:
    """Lay out a composite's files; see `Writer`."""
    target = DcpTarget.of(base, wanted, FSDP, _USUAL)
    if target.style.form == RANKS:
        check_mesh(base, wanted.layout.world_size)
    made, notices = synthesize_files(base, wanted)
    dtype = "F32" if base.form.has_masters else None
    own = {FULL: _full_files, RANKS: _rank_files}.get(target.style.form, _folders)
    laid_out = [*made, *own(target), *target.linked()]
    layouts = lay_out_trainer_files(base, wanted, laid_out, dtype, {SCALER, *ENGINE_FILES}, has_weights=True)
    return layouts, [*notices, *target.notices()]


def _rank_files(target: DcpTarget) -> list[FileLayout]:
    return lay_out_ranks(target, lambda rank: (MODEL_OF_RANK.format(rank), OPTIMIZER_OF_RANK.format(rank)))


def _folders(target: DcpTarget) -> list[FileLayout]:
    """Return the files of the optimizer's folder, and of the model's, or its shards."""
    ranks = target.wanted.layout.world_size
    optimizer, model = (FolderBuilder(folder, ranks, target.links) for folder in (OPTIMIZER_FOLDER, MODEL_FOLDER))
    target.add_optimizer(optimizer)
    if target.style is target.base.dcp:
        target.add_others(optimizer)
    target.add_roles(optimizer)
    if target.style.form == SHARDS:
        return [*_shards(target), *optimizer.finish()]
    target.add_model(model)
    return [*model.finish(), *optimizer.finish()]


def _full_files(target: DcpTarget) -> list[FileLayout]:
    """Return the model's file, the optimizer's, and weight files for other readers."""
    model = {name: state_tensor(state, dtype, shape) for name, dtype, shape, state, _ in target.weights()}
    layout = target.wanted.layout
    nodes = [{**target.options(group, at), "params": list(group.params)} for at, group in enumerate(layout.groups)]
    optimizer = {"state": state_nodes(target.base, layout), "param_groups": nodes}
    files = [lay_out_torch_file(MODEL_FILE, model), lay_out_torch_file(OPTIMIZER_FILE, optimizer)]
    return [*files, *lay_out_master_weights(target.base)]


def _shards(target: DcpTarget) -> list[FileLayout]:
    """Return the safetensors file of each rank."""
    ranks = target.wanted.layout.world_size
    layouts = []
    weights = [*target.weights()]
    for rank in range(ranks):
        tensors, filled, offsets = {}, {}, {}
        for name, dtype, shape, state, is_cut in weights:
            low, high = cut_rows(shape[0], ranks)[rank] if is_cut and shape else (0, shape[0] if shape else 1)
            if low == high or (not is_cut and rank):
                continue
            sizes = (high - low, *shape[1:]) if shape else ()
            row = target.base.params[state.param].numel // (shape[0] if shape else 1)
            tensors[name] = TensorEntry(dtype, sizes, Absent())
            filled[name] = (state, low * row)
            offsets[name] = {"saved_offsets": [low, *[0] * (len(shape) - 1)] if shape else []}
        metadata = {"DCP_VERSION": "1.0", "format": "pt", SHARDING: json.dumps(offsets)}
        path = f"shard-{rank + 1:05}-model-00001-of-00001.safetensors"
        layouts.append(lay_out_weights(WeightFile(path, tensors, metadata, filled), None))
    return layouts


WRITER = Writer(
    lay_out=lay_out,
    weights_folder=f"{MODEL_FOLDER}/",
    has_linkable_files=has_linkable_files,
    check_linkable=lambda index: check_states(index, index.groups),
)
