"""``torch.save`` files: a zip of stored records, one of them a pickle, the others mostly tensor storages.

Reading (format facts verified against torch 2.13): ``NAME/data.pkl`` is the pickle, ``NAME/data/KEY`` the bytes of
storage KEY, ``NAME/byteorder`` says ``little``. Local headers are padded so that records start at multiples of 64; the
central directory does not show this padding, so offsets are taken from the local headers.

Readers of zip files differ: where they look for the end, how they treat bytes before the first record, which of two
equal names they use, whether case matters. A crafted file can show harmless content to one reader and an exploit to
``torch.load``. So the end records must end the file, the directory must directly precede them, the first record must
start the file, records must not overlap, and names must differ by more than case. Python's ``zipfile`` checks none of
this, and does not say where in the directory an entry is.

Writing follows torch's own layout (same records, same alignment, data descriptors, zip64 end records), with more
padding before storages that can share blocks with the files they are copied from. The CRCs of tensor records are
filled in once the bytes have streamed past.

The ranks of a training write thousands of files that differ in nothing but the archive's name, which is in the header
of every record, and in tensors. Such files are recognized by their bytes, and decoded once.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from llmtailor.checkpoint.layout import (
    BLOCK_BYTES,
    Bytes,
    Copy,
    Crc,
    FileLayout,
    Fill,
    Segment,
    Zeros,
    fill_all,
    shareable_start,
)
from llmtailor.checkpoint.placement import Extent
from llmtailor.codes import Code
from llmtailor.containers.pickle_writer import write_pickle
from llmtailor.containers.unpickle import ALLOWED, Call, Storage, read_pickle
from llmtailor.errors import SourceError, UnsupportedCheckpoint, damaged
from llmtailor.model.dtypes import ITEMSIZE
from llmtailor.storage.local import SourceFile, open_source

MAX_RECORDS = 1 << 20
"""The largest files of checkpoints have about 100,000 tensors."""
MAX_NAME_BYTES = 1024

_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
_CRC_AT = 16
_END = struct.Struct("<4sHHHHIIH")
_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_STORED, _DEFLATED = 0, 8
_U16, _U32 = 0xFFFF, 0xFFFFFFFF


class BadZip(ValueError):
    """The error for a file that is not a zip of stored records, or that readers could interpret differently."""


class DeflatedRecords(BadZip):
    """The error for a file with deflated records. ``torch.load`` reads them; here bytes are copied unchanged."""


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """Bytes ``start``..``stop`` of the file."""

    name: str
    start: int
    stop: int
    crc: int | None
    """CRC-32; None for a deflated record, whose checksum is of other bytes, or one written without (torch writes 0)"""
    crc_at: int = 0
    """Where it is in the directory, counted from the start of the file"""


def is_torch_file(path: str) -> bool:
    """Return whether a file of a checkpoint is one of `torch.save`, by its name: "." if it is the whole checkpoint."""
    return path == "." or path.endswith((".pt", ".pth", ".bin", ".ckpt"))


def read_records(file: SourceFile, may_be_deflated: bool = False) -> dict[str, ZipRecord]:
    """Return the records by name, in the order of the directory.

    Raises BadZip, `DeflatedRecords` for deflated records unless ``may_be_deflated``, or SourceError if reading fails.
    """
    start, stop, count = find_directory(file)
    if count > MAX_RECORDS:
        raise BadZip(f"it has {count:,} records, more than {MAX_RECORDS:,}")
    if stop - start > count * (_ENTRY.size + 2 * MAX_NAME_BYTES):
        raise BadZip(f"its directory of {count:,} records takes {stop - start:,} bytes")
    records: dict[str, ZipRecord] = {}
    spans = []
    for name, size, at, crc, is_deflated, crc_at in _entries(file.read(start, stop), count):
        if is_deflated and not may_be_deflated:
            raise DeflatedRecords(f"record {_shown(name)} is compressed")
        begin = _data_start(file, name, at, start)
        if begin + size > start:
            raise BadZip(f"record {_shown(name)} is not where the directory says")
        text = name.decode()
        if text in records:
            raise BadZip(f"record {_shown(name)} occurs twice")
        records[text] = ZipRecord(text, begin, begin + size, None if is_deflated else crc or None, start + crc_at)
        spans.append((at, begin + size))
    spans.sort()
    if spans and spans[0][0] != 0:
        raise BadZip(f"there are {spans[0][0]} bytes before the first record")
    for (_, before), (at, _) in itertools.pairwise(spans):
        if at < before:
            raise BadZip("records overlap")
    _check_names(records)
    return records


def find_directory(file: SourceFile) -> tuple[int, int, int]:
    """Return the start and end of the directory, and its number of entries."""
    end_at = file.num_bytes - _END.size
    if end_at < 0:
        raise BadZip("it is too short")
    signature, *disks, here, count, size, start, comment = _END.unpack(file.read(end_at, file.num_bytes))
    if signature != b"PK\x05\x06" or comment:
        raise BadZip("it does not end with the end record")
    stop = end_at
    locator_at = end_at - _LOCATOR.size
    if locator_at >= _END64.size:
        signature, disk, end64_at, num_disks = _LOCATOR.unpack(file.read(locator_at, end_at))
        if signature == b"PK\x06\x07":
            if end64_at != locator_at - _END64.size or disk or num_disks != 1:
                raise BadZip("the zip64 end record is misplaced")
            short = (here, count, size, start)
            signature, own_size, _, _, *disks64, here, count, size, start = _END64.unpack(
                file.read(end64_at, locator_at)
            )
            if signature != b"PK\x06\x06" or own_size != _END64.size - 12:
                raise BadZip("the zip64 end record is damaged")
            limits = (_U16, _U16, _U32, _U32)
            if any(a not in (b, top) for a, b, top in zip(short, (here, count, size, start), limits, strict=True)):
                raise BadZip("its two end records contradict each other")
            disks += disks64
            stop = end64_at
    if any(disks) or here != count:
        raise BadZip("it is split into several files")
    if start + size != stop:
        raise BadZip("its directory is not where the end record says")
    return start, stop, count


def _entries(directory: bytes, count: int) -> Iterator[tuple[bytes, int, int, int, bool, int]]:
    """Yield (name, size in the file, offset of the local header, CRC-32, whether it is deflated, where the CRC-32 is in
    the directory) of each entry.
    """
    at = 0
    for _ in range(count):
        if at + _ENTRY.size > len(directory):
            raise BadZip("its directory ends early")
        fields, crc_at = _ENTRY.unpack_from(directory, at), at + _CRC_AT
        signature, flags, method, crc, packed, size = fields[0], fields[3], fields[4], *fields[7:10]
        name_len, extra_len, comment_len, disk, offset = *fields[10:14], fields[16]
        at += _ENTRY.size
        name, extra = directory[at : at + name_len], directory[at + name_len : at + name_len + extra_len]
        at += name_len + extra_len + comment_len
        if signature != b"PK\x01\x02" or at > len(directory) or name_len > MAX_NAME_BYTES or disk:
            raise BadZip("an entry of its directory is damaged")
        if _U32 in (size, packed, offset):
            size, packed, offset = _wide(extra, size, packed, offset)
        if method not in (_STORED, _DEFLATED) or flags & 1 or (method == _STORED and packed != size):
            raise BadZip(f"record {_shown(name)} is encrypted, or compressed by a method torch does not read")
        yield name, packed, offset, crc, method == _DEFLATED, crc_at
    if at != len(directory):
        raise BadZip("its directory has more entries than the end record says")


def _wide(extra: bytes, *short: int) -> tuple[int, ...]:
    """Return 32-bit fields, with those that overflow read from the zip64 extra field."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1 and length >= 8 * short.count(_U32) and at + 4 + length <= len(extra):
            wide = iter(struct.unpack_from(f"<{short.count(_U32)}Q", extra, at + 4))
            return tuple(next(wide) if field == _U32 else field for field in short)
        at += 4 + length
    raise BadZip("an entry of its directory lacks its zip64 sizes")


