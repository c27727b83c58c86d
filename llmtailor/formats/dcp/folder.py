"""One folder of torch.distributed.checkpoint: its tensors with their places, and its other objects decoded.

A tensor is cut into boxes. FSDP cuts along dimension 0 only, so each rank has a run of rows; tensor parallelism also
cuts along others. The boxes of a mesh of devices form a grid, the only form that is read here. Ranks beyond the last
row have an empty box, or none. Values that all ranks share (``step``, options) are stored once.

`read_shards` reads the other form of such a folder, that of ``HuggingFaceStorageWriter``: safetensors files, one per
rank, whose headers say where the boxes begin. Checked against torch 2.13.
"""

from __future__ import annotations

import itertools
import json
import math
import posixpath
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import compress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from llmtailor.checkpoint.index import TensorEntry
from llmtailor.checkpoint.placement import Boxes, Bundled, Cells, Contiguous, Extent, Placement, find_grid
from llmtailor.codes import Code
from llmtailor.containers.dcp import (
    DATA_FILE,
    METADATA,
    SHARD_FILE,
    Blob,
    Chunk,
    Chunks,
    Entry,
    KeyPath,
    checksum_of_save,
    checksum_of_shard,
    number_rows,
    read_metadata,
)
from llmtailor.containers.json import Tensor, is_count, read_tensor
from llmtailor.containers.safetensors import read_header
from llmtailor.containers.torch_file import AlikeBlobs, Window, check_torch_file, decode_torch_file
from llmtailor.errors import COPY_CHECKPOINT, COPY_FILE, PathIn, Problems, SourceError, attempt, counted, some
from llmtailor.findings import NOTE, WARNING, Finding
from llmtailor.model.dtypes import ITEMSIZE
from llmtailor.storage.local import SourceFile, open_source

