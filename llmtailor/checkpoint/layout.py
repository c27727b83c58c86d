"""The layout of an output: what its files consist of, and which param groups its optimizer has. Pure.

A file consists of pieces that follow each other without a gap, so that every byte has one stated origin. A format lays
out its files with a `Slot` for each run of a state. The planner replaces slots by the bytes of sources, and returns a
plan. A plan is data: it can be printed, compared and hashed, and executed without another decision.

`regroup` rebuilds the param groups, layer by layer or as the two that the Trainer makes. A new group has the
hyperparameters of the old group that its params come from; if they come from several, these must agree. `arrange` alone
decides the order, for checkpoints and for training scripts.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.optimizer import NAME_KEYS, ParamGroup, differing
from llmtailor.checkpoint.placement import Extent, Grid
from llmtailor.errors import MismatchError, Problem, SourceError, some
from llmtailor.model.dtypes import ITEMSIZE, Encoding, size_of
from llmtailor.model.parts import ModelStructure, Part
from llmtailor.model.roles import State

T = TypeVar("T")
BLOCK_BYTES = 4096
"""The size of the blocks that file systems share between files (XFS and Btrfs by default). It is also a multiple of the
common sector sizes, as writes past the page cache need."""
MIN_PADDED_BYTES = 256 << 10
"""Content gets padding only if at least so many bytes can then be shared: padding is at most 1.6 % of a file."""
MIN_SHARED_BYTES = 64 << 10
"""Shorter ranges are copied: sharing them would fragment the file."""


@dataclass(frozen=True, slots=True)
class Bytes:
    """Literal bytes (headers, pickles, JSON), and why they are there."""

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
    encoding: Encoding | None = None
    """How to decode the source's bytes first; ``source_dtype`` is fp32 then"""

    @property
    def numel(self) -> int:
        return self.encoding.numel if self.encoding else self.extent.num_bytes // ITEMSIZE[self.source_dtype]

    @property
    def num_bytes(self) -> int:
        return size_of(self.dtype, self.numel)


class Strided(NamedTuple):
    """Rows of a state's elements, each in one or more runs of a source's files, cast like `Cast`."""

    grid: Grid
    source_dtype: str
    dtype: str
    source: int
    state: State
    scale: float = 1.0
    stride: int = 0
    """Elements from one row to the next in the state; 0 if they follow each other"""

    @property
    def begin(self) -> int:
        return self.grid.begin

    @property
    def numel(self) -> int:
        return self.grid.rows * self.grid.width

    @property
    def num_bytes(self) -> int:
        return size_of(self.dtype, self.numel)

    @property
    def reads(self) -> tuple[Copy, ...]:
        """The bytes of each band"""
        return tuple(Copy(extent, self.source) for extent in self.grid.extents)


@dataclass(frozen=True, slots=True)
class Term:
    """Elements of a source and their factor in a weighted sum."""

    extent: Extent
    source_dtype: str
    factor: float
    source: int
    encoding: Encoding | None = None
    """As of `Cast`"""


@dataclass(frozen=True, slots=True)
class Blend:
    """``numel`` elements of dtype ``dtype``: a weighted sum of as many elements of each term; zeros if there is none.

    The sum is computed in fp64 and rounded to fp32, then cast, so that a weight is bit for bit its rounded master. With
    ``refines``, the elements are the first term's bf16 values, with the digits of the second term where these fit
    (`storage.casts.refine`).
    """

    terms: tuple[Term, ...]
    numel: int
    dtype: str
    source: int
    """The source that these bytes count for in `Summary.moved`"""
    state: State
    begin: int
    refines: bool = False

    @property
    def num_bytes(self) -> int:
        return size_of(self.dtype, self.numel)

    @property
    def reads(self) -> tuple[Term, ...]:
        return self.terms


class Slot(NamedTuple):
    """Elements ``begin``..``end`` of a state, stored as ``dtype``; only in layouts."""

    state: State
    dtype: str
    begin: int
    end: int
    rows: int = 1
    """How many runs of as many elements these are; each begins ``stride`` elements after the one before"""
    stride: int = 0

    @property
    def num_bytes(self) -> int:
        return self.rows * size_of(self.dtype, self.end - self.begin)


@dataclass(frozen=True, slots=True)
class Crc:
    """Four bytes: the little-endian CRC-32 of bytes ``start``..``stop`` of the same file, all before it."""

    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return 4


