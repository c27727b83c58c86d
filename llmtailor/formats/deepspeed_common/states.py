"""The places of states in the files of all ranks, and whether these files fit together.

The cutting rules, verified against DeepSpeed 0.19.8 (about 100 checkpoints). ZeRO-3 cuts every param on its own into
``part = ceil(numel / world size)`` elements per rank; a rank's flat tensor is its slices in ``param_shapes`` order
without gaps. The excess of a slice over the param is padding; in fp32 it is uninitialised memory.

ZeRO-1 and ZeRO-2 cut one vector per group; see `checkpoint.sharding`. Names and order come from ``param_shapes``, which
is right even under ``round_robin_gradients``, where the mappings that DeepSpeed saves beside it are wrong. Master
weights are saved without the padding at the vector's end, moments with it; BF16_Optimizer saves both with it, and
elastic checkpoints both without.

Places in DeepSpeed's files that must agree: steps, dtypes, the loss scaler, weight decay. Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from llmtailor.checkpoint.index import CheckpointIndex, TensorEntry
from llmtailor.checkpoint.optimizer import Vector, lay_out_vector, part_size
from llmtailor.checkpoint.placement import Contiguous, Extent, Partitioned, Placement, Sliced
from llmtailor.codes import Code
from llmtailor.containers.json import Tensor, Trees
from llmtailor.errors import COPY_CHECKPOINT, COPY_FILE, PathIn, Problems, SourceError, attempt, some
from llmtailor.findings import ERROR, WARNING, Finding
from llmtailor.formats.deepspeed_common.files import ShardFiles, fit_world_size
from llmtailor.formats.deepspeed_common.shards import (
    AnyShard,
    ModelShard,
    OptimShard,
    read_all,
    read_model_shard,
    read_optim_shard,
    section,
)
from llmtailor.loaders.files import ADAPTER_CONFIG
from llmtailor.loaders.stock_fields import decays_vectors_alone
from llmtailor.model.parts import Param
from llmtailor.model.roles import BUFFER, EXP_AVG, EXP_AVG_SQ, FROZEN, ITEMSIZE, MASTER, MODULE, State

Untrained = Iterator[tuple[Param, str, TensorEntry | None]]
_SWAPPED = "the files of two ranks are swapped: swap them back"


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a sub-group's flat tensors are spread over the ranks."""

    parts: tuple[int, ...]
    """ZeRO-3: the elements of each param per rank"""
    vector: Vector
    """ZeRO-1/2; empty for ZeRO-3"""

    def length(self, rank: int, is_stripped: bool) -> int:
        """Return how many elements a rank has, without padding at the vector's end if ``is_stripped``."""
        return sum(self.parts) + self.vector.partition - (self.vector.padding(rank) if is_stripped else 0)

    def places(self, extents: tuple[Extent, ...], itemsize: int) -> Iterator[Placement]:
        """Yield the place of each param in the ranks' flat tensors."""
        for offset, part in zip(accumulate(self.parts, initial=0), self.parts, strict=False):
            yield Sliced(extents, offset, part, itemsize)
        for offset in self.vector.offsets:
            yield Partitioned(extents, offset, self.vector.partition, itemsize)


@dataclass(frozen=True, slots=True)
class Ranks:
    """The files of all ranks, with None for those that are missing, damaged, or of another save than most."""

    files: ShardFiles
    """Those of as many ranks as the files say"""
    optim: Sequence[OptimShard | None]
    model: Sequence[ModelShard | None]
    some_optim: OptimShard
    some_model: ModelShard
    params: Mapping[str, Param]
    held: Mapping[State, TensorEntry]
    findings: tuple[Finding, ...]
    """On each file by itself"""

    @property
    def unreadable(self) -> frozenset[str]:
        shards = (*zip(self.files.optim, self.optim, strict=True), *zip(self.files.model, self.model, strict=True))
        return frozenset({*self.files.missing, *(path for path, shard in shards if shard is None)})

    def hold_module(self) -> dict[str, TensorEntry]:
        """Return the second places of states in ZeRO-1/2's module: trainable params, tied names, frozen fragments."""
        model = self.some_model
        names = {name for shapes in model.param_shapes for name in shapes} | set(model.tied) | set(model.fragments)
        kept = {} if self.files.is_zero3 else model.module
        return {name: _whole(tensor) for name, tensor in kept.items() if name in names}


