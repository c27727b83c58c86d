"""ZeRO-1 and ZeRO-2: the places of states in the files of all ranks.

Names and order come from ``param_shapes``, which is right even under ``round_robin_gradients``, where the mappings that
DeepSpeed saves beside it are wrong. Master weights are saved without the padding at the vector's end, moments with it;
BF16_Optimizer saves both with it, and elastic checkpoints both without.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmtailor.checkpoint.index import TensorEntry, TrainState
from llmtailor.checkpoint.optimizer import ParamGroup, SubGroup, Vector, lay_out_vector, round_robin
from llmtailor.checkpoint.placement import Contiguous, Extent, Partitioned, Sliced
from llmtailor.codes import Code
from llmtailor.containers.fields import (
    Tensor,
    as_dict,
    get,
    get_count,
    read_names,
    read_shapes,
    read_tensor,
    read_tied,
)
from llmtailor.containers.json import check_name
from llmtailor.errors import COPY_FILE, PathIn, Problems, SourceError, some
from llmtailor.findings import ERROR, WARNING, Finding
from llmtailor.formats.format import Trees
from llmtailor.formats.resumed.tables import check_fields
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
from llmtailor.formats.zero.shards3 import Counters, read_counters, refuse_other_parallelism, rest_of_model
from llmtailor.formats.zero.shards12 import PartitionShard, read_partition_shard
from llmtailor.formats.zero.tables import MODEL
from llmtailor.model.parts import Param
from llmtailor.model.states import BUFFER, FROZEN, ITEMSIZE, MASTER, State


def check_ranks(
    name: str,
    paths: Sequence[str],
    shards: Sequence[PartitionShard | None],
    param_shapes: Sequence[Mapping[str, tuple[int, ...]]],
    vectors: Sequence[Vector],
) -> None:
    """Raise SourceError for a file whose ``param_slice_mappings`` are those of another rank.

    Other mismatches prove nothing: under ``round_robin_gradients`` DeepSpeed saves wrong ones.
    """
    if any(shard is not None and is_dealt_out(shard) for shard in shards):
        return
    of_rank = [
        tuple(_mapping(shapes, vector, rank) for shapes, vector in zip(param_shapes, vectors, strict=True))
        for rank in range(len(shards))
    ]
    for rank, (path, shard) in enumerate(zip(paths, shards, strict=False)):
        if shard is not None and shard.mappings != of_rank[rank] and shard.mappings in of_rank:
            what = f"its param_slice_mappings are those of rank {of_rank.index(shard.mappings)}"
            raise SourceError.at(
                PathIn(name, path), what, "the files of two ranks are swapped: swap them back", Code.FILE_SWAPPED
            )


def _mapping(shapes: Mapping[str, tuple[int, ...]], vector: Vector, rank: int) -> dict[str, tuple[Any, Any]]:
    """Return what DeepSpeed saves of a group: param -> its elements on a rank, and their start in the partition."""
    low, high = rank * vector.partition, (rank + 1) * vector.partition
    found: dict[str, tuple[Any, Any]] = {}
    for (param, shape), offset in zip(shapes.items(), vector.offsets, strict=True):
        begin, end = max(low, offset), min(high, offset + math.prod(shape))
        if begin < end:
            found[param] = (end - begin, begin - low)
    return found


def is_dealt_out(shard: PartitionShard) -> bool:
    """Return whether ``round_robin_gradients`` has dealt out a group's params; BF16_Optimizer ignores the setting."""
    zero = shard.ds_config.get("zero_optimization")
    dealt = isinstance(zero, dict) and zero.get("round_robin_gradients") is True
    return dealt and shard.variant != "bf16_optimizer"


@dataclass(frozen=True, slots=True)
class WholeModel:
    """The content of ``mp_rank_00_model_states``."""

    param_shapes: tuple[Mapping[str, tuple[int, ...]], ...]
    """Per group, in the order of the vector"""
    module: Mapping[str, Tensor]
    """Params, frozen params and buffers, in the order of the model, including tied names"""
    buffer_names: frozenset[str]
    tied: Mapping[str, str]
    frozen: frozenset[str]
    """Named by ZeRO-2; in ZeRO-1, everything in the module that has no other role"""
    fragments: Mapping[str, Tensor]
    """ZeRO-2: the frozen params again. A resume uses these after the module's"""
    world_size: int
    counters: Counters
    rest: Mapping[str, Any]
    """The tree without params and buffers"""
    findings: tuple[Finding, ...]


