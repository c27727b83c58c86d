"""The folders of saves through torch.distributed.checkpoint, and how a new one gets files of an older one."""

from __future__ import annotations

import errno
import math
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from safetensors import SafetensorError
from torch import Size
from torch.distributed.checkpoint.filesystem import FileSystem, SerializationFormat, _StorageInfo
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import StorageWriter

from llmtailor.containers.dcp import (
    DATA_FILE,
    MAX_METADATA_BYTES,
    METADATA,
    SHARD_FILE,
    checksum_of_save,
    checksum_of_shard,
    mentions,
    read_metadata,
)
from llmtailor.containers.safetensors import INDEX, read_header
from llmtailor.errors import SourceError, UsageError
from llmtailor.live.tensors import TORCH
from llmtailor.storage.local import SourceFile, fsync_folder, open_source, read_source, replace_durably, try_link
from llmtailor.storage.remote import is_url

WHERE = "DcpSaver"
_FIRST_TAKEN = 1_000_000
"""The least counter of files that are linked or copied"""
_READERS = 16
"""How many files are read at once"""
_SAVE_ALL = "give dcp.save that writer itself, so that every save holds everything"


class SaveDestination(Protocol):
    """Where a save is."""

    took: ClassVar[str]
    """What it does with older files, as a word"""
    at_once: ClassVar[int]
    """How many files are written at a time, and copied"""
    data_file: ClassVar[re.Pattern[str]]
    index: ClassVar[str]
    """The file that the writer writes last"""
    record_is_last: ClassVar[bool] = False
    """Whether `DCP_RECORD` is written after that"""

    def beside(self, location: str) -> SaveDestination | None:
        """Return the folder of another location, if it can be used with this one."""

    def names(self) -> list[str]:
        """Return the names of its files; none if it does not exist."""

    def read(self, name: str) -> bytes: ...

    def write(self, name: str, data: bytes) -> None:
        """Replace a small file, durably."""

    def remove(self, name: str) -> None: ...

    def read_save(self, record: Mapping[str, Any]) -> Metadata | None:
        """Return where the data of the save is that ``record`` belongs to, None if another one has followed it.

        Raises TailorError for what is damaged or hostile, or what `_read_base` catches.
        """

    def rename(self, paths: Sequence[str], ranks: int) -> dict[str, str]:
        """Return the names of an older save's files in a save of so many ranks."""

    def has_files(self, numbers: Mapping[str, int], metadata: Metadata) -> bool:
        """Return whether the files of a save can be those of one whose keys are in files of these numbers."""

    def checksums(self, paths: Sequence[str], places: Iterable[Any]) -> dict[str, str | None]:
        """Return what is recorded of some data files, given where all data of their save is.

        It shows whether another save has overwritten a file; None where no other folder can share one. Raises OSError.
        """

    def take(self, other: Any, names: Mapping[str, str]) -> dict[tuple[str, str], int]:
        """Link to files of another folder under other names, or return what has to be copied, with the sizes.

        Raises FileNotFoundError if one is gone, or another OSError.
        """

    def copy(self, source: str, target: str) -> None: ...


class _BlobFiles:
    """Files of `FileSystemWriter`, which ``.metadata`` lists."""

    data_file: ClassVar[re.Pattern[str]] = DATA_FILE
    index: ClassVar[str] = METADATA
    record_is_last: ClassVar[bool] = False

    def rename(self, paths: Sequence[str], ranks: int) -> dict[str, str]:
        names: dict[str, str] = {}
        for number, path in enumerate(paths, _FIRST_TAKEN):
            match = DATA_FILE.fullmatch(Path(path).name)
            rank = int(match[1]) % ranks if match else 0  # readers take the highest for the number of ranks
            names[path] = f"__{rank}_{number}.distcp"
        return names

    def has_files(self, numbers: Mapping[str, int], metadata: Metadata) -> bool:
        return True


def save_id(meta: StorageMeta | None) -> str | None:
    """Return the save's id, which distinguishes it from a later save to the same folder."""
    return meta.save_id if meta is not None else None