def read_ranks(trees: Trees, files: ShardFiles, name: str, problems: Problems) -> Ranks | None:
    """Return the content of all ranks' files; no tensor byte is read except the 4 bytes of each ``step``.

    Every problem of every file is added to ``problems``. None if too few files are usable.
    """
    found: list[Finding] = []
    model = read_models(trees, files, name, problems, found)
    optim = read_all(read_optim_shard, trees, files, files.optim, name, problems, found)
    usual, sample = _first(model), _first(optim)
    if usual is None:
        return None
    fitted = fit_world_size(files, usual.world_size, name, problems)
    if fitted is None:
        return None
    files, known = fitted, usual
    optim, model = _pad(optim, len(files.optim)), _pad(model, len(files.model))
    cuts = [_cut(group, usual, sample) for group in range(len(usual.param_shapes)) if sample is not None]
    if sample is not None and not files.is_zero3:
        attempt(lambda: _check_mappings(name, files.optim, optim, known, cuts), problems)
    optim = _drop(files.optim, optim, _wrong_flats(usual, cuts), name, problems, Code.STATE_SIZE)
    model = fit_models(trees, files, model, name, problems)
    sample, usual = _first(optim), _first(model)
    if sample is None or usual is None:
        return None
    params: dict[str, Param] = {}
    held: dict[State, TensorEntry] = {}
    untrained = hold_untrained(files, usual, model)
    for param, kind, entry in (*_trained(files, usual, sample, optim, cuts), *untrained):
        params[param.name] = param
        if entry is not None:
            held[State(param.name, kind)] = entry
    return Ranks(files, optim, model, sample, usual, params, held, tuple(found))


def read_models(
    trees: Trees, files: ShardFiles, name: str, problems: Problems, found: list[Finding]
) -> list[ModelShard | None]:
    """Return the model states in each of the files; see `read_ranks`. Findings on each file are added to ``found``."""
    return read_all(read_model_shard, trees, files, files.model, name, problems, found)


def fit_models(
    trees: Trees, files: ShardFiles, model: Sequence[ModelShard | None], name: str, problems: Problems
) -> list[ModelShard | None]:
    """Return the model states that fit together, and None for others, which are reported."""
    kept, where = [*model], PathIn(name, files.model[0])
    usual = _first(kept)
    if usual is None:
        return kept
    if not files.is_zero3:
        whole = usual
        attempt(lambda: _check_whole_module(whole, where), problems)
        return kept
    attempt(lambda: _check_tied_once(name, files.model, kept), problems)
    kept = _drop(files.model, kept, _wrong_module(usual, kept[0]), name, problems, Code.DAMAGED)
    if (first := _first(kept)) and kept[0]:  # only rank 0 lists tied names
        known, tied = first, kept[0].tied
        if not (trees.root / ADAPTER_CONFIG).exists():  # PEFT leaves out frozen params, but not their other names
            attempt(lambda: _check_tied(tied, known.names, where), problems)
        attempt(lambda: _check_params(known, known.frozen_shapes, known.buffer_names, tied, where), problems)
    return kept


def hold_untrained(files: ShardFiles, usual: ModelShard, model: Sequence[ModelShard | None]) -> Untrained:
    """Return frozen params and buffers, each with the kind and place of its state, if the files hold it."""
    return _rest3(files, usual, model) if files.is_zero3 else _rest12(usual)


def _drop(
    paths: Sequence[str],
    shards: Sequence[AnyShard | None],
    wrong: Callable[[int, AnyShard], Iterable[str]],
    name: str,
    problems: Problems,
    code: Code,
) -> list[AnyShard | None]:
    """Report what is ``wrong`` with a file; put None for it."""
    kept: list[AnyShard | None] = []
    for rank, (path, shard) in enumerate(zip(paths, shards, strict=True)):
        found = [] if shard is None else [*wrong(rank, shard)]
        for what in found:
            problems.add(SourceError.at(PathIn(name, path), what, COPY_CHECKPOINT, code))
        kept.append(None if found else shard)
    return kept


