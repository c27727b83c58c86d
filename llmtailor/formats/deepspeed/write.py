"""The files of all ranks, of any ZeRO stage: their object trees, with tensors bound to states.

ZeRO-3 has a pair of files per rank, and every param cut on its own; ZeRO-1/2 have one vector per group, cut into equal
partitions, and one model file. Tensors become plain tensors with their own storage; padding is zero. On another number
of ranks, rank r copies what is no state from the base's rank r modulo its world size. In a salvage, an unreadable
rank's files are modelled on the first readable rank's: they differ only in states.

Everything that is not a state (hyperparameters, loss scaler, counters, ds_config, DeepSpeed's classes by name) is
copied from the base. If the base was trained without DeepSpeed, it is what DeepSpeed 0.19.8 would have written; what a
resume takes from its own config is left out rather than invented: ``clip_grad``, ``global_samples`` and, but for
ZeRO-3, the loss scaler.

The files of two ranks of ZeRO-3 differ in their slices of the params, and in what the base keeps besides states, which
is mostly the same for all ranks. So the pickle of the first rank with the same rest serves for all of these.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from llmtailor.checkpoint.index import DCP, DEEPSPEED, FSDP, VERL, CheckpointIndex, EngineTrees
from llmtailor.checkpoint.layout import Bytes, FileLayout, Segment, Slot, Zeros
from llmtailor.checkpoint.optimizer import (
    FlatLayout,
    OptimizerLayout,
    OverlappingParams,
    Slices,
    SubGroup,
    Vector,
    lay_out_optimizer,
    part_size,
    slice_on,
)
from llmtailor.checkpoint.schema import kinds_by_param, refuse_cuts
from llmtailor.checkpoint.step_names import UNIVERSAL_SUFFIX
from llmtailor.checkpoint.wanted import Wanted
from llmtailor.containers.pickle_writer import write_pickle
from llmtailor.containers.torch_file import Content, TorchLayout, pickle_content
from llmtailor.containers.unpickle import Call, Global, Ordered, make_tensor, state_tensor
from llmtailor.errors import MismatchError, Problem, UnsupportedCheckpoint, some
from llmtailor.formats.deepspeed.autotp import each, without_tensor_parallel
from llmtailor.formats.deepspeed.files import model_name, optim_name
from llmtailor.formats.deepspeed.shards import section
from llmtailor.formats.lightning_tree import regrouped
from llmtailor.formats.safetensors_weights import lay_out_missing_weights
from llmtailor.frameworks.files import LATEST, SCALER
from llmtailor.frameworks.framework import FRAMEWORKS, Framework
from llmtailor.frameworks.read import adapters_of
from llmtailor.frameworks.scheduler import regroup_scheduler
from llmtailor.frameworks.stock_fields import is_muons
from llmtailor.frameworks.write import lay_out_trainer_files, params_on_disk, scheduler_for, synthesize_files
from llmtailor.model.dtypes import ITEMSIZE
from llmtailor.model.roles import BUFFER, FROZEN, MASTER, MODULE, WEIGHT, State

DS_VERSION = "0.19.8"
_STAGE = Global("deepspeed.runtime.zero.config", "ZeroStageEnum")
_SCALER = Global("deepspeed.runtime.fp16.loss_scaler", "LossScaler")
_MADE = frozenset(("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad", "ds_version"))


def make_stage(stage: int) -> Call:
    """Return DeepSpeed's object for a ZeRO stage."""
    return Call(_STAGE, (stage,))


