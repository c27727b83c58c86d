"""From DeepSpeed's shards to a `CheckpointIndex`, for any ZeRO stage, in files or in a partial checkpoint.

The cutting rules, verified against DeepSpeed 0.19.8 (about 100 checkpoints). ZeRO-3 cuts every param on its own into
``part = ceil(numel / world size)`` elements per rank; a rank's flat tensor is its slices in ``param_shapes`` order
without gaps. The excess of a slice over the param is padding; in fp32 it is uninitialised memory.

ZeRO-1 and ZeRO-2 cut one vector per group; see `checkpoint.optimizer`. Names and order come from ``param_shapes``,
which is right even under ``round_robin_gradients``, where the mappings that DeepSpeed saves beside it are wrong. Master
weights are saved without the padding at the vector's end, moments with it; BF16_Optimizer saves both with it, and
elastic checkpoints both without. DeepSpeed's Muon, unless it is offloaded, keeps on each rank the momentum of all
params that overlap the partition, each whole, in the dtype of the gradients.

ZeRO's and universal checkpoints share the checks here: whether the shards and the Trainer's files around them come from
one save, and whether a stock resume accepts them. The effects on a resume were observed with damaged checkpoints, in
deepspeed 0.19.8 and transformers 5.23.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.index import (
    ACCELERATE,
    BF16_OPTIMIZER,
    DEEPSPEED,
    ELASTIC,
    LIGHTNING,
    PLAIN,
    CheckpointIndex,
    EngineTrees,
    Form,
    TensorEntry,
    TrainState,
    ZeroFacts,
    buffer_on_ranks,
)
from llmtailor.checkpoint.optimizer import (
    OverlappingParams,
    ParamGroup,
    Slices,
    SubGroup,
    Vector,
    ZeroSettings,
    part_size,
    round_robin,
)
from llmtailor.checkpoint.placement import Extent, Sliced
from llmtailor.checkpoint.step_names import step_of_tag
from llmtailor.codes import Code
from llmtailor.containers.json import FileTrees, Tensor, Trees
from llmtailor.errors import COPY_CHECKPOINT, COPY_FILE, PathIn, Problems, SourceError, attempt, counted, some
from llmtailor.findings import ERROR, WARNING, Finding
from llmtailor.formats.composite import read_composite
from llmtailor.formats.deepspeed.autotp import join_ranks, read_cuts
from llmtailor.formats.deepspeed.files import ShardFiles, fit_world_size, survey_shard_files, write_latest
from llmtailor.formats.deepspeed.shards import (
    OF_SHARDS,
    AnyShard,
    Known,
    ModelShard,
    OptimShard,
    ShardReader,
    read_model_shard,
    read_optim_shard,
    section,
)
from llmtailor.formats.format import Draft
from llmtailor.formats.lightning_tree import check_engine, is_from_lightning
from llmtailor.frameworks.files import LATEST, LATEST_UNIVERSAL, MANIFEST, SCALER, TRAINER_STATE
from llmtailor.frameworks.framework import FRAMEWORKS, is_tag_alone
from llmtailor.frameworks.read import TrainerFiles, file_fact, read_trainer_files
from llmtailor.frameworks.scheduler import SchedulerFacts, compare_scheduler
from llmtailor.frameworks.stock_fields import decays_vectors_alone
from llmtailor.model.dtypes import ITEMSIZE
from llmtailor.model.parts import Param
from llmtailor.model.roles import BUFFER, EXP_AVG, EXP_AVG_SQ, FROZEN, MASTER, MODULE, State
from llmtailor.storage.local import FileFact

_Placed = Iterable[tuple[Param, str, TensorEntry | None]]
"""A param, the kind of a state of it, and the place of that state, if the files hold it"""
_Wholes = Mapping[tuple[int, str], OverlappingParams]
"""Sub-group and kind -> the layout of a state of whole params"""
_SWAPPED = "the files of two ranks are swapped: swap them back"
_MIXED = "copy the whole tag folder again; its files come from different saves"
_OTHER_SAVE = "copy the checkpoint again, whole, or take another one"
_CAST = f"a resume casts them, but the lost digits stay lost; {_OTHER_SAVE}"
_FLOATS = ("F64", "F32", "BF16", "F16", "F8_E4M3", "F8_E5M2")
_MAX_SQ = "max_exp_avg_sq"


def detects(root: Path) -> bool:
    """Return whether a folder has what DeepSpeed leaves in the root of a checkpoint."""
    return (root / LATEST).exists() or any(root.glob("global_step*")) or is_tag_alone(root)


def read(root: Path, name: str, framework: str | None = None) -> Draft:
    """Read a checkpoint with DeepSpeed shards of any ZeRO stage; see `Reader`."""
    problems = Problems()
    files = survey_shard_files(root, name, problems)
    return read_shards(FileTrees(root), files, name, problems, framework)


def read_shards(
    trees: Trees, files: ShardFiles | None, name: str, problems: Problems, framework: str | None = None
) -> Draft:
    """Read shards, wherever they are; ``files`` is None if nothing is known of them.

    No tensor byte is read except the 4 bytes of each ``step``. Every problem of every file is added to ``problems``.
    """
    trainer = read_trainer_files(trees, name, problems, framework, is_engines=True)
    if files is None:
        return Draft(problems)
    read_rank = partial(
        _read_tp_rank, trees, name=name, problems=problems, framework=framework, trainer=trainer, known={}
    )
    draft, known, facts = read_rank(files)
    if known is None or known.tensor_parallel == 1 + len(files.peers) == 1:
        return draft
    if known.tensor_parallel != (have := 1 + len(files.peers)):
        what = f"there are files of {counted(have, 'tensor-parallel rank')}, but they say that there were"
        fix = "copy the whole tag folder again; move files of another run out of it"
        place = PathIn(name, files.tag)
        problems.add(SourceError.at(place, f"{what} {known.tensor_parallel}", fix, Code.FILE_MISSING))
        return Draft(problems)
    where = [PathIn(name, one.model[0]) for one in (files, *files.peers)]
    cuts = attempt(lambda: read_cuts(known.rest, have, where[0]), problems)
    indexes = [draft.index]
    for place, one in zip(where[1:], files.peers, strict=True):
        other, _, others = read_rank(one, of_first=known)
        indexes.append(other.index)
        if unlike := [what for what in {**facts, **others} if others and others.get(what) != facts.get(what)]:
            text = f"{some(unlike)} differs from that of tensor-parallel rank 0"
            problems.add(SourceError.at(place, text, COPY_CHECKPOINT, Code.RANKS_DIFFER))
    there = [index for index in indexes if index is not None]
    if cuts is None or len(there) < have:
        return Draft(problems)
    joined = attempt(lambda: join_ranks(there, cuts, where), problems)
    return replace(draft, index=joined)


def _read_tp_rank(
    trees: Trees,
    files: ShardFiles,
    *,
    name: str,
    problems: Problems,
    framework: str | None,
    trainer: TrainerFiles,
    known: Known,
    of_first: ModelShard | None = None,
) -> tuple[Draft, ModelShard | None, dict[str, object]]:
    """Read the files of one tensor-parallel rank, which are those of a smaller model; without AutoTP all files.

    Also returns its model states, and the facts that must be alike on all ranks. ``of_first`` are the model states of
    the first one, if this is another.
    """
    # before reading, so that no later change goes unnoticed; others are missing, or inside a rank shard
    facts = {path: fact for path in (*files.optim, *files.model) if (fact := file_fact(trees.root / path))}
    found: list[Finding] = []
    # of ZeRO-1/2, each file of model states has its own params
    read_model = partial(read_model_shard, is_adapter=trainer.has_adapters)
    reader = ShardReader(trees, files, name, problems, found)
    model = reader.read_all(read_model, files.model, known if files.is_zero3 else {})
    optim = reader.read_all(read_optim_shard, files.optim, known)
    if of_first and model[0]:  # only the very first file lists tied names
        model[0] = replace(model[0], tied=of_first.tied)
    usual, sample = first_of(model), first_of(optim)
    fitted = fit_world_size(files, usual.world_size, name, problems) if usual else None
    if usual is None or fitted is None:
        return Draft(problems), None, {}
    files = fitted
    optim, model = _pad(optim, len(files.optim)), _pad(model, len(files.model))
    cuts = [_cut(group, usual, sample) for group in range(len(usual.param_shapes)) if sample is not None]
    if sample is not None and not files.is_zero3:
        attempt(lambda: _check_mappings(name, files.optim, optim, cuts), problems)
    whole = _find_whole(optim, cuts)
    optim = _drop(files.optim, optim, _wrong_flats(usual, cuts, whole), name, problems, Code.STATE_SIZE)
    model = fit_models(files, model, name, problems, trainer)
    sample, usual = first_of(optim), first_of(model)
    if sample is None or usual is None:
        return Draft(problems), None, {}
    if framework is None and trainer.framework.name == DEEPSPEED and is_from_lightning(usual.rest):
        trainer = replace(trainer, framework=FRAMEWORKS[LIGHTNING])
    draft = EngineStates(
        format=DEEPSPEED,
        root=trees.root,
        name=name,
        files=files,
        optim=sample,
        model=model,
        trained=_trained(files, usual, sample, optim, cuts, whole),
        rests=[None if shard is None else shard.rest for shard in optim],
        facts=facts,
        unreadable={*files.missing, *(path for path, shard in zip(files.optim, optim, strict=True) if shard is None)},
        findings=[*found, *_odd_shards(sample, usual.world_size, PathIn(name, files.tag))],
        trainer=trainer,
        problems=problems,
    ).draft()
    of_all = chain(usual.facts.items(), sample.facts.items())
    return draft, usual, {what: fact for what, fact in of_all if what not in OF_SHARDS}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStates:
    """What was read of a checkpoint with DeepSpeed's model states; at least one of them can be used."""

    format: str
    root: Path
    name: str
    files: ShardFiles
    optim: OptimShard
    model: Sequence[ModelShard | None]
    trained: _Placed
    """The places of the trained params' states"""
    rests: Sequence[Mapping[str, Any] | None]
    """What each rank's ``optim_states`` hold besides"""
    facts: Mapping[str, FileFact]
    unreadable: Iterable[str]
    findings: Iterable[Finding]
    trainer: TrainerFiles
    problems: Problems

    @property
    def usual(self) -> ModelShard:
        """The model states of most ranks"""
        return next(shard for shard in self.model if shard is not None)

    def draft(self) -> Draft:
        return Draft(self.problems, self._index(), self.trainer, self._check)

    def _index(self) -> CheckpointIndex:
        usual, files, optim = self.usual, self.files, self.optim
        params: dict[str, Param] = {}
        held: dict[State, TensorEntry] = {}
        untrained = _rest3(files, usual, self.model) if files.is_zero3 else _rest12(usual)
        for param, kind, entry in (*self.trained, *untrained):
            params[param.name] = param
            if entry is not None:
                held[State(param.name, kind)] = entry
        groups, sub_groups = _order_groups(optim, usual)
        lost = (path for path, shard in zip(files.model, self.model, strict=True) if shard is None)
        is_fp16 = section(optim.ds_config, "fp16").get("enabled") is True
        return CheckpointIndex(
            root=self.root,
            name=self.name,
            form=Form(self.format, optim.stage, optim.variant),
            world_size=usual.world_size,
            global_step=usual.global_steps,
            precision="BF16" if files.is_bf16 else "F16" if is_fp16 else "F32",
            params=params,
            tied={tied: stored for tied, stored in usual.tied.items() if stored in params},
            held=held,
            groups=groups,
            sub_groups=sub_groups,
            files=self.facts,
            zero=ZeroFacts(
                tag=files.tag,
                skipped_steps=usual.skipped_steps,
                settings=_read_settings(optim.ds_config, files.is_bf16, optim.variant),
                module=self._second_places(),
                engine=EngineTrees(
                    tuple(self.rests), tuple(None if shard is None else shard.rest for shard in self.model)
                ),
            ),
            unreadable=frozenset((*self.unreadable, *lost)),
            train=TrainState(step_is_tensor=optim.step_is_tensor, model_order=tuple(usual.rest["module"])),
            findings=tuple(self.findings),
        )

    def _second_places(self) -> dict[State, TensorEntry]:
        """Return what ZeRO-1/2's module repeats: trainable params, tied names, frozen fragments."""
        usual, second = self.usual, set[str]()
        if self.format == DEEPSPEED and not self.files.is_zero3:
            second = {*chain(*usual.param_shapes), *usual.tied, *usual.fragments}
        return {State(name, MODULE): tensor.entry for name, tensor in usual.module.items() if name in second}

    def _check(self, index: CheckpointIndex) -> Iterator[Finding]:
        usual, files, trainer, config = self.usual, self.files, self.trainer, self.optim.ds_config
        first = PathIn(self.name, files.model[0])
        yield from _check_folder(index, files, trainer, config)
        if trainer.framework.name == LIGHTNING:
            yield from check_engine(usual.rest, first)
        yield from attempt(lambda: [*_check_steps(index, trainer.step_lags)], self.problems) or ()
        yield from _find_contradictions(index, files, config, self.optim.facts)
        yield from _find_strays(index, files)
        yield from _check_schedulers(index, trainer, first, usual.scheduler, "scheduler" in config)
        if trainer.global_step not in (None, index.global_step):
            what = f"global_step is {trainer.global_step}, but DeepSpeed's is {index.global_step}"
            fix = "data order and step count would follow the former; copy the file of this save"
            yield Finding(PathIn(self.name, TRAINER_STATE), what, fix, Code.STEPS_DIFFER, ERROR)


