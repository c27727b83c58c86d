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
from llmtailor.checkpoint.layout import Blend, Cast, Copy, FileLayout, Piece, Plan, Slot, Term
from llmtailor.checkpoint.placement import Absent, Placement
from llmtailor.checkpoint.sources import Cut, Sources, Weights
from llmtailor.model.states import BUFFER, State
from llmtailor.storage.stand_in import location_of


def plan_composite(
    layouts: Iterable[FileLayout],
    indexes: Sequence[CheckpointIndex],
    sources: Sources,
    base: int,
    scales: Mapping[State, float] = MappingProxyType({}),
) -> Plan:
    """Return the plan with every slot of every file filled by the bytes of sources.

    ``sources`` are positions in ``indexes``; ``base`` is the source of bytes copied unchanged. States in ``scales`` are
    multiplied by a factor. A slot that its source can't fill is left, see `checks.check_filled`.
    """
    filler = _Filler(indexes, sources, base, scales)
    roots = tuple(location_of(index.root) for index in indexes)
    return Plan(roots, tuple(layout.filled(filler.fill) for layout in layouts))


@dataclass(frozen=True, slots=True)
class _Supply:
    """What supplies elements ``begin``..``end`` of a state."""

    begin: int
    end: int
    source: int
    place: Placement
    dtype: str
    numel: int
    """Of the whole state in the source; 0 if it does not hold it"""


@dataclass(frozen=True, slots=True)
class _Filler:
    indexes: Sequence[CheckpointIndex]
    sources: Sources
    base: int
    scales: Mapping[State, float]
    known: dict[tuple[State, str], tuple[_Supply, ...]] = field(default_factory=dict)
    """(State, dtype) -> what supplies it, in the order of the elements"""

    def fill(self, slot: Piece) -> Sequence[Piece]:
        """Return what takes the place of a piece; the slot itself if its source can't fill it."""
        if type(slot) is not Slot:
            return (replace(slot, source=self.base) if type(slot) is Copy else slot,)
        state, dtype = slot.state, slot.dtype
        if (found := self.sources.sum_of(state)) is not None:
            return self._sum(slot, *found)
        supplies = self.known.get((state, dtype))
        if supplies is None:
            cuts = self.sources.cuts_of(state) or (Cut(0, sys.maxsize, self.sources.of(state)),)
            supplies = self.known[state, dtype] = tuple(self._supplies(state, dtype, cuts))
        scale = self.scales.get(state, 1.0)
        filled: list[Piece] = []
        for supply in supplies:
            begin, end = max(slot.begin, supply.begin), min(slot.end, supply.end)
            if begin >= end:
                continue
            if state.kind == BUFFER and supply.numel >= end - begin:
                # Each rank has its own buffers; a rank beyond the source's takes those of the source's ranks in turn.
                begin, end = begin % supply.numel, begin % supply.numel + end - begin
            if supply.numel < end:
                return [slot]
            source = supply.source
            if supply.dtype == dtype and scale == 1:
                filled += [Copy(have.extent, source, state, have.begin) for have in supply.place.cover(begin, end)]
            else:
                filled += [
                    Cast(have.extent, supply.dtype, dtype, source, state, have.begin, scale)
                    for have in supply.place.cover(begin, end)
                ]
        return filled

    def _sum(self, slot: Slot, original: State, weights: Weights) -> Sequence[Piece]:
        """Return the pieces of a weighted sum: each ends where a fragment of any source does."""
        supplies = self.known.get((original, slot.dtype))
        if supplies is None:
            cuts = (Cut(0, sys.maxsize, source) for source, _ in weights)
            supplies = self.known[original, slot.dtype] = tuple(self._supplies(original, slot.dtype, cuts))
        if any(supply.numel < slot.end for supply in supplies):
            return [slot]
        begins = {have.begin for supply in supplies for have in supply.place.cover(slot.begin, slot.end)}
        filled: list[Piece] = []
        for begin, end in pairwise(sorted({slot.begin, *begins, slot.end})):
            terms = tuple(
                Term(have.extent, supply.dtype, factor, supply.source)
                for supply, (_, factor) in zip(supplies, weights, strict=True)
                for have in supply.place.cover(begin, end)
            )
            filled.append(Blend(terms, end - begin, slot.dtype, self.sources.of(slot.state), slot.state, begin))
        return filled

    def _supplies(self, state: State, dtype: str, cuts: Iterable[Cut]) -> Iterator[_Supply]:
        for cut in cuts:
            try:
                held = self.indexes[cut.source].holding(state, dtype)
                yield _Supply(cut.begin, cut.end, cut.source, held.place, held.dtype, held.numel)
            except KeyError:
                yield _Supply(cut.begin, cut.end, cut.source, Absent(), dtype, 0)
