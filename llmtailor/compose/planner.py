"""Fills layouts with the bytes of sources: where every output byte comes from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from llmtailor.checkpoint.index import CheckpointIndex, TensorEntry
from llmtailor.checkpoint.layout import Cast, Copy, FileLayout, Piece, Plan, Slot, Sources
from llmtailor.model.states import BUFFER, FROZEN, MASTER, MODULE, WEIGHT, State


def plan_composite(
    layouts: Iterable[FileLayout],
    indexes: Sequence[CheckpointIndex],
    sources: Sources,
    base: int,
    scales: Mapping[State, float] = MappingProxyType({}),
) -> Plan:
    """Return the plan with every slot of every file filled. Pure: no byte is read.

    ``sources`` are positions in ``indexes``; ``base`` is the source of bytes copied unchanged. States in ``scales`` are
    multiplied by a factor. Raises KeyError for a slot that its source does not hold; `checks` refuses those first.
    """
    planned = (plan_file(layout, indexes, sources, base, scales) for layout in layouts)
    return Plan(tuple(str(index.root) for index in indexes), tuple(planned))


def plan_file(
    layout: FileLayout,
    indexes: Sequence[CheckpointIndex],
    sources: Sources,
    base: int,
    scales: Mapping[State, float] = MappingProxyType({}),
) -> FileLayout:
    """Return the plan of one file; see `plan_composite`."""
    pieces: list[Piece] = []
    for piece in layout.pieces:
        if isinstance(piece, Slot):
            for span in sources.spans(piece.state, piece.begin, piece.end):
                held = holding(indexes[span.source], piece.state, piece.dtype)
                slot = _wrap(replace(piece, begin=span.begin, end=span.end), held)
                pieces += _fill(slot, span.source, held, scales.get(piece.state, 1.0))
        else:
            pieces.append(replace(piece, source=base) if isinstance(piece, Copy) else piece)
    return FileLayout(layout.path, tuple(pieces))


def _wrap(slot: Slot, held: TensorEntry) -> Slot:
    """Return the slot within the source's ranks. Each rank has its own buffers; a rank beyond those of the source takes
    the buffers of the source's ranks in turn."""
    if slot.state.kind != BUFFER:
        return slot
    begin = slot.begin % held.numel
    return replace(slot, begin=begin, end=begin + slot.end - slot.begin)


def _fill(slot: Slot, source: int, held: TensorEntry, scale: float) -> Iterator[Piece]:
    for have in held.place.cover(slot.begin, slot.end):
        if held.dtype == slot.dtype and scale == 1:
            yield Copy(have.extent, source, slot.state, have.begin)
        else:
            yield Cast(have.extent, held.dtype, slot.dtype, source, slot.state, have.begin, scale)


def holding(index: CheckpointIndex, state: State, dtype: str) -> TensorEntry:
    """Return the entry of a checkpoint that supplies a state in a dtype.

    A weight that no safetensors file holds in this dtype is rounded from the master, or is the frozen param or buffer
    of the model states: rounding a weight twice would give another result. Raises KeyError if there is none of these.
    """
    kinds = {WEIGHT: (MASTER, FROZEN, BUFFER), MODULE: (MASTER,)}.get(state.kind, (state.kind,))
    names = [name for name in (state.param, index.tied.get(state.param)) if name]
    copies = [index.held.get(State(name, WEIGHT)) for name in names] if state.kind == WEIGHT else []
    originals = [index.held.get(State(name, kind)) for name in names for kind in kinds]
    alike = [held for held in copies if held and held.dtype == dtype]
    for held in (*alike, *originals, *copies):
        if held is not None and held.is_here:
            return held
    raise KeyError(state)
