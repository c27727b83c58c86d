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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.layout import Bytes, FileLayout
from llmtailor.codes import Code
from llmtailor.containers.json import check_name, is_count
from llmtailor.containers.pickle_writer import write_pickle
from llmtailor.containers.torch_file import Record, list_blob_records
from llmtailor.containers.unpickle import MAX_OPCODES, TORCH_DTYPES, TORCH_NAMES, Call, Global, as_shape, read_pickle
from llmtailor.errors import COPY_FILE, SourceError, UnsupportedCheckpoint
from llmtailor.storage.local import SourceFile, read_source

METADATA = ".metadata"
DATA_FILE = re.compile(r"__([0-9]{1,7})_([0-9]{1,7})\.distcp")
"""The groups are the rank and a counter"""
ELSEWHERE = re.compile(r"(?:\.\./){1,2}(?:(?!\.{1,2}/)[^/\x00]+/){1,2}" + DATA_FILE.pattern)
"""A data file of another checkpoint: torch writes names alone, but loads from ``../checkpoint-1/__0_0.distcp`` too"""
SHARD_FILE = re.compile(r"(?:shard-([0-9]{5,7})-)?(model-([0-9]{5,7})-of-[0-9]{5,7})\.safetensors")
"""A file of HuggingFaceStorageWriter. The groups are the rank, from 1, and which file of each rank it is."""
MAX_METADATA_BYTES = 256 << 20
"""Enough for a million chunks (700 params on 500 ranks) of about 250 bytes each"""
_BYTES_PER_OPCODE = 2
"""torch writes 2.4 to 5. A file with fewer is not torch's, and may need far more memory than its size suggests."""

_ENDS, _END_BYTES = 8, 1024
"""Of how many blobs of a file `checksum_of_save` reads the end, and how much of it"""

_MODULE = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
ALLOWED = {
    _MODULE: {
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
        *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    },
    _FILESYSTEM: {"_StorageInfo"},
    # Megatron-core adds the plans of all ranks, which are not used here
    "torch.distributed.checkpoint.planner": {"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"},
    "torch": {"Size", *TORCH_DTYPES},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},  # Python 3.13
}
"""Every global that a ``.metadata`` may name: module -> names"""
_SAVE_AGAIN = "save it again with torch.distributed.checkpoint.save and its FileSystemWriter"
_SIZE = Global("torch", "Size")

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


@dataclass(frozen=True, slots=True)
class Entry:
    """One value: a tensor with its chunks, or any other object in one blob."""

    path: KeyPath
    dtype: str = ""
    """A safetensors dtype name; empty for an object that is not a tensor"""
    shape: tuple[int, ...] = ()
    chunks: tuple[Chunk, ...] = ()

    @property
    def is_tensor(self) -> bool:
        return bool(self.dtype)


