"""One folder of torch.distributed.checkpoint: its tensors with their places, and its other objects decoded.

A tensor is cut into boxes. FSDP cuts along dimension 0 only, so each rank has a run of rows; tensor parallelism also
cuts along others. The boxes of a mesh of devices form a grid, the only form that is read here. Ranks beyond the last
row have an empty box, or none. Values that all ranks share (``step``, options) are stored once.

`read_shards` reads the other form of such a folder, that of ``HuggingFaceStorageWriter``: safetensors files, one per
rank, whose headers say where the boxes begin. Checked against torch 2.13.

With FULL_STATE_DICT, the Trainer's default, accelerate (1.15) saves two ``torch.save`` files instead, which are read
into the same form::

    pytorch_model_fsdp.bin    {param: tensor}                    rank 0 gathers whole tensors
    optimizer.bin             {state: {param: {step, exp_avg, ..}}, param_groups: [{.., params: [names]}]}
"""

from __future__ import annotations

import json
import math
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from llmtailor.checkpoint.index import TensorEntry
from llmtailor.checkpoint.placement import Box, Boxes, Bundled, Contiguous, Extent, Placement, find_grid
from llmtailor.codes import Code
from llmtailor.containers.dcp import (
    DATA_FILE,
    METADATA,
    SHARD_FILE,
    Blob,
    Chunk,
    Entry,
    KeyPath,
    checksum_of_save,
    checksum_of_shard,
    read_metadata,
)
from llmtailor.containers.json import Tensor, as_dict, check_name, get, is_count, read_tensor
from llmtailor.containers.safetensors import read_header
from llmtailor.containers.torch_file import AlikeBlobs, Window, decode_torch_file, read_torch_file
from llmtailor.containers.unpickle import as_tensor
from llmtailor.errors import COPY_CHECKPOINT, COPY_FILE, PathIn, Problems, SourceError, attempt, counted, some
from llmtailor.findings import NOTE, WARNING, Finding
from llmtailor.formats.other_optimizers import naming_others
from llmtailor.model.roles import ITEMSIZE
from llmtailor.storage.local import SourceFile, open_source

MODEL_FILE = "pytorch_model_fsdp.bin"
"""All weights, with FULL_STATE_DICT"""
SHARDING = "DCP_SHARDING_INFO"
_STALE = "copy the whole folder again; .metadata and the data files come from different saves"
_KEEP_ONE = "move the files of the other save away"


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a folder."""

    path: KeyPath
    held: TensorEntry
    boxes: tuple[tuple[Chunk, Extent], ...] = ()
    """Its chunks, and where the elements of each are"""


@dataclass(frozen=True, slots=True)
class Folder:
    tensors: Mapping[str, Stored] = field(default_factory=dict)
    objects: Mapping[str, tuple[KeyPath, Any]] = field(default_factory=dict)
    """Key -> path, and the decoded object, or its extent"""
    ranks: int = 1
    files: tuple[str, ...] = ()
    """Its data files and metadata, relative to the checkpoint, whether they exist or not"""
    unreadable: frozenset[str] = frozenset()
    has_all_objects: bool = True
    """False if some are in files that can't be read"""
    findings: tuple[Finding, ...] = ()