def read_whole_model(trees: Trees, path: str, where: str) -> WholeModel:
    """Decode ``mp_rank_00_model_states``. Raises SourceError, or UnsupportedCheckpoint for other parallelism."""
    tree = as_dict(trees.read(path, where).tree, "the file", where)
    refuse_other_parallelism(tree, where)
    module = get(tree, "module", dict, where)
    frozen = read_shapes(tree.get("frozen_param_shapes") or {}, "frozen_param_shapes", where)
    tied = read_tied(tree.get("shared_params"), where)
    if (trees.root / ADAPTER_CONFIG).exists():  # PEFT leaves out frozen params, but not their other names
        lost = {name for name, stored in tied.items() if stored not in module}
        module = {name: node for name, node in module.items() if name not in lost}
        tied = {name: stored for name, stored in tied.items() if name not in lost}
    tensors = {
        check_name(name, "module", where): read_tensor(node, f"module[{name}]", where) for name, node in module.items()
    }
    return WholeModel(
        param_shapes=tuple(
            read_shapes(entry, "param_shapes", where) for entry in get(tree, "param_shapes", list, where)
        ),
        module=tensors,
        buffer_names=read_names(tree.get("buffer_names"), "buffer_names", where),
        tied=tied,
        frozen=frozenset(frozen),
        fragments=_fragments(tree.get("frozen_param_fragments"), frozen, where),
        world_size=get_count(tree, "dp_world_size", where),
        counters=read_counters(tree, where),
        rest=rest_of_model(tree, [name for name, tensor in tensors.items() if not tensor.numel]),
        findings=tuple(check_fields(tree, MODEL, where)),
    )


def _fragments(node: Any, frozen: Mapping[str, tuple[int, ...]], where: str) -> dict[str, Tensor]:
    """Return ``frozen_param_fragments``, if any. Raises SourceError if they are not those of all params."""
    if node is None:
        return {}
    nodes = as_dict(node, "frozen_param_fragments", where)
    if nodes.keys() != frozen.keys():
        what = "frozen_param_fragments and frozen_param_shapes list different params"
        raise SourceError.at(where, what, COPY_FILE, Code.FIELD_CONFLICT)
    fragments = {name: read_tensor(one, f"frozen_param_fragments[{name}]", where) for name, one in nodes.items()}
    if other := [name for name, fragment in fragments.items() if fragment.shape != frozen[name]]:
        what = f"the fragments of the frozen {some(other)} have other shapes than frozen_param_shapes"
        raise SourceError.at(where, what, COPY_FILE, Code.STATE_SIZE)
    return fragments


def read_zero12(trees: Trees, files: ShardFiles, name: str, problems: Problems) -> Saved | None:
    """Return the content of all ranks' files; no tensor byte is read except the 4 bytes of each ``step``.

    Every problem of every file is added to ``problems``. Ranks with unusable files leave holes; None if there are no
    others, or if the model states can't be read.
    """
    shards = read_all(read_partition_shard, trees, files.optim, files.missing, name, problems)
    findings = findings_of(shards)
    shards = keep_agreeing(name, files.optim, shards, _facts, problems)
    model = first(read_all(read_whole_model, trees, files.model, files.missing, name, problems))
    if model is None:
        return None
    world_size = model.world_size
    fitted = fit_world_size(files, world_size, name, problems)
    if fitted is None:
        return None
    files = fitted
    attempt(lambda: _check_module(model, PathIn(name, files.model[0])), problems)
    sample = first(shards)
    if sample is None:
        return None
    vectors = _vectors(model, sample)
    attempt(lambda: check_ranks(name, files.optim, shards[:world_size], model.param_shapes, vectors), problems)
    shards = _check_partitions(name, files.optim, shards[:world_size], vectors, problems)
    if first(shards) is None:
        return None
    params, held = _hold(files, model, sample, [*shards, *[None] * (world_size - len(shards))], vectors)
    gaps = sample.gaps if any(any(row) for row in sample.gaps) else ((),) * len(model.param_shapes)
    unusable = (path for path, shard in zip(files.optim, shards, strict=False) if shard is None)
    return Saved(
        stage=sample.stage,
        variant=sample.variant,
        world_size=world_size,
        counters=model.counters,
        params=params,
        tied=model.tied,
        held=held,
        groups=tuple(
            ParamGroup(params, hyper)
            for params, hyper in zip(
                _group_order(model, sample, world_size), sample.hyper or ({},) * len(model.param_shapes), strict=True
            )
        ),
        sub_groups=tuple(
            SubGroup(number, tuple(shapes), step, gap)
            for number, (shapes, step, gap) in enumerate(zip(model.param_shapes, sample.steps, gaps, strict=True))
        ),
        ds_config=sample.ds_config,
        train=TrainState(
            sample.step_is_tensor,
            tuple(model.rest["module"]),
            optim=rests(shards, world_size),
            model=(model.rest,),
        ),
        module=_hold_module(model),
        unreadable=frozenset({*files.missing, *unusable}),
        findings=(*findings, *model.findings, *_findings(name, files, sample, world_size)),
        facts=sample.facts,
    )