def fit_models(
    files: ShardFiles, model: Sequence[ModelShard | None], name: str, problems: Problems, trainer: TrainerFiles
) -> list[ModelShard | None]:
    """Return the model states that fit together, and None for others, which are reported."""
    kept, where = [*model], PathIn(name, files.model[0])
    usual = first_of(kept)
    if usual is None:
        return kept
    if not files.is_zero3:
        attempt(lambda: _check_whole_module(usual, where), problems)
        return kept
    attempt(lambda: _check_tied_once(name, files.model, kept), problems)
    kept = _drop(files.model, kept, _wrong_module(usual, kept[0]), name, problems, Code.DAMAGED)
    if (first := first_of(kept)) and kept[0]:  # only rank 0 lists tied names
        known, tied = first, kept[0].tied
        if not trainer.has_adapters:  # PEFT leaves out frozen params, but not their other names
            attempt(lambda: _check_tied(tied, known.names, where), problems)
        attempt(lambda: _check_roles(known, known.frozen_shapes, where), problems)
    return kept


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


def first_of(shards: Iterable[AnyShard | None]) -> AnyShard | None:
    return next((shard for shard in shards if shard is not None), None)


def _pad(shards: Sequence[AnyShard | None], count: int) -> list[AnyShard | None]:
    return [*shards[:count], *[None] * (count - len(shards))]


