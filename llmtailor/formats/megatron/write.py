"""Layout of checkpoints of Megatron-core, from any base. `read` describes them.

The run that loads one cuts the tensors itself, for any tensor, pipeline and data parallelism. A base of Megatron's
gives all that is no param: args, scheduler, random states, the rows that pad the vocabulary. From another base there is
no padding, which Megatron fills with zeros, layers are stacked, and what only a run of Megatron knows is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from llmtailor.checkpoint.index import CheckpointIndex, MegatronLayout
from llmtailor.checkpoint.layout import Bytes, Cast, Copy, FileLayout, Segment, Slot, Zeros
from llmtailor.checkpoint.optimizer import OptimizerLayout, ParamGroup, SubGroup, without_names
from llmtailor.checkpoint.placement import Box
from llmtailor.checkpoint.schema import kinds_by_param, refuse_cuts
from llmtailor.checkpoint.wanted import Wanted
from llmtailor.containers.dcp import cut_rows
from llmtailor.containers.torch_file import lay_out_torch_file
from llmtailor.errors import MismatchError, Problem, UnsupportedCheckpoint, counted, some
from llmtailor.formats.dcp.builder import FolderBuilder
from llmtailor.formats.megatron.names import (
    EMBEDDING,
    LAYERS,
    Selection,
    has_decay,
    has_row,
    layer_shape,
    place_of,
    select,
    stack,
)
from llmtailor.formats.megatron.read import RESHARDABLE, SHARDING, find_optimizers
from llmtailor.formats.torch_states import step_node
from llmtailor.frameworks.files import BACKEND, COMMON, CONFIG
from llmtailor.frameworks.read import read_config
from llmtailor.frameworks.write import carry
from llmtailor.model.dtypes import ITEMSIZE
from llmtailor.model.roles import EXP_AVG, EXP_AVG_SQ, MASTER, WEIGHT, State

_NAMES = {MASTER: "param", EXP_AVG: "exp_avg", EXP_AVG_SQ: "exp_avg_sq"}
_GROUP = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
"""What identifies the param groups, besides ``wd_mult``, if a run has no options for some params"""
_METADATA = {
    "distrib_optim_sharding_type": RESHARDABLE,
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "non_homogeneous_layers": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
"""What tells Megatron-LM how the folder is arranged"""
_BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_LINEAR = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
_OF_EXPERTS = ("mlp.experts.experts.linear_fc1", "mlp.experts.experts.linear_fc2")
_CORE = "self_attention.core_attention"
"""Has an extra state under TransformerEngine"""


def lay_out(base: CheckpointIndex, wanted: Wanted) -> tuple[list[FileLayout], list[Problem]]:
    """Lay out a composite's files; see `Writer`."""
    _check_base(base)
    if wanted.from_group is not None:
        raise MismatchError.at("--groups", "Megatron-core decides its param groups itself", "leave --groups out")
    own = base.megatron
    shapes = {key: own.tensors[key].shape for kind, key in own.written if kind == WEIGHT} if own else _stacked(base)
    groups = own.groups if own else _query_groups(base)
    try:
        selections = select(shapes, groups, base.params[EMBEDDING].shape[0])
    except ValueError as error:
        raise UnsupportedCheckpoint.at(base.name, f"{error}", f"check its {CONFIG}") from error
    target = _MegatronTarget(base, wanted, own, shapes, selections)
    folder = FolderBuilder("", wanted.layout.world_size)
    target.add_tensors(folder)
    target.add_objects(folder)
    backend = FileLayout(BACKEND, (Bytes(json.dumps(_BACKEND).encode(), "the name of the format"),))
    kept = [carry(path, fact) for path, fact in base.files.items() if path == CONFIG]
    common = lay_out_torch_file(COMMON, target.common())
    return [*folder.finish(), common, backend, *kept], target.notices()


def arrange(base: CheckpointIndex, world_size: int | None) -> OptimizerLayout:
    """Return Megatron's own param groups, each with one step.

    Raises MismatchError if a base's groups differ in more than the params that decay.
    """
    groups = base.groups
    if base.megatron is None:
        group_of = {param: group for group in base.groups for param in group.params}
        known = sorted((name for name in group_of if has_row(name)), key=place_of)  # `lay_out` refuses others
        groups = tuple(
            _joined(base, [name for name in known if has_decay(name, base.params[name].shape) == decays], group_of)
            for decays in (True, False)
        )
    cut = tuple(SubGroup(at, group.params) for at, group in enumerate(groups))
    return OptimizerLayout(0, world_size or base.world_size, groups, cut)