MODEL_FOLDER, OPTIMIZER_FOLDER = "pytorch_model_fsdp_0", "optimizer_0"
"""Of an FSDP checkpoint"""
SHARDING = "DCP_SHARDING_INFO"
_STALE = "copy the whole folder again; .metadata and the data files come from different saves"
_KEEP_ONE = "move the files of the other save away"


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a folder."""

    path: KeyPath
    held: TensorEntry
    boxes: Callable[[], Iterable[tuple[Chunk, Extent]]] = tuple
    """Returns its chunks, and where the elements of each are"""


@dataclass(frozen=True, slots=True)
class DcpCheckpoint:
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
    at: str = ""
    """What messages name as its place in the checkpoint; empty for the checkpoint itself"""


def read_folder(
    root: Path,
    folder: str,
    name: str,
    problems: Problems,
    linked: Mapping[str, int | None] = MappingProxyType({}),
    *,
    decodes: bool = True,
) -> DcpCheckpoint | None:
    """Read ``root/folder`` (``""`` is the root itself); None if its ``.metadata`` can't be used.

    Damage is added to ``problems``. Of the tensors only some zip headers are read, see `check_blobs`. Files in
    ``linked`` may be links to those of another save, so parts of them may be unused, and they must still have the
    `checksum_of_save` that is given. Without ``decodes``, other objects are the `Extent` of their pickle.
    """
    prefix = f"{folder}/" if folder else ""
    where = PathIn(name, prefix + METADATA)
    entries = attempt(lambda: read_metadata(root, prefix + METADATA, where), problems)
    if entries is None:
        return None
    cut = {key: (entry, entry.chunks) for key, entry in entries.items() if isinstance(entry.chunks, Chunks)}
    grids = attempt(
        lambda: {key: _grid(key, entry.shape, *chunks.boxes, where) for key, (entry, chunks) in cut.items()}, problems
    )
    if grids is None:
        return None
    blobs = _BlobDecoder(root, prefix, name, problems, linked, decodes)
    blobs.read(entries)
    tensors = {
        key: _stored(entry, chunks, grids.pop(key), blobs.starts.pop(key), blobs.at)
        for key, (entry, chunks) in cut.items()
    }
    objects = {key: (entry.path, blobs.objects[key]) for key, entry in entries.items() if key in blobs.objects}
    there = [path.name for path in (root / prefix).iterdir() if DATA_FILE.fullmatch(path.name)]
    own = {*blobs.used, *(path for path in there if not _size(root / prefix / path))}  # a rank may have nothing to save
    return DcpCheckpoint(
        tensors,
        objects,
        max((rank_of_file(path) + 1 for path in own), default=1),
        (prefix + METADATA, *(blobs.at(path) for path in sorted(own))),
        frozenset(blobs.at(path) for path in blobs.bad),
        len(tensors) + len(objects) == len(entries),
        (*_strays(root, prefix, name, blobs.used), *_elsewhere(blobs, name), *blobs.findings),
        folder,
    )


def check_blobs(root: Path, path: str, name: str, problems: Problems) -> set[str]:
    """Read the headers of all blobs that the ``.metadata`` at ``root/path`` lists. Damage is added to ``problems``.

    Returns the files that can't be read.
    """
    entries = attempt(lambda: read_metadata(root, path, PathIn(name, path)), problems)
    blobs = _BlobDecoder(root, path.removesuffix(METADATA), name, problems, {}, decodes=False)
    blobs.read(entries or {}, all_blobs=True)
    return {blobs.at(path) for path in blobs.bad}


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


def _elsewhere(blobs: _BlobDecoder, name: str) -> Iterator[Finding]:
    """Yield a note on data files that are in other checkpoints."""
    paths = [blobs.at(path) for path in blobs.used if not DATA_FILE.fullmatch(path)]
    if paths:
        folders = dict.fromkeys(posixpath.dirname(path) for path in paths)
        what = f"{counted(len(paths), 'data file')} of it are in {some(folders)}"
        yield Finding(name, what, "keep these folders, unchanged, for as long as you need it", Code.LINKS_OUTSIDE, NOTE)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


class _BlobDecoder:
    """Decodes the blobs of a folder, file by file in the order of their bytes."""

    def __init__(
        self, root: Path, prefix: str, name: str, problems: Problems, linked: Mapping[str, int | None], decodes: bool
    ):
        self.root, self.prefix, self.name, self.problems, self.linked = root, prefix, name, problems, linked
        self.decodes = decodes
        self.objects: dict[str, Any] = {}
        self.starts: dict[str, Any] = {}
        """Where the elements of each chunk of a tensor begin; if its file can't be read, where its blob does"""
        self.known = AlikeBlobs[tuple[Tensor, int]]()
        """The tensor in a blob, and where that blob begins"""
        self.used: dict[str, None] = {}
        self.bad: set[str] = set()
        self.findings: list[Finding] = []
        self.at = cache(lambda path: posixpath.normpath(prefix + path))
        """Returns a data file's path relative to the checkpoint"""

    def read(self, entries: Mapping[str, Entry], *, all_blobs: bool = False) -> None:
        """Find the elements of all tensors, and decode the other objects.

        A file's blobs of the same size, for chunks of the same dtype and sizes, are alike: one of them is read, as long
        as `check_blobs` does not ask for all. That is a million reads less with a thousand ranks. Nor are objects that
        are not decoded read but for it.
        """
        import numpy as np  # a merge of other formats does not need it

        keys, (files, forms, count) = [*entries], _by_file(entries)
        found = np.zeros(count, np.int64)
        is_single = np.array([*(math.prod(sizes) == 1 for _, sizes in forms), True])  # the last one: no tensor
        for path, (start, stop, at, number, form) in files:
            self.used[path] = None
            where = PathIn(self.name, self.at(path))
            found[number] = start
            is_read = (form < 0) | all_blobs
            is_read[np.unique(form, return_index=True)[1]] = True
            before = np.zeros(len(forms) + 1, np.int64)  # the last one is that of other objects
            try:
                with open_source(self.root / self.at(path), where) as file:
                    places = [*zip(start.tolist(), stop.tolist(), strict=True)]
                    # llmtailor stores numbers that are alike once
                    is_again = is_single[form[1:]] & (form[1:] == form[:-1])
                    is_again &= (start[1:] == start[:-1]) & (stop[1:] == stop[:-1])
                    apart = compress(places, [True, *~is_again])
                    self._check_places(apart, file.num_bytes, where)
                    self._check_save(places, file, where)
                    for which in np.flatnonzero(is_read).tolist():
                        key, (low, high) = keys[at[which]], places[which]
                        if form[which] >= 0:
                            before[form[which]] = self._place(file, low, high, key, *forms[form[which]]) - low
                        elif not self.decodes:
                            if all_blobs:
                                check_torch_file(Window(file, low, high), where)
                            self.objects[key] = Extent(where.path, low, high)
                        else:
                            self.objects[key] = decode_torch_file(Window(file, low, high), where.path, where).tree
                    found[number] += before[form]
            except SourceError as error:
                self.problems.add(error)
                self.bad.add(path)
        at = 0
        for key, entry in entries.items():
            self.starts[key] = found[at : at + len(entry.chunks)]
            at += len(entry.chunks)

    def _place(self, file: SourceFile, start: int, stop: int, key: str, dtype: str, sizes: tuple[int, ...]) -> int:
        """Return where a chunk's elements begin. Raises SourceError if the blob holds another tensor."""
        found = self.known.find(file, start, stop)
        if found is None:
            window = Window(file, start, stop)
            found = (read_tensor(decode_torch_file(window, "", file.where).tree, key, file.where), start)
            self.known.add(window, found)
        tensor, first = found
        if (tensor.dtype, tensor.shape) != (dtype, sizes):
            stated = f"{METADATA} says {dtype} {list(sizes)}"
            what = f"{key} is {tensor.dtype} {list(tensor.shape)}, but {stated}"
            raise SourceError.at(file.where, what, _STALE, Code.FIELD_CONFLICT)
        return tensor.extent.start + start - first

    def _check_save(self, blobs: Sequence[tuple[int, int]], file: SourceFile, where: PathIn) -> None:
        if (wanted := self.linked.get(where.path)) is not None:
            _check_save(wanted, checksum_of_save(file, blobs), where)

    def _check_places(self, blobs: Iterable[tuple[int, int]], num_bytes: int, where: PathIn) -> None:
        at = gaps = 0
        for start, stop in blobs:
            if start < at:
                what = f"{METADATA} gives the same bytes to two tensors"
                raise SourceError.at(where, what, _STALE, Code.FILE_DAMAGED)
            gaps += start - at
            at = stop
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


