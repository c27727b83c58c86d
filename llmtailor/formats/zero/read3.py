"""ZeRO-3: the places of states in the files of all ranks.

The partitioning rule (verified against DeepSpeed 0.19.8, about 100 checkpoints): every param is cut on its own into
``part = ceil(numel / world size)`` elements per rank; a rank's flat tensor is its slices in ``param_shapes`` order
without gaps. The excess of a slice over the param is padding; in fp32 it is uninitialised memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmtailor.checkpoint.index import TensorEntry, TrainState
from llmtailor.checkpoint.optimizer import ParamGroup, SubGroup, part_size
from llmtailor.checkpoint.placement import Sliced
from llmtailor.codes import Code
from llmtailor.errors import COPY_CHECKPOINT, PathIn, Problems, SourceError, some
from llmtailor.findings import WARNING, Finding
from llmtailor.formats.format import Trees
from llmtailor.formats.trainer import ADAPTER_CONFIG
from llmtailor.formats.zero.common import (
    Saved,
    attempt,
    check_params,
    check_tied,
    findings_of,
    first,
    keep_agreeing,
    place_of,
    read_all,
    rests,
)
from llmtailor.formats.zero.files import ShardFiles, fit_world_size
from llmtailor.formats.zero.shards3 import ModelShard, OptimShard, read_model_shard, read_optim_shard
from llmtailor.model.parts import Param
from llmtailor.model.states import BUFFER, FROZEN, ITEMSIZE, State


def read_zero3(trees: Trees, files: ShardFiles, name: str, problems: Problems) -> Saved | None:
    """Return the content of all ranks' files; no tensor byte is read except the 4 bytes of each ``step``.

    Every problem of every file is added to ``problems``. Unusable files leave holes; None if no others are left.
    """
    model = read_all(read_model_shard, trees, files.model, files.missing, name, problems)
    findings = findings_of(model)
    model = keep_agreeing(name, files.model, model, _model_facts, problems)
    optim = read_all(read_optim_shard, trees, files.optim, files.missing, name, problems)
    findings += findings_of(optim)
    optim = keep_agreeing(name, files.optim, optim, _optim_facts, problems)
    usual = first(model)
    if usual is None:
        return None
    world_size = usual.world_size
    fitted = fit_world_size(files, world_size, name, problems)
    if fitted is None:
        return None
    files = fitted
    attempt(lambda: _check_ranks(name, files.model, model[:world_size]), problems)
    optim = _check_flats(name, files.optim, optim[:world_size], usual, problems)
    model = _check_modules(name, files.model, model[:world_size], usual, problems)
    sample, usual = first(optim), first(model)
    if sample is None or usual is None:
        return None
    if model[0]:  # only rank 0 lists tied names
        place, tied = PathIn(name, files.model[0]), model[0].tied
        trainable = [param for shapes in usual.param_shapes for param in shapes]
        if not (trees.root / ADAPTER_CONFIG).exists():  # PEFT leaves out frozen params, but not their other names
            attempt(lambda: check_tied(tied, usual.module_names, place), problems)
        attempt(
            lambda: check_params(trainable, usual.frozen_shapes, usual.buffers, usual.module_names, tied, place),
            problems,
        )
    params, held = _hold(files, usual, sample, model, optim)
    group_of = {flat_id: group for group, (owned, _) in enumerate(sample.groups) for flat_id in owned}
    sub_groups = tuple(
        SubGroup(group_of[flat_id], tuple(shapes), sample.steps[flat_id])
        for flat_id, shapes in enumerate(usual.param_shapes)
    )
    shards = [*zip(files.optim, optim, strict=False), *zip(files.model, model, strict=False)]
    return Saved(
        stage=3,
        variant="plain",
        world_size=world_size,
        counters=usual.counters,
        params=params,
        tied={tied: stored for tied, stored in usual.tied.items() if stored in params},
        held=held,
        groups=tuple(
            ParamGroup(tuple(param for flat_id in owned for param in sub_groups[flat_id].params), hyper)
            for owned, hyper in sample.groups
        ),
        sub_groups=sub_groups,
        ds_config=sample.ds_config,
        train=TrainState(
            sample.step_is_tensor,
            usual.module_names,
            optim=rests(optim, world_size),
            model=rests(model, world_size),
        ),
        unreadable=frozenset({*files.missing, *(path for path, shard in shards if shard is None)}),
        findings=(*findings, *_count_findings(name, files, sample.partition_count, world_size)),
        facts=sample.facts,
    )


def _hold(
    files: ShardFiles,
    usual: ModelShard,
    sample: OptimShard,
    model: Sequence[ModelShard | None],
    optim: Sequence[OptimShard | None],
) -> tuple[dict[str, Param], dict[State, TensorEntry]]:
    """Return the params of the model and the places of their states, for usable shards ``usual`` and ``sample``."""
    world_size = usual.world_size
    held: dict[State, TensorEntry] = {}
    params: dict[str, Param] = {}
    ranks = [*zip(files.optim, [*optim, *[None] * (world_size - len(optim))], strict=True)]
    for flat_id, shapes in enumerate(usual.param_shapes):
        for kind, like in sample.flats[flat_id].items():
            shards = tuple(place_of(rank.flats[flat_id][kind] if rank else None, path) for path, rank in ranks)
            offset = 0
            for param, shape in shapes.items():
                params[param] = Param(param, shape, "trainable")
                part = part_size(params[param].numel, world_size)
                place = Sliced(shards, offset, part, ITEMSIZE[like.dtype])
                held[State(param, kind)] = TensorEntry(like.dtype, shape, place)
                offset += part
    models = [*zip(files.model, [*model, *[None] * (world_size - len(model))], strict=True)]
    for param, shape in usual.frozen_shapes.items():
        params[param] = Param(param, shape, "frozen")
        if param in usual.frozen_fragments:
            like = usual.frozen_fragments[param]
            part = part_size(params[param].numel, world_size)
            extents = tuple(place_of(rank.frozen_fragments[param] if rank else None, path) for path, rank in models)
            held[State(param, FROZEN)] = TensorEntry(like.dtype, shape, Sliced(extents, 0, part, ITEMSIZE[like.dtype]))
    for param, like in usual.buffers.items():
        params[param] = Param(param, like.shape, "buffer")
        extents = tuple(place_of(rank.buffers[param] if rank else None, path) for path, rank in models)
        place = Sliced(extents, 0, like.numel, ITEMSIZE[like.dtype])
        held[State(param, BUFFER)] = TensorEntry(like.dtype, (world_size, *like.shape), place)
    return params, held


def _model_facts(shard: ModelShard) -> dict[str, object]:
    return {
        "global_steps": shard.counters.global_steps,
        "skipped_steps": shard.counters.skipped_steps,
        "dp_world_size": shard.world_size,
        "the order, names or shapes of params (param_shapes)": [list(shapes.items()) for shapes in shard.param_shapes],
        "the names in the module": shard.module_names,
        "the set of frozen params": shard.frozen_shapes,
        "the set or dtypes of frozen fragments": {name: piece.dtype for name, piece in shard.frozen_fragments.items()},
        "the set, shapes or dtypes of buffers": {
            name: (tensor.dtype, tensor.shape) for name, tensor in shard.buffers.items()
        },
        **shard.facts,
    }


def _optim_facts(shard: OptimShard) -> dict[str, object]:
    return {
        "Adam's step": shard.steps,
        "partition_count": shard.partition_count,
        "the number of flat tensors": len(shard.flats),
        "the kinds of optimizer state": [sorted(flat) for flat in shard.flats],
        "the dtype of a state": [{kind: tensor.dtype for kind, tensor in flat.items()} for flat in shard.flats],
        **shard.facts,
    }


def _check_flats(
    name: str, paths: Sequence[str], optim: Sequence[OptimShard | None], usual: ModelShard, problems: Problems
) -> list[OptimShard | None]:
    """Report every flat tensor of a wrong length by the partitioning rule; put None for its file."""
    lengths = [
        sum(part_size(Param("", shape, "").numel, usual.world_size) for shape in shapes.values())
        for shapes in usual.param_shapes
    ]
    kept: list[OptimShard | None] = []
    for path, shard in zip(paths, optim, strict=False):
        wrong = []
        if shard is not None and len(shard.flats) != len(lengths):
            wrong.append(f"it holds {len(shard.flats)} flat tensors, but the model states describe {len(lengths)}")
        elif shard is not None:
            for flat_id, (flat, length) in enumerate(zip(shard.flats, lengths, strict=True)):
                have = next(iter(flat.values())).numel  # all kinds of a sub-group have the same length
                if have != length:
                    wrong.append(f"sub-group {flat_id} has {have} elements, but its params add up to {length}")
        for what in wrong:
            problems.add(SourceError.at(PathIn(name, path), what, COPY_CHECKPOINT, Code.STATE_SIZE))
        kept.append(None if wrong else shard)
    return kept


def _check_modules(
    name: str, paths: Sequence[str], model: Sequence[ModelShard | None], usual: ModelShard, problems: Problems
) -> list[ModelShard | None]:
    """Report frozen fragments of a wrong length, and names that make a strict load fail."""
    trained = {param for shapes in usual.param_shapes for param in shapes}
    known = trained | set(usual.frozen_shapes) | set(usual.buffers) | set(usual.tied)
    kept: list[ModelShard | None] = []
    for path, shard in zip(paths, model, strict=False):
        wrong = []
        for param, piece in shard.frozen_fragments.items() if shard else ():
            length = part_size(Param("", usual.frozen_shapes.get(param, ()), "").numel, usual.world_size)
            if piece.shape != (length,):
                wrong.append(f"the fragment of frozen {param} has shape {list(piece.shape)} instead of [{length}]")
        if shard and (lacking := sorted(known.difference(shard.module_names))):
            wrong.append(f"module lacks {some(lacking)}; a resume would fail")
        if shard and model[0] and (unknown := sorted(set(shard.module_names) - known)):  # only rank 0 lists tied names
            wrong.append(f"module lists {some(unknown)}, which have no state; a resume may fail")
        for what in wrong:
            problems.add(SourceError.at(PathIn(name, path), what, COPY_CHECKPOINT))
        kept.append(None if wrong else shard)
    return kept


def _check_ranks(name: str, paths: Sequence[str], model: Sequence[ModelShard | None]) -> None:
    """Raise SourceError for ``shared_params`` in a file that is not rank 0's, the only one to have them."""
    for path, shard in zip(paths[1:], model[1:], strict=False):
        if model[0] and shard and shard.tied and not model[0].tied:
            what = "it lists shared_params, which only rank 0 does, but rank 0's file has none"
            raise SourceError.at(PathIn(name, path), what, "the files of two ranks are swapped: swap them back")


def _count_findings(name: str, files: ShardFiles, count: int, world_size: int) -> tuple[Finding, ...]:
    if count == world_size:
        return ()
    what = f"partition_count is {count}, but the model states say {world_size} ranks saved them"
    fix = "a resume does not read it, but DeepSpeed's tools do; copy the optim_states again"
    return (Finding(PathIn(name, files.tag), what, fix, Code.PARTITION_COUNT, WARNING),)