def clipping_node(rest: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``clip_grad`` of an ``optim_states``, if the base's or its config states it.

    ZeRO-1/2 clip at the checkpoint's value; without one, at that of the run's own config (1.0 if that has none either).
    """
    clip_grad = section(rest, "ds_config").get("gradient_clipping")
    stated = rest["optimizer_state_dict"].get("clip_grad", clip_grad if type(clip_grad) in (int, float) else None)
    return {} if stated is None else {"clip_grad": stated}


def unknown(outer: Mapping[str, Any], is_kept: bool) -> dict[str, Any]:
    """Return the unknown keys of a base's ``optimizer_state_dict``, if they are kept."""
    return {key: value for key, value in outer.items() if is_kept and key not in _MADE}


def scaling_nodes(outer: Mapping[str, Any], is_needed: bool) -> dict[str, Any]:
    """Return the loss scaler of an ``optim_states``, if the base's states it, or a resume can't do without.

    If it is made, it is that of DeepSpeed for bf16 and fp32. BF16_Optimizer saves none.
    """
    if not is_needed and "loss_scaler" not in outer:
        return {}
    static = Call(_SCALER, (), new=True, state={"cur_scale": 1.0, "dynamic": False}, has_state=True)
    return {
        "loss_scaler": outer.get("loss_scaler") or static,
        "dynamic_loss_scale": outer.get("dynamic_loss_scale", False),
        "overflow": outer.get("overflow", False),
    }


def new_engine(base: CheckpointIndex, stage: int, precision: str) -> EngineTrees:
    """Return what DeepSpeed would have stored for a training that ran without it."""
    config = {
        "bf16": {"enabled": precision == "BF16"},
        "fp16": {"enabled": False},
        "zero_optimization": {"stage": stage},
    }
    optim = {"ds_config": config, "ds_version": DS_VERSION, "optimizer_state_dict": {}}
    model = {
        "module": Ordered((name, None) for name in (*base.params, *base.tied)),
        "buffer_names": [param.name for param in base.params.values() if param.role == "buffer"],
        "optimizer": None,
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": base.zero.skipped_steps,
        "global_steps": base.global_step,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": config,
        "ds_version": DS_VERSION,
    }
    return EngineTrees(optim=(optim,), model=(model,))


_FRAGMENT = Global("deepspeed.utils.tensor_fragment", "fragment_address")
_PADDING = "ZeRO padding and alignment"


@dataclass(frozen=True, slots=True)
class ZeroTarget:
    """A ZeRO checkpoint to be written, modelled on a base."""

    base: CheckpointIndex
    layout: OptimizerLayout
    precision: str
    """Dtype of the weights in training"""
    kinds: Mapping[str, tuple[str, ...]]
    """Trained param -> the optimizer's states of it; none in fp16 while every step so far has overflowed"""
    framework: Framework
    """The framework that will look for the tag folder"""
    tp_rank: int = 0
    """Of AutoTP: whose files these are; the base has the params of this rank then"""

    @classmethod
    def of(cls, base: CheckpointIndex, layout: OptimizerLayout, precision: str, framework: str) -> ZeroTarget:
        kinds = {param: (*states,) for param, states in kinds_by_param(base).items()}
        return cls(base, layout, precision, kinds, FRAMEWORKS[framework])

    def kinds_in(self, one: SubGroup) -> tuple[str, ...]:
        """Return the states that the optimizer keeps of a sub-group, the same of each of its params."""
        return next((self.kinds[param] for param in one.params if param in self.kinds), ())

    def on_tp_rank(self, rank: int) -> ZeroTarget:
        """Return the target of a tensor-parallel rank's files, which are those of a model with its shards.

        Raises MismatchError if ZeRO-3 can't have these shards, or the ranks would have different sub-groups.
        """
        base, parallel, layout = self.base, self.base.zero.tensor_parallel, self.layout
        assert parallel is not None, "only such a base has several"
        shape_of = partial(parallel.shape_on, rank)
        params = {name: replace(param, shape=shape_of(name, param.shape)) for name, param in base.params.items()}
        held = {state: replace(one, shape=shape_of(state.param, one.shape)) for state, one in base.held.items()}
        numels = {name: param.numel for name, param in params.items()}
        empty = [name for group in layout.groups for name in group.params if not numels[name]]
        if empty and layout.stage == 3:
            what = f"tensor-parallel rank {rank} has no element of {some(empty)}, which fails under ZeRO-3"
            raise MismatchError.at("--stage", what, "use --stage 1 or 2, or --mesh tp=1")
        params |= {name: replace(params[name], role="frozen") for name in empty}  # as DeepSpeed does
        groups = [replace(group, params=tuple(filter(numels.get, group.params))) for group in layout.groups]
        usual = lay_out_optimizer(
            layout,
            numels,
            base.zero.settings,
            self.precision,
            world_size=layout.world_size // layout.tp,
            stage=layout.stage,
            groups=groups,
        )
        cut = [replace(one, params=tuple(filter(numels.get, one.params))) for one in layout.sub_groups]
        if [one.params for one in cut] != [one.params for one in usual.sub_groups]:
            what = f"tensor-parallel rank {rank}, which has fewer elements, would have other sub-groups than rank 0"
            fix = "use --mesh tp=1, or another number of ranks; sub_group_size and round_robin_gradients decide this"
            raise MismatchError.at("--mesh", what, fix)
        cut = [replace(one, gaps=own.gaps) for one, own in zip(cut, usual.sub_groups, strict=True)]
        return replace(
            self,
            base=replace(base, params=params, held=held),
            layout=replace(usual, sub_groups=tuple(cut)),
            tp_rank=rank,
        )

    @property
    def tag(self) -> str:
        kept = self.base.zero.tag.removesuffix(UNIVERSAL_SUFFIX)
        if kept and (self.framework.name == self.base.framework or (self.framework.tag and self.framework.finds(kept))):
            return kept
        return self.framework.default_tag.format(self.base.global_step)

    def slices(self, params: Iterable[str]) -> Slices:
        """Return the layout of params under ZeRO-3."""
        return Slices({param: self.base.params[param].numel for param in params}, self.layout.world_size)

    def vector(self, one: SubGroup) -> Vector:
        """Return the layout of a group under ZeRO-1/2."""
        return Vector.of(self.slices(one.params).numels, one.gaps, self.layout.world_size)

    def keeps_whole(self, one: SubGroup, kind: str) -> bool:
        """Return whether DeepSpeed's ranks have a state as `OverlappingParams`, as without an offloaded optimizer."""
        zero = section(self.base.zero.engine.ds_config, "zero_optimization")
        is_offloaded = section(zero, "offload_optimizer").get("device") == "cpu"
        return is_muons(self.layout.groups[one.group].hyper, kind) and not is_offloaded

    def dtype(self, state: State) -> str:
        """Return the dtype that a state is written in: under DeepSpeed, master weights and moments are fp32."""
        if self.base.form.has_masters or state.kind == BUFFER:
            held = self.base.held.get(state)  # an empty buffer may not be held
            return held.live_dtype if held else "F32"
        return self.precision if state.kind == FROZEN else "F32"

    def adapted(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Return a tree whose ``ds_config``, if any, has the target's stage, and the batch of a step on its ranks."""
        if "ds_config" not in tree:
            return dict(tree)
        adapted = dict(tree["ds_config"] or {})
        total = adapted.get("train_batch_size")
        if type(total) is int and total % self.base.world_size == 0:
            adapted["train_batch_size"] = total // self.base.world_size * self.layout.world_size
        if isinstance(zero := adapted.get("zero_optimization"), dict):
            adapted["zero_optimization"] = {**zero, "stage": self.layout.stage}
        return {**tree, "ds_config": adapted}

    def excludes_frozen(self, model_states: Mapping[str, Any]) -> bool:
        """Return whether the run saved without its frozen params, as the Trainer does with PEFT.

        A resume needs every frozen param of the model if ``frozen_param_fragments`` exists, even empty, and loads
        none if it is None. ZeRO-1 always has None.
        """
        lacks = self.base.form.stage > 1 and model_states.get("frozen_param_fragments") is None
        return lacks or bool(adapters_of(self.base))

    def shapes_node(self, params: Iterable[str]) -> Ordered:
        """Return ``param_shapes`` of some params."""
        return Ordered((param, Call(Global("torch", "Size"), (self.base.params[param].shape,))) for param in params)


def refuse_states(base: CheckpointIndex, layout: OptimizerLayout) -> None:
    """Raise MismatchError, with every reason, for states that flat tensors of several params can't hold."""
    problems = [] if base.form.has_masters else refuse_cuts(base, "--to deepspeed")  # DeepSpeed's are elementwise
    kinds = {param: {*states} for param, states in kinds_by_param(base).items()}
    for number, one in enumerate(() if problems else layout.sub_groups):
        found = {frozenset(kinds.get(param, ())) for param in one.params if base.params[param].numel}
        if len(found) > 1:
            listed = " and ".join(some(sorted(each)) or "none" for each in found)
            what = f"params of sub-group {number} have different states of the optimizer: {listed}"
            problems.append(Problem("--groups", what, "keep the base's param groups, which separate them"))
    if problems:
        raise MismatchError(problems)


def optim_states(target: ZeroTarget, engine: EngineTrees, rank: int, cut_as: int) -> dict[str, Any]:
    """Return the tree of a rank's ``optim_states``, with the slices of rank ``cut_as``; unknown keys are the base's.

    That of ZeRO-1/2 is plain, or as BF16_Optimizer writes it.
    """
    base, layout, rest = target.base, target.layout, rest_of(engine.optim, rank)
    outer, cut, stage = rest["optimizer_state_dict"], layout.sub_groups, layout.stage

    def tensor(one: SubGroup, kind: str) -> Any:
        if stage == 3:
            return _flat_tensor(target, target.slices(one.params), kind, cut_as)
        vector = target.vector(one)
        is_stripped = kind == MASTER and not is_bf16
        flat = OverlappingParams(vector) if target.keeps_whole(one, kind) else vector
        return _flat_tensor(target, flat, kind, cut_as, is_stripped)

    is_bf16 = base.zero.settings.fp32_gradients and stage == 1
    state = {
        number: {
            **step_nodes(target, number),
            **one.scalars,
            **{kind: tensor(one, kind) for kind in target.kinds_in(one)},
        }
        for number, one in enumerate(cut)
    }
    masters = [tensor(one, MASTER) for one in cut]
    groups = [{**group.hyper, "params": layout.of_group(at)} for at, group in enumerate(layout.groups)]
    kept = {number: node for number, node in state.items() if node} if target.kinds else {}
    optimizer = {"state": kept, "param_groups": groups}
    stage_node, scaling = {"zero_stage": make_stage(stage)}, scaling_nodes(outer, stage == 3 or bool(base.form.stage))
    around = target.adapted({key: value for key, value in rest.items() if key != "optimizer_state_dict"})
    if stage == 3:
        made = {
            **stage_node,
            **scaling,
            "partition_count": layout.world_size,
            "optimizer_state_dict": optimizer,
            "fp32_flat_groups": masters,
        }
        return {**around, "optimizer_state_dict": {**unknown(outer, base.form.stage == 3), **made}}
    made = {
        **({} if is_bf16 else scaling),
        **clipping_node(rest),
        "base_optimizer_state": optimizer,
        "single_partition_of_fp32_groups": masters,
        **({} if is_bf16 else stage_node),
        "group_paddings": [target.vector(one).padding(cut_as) for one in cut],
        "partition_count": [layout.world_size] * len(layout.groups),
        "ds_version": rest.get("ds_version"),
        "param_slice_mappings": [_mapping(target, one, cut_as) for one in cut],
    }
    made = {**unknown(outer, base.form.stage in (1, 2) and not is_bf16), **made}
    if "param_alignment_paddings" in made or any(one.gaps for one in cut):
        made["param_alignment_paddings"] = [list(one.gaps or (0,) * len(one.params)) for one in cut]
    return {**around, "optimizer_state_dict": made}


def step_nodes(target: ZeroTarget, number: int) -> dict[str, Any]:
    """Return the step of a sub-group, if it is counted, in the form of torch's AdamW or of DeepSpeedCPUAdam."""
    step = target.layout.sub_groups[number].step
    if step is None:
        return {}
    if not target.base.train.step_is_tensor:
        return {"step": int(step)}
    return {"step": make_tensor("F32", (), (Bytes(struct.pack("<f", step), f"step of sub-group {number}"),))}


def model_states(target: ZeroTarget, engine: EngineTrees, rank: int, cut_as: int) -> dict[str, Any]:
    """Return the tree of a rank's ``model_states``, or of those of all, with the slices of rank ``cut_as``."""
    base, stage, rest = target.base, target.layout.stage, target.adapted(rest_of(engine.model, rank))
    frozen = [param for param in base.params.values() if param.role == "frozen"]
    fragments = Ordered()
    if stage == 3:
        module = Ordered(_placeholders(target, cut_as, rest["module"]))
        for state in (State(param.name, FROZEN) for param in frozen):
            if state in base.held:
                fragments[state.param] = _flat_tensor(target, target.slices([state.param]), FROZEN, cut_as)
        has_frozen = bool(fragments or not frozen) and not target.excludes_frozen(rest)
    else:
        module = Ordered(_whole_params(target, rest["module"]))
        has_frozen = stage == 2 and not target.excludes_frozen(rest)
        fragments = Ordered((param.name, module[param.name]) for param in frozen if has_frozen)
    module.attributes = rest["module"].attributes
    listed = rest.get("buffer_names") or ()
    # which the base has listed as frozen, because it was made of a checkpoint that left it open
    settled = [one.name for one in base.params.values() if one.role == "buffer" and one.name not in listed]
    return {
        **rest,
        **({"buffer_names": [*listed, *settled]} if settled else {}),
        "module": module,
        "param_shapes": [target.shapes_node(one.params) for one in target.layout.sub_groups],
        "frozen_param_shapes": target.shapes_node(param.name for param in frozen) if has_frozen else None,
        "shared_params": dict(base.tied) if rank == target.tp_rank == 0 else {},
        "frozen_param_fragments": fragments if has_frozen else None,
        "dp_world_size": target.layout.world_size,
    }


def _placeholders(target: ZeroTarget, rank: int, names: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the module of ZeRO-3: buffers, and placeholders for params, which live in the optimizer's files."""
    for name, node in names.items():
        param = target.base.params.get(target.base.tied.get(name, name))
        if param is None and name not in target.base.tied:  # PEFT left out the param that this is another name of
            continue
        if param is None or param.role != "buffer":
            yield name, make_tensor(target.precision, (0,), ())
        else:
            yield name, _whole(target, State(param.name, BUFFER), rank * param.numel) if param.numel else node


def _whole_params(target: ZeroTarget, names: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the module of ZeRO-1/2: the rounded master weights, and everything else. Tied names share their tensors."""
    made: dict[str, Any] = {}
    for param in (target.base.params[name] for name in names if name in target.base.params):
        state = State(param.name, {"buffer": BUFFER, "frozen": FROZEN}.get(param.role, MODULE))
        is_kept = not param.numel and names[param.name]
        made[param.name] = names[param.name] if is_kept else _whole(target, state, 0)
    stored = {name: target.base.tied.get(name, name) for name in names}
    yield from ((name, made[own]) for name, own in stored.items() if own in made)


def _whole(target: ZeroTarget, state: State, begin: int) -> Any:
    param = target.base.params[state.param]
    dtype = target.precision if state.kind == MODULE else target.dtype(state)
    return state_tensor(state, dtype, param.shape if param.numel else (0,), begin)


def _flat_tensor(target: ZeroTarget, flat: FlatLayout, kind: str, rank: int, is_stripped: bool = False) -> Any:
    """Return a rank's flat tensor of a state, without the padding at its end if stripped."""
    dtype = next((target.dtype(State(param, kind)) for param in flat.numels), "F32")
    content, at, length = list[Segment](), 0, flat.length(rank, is_stripped)
    for param, begin, end, offset in flat.on_rank(rank):
        if at < offset:
            content.append(Zeros((offset - at) * ITEMSIZE[dtype], _PADDING))
        content.append(Slot(State(param, kind), dtype, begin, end))
        at = offset + end - begin
    if at < length:
        content.append(Zeros((length - at) * ITEMSIZE[dtype], _PADDING))
    return make_tensor(dtype, (length,), tuple(content))


def slice_of(state: State, dtype: str, numel: int, rank: int, world_size: int) -> Iterator[Segment]:
    """Yield one rank's slice of a state under ZeRO-3: its elements, then padding."""
    begin, end = slice_on(rank, numel, world_size)
    if begin < end:
        yield Slot(state, dtype, begin, end)
    if padding := part_size(numel, world_size) - (end - begin):
        yield Zeros(padding * ITEMSIZE[dtype], _PADDING)


def _mapping(target: ZeroTarget, one: SubGroup, rank: int) -> Ordered:
    """Return the places of params in a rank's partition; right even with round_robin_gradients, unlike stock's."""
    return Ordered(
        (param, Call(_FRAGMENT, (), new=True, state={"numel": end - begin, "start": offset}, has_state=True))
        for param, begin, end, offset in target.vector(one).on_rank(rank)
    )


_TreeOf = Callable[["ZeroTarget", EngineTrees, int, int], dict[str, Any]]
_MAX_FORMS = 32
"""More than there are: the files of ranks on GPUs have up to 8 forms, one per GPU of a node, and rank 0's differ."""


def shard_files(target: ZeroTarget, folder: str) -> Iterator[tuple[int, str, _TreeOf]]:
    """Yield the rank, the path and the maker of the object tree of each shard file, the optimizer's first."""
    for rank in range(target.layout.world_size):
        yield rank, f"{folder}/{optim_name(rank, target.precision == 'BF16', target.tp_rank)}", optim_states
    for rank in range(target.layout.world_size if target.layout.stage == 3 else 1):
        yield rank, f"{folder}/{model_name(rank, target.layout.stage, target.tp_rank)}", model_states


def make_shards(target: ZeroTarget, engine: EngineTrees) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield the rank, the path and the object tree of each shard file, with its tensors bound to states."""
    for rank, path, tree_of in shard_files(target, target.tag):
        yield rank, path, tree_of(target, engine, rank, rank)


def rest_of(trees: Sequence[Mapping[str, Any] | None], rank: int) -> Mapping[str, Any]:
    """Return what a base keeps besides states for a rank: its own, or that of another rank."""
    return trees[rank % len(trees)] or next(tree for tree in trees if tree is not None)


class RankFiles:
    """The files of the data-parallel ranks; tensor-parallel ranks may share their ``digests``, as they share trees."""

    def __init__(self, target: ZeroTarget, engine: EngineTrees, digests: dict[int, bytes] | None = None):
        self.target, self.engine = target, engine
        self._numels = {name: param.numel for name, param in target.base.params.items()}
        parallel = target.base.zero.tensor_parallel
        found = {param: cut.runs(target.tp_rank) for param, cut in parallel.cuts.items()} if parallel else {}
        self._runs = {param: runs for param, runs in found.items() if runs is not None}
        """Of the params that the tensor-parallel rank has a part of"""
        self._digests = {} if digests is None else digests
        self._first: dict[tuple[_TreeOf, bytes], int] = {}
        self._form = lru_cache(_MAX_FORMS)(self._make_form)

    def layouts(self, folder: str, kinds: Sequence[_TreeOf] = (optim_states, model_states)) -> Iterator[FileLayout]:
        """Yield the layout of each file of these kinds, in a folder."""
        for rank, path, tree_of in shard_files(self.target, folder):
            if tree_of in kinds:
                yield TorchLayout(path, partial(self._content, path, rank, tree_of))

    def _content(self, path: str, rank: int, tree_of: _TreeOf) -> Content:
        pickled, storages = self._content_of_shards(path, rank, tree_of)
        return pickled, [self._of_full(content) if content else content for content in storages]

    def _of_full(self, content: tuple[Segment, ...]) -> tuple[Segment, ...]:
        """Return a tensor-parallel rank's content, with slots of the full tensors instead of the rank's."""
        if not self._runs:
            return content
        pieces: list[Segment] = []
        for piece in content:
            runs = self._runs.get(piece.state.param) if type(piece) is Slot else None
            if runs is None or type(piece) is not Slot:
                pieces.append(piece)
                continue
            for begin, width, rows, stride in runs(piece.begin, piece.end):
                pieces.append(Slot(piece.state, piece.dtype, begin, begin + width, rows, stride))
        return tuple(pieces)

    def _content_of_shards(self, path: str, rank: int, tree_of: _TreeOf) -> Content:
        if self.target.layout.stage < 3:
            return pickle_content(path, tree_of(self.target, self.engine, rank, rank))
        rests = self.engine.optim if tree_of is optim_states else self.engine.model
        like = self._first.setdefault((tree_of, self._digest(rest_of(rests, rank))), rank) if rank else 0
        pickled, storages = self._form(tree_of, like)
        return pickled, [self._of_rank(content, rank) if content else content for content in storages]

    def _make_form(self, tree_of: _TreeOf, like: int) -> Content:
        """Return the content of a rank's file, but with the slices of rank 0."""
        return pickle_content(f"rank {like}", tree_of(self.target, self.engine, like, 0))

    def _of_rank(self, content: tuple[Segment, ...], rank: int) -> tuple[Segment, ...]:
        """Return a storage with the slices of a rank instead of those of rank 0, which has no padding."""
        pieces: list[Segment] = []
        ranks = self.target.layout.world_size
        for piece in content:
            if not isinstance(piece, Slot):
                pieces.append(piece)
            elif piece.state.kind == BUFFER:
                pieces.append(piece._replace(begin=rank * piece.end, end=(rank + 1) * piece.end))
            else:
                state, dtype, _, part, *_ = piece
                numel = self._numels[state.param]
                if (rank + 1) * part <= numel:  # which is so for most: a whole slice
                    pieces.append(Slot(state, dtype, rank * part, (rank + 1) * part))
                else:
                    pieces += slice_of(state, dtype, numel, rank, ranks)
        return tuple(pieces)

    def _digest(self, rest: Mapping[str, Any]) -> bytes:
        """Return a digest that is equal for trees with the same pickle."""
        known = self._digests.get(id(rest))
        if known is None:
            data, storages = write_pickle(rest)
            content = repr([storage.content for storage in storages])
            known = self._digests[id(rest)] = hashlib.sha256(data + content.encode()).digest()
        return known


def lay_out_engine(
    base: CheckpointIndex, wanted: Wanted, lay_out_states: Callable[[ZeroTarget, EngineTrees], Iterable[FileLayout]]
) -> tuple[list[FileLayout], list[Problem]]:
    """Return the layouts of a checkpoint of DeepSpeed, whose own files ``lay_out_states`` lays out; see `lay_out`."""
    if base.form.has_masters:
        precision, dtype, leave_out = base.precision, wanted.dtype, frozenset[str]()
    else:
        precision = dtype = wanted.dtype or base.precision
        leave_out = frozenset((SCALER, LATEST))
        _check_plain_base(base, precision)
    refuse_states(base, wanted.layout)
    own = replace(base, world_size=base.world_size // base.tp)  # that of the states
    if base.tp > wanted.layout.tp:
        own = without_tensor_parallel(own)
    target, engine = ZeroTarget.of(own, wanted.layout, precision, wanted.framework), own.zero.engine
    if not engine.optim:
        engine = new_engine(base, target.layout.stage, precision)
    if wanted.from_group is not None:
        where, old = f"{base.name}: lr_scheduler of the model states", len(base.groups)
        from_group = wanted.from_group
        engine = replace(engine, model=each(engine.model, lambda tree: _with_scheduler(tree, where, old, from_group)))
    notices: list[Problem] = []
    is_without = any(tree is not None and not tree.get("lr_scheduler") for tree in engine.model)
    if (
        wanted.framework != base.framework and is_without
    ):  # an engine that has a scheduler can't load None; others don't look
        scheduler, about = scheduler_for(base, wanted)
        notices += about if wanted.framework == DEEPSPEED else []
        given = {"lr_scheduler": scheduler}
        model = each(engine.model, lambda tree: tree if tree.get("lr_scheduler") else {**tree, **given})
        engine = replace(engine, model=model)
    states = [*lay_out_states(target, engine)]
    weights: list[FileLayout] = []
    if target.framework.saves_model or base.form.is_partial:
        weights, missing = lay_out_missing_weights(base, wanted.layout.stage, dtype, wanted.is_alone)
        notices += missing
    made, about = synthesize_files(base, wanted)
    notices += [*about, *_rounded_twice(base, wanted.dtype), *_rounded_momentum(target)]
    if base.form.file_format in (FSDP, DCP, VERL) and wanted.dtype is None:
        what = f"the run that resumes has to train in {precision}, the dtype of the params"
        notices.append(Problem(base.name, what, "for a run in bf16, use --dtype bfloat16, or dtype in the recipe"))
    return lay_out_trainer_files(base, wanted, [*states, *weights, *made], dtype, leave_out), notices


def _with_scheduler(tree: Mapping[str, Any], where: str, old: int, from_group: Sequence[int]) -> dict[str, Any]:
    found = {"lr_scheduler": regroup_scheduler(tree.get("lr_scheduler"), where, old, from_group)}
    return {**tree, **found, **regrouped(tree, where, old, from_group)}


def _check_plain_base(base: CheckpointIndex, precision: str) -> None:
    if precision == "F16":
        what = "an fp16 run of DeepSpeed needs the state of its loss scaler, which a checkpoint without DeepSpeed lacks"
        raise UnsupportedCheckpoint.at(base.name, what, "resume in bf16")
    if adapters_of(base):
        what = "it is a PEFT adapter, and does not state the precision in which the model below it was trained"
        raise UnsupportedCheckpoint.at(base.name, what, "stay without DeepSpeed")
    unnamed = [param for group in base.groups for param in group.params if State(param, MASTER) not in base.held]
    if unnamed:
        what = f"the weight files have other names for {some(unnamed)} than the model, so they have no master weights"
        fix = "stay without DeepSpeed; or train on with a run that saves the params' own names"
        raise UnsupportedCheckpoint.at(base.name, what, fix)


def _rounded_momentum(target: ZeroTarget) -> list[Problem]:
    """Return a notice on Muon's momentum that is written with more digits than DeepSpeed's Muon keeps of it."""
    hyper = {param: group.hyper for group in target.layout.groups for param in group.params}
    momenta = (state for state in target.base.held if is_muons(hyper.get(state.param, {}), state.kind))
    wide = [state.param for state in momenta if ITEMSIZE[target.dtype(state)] > ITEMSIZE[target.precision]]
    if not wide:
        return []
    what = (
        f"Muon's momentum of {some(wide)} is written as it is, in fp32, but DeepSpeed keeps it in the dtype of the "
        f"gradients: a resume rounds it to {target.precision}"
    )
    return [Problem(target.base.name, what, "no action needed if that run trains in that precision as usual")]


def _rounded_twice(base: CheckpointIndex, dtype: str | None) -> list[Problem]:
    """Return notices on weights that can't be rounded from their master weights, as it is not known which these are."""
    if not dtype or not base.form.has_masters:
        return []
    weights = {state.param: held for state, held in base.held.items() if state.kind == WEIGHT and held.dtype != dtype}
    known = params_on_disk(base)
    others = [name for name in weights if name not in known]
    if not others:
        return []
    what = f"{some(others)} are rounded a second time, from the weights: their master weights are not known"
    fix = "no action needed to resume; to export the model, call trainer.save_model() after the resume"
    return [Problem("dtype", what, fix)]


def lay_out(base: CheckpointIndex, wanted: Wanted) -> tuple[list[FileLayout], list[Problem]]:
    """Lay out a composite's files; see `Writer`."""
    return lay_out_engine(base, wanted, _lay_out_shards)


def _lay_out_shards(target: ZeroTarget, engine: EngineTrees) -> Iterator[FileLayout]:
    if LATEST not in target.base.files or not target.base.zero.engine.optim or target.tag != target.base.zero.tag:
        yield FileLayout(LATEST, (Bytes(target.tag.encode(), "the tag"),))
    digests: dict[int, bytes] = {}
    for rank in range(tp := target.layout.tp):
        of_rank = replace(engine, optim=engine.optim[rank::tp], model=engine.model[rank::tp])
        yield from RankFiles(target.on_tp_rank(rank) if tp > 1 else target, of_rank, digests).layouts(target.tag)
