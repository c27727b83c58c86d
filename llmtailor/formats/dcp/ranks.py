"""Files of each rank with its pieces of all tensors, as DTensors: read into the form of DCP folders.

Seen with torch 2.13 and accelerate 1.15; verl's files were made by the calls of its FSDPCheckpointManager::

    model_world_size_W_rank_R.pt          verl: {param: DTensor}, buffers are whole
    optim_world_size_W_rank_R.pt          {state: {id: {step, exp_avg, ..}}, param_groups: [{.., params: [ids]}]}
    extra_state_world_size_W_rank_R.pt    {lr_scheduler, rng}
    fsdp_config.json, huggingface/        FSDP_version and world_size; config.json and the tokenizer

    pytorch_model_fsdp_0_rankR.bin        save_fsdp_model of accelerate with use_dcp=False: {param: DTensor}
    optimizer_0_rankR.bin                 save_fsdp_optimizer: names instead of ids

Each rank loads its own file, so none of them resumes on another number of ranks. verl's ids count the params of the
model in its order, without buffers and second names of tied params: these share their storage with the first. Shapes
must confirm that.

FSDP1 keeps the states of a whole module in one vector, cut anywhere, and no file says which params are in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.index import FOLDERS, RANKS, RankMesh
from llmtailor.checkpoint.optimizer import NAME_KEYS
from llmtailor.checkpoint.placement import Extent
from llmtailor.codes import Code
from llmtailor.containers.dcp import Blob, Chunk, KeyPath
from llmtailor.containers.dtensor import WITH_DTENSORS, LocalTensor, as_piece
from llmtailor.containers.json import Tensor, as_dict, check_name, get, is_count, read_json, read_step, read_tensor
from llmtailor.containers.torch_file import list_records, read_torch_file
from llmtailor.containers.unpickle import as_ints, as_tensor
from llmtailor.errors import (
    COPY_BACK,
    COPY_CHECKPOINT,
    PathIn,
    Problems,
    SourceError,
    UnsafePickle,
    UnsupportedCheckpoint,
    attempt,
    counted,
    some,
)
from llmtailor.findings import WARNING, Finding
from llmtailor.formats.dcp.folder import DcpCheckpoint, Stored, join_pieces, walk_optimizer
from llmtailor.formats.dcp.keys import BUFFERS, GROUPS, STATE, TIED
from llmtailor.formats.param_names import ModelFacts, compare_shapes, derived_names, has_names, listed_names
from llmtailor.formats.torch_optimizer import SavedGroup, SavedOptimizer
from llmtailor.frameworks.files import FSDP_RANK, VERL_CONFIG, VERL_RANK
from llmtailor.frameworks.write import LR_SCHEDULER

MODEL_OF_RANK, OPTIMIZER_OF_RANK = "pytorch_model_fsdp_0_rank{}.bin", "optimizer_0_rank{}.bin"
MODEL, OPTIMIZER, EXTRA = "model", "optim", "extra_state"
"""What verl's files hold, in their names"""
OLD_FSDP = "FSDP1 keeps the optimizer's states of whole modules in one vector, and no file says which params are in it"
USE_FSDP2 = (
    "resume with the training itself, or train with FSDP2 (strategy=fsdp2); for its weights alone, use verl's "
    "model_merger"
)


def verl_file(kind: str, ranks: int, rank: int) -> str:
    return f"{kind}_world_size_{ranks}_rank_{rank}.pt"


def is_of_verl(root: Path) -> bool:
    """Return whether a folder has files of verl's ranks."""
    return any(VERL_RANK.fullmatch(path.name) for path in root.iterdir())


def models_of_verl(root: Path) -> list[str]:
    """Return the folders with files of verl's ranks in the folder of a step: of the actor, the critic."""
    return [name for name in ("actor", "critic") if (root / name).is_dir() and is_of_verl(root / name)]


def is_of_ranks(root: Path) -> bool:
    """Return whether a folder has files that accelerate saves with ``use_dcp=False``."""
    return any(FSDP_RANK.fullmatch(path.name) for path in root.iterdir())


@dataclass(frozen=True, slots=True)
class Folders:
    """The DCP folders of a checkpoint, or files in their form: one for everything if ``model`` is None."""

    optimizer: DcpCheckpoint
    model: DcpCheckpoint | None = None
    form: str = FOLDERS
    mesh: RankMesh | None = None
    """Of the form `RANKS`"""
    owned: tuple[tuple[str, ...], ...] = ()
    """See `DcpKeyLayout.owned`"""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """verl: file -> its content beside the states, of each rank"""

    @property
    def all(self) -> tuple[DcpCheckpoint, ...]:
        return (self.model, self.optimizer) if self.model else (self.optimizer,)

    @property
    def unreadable(self) -> frozenset[str]:
        return frozenset().union(*(folder.unreadable for folder in self.all))


