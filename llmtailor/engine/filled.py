"""How much of a file is there, and the checksums of what is."""

from __future__ import annotations

from collections.abc import Iterator

from llmtailor.checkpoint.layout import Crc, FileLayout, Piece
from llmtailor.storage.checksums import combine


class Filled:
    """The pieces that a file has so far, with their checksums."""

    def __init__(self, plan: FileLayout):
        self.plan = plan
        self.ranges = _Ranges(piece for piece in plan.pieces if isinstance(piece, Crc))
        self.crc = 0
        self.crcs: list[int] = []
        self.at = 0

    def missing(self) -> tuple[Piece, ...]:
        return self.plan.pieces[len(self.crcs) :]

    def add(self, piece: Piece, crc: int) -> None:
        self.ranges.add(self.at, crc, piece.num_bytes)
        self.crc = combine(self.crc, crc, piece.num_bytes)
        self.crcs.append(crc)
        self.at += piece.num_bytes


class _Ranges:
    """The CRC-32 of the ranges that checksum pieces need; they never overlap, and come in order."""

    def __init__(self, wanted: Iterator[Crc]):
        self.spans = sorted({(piece.start, piece.stop) for piece in wanted}, reverse=True)
        self.done: dict[tuple[int, int], int] = {}
        self.crc = 0

    def add(self, start: int, crc: int, length: int) -> None:
        while self.spans and self.spans[-1][1] <= start:
            self.done[self.spans.pop()] = self.crc
            self.crc = 0
        if self.spans and self.spans[-1][0] <= start:
            self.crc = combine(self.crc, crc, length)

    def crc_of(self, piece: Crc, at: int) -> int:
        self.add(at, 0, 0)
        return self.done[(piece.start, piece.stop)]
