"""The slow, obvious executors: build whole files in memory."""

from __future__ import annotations

import zlib
from pathlib import Path

from llmtailor.checkpoint.layout import (
    Carry,
    Checksum,
    ChecksumOf,
    Copy,
    FileLayout,
    FilePlan,
    Fill,
    Inline,
    Literal,
    Zeros,
)


def render(layout: FileLayout, root: Path) -> bytes:
    """Fill a layout without slots; carried bytes come from files below ``root``."""
    out = bytearray()
    for segment in layout.segments:
        if isinstance(segment, Literal):
            out += segment.data
        elif isinstance(segment, Fill):
            out += bytes(segment.num_bytes)
        elif isinstance(segment, ChecksumOf):
            out += zlib.crc32(out[segment.start : segment.stop]).to_bytes(4, "little")
        else:
            assert isinstance(segment, Carry), segment
            out += (root / segment.extent.path).read_bytes()[segment.extent.start : segment.extent.stop]
    return bytes(out)


def render_plan(plan: FilePlan, roots: list[Path]) -> bytes:
    """Carry out a file's plan without conversions."""
    out = bytearray()
    for piece in plan.pieces:
        if isinstance(piece, Inline):
            out += piece.data
        elif isinstance(piece, Zeros):
            out += bytes(piece.stop - piece.start)
        elif isinstance(piece, Checksum):
            out += zlib.crc32(out[piece.over_start : piece.over_stop]).to_bytes(4, "little")
        else:
            assert isinstance(piece, Copy), piece
            data = (roots[piece.source] / piece.path).read_bytes()
            out += data[piece.offset : piece.offset + piece.stop - piece.start]
    return bytes(out)
