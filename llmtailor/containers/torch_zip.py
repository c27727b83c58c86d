"""``torch.save`` files: a zip of stored records, one of them a pickle, the others mostly tensor storages.

Reading (format facts verified against torch 2.13): ``NAME/data.pkl`` is the pickle, ``NAME/data/KEY`` the bytes of
storage KEY, ``NAME/byteorder`` says ``little``. Local headers are padded so that records start at multiples of 64; the
central directory does not show this padding, so offsets are taken from the local headers.

Writing follows torch's own layout (same records, same alignment, data descriptors, zip64 end records), with more
padding before storages that can share blocks with the files they are copied from. The CRCs of tensor records are
filled in once the bytes have streamed past.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.layout import (
    BLOCK_BYTES,
    Bytes,
    Copy,
    Crc,
    FileLayout,
    Fill,
    Piece,
    Zeros,
    fill_all,
    shareable_start,
)
from llmtailor.checkpoint.placement import Extent
from llmtailor.codes import Code
from llmtailor.containers.pickle_nodes import Call, Storage
from llmtailor.containers.pickle_writer import write_pickle
from llmtailor.containers.unpickle import read_pickle
from llmtailor.containers.views import Buffered, Window
from llmtailor.containers.zip import BadZip, Compressed, Record, read_records
from llmtailor.errors import SourceError, UnsupportedCheckpoint, damaged
from llmtailor.model.states import ITEMSIZE
from llmtailor.storage.local import SourceFile, open_source

ALIGNMENT = 64
MAX_PICKLE_BYTES = 64 << 20
"""A larger ``data.pkl`` is refused: it does not contain the tensors, and describes each in about 150 bytes."""

_LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")
_SMALL = 4096
"""Maximum size in bytes of a record other than a tensor or the pickle, such as a version"""
_SCALAR = 8
"""Maximum size in bytes of a storage that counts as a scalar, such as Adam's step"""
_U32 = 0xFFFFFFFF
_SAVE_AGAIN = "save it again uncompressed: torch.save(torch.load(FILE, weights_only=False), FILE)"
_SAVE_NEW = "save it again with a current torch: torch.save(torch.load(FILE), FILE)"
_LEGACY = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""The number that files from before torch 1.6 begin with, pickled, after the protocol"""


@dataclass(frozen=True, slots=True)
class TorchFile:
    """A decoded file: its object tree, and the extent of each storage."""

    tree: Any
    records: Mapping[str, Extent]
    """The storages by key."""
    archive: str
    """The archive's name: torch uses the stem of the file's name when it was saved, or ``archive``"""


def read_torch_file(root: Path, path: str, where: str, any_names: bool = False) -> TorchFile:
    """Decode the pickle of ``root/path`` and locate its storages; no tensor byte is read.

    ``any_names`` permits names that are not on the allow-list: only for a file whose tree is not written anywhere.
    Raises SourceError for a damaged file or another format, and UnsafePickle for globals not on the allow-list.
    """
    with open_source(root / path, where) as file:
        return decode_torch_file(file, path, where, any_names)


def decode_torch_file(file: SourceFile, path: str, where: str, any_names: bool = False) -> TorchFile:
    """Decode an open file, or a `Window` of one; extents are those of the whole file. See `read_torch_file`."""
    return parse_torch_file(Buffered(file), where).decode(
        path, file.start if isinstance(file, Window) else 0, where, any_names
    )


@dataclass(frozen=True, slots=True)
class ParsedFile:
    """A file whose pickle is not decoded yet."""

    archive: str
    pickle: bytes
    storages: Mapping[str, tuple[int, int]]
    """Key -> first byte and end"""
    scalars: bytes
    """The content of all storages of up to 8 bytes"""

    def key(self) -> bytes:
        """Return what is equal for files that differ in their names only, or in tensors of more than 8 bytes."""
        return hashlib.sha256(repr((self.storages, self.scalars, self.pickle)).encode()).digest()

    def decode(self, path: str, first: int, where: str, any_names: bool = False) -> TorchFile:
        """Decode the pickle; ``first`` is where the archive begins in the file at ``path``."""
        extents = {key: Extent(path, first + start, first + stop) for key, (start, stop) in self.storages.items()}
        storages: dict[str, Storage] = {}

        def find_storage(dtype: str, key: str, numel: int, location: str) -> Storage:
            extent = extents.get(key)
            if extent is None or extent.num_bytes != numel * ITEMSIZE[dtype]:
                have = "is missing" if extent is None else f"has {extent.num_bytes} bytes"
                raise ValueError(f"storage {key!r:.40} {have} instead of {numel} elements of {dtype}")
            storage = storages.setdefault(key, Storage(dtype, numel, (Copy(extent),), location))
            if storage.dtype != dtype:  # torch would use whichever comes first
                raise ValueError(f"storage {key!r:.40} is given two types")
            return storage

        return TorchFile(read_pickle(self.pickle, where, find_storage, any_names), extents, self.archive)


def parse_torch_file(file: SourceFile, where: str) -> ParsedFile:
    """Check all of a file but its tensors, and return what is needed to decode it. Raises as `read_torch_file`."""
    try:
        records = read_records(file)
        if not records:
            raise BadZip("it has no data.pkl")
        prefix = next(iter(records)).partition("/")[0]
        tree = records.get(f"{prefix}/data.pkl")
        if tree is None:
            raise BadZip("it has no data.pkl")
        if f"{prefix}/constants.pkl" in records:
            raise BadZip("it is a TorchScript archive, which torch.load would run")
        if not {f"{prefix}/version", f"{prefix}/.data/version"} & records.keys():
            raise BadZip("it does not state its version, which torch needs to load it")
        if tree.stop - tree.start > MAX_PICKLE_BYTES:
            raise BadZip(f"its data.pkl has {tree.stop - tree.start:,} bytes; it may be a pickle bomb")
    except Compressed as error:
        what = f"{error}: torch.load reads such a file, but llmtailor can neither check nor use it"
        raise UnsupportedCheckpoint.at(where, what, _SAVE_AGAIN, Code.COMPRESSED) from error
    except (BadZip, UnicodeDecodeError) as error:
        raise _no_zip(file, where, error) from error
    order = records.get(f"{prefix}/byteorder")
    if order and file.read(order.start, min(order.stop, order.start + 8)) != b"little":
        raise SourceError.at(where, "the tensors are big-endian", "save it again on a little-endian machine")
    pickle_bytes = file.read(tree.start, tree.stop)
    in_data = f"{prefix}/data/"
    storages: dict[str, tuple[int, int]] = {}
    scalars = []
    for name, record in records.items():
        if name.startswith(in_data):
            storages[name.removeprefix(in_data)] = (record.start, record.stop)
            if record.start < record.stop <= record.start + _SCALAR:
                scalars.append(file.read(record.start, record.stop))
        elif record is tree or record.stop - record.start <= _SMALL:
            data = pickle_bytes if record is tree else file.read(record.start, record.stop)
            if record.crc not in (None, zlib.crc32(data)):
                what = f"{name.rpartition('/')[2]} does not match its CRC: the file is damaged"
                raise damaged(where, what)
    return ParsedFile(prefix, pickle_bytes, storages, b"".join(scalars))


def read_attributes(root: Path, path: str, where: str) -> dict[Any, Any]:
    """Return the attributes of the object that ``root/path`` pickles, as data; the object is never created.

    Raises SourceError for a file that is damaged, of another format, or holds something else.
    """
    tree = read_torch_file(root, path, where, any_names=True).tree
    if not isinstance(tree, Call) or not isinstance(tree.state, dict):
        raise damaged(where, "it does not hold an object with attributes", Code.FIELD_TYPE)
    return tree.state


def _no_zip(file: SourceFile, where: str, error: Exception) -> SourceError:
    """Return the error for a file that is no intact zip: it may be in torch's legacy format."""
    head = file.read(0, min(2 + len(_LEGACY), file.num_bytes))
    if head[:1] == b"\x80" and head[2:] == _LEGACY:
        what = "the file is in torch's legacy format (before 1.6): torch.load reads it, but llmtailor does not"
        return UnsupportedCheckpoint.at(where, what, _SAVE_NEW, Code.LEGACY)
    what = f"the file is truncated or damaged at {file.num_bytes} bytes ({error})"
    if not head:
        what = "the file is empty"
    elif head[:1] == b"\x80":
        what = "the file is a bare pickle, not a torch.save file"
    elif head[:4] != b"PK\x03\x04":
        what = f"the file is not a torch.save file (it has {file.num_bytes} bytes and begins with {head[:4]!r})"
    return damaged(where, what, Code.FILE_DAMAGED)