def _data_start(file: SourceFile, name: bytes, at: int, stop: int) -> int:
    """Return where a record's data begins: the local header is padded, which the directory does not show."""
    end = at + _LOCAL.size + len(name)
    if end > stop:
        raise BadZip(f"record {_shown(name)} is not where the directory says")
    header = file.read(at, end)
    signature, _, flags, method, *_, name_len, extra_len = _LOCAL.unpack_from(header)
    if (
        signature != b"PK\x03\x04"
        or method not in (_STORED, _DEFLATED)
        or flags & 1
        or name_len != len(name)
        or header[_LOCAL.size :] != name
    ):
        raise BadZip(f"record {_shown(name)} is not where the directory says")
    return end + int(extra_len)


def _check_names(records: dict[str, ZipRecord]) -> None:
    folded = {name.casefold() for name in records}
    if len(folded) < len(records):
        raise BadZip("two records have names that differ only by case")
    prefixes = {name.partition("/")[0] for name in records}
    if len(prefixes) > 1:
        raise BadZip("its records are in several folders")
    for name in records:
        if "\\" in name or "\0" in name or ".." in name.split("/") or name.startswith("/"):
            raise BadZip(f"record {_shown(name.encode())} is outside the file's folder")


def _shown(name: bytes) -> str:
    return name[:80].decode(errors="replace")