def _by_file(entries: Mapping[str, Entry]) -> tuple[Iterator[tuple[str, Any]], list[tuple[str, tuple[int, ...]]], int]:
    """Return the blobs of each file, the forms of those with tensors, dtypes and sizes, and how many blobs there are.

    The blobs are columns in the order of their bytes: start, stop, number of the entry, number of the chunk among all,
    and number of the form, -1 for other objects. Blobs of another size have another form.
    """
    import numpy as np

    paths: dict[str, int] = {}
    forms: dict[tuple[int, str, tuple[int, ...]], int] = {}
    columns: list[Any] = []
    count = 0
    for at, entry in enumerate(entries.values()):
        chunks = Chunks.of(entry.chunks)
        starts, lengths = np.array(chunks.starts), np.array(chunks.lengths)
        form = np.full(len(chunks), -1)
        if entry.is_tensor and len(chunks):
            about = np.column_stack((lengths, chunks.boxes[1]))
            which = number_rows(about)
            distinct = about[np.unique(which, return_index=True)[1]].tolist()
            form = np.array([forms.setdefault((n, entry.dtype, (*own,)), len(forms)) for n, *own in distinct])[which]
        file = np.array([paths.setdefault(path, len(paths)) for path in chunks.files], np.int64)[np.array(chunks.file)]
        number = np.arange(count, count + len(chunks))
        columns.append((file, starts, starts + lengths, np.full(len(chunks), at), number, form))
        count += len(chunks)
    file, *rest = (
        (np.concatenate(each) for each in zip(*columns, strict=True)) if columns else np.zeros((6, 0), np.int64)
    )
    order = np.lexsort((rest[1], rest[0], file))
    ends = np.cumsum(np.bincount(file, minlength=len(paths))).tolist()
    parts = (order[low:high] for low, high in itertools.pairwise([0, *ends]))
    files = ((path, [each[own] for each in rest]) for path, own in zip(paths, parts, strict=True))
    return files, [(dtype, sizes) for _, dtype, sizes in forms], count