_HEADERS = "pickle and zip headers"
_OTHER_RECORDS = 5
"""Records besides the storages in a file that states its alignment"""
Content = tuple[bytes, Sequence[tuple[Piece, ...]]]
"""A file's pickle, and what its storages consist of"""


class TorchLayout(FileLayout):
    """A file that can be laid out again around other content of its storages, which is made when it is asked for."""

    def __init__(self, path: str, make: Callable[[], Content]):
        self._archive = Path(path).stem
        self._make = make
        super().__init__(path, lambda: _zip(self._archive, *make(), as_torch=True))

    def filled(self, fill: Fill) -> FileLayout:
        """Return the layout with every piece replaced, each storage placed so that it can share blocks."""

        def pieces() -> tuple[Piece, ...]:
            pickled, storages = self._make()
            return _zip(self._archive, pickled, [fill_all(content, fill) for content in storages])

        return FileLayout(self.path, pieces)


def lay_out_torch_file(path: str, tree: Any) -> TorchLayout:
    """Return the layout of a file that ``torch.load`` opens as ``tree``.

    Storages from `read_torch_file` keep their bytes; those of `make_tensor` have the content they were created with.
    """
    content = pickle_content(path, tree)
    return TorchLayout(path, lambda: content)


def lay_out_torch_blob(path: str, tree: Any, at: int) -> list[Piece]:
    """Return the pieces of a file that ``torch.load`` opens as ``tree``, to be placed at byte ``at`` of another file.

    Alignment counts from the start of the blob, as torch writes it.
    """
    pieces = _zip("archive", *pickle_content(path, tree), as_torch=True)
    return [Crc(at + piece.start, at + piece.stop) if isinstance(piece, Crc) else piece for piece in pieces]


