"""What is read together, and what must hold for it: one bundle per param. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from llmtailor.checkpoint.index import CheckpointIndex, Held
from llmtailor.checkpoint.placement import Extent
from llmtailor.model.params import SavedAs
from llmtailor.model.states import BUFFER, EXP_AVG_SQ, FROZEN, MASTER, MODULE, WEIGHT, State
from llmtailor.verify.bad_values import NEGATIVE, NOT_A_NUMBER, NOT_FINITE

_NON_NEGATIVE = {EXP_AVG_SQ, "max_exp_avg_sq"}
_OF_THE_MODEL = {WEIGHT, MASTER, FROZEN, BUFFER, MODULE}


@dataclass(frozen=True, slots=True)
class Stream:
    """One state of a bundle, and what its values may not be."""

    state: State
    held: Held
    checks: tuple[str, ...] = (NOT_FINITE,)
    """Names in `bad_values.CHECKS`"""
    begin: int = 0
    """The element of the bundle that its first element belongs to: a fused param is saved in pieces."""
    is_copy: bool = False
    """Must be the rounded first stream."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """The states of one param, or one weight that belongs to none. All but copies have ``numel`` elements."""

    numel: int
    streams: tuple[Stream, ...]


def bundle_states(
    index: CheckpointIndex, saved_as: Mapping[str, tuple[SavedAs, ...]], unreadable: frozenset[str] = frozenset()
) -> Iterator[Bundle]:
    """Yield everything that is to be read, each byte once: padding is in no placement, so in no bundle.

    ``saved_as`` tells of params whose weights go by other names.
    """
    names_of: dict[str, list[str]] = {}
    for name, stored in index.tied.items():
        names_of.setdefault(stored, []).append(name)
    moments: dict[str, list[State]] = {}
    for state in index.held:
        if state.kind not in _OF_THE_MODEL:
            moments.setdefault(state.param, []).append(state)
    once = _Once(unreadable)
    for param in index.params.values():
        streams = []
        if param.role == "buffer":
            state = State(param.name, BUFFER)
            if state in index.held:
                numel = index.held[state].numel if index.stage == 3 else param.numel  # else one copy for all ranks
                yield from once.bundle(numel, [Stream(state, index.held[state], (NOT_A_NUMBER,))])
            continue
        original = State(param.name, MASTER if param.role == "trainable" else FROZEN)
        if original in index.held:
            streams.append(Stream(original, index.held[original]))
            for name in (param.name, *names_of.get(param.name, ())):
                streams += _copies(index, name, saved_as.get(name) or (SavedAs(name, param.shape),))
        for state in moments.get(param.name, ()):
            checks = (NOT_FINITE, NEGATIVE) if state.kind in _NON_NEGATIVE else (NOT_FINITE,)
            streams.append(Stream(state, index.held[state], checks))
        yield from once.bundle(param.numel, streams)
    for state, held in index.held.items():
        if state.kind == WEIGHT:  # of a buffer, or by another name than in memory
            yield from once.bundle(held.numel, [Stream(state, held, (NOT_A_NUMBER,))])


def _copies(index: CheckpointIndex, name: str, saved_as: tuple[SavedAs, ...]) -> Iterator[Stream]:
    if name in index.module:
        yield Stream(State(name, MODULE), index.module[name], is_copy=True)
    for piece in saved_as:
        state = State(piece.name, WEIGHT)
        if state in index.held and index.held[state].shape == piece.shape:
            yield Stream(state, index.held[state], begin=piece.begin, is_copy=True)


class _Once:
    """Drops what has been read already: tied names may share their bytes, and without DeepSpeed weights are masters."""

    def __init__(self, unreadable: frozenset[str]):
        self.unreadable = unreadable
        self.seen: set[Extent] = set()

    def bundle(self, numel: int, streams: list[Stream]) -> Iterator[Bundle]:
        fresh = []
        for stream in streams:
            if not stream.held.is_here or not stream.held.numel:
                continue
            begins = next(iter(stream.held.place.cover(0, 1))).extent
            if begins.path in self.unreadable or begins not in self.seen:
                self.seen.add(begins)
                fresh.append(stream)
        if fresh:
            yield Bundle(numel, tuple(fresh))
