"""What the files of a target shall look like, before it is known where their bytes come from.

A format lays out its files as segments that follow each other without a gap. The planner then turns
each `Slot` into the pieces that fill it.

The plan: for every byte of every output file, where it comes from.

A plan is data. It can be printed, compared and hashed, and it can be executed without another decision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from llmtailor.checkpoint.placement import Extent
from llmtailor.model.states import FROZEN, ITEMSIZE, MASTER, MODULE, WEIGHT, State


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


@dataclass(frozen=True, slots=True)
class Cut:
    """Elements ``begin``..``end`` of a state come from ``source``, a position in `Plan.sources`."""

    begin: int
    end: int
    source: int


@dataclass(frozen=True, slots=True)
class Sources:
    """Which source each state comes from, as a position in `Plan.sources`."""

    of_name: Mapping[str, int]
    """Tensor name -> source, for all kinds of state."""
    of_weight: Mapping[str, int] = field(default_factory=dict)
    """Names whose weight, alone, comes from elsewhere."""
    cuts: Mapping[State, tuple[Cut, ...]] = field(default_factory=dict)
    """States whose elements come from several sources: cuts that tile each, in order. What is rounded from a master, or
    from a frozen value, is cut like that."""

    def of(self, state: State) -> int:
        if state.kind == WEIGHT and state.param in self.of_weight:
            return self.of_weight[state.param]
        return self.of_name[state.param]

    def of_any(self, name: str) -> set[int]:
        """Return every source that gives something of a tensor."""
        return self.of_states(name) | {self.of_weight.get(name, self.of_name[name])}

    def of_states(self, name: str) -> set[int]:
        """Return every source that gives something of a param's optimizer states."""
        own = (cut.source for state, cuts in self.cuts.items() if state.param == name for cut in cuts)
        return set(own) or {self.of_name[name]}

    def spans(self, state: State, begin: int, end: int) -> Iterator[Cut]:
        """Yield what elements ``begin``..``end`` of a state come from, in order."""
        cuts = self.cuts.get(state)
        for original in (MASTER, FROZEN) if state.kind in (WEIGHT, MODULE) else ():
            cuts = cuts or self.cuts.get(State(state.param, original))
        for cut in cuts or (Cut(begin, end, self.of(state)),):
            low, high = max(begin, cut.begin), min(end, cut.end)
            if low < high:
                yield Cut(low, high, cut.source)


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes ``start``..``stop`` are those of a source's file from ``offset`` on."""

    start: int
    stop: int
    source: int
    """Position in `Plan.sources`."""
    path: str
    offset: int
    state: State | None = None
    """The state these bytes belong to, and ``begin``, the first element; None for bytes of no state."""
    begin: int = 0


@dataclass(frozen=True, slots=True)
class Convert:
    """Elements of dtype ``dtype`` made from a source's elements of dtype ``source_dtype``, times ``scale``.

    The cast rounds to nearest even, which is bit for bit what DeepSpeed does with its masters. A scale other than 1
    is applied in fp64, before the one rounding.
    """

    start: int
    stop: int
    source: int
    path: str
    offset: int
    source_dtype: str
    dtype: str
    state: State | None = None
    begin: int = 0
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Inline:
    """Literal bytes, and why they are what they are."""

    start: int
    data: bytes
    why: str

    @property
    def stop(self) -> int:
        return self.start + len(self.data)


@dataclass(frozen=True, slots=True)
class Zeros:
    start: int
    stop: int
    why: str


@dataclass(frozen=True, slots=True)
class Checksum:
    """Four bytes: the little-endian CRC-32 of bytes ``over_start``..``over_stop`` of this file."""

    start: int
    over_start: int
    over_stop: int

    @property
    def stop(self) -> int:
        return self.start + 4


Piece = Copy | Convert | Inline | Zeros | Checksum


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One output file. Its pieces tile it exactly: no hole and no overlap."""

    path: str
    num_bytes: int
    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        at = 0
        for piece in self.pieces:
            if piece.start != at or piece.stop < at:
                raise ValueError(f"{self.path}: the pieces leave a hole or overlap at byte {at}: {piece}")
            if isinstance(piece, Checksum) and piece.over_stop > piece.start:
                raise ValueError(f"{self.path}: a checksum at byte {at} covers bytes behind it: {piece}")
            at = piece.stop
        if at != self.num_bytes:
            raise ValueError(f"{self.path}: the pieces end at byte {at} of {self.num_bytes}")


@dataclass(frozen=True, slots=True)
class Plan:
    """Every output file, and the folders that the pieces read from."""

    sources: tuple[str, ...]
    files: tuple[FilePlan, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)
