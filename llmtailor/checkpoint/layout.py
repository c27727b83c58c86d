"""What files consist of: pieces that follow each other without a gap, so that every byte has one stated origin.

A format lays out its files with a `Slot` for each run of a state. The planner replaces slots by the bytes of sources,
and returns a plan. A plan is data: it can be printed, compared and hashed, and executed without another decision.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from llmtailor.checkpoint.placement import Extent
from llmtailor.model.states import ITEMSIZE, State

BLOCK_BYTES = 4096
"""File systems share blocks of this size between files (XFS and Btrfs by default; a multiple of smaller ones).
Whole ones can also be written past the page cache: it is a multiple of the common sector sizes."""
MIN_PADDED_BYTES = 256 << 10
"""Content with fewer bytes that could be shared gets no padding for it, so that padding is at most 1.6 % of a file."""
MIN_SHARED_BYTES = 64 << 10
"""Shorter ranges are written: to share them would fragment the file."""


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes known now: headers, pickles, JSON; and why they are what they are."""

    data: bytes
    why: str

    @property
    def num_bytes(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True)
class Zeros:
    """Alignment, or the padding after a param (the source's padding is uninitialised memory)."""

    num_bytes: int
    why: str


class Copy(NamedTuple):  # like `Slot` made by the million, at half the cost of a dataclass
    """Bytes of a source, as they are."""

    extent: Extent
    source: int = -1
    """Position in `Plan.sources`; -1 in a layout stands for the base."""
    state: State | None = None
    """The state that these bytes belong to, and ``begin``, the first element; None for bytes of no state."""
    begin: int = 0

    @property
    def num_bytes(self) -> int:
        return self.extent.stop - self.extent.start


@dataclass(frozen=True, slots=True)
class Cast:
    """Elements of dtype ``dtype`` made from a source's elements of dtype ``source_dtype``, times ``scale``.

    The cast rounds to nearest even, which is bit for bit what DeepSpeed does with its masters. A scale other than 1
    is applied in fp64, before the one rounding.
    """

    extent: Extent
    source_dtype: str
    dtype: str
    source: int = -1
    state: State | None = None
    begin: int = 0
    scale: float = 1.0

    @property
    def numel(self) -> int:
        return self.extent.num_bytes // ITEMSIZE[self.source_dtype]

    @property
    def num_bytes(self) -> int:
        return self.numel * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class Term:
    """Elements of a source and their factor in a weighted sum."""

    extent: Extent
    source_dtype: str
    factor: float
    source: int


@dataclass(frozen=True, slots=True)
class Blend:
    """``numel`` elements of dtype ``dtype``: a weighted sum of as many elements of each term; zeros if there is none.

    The sum is computed in fp64 and rounded to fp32, then cast, so that a weight is bit for bit its rounded master.
    """

    terms: tuple[Term, ...]
    numel: int
    dtype: str
    source: int
    """The source that these bytes count for in `Summary.moved`"""
    state: State
    begin: int

    @property
    def num_bytes(self) -> int:
        return self.numel * ITEMSIZE[self.dtype]


class Slot(NamedTuple):
    """Elements ``begin``..``end`` of a state, stored as ``dtype``; only in layouts."""

    state: State
    dtype: str
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return (self.end - self.begin) * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class Crc:
    """Four bytes: the little-endian CRC-32 of bytes ``start``..``stop`` of the same file, all before it."""

    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return 4


Piece = Bytes | Zeros | Copy | Cast | Blend | Slot | Crc
Fill = Callable[[Piece], Iterable[Piece]]
"""Replaces a piece by others with as many bytes"""


def fill_all(pieces: Iterable[Piece], fill: Fill) -> tuple[Piece, ...]:
    return tuple(chain.from_iterable(map(fill, pieces)))


class FileLayout:
    """One output file: ``path`` relative to the checkpoint's root, and what it consists of.

    The pieces may be given as a function that makes them, always the same: a plan for a thousand ranks then takes no
    more memory than the pieces of the files that are written at the moment. Raises ValueError for a path that is not
    below the root, and for a checksum of bytes after it.
    """

    def __init__(self, path: str, pieces: tuple[Piece, ...] | Callable[[], tuple[Piece, ...]]):
        if not all(word not in ("", ".", "..") for word in path.split("/")):
            raise ValueError(f"not a path below the output: {path!r}")
        self.path = path
        self._pieces = pieces
        self._num_bytes: int | None = None
        if not callable(pieces):
            self._check(pieces)

    def _check(self, pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
        at = 0
        for piece in pieces:
            if type(piece) is Crc and piece.stop > at:
                raise ValueError(f"{self.path}: a checksum at byte {at} covers bytes after it: {piece}")
            at += piece.num_bytes
        self._num_bytes = at
        return pieces

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return self._check(self._pieces()) if callable(self._pieces) else self._pieces

    @property
    def num_bytes(self) -> int:
        if self._num_bytes is None:
            _ = self.pieces
        assert self._num_bytes is not None, "checking counts the bytes"
        return self._num_bytes

    def made(self) -> FileLayout:
        """Return the file with its pieces in memory, for one who needs them several times."""
        return FileLayout(self.path, self.pieces) if callable(self._pieces) else self

    def placed(self) -> Iterator[tuple[int, Piece]]:
        """Yield each piece with its byte offset in the file."""
        at = 0
        for piece in self.pieces:
            yield at, piece
            at += piece.num_bytes

    def filled(self, fill: Fill) -> FileLayout:
        """Return the layout with every piece replaced. A container may adjust its padding to the new pieces."""
        return FileLayout(self.path, lambda: fill_all(self.pieces, fill))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FileLayout) and (self.path, self.pieces) == (other.path, other.pieces)

    def __hash__(self) -> int:
        return hash((self.path, self.pieces))

    def __repr__(self) -> str:
        return f"FileLayout(path={self.path!r}, pieces={self.pieces!r})"