_Grid = tuple[tuple[tuple[int, ...], ...], list[int]]
"""The cuts along each dimension, and the numbers of the chunks in the order of the cells, without empty ones"""


def _grid(key: str, shape: tuple[int, ...], offsets: Sequence[Any], sizes: Sequence[Any], where: str) -> _Grid:
    """Return a tensor's boxes as a grid. Raises SourceError unless they tile it."""
    try:
        return find_grid(shape, offsets, sizes)
    except ValueError as error:
        what = f"the chunks of {key} are no grid: {error}"
        raise SourceError.at(where, what, COPY_CHECKPOINT, Code.STATE_SIZE) from error


def _stored(entry: Entry, chunks: Chunks, grid: _Grid, found: Any, at: Callable[[str], str]) -> Stored:
    import numpy as np

    cuts, order = grid
    itemsize = ITEMSIZE[entry.dtype]
    numel = np.minimum(chunks.boxes[1].prod(axis=1), chunks.lengths)[order]  # no more than its blob has bytes
    num_bytes = numel * itemsize
    starts, stops = (array("q", each.tobytes()) for each in (found[order], found[order] + num_bytes))
    paths = tuple(at(chunks.files[chunks.file[number]]) for number in order)
    held = TensorEntry(entry.dtype, entry.shape, _placement(entry.shape, cuts, paths, starts, stops, itemsize))

    def boxes() -> Iterator[tuple[Chunk, Extent]]:
        return ((chunks[number], Extent(*place)) for number, *place in zip(order, paths, starts, stops, strict=True))

    return Stored(entry.path, held, boxes)


def _placement(
    shape: tuple[int, ...],
    cuts: tuple[tuple[int, ...], ...],
    paths: Sequence[str],
    starts: Sequence[int],
    stops: Sequence[int],
    itemsize: int,
) -> Placement:
    if len(paths) < 2:
        return Contiguous(Extent(paths[0], starts[0], stops[0]) if paths else Extent("", 0, 0), itemsize)
    if all(len(cut) == 2 for cut in cuts[1:]):
        row = math.prod(shape[1:])
        return Bundled(paths, starts, array("q", (at * row for at in cuts[0])), itemsize)
    return Boxes(shape, cuts, Cells(paths, starts, stops, itemsize))


def is_shard(path: str) -> bool:
    match = SHARD_FILE.fullmatch(path)
    return match is not None and match[1] is not None


def list_shards(root: Path) -> list[str]:
    """Return the names of the safetensors files that the ranks have saved."""
    return sorted(path.name for path in root.iterdir() if is_shard(path.name)) if root.is_dir() else []


def read_shards(
    root: Path, name: str, problems: Problems, linked: Mapping[str, int | None] = MappingProxyType({})
) -> DcpCheckpoint | None:
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
    return DcpCheckpoint(tensors, ranks=max(ranks), files=tuple(paths))


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
    cuts, order = _grid(key, shape, [*first], [chunk.sizes for chunk, _ in first.values()], where)
    ordered = [[*first.values()][at] for at in order]
    extents = [one.extent for _, held in ordered for one in held.place.cover(0, held.numel)]
    paths, starts, stops = zip(*extents, strict=True) if extents else ((), (), ())
    held = TensorEntry(dtype, shape, _placement(shape, cuts, paths, starts, stops, ITEMSIZE[dtype]))
    return Stored(_path(key), held, lambda: zip((chunk for chunk, _ in ordered), extents, strict=True))


def _path(key: str) -> KeyPath:
    """Return the path of a key in safetensors files, as far as it tells the optimizer from the model."""
    first, _, rest = key.partition(".")
    return (first, rest) if first == "model" or rest.startswith(("state.", "param_groups.")) else (key,)