def _joined(base: CheckpointIndex, params: Sequence[str], group_of: Mapping[str, ParamGroup]) -> ParamGroup:
    options = [without_names(group_of[name].hyper) for name in params]
    if differing := sorted({key for one in options for key in one if one[key] != options[0].get(key)}):
        what = f"params that are one group under Megatron differ in {some(differing)}"
        fix = "use a base with the usual two groups: no weight decay for biases and norms"
        raise MismatchError.at(base.name, what, fix)
    return ParamGroup(tuple(params), options[0] if options else {})


def _check_base(base: CheckpointIndex) -> None:
    problems = refuse_cuts(base, "--to megatron")
    kinds = {frozenset(kinds_by_param(base).get(name, ())) for name in base.params}
    if others := [param.name for param in base.params.values() if param.role != "trainable"]:
        what = f"{some(others)} are not trained, and Megatron-core has no place for them here"
        problems.append(Problem(base.name, what, "use another format"))
    elif kinds != {frozenset((EXP_AVG, EXP_AVG_SQ))}:
        what = "its optimizer does not keep Adam's two moments of every param"
        problems.append(Problem(base.name, what, "use another format"))
    if EMBEDDING not in base.params and not problems:
        problems.append(Problem(base.name, f"it has no {EMBEDDING}", "use a model like Llama, Qwen2, Qwen3 or Mixtral"))
    if problems:
        raise UnsupportedCheckpoint(problems)


def _stacked(base: CheckpointIndex) -> dict[str, tuple[int, ...]]:
    try:
        return stack({name: param.shape for name, param in base.params.items()})
    except LookupError as error:
        what = f"Megatron-core has no tensor for {some([*error.args[0]])}, or other layers lack it"
        raise UnsupportedCheckpoint.at(base.name, what, "use a model like Llama, Qwen2, Qwen3 or Mixtral") from error


def _query_groups(base: CheckpointIndex) -> int:
    config = read_config(base) if CONFIG in base.files else {}
    found = config.get("num_key_value_heads") or config.get("num_attention_heads")
    if type(found) is not int:
        what = f"it has no {CONFIG} with the number of key and value heads, by which Megatron's qkv is interleaved"
        raise UnsupportedCheckpoint.at(base.name, what, f"put the model's {CONFIG} into the folder")
    return found