def _cut(group: int, model: ModelShard, sample: OptimShard) -> Slices | Vector:
    numels = {param: math.prod(shape) for param, shape in model.param_shapes[group].items()}
    if sample.stage == 3:
        return Slices(numels, model.world_size)
    fits = list(map(len, sample.gaps)) == list(map(len, model.param_shapes))
    return Vector.of(numels, sample.gaps[group] if fits else (), model.world_size)


def _find_whole(optim: Sequence[OptimShard | None], cuts: Sequence[Slices | Vector]) -> _Wholes:
    """Return the layouts of states that ranks of ZeRO-1/2 keep of whole params: their lengths show which."""
    shards = [(rank, shard) for rank, shard in enumerate(optim) if shard is not None and len(shard.flats) == len(cuts)]
    found: dict[tuple[int, str], OverlappingParams] = {}
    for flat_id, cut in enumerate(cuts if shards else ()):
        if not isinstance(cut, Vector):
            continue
        for kind in shards[0][1].flats[flat_id].keys() - {MASTER}:
            have = {rank: shard.flats[flat_id][kind].numel for rank, shard in shards if kind in shard.flats[flat_id]}
            is_cut = all(numel == cut.partition for numel in have.values())
            if not is_cut and all(numel == OverlappingParams(cut).length(rank) for rank, numel in have.items()):
                found[flat_id, kind] = OverlappingParams(cut)
    return found