def _facts(shard: PartitionShard) -> dict[str, object]:
    return {
        "zero_stage": shard.stage,
        "Adam's step": shard.steps,
        "partition_count": shard.partition_counts,
        "the kinds of optimizer state": [sorted(part) for part in shard.parts],
        "the dtype of a state": [{kind: tensor.dtype for kind, tensor in part.items()} for part in shard.parts],
        "param_alignment_paddings": shard.gaps,
        **shard.facts,
    }


def _vectors(model: WholeModel, sample: PartitionShard) -> tuple[Vector, ...]:
    """Return the layout of each group's vector."""
    return tuple(
        lay_out_vector(
            [Param("", shape, "").numel for shape in shapes.values()],
            sample.gaps[group] if list(map(len, sample.gaps)) == list(map(len, model.param_shapes)) else (),
            model.world_size,
        )
        for group, shapes in enumerate(model.param_shapes)
    )


def _check_module(model: WholeModel, where: str) -> None:
    """Raise SourceError for names and shapes that make a strict load of the module fail."""
    wanted = {name: shape for shapes in model.param_shapes for name, shape in shapes.items()}
    if lacking := sorted({*wanted, *model.tied, *model.frozen, *model.buffer_names} - set(model.module)):
        raise SourceError.at(where, f"module lacks {some(lacking)}; a resume would fail", COPY_FILE, Code.FIELD_MISSING)
    check_tied(model.tied, model.module, where)
    trainable = [name for shapes in model.param_shapes for name in shapes]
    check_params(trainable, (), model.buffer_names & model.module.keys(), model.module, model.module, where)
    shapes = [
        f"{name} {list(model.module[name].shape)} instead of {list(shape)}"
        for name, shape in wanted.items()
        if model.module[name].shape != shape
    ]
    if shapes:
        raise SourceError.at(
            where, f"module has other shapes than param_shapes: {some(shapes)}", COPY_FILE, Code.STATE_SIZE
        )


def _check_partitions(
    name: str,
    paths: Sequence[str],
    shards: Sequence[PartitionShard | None],
    vectors: Sequence[Vector],
    problems: Problems,
) -> list[PartitionShard | None]:
    """Report every partition of a wrong length by the partitioning rule; put None for its file."""
    kept: list[PartitionShard | None] = []
    for rank, (path, shard) in enumerate(zip(paths, shards, strict=False)):
        wrong = []
        if shard is not None and len(shard.parts) != len(vectors):
            wrong.append(f"it has {len(shard.parts)} groups, but the model states describe {len(vectors)}")
        elif shard is not None and shard.gaps and list(map(len, shard.gaps)) != [len(one.offsets) for one in vectors]:
            wrong.append("param_alignment_paddings does not have one entry for each param")
        elif shard is not None:
            for group, (part, vector) in enumerate(zip(shard.parts, vectors, strict=True)):
                for kind, tensor in part.items():
                    stripped = shard.variant == "elastic" or (shard.variant == "plain" and kind == MASTER)
                    length = vector.partition - (vector.padding(rank) if stripped else 0)
                    if tensor.numel != length:
                        wrong.append(f"{kind} of group {group} has {tensor.numel} elements instead of {length}")
        for what in wrong:
            problems.add(SourceError.at(PathIn(name, path), what, COPY_FILE, Code.STATE_SIZE))
        kept.append(None if wrong else shard)
    return kept


