"""The directory of a zip file of stored records, read so strictly that every other reader finds the same records.

Readers of zip files differ: where they look for the end, how they treat bytes before the first record, which of two
equal names they use, whether case matters. A crafted file can show harmless content to one reader and an exploit to
``torch.load``. So the end records must end the file, the directory must directly precede them, the first record must
start the file, records must not overlap, and names must differ by more than case.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from llmtailor.storage.local import SourceFile

MAX_RECORDS = 1 << 20
"""A checkpoint's largest files have about 100,000 tensors."""
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


class Compressed(BadZip):
    """The error for a file with deflated records. ``torch.load`` reads them; here bytes are copied unchanged."""


@dataclass(frozen=True, slots=True)
class Record:
    """Bytes ``start``..``stop`` of the file."""

    name: str
    start: int
    stop: int
    crc: int | None
    """CRC-32; None for a deflated record, whose checksum is of other bytes, or one written without (torch writes 0)"""
    crc_at: int = 0
    """Where it is in the directory, counted from the start of the file"""


def read_records(file: SourceFile, may_be_deflated: bool = False) -> dict[str, Record]:
    """Return the records by name, in the order of the directory.

    Raises BadZip, `Compressed` for deflated records unless ``may_be_deflated``, or SourceError if reading fails.
    """
    start, stop, count = find_directory(file)
    if count > MAX_RECORDS:
        raise BadZip(f"it has {count:,} records, more than {MAX_RECORDS:,}")
    if stop - start > count * (_ENTRY.size + 2 * MAX_NAME_BYTES):
        raise BadZip(f"its directory of {count:,} records takes {stop - start:,} bytes")
    records: dict[str, Record] = {}
    spans = []
    for name, size, at, crc, is_deflated, crc_at in _entries(file.read(start, stop), count):
        if is_deflated and not may_be_deflated:
            raise Compressed(f"record {_shown(name)} is compressed")
        begin = _data_start(file, name, at, start)
        if begin + size > start:
            raise BadZip(f"record {_shown(name)} is not where the directory says")
        text = name.decode()
        if text in records:
            raise BadZip(f"record {_shown(name)} occurs twice")
        records[text] = Record(text, begin, begin + size, None if is_deflated else crc or None, start + crc_at)
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
            if end64_at != locator_at - _END64.size or disk or num_disks > 1:
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


def _check_names(records: dict[str, Record]) -> None:
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