def _wrong_flats(
    model: ModelShard, cuts: Sequence[Slices | Vector], whole: _Wholes
) -> Callable[[int, OptimShard], Iterator[str]]:
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
                    stripped = shard.variant == ELASTIC or (shard.variant == PLAIN and kind == MASTER)
                    have, length = flat[kind].numel, whole.get((flat_id, kind), cut).length(rank, stripped)
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
    name: str, paths: Sequence[str], shards: Sequence[OptimShard | None], cuts: Sequence[Slices | Vector]
) -> None:
    """Raise SourceError for a file whose ``param_slice_mappings`` are those of another rank.

    Other mismatches prove nothing: under ``round_robin_gradients`` DeepSpeed saves wrong ones.
    """
    if any(shard and uses_round_robin(shard.ds_config, shard.stage, shard.variant) for shard in shards):
        return
    of_rank = [
        tuple({param: (end - begin, offset) for param, begin, end, offset in cut.on_rank(rank)} for cut in cuts)
        for rank in range(len(shards))
    ]
    for rank, (path, shard) in enumerate(zip(paths, shards, strict=True)):
        if shard is not None and shard.mappings != of_rank[rank] and shard.mappings in of_rank:
            what = f"its param_slice_mappings are those of rank {of_rank.index(shard.mappings)}"
            raise SourceError.at(PathIn(name, path), what, _SWAPPED, Code.FILE_SWAPPED)