@dataclass(frozen=True, slots=True)
class _MegatronTarget:
    base: CheckpointIndex
    wanted: Wanted
    own: MegatronLayout | None
    """Of a base of Megatron's"""
    shapes: Mapping[str, tuple[int, ...]]
    selections: Sequence[Selection]

    def add_tensors(self, folder: FolderBuilder) -> None:
        runs: dict[str, list[tuple[int, int, str, int]]] = {key: [] for key in self.shapes}
        for one in self.selections:
            for begin, end, offset in zip(one.cuts, one.cuts[1:], one.offsets, strict=False):
                runs[one.key].append((offset, offset + end - begin, one.param, begin))
        for found in runs.values():
            found.sort()
        for kind in (WEIGHT, MASTER, EXP_AVG, EXP_AVG_SQ):
            for key, shape in self.shapes.items():
                full = self.own.written.get((kind, key)) if self.own else self._name(kind, key)
                if full is not None:  # without it, the weights are the masters
                    dtype = self._dtype(kind, full)
                    boxes = (
                        (box, tuple(self._content(runs[key], kind, full, dtype, low, high)))
                        for box, low, high in self._boxes(key, shape)
                    )
                    folder.add_tensor((full,), dtype, shape, boxes)

    def _name(self, kind: str, key: str) -> str:
        return key if kind == WEIGHT else f"optimizer.state.{_NAMES[kind]}.{key}"

    def _dtype(self, kind: str, full: str) -> str:
        if kind == WEIGHT and self.wanted.dtype:
            return self.wanted.dtype
        if self.own:
            return self.own.tensors[full].dtype
        return self.base.precision if kind == WEIGHT else "F32"

    def _boxes(self, key: str, shape: tuple[int, ...]) -> Iterator[tuple[Box, int, int]]:
        """Yield boxes along dimension 0: each layer, or the rows of each rank; and the elements of each."""
        is_stacked = layer_shape(key, shape) != shape
        rest, zeros = shape[1:], (0,) * (len(shape) - 1)
        for low, high in cut_rows(shape[0], shape[0] if is_stacked else self.wanted.layout.world_size):
            if low < high:
                yield Box((low, *zeros), (high - low, *rest)), low * prod(rest), high * prod(rest)

    def _content(
        self, runs: Sequence[tuple[int, int, str, int]], kind: str, full: str, dtype: str, low: int, high: int
    ) -> Iterator[Segment]:
        """Yield the pieces of elements ``low``..``high`` of a tensor; between the runs is padding."""
        at = low
        for begin, end, param, first in runs:
            begin, end, skipped = max(begin, low), min(end, high), max(low - begin, 0)
            if begin < end:
                yield from self._padding(full, dtype, at, begin)
                yield Slot(State(param, kind), dtype, first + skipped, first + skipped + end - begin)
                at = end
        yield from self._padding(full, dtype, at, high)

    def _padding(self, full: str, dtype: str, begin: int, end: int) -> Iterator[Segment]:
        if begin == end:
            return
        held = self.own.tensors.get(full) if self.own else None
        if held is None:
            yield Zeros((end - begin) * ITEMSIZE[dtype], "padding")
            return
        for fragment in held.place.cover(begin, end):
            extent = fragment.extent
            yield Copy(extent) if held.dtype == dtype else Cast(extent, held.dtype, dtype)

    def add_objects(self, folder: FolderBuilder) -> None:
        """Add the base's objects, or the extra states of modules, which are empty without fp8."""
        if self.own:
            for key, extent in self.own.objects.items():
                folder.add_pickle((key,), extent)
            return
        experts = self.shapes.get(f"{LAYERS}{_OF_EXPERTS[0]}.weight", (0, 0))[1]
        layers = self.shapes[f"{LAYERS}self_attention.linear_proj.weight"][0]
        for layer in range(layers):
            for module in (*_LINEAR, _CORE):
                if module == _CORE or f"{LAYERS}{module}.weight" in self.shapes:
                    folder.add_object((f"{LAYERS}{module}._extra_state/shard_{layer}_{layers}",), [None])
            for module in _OF_EXPERTS:
                for expert in range(experts):
                    key = f"{LAYERS}{module}._extra_state/shard_{layer}.{expert}_{layers}.{experts}"
                    folder.add_object((key,), [None])

    def common(self) -> dict[str, Any]:
        """Return the tree of ``common.pt``."""
        layout = self.wanted.layout
        nodes = [
            {**group.hyper, "step": one.step or 0.0}
            for group, one in zip(layout.groups, layout.sub_groups, strict=True)
        ]
        if self.own:
            return self._updated(self.own, nodes)
        return {
            "iteration": self.base.global_step,
            "checkpoint_version": 3.0,
            "optimizer": {
                "optimizer": {"param_groups": [{**_GROUP, "wd_mult": 1.0 - at} | one for at, one in enumerate(nodes)]},
                SHARDING: RESHARDABLE,
            },
            "content_metadata": dict(_METADATA),
        }

    def _updated(self, own: MegatronLayout, nodes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return that of the base, with other param groups."""
        left, made = iter(nodes), list[dict[str, Any]]()
        for one in find_optimizers(own.common, COMMON):
            inner = dict(one["optimizer"])
            pairs = [(node, next(left)) for node in inner["param_groups"]]
            inner["param_groups"] = [
                {**node, **{key: value for key, value in new.items() if key != "step" or key in node}}
                for node, new in pairs
            ]
            if "common_step" in inner.get("state", {}):
                step = max((new["step"] for _, new in pairs), default=0.0)
                inner["state"] = {**inner["state"], "common_step": step_node(self.base, step, "the optimizer")}
            made.append({**one, "optimizer": inner})
        tree = own.common["optimizer"]
        chained = made[0] if "optimizer" in tree else {key: made.pop(0) for key in tree if isinstance(key, int)}
        return {**own.common, "iteration": self.base.global_step, "optimizer": {**tree, **chained}}

    def notices(self) -> list[Problem]:
        found = []
        if not self.own:
            what = "Megatron-LM's args, scheduler, counters and random states are unknown, and are left out"
            fix = "to resume Megatron-LM with them, use a checkpoint of that run as base_model, and this as a source"
            found.append(Problem(self.base.name, what, fix))
            if not self.wanted.dtype and not self.base.form.has_masters:
                what = f"its weights are written in {self.base.precision}, the dtype of the params"
                found.append(Problem(self.base.name, what, "for a run in bf16, use --dtype bfloat16"))
        left = [path for path in self.base.files if path not in (CONFIG, COMMON, BACKEND)] if not self.own else []
        if left:
            what = f"{counted(len(left), 'file')} of its loader have no place in a checkpoint of Megatron-core"
            found.append(Problem(self.base.name, what, "no action needed: keep the base if you need them"))
        return found