def _first(shards: Iterable[AnyShard | None]) -> AnyShard | None:
    return next((shard for shard in shards if shard is not None), None)


def _pad(shards: Sequence[AnyShard | None], count: int) -> list[AnyShard | None]:
    return [*shards[:count], *[None] * (count - len(shards))]


def _cut(group: int, model: ModelShard, sample: OptimShard) -> _Cut:
    numels = [math.prod(shape) for shape in model.param_shapes[group].values()]
    if sample.stage == 3:
        return _Cut(tuple(part_size(numel, model.world_size) for numel in numels), lay_out_vector((), (), 1))
    fits = list(map(len, sample.gaps)) == list(map(len, model.param_shapes))
    return _Cut((), lay_out_vector(numels, sample.gaps[group] if fits else (), model.world_size))


def _wrong_flats(model: ModelShard, cuts: Sequence[_Cut]) -> Callable[[int, OptimShard], Iterator[str]]:
    """Return what yields flat tensors of a wrong length by the cutting rule."""
    counts = list(map(len, model.param_shapes))

    def wrong(rank: int, shard: OptimShard) -> Iterator[str]:
        if len(shard.flats) != len(cuts):
            yield f"it has {len(shard.flats)} flat tensors of masters, but the model states describe {len(cuts)}"
        elif shard.gaps and list(map(len, shard.gaps)) != counts:
            yield "param_alignment_paddings does not have one entry for each param"
        else:
            for flat_id, (flat, cut) in enumerate(zip(shard.flats, cuts, strict=True)):
                for kind in flat if shard.stage < 3 else [MASTER]:  # all of ZeRO-3's have the same length
                    stripped = shard.variant == "elastic" or (shard.variant == "plain" and kind == MASTER)
                    have, length = flat[kind].numel, cut.length(rank, stripped)
                    if have != length:
                        yield f"{kind} of sub-group {flat_id} has {have} elements instead of {length}"

    return wrong


def _wrong_module(usual: ModelShard, rank0: ModelShard | None) -> Callable[[int, ModelShard], Iterator[str]]:
    """Return what yields frozen fragments of a wrong length, and names that make a strict load of ZeRO-3 fail."""
    trained = {param for shapes in usual.param_shapes for param in shapes}
    known = trained | set(usual.frozen_shapes) | set(usual.module) | set(usual.tied)

    def wrong(rank: int, shard: ModelShard) -> Iterator[str]:
        for param, piece in shard.fragments.items():
            length = part_size(math.prod(usual.frozen_shapes.get(param, ())), usual.world_size)
            if piece.shape != (length,):
                yield f"the fragment of frozen {param} has shape {list(piece.shape)} instead of [{length}]"
        if lacking := sorted(known.difference(shard.names)):
            yield f"module lacks {some(lacking)}; a resume would fail"
        if rank0 and (unknown := sorted(set(shard.names) - known)):  # only rank 0 lists tied names
            yield f"module lists {some(unknown)}, which have no state; a resume may fail"

    return wrong


def _check_tied_once(name: str, paths: Sequence[str], model: Sequence[ModelShard | None]) -> None:
    """Raise SourceError for ``shared_params`` in a file that is not rank 0's, the only one to have them."""
    for path, shard in zip(paths[1:], model[1:], strict=True):
        if model[0] and shard and shard.tied and not model[0].tied:
            what = "it lists shared_params, which only rank 0 does, but rank 0's file has none"
            raise SourceError.at(PathIn(name, path), what, _SWAPPED)