Segment = Bytes | Zeros | Copy | Cast | Strided | Blend | Slot | Crc
Fill = Callable[[Segment], Iterable[Segment]]
"""Replaces a piece by others with as many bytes"""


def summed_parts(piece: Segment) -> tuple[int, int, int]:
    """Return of how many parts of a piece the checksums are computed, the bytes of each, and those from one to the next
    in the state: 0 for consecutive elements, which are one part."""
    if isinstance(piece, Strided) and piece.stride:
        return piece.grid.rows, piece.num_bytes // piece.grid.rows, piece.stride * ITEMSIZE[piece.dtype]
    return 1, piece.num_bytes, 0


def fill_all(pieces: Iterable[Segment], fill: Fill) -> tuple[Segment, ...]:
    return tuple(chain.from_iterable(map(fill, pieces)))


class FileLayout:
    """One output file: ``path`` relative to the checkpoint's root, and what it consists of.

    The pieces may be given as a function that always makes the same ones: a plan for a thousand ranks then takes only
    the memory of the files that are being written. Raises ValueError for a path that is not below the root, and for a
    checksum of bytes after it.
    """

    def __init__(self, path: str, pieces: tuple[Segment, ...] | Callable[[], Iterable[Segment]]):
        if not all(word not in ("", ".", "..") for word in path.split("/")):
            raise ValueError(f"not a path below the output: {path!r}")
        self.path = path
        self._pieces = pieces
        self._num_bytes: int | None = None
        if not callable(pieces):
            _ = self.num_bytes

    def _made(self) -> Iterable[Segment]:
        return self._pieces() if callable(self._pieces) else self._pieces

    def each(self) -> Iterator[Segment]:
        """Yield the pieces, without having all of them in memory if they are made now."""
        at = 0
        for piece in self._made():
            if type(piece) is Crc and piece.stop > at:
                raise ValueError(f"{self.path}: a checksum at byte {at} covers bytes after it: {piece}")
            at += piece.num_bytes
            yield piece
        self._num_bytes = at

    @property
    def pieces(self) -> tuple[Segment, ...]:
        return tuple(self.each()) if callable(self._pieces) else self._pieces

    @property
    def num_bytes(self) -> int:
        if self._num_bytes is None:
            deque(self.each(), maxlen=0)
        assert self._num_bytes is not None, "checking counts the bytes"
        return self._num_bytes

    def made(self) -> FileLayout:
        """Return the file with its pieces in memory, for code that needs them several times."""
        return FileLayout(self.path, self.pieces) if callable(self._pieces) else self

    def brief(self) -> Iterator[Segment]:
        """Yield what tells the plan from any other that has this file: all pieces, or, of what is in many files, those
        that stand for all. So the pieces of all files cover what is read from sources once."""
        return self.each()

    def placed(self) -> Iterator[tuple[int, Segment]]:
        """Yield each piece with its byte offset in the file."""
        at = 0
        for piece in self.each():
            yield at, piece
            at += piece.num_bytes

    def filled(self, fill: Fill) -> FileLayout:
        """Return the layout with every piece replaced. A container may adjust its padding to the new pieces."""
        return FileLayout(self.path, lambda: chain.from_iterable(map(fill, self._made())))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FileLayout) and (self.path, self.pieces) == (other.path, other.pieces)

    def __hash__(self) -> int:
        return hash((self.path, self.pieces))

    def __repr__(self) -> str:
        return f"FileLayout(path={self.path!r}, pieces={self.pieces!r})"


class LinkLayout(FileLayout):
    """A whole file of a source, which becomes a hard link to it; the pieces say which states are where."""

    def __init__(self, path: str, pieces: tuple[Segment, ...], checksum: int):
        super().__init__(path, pieces)
        self.checksum = checksum
        """See `containers.dcp.checksum_of_save`"""

    def filled(self, fill: Fill) -> LinkLayout:
        """Return itself: the pieces name their source already."""
        return self

    @property
    def copies(self) -> Iterator[Copy]:
        return (piece for piece in self.pieces if isinstance(piece, Copy))

    @property
    def origin(self) -> Copy:
        """Any of the pieces"""
        return next(self.copies)