def pickle_content(path: str, tree: Any) -> Content:
    """Return the pickle of a tree, and the content of its storages."""
    data, storages = write_pickle(tree)
    for key, storage in enumerate(storages):
        expected, actual = storage.numel * ITEMSIZE[storage.dtype], sum(part.num_bytes for part in storage.content)
        if expected != actual:
            raise ValueError(f"{path}: storage {key} needs {expected} bytes but gets {actual}")
    return data, tuple(storage.content for storage in storages)


def _zip(
    archive: str, pickled: bytes, storages: Sequence[tuple[Piece, ...]], as_torch: bool = False
) -> tuple[Piece, ...]:
    """Return the pieces of a file. Unless ``as_torch``, storages are placed where they can share blocks.

    From the version and the alignment that a file states, torch computes where storages are (with ``map_location``
    "meta", for instance). A file that places them otherwise states neither, like those of older versions of torch, so
    that torch reads the places from the file.
    """
    name = archive.encode() + b"/"
    if all(type(piece) is Bytes for content in storages for piece in content):
        parts = _between_names(len(name), pickled, tuple(storages))
        if parts is not None:
            return (Bytes(name.join(parts), _HEADERS),)
    return _zip_as(name, pickled, storages, as_torch)


@lru_cache(16)
def _between_names(length: int, pickled: bytes, storages: tuple[tuple[Piece, ...], ...]) -> list[bytes] | None:
    """Return what is between the names of a file whose storages are known now, given the length of the name.

    The ranks of ZeRO-3 have thousands of files with the same pickle and no tensors. None if the parts can't be told.
    """
    name = b"\xff" * (length - 1) + b"/"
    [whole] = _zip_as(name, pickled, storages, as_torch=True)
    assert isinstance(whole, Bytes), "a file of literals is one"
    parts = whole.data.split(name)
    records = len(storages) + _OTHER_RECORDS
    return parts if len(parts) == 2 * records + 1 else None  # else the pickle has such bytes, too


def _zip_as(name: bytes, pickled: bytes, storages: Sequence[tuple[Piece, ...]], as_torch: bool) -> tuple[Piece, ...]:
    starts = [None if as_torch else shareable_start(content, ALIGNMENT) for content in storages]
    builder = _ZipBuilder(name)
    builder.add("data.pkl", (Bytes(pickled, "pickle"),))
    if not any(start is not None for start in starts):
        builder.add(".format_version", (Bytes(b"1", "torch's format version"),))
        builder.add(".storage_alignment", (Bytes(str(ALIGNMENT).encode(), "torch's alignment"),))
    builder.add("byteorder", (Bytes(b"little", "byte order"),))
    for key, (content, start) in enumerate(zip(storages, starts, strict=True)):
        builder.add(f"data/{key}", content, start)
    builder.add("version", (Bytes(b"3\n", "torch's zip version"),))
    return builder.finish()