_BLOCK = 4096
_MAX_BLOCK = 1 << 20


class Window(SourceFile):
    """Bytes ``start``..``stop`` of an open file, read as a file of their own."""

    def __init__(self, file: SourceFile, start: int, stop: int):
        super().__init__(file.fd, stop - start, file.where, file.fill)
        self.start = start

    def read(self, start: int, stop: int) -> bytes:
        return super().read(self.start + start, self.start + stop)


class Buffered(SourceFile):
    """A file whose headers are read in blocks, because they lie close together.

    The beginning and the end are kept. Blocks grow where one follows the other, and are small between tensors.
    """

    def __init__(self, file: SourceFile):
        super().__init__(file.fd, file.num_bytes, file.where, file.fill)
        self._file = file
        self._size = _BLOCK
        self._end = self._fetch(max(0, self.num_bytes - _BLOCK) if self.num_bytes > 4 * _BLOCK else 0, self.num_bytes)
        self._begin = self._last = self._end

    def read(self, start: int, stop: int) -> bytes:
        for at, data in (self._last, self._begin, self._end):
            if at <= start and stop <= at + len(data):
                return data[start - at : stop - at]
        after = start - self._last[0] - len(self._last[1])
        self._size = min(2 * self._size, _MAX_BLOCK) if 0 <= after < _BLOCK else _BLOCK
        if stop - start > self._size:
            return self._file.read(start, stop)
        self._last = self._fetch(start, min(start + self._size, self.num_bytes))
        if start == 0:
            self._begin = self._last
        return self._last[1][: stop - start]

    def _fetch(self, start: int, stop: int) -> tuple[int, bytes]:
        return start, self._file.read(start, stop)


class InMemoryFile(SourceFile):
    """A file whose bytes are in memory."""

    def __init__(self, data: bytes, where: str):
        super().__init__(-1, len(data), where)
        self._data = data

    def read(self, start: int, stop: int) -> bytes:
        return self._data[start:stop]


ALIGNMENT = 64
MAX_PICKLE_BYTES = 64 << 20
"""A larger ``data.pkl`` is refused: it does not contain the tensors, and describes each in about 150 bytes."""