def read_metadata(root: Path, path: str, where: str) -> dict[str, Entry]:
    """Return the content of the ``.metadata`` at ``root/path``, by key, in the order of the save.

    Raises SourceError if it is missing, damaged or contradicts itself, UnsafePickle if it names anything else than
    DCP's own classes, and UnsupportedCheckpoint for blobs that were transformed (compressed, encrypted).
    """
    data = read_source(root / path, where, MAX_METADATA_BYTES)
    most = max(MAX_OPCODES, len(data) // _BYTES_PER_OPCODE)
    with _uncollected():
        tree = read_pickle(data, where, allowed=ALLOWED, object_keys=True, max_opcodes=most)
        try:
            content = _fields(tree, "Metadata")
            blobs = _read_storage(content.get("storage_data"), where)
            return _read_entries(content["state_dict_metadata"], content.get("planner_data"), blobs, where)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"it is not the metadata of a distributed checkpoint ({error})"
            raise SourceError.at(where, what, COPY_FILE, Code.FILE_DAMAGED) from error


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


def list_data_records(root: Path, path: str, where: str) -> dict[str, tuple[Record, ...]]:
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
    if not (isinstance(node, Call) and node.func.name == name and node.func.module in (_MODULE, _FILESYSTEM)):
        raise TypeError(f"an object is not a {name}")
    state = node.state if node.has_state else {}
    if node.args or node.items or node.appends or not isinstance(state, dict):
        raise TypeError(f"a {name} has an unknown form")
    return state


def _is(node: Any, name: str) -> bool:
    return isinstance(node, Call) and node.func == Global(_MODULE, name)


def _ints(node: Any) -> tuple[int, ...]:
    shape = as_shape(node) if isinstance(node, Call) else None
    if shape is None or not all(map(is_count, shape)):
        raise ValueError("a size is not a shape")
    return shape


def _read_storage(node: Any, where: str) -> dict[tuple[str, tuple[int, ...] | None], Blob]:
    if not isinstance(node, dict):
        raise TypeError("storage_data is not a dict")
    found: dict[tuple[str, tuple[int, ...] | None], Blob] = {}
    for key, info in node.items():
        index, at = _fields(key, "MetadataIndex"), _fields(info, "_StorageInfo")
        offset = index.get("offset")
        place = (check_name(index["fqn"], "a key", where), None if offset is None else _ints(offset))
        path, start, length = at["relative_path"], at["offset"], at["length"]
        if place in found:
            raise ValueError(f"{place[0]} is stored twice at {place[1]}")
        if at.get("transform_descriptors"):
            what = "its data were transformed while they were saved (compressed or encrypted)"
            raise UnsupportedCheckpoint.at(where, what, _SAVE_AGAIN, Code.COMPRESSED)
        if not isinstance(path, str) or not (DATA_FILE.fullmatch(path) or ELSEWHERE.fullmatch(path)):
            what = f"it refers to {path!r:.80}, which is not a data file in this folder or beside it"
            raise SourceError.at(where, what, "leave this checkpoint out, or save it again", Code.FIELD_RANGE)
        if not (is_count(start) and is_count(length)):
            raise ValueError(f"{place[0]} has no valid place in {path}")
        found[place] = Blob(path, start, start + length)
    return found


def _read_entries(
    node: Any, paths: Any, blobs: Mapping[tuple[str, tuple[int, ...] | None], Blob], where: str
) -> dict[str, Entry]:
    if not isinstance(node, dict) or not isinstance(paths or {}, dict):
        raise TypeError("state_dict_metadata is not a dict")
    entries: dict[str, Entry] = {}
    used = 0
    for key, about in node.items():
        check_name(key, "a key", where)
        path = _path(key, (paths or {}).get(key, (key,)))
        if _is(about, "BytesStorageMetadata"):
            blob = blobs.get((key, None))
            if blob is None:
                raise ValueError(f"{key} is stored nowhere")
            entries[key] = Entry(path, chunks=(Chunk((), (), blob),))
            used += 1
            continue
        fields = _fields(about, "TensorStorageMetadata")
        shape = _ints(fields["size"])
        chunks = []
        for each in fields["chunks"]:
            chunk = _fields(each, "ChunkStorageMetadata")
            offsets, sizes = _ints(chunk["offsets"]), _ints(chunk["sizes"])
            blob = blobs.get((key, offsets))
            if blob is None and 0 not in sizes:
                raise ValueError(f"{key} at {list(offsets)} is stored nowhere")
            if len(offsets) != len(shape) or len(sizes) != len(shape):
                raise ValueError(f"{key} has chunks of another number of dimensions")
            if blob is not None:
                chunks.append(Chunk(offsets, sizes, blob))
                used += 1
        entries[key] = Entry(path, _dtype(fields["properties"]), shape, tuple(dict.fromkeys(chunks)))
    if len(blobs) > used:
        raise ValueError(f"{len(blobs) - used} of its places belong to no tensor")
    return entries


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
    if not isinstance(dtype, Global) or dtype.module != "torch" or dtype.name not in TORCH_DTYPES:
        raise ValueError("a tensor has no known dtype")
    return TORCH_DTYPES[dtype.name]


def cut_rows(rows: int, ranks: int) -> list[tuple[int, int]]:
    """Return the rows of each rank, as FSDP2 cuts them (``torch.chunk``); the last ones may be empty."""
    size = -(-rows // ranks)
    return [(min(rank * size, rows), min((rank + 1) * size, rows)) for rank in range(ranks)]


def lay_out_metadata(path: str, entries: Mapping[str, Entry]) -> FileLayout:
    """Return the layout of a ``.metadata`` that torch's own loader reads."""
    about = {key: _entry_node(entry) for key, entry in entries.items()}
    storage: dict[Any, Any] = {}
    for key, entry in entries.items():
        for number, chunk in enumerate(entry.chunks):
            place = {"fqn": key, "offset": _size(chunk.offsets), "index": number} if entry.is_tensor else {"fqn": key}
            blob = chunk.blob
            at = {"relative_path": blob.path, "offset": blob.start, "length": blob.stop - blob.start}
            storage[_object("MetadataIndex", {"offset": None, "index": None} | place)] = _object("_StorageInfo", at)
    content = {
        "state_dict_metadata": about,
        "planner_data": {key: entry.path for key, entry in entries.items()},
        "storage_data": storage,
        "storage_meta": None,  # torch fills it in
        "version": "1.0.0",
    }
    data, _ = write_pickle(_object("Metadata", content))
    return FileLayout(path, (Bytes(data, "the metadata of the distributed checkpoint"),))


def _object(name: str, state: Any) -> Call:
    module = _FILESYSTEM if name == "_StorageInfo" else _MODULE
    return Call(Global(module, name), (), new=True, state=state, has_state=True)


def _size(shape: Iterable[int]) -> Call:
    return Call(_SIZE, (tuple(shape),))


def _entry_node(entry: Entry) -> Call:
    if not entry.is_tensor:
        return Call(Global(_MODULE, "BytesStorageMetadata"), (), new=True)
    layout = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    contiguous = Call(Global(_MODULE, "_MEM_FORMAT_ENCODING"), (0,))
    dtype = Global("torch", TORCH_NAMES[entry.dtype])
    chunks = [
        _object("ChunkStorageMetadata", {"offsets": _size(chunk.offsets), "sizes": _size(chunk.sizes)})
        for chunk in entry.chunks
    ]
    properties = _object("TensorProperties", (dtype, layout, False, contiguous, False))
    return _object("TensorStorageMetadata", {"properties": properties, "size": _size(entry.shape), "chunks": chunks})