def shareable_start(content: Iterable[Segment], alignment: int) -> int | None:
    """Return where content must start, modulo `BLOCK_BYTES`, to share most blocks with the files it is copied from.

    The start is a multiple of ``alignment``: file systems share a block only at the same offset in it. None if fewer
    than `MIN_PADDED_BYTES` could be shared.
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


def in_runs(items: Iterable[T], continues: Callable[[T, T], bool]) -> Iterator[list[T]]:
    """Yield the items in runs; each item of a run ``continues`` the one before it."""
    run: list[T] = []
    for item in items:
        if run and not continues(run[-1], item):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def consecutive(pieces: Iterable[Segment]) -> Iterator[list[Segment]]:
    """Yield the pieces in runs: copies that continue each other in one source file are a run, like any other piece."""
    return in_runs(pieces, _continues)


def whole_blocks(start: int, stop: int, at: int, block_bytes: int) -> tuple[int, int]:
    """Return which of the bytes ``start``..``stop`` of a file can be shared with another file at its byte ``at``.

    These are whole blocks in both files. If there are too few, the range is empty.
    """
    first = start + -at % block_bytes
    last = first + (stop - first) // block_bytes * block_bytes
    return (first, last) if (at - start) % block_bytes == 0 and last - first >= MIN_SHARED_BYTES else (start, start)


def _continues(one: Segment, other: Segment) -> bool:
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

    sources: tuple[Path | str, ...]
    """Folders, or the names of sources that are not folders"""
    files: tuple[FileLayout, ...]

    def path(self, source: int, name: str) -> Path:
        """Return the path of a source's file."""
        root = self.sources[source]
        return root / name if isinstance(root, Path) else Path(root, name)

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @property
    def links(self) -> tuple[LinkLayout, ...]:
        return tuple(file for file in self.files if isinstance(file, LinkLayout))

    @cached_property
    def summary(self) -> Summary:
        """Totals, from one pass over all pieces"""
        return _summarize(self)

    @property
    def shareable_bytes(self) -> int:
        """The bytes in blocks that the output can share with its sources, on a file system with reflinks"""
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
    """Source -> bytes of averages that it is part of, besides those counted for it in ``moved``"""
    unfilled: tuple[Slot, ...]
    """Slots that no source could fill; a plan with any can't be carried out"""


_LINES = 100


def _summarize(plan: Plan) -> Summary:
    digest = hashlib.sha256(repr(tuple(f"{one}" for one in plan.sources)).encode())
    moved: dict[tuple[str | None, int], int] = {}
    shared: Counter[int] = Counter()
    read: set[tuple[int, str]] = set()
    unfilled: list[Slot] = []
    names: dict[State, str] = {}
    for file in plan.files:
        lines = [f"{file.path!r}".encode(), *([b"link"] if isinstance(file, LinkLayout) else [])]
        for piece in file.brief():
            if len(lines) >= _LINES:  # the pieces of a file may take more memory than all else
                digest.update(b"\n".join([*lines, b""]))
                lines.clear()
            if type(piece) is Bytes:  # its data may be large, and a repr four times that
                lines += (b"Bytes %d" % len(piece.data), piece.data)
            elif type(piece) is Crc:
                lines.append(b"Crc %d %d" % (piece.start, piece.stop))
            elif isinstance(piece, (Copy, Cast)):
                extent, state, source = piece.extent, piece.state, piece.source
                path, start, stop = extent
                of = ""
                if state is not None:
                    of = names.get(state) or names.setdefault(state, f"{state.param!r} {state.kind!r}")
                lines.append(f"{source} {path!r} {start} {stop} {of} {piece.begin}".encode())
                if isinstance(piece, Cast):
                    lines.append(f"{piece.source_dtype} {piece.dtype} {piece.scale!r} {piece.encoding}".encode())
                key = (state.param if state else None, source)
                moved[key] = moved.get(key, 0) + (stop - start if type(piece) is Copy else piece.num_bytes)
                read.add((source, path))
            elif isinstance(piece, Strided):
                (begin, rows, width, bands), source_dtype, dtype, source, state, scale, stride = piece
                of = names.get(state) or names.setdefault(state, f"{state.param!r} {state.kind!r}")
                lines.append(f"{begin} {rows} {width} {source_dtype} {dtype} {source} {of} {scale!r} {stride}".encode())
                lines += [f"{path!r} {start} {size} {gap}".encode() for path, start, size, gap in bands]
                key = (state.param, source)
                moved[key] = moved.get(key, 0) + piece.num_bytes
                read.update((piece.source, band.path) for band in bands)
            elif isinstance(piece, Blend):
                lines.append(repr(piece).encode())
                key = (piece.state.param, piece.source)
                moved[key] = moved.get(key, 0) + piece.num_bytes
                if not piece.refines:
                    shared.update(dict.fromkeys({one.source for one in piece.terms} - {key[1]}, piece.num_bytes))
                read.update((one.source, one.extent.path) for one in piece.terms)
            elif isinstance(piece, Slot):
                unfilled.append(piece)
            else:
                lines.append(repr(piece).encode())
        digest.update(b"\n".join([*lines, f"{file.num_bytes}".encode(), b""]))
    return Summary(digest.hexdigest(), tuple(sorted(read)), moved, shared, tuple(unfilled))