def shareable_start(content: Iterable[Piece], alignment: int) -> int | None:
    """Return where content must start, modulo `BLOCK_BYTES`, to share most blocks with the files it is copied from.

    File systems can share a block only between equal offsets in their blocks. The start is a multiple of ``alignment``.
    None if fewer than `MIN_PADDED_BYTES` could be shared.
    """
    num_bytes: dict[int, int] = {}
    at = 0
    for piece in content:
        length = piece.num_bytes
        if isinstance(piece, Copy):
            start = (piece.extent.start - at) % BLOCK_BYTES
            num_bytes[start] = num_bytes.get(start, 0) + length
        at += length
    able = {start: length for start, length in num_bytes.items() if start % alignment == 0}
    start = max(able, key=able.__getitem__, default=0)
    return start if able.get(start, 0) >= MIN_PADDED_BYTES else None


def consecutive(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Yield the pieces in runs: copies that continue each other in one source file are one run, any other piece is."""
    run: list[Piece] = []
    for piece in pieces:
        if run and _continues(run[-1], piece):
            run.append(piece)
        else:
            if run:
                yield run
            run = [piece]
    if run:
        yield run


def whole_blocks(start: int, stop: int, at: int, block_bytes: int) -> tuple[int, int]:
    """Return which of the bytes ``start``..``stop`` of a file another file can share if they are copied to its ``at``.

    These are the whole blocks, if they are whole blocks in both files. If there are too few, the range is empty.
    """
    first = start + -at % block_bytes
    last = first + (stop - first) // block_bytes * block_bytes
    return (first, last) if (at - start) % block_bytes == 0 and last - first >= MIN_SHARED_BYTES else (start, start)


def _continues(one: Piece, other: Piece) -> bool:
    return (
        isinstance(one, Copy)
        and isinstance(other, Copy)
        and one.source == other.source
        and one.extent.stop == other.extent.start
        and one.extent.path == other.extent.path
    )


@dataclass(frozen=True)
class Plan:
    """Every output file, and the folders that the pieces read from."""

    sources: tuple[str, ...]
    files: tuple[FileLayout, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @cached_property
    def summary(self) -> Summary:
        """What there is to know before the plan is carried out, from one pass over all pieces"""
        return _summarize(self)

    @property
    def shareable_bytes(self) -> int:
        """How many bytes are in blocks that the output can share with its sources, if the file system can"""
        total = 0
        for file in self.files:
            at = 0
            for run in consecutive(file.pieces):
                if isinstance(run[0], Copy) and isinstance(last := run[-1], Copy):
                    begin, end = whole_blocks(run[0].extent.start, last.extent.stop, at, BLOCK_BYTES)
                    total += end - begin
                at += sum(piece.num_bytes for piece in run)
        return total


@dataclass(frozen=True, slots=True)
class Summary:
    """A plan in total."""

    digest: str
    """SHA-256 of every piece with the folder it reads from, including literal bytes"""
    read: tuple[tuple[int, str], ...]
    """Every file that pieces read from: its source's position in `Plan.sources`, and its path; sorted"""
    moved: Mapping[tuple[str | None, int], int]
    """(Param, source) -> bytes of the output that are made from it; None for bytes of no state"""
    shared: Mapping[int, int]
    """Source -> bytes of the output that it is averaged into, besides those counted for it in ``moved``"""
    unfilled: tuple[Slot, ...]
    """Slots that no source could fill; a plan that has any can't be carried out"""


def _summarize(plan: Plan) -> Summary:
    digest = hashlib.sha256(repr(plan.sources).encode())
    moved: dict[tuple[str | None, int], int] = {}
    shared: Counter[int] = Counter()
    read: set[tuple[int, str]] = set()
    unfilled: list[Slot] = []
    for file in plan.files:
        lines: list[bytes] = []
        for piece in file.pieces:
            if isinstance(piece, (Copy, Cast)):
                extent, state, source = piece.extent, piece.state, piece.source
                path, start, stop = extent
                of = f"{state.param!r} {state.kind!r} {piece.begin}" if state else ""
                lines.append(f"{source} {path!r} {start} {stop} {of}".encode())
                if isinstance(piece, Cast):
                    lines.append(f"{piece.source_dtype} {piece.dtype} {piece.scale!r}".encode())
                key = (state.param if state else None, source)
                moved[key] = moved.get(key, 0) + piece.num_bytes
                read.add((source, path))
            elif isinstance(piece, Blend):
                lines.append(repr(piece).encode())
                key = (piece.state.param, piece.source)
                moved[key] = moved.get(key, 0) + piece.num_bytes
                shared.update(dict.fromkeys({one.source for one in piece.terms} - {key[1]}, piece.num_bytes))
                read.update((one.source, one.extent.path) for one in piece.terms)
            elif isinstance(piece, Bytes):  # its data may be large, and a repr four times that
                lines += (b"Bytes %d" % len(piece.data), piece.data)
            elif isinstance(piece, Slot):
                unfilled.append(piece)
            else:
                lines.append(repr(piece).encode())
        digest.update(b"\n".join([f"{file.path!r} {file.num_bytes}".encode(), *lines, b""]))
    return Summary(digest.hexdigest(), tuple(sorted(read)), moved, shared, tuple(unfilled))
