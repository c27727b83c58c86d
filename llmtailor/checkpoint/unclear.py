"""Tensors of which a checkpoint does not say whether they are frozen params or buffers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from llmtailor.checkpoint.index import CheckpointIndex, buffer_on_ranks
from llmtailor.model.roles import BUFFER, FROZEN, State


def agree_on_roles(indexes: Sequence[CheckpointIndex]) -> tuple[CheckpointIndex, ...]:
    """Return the indexes; what may be a frozen param or a buffer is what another source says."""
    roles = {
        param.name: param.role
        for index in indexes
        for param in index.params.values()
        if param.name not in index.train.unclear
    }
    buffers = {name for name, role in roles.items() if role == "buffer"}
    return tuple(with_roles(index, {*roles}, buffers) for index in indexes)


def with_roles(index: CheckpointIndex, known: Collection[str], buffers: Collection[str]) -> CheckpointIndex:
    """Return the index with those tensors as buffers that were unclear; of the others that are known, it is clear that
    they are frozen params."""
    settled = index.train.unclear.intersection(known, index.params)
    if not settled:
        return index
    params, held = dict(index.params), dict(index.held)
    for name in settled.intersection(buffers):
        params[name], whole = replace(params[name], role="buffer"), held.pop(State(name, FROZEN), None)
        if whole is None:  # a partial checkpoint may be without frozen params
            continue
        for piece in whole.place.cover(0, whole.numel):  # all ranks resume with the same copy
            copies = (piece.extent,) * index.world_size
            held[State(name, BUFFER)] = buffer_on_ranks(whole.dtype, whole.shape, copies)
    train = replace(index.train, unclear=index.train.unclear - settled)
    return replace(index, params=params, held=held, train=train)