def _check_mappings(
    name: str, paths: Sequence[str], shards: Sequence[OptimShard | None], model: ModelShard, cuts: Sequence[_Cut]
) -> None:
    """Raise SourceError for a file whose ``param_slice_mappings`` are those of another rank.

    Other mismatches prove nothing: under ``round_robin_gradients`` DeepSpeed saves wrong ones.
    """
    if any(shard and uses_round_robin(shard.ds_config, shard.stage, shard.variant) for shard in shards):
        return
    groups = [*zip(model.param_shapes, cuts, strict=True)]
    of_rank = [tuple(_mapping(shapes, cut.vector, rank) for shapes, cut in groups) for rank in range(len(shards))]
    for rank, (path, shard) in enumerate(zip(paths, shards, strict=True)):
        if shard is not None and shard.mappings != of_rank[rank] and shard.mappings in of_rank:
            what = f"its param_slice_mappings are those of rank {of_rank.index(shard.mappings)}"
            raise SourceError.at(PathIn(name, path), what, _SWAPPED, Code.FILE_SWAPPED)


def _mapping(shapes: Mapping[str, tuple[int, ...]], vector: Vector, rank: int) -> dict[str, tuple[int, int]]:
    """Return what DeepSpeed saves of a group: param -> its elements on a rank, and their start in the partition."""
    numels = {param: math.prod(shape) for param, shape in shapes.items()}
    return {param: (end - begin, offset) for param, begin, end, offset in vector.on_rank(numels, rank)}


def uses_round_robin(ds_config: Mapping[str, Any], stage: int, variant: str) -> bool:
    """Return whether ``round_robin_gradients`` has dealt out a group's params; BF16_Optimizer ignores the setting."""
    dealt = section(ds_config, "zero_optimization").get("round_robin_gradients") is True
    return dealt and variant != "bf16_optimizer" and stage < 3


def _check_whole_module(model: ModelShard, where: str) -> None:
    """Raise SourceError for names and shapes that make a strict load of ZeRO-1/2's module fail."""
    wanted = {name: shape for shapes in model.param_shapes for name, shape in shapes.items()}
    if lacking := sorted({*wanted, *model.tied, *model.frozen_shapes, *model.buffer_names} - set(model.module)):
        what = f"module lacks {some(lacking)}; a resume would fail"
        raise SourceError.at(where, what, COPY_FILE, Code.FIELD_MISSING)
    _check_tied(model.tied, model.module, where)
    _check_params(model, (), model.buffer_names & model.module.keys(), model.module, where)
    pairs = [(name, list(model.module[name].shape), list(shape)) for name, shape in wanted.items()]
    if other := [f"{name} {have} instead of {shape}" for name, have, shape in pairs if have != shape]:
        what = f"module has other shapes than param_shapes: {some(other)}"
        raise SourceError.at(where, what, COPY_FILE, Code.STATE_SIZE)


def _check_tied(tied: Mapping[str, str], module: Container[str], where: str) -> None:
    """Raise SourceError if a name is tied to one that the module does not have."""
    if lost := [name for name, stored in tied.items() if stored not in module]:
        what = f"{lost[0]} is tied to {tied[lost[0]]}, which the checkpoint does not contain"
        raise SourceError.at(where, what, COPY_CHECKPOINT, Code.TIED)


def _check_params(
    model: ModelShard, frozen: Iterable[str], buffers: Iterable[str], others: Iterable[str], where: str
) -> None:
    """Raise SourceError if a name has two roles, or the module's names are not those with a role, or ``others``."""
    known = Counter([*(param for shapes in model.param_shapes for param in shapes), *frozen, *buffers])
    checks = (
        ("{} is described twice", [param for param, count in known.items() if count > 1], Code.FIELD_CONFLICT),
        ("module lacks {}; a resume would fail", known.keys() - {*model.names}, Code.FIELD_MISSING),
        ("module lists {}, which have no state", {*model.names}.difference(known, others), Code.FIELD_UNKNOWN),
    )
    for text, names, code in checks:
        if names:
            raise SourceError.at(where, text.format(some(sorted(names))), COPY_CHECKPOINT, code)


def _extents(
    paths: Sequence[str], shards: Sequence[AnyShard | None], tensor: Callable[[AnyShard], Tensor]
) -> tuple[Extent, ...]:
    """Return where a tensor lies in each rank's file; for an unreadable file, a meaningless place in it."""

    def place(path: str, shard: AnyShard | None) -> Extent:
        if shard is None:
            return Extent(path, 0, 0)
        extent = tensor(shard).extent  # which an alike file has at the same place, if it is not in a bundle
        return Extent(path, extent.start, extent.stop) if extent.path == shard.path != path else extent

    return tuple(map(place, paths, shards))