def uses_round_robin(ds_config: Mapping[str, Any], stage: int, variant: str) -> bool:
    """Return whether ``round_robin_gradients`` has distributed a group's params; BF16_Optimizer ignores the setting."""
    dealt = section(ds_config, "zero_optimization").get("round_robin_gradients") is True
    return dealt and variant != BF16_OPTIMIZER and stage < 3


def _check_whole_module(model: ModelShard, where: str) -> None:
    """Raise SourceError for names and shapes that make a strict load of ZeRO-1/2's module fail."""
    wanted = {name: shape for shapes in model.param_shapes for name, shape in shapes.items()}
    if lacking := sorted({*wanted, *model.tied, *model.frozen_shapes, *model.buffer_names} - set(model.module)):
        what = f"module lacks {some(lacking)}; a resume would fail"
        raise SourceError.at(where, what, COPY_FILE, Code.FIELD_MISSING)
    _check_tied(model.tied, model.module, where)
    _check_roles(model, (), where)
    pairs = [(name, list(model.module[name].shape), list(shape)) for name, shape in wanted.items()]
    if other := [f"{name} {have} instead of {shape}" for name, have, shape in pairs if have != shape]:
        what = f"module has other shapes than param_shapes: {some(other)}"
        raise SourceError.at(where, what, COPY_FILE, Code.STATE_SIZE)


def _check_tied(tied: Mapping[str, str], module: Container[str], where: str) -> None:
    if lost := [name for name, stored in tied.items() if stored not in module]:
        what = f"{lost[0]} is tied to {tied[lost[0]]}, which the checkpoint does not contain"
        raise SourceError.at(where, what, COPY_CHECKPOINT, Code.TIED)


def _check_roles(model: ModelShard, frozen: Iterable[str], where: str) -> None:
    """Raise SourceError if a name has two roles."""
    known = Counter([*chain(*model.param_shapes), *frozen, *model.buffer_names])
    if twice := [param for param, count in known.items() if count > 1]:
        raise SourceError.at(where, f"{some(sorted(twice))} is described twice", COPY_CHECKPOINT, Code.FIELD_CONFLICT)


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
    files: ShardFiles,
    model: ModelShard,
    sample: OptimShard,
    optim: Sequence[OptimShard | None],
    cuts: Sequence[Slices | Vector],
    whole: _Wholes,
) -> _Placed:
    for flat_id, (shapes, cut) in enumerate(zip(model.param_shapes, cuts, strict=True)):
        for kind, like in sample.flats[flat_id].items():
            extents = _extents(files.optim, optim, lambda shard: shard.flats[flat_id][kind])  # noqa: B023
            places = whole.get((flat_id, kind), cut).places(extents, ITEMSIZE[like.dtype])
            for (param, shape), place in zip(shapes.items(), places, strict=True):
                yield Param(param, shape, "trainable"), kind, TensorEntry(like.dtype, shape, place)


def _rest3(files: ShardFiles, usual: ModelShard, model: Sequence[ModelShard | None]) -> _Placed:
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
        yield Param(param, like.shape, "buffer"), BUFFER, buffer_on_ranks(like.dtype, like.shape, extents)