def read_accelerate_ranks(root: Path, name: str, problems: Problems) -> Folders | None:
    """Read accelerate's files; None if they can't be used. Damage is added to ``problems``."""
    numbers = [int(match[2]) for path in root.iterdir() if (match := FSDP_RANK.fullmatch(path.name))]
    ranks = max(numbers) + 1
    reader = _RankFileReader(root, name, problems)
    model = reader.read_model([MODEL_OF_RANK.format(rank) for rank in range(ranks)])
    optimizer = reader.read([OPTIMIZER_OF_RANK.format(rank) for rank in range(ranks)], walk_optimizer)
    if model is None or optimizer is None:
        return None
    optimizer = replace(optimizer, objects={**optimizer.objects, **reader.roles})
    return Folders(optimizer, model, RANKS, reader.mesh)


def read_verl(root: Path, name: str, problems: Problems) -> Folders | None:
    """Read verl's files; None if they can't be used. Damage is added to ``problems``.

    Raises UnsupportedCheckpoint for those of FSDP1, and for param groups whose params are not known.
    """
    ranks = _verl_ranks(root, name)
    files = {kind: [verl_file(kind, ranks, rank) for rank in range(ranks)] for kind in (MODEL, OPTIMIZER, EXTRA)}
    reader = _RankFileReader(root, name, problems)
    model = reader.read_model(files[MODEL])
    if not any((root / path).exists() for path in files[OPTIMIZER]):
        what = "it holds no optimizer states, only weights"
        fix = "use a full checkpoint: verl's checkpoint.save_contents must name model, optimizer and extra"
        problems.add(SourceError.at(name, what, fix, Code.NO_CHECKPOINT))
        return None
    if model is None:
        return None
    shapes = {str(stored.path[-1]): stored.held.shape for stored in model.tensors.values()}
    names = _Names({name: shape for name, shape in shapes.items() if name not in reader.others})
    optimizer = reader.read(files[OPTIMIZER], lambda tree, where: walk_optimizer(names.given(tree, where), where))
    if optimizer is None:
        return None
    there = [path for path in files[EXTRA] if (root / path).exists()]
    read = {path: attempt(lambda: reader.tree(path), problems) for path in there}  # noqa: B023
    extra = {path: tree for path, tree in read.items() if isinstance(tree, dict)}
    findings = []
    if lost := len(files[EXTRA]) - len(there):
        what = f"{counted(lost, 'rank')} of it {'have' if lost > 1 else 'has'} no {EXTRA} file: schedule, random states"
        fix = "verl can't load it, unless checkpoint.load_contents leaves extra out; copy the files back"
        findings.append(Finding(name, what, fix, Code.SCHEDULER_MISSING, WARNING))
    objects: dict[str, tuple[KeyPath, Any]] = {**optimizer.objects, **reader.roles}
    schedule = extra.get(files[EXTRA][0], {}).get("lr_scheduler")
    for key, value in (schedule if isinstance(schedule, dict) else {}).items():
        path: KeyPath = (LR_SCHEDULER, check_name(key, "the scheduler's state", PathIn(name, files[EXTRA][0])))
        objects[f"{LR_SCHEDULER}.{key}"] = (path, value)
    optimizer = replace(optimizer, objects=objects, findings=tuple(findings))
    return Folders(optimizer, model, RANKS, reader.mesh, names.groups, extra)


def _verl_ranks(root: Path, name: str) -> int:
    """Return the number of ranks. Raises UnsupportedCheckpoint for FSDP1, and SourceError if several numbers fit."""
    found = {int(match[2]) for path in root.iterdir() if (match := VERL_RANK.fullmatch(path.name))}
    stated = {}
    if (root / VERL_CONFIG).exists():
        stated = read_json(root / VERL_CONFIG, PathIn(name, VERL_CONFIG))
    if stated.get("FSDP_version") == 1:
        raise UnsupportedCheckpoint.at(name, OLD_FSDP, USE_FSDP2)
    ranks = stated.get("world_size")
    if is_count(ranks) and ranks in found:
        return int(ranks)
    if len(found) > 1:
        what = f"it has files of {some(sorted(map(str, found)))} ranks, and {VERL_CONFIG} does not say which count"
        raise SourceError.at(name, what, "move those of the other save away", Code.FILE_UNKNOWN)
    return found.pop()


def _walk_model(tree: Any, where: str) -> Iterator[tuple[KeyPath, Any]]:
    for key, value in as_dict(tree, "the file", where).items():
        yield (MODEL, check_name(key, "a weight", where)), value


Walk = Callable[[Any, str], Iterator[tuple[KeyPath, Any]]]