def _trained(
    files: ShardFiles, model: ModelShard, sample: OptimShard, optim: Sequence[OptimShard | None], cuts: Sequence[_Cut]
) -> Untrained:
    """Yield the trained params, with the places of their states."""
    for flat_id, (shapes, cut) in enumerate(zip(model.param_shapes, cuts, strict=True)):
        for kind, like in sample.flats[flat_id].items():
            extents = _extents(files.optim, optim, lambda shard: shard.flats[flat_id][kind])  # noqa: B023
            places = cut.places(extents, ITEMSIZE[like.dtype])
            for (param, shape), place in zip(shapes.items(), places, strict=True):
                yield Param(param, shape, "trainable"), kind, TensorEntry(like.dtype, shape, place)


def _rest3(files: ShardFiles, usual: ModelShard, model: Sequence[ModelShard | None]) -> Untrained:
    """Yield the other params of ZeRO-3, with the places of their states."""
    for param, shape in usual.frozen_shapes.items():
        entry = None
        if like := usual.fragments.get(param):
            extents = _extents(files.model, model, lambda shard: shard.fragments[param])  # noqa: B023
            part = part_size(math.prod(shape), usual.world_size)
            entry = TensorEntry(like.dtype, shape, Sliced(extents, 0, part, ITEMSIZE[like.dtype]))
        yield Param(param, shape, "frozen"), FROZEN, entry
    for param, like in usual.module.items():
        if param in usual.tied:
            continue
        extents = _extents(files.model, model, lambda shard: shard.module[param])  # noqa: B023
        yield Param(param, like.shape, "buffer"), BUFFER, _copies(extents, like)


def _rest12(model: ModelShard) -> Untrained:
    """Yield those of ZeRO-1/2: one file for all ranks, so every rank has the buffers of rank 0."""
    trained = {param for shapes in model.param_shapes for param in shapes}
    for name, tensor in model.module.items():
        if name in model.tied:
            continue
        if name in model.buffer_names:
            yield Param(name, tensor.shape, "buffer"), BUFFER, _copies((tensor.extent,) * model.world_size, tensor)
        elif name not in trained:
            yield Param(name, tensor.shape, "frozen"), FROZEN, _whole(model.fragments.get(name, tensor))


def _copies(extents: tuple[Extent, ...], like: Tensor) -> TensorEntry:
    place = Sliced(extents, 0, like.numel, ITEMSIZE[like.dtype])
    return TensorEntry(like.dtype, (len(extents), *like.shape), place)


def _whole(tensor: Tensor) -> TensorEntry:
    return TensorEntry(tensor.dtype, tensor.shape, Contiguous(tensor.extent, ITEMSIZE[tensor.dtype]))


_FLOATS = ("F64", "F32", "BF16", "F16", "F8_E4M3", "F8_E5M2")
_MAX_SQ = "max_exp_avg_sq"
_OTHER_SAVE = "copy the checkpoint again, whole, or take another one"
_CAST = f"a resume casts them, and what was lost stays lost; {_OTHER_SAVE}"
_MASTERS_ARE_LOW = "fp16_master_weights_and_grads", "bf16_master_weights_and_grads"


@dataclass(frozen=True, slots=True)
class Shards:
    """What there is to compare."""

    index: CheckpointIndex
    files: ShardFiles
    ds_config: Mapping[str, Any]
    facts: Mapping[str, object]
    """The facts on the optimizer's file that `loaders.stock_fields` uses, by the field's name"""
    is_composite: bool
    """Whether a manifest of ours says that it is made of several saves."""
    step_lags: frozenset[int]
    """How many steps Adam may be behind the run"""

    def setting(self, *keys: str) -> Any:
        value: Any = self.ds_config
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def dtypes(self, *kinds: str) -> dict[tuple[str, str], list[str]]:
        """Return the params of each of these kinds of state and dtype."""
        found: dict[tuple[str, str], list[str]] = {}
        for state, held in self.index.held.items():
            if state.kind in kinds:
                found.setdefault((state.kind, held.dtype), []).append(state.param)
        for param, held in self.index.zero.module.items() if MODULE in kinds else ():
            found.setdefault((MODULE, held.dtype), []).append(param)
        return found