def _rest12(model: ModelShard) -> _Placed:
    """Yield those of ZeRO-1/2: one file for all ranks, so every rank has the buffers of rank 0."""
    trained = {param for shapes in model.param_shapes for param in shapes}
    for name, tensor in model.module.items():
        if name in model.tied:
            continue
        if name in model.buffer_names:
            copies = (tensor.extent,) * model.world_size
            yield Param(name, tensor.shape, "buffer"), BUFFER, buffer_on_ranks(tensor.dtype, tensor.shape, copies)
        elif name not in trained:
            yield Param(name, tensor.shape, "frozen"), FROZEN, model.fragments.get(name, tensor).entry


def _order_groups(optim: OptimShard, model: ModelShard) -> tuple[tuple[ParamGroup, ...], tuple[SubGroup, ...]]:
    """Return the param groups, in the optimizer's order, and the sub-groups.

    If ``round_robin_gradients`` has distributed the params of a group over the ranks, that is undone.
    """
    dealt_to = model.world_size if uses_round_robin(optim.ds_config, optim.stage, optim.variant) else 1
    group_of = {flat_id: group for group, (owned, _) in enumerate(optim.groups) for flat_id in owned}
    gaps = optim.gaps if any(map(any, optim.gaps)) else ((),) * len(model.param_shapes)
    cut = tuple(
        SubGroup(group_of[flat_id], tuple(params), optim.steps[flat_id], gap, scalars)
        for flat_id, (params, gap, scalars) in enumerate(zip(model.param_shapes, gaps, optim.scalars, strict=True))
    )
    dealt = (zip(round_robin(len(one.params), dealt_to), one.params, strict=True) for one in cut)
    orders = [[name for _, name in sorted(numbered)] for numbered in dealt]
    owned_by = ((chain.from_iterable(orders[flat_id] for flat_id in owned), hyper) for owned, hyper in optim.groups)
    return tuple(ParamGroup(tuple(names), hyper) for names, hyper in owned_by), cut


def _read_settings(config: Mapping[str, Any], is_bf16: bool, variant: str) -> ZeroSettings:
    zero = section(config, "zero_optimization")
    gradients = section(config, "data_types").get("grad_accum_dtype")
    offloaded = section(zero, "offload_optimizer").get("device") == "cpu"
    size = zero.get("sub_group_size")
    known = type(size) is int or (isinstance(size, float) and math.isfinite(size))  # JSON may have 1e9
    fp32_gradients = variant == BF16_OPTIMIZER or (is_bf16 and not offloaded and gradients in ("fp32", "float32"))
    return ZeroSettings(
        sub_group_size=int(size) if known else ZeroSettings().sub_group_size,  # type: ignore[arg-type]
        round_robin=zero.get("round_robin_gradients") is True,
        parameter_alignment=bool(zero.get("parameter_alignment")),
        fp32_gradients=fp32_gradients,
    )


def _check_steps(index: CheckpointIndex, lags: frozenset[int]) -> Iterator[Finding]:
    """Raise SourceError unless model states and optimizer states come from the same save; yield a finding if only some
    of the latter do.

    Nothing in the files says so directly: DeepSpeed's own tag counts global steps, and so do the model states, and Adam
    has made a step for each that was not skipped. A composite may mix steps, or reset them; its manifest says which.
    After it, Adam may be ``lags`` steps behind the run.
    """
    place, tag_step = PathIn(index.name, index.zero.tag), step_of_tag(index.zero.tag)
    if tag_step not in (None, index.global_step):
        what = f"the model states are from step {index.global_step}, but the tag folder says {tag_step}"
        raise SourceError.at(place, what, _MIXED, Code.STEPS_DIFFER)
    steps = set(index.steps().values())
    expected = index.global_step - index.zero.skipped_steps  # fp16: no step when the gradients overflow
    usual = {expected - lag for lag in lags}
    if steps and not steps & usual:
        composed = None if index.form.is_partial else read_composite(index.root, index.name)
        may_mix = composed is not None or index.form.is_partial
        if not may_mix or (0 in steps and (composed is None or 0 not in composed.steps.values())):
            model = f"the model states are from step {expected} (without skipped ones)"
            what = f"{model}, the optimizer states from step {max(steps):g}"
            raise SourceError.at(place, what, _MIXED, Code.STEPS_DIFFER)
    elif expected in steps and not usual.issuperset(steps) and not (index.root / MANIFEST).is_file():
        listed = ", ".join(f"{step:g}" for step in sorted(steps))  # all flat ids make their steps together
        what = f"Adam's steps are {listed}, the run has made {expected}"
        fix = f"silent: the bias is corrected by the wrong step; {_OTHER_SAVE}"
        yield Finding(place, what, fix, Code.STEPS_DIFFER, ERROR)