_SMALL = 4096
"""Maximum size in bytes of a record other than a tensor or the pickle, such as a version"""
_SCALAR = 8
"""Maximum size in bytes of a storage that counts as a scalar, such as Adam's step"""
_SAVE_AGAIN = "save it again uncompressed: torch.save(torch.load(FILE, weights_only=False), FILE)"
_SAVE_NEW = "save it again with a current torch: torch.save(torch.load(FILE), FILE)"
_LEGACY = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""The number that files from before torch 1.6 begin with, pickled, after the protocol"""


@dataclass(frozen=True, slots=True)
class TorchFile:
    """A decoded file."""

    tree: Any
    archive: str | None = None
    """The archive's name: torch uses the stem of the file's name when it was saved, or ``archive``; None if unknown"""


@dataclass(frozen=True, slots=True)
class Undecoded:
    """A closed file that is not decoded yet."""

    decode: Callable[[], TorchFile]
    """Raises what `read_torch_file` raises"""
    archive: str | None = None
    """See `TorchFile.archive`"""
    key: bytes | None = None
    """Equal for files that differ only in their names and in tensors of more than 8 bytes; None if unknown"""


def read_torch_file(
    root: Path, path: str, where: str, any_names: bool = False, allowed: Mapping[str, Collection[str]] = ALLOWED
) -> TorchFile:
    """Decode the pickle of ``root/path`` and locate its storages; no tensor byte is read.

    ``any_names`` permits names that are not on the list ``allowed``: only for a file whose tree is not written
    anywhere.
    Raises SourceError for a damaged file or another format, and UnsafePickle for globals not on the allow-list.
    """
    with open_source(root / path, where) as file:
        return decode_torch_file(file, path, where, any_names, allowed)


def decode_torch_file(
    file: SourceFile, path: str, where: str, any_names: bool = False, allowed: Mapping[str, Collection[str]] = ALLOWED
) -> TorchFile:
    """Decode an open file, or a `Window` of one; extents are those of the whole file. See `read_torch_file`."""
    first = file.start if isinstance(file, Window) else 0
    return _parse(Buffered(file), where).decode(path, first, where, any_names, allowed)


def check_torch_file(file: SourceFile, where: str) -> None:
    """Check all of an open file but its pickle and its tensors. Raises what `read_torch_file` raises."""
    _parse(Buffered(file), where)


def open_torch_file(root: Path, path: str, where: str) -> Undecoded:
    """Read ``root/path`` as far as needed to tell whether it is like another file. Raises as `read_torch_file`."""
    with open_source(root / path, where) as source:
        file = Buffered(source)
        if (data := _read_headers_only(file)) is None:
            parsed = _parse(file, where)
            return Undecoded(lambda: parsed.decode(path, 0, where), parsed.archive, parsed.key())
    archive, key = _key_of(*data)
    return Undecoded(lambda: decode_torch_file(InMemoryFile(data[0], where), path, where), archive, key)


@dataclass(frozen=True, slots=True)
class _Parsed:
    archive: str
    pickle: bytes
    storages: Mapping[str, tuple[int, int]]
    """Key -> first byte and end"""
    scalars: bytes
    """The content of all storages of up to 8 bytes"""

    def key(self) -> bytes:
        return hashlib.sha256(repr((self.storages, self.scalars, self.pickle)).encode()).digest()

    def decode(
        self,
        path: str,
        first: int,
        where: str,
        any_names: bool = False,
        allowed: Mapping[str, Collection[str]] = ALLOWED,
    ) -> TorchFile:
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

        tree = read_pickle(self.pickle, where, find_storage, any_names, allowed=allowed)
        return TorchFile(tree, self.archive)


def _parse(file: SourceFile, where: str) -> _Parsed:
    """Check all of a file but its tensors, and return what is needed to decode it. Raises as `read_torch_file`."""
    try:
        records = read_records(file)
        prefix = next(iter(records), "").partition("/")[0]
        tree = records.get(f"{prefix}/data.pkl")
        if tree is None:
            raise BadZip("it has no data.pkl")
        if f"{prefix}/constants.pkl" in records:
            raise BadZip("it is a TorchScript archive, which torch.load would run")
        if not {f"{prefix}/version", f"{prefix}/.data/version"} & records.keys():
            raise BadZip("it does not state its version, which torch needs to load it")
        if tree.stop - tree.start > MAX_PICKLE_BYTES:
            raise BadZip(f"its data.pkl has {tree.stop - tree.start:,} bytes; it may be a pickle bomb")
    except DeflatedRecords as error:
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
    return _Parsed(prefix, pickle_bytes, storages, b"".join(scalars))


def read_attributes(root: Path, path: str, where: str) -> dict[Any, Any]:
    """Return the attributes of the object that ``root/path`` pickles, as data; the object is never created.

    Raises SourceError for a damaged file, or one of another format or content.
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
Content = tuple[bytes, Sequence[tuple[Segment, ...]]]
"""A file's pickle, and what its storages consist of"""