def read_folder(
    root: Path,
    folder: str,
    name: str,
    problems: Problems,
    linked: Mapping[str, int | None] = MappingProxyType({}),
    *,
    decodes: bool = True,
) -> Folder | None:
    """Read ``root/folder`` (``""`` is the root itself); None if its ``.metadata`` can't be used.

    Damage is added to ``problems``. Of the tensors only the zip headers are read. Files in ``linked``
    may be links to those of another save, so parts of them may be unused, and they must still have the
    `checksum_of_save` that is given. Without ``decodes``, other objects are the `Extent` of their pickle.
    """
    prefix = f"{folder}/" if folder else ""
    where = PathIn(name, prefix + METADATA)
    entries = attempt(lambda: read_metadata(root, prefix + METADATA, where), problems)
    if entries is None:
        return None
    tensor_entries = {key: entry for key, entry in entries.items() if entry.is_tensor}
    grids = attempt(lambda: {key: _grid(key, entry, where) for key, entry in tensor_entries.items()}, problems)
    if grids is None:
        return None
    blobs = _Blobs(root, prefix, name, problems, linked, decodes)
    blobs.read(entries)
    tensors = {key: _stored(entry, grids[key], blobs, prefix) for key, entry in tensor_entries.items()}
    objects = {
        key: (entry.path, blobs.objects[entry.chunks[0].blob])
        for key, entry in entries.items()
        if not entry.is_tensor and entry.chunks[0].blob in blobs.objects
    }
    there = [path.name for path in (root / prefix).iterdir() if DATA_FILE.fullmatch(path.name)]
    own = {*blobs.used, *(path for path in there if not _size(root / prefix / path))}  # a rank may have nothing to save
    return Folder(
        tensors,
        objects,
        max((rank_of_file(path) + 1 for path in own), default=1),
        (prefix + METADATA, *(blobs.at(path) for path in sorted(own))),
        frozenset(blobs.at(path) for path in blobs.bad),
        len(tensors) + len(objects) == len(entries),
        (*_strays(root, prefix, name, blobs.used), *_elsewhere(blobs, name), *blobs.findings),
    )


def rank_of_file(path: str) -> int:
    match = DATA_FILE.fullmatch(posixpath.basename(path))
    return int(match[1]) if match else 0


def _strays(root: Path, prefix: str, name: str, used: Mapping[str, object]) -> Iterator[Finding]:
    """Yield findings on the remains of another save in the same folder."""
    there = sorted(path.name for path in (root / prefix).iterdir())
    strays = [path for path in there if DATA_FILE.fullmatch(path) and path not in used and _size(root / prefix / path)]
    if strays:
        what = f"{METADATA} does not mention {some(strays)}: another save wrote to the same folder"
        yield Finding(PathIn(name, prefix + strays[0]), what, _KEEP_ONE, Code.FILE_UNKNOWN, WARNING)
    if f"{METADATA}.tmp" in there:
        what = "a later save to the same folder was not finished, and may have overwritten its data files"
        fix = "use another checkpoint, unless its values verify (--deep)"
        yield Finding(PathIn(name, f"{prefix}{METADATA}.tmp"), what, fix, Code.STEPS_DIFFER, WARNING)


def _elsewhere(blobs: _Blobs, name: str) -> Iterator[Finding]:
    """Yield a note on data files that are in other checkpoints."""
    paths = [blobs.at(path) for path in blobs.used if not DATA_FILE.fullmatch(path)]
    if paths:
        folders = dict.fromkeys(posixpath.dirname(path) for path in paths)
        what = f"{counted(len(paths), 'data file')} of it are in {some(folders)}"
        yield Finding(name, what, "keep these folders, unchanged, for as long as you need it", Code.LINKS_OUTSIDE, NOTE)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