def _odd_shards(sample: OptimShard, world_size: int, where: str) -> Iterator[Finding]:
    if set(sample.partition_counts) - {world_size}:
        counts = ", ".join(map(str, sorted(set(sample.partition_counts))))
        what = f"partition_count is {counts}, but the model states say {world_size} ranks saved them"
        fix = "a resume does not read it, but DeepSpeed's tools do; copy the optim_states again"
        yield Finding(where, what, fix, Code.PARTITION_COUNT, WARNING)
    if sample.variant == ELASTIC and not sample.has_group_step:
        what = "elastic checkpoints of an optimizer that keeps its step per param can't be resumed by stock DeepSpeed"
        fix = "train without elastic_checkpoint; recipes can still use this checkpoint's states"
        yield Finding(where, what, fix, Code.ELASTIC, ERROR)


def _find_strays(index: CheckpointIndex, files: ShardFiles) -> Iterator[Finding]:
    """Yield findings on stray files: DeepSpeed opens and counts all that match a pattern."""
    known = frozenset(chain.from_iterable(one.model for one in (files, *files.peers)))
    kinds = {one.rpartition("/")[2].partition("mp_rank_")[0] for one in known}  # no rank of the run asks for others
    for path in sorted((index.root / files.folder).glob("*mp_rank_*_model_states.pt")):
        if f"{files.folder}{path.name}" not in known and path.name.partition("mp_rank_")[0] in kinds:
            what = "DeepSpeed mistakes this file for another model-parallel rank's, and refuses to resume"
            fix = "move it out of the tag folder"
            yield Finding(PathIn(index.name, f"{files.folder}{path.name}"), what, fix, Code.FILE_NAME, ERROR)


def _check_folder(
    index: CheckpointIndex, files: ShardFiles, trainer: TrainerFiles, config: Mapping[str, Any]
) -> Iterator[Finding]:
    place, framework = PathIn(index.name, files.tag), trainer.framework
    is_there = (index.root / files.tag).is_dir()
    if is_there and not any(framework.finds(path.name) for path in index.root.iterdir()):
        begins = "whose name begins with" if framework.tag.endswith("*") else "with the name"
        what = (
            f"the tag folder is {files.tag}, but {framework.title} looks for one {begins} {framework.tag.rstrip('*')}"
        )
        fix = f"rename it to {framework.default_tag.format(index.global_step)}, and write that into latest"
        yield Finding(place, what, fix, Code.FILE_NAME, ERROR)
    is_accelerates = framework.name == ACCELERATE and files.tag == framework.tag
    if is_there and is_accelerates and not {LATEST, LATEST_UNIVERSAL} & trainer.files.keys():
        what = f"the file is missing; {framework.title} does not need it, but DeepSpeed's tools do"
        fix = f"write the tag into it: {write_latest(index.root / LATEST, files.tag)}"
        yield Finding(PathIn(index.name, LATEST), what, fix, Code.FILE_NAME, WARNING)
    if SCALER in trainer.files:
        what = "DeepSpeed keeps the loss scale itself"
        fix = "a resume fails if it finds this file; move it out of the folder"
        yield Finding(PathIn(index.name, SCALER), what, fix, Code.FIELD_UNKNOWN, ERROR)
    enabled = section(config, "bf16").get("enabled")
    if isinstance(enabled, bool) and enabled != files.is_bf16:
        named, run = ("have", "off") if files.is_bf16 else ("lack", "on")
        what = f"the optimizer shards {named} the prefix bf16_, but the run that saved them had bf16 {run}"
        fix = "DeepSpeed looks for only one of these names; rename the files as they were saved"
        yield Finding(place, what, fix, Code.PRECISION, ERROR)