class TorchLayout(FileLayout):
    """A file that can be laid out again around other content of its storages; ``make`` is called when it is needed."""

    def __init__(self, path: str, make: Callable[[], Content]):
        self._archive = Path(path).stem
        self._make = make
        super().__init__(path, lambda: _zip(self._archive, *make(), as_torch=True))

    def filled(self, fill: Fill) -> FileLayout:
        """Return the layout with every piece replaced, each storage placed so that it can share blocks."""

        def pieces() -> tuple[Segment, ...]:
            pickled, storages = self._make()
            return _zip(self._archive, pickled, [fill_all(content, fill) for content in storages])

        return FileLayout(self.path, pieces)


def lay_out_torch_file(path: str, tree: Any) -> TorchLayout:
    """Return the layout of a file that ``torch.load`` opens as ``tree``.

    Storages from `read_torch_file` keep their bytes; those of `make_tensor` have the content they were created with.
    """
    content = pickle_content(path, tree)
    return TorchLayout(path, lambda: content)


def lay_out_torch_blob(path: str, tree: Any) -> tuple[Segment, ...]:
    """Return the pieces of a file that ``torch.load`` opens as ``tree``, to be placed in another file.

    Alignment counts from the start of the blob, as torch writes it, and so do its checksums.
    """
    return _zip("archive", *pickle_content(path, tree), as_torch=True)


def place_torch_blob(content: Content, at: int) -> list[Segment]:
    """Return the pieces of a file around a pickle and its storages, to be placed at byte ``at`` of another file."""
    pieces = _zip("archive", *content, as_torch=True)
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
    archive: str, pickled: bytes, storages: Sequence[tuple[Segment, ...]], as_torch: bool = False
) -> tuple[Segment, ...]:
    """Return the pieces of a file. Unless ``as_torch``, storages are placed where they can share blocks.

    If a file states its version and alignment, torch may compute where storages are (with ``map_location`` "meta", for
    instance). A file with other places states neither, like those of older torch, so torch reads the places from it.
    """
    name = archive.encode() + b"/"
    if all(type(piece) is Bytes for content in storages for piece in content):
        parts = _between_names(len(name), pickled, tuple(storages))
        if parts is not None:
            return (Bytes(name.join(parts), _HEADERS),)
    return _zip_as(name, pickled, storages, as_torch)


@lru_cache(16)
def _between_names(length: int, pickled: bytes, storages: tuple[tuple[Segment, ...], ...]) -> list[bytes] | None:
    """Return the bytes between the occurrences of the archive's name, of ``length`` bytes, in a file of literals.

    ZeRO-3 ranks have thousands of files with the same pickle and no tensors. None if the pickle also has such bytes.
    """
    name = b"\xff" * (length - 1) + b"/"
    [whole] = _zip_as(name, pickled, storages, as_torch=True)
    assert isinstance(whole, Bytes), "a file of literals is one"
    parts = whole.data.split(name)
    records = len(storages) + _OTHER_RECORDS
    return parts if len(parts) == 2 * records + 1 else None