class _Blobs:
    """Decodes the blobs of a folder, file by file in the order of their bytes."""

    def __init__(
        self, root: Path, prefix: str, name: str, problems: Problems, linked: Mapping[str, int | None], decodes: bool
    ):
        self.root, self.prefix, self.name, self.problems, self.linked = root, prefix, name, problems, linked
        self.decodes = decodes
        self.objects: dict[Blob, Any] = {}
        self.places: dict[Blob, Extent] = {}
        """Where the elements of a tensor's blob are"""
        self.known = AlikeBlobs[tuple[Tensor, int]]()
        """The tensor in a blob, and where that blob begins"""
        self.used: dict[str, list[Blob]] = {}
        self.bad: set[str] = set()
        self.findings: list[Finding] = []

    def at(self, path: str) -> str:
        """Return a data file's path relative to the checkpoint."""
        return posixpath.normpath(self.prefix + path)

    def read(self, entries: Mapping[str, Entry]) -> None:
        owner: dict[Blob, tuple[str, Entry, Chunk]] = {}
        for key, entry in entries.items():
            for chunk in entry.chunks:
                self.used.setdefault(chunk.blob.path, []).append(chunk.blob)
                owner[chunk.blob] = (key, entry, chunk)
        for path, blobs in self.used.items():
            blobs.sort(key=lambda blob: (blob.start, blob.stop))
            where = PathIn(self.name, self.at(path))
            try:
                with open_source(self.root / self.at(path), where) as file:
                    self._check_places(blobs, file.num_bytes, where)
                    self._check_save(blobs, file, where)
                    for blob in blobs:
                        key, entry, chunk = owner[blob]
                        window = Window(file, blob.start, blob.stop)
                        if entry.is_tensor:
                            self.places[blob] = self._place(window, file, key, entry, chunk, where)
                        elif not self.decodes:
                            self.objects[blob] = Extent(self.at(path), blob.start, blob.stop)
                        else:
                            self.objects[blob] = decode_torch_file(window, self.at(path), where).tree
            except SourceError as error:
                self.problems.add(error)
                self.bad.add(path)

    def _place(self, window: Window, file: SourceFile, key: str, entry: Entry, chunk: Chunk, where: str) -> Extent:
        """Return where a chunk's elements are. Raises SourceError if the blob holds another tensor."""
        blob = chunk.blob
        found = self.known.find(window, file)
        if found is None:
            tree = decode_torch_file(window, self.at(blob.path), where).tree
            found = (read_tensor(tree, key, where), blob.start)
            self.known.add(window, found)
        tensor, first = found
        if (tensor.dtype, tensor.shape) != (entry.dtype, chunk.sizes):
            stated = f"{METADATA} says {entry.dtype} {list(chunk.sizes)}"
            what = f"{key} is {tensor.dtype} {list(tensor.shape)}, but {stated}"
            raise SourceError.at(where, what, _STALE, Code.FIELD_CONFLICT)
        shift = blob.start - first
        return Extent(self.at(blob.path), tensor.extent.start + shift, tensor.extent.stop + shift)

    def _check_save(self, blobs: Sequence[Blob], file: SourceFile, where: PathIn) -> None:
        if (wanted := self.linked.get(where.path)) is not None:
            _check_save(wanted, checksum_of_save(file, ((blob.start, blob.stop) for blob in blobs)), where)

    def _check_places(self, blobs: Sequence[Blob], num_bytes: int, where: PathIn) -> None:
        at = gaps = 0
        for blob in blobs:
            if blob.start < at:
                what = f"{METADATA} gives the same bytes to two tensors"
                raise SourceError.at(where, what, _STALE, Code.FILE_DAMAGED)
            gaps += blob.start - at
            at = blob.stop
        if at > num_bytes:
            what = f"the file has {num_bytes:,} bytes, but {METADATA} refers to byte {at:,}"
            raise SourceError.at(where, what, _STALE, Code.FILE_DAMAGED)
        if gaps + num_bytes - at and where.path not in self.linked and not where.path.startswith("../"):
            what = f"{METADATA} does not mention {gaps + num_bytes - at:,} of its {num_bytes:,} bytes"
            self.findings.append(Finding(where, what, f"silent: {_STALE}", Code.STEPS_DIFFER, WARNING))


def _check_save(wanted: int, found: int, where: str) -> None:
    if wanted != found:
        what = "another save has overwritten it: it is a hard link, and its other names were saved to"
        raise SourceError.at(where, what, "use another checkpoint", Code.STEPS_DIFFER)


_Grid = tuple[tuple[tuple[int, ...], ...], tuple[Chunk, ...]]
"""The cuts along each dimension, and the chunks in the order of the cells, without empty ones"""


def _grid(key: str, entry: Entry, where: str) -> _Grid:
    """Return a tensor's boxes as a grid. Raises SourceError unless they tile it."""
    try:
        cuts, order = find_grid(entry.shape, [Box(chunk.offsets, chunk.sizes) for chunk in entry.chunks])
    except ValueError as error:
        what = f"the chunks of {key} are no grid: {error}"
        raise SourceError.at(where, what, COPY_CHECKPOINT, Code.STATE_SIZE) from error
    return cuts, tuple(entry.chunks[number] for number in order)