class _ZipBuilder:
    def __init__(self, name: bytes):
        self.name = name
        """Of the archive, with a slash"""
        self.pieces: list[Piece] = []
        self.literal: list[bytes] = []
        self.at = 0
        self.directory: list[tuple[bytes, int, int, int, Piece | Bytes]] = []

    def put(self, piece: Piece) -> None:
        if isinstance(piece, Bytes):  # thousands of headers may follow each other
            self.literal.append(piece.data)
        elif piece.num_bytes:
            if self.literal:
                self.flush()
            self.pieces.append(piece)
        self.at += piece.num_bytes

    def put_all(self, content: Sequence[Piece], size: int) -> None:
        """Append pieces of ``size`` bytes in total."""
        if Bytes in map(type, content):
            for piece in content:
                self.put(piece)
        elif size:
            self.flush()
            self.pieces += [piece for piece in content if piece.num_bytes]
            self.at += size

    def flush(self) -> None:
        """Make one piece of the literal bytes since the last other piece."""
        if data := b"".join(self.literal):
            self.pieces.append(Bytes(data, _HEADERS))
        self.literal = []

    def add(self, record: str, content: tuple[Piece, ...], start: int | None = None) -> None:
        """Append a record: local header, data, data descriptor.

        The data starts at ``start`` modulo `BLOCK_BYTES`, or else at a multiple of `ALIGNMENT`.
        """
        name, size, header_at = self.name + record.encode(), sum([part.num_bytes for part in content]), self.at
        big = size >= _U32
        zip64 = struct.pack("<HHQQ", 1, 16, size, size) if big else b""
        bare = self.at + _LOCAL_HEADER.size + len(name) + len(zip64) + 4
        padding = -bare % ALIGNMENT if start is None else (start - bare) % BLOCK_BYTES
        short = _U32 if big else 0  # the data descriptor has the sizes; zip64 readers look in the extra field
        header = _LOCAL_HEADER.pack(
            b"PK\x03\x04", 45 if big else 0, 0x0808, 0, 0, 0, 0, short, short, len(name), len(zip64) + 4 + padding
        )
        extra = zip64 + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        self.put(Bytes(header + name + extra, f"zip header of {record}"))
        data_at = self.at
        self.put_all(content, size)
        crc = self.checksum(data_at, content)
        self.put(Bytes(b"PK\x07\x08", "zip data descriptor"))
        self.put(crc)
        self.put(Bytes(struct.pack("<QQ" if big else "<II", size, size), "zip data descriptor"))
        self.directory.append((name, size, header_at, 45 if big else 0, crc))

    def checksum(self, start: int, content: tuple[Piece, ...]) -> Piece:
        """Return a record's CRC: known now if all its bytes are, otherwise computed while they stream."""
        if all(isinstance(part, (Bytes, Zeros)) for part in content):
            crc = 0
            for part in content:
                crc = zlib.crc32(part.data if isinstance(part, Bytes) else bytes(part.num_bytes), crc)
            return Bytes(struct.pack("<I", crc), "CRC-32")
        return Crc(start, self.at)

    def finish(self) -> tuple[Piece, ...]:
        start = self.at
        for name, size, header_at, version, crc in self.directory:
            wide = [value for value in (size, size, header_at) if value >= _U32]
            extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
            self.put(
                Bytes(struct.pack("<4sHHHHHH", b"PK\x01\x02", 45 if wide else 0, version, 0x0808, 0, 0, 0), "zip entry")
            )
            self.put(crc)
            short = min(size, _U32)
            rest = struct.pack("<IIHHHHHII", short, short, len(name), len(extra), 0, 0, 0, 0, min(header_at, _U32))
            self.put(Bytes(rest + name + extra, "zip entry"))
        size, count, zip64_at = self.at - start, len(self.directory), self.at
        end64 = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, start)
        locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, zip64_at, 1)
        short_count = min(count, 0xFFFF)
        end = struct.pack(
            "<4sHHHHIIH", b"PK\x05\x06", 0, 0, short_count, short_count, min(size, _U32), min(start, _U32), 0
        )
        self.put(Bytes(end64 + locator + end, "zip end records"))
        self.flush()
        return tuple(self.pieces)


def list_records(root: Path, path: str, where: str) -> tuple[Record, ...]:
    """Return the records of ``root/path`` in the order of their bytes. Raises SourceError for a damaged zip."""
    with open_source(root / path, where) as file:
        return _records_in(file, where)


def list_blob_records(root: Path, path: str, blobs: Iterable[tuple[int, int]], where: str) -> tuple[Record, ...]:
    """Return the records of the zips at the byte ranges ``blobs`` of a file. Raises SourceError for a damaged zip."""
    with open_source(root / path, where) as file:
        return tuple(
            Record(record.name, start + record.start, start + record.stop, record.crc)
            for start, stop in blobs
            for record in _records_in(Buffered(Window(file, start, min(stop, file.num_bytes))), where)
        )


def _records_in(file: SourceFile, where: str) -> tuple[Record, ...]:
    try:
        found = read_records(file, may_be_deflated=True)
    except (BadZip, UnicodeDecodeError) as error:
        raise _no_zip(file, where, error) from error
    return tuple(sorted(found.values(), key=lambda record: record.start))
