"""Whole files that an output has unchanged, as hard links to a source: only when asked for.

A link is the source's file under a second name, so whatever later changes one changes the other. Only files of tensors
are linked: small files are edited by hand, and rewritten by a training. A file is linked first and compared through its
new name, so nothing can come between the two.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from llmtailor.checkpoint.layout import Blend, Bytes, Cast, Copy, Crc, FileLayout, Slot, Zeros
from llmtailor.engine.filled import Filled
from llmtailor.engine.pool import Stop
from llmtailor.engine.streams import Output, Sources, cannot_read, changed
from llmtailor.storage.checksums import crc32, new_digest
from llmtailor.storage.listing import FileFact
from llmtailor.storage.local import read_into, try_link

logger = logging.getLogger(__name__)


class NoLinks(Exception):
    """The system can't link the output's file to the source's."""


@dataclass(frozen=True, slots=True)
class LinkedTo:
    """The source file that an output file is a link to."""

    source: int
    """Position in `Plan.sources`"""
    path: str
    before: FileFact
    """The file as indexed"""
    after: FileFact
    """As linked, which changes its ctime"""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LinkedTo:
        """Return what `dataclasses.asdict` made data of."""
        return cls(data["source"], data["path"], FileFact(**data["before"]), FileFact(**data["after"]))


@dataclass(frozen=True, slots=True)
class LinkedFile:
    """A file that was linked, and read once."""

    filled: Filled
    digest: str | None
    """XXH3 of the file, if requested"""
    source: LinkedTo | None
    """None if the file's metadata had changed since it was indexed"""


class Settings(Protocol):
    """What is used of `copy.Context`."""

    @property
    def on_progress(self) -> Callable[[int], None]: ...
    @property
    def digest(self) -> bool: ...
    @property
    def stop(self) -> Stop: ...


def unchanged_from(file: FileLayout) -> Copy | None:
    """Return the first copied piece of a file of tensors, if all its copied bytes keep their place in one source file.

    Whether the file is as long, and has the same headers, the bytes tell.
    """
    first: Copy | None = None
    has_tensors, at = False, 0
    for piece in file.pieces:
        if isinstance(piece, Copy):
            first = first or piece
            if (piece.extent.start, piece.extent.path, piece.source) != (at, first.extent.path, first.source):
                return None
            has_tensors = has_tensors or piece.state is not None
        elif isinstance(piece, (Cast, Blend, Slot)):
            return None
        at += piece.num_bytes
    return first if has_tensors else None


def link_file(
    file: FileLayout, target: Path, sources: Sources, facts: Mapping[str, FileFact], settings: Settings
) -> LinkedFile | None:
    """Make ``target`` a durable link to the source's file that has all the bytes of an output file, if there is one.

    Raises NoLinks where the system can't link, SourceError if the source has changed, OSError, and Interrupted.
    """
    first = unchanged_from(file)
    if first is None or sources.is_remote(first) or sources.store_of(first) is not None:
        return None
    where, original = sources.where(first), sources.open(first)
    before = os.fstat(original.fd)
    try:
        if before.st_size != file.num_bytes or not _has_literals(original.fd, file):
            return None
    except OSError as error:
        raise cannot_read(where, error) from error
    if not try_link(Path(where), target):
        logger.info("%s: it is unchanged, but no link to %s is possible", file.path, where)
        raise NoLinks
    fd = os.open(target, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if not os.path.sameopenfile(fd, original.fd):
            target.unlink()
            raise changed(where)
        filled, output = Filled(file), Output(fd, settings.on_progress, new_digest() if settings.digest else None)
        try:
            is_same = _read(filled, output, settings.stop)
        except OSError as error:
            raise cannot_read(where, error) from error
        if not is_same:
            settings.on_progress(-output.at)
            target.unlink()
            return None
        os.fsync(fd)  # whoever wrote the source may not have done that
        as_indexed, as_linked = FileFact.of(before), FileFact.of(os.fstat(fd))
    finally:
        os.close(fd)
    is_known = facts.get(where) == as_indexed
    source = LinkedTo(first.source, first.extent.path, as_indexed, as_linked) if is_known else None
    return LinkedFile(filled, output.hexdigest(), source)


def _has_literals(fd: int, file: FileLayout) -> bool:
    """Whether an open file has the headers and zeros of a layout at their places."""
    for at, piece in file.placed():
        if isinstance(piece, (Bytes, Zeros)):
            wanted = piece.data if isinstance(piece, Bytes) else bytes(piece.num_bytes)
            found = bytearray(len(wanted))
            read_into(fd, at, memoryview(found))
            if found != wanted:
                return False
    return True


def _read(filled: Filled, output: Output, stop: Stop) -> bool:
    """Read a linked file for its checksums; return whether those that it states are right."""
    for piece in filled.plan.pieces:
        crc = output.take_over(piece.num_bytes, stop)
        if isinstance(piece, Crc) and crc != crc32(filled.ranges.crc_of(piece, filled.at).to_bytes(4, "little")):
            return False
        filled.add(piece, crc)
    return True
