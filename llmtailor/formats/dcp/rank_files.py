"""Files of each rank with its pieces of all tensors, as DTensors: read into the form of DCP folders.

verl's and accelerate's with ``use_dcp=False``. Each rank loads its own file, so none of them resumes on another number
of ranks. FSDP1 keeps the states of a whole module in one vector, cut anywhere, and no file says which params are in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.index import RankMesh
from llmtailor.checkpoint.placement import Extent
from llmtailor.codes import Code
from llmtailor.containers.dcp import Blob, Chunk, KeyPath
from llmtailor.containers.dtensor import ORDER_FIELD, WITH_DTENSORS, LocalTensor, as_piece
from llmtailor.containers.json import Tensor, as_dict, check_name, get, read_step, read_tensor
from llmtailor.containers.torch_file import list_records, read_torch_file
from llmtailor.containers.unpickle import as_tensor
from llmtailor.errors import (
    COPY_BACK,
    COPY_CHECKPOINT,
    COPY_FILE,
    PathIn,
    Problems,
    SourceError,
    UnsafePickle,
    UnsupportedCheckpoint,
    attempt,
    some,
)
from llmtailor.formats.dcp.folder import DcpCheckpoint, Stored, join_pieces
from llmtailor.formats.dcp.keys import BUFFERS, TIED

_MODEL = "model"
"""What the paths of weights begin with"""
OLD_FSDP = "FSDP1 keeps the optimizer's states of whole modules in one vector, and no file says which params are in it"


USE_FSDP2 = (
    "resume with the training itself, or train with FSDP2 (strategy=fsdp2); for its weights alone, use verl's "
    "model_merger"
)


def _walk_model(tree: Any, where: str) -> Iterator[tuple[KeyPath, Any]]:
    for key, value in as_dict(tree, "the file", where).items():
        yield (_MODEL, check_name(key, "a weight", where)), value


Walk = Callable[[Any, str], Iterator[tuple[KeyPath, Any]]]


class RankFileReader:
    def __init__(self, root: Path, name: str, problems: Problems):
        self.root, self.name, self.problems = root, name, problems
        self.mesh: RankMesh | None = None
        self.roles: dict[str, tuple[KeyPath, Any]] = {}
        """The names of buffers, and the tied names, as llmtailor lists them in a DCP folder"""
        self._tied: dict[str, str] = {}
        """Name of a DTensor -> the name of the first one in the same storage"""
        self._buffers: list[str] = []
        """Names of tensors that are no DTensors"""
        self._has_step = False
        self._checksums: dict[str, Mapping[int, int | None]] = {}

    @property
    def others(self) -> set[str]:
        """The names of a model that are not those of its params"""
        return {*self._tied, *self._buffers}

    def read_model(self, paths: Sequence[str]) -> DcpCheckpoint | None:
        """Return what `read` does; afterwards, the roles are known."""
        model = self.read(paths, _walk_model)
        self.roles = {".".join(TIED): (TIED, dict(self._tied)), ".".join(BUFFERS): (BUFFERS, [*self._buffers])}
        return model

    def tree(self, path: str) -> Any:
        where = PathIn(self.name, path)
        try:
            return read_torch_file(self.root, path, where, allowed=WITH_DTENSORS).tree
        except UnsafePickle as error:
            if any(module.startswith("torch.distributed._shard") for module, _ in error.names):
                raise UnsupportedCheckpoint.at(where, OLD_FSDP, USE_FSDP2) from error
            raise

    def read(self, paths: Sequence[str], walk: Walk) -> DcpCheckpoint | None:
        """Return the values in the files of all ranks by key path; None if a file can't be used."""
        if lost_files := [path for path in paths if not (self.root / path).exists()]:
            more = f", and {len(lost_files) - 1:,} of other ranks" if len(lost_files) > 1 else ""
            where = PathIn(self.name, lost_files[0])
            self.problems.add(SourceError.at(where, f"the file is missing{more}", COPY_BACK, Code.FILE_MISSING))
            return None
        of_ranks: list[dict[KeyPath, Any]] = []
        for path in paths:
            walked = attempt(lambda: dict(walk(self.tree(path), PathIn(self.name, path))), self.problems)  # noqa: B023
            if walked is not None:
                of_ranks.append(walked)
        if len(of_ranks) < len(paths):
            return None
        tensors: dict[str, Stored] = {}
        objects: dict[str, tuple[KeyPath, Any]] = {}
        first: dict[tuple[int, int], str] = {}
        sound = len(self.problems.errors)
        for key_path, value in of_ranks[0].items():
            key, nodes = ".".join(map(str, key_path)), [one.get(key_path) for one in of_ranks]
            where = PathIn(self.name, paths[0])
            if as_tensor(value) is None and as_piece(value, key, where) is None:
                objects[key] = (key_path, value)
                continue
            stored = attempt(lambda: self._joined(key, key_path, nodes, paths), self.problems)  # noqa: B023
            if stored is not None:
                tensors[key] = stored
            piece = as_piece(value, key, where)
            if piece is not None:
                same = first.setdefault((id(piece.view.storage), piece.view.offset), str(key_path[-1]))
                if same != key_path[-1]:
                    self._tied[str(key_path[-1])] = same
        if lost := {path for one in of_ranks[1:] for path in one.keys() ^ of_ranks[0].keys()}:
            what = f"some ranks lack {some(sorted('.'.join(map(str, path)) for path in lost))}"
            self.problems.add(SourceError.at(self.name, what, COPY_CHECKPOINT, Code.RANKS_DIFFER))
        if len(self.problems.errors) > sound:
            return None
        return DcpCheckpoint(tensors, objects, ranks=len(paths), files=tuple(paths), at=paths[0])

    def _joined(self, key: str, path: KeyPath, nodes: Sequence[Any], paths: Sequence[str]) -> Stored:
        wheres = [PathIn(self.name, one) for one in paths]
        pieces = [as_piece(node, key, where) for node, where in zip(nodes, wheres, strict=True)]
        cut = [piece for piece in pieces if piece is not None]
        whole = [read_tensor(node, key, where) for node, where in zip(nodes, wheres, strict=True) if not cut]
        if len(cut) not in (0, len(pieces)):
            raise SourceError.at(self.name, f"{key} is whole on some ranks", COPY_CHECKPOINT, Code.RANKS_DIFFER)
        if whole:
            self._check_whole(key, path, whole, wheres)
            return Stored(path, whole[0].entry)
        mesh = tuple(1 + max(at) for at in zip(*(piece.at for piece in cut), strict=True)) if _same_form(cut) else ()
        if not mesh or math.prod(mesh) != len(cut) or len({piece.at for piece in cut}) != len(cut):
            what = f"the ranks' pieces of {key} are not those of one mesh, with one place for each rank"
            raise SourceError.at(self.name, what, COPY_CHECKPOINT, Code.RANKS_DIFFER)
        self.mesh = self.mesh or _rank_mesh(cut, mesh)
        for rank, (piece, where) in enumerate(zip(cut, wheres, strict=True)):
            if piece.at != _place(rank, mesh):
                what = f"{key} is the piece of another rank, at {list(piece.at)} in the mesh {list(mesh)}"
                raise SourceError.at(where, what, COPY_CHECKPOINT, Code.RANKS_DIFFER)
        found, seen = [], dict[tuple[int, ...], tuple[str, Extent]]()
        for piece, where in zip(cut, wheres, strict=True):
            offsets, sizes = piece.box(mesh)
            local = read_tensor(piece.local, key, where)
            if local.shape != sizes:
                what = f"{key} is {list(local.shape)} here, and the mesh gives this rank {list(sizes)}"
                raise SourceError.at(where, what, COPY_CHECKPOINT, Code.STATE_SIZE)
            other = seen.setdefault(offsets, (where.path, local.extent))
            if other[0] != where.path and self._differ(other[1], local.extent):
                what = f"{key} is not the same as in {other[0]}, whose copy of the same rows it is"
                raise SourceError.at(where, what, COPY_CHECKPOINT, Code.RANKS_DIFFER)
            found.append((Chunk(offsets, sizes, Blob(where.path, 0, 0)), local.entry))
        stored = replace(join_pieces(key, found, self.name), path=path)
        if stored.held.shape != cut[0].shape:
            what = f"the ranks have {list(stored.held.shape)} of {key}, which is {list(cut[0].shape)}"
            raise SourceError.at(self.name, what, COPY_CHECKPOINT, Code.STATE_SIZE)
        return stored

    def _check_whole(self, key: str, path: KeyPath, found: Sequence[Tensor], wheres: Sequence[PathIn]) -> None:
        """Raise SourceError for values that ranks share and have in several forms; a step also in several values."""
        if path[0] != _MODEL:
            refuse_flat(key, path[-1], found[0].shape, wheres[0])
        if len({(one.dtype, one.shape) for one in found}) > 1:
            raise SourceError.at(
                self.name, f"the ranks have {key} in several forms", COPY_CHECKPOINT, Code.RANKS_DIFFER
            )
        if path[0] == _MODEL:
            self._buffers.append(str(path[-1]))
        if path[-1] == "step" and not self._has_step:  # one tells whether the files are of one save
            self._has_step = True
            steps = [read_step(self.root, one, 0, where) for one, where in zip(found, wheres, strict=True)]
            if other := next((at for at, step in enumerate(steps) if step != steps[0]), 0):
                what = f"{key} is {steps[other]:g}, and {steps[0]:g} in {wheres[0].path}"
                raise SourceError.at(wheres[other], what, COPY_CHECKPOINT, Code.STEPS_DIFFER)

    def _differ(self, one: Extent, other: Extent) -> bool:
        """Whether two copies have different checksums; those of the zip, so no tensor is read."""
        crcs = [self._crcs(extent.path).get(extent.start) for extent in (one, other)]
        return None not in crcs and crcs[0] != crcs[1]

    def _crcs(self, path: str) -> Mapping[int, int | None]:
        if path not in self._checksums:
            records = list_records(self.root, path, PathIn(self.name, path))
            self._checksums[path] = {one.start: one.crc for one in records}
        return self._checksums[path]


