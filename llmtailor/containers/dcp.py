"""``.metadata`` of torch.distributed.checkpoint (DCP): which bytes of which file hold what.

A DCP folder has one ``.metadata`` and files ``__RANK_N.distcp``. These are complete ``torch.save`` zips one after the
other, one per chunk of a tensor and one per other object. Nothing in a blob says where it belongs; ``.metadata`` does::

    Metadata
      state_dict_metadata   {key: TensorStorageMetadata(properties, size, chunks=[offsets, sizes])
                                  or BytesStorageMetadata()}
      planner_data          {key: path of the nested dict, e.g. ("optim", "state", "lm_head.weight", "exp_avg")}
      storage_data          {MetadataIndex(key, offsets, index): _StorageInfo(relative_path, offset, length)}
      storage_meta, version

torch reads it with ``pickle.load``, which runs what it says; here it is decoded as data. Classes and fields were
checked against torch 2.13.
"""

from __future__ import annotations

import gc
import itertools
import re
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, overload

from llmtailor.checkpoint.layout import Bytes, FileLayout
from llmtailor.codes import Code
from llmtailor.containers.dcp_pickle import (
    FILESYSTEM,
    MODULE,
    SIZE,
    ChunkBox,
    MetadataMachine,
    Places,
)
from llmtailor.containers.json import check_name, is_count
from llmtailor.containers.pickle_writer import STOP, PickleWriter
from llmtailor.containers.torch_file import ZipRecord, list_blob_records
from llmtailor.containers.unpickle import MAX_OPCODES, Call, Global, as_shape, read_pickle
from llmtailor.errors import COPY_FILE, SourceError, UnsupportedCheckpoint
from llmtailor.model.dtypes import DTYPES, OF_TORCH
from llmtailor.storage.checksums import new_digest
from llmtailor.storage.local import SourceFile, check_size, open_source

METADATA = ".metadata"
DATA_FILE = re.compile(r"__([0-9]{1,7})_([0-9]{1,7})\.distcp")
"""The groups are the rank and a counter"""
ELSEWHERE = re.compile(r"(?:\.\./){1,2}(?:(?!\.{1,2}/)[^/\x00]+/){1,2}" + DATA_FILE.pattern)
"""A data file of another checkpoint: torch writes names alone, but loads from ``../checkpoint-1/__0_0.distcp`` too"""
SHARD_FILE = re.compile(r"(?:shard-([0-9]{5,7})-)?(model-([0-9]{5,7})-of-[0-9]{5,7})\.safetensors")
"""A file of HuggingFaceStorageWriter. The groups are the rank, from 1, and which file of each rank it is."""
MAX_METADATA_BYTES = 1 << 30
"""Enough for four million chunks (1,300 params on 1,000 ranks) of about 250 bytes each"""
_BYTES_PER_OPCODE = 2
"""torch writes 2.4 to 5. A file with fewer is not torch's, and may need far more memory than its size suggests."""

_BLOCK = 1 << 20
_KEPT_BYTES = 4 << 20
_NUM_KEPT = 4
_KEPT: dict[bytes, dict[str, Entry]] = {}
"""The contents of the last small ones that were read, by the digest of their bytes"""
_MANY = 100_000
"""Chunks whose metadata, of about 80 bytes each, are not kept in memory"""
_ENDS, _END_BYTES = 8, 1024
"""Of how many blobs of a file `checksum_of_save` reads the end, and how much of it"""

ALLOWED = {
    MODULE: {
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
        *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    },
    FILESYSTEM: {"_StorageInfo"},
    # Megatron-core adds the plans of all ranks, which are not used here
    "torch.distributed.checkpoint.planner": {"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"},
    "torch": {"Size", *OF_TORCH},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},  # Python 3.13
}
"""Every global that a ``.metadata`` may name: module -> names"""
_SAVE_AGAIN = "save it again with torch.distributed.checkpoint.save and its FileSystemWriter"