class _RankFileReader:
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
        return DcpCheckpoint(tensors, objects, ranks=len(paths), files=tuple(paths))

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
        if path[0] != MODEL:
            _refuse_flat(key, path[-1], found[0].shape, wheres[0])
        if len({(one.dtype, one.shape) for one in found}) > 1:
            raise SourceError.at(
                self.name, f"the ranks have {key} in several forms", COPY_CHECKPOINT, Code.RANKS_DIFFER
            )
        if path[0] == MODEL:
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


def _refuse_flat(key: str, kind: object, shape: tuple[int, ...], where: str) -> None:
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
    return RankMesh(device, names, shape, first.cuts, groups, frozenset(map(str, first.mesh)))


def _same_form(pieces: Sequence[LocalTensor]) -> bool:
    return len({(one.view.storage.dtype, one.shape, one.cuts, len(one.at)) for one in pieces}) == 1


class _Names:
    """The names behind the ids of verl's optimizers, in the files of all ranks."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]):
        self.shapes = shapes
        """Of the model's params, in its order"""
        self.groups: tuple[tuple[str, ...], ...] = ()
        """The params of each group, in its order"""
        self._ids: list[tuple[int, ...]] = []

    def given(self, tree: Any, where: str) -> dict[str, Any]:
        """Return an optimizer's state dict with names instead of ids, without the params that it has no states of.

        verl gives its optimizer all params of the model, frozen ones too.

        Raises SourceError if they don't fit the model, and UnsupportedCheckpoint if they are ambiguous.
        """
        groups = [as_dict(group, "a param group", where) for group in get(tree, GROUPS, list, where)]
        state = get(tree, STATE, dict, where)
        ids = [as_ints(group.get("params")) or () for group in groups]
        if not self.groups:
            self._ids, self.groups = ids, self._derived(groups, ids, state, where)
        elif ids != self._ids:
            raise SourceError.at(where, "its param groups have other ids", COPY_CHECKPOINT, Code.RANKS_DIFFER)
        name_of = {
            number: name
            for own, names in zip(ids, self.groups, strict=True)
            for number, name in zip(own, names, strict=True)
        }
        if extra := [f"{number}" for number in state if number not in name_of]:
            what = f"it holds the states of id {some(extra)}, which no param group owns"
            raise SourceError.at(where, what, COPY_CHECKPOINT, Code.FIELD_UNKNOWN)
        states = {name_of[number]: kinds for number, kinds in state.items() if kinds}
        return {STATE: states, GROUPS: [*map(partial(_of_trained, states), groups, self.groups)]}

    def _derived(
        self,
        groups: Sequence[Mapping[str, Any]],
        ids: Sequence[tuple[int, ...]],
        state: Mapping[Any, Any],
        where: str,
    ) -> tuple[tuple[str, ...], ...]:
        listed = [next((group[key] for key in NAME_KEYS if isinstance(group.get(key), list)), None) for group in groups]
        saved = SavedOptimizer(
            tuple(
                SavedGroup(
                    own, None if names is None else tuple(check_name(one, "a param", where) for one in names), group
                )
                for own, names, group in zip(ids, listed, groups, strict=True)
            ),
            {number: _shapes(state.get(number), where) for own in ids for number in own},
            {},
            {},
            True,
        )
        all_ids = [number for own in ids for number in own]
        if has_names(saved):
            found = listed_names(saved, where)
            names = [name for group in found for name in group]
            unknown = [name for name in names if name not in self.shapes]
            if unknown or [*map(len, found)] != [*map(len, ids)]:
                what = f"the param groups list {some(unknown)}, which the model lacks" if unknown else "ids lack names"
                raise SourceError.at(where, what, COPY_CHECKPOINT, Code.FIELD_CONFLICT)
            if problems := compare_shapes(all_ids, [*map(saved.shape, all_ids)], names, self.shapes, where):
                raise SourceError(problems)
            return found
        if len(groups) > 1:
            what = f"it has {len(groups)} param groups without names: nothing says which params are in each"
            raise UnsupportedCheckpoint.at(where, what, "give the optimizer model.named_parameters(), as torch allows")
        return derived_names(saved, ModelFacts(self.shapes, frozenset(), {}, frozenset()), where)


def _of_trained(states: Collection[str], group: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return a param group with the names of its params, and where it lists names, of those with states only."""
    trained = [name for name in names if name in states]
    return {key: trained if key in NAME_KEYS else value for key, value in group.items()} | {"params": trained}


def _shapes(kinds: Any, where: str) -> dict[str, Tensor]:
    """Return a param's states with the shape of the whole tensor, and no place."""
    values = as_dict(kinds or {}, "the state of a param", where)
    for kind, value in values.items():
        if view := as_tensor(value):
            _refuse_flat(f"{kind}", kind, view.shape, where)
    pieces = {str(kind): as_piece(value, str(kind), where) for kind, value in values.items()}
    nowhere = Extent("", 0, 0)
    return {kind: Tensor(one.view.storage.dtype, one.shape, nowhere) for kind, one in pieces.items() if one is not None}