KEEP, LAYER, DEFAULT, ONE = "keep", "layer", "default", "one"
CHOICES = (KEEP, LAYER, DEFAULT, ONE)

NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)", re.IGNORECASE)
"""Names that transformers 5.23 excludes from weight decay. It also excludes params inside an ``nn.LayerNorm``."""

_HYPER = frozenset(
    (
        *("lr", "initial_lr", "weight_decay", "betas", "eps", "amsgrad", "maximize", "foreach", "capturable"),
        *("differentiable", "fused", "decoupled_weight_decay", "bias_correction", "momentum", "base_momentum"),
        *("max_momentum", "max_lr", "min_lr"),
    )
)


@dataclass(frozen=True, slots=True)
class Regrouping:
    """New param groups, and their effects."""

    groups: tuple[ParamGroup, ...]
    from_group: tuple[int, ...]
    """For each new group, the old group whose entries in the scheduler's lists it takes."""
    notices: tuple[Problem, ...]


def regroup(
    base: CheckpointIndex, structure: ModelStructure, how: str, model_order: Sequence[str]
) -> Regrouping | None:
    """Return the new param groups of a composite; None if they are those of the base.

    ``model_order`` lists the params in the order of ``model.named_parameters()`` or of the model's state dict; it may
    include buffers and frozen params. Raises MismatchError if groups with different hyperparameters would be joined.
    """
    if how not in CHOICES:
        raise ValueError(f"no such grouping: {how}")
    if how == KEEP:
        return None
    old = {param: number for number, params in enumerate(base.group_params) for param in params}
    names = [name for name in dict.fromkeys(model_order) if name in old]
    if missing := old.keys() - set(names):
        what = f"the order of the model's params is unknown: it lacks {min(missing)}"
        raise SourceError.at(base.name, what, "copy the checkpoint again, or keep the groups (--groups keep)")
    decays = find_decaying(base)
    arranged = arrange(names, structure, decays, how)
    if arranged == list(base.group_params):
        return None
    origins = [sorted({old[name] for name in params}) for params in arranged]
    if how == ONE:
        base, notices = _with_one_decay(base)
    else:
        notices = _guesses(base, decays, how)
    _check_agreement(base, origins, how)
    groups = tuple(
        ParamGroup(params, _hyper_of(params, [base.groups[number].hyper for number in origin]))
        for params, origin in zip(arranged, origins, strict=True)
    )
    return Regrouping(groups, tuple(origin[0] for origin in origins), notices)


def arrange(
    names: Iterable[str], structure: ModelStructure, decays: Collection[str], how: str
) -> list[tuple[str, ...]]:
    """Return the param groups of trainable params, given in the order of the model, which each group keeps.

    ``default``: the params with weight decay, then those without. ``layer``: two groups for each part of the model,
    all groups without decay first; in each half the parts outside the layers, by name, then the layers. No group is
    empty. ``one``: all params in one group.
    """
    names = list(names)
    if how == ONE:
        return [tuple(names)]
    if how == DEFAULT:
        halves = ([name for name in names if name in decays], [name for name in names if name not in decays])
        return [tuple(half) for half in halves if half]
    groups: dict[tuple[bool, Part], list[str]] = {}
    for name in names:
        groups.setdefault((name in decays, structure.part_of[name]), []).append(name)

    def place(key: tuple[bool, Part]) -> tuple[bool, int, str]:
        number = key[1].layer
        return (key[0], -1, min(groups[key])) if number is None else (key[0], number, "")

    return [tuple(groups[key]) for key in sorted(groups, key=place)]