KeyPath = tuple[str | int, ...]
"""The keys and positions that lead to a value in nested dicts and lists"""


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes ``start``..``stop`` of a data file: one ``torch.save`` zip."""

    path: str
    """Relative to the folder of ``.metadata``"""
    start: int
    stop: int


def checksum_of_save(file: SourceFile, blobs: Iterable[tuple[int, int]]) -> int:
    """Return a checksum of a data file that is another one once another save has overwritten it, whatever its size.

    It covers the ends of some blobs, given as (start, stop), where torch puts the checksums of their content. So it
    takes a few small reads, and is the same for a copy of the file. Raises SourceError.
    """
    listed = sorted({*blobs})
    crc = 0
    for start, stop in [*listed[:: -(-len(listed) // _ENDS)], listed[-1]]:
        crc = zlib.crc32(file.read(max(start, stop - _END_BYTES), stop), crc)
    return crc


def checksum_of_shard(file: SourceFile) -> int:
    """Do the same for a safetensors file, in which there are no checksums: of its bytes at some places.

    An optimizer's step changes nearly all bytes. Those at the end of a file of fp32 states are Adam's ``step``.
    """
    cuts = [file.num_bytes * part // _ENDS for part in range(_ENDS + 1)]
    return checksum_of_save(file, itertools.pairwise(cuts))


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor: where it begins and how large it is, in elements along each dimension, and its blob."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    blob: Blob


@dataclass(frozen=True, slots=True, eq=False)
class Chunks(Sequence[Chunk]):
    """The chunks of a tensor, in columns."""

    files: Sequence[str]
    dimensions: int
    offsets: array[int]
    """Of all dimensions, chunk by chunk"""
    sizes: array[int]
    file: array[int]
    """The number of each chunk's file in ``files``"""
    starts: array[int]
    lengths: array[int]

    @property
    def boxes(self) -> tuple[Any, Any]:
        """Offsets and sizes as matrices of numpy"""
        import numpy as np

        form = len(self), self.dimensions
        return np.array(self.offsets).reshape(form), np.array(self.sizes).reshape(form)

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> Chunks:
        """Return any chunks in columns."""
        if isinstance(chunks, cls):
            return chunks
        files = {chunk.blob.path: None for chunk in chunks}
        number_of = {path: number for number, path in enumerate(files)}
        return cls(
            (*files,),
            len(chunks[0].offsets) if chunks else 0,
            array("q", chain.from_iterable(chunk.offsets for chunk in chunks)),
            array("q", chain.from_iterable(chunk.sizes for chunk in chunks)),
            array("q", (number_of[chunk.blob.path] for chunk in chunks)),
            array("q", (chunk.blob.start for chunk in chunks)),
            array("q", (chunk.blob.stop - chunk.blob.start for chunk in chunks)),
        )

    def sizes_of(self, at: int) -> tuple[int, ...]:
        return tuple(self.sizes[at * self.dimensions : (at + 1) * self.dimensions])

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, at: int) -> Chunk: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Chunk]: ...
    def __getitem__(self, at: int | slice) -> Chunk | Sequence[Chunk]:
        if isinstance(at, slice):
            return tuple(self[each] for each in range(*at.indices(len(self))))
        at = range(len(self))[at]
        own = slice(at * self.dimensions, (at + 1) * self.dimensions)
        blob = Blob(self.files[self.file[at]], self.starts[at], self.starts[at] + self.lengths[at])
        return Chunk(tuple(self.offsets[own]), self.sizes_of(at), blob)


@dataclass(frozen=True, slots=True, eq=False)
class _Packed:
    """The chunks of a tensor without their places."""

    count: int
    dimensions: int
    offsets: array[int]
    sizes: array[int]


@dataclass(frozen=True, slots=True)
class Entry:
    """One value: a tensor with its chunks, or any other object in one blob."""

    path: KeyPath
    dtype: str = ""
    """A safetensors dtype name; empty for an object that is not a tensor"""
    shape: tuple[int, ...] = ()
    chunks: Sequence[Chunk] = ()

    @property
    def is_tensor(self) -> bool:
        return bool(self.dtype)


