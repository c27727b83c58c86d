"""What the files of a target shall look like, before it is known where their bytes come from.

A format lays out its files as segments that follow each other without a gap. The planner then turns
each `Slot` into the pieces that fill it.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmtailor.core.extents import Extent
from llmtailor.core.states import ITEMSIZE, State


@dataclass(frozen=True, slots=True)
class Literal:
    """Bytes known now: headers, pickles, JSON."""

    data: bytes
    why: str

    @property
    def num_bytes(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True)
class Fill:
    """Zeros: alignment, or the padding behind a param (the source's padding is uninitialised memory)."""

    num_bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class Carry:
    """Bytes of the base checkpoint, taken over as they are."""

    extent: Extent

    @property
    def num_bytes(self) -> int:
        return self.extent.num_bytes


@dataclass(frozen=True, slots=True)
class Slot:
    """Elements ``begin``..``end`` of a state, stored as ``dtype``."""

    state: State
    dtype: str
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return (self.end - self.begin) * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class ChecksumOf:
    """Four bytes: the little-endian CRC-32 of bytes ``start``..``stop`` of the same file, all in front."""

    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return 4


Segment = Literal | Fill | Carry | Slot | ChecksumOf


@dataclass(frozen=True, slots=True)
class FileLayout:
    """One output file: ``path`` relative to the checkpoint's root, and what it consists of."""

    path: str
    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        if not all(word not in ("", ".", "..") for word in self.path.split("/")):
            raise ValueError(f"not a path below the output: {self.path!r}")

    @property
    def num_bytes(self) -> int:
        return sum(segment.num_bytes for segment in self.segments)