@dataclass(frozen=True)
class LocalFolder(_BlobFiles):
    path: Path
    took: ClassVar[str] = "linked to"
    at_once: ClassVar[int] = 1

    def __str__(self) -> str:
        return str(self.path)

    def beside(self, location: str) -> LocalFolder | None:
        return None if is_url(location) else type(self)(Path(location).absolute())

    def names(self) -> list[str]:
        return [path.name for path in self.path.iterdir()] if self.path.is_dir() else []

    def read(self, name: str) -> bytes:
        try:
            return read_source(self.path / name, f"{self.path / name}", MAX_METADATA_BYTES)
        except SourceError as error:
            raise FileNotFoundError(errno.ENOENT, str(error), name) from error

    def read_save(self, record: Mapping[str, Any]) -> Metadata | None:
        return _read_metadata(self.path, record)

    def write(self, name: str, data: bytes) -> None:
        replace_durably(self.path / name, data)
        fsync_folder(self.path)

    def remove(self, name: str) -> None:
        (self.path / name).unlink()

    def checksums(self, paths: Sequence[str], places: Iterable[Any]) -> dict[str, str | None]:
        blobs: dict[str, list[tuple[int, int]]] = {}
        for one in places:
            blobs.setdefault(one.relative_path, []).append((one.offset, one.offset + one.length))

        def checksum(path: str) -> str:
            try:
                with open_source(self.path / path, f"{self.path / path}") as file:
                    return f"{self._checksum(file, blobs[path]):08x}"
            except SourceError as error:
                raise FileNotFoundError(errno.ENOENT, str(error), path) from error

        with ThreadPoolExecutor(_READERS) as pool:  # on a network's file system, each read takes a while
            return dict(zip(paths, pool.map(checksum, paths), strict=True))

    def _checksum(self, file: SourceFile, blobs: Sequence[tuple[int, int]]) -> int:
        return checksum_of_save(file, blobs)

    def take(self, other: Any, names: Mapping[str, str]) -> dict[tuple[str, str], int]:
        for path, name in names.items():
            if not try_link(other.path / path, self.path / name):
                raise OSError(errno.ENOTSUP, "the file system has no links")
        return {}

    def copy(self, source: str, target: str) -> None:
        raise AssertionError("nothing is copied")


@dataclass(frozen=True)
class ShardsFolder(LocalFolder):
    """Files of `HuggingFaceStorageWriter`, whose reader reads every safetensors file that is there.

    So what is saved together has a file of its own on each rank, with the same name in every save: a new folder gets
    it written or linked, and no tensor is there twice.
    """

    data_file: ClassVar[re.Pattern[str]] = SHARD_FILE
    index: ClassVar[str] = INDEX
    record_is_last: ClassVar[bool] = True

    def read_save(self, record: Mapping[str, Any]) -> Metadata | None:
        if {*filter(SHARD_FILE.fullmatch, self.names())} != record["files"].keys():
            return None
        for name in record["files"]:  # torch opens anything, and trusts its header
            read_header(self.path, name, f"{self.path / name}")
        try:
            metadata = HuggingFaceStorageReader(str(self.path)).read_metadata()
        except SafetensorError as error:
            raise ValueError(f"{error}") from error
        for at, info in metadata.storage_data.items():
            size = math.prod(info.shape) * info.dtype.itemsize
            metadata.storage_data[at] = _StorageInfo(Path(info.relative_path).name, 0, size)
        return metadata

    def rename(self, paths: Sequence[str], ranks: int) -> dict[str, str]:
        return {path: path for path in paths}

    def has_files(self, numbers: Mapping[str, int], metadata: Metadata) -> bool:
        of = f"-of-{max(numbers.values()):05}"
        wanted = {key: f"model-{number:05}{of}" for key, number in numbers.items()}
        rows = ((at.fqn, SHARD_FILE.fullmatch(info.relative_path)) for at, info in metadata.storage_data.items())
        return all(match is not None and match[2] == wanted.get(key) for key, match in rows)

    def _checksum(self, file: SourceFile, blobs: Sequence[tuple[int, int]]) -> int:
        return checksum_of_shard(file)


