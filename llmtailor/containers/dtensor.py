"""DTensors in ``torch.save`` files: the piece of a tensor that one rank has, and its place among the others'. Pure.

As torch 2.13 pickles them (see `DeviceMesh.wrap`), a DTensor is a local tensor with a spec: the shape of the whole, a
mesh of ranks, and for each dimension of the mesh how it cuts the tensor::

    Shard(dim)     along a dimension, into ``ceil(size / ranks)`` each; the last ones may have less, or nothing
    Replicate()    not at all

All of it is read as data. torch's own loader makes the objects again, and compares their mesh with that of the run.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from llmtailor.checkpoint.layout import Bytes
from llmtailor.containers.unpickle import (
    ALLOWED,
    REBUILD_TYPED,
    REBUILD_WRAPPER,
    Call,
    Global,
    TensorView,
    as_shape,
    as_tensor,
    make_tensor,
)
from llmtailor.errors import UnsupportedCheckpoint, damaged
from llmtailor.model.dtypes import DTYPES

_TENSOR = "torch.distributed.tensor"
DTENSOR = Global(_TENSOR, "DTensor")
_SHARD, _REPLICATE = (Global(f"{_TENSOR}.placement_types", name) for name in ("Shard", "Replicate"))
_STRIDED = Global(f"{_TENSOR}.placement_types", "_StridedShard")
_SPEC, _META, _ORDER = (
    Global(f"{_TENSOR}._dtensor_spec", one) for one in ("DTensorSpec", "TensorMeta", "ShardOrderEntry")
)
_MESH = Global("torch.distributed.device_mesh", "DeviceMesh")
_LAYOUT, _AXIS = (Global("torch.distributed._mesh_layout", name) for name in ("_MeshLayout", "_FlatLayout"))
_CLASSES = (DTENSOR, _SHARD, _REPLICATE, _STRIDED, _SPEC, _META, _ORDER, _MESH, _LAYOUT, _AXIS)
WITH_DTENSORS = dict(ALLOWED)
"""What the pickle of a file with DTensors may name"""
for _one in _CLASSES:
    WITH_DTENSORS[_one.module] = {*WITH_DTENSORS.get(_one.module, ()), _one.name}

_RE_SAVE = "save with torch.distributed.checkpoint instead, whose folders are read whatever the mesh"


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """What one rank has of a tensor."""

    local: Any
    """The node of its own tensor"""
    view: TensorView
    shape: tuple[int, ...]
    """That of the whole tensor"""
    cuts: tuple[int | None, ...]
    """For each dimension of the mesh, the dimension of the tensor that it cuts; None if it repeats the tensor"""
    at: tuple[int, ...]
    """The rank's place in the mesh"""
    mesh: Mapping[str, Any]
    """The fields of the mesh"""

    def box(self, mesh: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return where its elements begin in each dimension, and how many there are, in a mesh of this shape."""
        offsets, sizes = [0] * len(self.shape), [*self.shape]
        for cut, at, ranks in zip(self.cuts, self.at, mesh, strict=True):
            if cut is not None:
                part = -(-sizes[cut] // ranks)
                low, high = (min(sizes[cut], part * number) for number in (at, at + 1))
                offsets[cut], sizes[cut] = offsets[cut] + low, high - low
        return tuple(offsets), tuple(sizes)


def as_piece(node: object, what: str, where: str) -> LocalTensor | None:
    """Return the piece that a node represents; None if it is not a DTensor.

    Raises SourceError for one that lacks something, and UnsupportedCheckpoint for placements that are not read.
    """
    if not (isinstance(node, Call) and node.func == REBUILD_TYPED and isinstance(node.args, tuple)):
        return None
    match node.args:
        case (func, Global() as kind, (_, _, size, *_), state) if func == REBUILD_WRAPPER and kind == DTENSOR:
            fields = _fields(state)
        case _:
            return None
    local, spec = fields.get("_local_tensor"), _fields_of(fields.get("_spec"), _SPEC)
    mesh = _fields_of(spec.get("mesh"), _MESH)
    shape, view, at = as_shape(size), as_tensor(local), mesh.get("_coordinate_on_dim")
    placements = spec.get("placements")
    is_placed = isinstance(at, (tuple, list)) and isinstance(placements, (tuple, list)) and len(at) == len(placements)
    if shape is None or view is None or not is_placed or not all(type(one) is int and one >= 0 for one in at or ()):
        raise damaged(where, f"{what} is a DTensor that does not say which part of the tensor it is")
    cuts = tuple(_cut(one, len(shape), what, where) for one in placements or ())
    return LocalTensor(local, view, shape, cuts, tuple(at or ()), mesh)


def _cut(placement: object, dims: int, what: str, where: str) -> int | None:
    kind = placement.func if isinstance(placement, Call) else None
    if kind == _REPLICATE:
        return None
    dim = _fields_of(placement, _SHARD).get("dim")
    if kind == _SHARD and type(dim) is int and 0 <= dim < dims:
        return dim
    how = kind.name if isinstance(kind, Global) else "an unknown placement"
    raise UnsupportedCheckpoint.at(where, f"{what} is cut by {how}, as by tensor parallelism beside FSDP", _RE_SAVE)


def _fields_of(node: object, kind: Global) -> Mapping[str, Any]:
    return _fields(node.state) if isinstance(node, Call) and node.func == kind else {}


def _fields(state: object) -> Mapping[str, Any]:
    """Return an object's attributes: its state is a dict, or a pair of two for a class with slots."""
    parts = state if isinstance(state, tuple) else (state,)
    return {key: value for part in parts if isinstance(part, dict) for key, value in part.items()}


ORDER_FIELD = "_preserve_rank_order"


@dataclass(frozen=True)
class DeviceMesh:
    """The mesh of ranks of an FSDP2 training, as one of its ranks has it."""

    device: str
    """``cuda`` or ``cpu``"""
    names: tuple[str, ...]
    """Those of its dimensions; none if they have no names"""
    shape: tuple[int, ...]
    """The last dimension cuts, any before it repeats"""
    rank: int
    groups: tuple[str, ...] = ()
    """The names of its process groups; those that torch gives to the first mesh of a program if there are none"""
    preserves_order: bool | None = False
    """torch 2.15 compares it, 2.13 takes no notice; None leaves it out, as 2.13 does"""

    @property
    def at(self) -> tuple[int, ...]:
        *_, shards = self.shape
        return (*(() if len(self.shape) == 1 else (self.rank // shards,)), self.rank % shards)

    @cached_property
    def _node(self) -> Call:
        ranks = math.prod(self.shape)
        axes = []
        for number, size in enumerate(self.shape):
            stride = math.prod(self.shape[number + 1 :])
            is_cut = size > 1  # torch leaves out dimensions with one place
            axes.append(_object(_AXIS, {"shape": (size,) * is_cut, "stride": (stride,) * is_cut}))
        numbers = struct.pack(f"<{ranks}i", *range(ranks))
        return _object(
            _MESH,
            {
                "_device_type": self.device,
                "_layout": _object(_LAYOUT, {"axes": tuple(axes)}),
                "_rank_map": make_tensor("I32", (ranks,), (Bytes(numbers, "ranks of the mesh"),)),
                "_mesh_dim_names": self.names or None,
                "_root_mesh": None,
                "_flatten_rank_map": tuple(range(ranks)),
                "_thread_id": None,
                "_flatten_mapping": {},
                "_dim_group_names": [*(self.groups or self._first_groups())],
                "_rank": self.rank,
                "_coordinate_on_dim": self.at,
                "_hash": None,
                **({} if self.preserves_order is None else {ORDER_FIELD: self.preserves_order}),
            },
        )

    def _first_groups(self) -> Iterator[str]:
        if len(self.shape) == 1:
            yield "0"
        else:
            replica, shard = self.at
            yield str(1 + shard)
            yield str(1 + self.shape[-1] + replica)

    @cached_property
    def _placements(self) -> tuple[Call, ...]:
        repeated = [_object(_REPLICATE, {}) for _ in self.shape[1:]]
        return (*repeated, _object(_SHARD, {"dim": 0}))

    def wrap(self, local: Any, dtype: str, shape: tuple[int, ...]) -> Call:
        """Return the node of the DTensor of which a rank has the rows ``local``."""
        stride = tuple(math.prod(shape[number + 1 :]) for number in range(len(shape)))
        kind = Global("torch", DTYPES[dtype].torch)
        spec = {
            "mesh": self._node,
            "placements": self._placements,
            "tensor_meta": Call(_META, (Call(Global("torch", "Size"), (shape,)), stride, kind), new=True),
            "shard_order": (Call(_ORDER, (0, (len(self.shape) - 1,)), new=True),),
            "use_strided_shard_as_shard_order": False,
            "_hash": None,
        }
        layout = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
        device = Call(Global("torch", "device"), ("cpu",))
        args = (DTENSOR, kind, shape, stride, 0, layout, device, False)
        attributes = (None, {"_local_tensor": local, "_spec": _object(_SPEC, spec)})
        return Call(REBUILD_TYPED, (REBUILD_WRAPPER, DTENSOR, args, attributes))


def _object(kind: Global, state: dict[str, Any]) -> Call:
    return Call(kind, (), new=True, state=state, has_state=True)


MESH_FIELDS = frozenset(DeviceMesh("cpu", ("fsdp",), (1,), 0, preserves_order=None)._node.state)
"""Those of torch 2.13 and 2.15. Older ones have others, and could not load what `DeviceMesh` writes."""