def read_metadata(root: Path, path: str, where: str) -> dict[str, Entry]:
    """Return the content of the ``.metadata`` at ``root/path``, by key, in the order of the save.

    Raises SourceError if it is missing, damaged or contradicts itself, UnsafePickle if it names anything else than
    DCP's own classes, and UnsupportedCheckpoint for blobs that were transformed (compressed, encrypted).
    """
    with open_source(root / path, where) as file, _uncollected():
        check_size(file, MAX_METADATA_BYTES)
        if file.num_bytes > _KEPT_BYTES:
            return _decode(file, where)
        digest = new_digest()  # a merge asks for the same ones several times
        digest.update(file.read(0, file.num_bytes))
        if (found := _KEPT.pop(digest.digest(), None)) is None:
            found = _decode(file, where)
        _KEPT[digest.digest()] = found
        while len(_KEPT) > _NUM_KEPT:
            _KEPT.pop(next(iter(_KEPT)), None)
        return dict(found)


def _decode(file: SourceFile, where: str) -> dict[str, Entry]:
    machine = MetadataMachine(file, max(MAX_OPCODES, file.num_bytes // _BYTES_PER_OPCODE), _pack)
    tree = read_pickle(machine, where, allowed=ALLOWED)
    places, stored = machine.places, machine.stored
    del machine  # and its memo
    try:
        content = _fields(tree, "Metadata")
        if places.of_key and content.get("storage_data") is not stored:
            raise ValueError("it has places outside its storage_data")
        objects = _read_storage(content.get("storage_data"), places, where)
        return _read_entries(content["state_dict_metadata"], content.get("planner_data"), objects, places, where)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"it is not the metadata of a distributed checkpoint ({error})"
        raise SourceError.at(where, what, COPY_FILE, Code.FILE_DAMAGED) from error


def mentions(root: Path, path: str, where: str, text: str) -> bool:
    """Return whether a text is somewhere in the ``.metadata`` at ``root/path``. Raises SourceError."""
    wanted, before = text.encode(), b""
    with open_source(root / path, where) as file:
        check_size(file, MAX_METADATA_BYTES)
        for at in range(0, file.num_bytes, _BLOCK):
            block = before + file.read(at, min(at + _BLOCK, file.num_bytes))
            if wanted in block:
                return True
            before = block[-len(wanted) :]
    return False


@contextmanager
def _uncollected() -> Iterator[None]:
    """Turn the garbage collector off while millions of objects are made: it takes a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def list_data_records(root: Path, path: str, where: str) -> dict[str, tuple[ZipRecord, ...]]:
    """Return the records of all zips in the data files of the ``.metadata`` at ``root/path``, by file.

    Raises what `read_metadata` raises, and SourceError for a damaged zip.
    """
    folder = path.removesuffix(METADATA)
    blobs: dict[str, list[tuple[int, int]]] = {}
    for entry in read_metadata(root, path, where).values():
        for chunk in entry.chunks:
            blobs.setdefault(folder + chunk.blob.path, []).append((chunk.blob.start, chunk.blob.stop))
    return {file: list_blob_records(root, file, sorted(places), where) for file, places in blobs.items()}


def _fields(node: Any, name: str) -> Mapping[str, Any]:
    """Return the fields of an object of one of DCP's classes. Raises TypeError for anything else."""
    if not (isinstance(node, Call) and node.func.name == name and node.func.module in (MODULE, FILESYSTEM)):
        raise TypeError(f"an object is not a {name}")
    state = node.state if node.has_state else {}
    if node.args or node.items or node.appends or not isinstance(state, dict):
        raise TypeError(f"a {name} has an unknown form")
    return state


def _is(node: Any, name: str) -> bool:
    return isinstance(node, Call) and node.func == Global(MODULE, name)


def _as_size(node: Any) -> tuple[int, ...]:
    shape = as_shape(node) if isinstance(node, Call) else None
    if shape is None or not all(map(is_count, shape)):
        raise ValueError("a size is not a shape")
    return shape


def _pack(chunks: list[Any]) -> list[Any]:
    """Return offsets and sizes of a tensor's chunks as one `_Packed`; tensors may have the same list."""
    if len(chunks) == 1 and type(chunks[0]) is _Packed:
        return chunks
    found = []
    for one in chunks:
        if type(one) is not ChunkBox:
            fields = _fields(one, "ChunkStorageMetadata")
            one = ChunkBox(_as_size(fields.get("offsets")), _as_size(fields.get("sizes")))
        found.append(one)
    dimensions = {len(size) for one in found for size in one}
    if len(dimensions) > 1:
        raise ValueError("a tensor has chunks of another number of dimensions")
    offsets, sizes = (array("q", chain.from_iterable(one[at] for one in found)) for at in (0, 1))
    return [_Packed(len(found), dimensions.pop() if dimensions else 0, offsets, sizes)]


def _read_storage(node: Any, places: Places, where: str) -> dict[str, Blob]:
    """Return where objects are stored, and add the places of chunks that are not known yet."""
    if not isinstance(node, dict):
        raise TypeError("storage_data is not a dict")
    objects: dict[str, Blob] = {}
    for key, info in node.items():
        index, at = _fields(key, "MetadataIndex"), _fields(info, "_StorageInfo")
        fqn, offset = index["fqn"], index.get("offset")
        path, start, length = at["relative_path"], at["offset"], at["length"]
        if at.get("transform_descriptors"):
            what = "its data were transformed while they were saved (compressed or encrypted)"
            raise UnsupportedCheckpoint.at(where, what, _SAVE_AGAIN, Code.COMPRESSED)
        if not (is_count(start) and is_count(length) and isinstance(path, str) and isinstance(fqn, str)):
            raise ValueError(f"{fqn} has no valid place in {path}")
        if offset is not None:
            places.add(fqn, _as_size(offset), path, start, length)
        elif fqn in objects:
            raise ValueError(f"{fqn} is stored twice")
        else:
            objects[fqn] = Blob(path, start, start + length)
    for key in (*places.of_key, *objects):
        check_name(key, "a key", where)
    for path in dict.fromkeys((*places.files, *(blob.path for blob in objects.values()))):
        if not (DATA_FILE.fullmatch(path) or ELSEWHERE.fullmatch(path)):
            what = f"it refers to {path!r:.80}, which is not a data file in this folder or beside it"
            raise SourceError.at(where, what, "leave this checkpoint out, or save it again", Code.FIELD_RANGE)
    return objects


def _read_entries(node: Any, paths: Any, objects: Mapping[str, Blob], places: Places, where: str) -> dict[str, Entry]:
    if not isinstance(node, dict) or not isinstance(paths or {}, dict):
        raise TypeError("state_dict_metadata is not a dict")
    entries: dict[str, Entry] = {}
    files, lost = tuple(places.files), places.of_key.keys() | objects.keys()
    for key, about in node.items():
        check_name(key, "a key", where)
        path = _path(key, (paths or {}).get(key, (key,)))
        if _is(about, "BytesStorageMetadata"):
            if key not in objects:
                raise ValueError(f"{key} is stored nowhere")
            entries[key] = Entry(path, chunks=(Chunk((), (), objects[key]),))
            lost -= {key} if key not in places.of_key else set()
            continue
        fields = _fields(about, "TensorStorageMetadata")
        shape = _as_size(fields["size"])
        match fields["chunks"]:
            case [_Packed() as packed]:
                pass
            case _:
                raise TypeError("the chunks of a tensor are not a list")
        if packed.count and packed.dimensions != len(shape):
            raise ValueError(f"{key} has chunks of another number of dimensions")
        chunks = _join(key, packed, len(shape), places, files)
        entries[key] = Entry(path, _dtype(fields["properties"]), shape, chunks)
        lost -= {key} if key not in objects else set()
    if lost:
        raise ValueError(f"the places of {len(lost)} keys belong to no tensor")
    return entries


def _join(key: str, packed: _Packed, dimensions: int, places: Places, files: tuple[str, ...]) -> Chunks:
    """Return a tensor's chunks with their places. Raises ValueError unless each has one."""
    rows, width = places.of_key.get(key, array("q")), dimensions + 3
    if rows and len(rows) == packed.count * width and places.dimensions[key] == dimensions:
        columns = [rows[at::width] for at in range(width)]
        listed = [packed.offsets[at::dimensions] for at in range(dimensions)]
        corners = len({*zip(*listed, strict=True)}) if listed else 1
        if listed == columns[:dimensions] and corners == packed.count:  # in the same order, as in most files
            del places.of_key[key]
            return Chunks(files, dimensions, packed.offsets, packed.sizes, *columns[dimensions:])
    return _join_in_any_order(key, packed, dimensions, places, files)


def _join_in_any_order(key: str, packed: _Packed, dimensions: int, places: Places, files: tuple[str, ...]) -> Chunks:
    import numpy as np  # a merge of other formats does not need it

    offsets, sizes = (
        np.array(one, np.int64).reshape(packed.count, dimensions) for one in (packed.offsets, packed.sizes)
    )
    rows = np.array(places.of_key.pop(key, ()), np.int64).reshape(-1, dimensions + 3)
    if len(rows) and places.dimensions[key] != dimensions:
        raise ValueError(f"{key} has places of another number of dimensions")
    number = number_rows(np.concatenate((rows[:, :dimensions], offsets)))
    row_of = np.full(len(number), -1)
    row_of[number[: len(rows)]] = np.arange(len(rows))
    at = row_of[number[len(rows) :]]
    if (row_of >= 0).sum() < len(rows):
        raise ValueError(f"{key} is stored twice at the same offsets")
    if (lost := (at < 0) & (sizes > 0).all(axis=1)).any():
        raise ValueError(f"{key} at {offsets[lost][0].tolist()} is stored nowhere")
    if len(set(at[at >= 0].tolist())) < len(rows):
        raise ValueError(f"places of {key} belong to no chunk")
    kept = np.flatnonzero(at >= 0)
    if len(kept) > len(rows):  # ranks may list the same chunk
        alike = number_rows(np.concatenate((offsets, sizes), axis=1)[kept])
        kept = kept[np.sort(np.unique(alike, return_index=True)[1])]
    offsets, sizes, columns = offsets[kept], sizes[kept], rows[at[kept], dimensions:].T
    return Chunks(
        files, dimensions, *(array("q", one.tobytes()) for one in (offsets, sizes, columns[0], columns[1], columns[2]))
    )


def number_rows(rows: Any) -> Any:
    """Return a number for each row, the same for equal ones."""
    import numpy as np

    if not rows.size:
        return np.zeros(len(rows), np.int64)
    order = np.lexsort(rows.T)
    number = np.zeros(len(rows), np.int64)
    number[order[1:]] = np.cumsum((rows[order[1:]] != rows[order[:-1]]).any(axis=1))
    return number


def _path(key: str, node: Any) -> KeyPath:
    if not isinstance(node, tuple) or not all(type(word) in (str, int) for word in node):
        raise TypeError(f"the path of {key} is not a tuple of keys")
    if ".".join(map(str, node)) != key:
        raise ValueError(f"the path of {key} is another one's")
    return node


def _dtype(node: Any) -> str:
    """Return the dtype of ``TensorProperties``, which pickles as a tuple that begins with it."""
    state = node.state if _is(node, "TensorProperties") else None
    dtype = state[0] if isinstance(state, tuple) and state else state.get("dtype") if isinstance(state, dict) else None
    if not isinstance(dtype, Global) or dtype.module != "torch" or dtype.name not in OF_TORCH:
        raise ValueError("a tensor has no known dtype")
    return OF_TORCH[dtype.name]


def cut_rows(rows: int, ranks: int) -> list[tuple[int, int]]:
    """Return the rows of each rank, as FSDP2 cuts them (``torch.chunk``); the last ones may be empty."""
    size = -(-rows // ranks)
    return [(min(rank * size, rows), min((rank + 1) * size, rows)) for rank in range(ranks)]


def lay_out_metadata(path: str, entries: Mapping[str, Entry]) -> FileLayout:
    """Return the layout of a ``.metadata`` that torch's own loader reads; a large one is made tensor by tensor."""
    why = "the metadata of the distributed checkpoint"
    if sum(len(entry.chunks) for entry in entries.values()) < _MANY:
        return FileLayout(path, (Bytes(b"".join(_pickled(entries)), why),))
    return FileLayout(path, lambda: (Bytes(data, why) for data in _pickled(entries)))


def _pickled(entries: Mapping[str, Entry]) -> Iterator[bytes]:
    writer = PickleWriter()
    properties: dict[str, Call] = {}
    lists: dict[tuple[bytes, bytes, int], list[Any]] = {}
    """Chunks -> what stands for their list in the memo: tensors that are cut alike share one"""
    _begin(writer, "Metadata")
    writer.save("storage_data")  # first, so that references to what all places have are of two bytes
    writer.out += b"}"
    for key, entry in entries.items():
        writer.out += b"("
        if entry.is_tensor:
            _write_places(writer, key, Chunks.of(entry.chunks))
        else:
            [chunk] = entry.chunks
            _write_place(writer, {"fqn": key, "index": None, "offset": None}, chunk.blob)
        writer.out += b"u"
        yield writer.taken()
    writer.save("state_dict_metadata")
    writer.out += b"}("
    for key, entry in entries.items():
        writer.save(key)
        if not entry.is_tensor:
            writer.save(writer.keep(Call(Global(MODULE, "BytesStorageMetadata"), (), new=True)))
            continue
        _begin(writer, "TensorStorageMetadata")
        about = properties.setdefault(entry.dtype, _properties(entry.dtype))
        for word, value in (("properties", about), ("size", writer.keep(_size(entry.shape)))):
            writer.save(word)
            writer.save(value)
        writer.save("chunks")
        chunks = Chunks.of(entry.chunks)
        alike = lists.setdefault((chunks.offsets.tobytes(), chunks.sizes.tobytes(), len(entry.shape)), [])
        is_known = id(alike) in writer.memo
        writer.save(alike)
        if not is_known:
            writer.out += b"("
            _write_chunks(writer, chunks)
            writer.out += b"e"
        writer.out += b"ub"
        yield writer.taken()
    writer.out += b"u"
    writer.save("planner_data")
    writer.save(writer.keep({key: entry.path for key, entry in entries.items()}))
    for word, value in (("storage_meta", None), ("version", "1.0.0")):  # torch fills the first one in
        writer.save(word)
        writer.save(value)
    yield writer.taken() + b"ub" + STOP


def _begin(writer: PickleWriter, name: str) -> None:
    writer.save(Global(MODULE, name))
    writer.out += _NEW


def _write_chunks(writer: PickleWriter, chunks: Chunks) -> None:
    classes, words = (Global(MODULE, "ChunkStorageMetadata"), SIZE), ("offsets", "sizes")
    first = 0
    while first < len(chunks) and not writer.memo.keys() >= {*classes, *words}:
        about = {"offsets": _size(chunks[first].offsets), "sizes": _size(chunks[first].sizes)}
        writer.save(writer.keep(_object("ChunkStorageMetadata", about)))
        first += 1
    if first < len(chunks):
        new, size, *names = map(writer.got, (*classes, *words))
        parts = [new + _NEW]
        for name, matrix in zip(names, chunks.boxes, strict=True):
            parts += [name + size, *_sizes(matrix[first:])]
        writer.out += _records(len(chunks) - first, [*parts, b"ub"])


def _write_places(writer: PickleWriter, key: str, chunks: Chunks) -> None:
    import numpy as np

    classes = Global(MODULE, "MetadataIndex"), Global(FILESYSTEM, "_StorageInfo"), SIZE
    words = ("fqn", key, "index", "offset", "relative_path", "length")
    left, common = [], {*classes, *words}
    is_known = writer.memo.keys() >= common
    for number, file in enumerate(chunks.file):
        if is_known and chunks.files[file] in writer.memo:
            left.append(number)
        else:
            chunk = chunks[number]
            _write_place(writer, {"fqn": key, "index": number, "offset": _size(chunk.offsets)}, chunk.blob)
            is_known = writer.memo.keys() >= common
    if left:
        new, info, size, fqn, own, index, offset, path, length = map(writer.got, (*classes, *words))
        known = np.array([writer.memo.get(path, 0) for path in chunks.files])
        parts = [new + _NEW + fqn + own + index, _ints(np.array(left)), offset + size, *_sizes(chunks.boxes[0][left])]
        code, size_of_get = (b"h", "<u1") if known.max() < 256 else (b"j", "<u4")
        parts += [b"ub" + info + _NEW + path + code, known[np.array(chunks.file)[left]].astype(size_of_get), offset]
        parts += [_ints(np.array(chunks.starts)[left]), length, _ints(np.array(chunks.lengths)[left]), b"ub"]
        writer.out += _records(len(left), parts)


def _write_place(writer: PickleWriter, index: dict[str, Any], blob: Blob) -> None:
    at = {"relative_path": blob.path, "offset": blob.start, "length": blob.stop - blob.start}
    writer.save(writer.keep(_object("MetadataIndex", index)))
    writer.save(writer.keep(_object("_StorageInfo", at)))


_INTEGERS = ((b"K", 1, 1 << 8), (b"M", 2, 1 << 16), (b"J", 4, 1 << 31), (b"\x8a\x08", 8, 1 << 63))
"""The opcodes of integers, how many bytes follow them, and what these do not reach"""
_NEW = b")\x81}("


def _ints(column: Any) -> Any:
    """Return the opcodes of integers, each with as many bytes, as a matrix of bytes."""
    import numpy as np

    most = int(column.max())
    code, size = next((code, size) for code, size, limit in _INTEGERS if most < limit)
    octets = column.astype("<i8").view(np.uint8).reshape(len(column), 8)[:, :size]
    return np.concatenate((np.broadcast_to(np.frombuffer(code, np.uint8), (len(column), len(code))), octets), axis=1)


def _sizes(matrix: Any) -> list[Any]:
    """Return the parts of the arguments of ``torch.Size``, and its call."""
    dimensions = matrix.shape[1]
    before = b"(" if dimensions > 3 else b""
    after = (b")", b"\x85", b"\x86", b"\x87")[dimensions] if dimensions < 4 else b"t"
    return [before, *(_ints(matrix[:, at]) for at in range(dimensions)), after + b"\x85R"]


def _records(count: int, parts: Sequence[Any]) -> bytes:
    """Return records that consist of the same bytes or of each row of a matrix."""
    import numpy as np

    columns = []
    for part in parts:
        if isinstance(part, bytes):
            columns.append(np.broadcast_to(np.frombuffer(part, np.uint8), (count, len(part))))
        else:
            columns.append(part.view(np.uint8).reshape(count, -1))
    return np.concatenate(columns, axis=1).tobytes()


def _properties(dtype: str) -> Call:
    layout = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    contiguous = Call(Global(MODULE, "_MEM_FORMAT_ENCODING"), (0,))
    return _object("TensorProperties", (Global("torch", DTYPES[dtype].torch), layout, False, contiguous, False))


def _object(name: str, state: Any) -> Call:
    module = FILESYSTEM if name == "_StorageInfo" else MODULE
    return Call(Global(module, name), (), new=True, state=state, has_state=True)


def _size(shape: Iterable[int]) -> Call:
    return Call(SIZE, (tuple(shape),))