def find_decaying(base: CheckpointIndex) -> frozenset[str]:
    """Return the params that weight decay applies to.

    The groups show it if some have weight decay and others have none. Otherwise (the Trainer's default is 0 for all;
    one group from a DeepSpeed config decays as a whole) names and shapes decide by the Trainer's rule.
    """
    decays = [bool(group.hyper.get("weight_decay")) for group in base.groups]
    numbered = [(param, number) for number, params in enumerate(base.group_params) for param in params]
    if len(set(decays)) > 1:
        return frozenset(param for param, number in numbered if decays[number])
    vectors = [all(_is_vector(base, param) for param in params) for params in base.group_params]
    # If other groups contain matrices, a group of vectors only consists of norms and biases, whatever their names.
    split = not all(vectors)
    return frozenset(
        param for param, number in numbered if not (split and vectors[number]) and _decays_by_rule(base, param)
    )


def _is_vector(base: CheckpointIndex, param: str) -> bool:
    return len(base.params[param].shape) < 2


def _decays_by_rule(base: CheckpointIndex, param: str) -> bool:
    if NO_DECAY.search(param):
        return False
    # A vector with a bias of the same size: an nn.LayerNorm, such as GPT-2's ln_1.
    module, _, last = param.rpartition(".")
    bias = base.params.get(f"{module}.bias")
    return not (last == "weight" and _is_vector(base, param) and bias and bias.shape == base.params[param].shape)


def _with_one_decay(base: CheckpointIndex) -> tuple[CheckpointIndex, tuple[Problem, ...]]:
    """Return a base whose groups all have the weight decay of the first that has any, and a notice on the others."""
    values = [group.hyper.get("weight_decay") for group in base.groups]
    decay = next(filter(None, values), values[0])
    other = [param for group in base.groups for param in group.params if group.hyper.get("weight_decay") != decay]
    if not other:
        return base, ()
    groups = tuple(replace(group, hyper={**group.hyper, "weight_decay": decay}) for group in base.groups)
    what = f"weight decay {decay:g} applies to all params now, also to {some(other)}"
    notice = Problem(
        f"--groups {ONE}", what, "no action needed if the run that resumes has one group; its next steps differ"
    )
    return replace(base, groups=groups), (notice,)


def _guesses(base: CheckpointIndex, decays: frozenset[str], how: str) -> tuple[Problem, ...]:
    """Return a notice if the decaying params had to be guessed, and no group of the base confirms the guess."""
    cut = [params for params in base.group_params if 0 < sum(param in decays for param in params) < len(params)]
    if not cut:
        return ()
    values = ", ".join(sorted({f"{group.hyper.get('weight_decay')}" for group in base.groups}))
    what = (
        f"the weight decay of the groups of {base.name} ({values}) does not show which params it applies to; "
        "norms and biases are split off by the Trainer's naming rule and keep their weight decay"
    )
    return (Problem(f"--groups {how}", what, "compare with the groups of the run that will resume"),)


def _check_agreement(base: CheckpointIndex, origins: Sequence[Sequence[int]], how: str) -> None:
    """Raise MismatchError for every hyperparameter that has several values within a new group."""
    problems: dict[str, Problem] = {}
    for origin in origins:
        hypers = [base.groups[number].hyper for number in origin]
        for key in differing(hypers):
            if key not in problems and not _is_label(key, [hyper.get(key) for hyper in hypers]):
                other = next(n for n in origin if base.groups[n].hyper.get(key) != hypers[0].get(key))
                values = f"{hypers[0].get(key)} and {base.groups[other].hyper.get(key)}"
                what = f"its param groups {origin[0]} and {other} would become one, but differ in {key} ({values})"
                fix = f"keep the groups (--groups keep){', or --groups layer' if how == DEFAULT else ''}"
                problems[key] = Problem(base.name, what, fix)
    if problems:
        raise MismatchError(problems.values())


def _hyper_of(params: tuple[str, ...], hypers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the hyperparameters of a new group, without labels that differ between its old groups."""
    unlike = differing(hypers)
    merged = {key: value for key, value in hypers[0].items() if key not in unlike or key in NAME_KEYS}
    return {key: list(params) if key in NAME_KEYS else value for key, value in merged.items()}


def _is_label(key: str, values: Iterable[Any]) -> bool:
    """Whether a key only says what a group is (``layer: 3``, ``name: embed``), and does not affect the update."""
    if key in _HYPER:
        return False
    flat = [word for value in values for word in (value if isinstance(value, list) else [value])]
    return all(word is None or isinstance(word, str) or type(word) is int for word in flat)