def find_contradictions(shards: Shards, name: str) -> Iterator[Finding]:
    """Yield a finding for every two places that say different things."""
    model, optim = (PathIn(name, paths[0]) for paths in (shards.files.model, shards.files.optim))
    where = PathIn(name, shards.files.tag)
    yield from _steps(shards, where)
    yield from _dtypes(shards, where)
    yield from _module_dtypes(shards, model)
    counted, steps = shards.facts.get("loss_scaler.cur_iter"), shards.index.global_step
    if type(counted) is int and counted != steps:
        what = f"the loss scaler has counted {counted} steps, the run {steps}"
        fix = f"silent: the scale grows earlier or later; {_OTHER_SAVE}"
        yield Finding(optim, what, fix, Code.STEPS_DIFFER, WARNING)
    shapes = [[shards.index.params[name].shape for name in group.params] for group in shards.index.groups]
    if decays_vectors_alone([group.hyper for group in shards.index.groups], shapes):
        what = "weight decay is on vectors alone, as if the hyperparameters of the param groups were swapped"
        fix = f"silent: a resume decays these instead of the matrices; {_OTHER_SAVE}"
        yield Finding(where, what, fix, Code.FIELD_CONFLICT, ERROR)


def _steps(shards: Shards, where: str) -> Iterator[Finding]:
    """All flat ids make their steps together; only a composite mixes them."""
    found = sorted({one.step for one in shards.index.sub_groups})
    expected = shards.index.global_step - shards.index.zero.skipped_steps
    usual = {expected - lag for lag in shards.step_lags}
    if expected in found and not usual.issuperset(found) and not shards.is_composite:
        what = f"Adam's steps are {', '.join(f'{step:g}' for step in found)}, the run has made {expected}"
        fix = f"silent: the bias is corrected by the wrong step; {_OTHER_SAVE}"
        yield Finding(where, what, fix, Code.STEPS_DIFFER, ERROR)


def _dtypes(shards: Shards, where: str) -> Iterator[Finding]:
    low = any(shards.setting(key[:4], key) is True for key in _MASTERS_ARE_LOW)
    for (_, dtype), params in shards.dtypes(MASTER).items():
        if dtype not in ("F32", "F64") and not (low and dtype in ("F16", "BF16")):
            what = f"the masters of {some(params)} are {dtype}, where DeepSpeed keeps fp32"
            yield Finding(where, what, _CAST, Code.STATE_DTYPE, ERROR, tuple(params))
    trained = {state.param for state in shards.index.held if state.kind == MASTER}
    for (kind, dtype), params in shards.dtypes(EXP_AVG, EXP_AVG_SQ, _MAX_SQ, MODULE).items():
        own = tuple(param for param in params if param in trained)
        if own and dtype not in _FLOATS:
            what = f"{kind} of {some(own)} is {dtype}, which is no floating-point type"
            yield Finding(where, what, _CAST, Code.STATE_DTYPE, ERROR, own)


def _module_dtypes(shards: Shards, where: str) -> Iterator[Finding]:
    """A frozen param has no master: what it was rounded to is all that there is."""
    run, found = shards.index.precision, shards.dtypes(FROZEN, MODULE)
    frozen = {param for (kind, _), params in found.items() if kind == FROZEN for param in params}
    for (kind, dtype), params in found.items():
        own = tuple(one for one in params if kind == FROZEN or one not in frozen)
        bits, of_run = ITEMSIZE[dtype], ITEMSIZE[run]
        if not own or dtype not in _FLOATS or dtype == run or bits > of_run:
            continue
        severity = ERROR if kind == FROZEN and bits < of_run else WARNING
        what = f"{some(own)} in the module is {dtype}, the run trained in {run}"
        yield Finding(where, what, _CAST, Code.STATE_DTYPE, severity, own)
