"""Fills the slots of a layout with the bytes of sources: a plan. Pure: no byte is read.

The pieces of a file are made when they are asked for. What does not depend on the file, which checkpoint supplies a
state and in which dtype, is looked up once per state.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.layout import Blend, Cast, Copy, FileLayout, Plan, Segment, Slot, Strided, Term
from llmtailor.checkpoint.placement import Absent, AllZero, Grid, Placement, Runs, arrange, columns, without
from llmtailor.checkpoint.sources import SourceRange, Sources, Weights
from llmtailor.model.dtypes import DIFFERENCES, PACKED
from llmtailor.model.roles import BUFFER, EXP_AVG, MASTER, MODULE, WEIGHT, State, is_moment


def plan_composite(
    layouts: Iterable[FileLayout],
    indexes: Sequence[CheckpointIndex],
    sources: Sources,
    base: int,
    scales: Mapping[tuple[State, int], float] = MappingProxyType({}),
) -> Plan:
    """Return the plan with every slot of every file filled by the bytes of sources.

    ``sources`` are positions in ``indexes``; ``base`` is the source of bytes copied unchanged. States in ``scales``
    that come from that source are multiplied by a factor. A slot that its source can't fill is left, see
    `checks.check_filled`.
    """
    filler = _Filler(indexes, sources, base, scales)
    roots = tuple(index.root for index in indexes)
    return Plan(roots, tuple(layout.filled(filler.fill) for layout in layouts))


@dataclass(frozen=True, slots=True)
class _Supply:
    """What supplies elements ``begin``..``end`` of a state."""

    begin: int
    end: int
    source: int
    place: Placement
    dtype: str
    stored_as: str
    """The dtype, or how elements are encoded"""
    numel: int
    """Of the whole state in the source; 0 if it does not hold it"""
    runs: Runs | None
    """The elements that the source holds; None if it holds all"""
    refined_by: tuple[int, Placement, str] | None = None
    """Source, place and dtype of more exact, older masters, if this has the bf16 values of masters"""

    def holds(self, begin: int, end: int) -> bool:
        return end <= self.numel and not (self.runs is not None and without(((begin, end),), self.runs))


def _refined(
    supply: _Supply, by: tuple[int, Placement, str], dtype: str, state: State, begin: int, end: int
) -> Iterator[Blend]:
    """Yield pieces that end where a fragment of either source does."""
    source, place, finer = by
    begins = {have.begin for one in (supply.place, place) for have in one.cover(begin, end)}
    for low, high in pairwise(sorted({begin, *begins, end})):
        [newest], [older] = supply.place.cover(low, high), place.cover(low, high)
        terms = (
            Term(newest.extent, supply.dtype, 1.0, supply.source, newest.encoding),
            Term(older.extent, finer, 1.0, source, older.encoding),
        )
        yield Blend(terms, high - low, dtype, supply.source, state, low, refines=True)


@dataclass(frozen=True, slots=True)
class _Filler:
    indexes: Sequence[CheckpointIndex]
    sources: Sources
    base: int
    scales: Mapping[tuple[State, int], float]
    known: dict[tuple[State, str], tuple[_Supply, ...]] = field(default_factory=dict)
    """(State, dtype) -> what supplies it, in the order of the elements"""

    def fill(self, slot: Segment) -> Sequence[Segment]:
        """Return what takes the place of a piece; the slot itself if its source can't fill it."""
        if type(slot) is not Slot:
            return (slot._replace(source=self.base) if type(slot) is Copy else slot,)
        state, dtype, first, last, rows, _ = slot
        if rows > 1:
            return self._rows(slot)
        if self.sources.sums and (found := self.sources.sum_of(state)) is not None:
            return self._sum(slot, *found)
        filled: list[Segment] = []
        for supply in self.known.get((state, dtype)) or self._of(state, dtype):
            begin = first if first > supply.begin else supply.begin
            end = last if last < supply.end else supply.end
            if begin >= end:
                continue
            if state.kind == BUFFER and supply.numel >= end - begin:
                # Each rank has its own buffers; a rank beyond the source's takes those of the source's ranks in turn.
                begin, end = begin % supply.numel, begin % supply.numel + end - begin
            if not supply.holds(begin, end):
                return [slot]
            source, scale = supply.source, self.scales.get((state, supply.source), 1.0)
            if supply.refined_by is not None and dtype != supply.stored_as:
                filled += _refined(supply, supply.refined_by, dtype, state, begin, end)
            elif isinstance(supply.place, AllZero):
                filled.append(Blend((), end - begin, dtype, source, state, begin))
            else:
                is_same = supply.stored_as == dtype and scale == 1
                for have in arrange(supply.place, begin, end):
                    if isinstance(have, Grid):
                        filled.append(Strided(have, supply.dtype, dtype, source, state, scale))
                    elif is_same:
                        filled.append(Copy(have.extent, source, state, have.begin))
                    else:
                        filled.append(
                            Cast(have.extent, supply.dtype, dtype, source, state, have.begin, scale, have.encoding)
                        )
        return filled

    def _rows(self, slot: Slot) -> Sequence[Segment]:
        """Return grids if one source holds all rows as they are, else the pieces of each row."""
        state, dtype, begin, end, rows, stride = slot
        last = end + (rows - 1) * stride
        if self.sources.sum_of(state) is None:
            supply, *others = self._of(state, dtype)
            is_direct = not (others or supply.refined_by or supply.stored_as in PACKED or dtype in PACKED)
            if is_direct and not isinstance(supply.place, AllZero) and supply.holds(begin, last):
                grids = columns(supply.place, begin, end - begin, rows, stride)
                scale = self.scales.get((state, supply.source), 1.0)
                return [Strided(grid, supply.dtype, dtype, supply.source, state, scale, stride) for grid in grids]
        row_slots = (slot._replace(begin=begin + at, end=end + at, rows=1) for at in range(0, rows * stride, stride))
        return [segment for row in row_slots for segment in self.fill(row)]

    def _of(self, state: State, dtype: str) -> tuple[_Supply, ...]:
        if (state, dtype) not in self.known:
            cuts = self.sources.cuts_of(state) or (SourceRange(0, sys.maxsize, self.sources.of(state)),)
            self.known[state, dtype] = tuple(self._supplies(state, dtype, cuts))
        return self.known[state, dtype]

    def _sum(self, slot: Slot, original: State, weights: Weights) -> Sequence[Segment]:
        """Return the pieces of a weighted sum: each ends where a fragment of any source does."""
        supplies = self.known.get((original, slot.dtype))
        if supplies is None:
            cuts = (SourceRange(0, sys.maxsize, source) for source, _ in weights)
            supplies = self.known[original, slot.dtype] = tuple(self._supplies(original, slot.dtype, cuts))
        if not all(supply.holds(slot.begin, slot.end) for supply in supplies):
            return [slot]
        begins = {have.begin for supply in supplies for have in supply.place.cover(slot.begin, slot.end)}
        filled: list[Segment] = []
        for begin, end in pairwise(sorted({slot.begin, *begins, slot.end})):
            terms = tuple(
                Term(have.extent, supply.dtype, factor, supply.source, have.encoding)
                for supply, (_, factor) in zip(supplies, weights, strict=True)
                for have in supply.place.cover(begin, end)
            )
            filled.append(Blend(terms, end - begin, slot.dtype, self.sources.of(slot.state), slot.state, begin))
        return filled

    def _supplies(self, state: State, dtype: str, cuts: Iterable[SourceRange]) -> Iterator[_Supply]:
        for cut in cuts:
            index, param = self.indexes[cut.source], state.param
            try:
                held = index.holding(state, dtype)
            except KeyError:
                found = index.partial.differences.get(index.tied.get(param, param))
                if found is None or state.kind not in (MASTER, WEIGHT, MODULE):
                    yield _Supply(cut.begin, cut.end, cut.source, Absent(), dtype, dtype, 0, None)
                    continue
                held = found.entry
            runs = None if held.is_whole else held.runs
            supply = _Supply(cut.begin, cut.end, cut.source, held.place, held.dtype, held.stored_as, held.numel, runs)
            if held.rounded_from and held.stored_as in ("BF16", *DIFFERENCES) and not is_moment(state.kind):
                yield from self._refined_supplies(state, supply)
            else:
                yield supply

    def _refined_supplies(self, state: State, supply: _Supply) -> Iterator[_Supply]:
        """Yield a supply of 16-bit masters, or of differences, with the more exact ones: those that they differ from,
        else those of the sources of the moments."""
        param = self.indexes[supply.source].tied.get(state.param, state.param)
        base = self.sources.bases.get((supply.source, param))
        cuts = self.sources.spans(State(param, EXP_AVG), supply.begin, min(supply.end, supply.numel))
        differs = supply.stored_as in DIFFERENCES
        if differs:
            if base is None:
                yield replace(supply, numel=0)  # which holds nothing
                return
            cuts = iter([SourceRange(supply.begin, min(supply.end, supply.numel), base)])
        for cut in cuts:
            finer = self.indexes[cut.source].held.get(State(param, MASTER))
            is_finer = finer is not None and cut.source != supply.source and finer.dtype != "BF16"
            held = finer is not None and not without(((cut.begin, cut.end),), finer.runs)
            by = (cut.source, finer.place, finer.dtype) if finer is not None and is_finer and held else None
            numel = 0 if differs and by is None else supply.numel
            yield replace(supply, begin=cut.begin, end=cut.end, refined_by=by, numel=numel)
