"""The records of a ``torch.save`` file, with the checksums that stand in its directory; no pickle is decoded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llmtailor.codes import Code
from llmtailor.errors import SourceError
from llmtailor.formats.zip_directory import BadZip, read_records
from llmtailor.io.sources import open_source

_FIX = "copy the file again from where it was saved, or leave this checkpoint out"


@dataclass(frozen=True, slots=True)
class Record:
    """Bytes ``start``..``stop`` of the file."""

    name: str
    start: int
    stop: int
    crc: int | None
    """CRC-32; None for a record that was written without, or deflated."""


def list_records(root: Path, path: str, where: str) -> tuple[Record, ...]:
    """List the records of ``root/path`` in the order of their bytes. Raises SourceError for what is no whole zip."""
    with open_source(root / path, where) as file:
        try:
            found = read_records(file, may_be_deflated=True)
        except (BadZip, UnicodeDecodeError) as error:
            raise SourceError.at(
                where, f"the file is truncated or damaged ({error})", _FIX, Code.FILE_DAMAGED
            ) from error
    # torch writes 0 for records it was told not to checksum
    records = (Record(name, record.start, record.stop, record.crc or None) for name, record in found.items())
    return tuple(sorted(records, key=lambda record: record.start))
