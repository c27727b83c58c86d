"""The slow, obvious executor: builds whole files in memory."""

from __future__ import annotations

import zlib
from pathlib import Path

from llmtailor.checkpoint.layout import (
    Bytes,
    Copy,
    Crc,
    FileLayout,
    Zeros,
)


def render(layout: FileLayout, *roots: Path) -> bytes:
    """Fill a layout or a plan without slots and casts; bytes are copied from files below ``roots``, by source."""
    out = bytearray()
    for piece in layout.pieces:
        if isinstance(piece, Bytes):
            out += piece.data
        elif isinstance(piece, Zeros):
            out += bytes(piece.num_bytes)
        elif isinstance(piece, Crc):
            out += zlib.crc32(out[piece.start : piece.stop]).to_bytes(4, "little")
        else:
            assert isinstance(piece, Copy), piece
            out += (roots[piece.source] / piece.extent.path).read_bytes()[piece.extent.start : piece.extent.stop]
    return bytes(out)