def refuse_flat(key: str, kind: object, shape: tuple[int, ...], where: str) -> None:
    """Raise UnsupportedCheckpoint for a state of an optimizer that is not cut as FSDP2 does."""
    if kind != "step" and shape:
        raise UnsupportedCheckpoint.at(where, f"{key} is not a DTensor: {OLD_FSDP}", USE_FSDP2)


def _place(rank: int, mesh: Sequence[int]) -> tuple[int, ...]:
    """Return a rank's place in a mesh, whose last dimension counts fastest."""
    place = []
    for size in reversed(mesh):
        rank, at = divmod(rank, size)
        place.append(at)
    return tuple(reversed(place))


def _rank_mesh(pieces: Sequence[LocalTensor], shape: tuple[int, ...]) -> RankMesh:
    def texts(value: Any) -> tuple[str, ...]:
        return tuple(map(str, value)) if isinstance(value, (list, tuple)) else ()

    first = pieces[0]
    names, device = texts(first.mesh.get("_mesh_dim_names")), str(first.mesh.get("_device_type"))
    groups = tuple(texts(piece.mesh.get("_dim_group_names")) for piece in pieces)
    order = first.mesh.get(ORDER_FIELD)
    return RankMesh(
        device=device,
        names=names,
        shape=shape,
        cuts=first.cuts,
        groups=groups,
        fields=frozenset(map(str, first.mesh)) - {ORDER_FIELD},
        preserves_order=order if isinstance(order, bool) else None,
    )


def _same_form(pieces: Sequence[LocalTensor]) -> bool:
    return len({(one.view.storage.dtype, one.shape, one.cuts, len(one.at)) for one in pieces}) == 1


def walk_optimizer(tree: Any, where: str) -> Iterator[tuple[KeyPath, Any]]:
    for param, kinds in get(tree, "state", dict, where).items():
        if not isinstance(param, str):  # optimizer.pt of the plain Trainer under another name
            what = "its states have numbers instead of the names of params"
            raise SourceError.at(where, what, COPY_FILE, Code.FIELD_TYPE)
        for kind, value in as_dict(kinds, f"the state of {param}", where).items():
            yield ("optimizer", "state", param, check_name(kind, "a state", where)), value
    for number, group in enumerate(get(tree, "param_groups", list, where)):
        for option, value in as_dict(group, "a param group", where).items():
            yield ("optimizer", "param_groups", number, check_name(option, "an option", where)), value