def _stored(entry: Entry, grid: _Grid, blobs: _Blobs, prefix: str) -> Stored:
    extents, itemsize, (cuts, chunks) = [], ITEMSIZE[entry.dtype], grid
    for chunk in chunks:
        blob, size = chunk.blob, math.prod(chunk.sizes) * itemsize
        # of a file that can't be read, the place has no meaning, but the element ranges are right
        extents.append(blobs.places.get(blob) or Extent(blobs.at(blob.path), blob.start, blob.start + size))
    held = TensorEntry(entry.dtype, entry.shape, _placement(entry.shape, cuts, extents, itemsize))
    return Stored(entry.path, held, tuple(zip(chunks, extents, strict=True)))


def _placement(
    shape: tuple[int, ...], cuts: tuple[tuple[int, ...], ...], extents: Sequence[Extent], itemsize: int
) -> Placement:
    if len(extents) < 2:
        return Contiguous([*extents, Extent("", 0, 0)][0], itemsize)
    if all(len(cut) == 2 for cut in cuts[1:]):
        row = math.prod(shape[1:])
        starts = tuple(extent.start for extent in extents)
        return Bundled(tuple(one.path for one in extents), starts, tuple(at * row for at in cuts[0]), itemsize)
    return Boxes(shape, cuts, tuple(Contiguous(extent, itemsize) for extent in extents))


def is_of_fsdp(path: str) -> bool:
    """Return whether a file in the root has weights that only an FSDP run saves, and resumes from."""
    return path == MODEL_FILE or _is_of_rank(path)


def _is_of_rank(path: str) -> bool:
    match = SHARD_FILE.fullmatch(path)
    return match is not None and match[1] is not None


def list_shards(root: Path) -> list[str]:
    """Return the names of the safetensors files that the ranks have saved."""
    return sorted(path.name for path in root.iterdir() if _is_of_rank(path.name)) if root.is_dir() else []


def read_shards(
    root: Path, name: str, problems: Problems, linked: Mapping[str, int | None] = MappingProxyType({})
) -> Folder | None:
    """Read the safetensors files of all ranks; None if they can't be used. Damage is added to ``problems``.

    ``linked`` lists the files of a partial save, with the `checksum_of_shard` that each must have.
    """
    paths = sorted(linked) or list_shards(root)
    parts: dict[str, list[tuple[Chunk, TensorEntry]]] = {}
    ranks = [int(match[1] or 1) for path in paths if (match := SHARD_FILE.fullmatch(path))]
    if not linked and (lost := sorted(set(range(1, max(ranks) + 1)) - set(ranks))):
        what = f"the weights of {counted(len(lost), 'rank')} are missing, first of rank {lost[0] - 1}"
        problems.add(SourceError.at(name, what, COPY_CHECKPOINT, Code.FILE_MISSING))
    there = {path.name for path in root.iterdir() if SHARD_FILE.fullmatch(path.name)}
    if linked and (others := sorted(there - linked.keys())):
        what = f"another save wrote {some(others)} to the same folder"
        problems.add(SourceError.at(name, what, _KEEP_ONE, Code.STEPS_DIFFER))
    sound = len(problems.errors)
    for path in paths:
        where = PathIn(name, path)
        in_shard = attempt(lambda: [*_in_shard(root, path, where, linked.get(path))], problems)  # noqa: B023
        for key, offsets, held in in_shard or ():
            parts.setdefault(key, []).append((Chunk(offsets, held.shape, Blob(path, 0, 0)), held))
    if len(problems.errors) > sound:
        return None
    joined = {key: attempt(lambda: join_pieces(key, parts[key], name), problems) for key in parts}  # noqa: B023
    tensors = {key: stored for key, stored in joined.items() if stored is not None}
    return Folder(tensors, ranks=max(ranks), files=tuple(paths))


