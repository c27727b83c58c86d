"""DeepSpeed's AutoTP (``tensor_parallel.autotp_size``): the tensor-parallel ranks' files as one checkpoint.

Each tensor-parallel rank's files are an ordinary ZeRO checkpoint of a smaller model, cut over the data-parallel ranks
that have the same shards. Every ``model_states`` holds a map of all shards, seen in DeepSpeed 0.19.8::

    universal_checkpoint_info
      affine_map                              {version: 1, params: {^name$ as a regex: one entry}}
        logical_shape                         of the full tensor
        ranks  {rank: {shard_shape, pieces: [{shape, source, dest, locations, [scale]}]}}
      autotp_unsupported_parameter_patterns   {^name$: why DeepSpeed can't describe it}

A piece is ``as_strided`` of the full tensor (``source``: offset and strides, in elements) and of the shard (``dest``).
In all layouts of 0.19.8 that is a box of each. Params are cut unevenly (by heads, or the vocabulary), so nothing is
concluded from shapes.

A ``scale`` would say that the shard is the full tensor times a factor. DeepSpeed 0.19.8 never writes one: the bias of a
layer that is cut by rows is whole and equal on all ranks. It refuses moments under a scale, because learning rate and
epsilon would need one too, so files with a scale are refused here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from llmtailor.checkpoint.index import CheckpointIndex, EngineTrees, TensorEntry
from llmtailor.checkpoint.placement import Box, Placement
from llmtailor.checkpoint.tensor_parallel import TensorParallel, TpShard, TpSplit
from llmtailor.codes import Code
from llmtailor.containers.json import is_count
from llmtailor.errors import COPY_CHECKPOINT, SourceError, UnsupportedCheckpoint, damaged, some
from llmtailor.model.roles import BUFFER, State

INFO, MAP = "universal_checkpoint_info", "affine_map"
SEEN_IN = "0.19.8"
_DEGREES = "checkpoint_parallel_dimensions"
_UNSUPPORTED = "autotp_unsupported_parameter_patterns"
_LEAVE_OUT = "leave it out; or train the model with a layout that DeepSpeed's own converter can read too"


def check_has_map(tree: Mapping[str, Any], where: str) -> None:
    """Raise UnsupportedCheckpoint for ``model_states`` that don't say where shards belong: of an older DeepSpeed."""
    info = tree.get(INFO)
    if not (isinstance(info, dict) and isinstance(info.get(MAP), dict)):
        what = f"it is of tensor parallelism, but does not say where the shards belong ({INFO}.{MAP})"
        fix = f"resume it with DeepSpeed {SEEN_IN} on as many ranks and save again, or leave it out"
        raise UnsupportedCheckpoint.at(where, what, fix)


def read_cuts(tree: Mapping[str, Any], degree: int, where: str) -> dict[str, TpSplit]:
    """Return how the params are cut. Raises SourceError or UnsupportedCheckpoint."""
    info = tree[INFO]
    params, version = info[MAP].get("params"), info[MAP].get("version")
    if version != 1:
        what = f"its map of tensor-parallel shards has version {version!r}, and 1 is known"
        raise UnsupportedCheckpoint.at(where, what, f"save it with DeepSpeed {SEEN_IN}")
    if unknown := info.get(_UNSUPPORTED):
        named = [_name(pattern) for pattern in unknown]
        what = f"DeepSpeed has cut {some(named)} in a way that it does not describe"
        raise UnsupportedCheckpoint.at(where, what, _LEAVE_OUT)
    cuts = {}
    for pattern, entry in params.items() if isinstance(params, dict) else ():
        name = _name(pattern)
        try:
            cuts[name] = _cut(entry, degree)
            cuts[name].check()
        except _NoBox as error:
            raise UnsupportedCheckpoint.at(where, f"the shards of {name} {error}", _LEAVE_OUT) from None
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            what = f"{INFO}.{MAP} does not say where every element of {name} is"
            raise damaged(where, what, Code.FIELD_CONFLICT) from None
    return cuts


def _name(pattern: object) -> str:
    return re.sub(r"\\(.)", r"\1", f"{pattern}".removeprefix("^").removesuffix("$"))


class _NoBox(Exception):
    """A piece is not a box of the tensor, with the elements that the tensor has."""


def _cut(entry: Mapping[str, Any], degree: int) -> TpSplit:
    shape, ranks = _counts(entry["logical_shape"]), entry["ranks"]
    if [*ranks] != [*range(degree)]:
        raise ValueError("other ranks")
    return TpSplit(shape, tuple(_shard(ranks[rank], shape) for rank in range(degree)))


def _shard(entry: Mapping[str, Any], full: tuple[int, ...]) -> TpShard:
    shape = _counts(entry["shard_shape"])
    pieces = []
    for piece in entry["pieces"]:
        if piece.get("scale", 1.0) != 1.0:
            raise _NoBox("are scaled, so its moments would need another learning rate than the rest")
        if 0 not in (sizes := _counts(piece["shape"])):
            pieces.append((_box(sizes, piece["source"], full), _box(sizes, piece["dest"], shape)))
    return TpShard(shape, tuple(pieces))


def _box(sizes: tuple[int, ...], view: Any, shape: tuple[int, ...]) -> Box:
    """Return the box of a tensor that ``as_strided`` with these arguments is."""
    offset, strides = view
    usual = [math.prod(shape[at + 1 :]) for at in range(len(shape))]
    is_box = len(sizes) == len(shape) and all(
        size == 1 or stride == own for size, stride, own in zip(sizes, strides, usual, strict=True)
    )
    offsets = []
    for stride in usual:
        at, offset = divmod(offset, stride)
        offsets.append(at)
    if not is_box or any(low + size > all_ for low, size, all_ in zip(offsets, sizes, shape, strict=True)):
        raise _NoBox("are no boxes of the full tensor")
    return Box(tuple(offsets), sizes)