def _check_schedulers(
    index: CheckpointIndex, trainer: TrainerFiles, inside: PathIn, engines: SchedulerFacts | None, is_set: bool
) -> Iterator[Finding]:
    """Yield findings on DeepSpeed's own scheduler in the model states, and if the framework's file is missing."""
    framework = trainer.framework
    if engines is not None:
        groups = [group.hyper for group in index.groups]
        yield from compare_scheduler(engines, inside, groups, index.global_step - index.zero.skipped_steps)
    elif is_set:
        what = "the run had a DeepSpeed scheduler, but the model states hold none"
        yield Finding(inside, what, "a resume fails; copy them again", Code.SCHEDULER_MISSING, ERROR)
    elif framework.needs_scheduler and framework.scheduler not in {*trainer.files, *trainer.inside}:
        fix = "a resume with a Trainer scheduler will fail; copy the file back"
        where = PathIn(index.name, framework.scheduler)
        yield Finding(where, "there is no scheduler state", fix, Code.SCHEDULER_MISSING, ERROR)


def _find_contradictions(
    index: CheckpointIndex, files: ShardFiles, config: Mapping[str, Any], facts: Mapping[str, object]
) -> Iterator[Finding]:
    """Yield a finding for every two places that say different things; ``facts`` are those of the optimizer's file."""
    model, optim = (PathIn(index.name, paths[0]) for paths in (files.model, files.optim))
    where = PathIn(index.name, files.tag)
    yield from _dtypes(index, config, where, model)
    counted = facts.get("loss_scaler.cur_iter")
    if type(counted) is int and counted != index.global_step:
        what = f"the loss scaler has counted {counted} steps, the run {index.global_step}"
        fix = f"silent: the scale grows earlier or later; {_OTHER_SAVE}"
        yield Finding(optim, what, fix, Code.STEPS_DIFFER, WARNING)
    shapes = [[index.params[name].shape for name in group.params] for group in index.groups]
    if decays_vectors_alone([group.hyper for group in index.groups], shapes):
        what = "weight decay is on vectors alone, as if the hyperparameters of the param groups were swapped"
        fix = f"silent: a resume decays these instead of the matrices; {_OTHER_SAVE}"
        yield Finding(where, what, fix, Code.FIELD_CONFLICT, ERROR)


def _dtypes(index: CheckpointIndex, config: Mapping[str, Any], where: str, module: str) -> Iterator[Finding]:
    """Yield findings on dtypes that lose digits; ``module`` is the file of the model states.

    A frozen param has no master: what it was rounded to is all that there is.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for (param, kind), held in index.all_held().items():
        found.setdefault((kind, held.live_dtype), []).append(param)
    low = any(section(config, key).get(f"{key}_master_weights_and_grads") is True for key in ("fp16", "bf16"))
    trained, run = index.steps(), index.precision
    frozen = {param for (kind, _), params in found.items() if kind == FROZEN for param in params}
    for (kind, dtype), params in found.items():
        own = tuple(param for param in params if param in trained)
        if kind == MASTER and dtype not in ("F32", "F64") and not (low and dtype in ("F16", "BF16")):
            what = f"the masters of {some(params)} are {dtype}, where DeepSpeed keeps fp32"
            yield Finding(where, what, _CAST, Code.STATE_DTYPE, ERROR, tuple(params))
        if kind in (EXP_AVG, EXP_AVG_SQ, _MAX_SQ, MODULE) and own and dtype not in _FLOATS:
            what = f"{kind} of {some(own)} is {dtype}, which is no floating-point type"
            yield Finding(where, what, _CAST, Code.STATE_DTYPE, ERROR, own)
        own = tuple(param for param in params if kind == FROZEN or param not in frozen)
        bits, of_run = ITEMSIZE[dtype], ITEMSIZE[run]
        if kind in (FROZEN, MODULE) and own and dtype in _FLOATS and dtype != run and bits <= of_run:
            severity = ERROR if kind == FROZEN and bits < of_run else WARNING
            what = f"{some(own)} in the module is {dtype}, the run trained in {run}"
            yield Finding(module, what, _CAST, Code.STATE_DTYPE, severity, own)