def _in_shard(
    root: Path, path: str, where: str, checksum: int | None
) -> Iterator[tuple[str, tuple[int, ...], TensorEntry]]:
    file = read_header(root, path, where)
    if checksum is not None:
        with open_source(root / path, where) as source:
            _check_save(checksum, checksum_of_shard(source), where)
    try:
        stated = json.loads(file.metadata.get(SHARDING, "{}"))
        offsets = {key: tuple(about["saved_offsets"]) for key, about in stated.items()}
        right = all(is_count(at) for each in offsets.values() for at in each)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        right = False
    if not right or any(len(offsets.get(key, held.shape)) != len(held.shape) for key, held in file.tensors.items()):
        what = "its header does not say which rows it holds"
        raise SourceError.at(where, what, COPY_FILE, Code.FILE_DAMAGED)
    listed = dict.fromkeys([*(key for key in offsets if key in file.tensors), *file.tensors])  # the order of the model
    for key in listed:
        held = file.tensors[key]
        yield key, offsets.get(key, (0,) * len(held.shape)), held


def join_pieces(key: str, found: Sequence[tuple[Chunk, TensorEntry]], where: str) -> Stored:
    """Return a tensor of several files; a value that all ranks share may be in each."""
    first: dict[tuple[int, ...], tuple[Chunk, TensorEntry]] = {}
    for chunk, held in found:
        first.setdefault(chunk.offsets, (chunk, held))
    dtypes = {held.dtype for _, held in found}
    dimensions = {len(chunk.offsets) for chunk, _ in found}
    if len(dtypes) > 1 or len(dimensions) > 1:
        raise SourceError.at(where, f"the ranks have {key} in several forms", COPY_CHECKPOINT, Code.RANKS_DIFFER)
    ends = (tuple(map(sum, zip(chunk.offsets, chunk.sizes, strict=True))) for chunk, _ in found)
    shape = tuple(map(max, zip(*ends, strict=True)))
    dtype = dtypes.pop()
    cuts, chunks = _grid(key, Entry((key,), dtype, shape, tuple(chunk for chunk, _ in first.values())), where)
    entries = (first[chunk.offsets][1] for chunk in chunks)
    extents = [one.extent for held in entries for one in held.place.cover(0, held.numel)]
    held = TensorEntry(dtype, shape, _placement(shape, cuts, extents, ITEMSIZE[dtype]))
    return Stored(_path(key), held, tuple(zip(chunks, extents, strict=True)))


def _path(key: str) -> KeyPath:
    """Return the path of a key in safetensors files, as far as it tells the optimizer from the model."""
    first, _, rest = key.partition(".")
    return (first, rest) if first == "model" or rest.startswith(("state.", "param_groups.")) else (key,)


OPTIMIZER_FILE = "optimizer.bin"


def read_model_file(root: Path, name: str) -> Folder:
    """Read the weights. Raises SourceError if the file is missing or damaged."""
    where = PathIn(name, MODEL_FILE)
    tree = as_dict(read_torch_file(root, MODEL_FILE, where).tree, "the file", where)
    tensors, objects = _split(((("model", key), value) for key, value in tree.items()), where)
    return Folder(tensors, objects, files=(MODEL_FILE,))


def read_optimizer_file(root: Path, name: str) -> Folder:
    """Read the optimizer's states and param groups. Raises SourceError if the file is missing or damaged."""
    where = PathIn(name, OPTIMIZER_FILE)
    with naming_others(where):
        tree = read_torch_file(root, OPTIMIZER_FILE, where).tree
    tensors, objects = _split(walk_optimizer(tree, where), where)
    return Folder(tensors, objects, files=(OPTIMIZER_FILE,))


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


def _split(
    values: Iterator[tuple[KeyPath, Any]], where: str
) -> tuple[dict[str, Stored], dict[str, tuple[KeyPath, Any]]]:
    tensors: dict[str, Stored] = {}
    objects: dict[str, tuple[KeyPath, Any]] = {}
    for path, value in values:
        key = ".".join(str(check_name(word, "a key", where) if isinstance(word, str) else word) for word in path)
        if as_tensor(value) is None:
            objects[key] = (path, value)
            continue
        tensors[key] = Stored(path, read_tensor(value, key, where).entry)
    return tensors, objects