def _zip_as(
    name: bytes, pickled: bytes, storages: Sequence[tuple[Segment, ...]], as_torch: bool
) -> tuple[Segment, ...]:
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
        """The archive's name, with a slash"""
        self.pieces: list[Segment] = []
        self.literal: list[bytes] = []
        self.at = 0
        self.directory: list[tuple[bytes, int, int, int, Segment | Bytes]] = []

    def put(self, piece: Segment) -> None:
        if isinstance(piece, Bytes):  # thousands of headers may follow each other
            self.literal.append(piece.data)
        elif piece.num_bytes:
            if self.literal:
                self.flush()
            self.pieces.append(piece)
        self.at += piece.num_bytes

    def put_all(self, content: Sequence[Segment], size: int) -> None:
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

    def add(self, record: str, content: tuple[Segment, ...], start: int | None = None) -> None:
        """Append a record: local header, data, data descriptor.

        The data starts at ``start`` modulo `BLOCK_BYTES`, or else at a multiple of `ALIGNMENT`.
        """
        name, size, header_at = self.name + record.encode(), sum([part.num_bytes for part in content]), self.at
        big = size >= _U32
        zip64 = struct.pack("<HHQQ", 1, 16, size, size) if big else b""
        bare = self.at + _LOCAL.size + len(name) + len(zip64) + 4
        padding = -bare % ALIGNMENT if start is None else (start - bare) % BLOCK_BYTES
        short = _U32 if big else 0  # the data descriptor has the sizes; zip64 readers look in the extra field
        header = _LOCAL.pack(
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

    def checksum(self, start: int, content: tuple[Segment, ...]) -> Segment:
        """Return a record's CRC: known now if all its bytes are, otherwise computed while they stream."""
        if all(isinstance(part, (Bytes, Zeros)) for part in content):
            crc = 0
            for part in content:
                crc = zlib.crc32(part.data if isinstance(part, Bytes) else bytes(part.num_bytes), crc)
            return Bytes(struct.pack("<I", crc), "CRC-32")
        return Crc(start, self.at)

    def finish(self) -> tuple[Segment, ...]:
        start = self.at
        for name, size, header_at, version, crc in self.directory:
            wide = [value for value in (size, size, header_at) if value >= _U32]
            extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
            head = struct.pack("<4sHHHHHH", b"PK\x01\x02", 45 if wide else 0, version, 0x0808, 0, 0, 0)
            self.put(Bytes(head, "zip entry"))
            self.put(crc)
            short = min(size, _U32)
            rest = struct.pack("<IIHHHHHII", short, short, len(name), len(extra), 0, 0, 0, 0, min(header_at, _U32))
            self.put(Bytes(rest + name + extra, "zip entry"))
        size, count, zip64_at = self.at - start, len(self.directory), self.at
        end64 = _END64.pack(b"PK\x06\x06", _END64.size - 12, 45, 45, 0, 0, count, count, size, start)
        locator, short = _LOCATOR.pack(b"PK\x06\x07", 0, zip64_at, 1), min(count, _U16)
        end = _END.pack(b"PK\x05\x06", 0, 0, short, short, min(size, _U32), min(start, _U32), 0)
        self.put(Bytes(end64 + locator + end, "zip end records"))
        self.flush()
        return tuple(self.pieces)


def list_records(root: Path, path: str, where: str) -> tuple[ZipRecord, ...]:
    """Return the records of ``root/path`` in the order of their bytes. Raises SourceError for a damaged zip."""
    with open_source(root / path, where) as file:
        return _records_in(file, where)


def list_blob_records(root: Path, path: str, blobs: Iterable[tuple[int, int]], where: str) -> tuple[ZipRecord, ...]:
    """Return the records of the zips at the byte ranges ``blobs`` of a file. Raises SourceError for a damaged zip."""
    with open_source(root / path, where) as file:
        return tuple(
            ZipRecord(record.name, start + record.start, start + record.stop, record.crc)
            for start, stop in blobs
            for record in _records_in(Buffered(Window(file, start, min(stop, file.num_bytes))), where)
        )


def _records_in(file: SourceFile, where: str) -> tuple[ZipRecord, ...]:
    try:
        found = read_records(file, may_be_deflated=True)
    except (BadZip, UnicodeDecodeError) as error:
        raise _no_zip(file, where, error) from error
    return tuple(sorted(found.values(), key=lambda record: record.start))


T = TypeVar("T")
_HEADERS_ONLY = 512
"""A file with at most this number of bytes per record consists of headers."""
_AHEAD = 2048
"""Enough for what precedes the elements in a blob"""
_HASH = "/.data/serialization_id"
_CRC_IN_DESCRIPTOR = 4
"""Where the checksum is in the data descriptor, which follows the elements"""
_NAME_AT = 30
"""Where the name of the first record is: after the fixed part of a zip's local header, whose bytes 26 and 27 have its
length"""


def _blanked(data: bytes, spans: Iterable[tuple[int, int]]) -> bytes:
    blank = bytearray(data)
    for begin, end in spans:
        blank[begin:end] = bytes(end - begin)
    return bytes(blank)


@dataclass(frozen=True, slots=True)
class _Form(Generic[T]):
    """What similar blobs have in common."""

    head: bytes
    """What precedes the elements"""
    tail: bytes
    """What follows them, with zeros for what differs"""
    differing: tuple[tuple[int, int], ...]
    """The spans of the tail that differ: checksums, and what is in `hashes`"""
    hashes: tuple[tuple[int, int, int], ...]
    """Records that state a hash of the whole blob: begin, end, and where their own CRC-32 is"""
    found: T

    def is_like(self, tail: bytes) -> bool:
        return _blanked(tail, self.differing) == self.tail and all(
            zlib.crc32(tail[begin:end]) == int.from_bytes(tail[at : at + 4], "little") for begin, end, at in self.hashes
        )


class AlikeBlobs(Generic[T]):
    """What was found in blobs of one tensor each, by all of their bytes except the elements and their checksums.

    FSDP ranks write hundreds of thousands of blobs, in a few hundred forms.
    """

    def __init__(self) -> None:
        self._forms: dict[int, list[_Form[T]]] = {}
        """By the size of the blobs"""
        self._file: SourceFile | None = None
        self._read: tuple[int, bytes] = (0, b"")
        """The last bytes read of it, and where they begin"""

    def find(self, file: SourceFile, start: int, stop: int) -> T | None:
        """Return what was added for a similar blob; this one is bytes ``start``..``stop`` of ``file``."""
        for form in self._forms.get(stop - start, ()):
            has_head = self._bytes(file, start, start + len(form.head)) == form.head
            if has_head and form.is_like(self._bytes(file, stop - len(form.tail), stop)):
                return form.found
        return None

    def add(self, blob: Window, found: T) -> None:
        """Add what was found in a blob, unless it has several tensors."""
        records = read_records(Buffered(blob))
        storages = [one for name, one in records.items() if name.partition("/")[2].startswith("data/")]
        if len(storages) != 1:
            return
        [elements] = storages
        first = elements.stop
        hashes = [one for name, one in records.items() if name.endswith(_HASH) and one.start > first]
        spans = [(one.start, one.stop) for one in hashes]
        for one in (elements, *hashes):
            spans += [(one.stop + _CRC_IN_DESCRIPTOR, one.stop + _CRC_IN_DESCRIPTOR + 4), (one.crc_at, one.crc_at + 4)]
        differing = tuple((begin - first, end - first) for begin, end in spans)
        form = _Form(
            blob.read(0, elements.start),
            _blanked(blob.read(first, blob.num_bytes), differing),
            differing,
            tuple((one.start - first, one.stop - first, one.crc_at - first) for one in hashes),
            found,
        )
        self._forms.setdefault(blob.num_bytes, []).append(form)

    def _bytes(self, file: SourceFile, start: int, stop: int) -> bytes:
        """Read bytes, with some more: after a blob's end the next one begins."""
        at, data = self._read
        if self._file is not file or start < at or stop > at + len(data):
            at, data = self._read = start, file.read(start, min(stop + _AHEAD, file.num_bytes))
            self._file = file
        return data[start - at : stop - at]


def _read_headers_only(file: SourceFile) -> tuple[bytes, int] | None:
    """Return all bytes of a file, and its number of records, if most are of headers or of the pickle in front."""
    try:
        start, stop, count = find_directory(file)
        name, size, *_ = next(_entries(file.read(start, stop), count), (b"", 0))
    except BadZip:
        return None
    pickled = size if name.endswith(b"/data.pkl") else 0
    if start > min(count * _HEADERS_ONLY + pickled, MAX_PICKLE_BYTES):
        return None
    return file.read(0, file.num_bytes), count


def _key_of(data: bytes, count: int) -> tuple[str, bytes | None]:
    """Return the archive's name, and what identifies the bytes apart from it; None if they also hold it elsewhere."""
    length = int.from_bytes(data[26:28], "little")
    name = data[_NAME_AT : _NAME_AT + length].partition(b"/")[0] + b"/"
    nameless = b"\xff" * len(name)
    if data.count(name) != 2 * count or nameless in data:
        return name[:-1].decode(errors="replace"), None
    return name[:-1].decode(errors="replace"), hashlib.sha256(data.replace(name, nameless)).digest()