@dataclass(frozen=True)
class StoreFolder(_BlobFiles):
    """A folder of an object store, or of another file system of fsspec's."""

    fs: Any = field(compare=False)
    path: str
    took: ClassVar[str] = "had the store copy"
    at_once: ClassVar[int] = 4

    def __str__(self) -> str:
        return str(self.fs.unstrip_protocol(self.path))

    def beside(self, location: str) -> StoreFolder | None:
        known = self.fs.protocol if isinstance(self.fs.protocol, tuple) else (self.fs.protocol,)
        is_same = location.partition("://")[0] in known
        return StoreFolder(self.fs, self.fs._strip_protocol(location).rstrip("/")) if is_same else None

    def _list(self) -> dict[str, int]:
        self.fs.invalidate_cache()
        try:
            found = self.fs.ls(self.path, detail=True)
        except FileNotFoundError:
            return {}
        return {one["name"].rpartition("/")[2]: one["size"] for one in found if one["type"] == "file"}

    def names(self) -> list[str]:
        return [*self._list()]

    def read(self, name: str) -> bytes:
        if self._list().get(name, 0) > MAX_METADATA_BYTES:
            raise OSError(errno.EFBIG, "it is too large", name)
        return bytes(self.fs.cat_file(f"{self.path}/{name}"))

    def read_save(self, record: Mapping[str, Any]) -> Metadata | None:
        with tempfile.TemporaryDirectory(prefix="llmtailor-") as folder:
            (Path(folder) / METADATA).write_bytes(self.read(METADATA))
            return _read_metadata(Path(folder), record)

    def write(self, name: str, data: bytes) -> None:
        self.fs.pipe_file(f"{self.path}/{name}", data)

    def remove(self, name: str) -> None:
        self.fs.rm_file(f"{self.path}/{name}")

    def checksums(self, paths: Sequence[str], places: Iterable[Any]) -> dict[str, str | None]:
        return dict.fromkeys(paths)

    def take(self, other: Any, names: Mapping[str, str]) -> dict[tuple[str, str], int]:
        if type(other.fs) is not type(self.fs):
            raise OSError(errno.EXDEV, "it is in another store")
        there = other._list()
        if gone := names.keys() - there.keys():
            raise FileNotFoundError(errno.ENOENT, "gone", min(gone))
        return {(f"{other.path}/{path}", f"{self.path}/{name}"): there[path] for path, name in names.items()}

    def copy(self, source: str, target: str) -> None:
        self.fs.cp_file(source, target)


def _read_metadata(root: Path, record: Mapping[str, Any]) -> Metadata | None:
    """Return the ``.metadata`` of a folder for torch, without unpickling it; None if it is not that of ``record``.

    Raises TailorError, or KeyError for an unknown dtype.
    """
    where, own = f"{root / METADATA}", record.get("save_id")
    if own is not None and not mentions(root, METADATA, where, str(own)):
        return None
    found = Metadata({}, storage_data={})
    for key, entry in read_metadata(root, METADATA, where).items():
        boxes = [ChunkStorageMetadata(Size(one.offsets), Size(one.sizes)) for one in entry.chunks]
        if entry.is_tensor:
            about = TensorProperties(dtype=TORCH[entry.dtype])
            found.state_dict_metadata[key] = TensorStorageMetadata(about, Size(entry.shape), boxes)
        else:
            found.state_dict_metadata[key] = BytesStorageMetadata()
        for one in entry.chunks:
            at = MetadataIndex(key, Size(one.offsets) if entry.is_tensor else None)
            found.storage_data[at] = _StorageInfo(one.blob.path, one.blob.start, one.blob.stop - one.blob.start)
    return found


def folder_of(inner: StorageWriter) -> SaveDestination:
    """Return the folder of a writer. Raises UsageError if there is none, or later saves could not use its files."""
    fs, path = getattr(inner, "fs", None), getattr(inner, "path", None)
    other: Any = getattr(fs, "fs", None)  # of torch's FsspecWriter
    form = getattr(inner, "serialization_format", SerializationFormat.TORCH_SAVE)
    fix = _SAVE_ALL
    if isinstance(inner, HuggingFaceStorageWriter):
        if inner.enable_consolidation:
            what = "writes every tensor again, as enable_consolidation asks"
            fix = "omit it, and give the folders that you need to torch's consolidate_safetensors_files"
        elif inner.fqn_to_index_mapping is not None:
            what = "has files that fqn_to_index_mapping chooses, but what is saved together must be in one file"
            fix = "omit it"
        else:
            return ShardsFolder(Path(inner.path).absolute())
    elif form != SerializationFormat.TORCH_SAVE:
        what = "writes .distcp files in the safetensors format, which can't hold data of several saves"
        fix = f"{fix}; or use HuggingFaceStorageWriter"
    elif getattr(inner, "use_msc", False):
        what, fix = "writes through multistorageclient, which copies no files within a store", f"{fix}; or omit use_msc"
    elif isinstance(fs, FileSystem) and path:
        return LocalFolder(Path(path).absolute())
    elif other is not None and path:
        path = other._strip_protocol(str(path)).rstrip("/")
        if "file" in other.protocol:
            return LocalFolder(Path(path))
        if _can_copy(other):
            return StoreFolder(other, path)
        what = f"writes to {type(other).__name__}, which copies no files within a store"
    else:
        what = "writes no files, so a save can't use the data of earlier ones"
    raise UsageError.at(WHERE, f"{type(inner).__name__} {what}", fix)


def _can_copy(fs: Any) -> bool:
    """Return whether a file system of fsspec's has a way of its own to copy a file."""
    own = (one for one in type(fs).__mro__ if one.__module__ not in ("fsspec.spec", "fsspec.asyn"))
    return any({"cp_file", "_cp_file"} & vars(one).keys() for one in own)
