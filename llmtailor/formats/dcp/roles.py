"""What the other sources of a composite know about a DCP folder: which of its tensors are buffers. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from llmtailor.checkpoint.index import DCP, FSDP, CheckpointIndex, TensorEntry
from llmtailor.checkpoint.placement import Sliced
from llmtailor.model.states import BUFFER, FROZEN, ITEMSIZE, State


def agree_on_buffers(indexes: Sequence[CheckpointIndex]) -> tuple[CheckpointIndex, ...]:
    """Return the indexes; a tensor of a DCP folder is a buffer, not a frozen param, if another source says so."""
    buffers = {name for index in indexes for name, param in index.params.items() if param.role == "buffer"}
    return tuple(with_buffers(index, buffers) for index in indexes)


def with_buffers(index: CheckpointIndex, names: Collection[str]) -> CheckpointIndex:
    """Return the index with these tensors as buffers, if they are assumed to be frozen params."""
    found = {
        name: param
        for name, param in index.params.items()
        if name in names and param.role == "frozen" and index.form.framework in (FSDP, DCP) and not _is_cut(index, name)
    }
    if not found:
        return index
    params = {name: replace(param, role="buffer") if name in found else param for name, param in index.params.items()}
    held = {state: entry for state, entry in index.held.items() if state not in {State(n, FROZEN) for n in found}}
    held |= {
        State(name, BUFFER): _repeated(index.held[State(name, FROZEN)], index.world_size)
        for name, param in found.items()
        if param.numel
    }
    return replace(index, params=params, held=held)


def _is_cut(index: CheckpointIndex, name: str) -> bool:
    """Return whether a tensor is in several pieces: FSDP cuts params only."""
    held = index.held[State(name, FROZEN)]
    return len([*held.place.cover(0, held.numel)]) > 1


def _repeated(held: TensorEntry, world_size: int) -> TensorEntry:
    """Return the entry of a buffer of which all ranks resume with the same copy."""
    (whole,) = held.place.cover(0, held.numel)
    copies = Sliced((whole.extent,) * world_size, 0, held.numel, ITEMSIZE[held.dtype])
    return TensorEntry(held.dtype, (world_size, *held.shape), copies)