def _hold(
    files: ShardFiles,
    model: WholeModel,
    sample: PartitionShard,
    shards: Sequence[PartitionShard | None],
    vectors: Sequence[Vector],
) -> tuple[dict[str, Param], dict[State, TensorEntry]]:
    """Return the params of the model and the places of their states; ``sample`` is one of the shards."""
    params: dict[str, Param] = {}
    held: dict[State, TensorEntry] = {}
    ranks = [*zip(files.optim, shards, strict=True)]
    for group, (shapes, vector) in enumerate(zip(model.param_shapes, vectors, strict=True)):
        for kind, like in sample.parts[group].items():
            extents = tuple(place_of(shard.parts[group][kind] if shard else None, path) for path, shard in ranks)
            for (param, shape), offset in zip(shapes.items(), vector.offsets, strict=True):
                params[param] = Param(param, shape, "trainable")
                place = Partitioned(extents, offset, vector.partition, ITEMSIZE[like.dtype])
                held[State(param, kind)] = TensorEntry(like.dtype, shape, place)
    for name, tensor in model.module.items():
        if name in model.buffer_names:
            params[name] = Param(name, tensor.shape, "buffer")
            # one file for all ranks, so every rank has the buffers of rank 0
            copies: tuple[Extent, ...] = (tensor.extent,) * model.world_size
            place_of_copies = Sliced(copies, 0, tensor.numel, ITEMSIZE[tensor.dtype])
            held[State(name, BUFFER)] = TensorEntry(tensor.dtype, (model.world_size, *tensor.shape), place_of_copies)
        elif name not in params and name not in model.tied:
            params[name] = Param(name, tensor.shape, "frozen")
            held[State(name, FROZEN)] = _whole(model.fragments.get(name, tensor))
    return params, held


def _hold_module(model: WholeModel) -> dict[str, TensorEntry]:
    """Return the second places of states in the module: trainable params, tied names, frozen fragments."""
    names = {name for shapes in model.param_shapes for name in shapes} | set(model.tied) | set(model.fragments)
    return {name: _whole(tensor) for name, tensor in model.module.items() if name in names}


def _whole(tensor: Tensor) -> TensorEntry:
    return TensorEntry(tensor.dtype, tensor.shape, Contiguous(tensor.extent, ITEMSIZE[tensor.dtype]))


def _findings(name: str, files: ShardFiles, sample: PartitionShard, world_size: int) -> tuple[Finding, ...]:
    found, where = [], PathIn(name, files.tag)
    if set(sample.partition_counts) - {world_size}:
        counts = ", ".join(map(str, sorted(set(sample.partition_counts))))
        what = f"partition_count is {counts}, but the model states say {world_size} ranks saved them"
        fix = "a resume does not read it, but DeepSpeed's tools do; copy the optim_states again"
        found.append(Finding(where, what, fix, Code.PARTITION_COUNT, WARNING))
    if sample.variant == "elastic" and not sample.has_group_step:
        what = "elastic checkpoints of an optimizer that keeps its step per param can't be resumed by stock DeepSpeed"
        fix = "train without elastic_checkpoint; recipes can still use this checkpoint's states"
        found.append(Finding(where, what, fix, Code.ELASTIC, ERROR))
    return tuple(found)


def _group_order(model: WholeModel, shard: PartitionShard, world_size: int) -> tuple[tuple[str, ...], ...]:
    """Return the params of each group in the optimizer's order, with ``round_robin_gradients`` undone."""
    permuted = is_dealt_out(shard)
    ordered = []
    for shapes in model.param_shapes:
        names = list(shapes)
        if permuted:
            original: dict[int, str] = dict(zip(round_robin(len(names), world_size), names, strict=True))
            names = [original[number] for number in range(len(names))]
        ordered.append(tuple(names))
    return tuple(ordered)