def _counts(node: Any) -> tuple[int, ...]:
    if not isinstance(node, (list, tuple)) or not all(map(is_count, node)):
        raise TypeError("no sizes")
    return tuple(node)


def join_ranks(
    indexes: Sequence[CheckpointIndex], cuts: Mapping[str, TpSplit], where: Sequence[str]
) -> CheckpointIndex:
    """Return the index of the whole checkpoint, given those of the tensor-parallel ranks' files.

    ``where`` are the places of their model states. Raises SourceError if they do not fit the cuts, or each other.
    """
    first, degree = indexes[0], len(indexes)
    trained = {name for one in first.groups for name in one.params}
    for index, place in zip(indexes[1:], where[1:], strict=True):
        for what, value in _facts(index, trained).items():
            if value != _facts(first, trained)[what]:
                text = f"{what} differ from those of tensor-parallel rank 0"
                raise SourceError.at(place, text, COPY_CHECKPOINT, Code.RANKS_DIFFER)
    if lost := [param.name for param in first.params.values() if param.role != "buffer" and param.name not in cuts]:
        raise damaged(where[0], f"{INFO}.{MAP} does not list {some(lost)}", Code.FIELD_MISSING)
    copies: dict[State, tuple[Placement, ...]] = {}

    def join(state: State, param: str, of_ranks: Sequence[TensorEntry | None]) -> TensorEntry:
        like, cut = of_ranks[0], cuts[param]
        assert like is not None, "the first rank has it"
        for place, entry, shard in zip(where, of_ranks, cut.shards, strict=True):
            # DeepSpeed freezes params of which a rank has no element
            if shard.numel and (entry is None or (entry.shape, entry.dtype) != (shard.shape, like.dtype)):
                what = f"{state.kind} of {param} is not the shard that {INFO}.{MAP} describes"
                raise damaged(place, what, Code.STATE_SIZE)
        whole, *others = cut.join([(entry or like).place for entry in of_ranks])
        if others:
            copies[state] = tuple(others)
        return replace(like, shape=cut.shape, place=whole)

    held = {
        state: entry if state.kind == BUFFER else join(state, state.param, [one.held.get(state) for one in indexes])
        for state, entry in first.held.items()
    }
    module = {
        state: join(state, first.tied.get(state.param, state.param), [one.zero.module.get(state) for one in indexes])
        for state in first.zero.module
    }
    params = first.params.values()
    return replace(
        first,
        world_size=first.world_size * degree,
        params={one.name: one if one.role == "buffer" else replace(one, shape=cuts[one.name].shape) for one in params},
        held=held,
        files={path: fact for index in indexes for path, fact in index.files.items()},
        unreadable=frozenset().union(*(index.unreadable for index in indexes)),
        findings=tuple(dict.fromkeys(chain.from_iterable(index.findings for index in indexes))),
        zero=replace(
            first.zero,
            module=module,
            tensor_parallel=TensorParallel(degree, cuts, copies),
            engine=EngineTrees(
                _by_rank([index.zero.engine.optim for index in indexes]),
                _by_rank([index.zero.engine.model for index in indexes]),
            ),
        ),
    )


def _facts(index: CheckpointIndex, trained: Collection[str]) -> dict[str, object]:
    """Return what the tensor-parallel ranks' files must agree on, besides the single values in them."""
    shapes = {one.name: (one.role, one.shape) for one in index.params.values()}
    return {
        "the names of params": index.params.keys() | index.tied.keys(),
        "the trained params": {name for name, (role, _) in shapes.items() if role == "trainable"}.difference(trained),
        "the shapes of buffers": {name: shape for name, (role, shape) in shapes.items() if role == "buffer"},
        "the optimizer's steps": {*index.steps().values()},
    }


def without_tensor_parallel(base: CheckpointIndex) -> CheckpointIndex:
    """Return a base as if its run had no tensor parallelism: with what the first rank's files say besides that."""

    def change(tree: Mapping[str, Any]) -> Mapping[str, Any]:
        changed = {key: value for key, value in tree.items() if key != INFO}
        if isinstance(config := tree.get("ds_config"), dict):
            changed["ds_config"] = {key: value for key, value in config.items() if key != "tensor_parallel"}
        if "mp_world_size" in tree:
            changed["mp_world_size"] = 1
        if isinstance(degrees := tree.get(_DEGREES), dict):
            changed[_DEGREES] = {**degrees, "tp_degree": 1}
        return changed

    engine = base.zero.engine
    optim, model = (each(trees[:: base.tp], change) for trees in (engine.optim, engine.model))
    return replace(base, zero=replace(base.zero, tensor_parallel=None, engine=EngineTrees(optim, model)))


_Tree = Mapping[str, Any]


def each(trees: Sequence[_Tree | None], change: Callable[[_Tree], _Tree]) -> tuple[_Tree | None, ...]:
    """Return the changed trees of all ranks; ranks that share one share the new one."""
    changed = {id(tree): change(tree) for tree in trees if tree is not None}
    return tuple(changed.get(id(tree)) for tree in trees)


def _by_rank(trees: Sequence[Sequence[_Tree | None]]) -> tuple[_Tree | None, ...]:
    """Return the trees of all ranks, given those of each tensor-parallel rank: neighbors share a model."""
    return tuple(chain.from_iterable(zip(*trees, strict=True)))
