"""From what reading has found to findings, and to the elements that are damaged. Pure.

Checks of some million elements at a time. Pure arithmetic on raw little-endian bytes.

All go through the elements block by block, so that what they compute stays in the cache of the processor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from llmtailor.checkpoint.index import CheckpointIndex, Held
from llmtailor.codes import Code
from llmtailor.errors import PathIn, some
from llmtailor.findings import ERROR, WARNING, Finding
from llmtailor.model.states import EXP_AVG, EXP_AVG_SQ, FROZEN, ITEMSIZE, MASTER, MODULE, WEIGHT, State
from llmtailor.storage.casts import cast
from llmtailor.verify.streams import SavedNames

NOT_FINITE, NEGATIVE, DIFFERS = "not finite", "negative", "differs"
Spans = dict[State, tuple[tuple[int, int], ...]]
_CALLED = {MODULE: "the module's weight", FROZEN: "the frozen value", MASTER: "the master"}
_OTHER_SAVE = "they are of different saves, or damaged: copy both files again, or take another checkpoint"
_DIVERGED = "the run had diverged, or the file is damaged: take an older checkpoint"


@dataclass(slots=True)
class Blemish:
    """Elements of a state that are off in one way."""

    count: int
    first: int
    runs: list[tuple[int, int]]
    """One range per chunk, from the first such element to behind the last."""


def find_blemishes(
    index: CheckpointIndex, blemishes: Mapping[tuple[State, str], Blemish], is_split: bool
) -> Iterator[Finding]:
    """Yield a finding for every kind of state and way to be off. With ``is_split`` weights may differ on purpose."""
    together: dict[tuple[str, str], list[State]] = {}
    for state, problem in blemishes:
        together.setdefault((state.kind, problem), []).append(state)
    for (kind, problem), states in together.items():
        count = sum(blemishes[state, problem].count for state in states)
        first = blemishes[states[0], problem].first
        held = held_of(index, states[0])
        total = sum(held_of(index, state).numel for state in states)
        tensors = f"in {len(states)} tensors, the first" if len(states) > 1 else "the first"
        where = PathIn(index.name, next(iter(held.place.cover(first, first + 1))).extent.path)
        at = f"{count:,} of {total:,} elements, {tensors} at {_coordinates(first, held.shape)} of {states[0].param}"
        name = f"{_CALLED.get(kind, kind)} of {some(state.param for state in states)}"
        if problem == NOT_FINITE:
            yield Finding(where, f"{name} is not finite: {at}", _DIVERGED, Code.NOT_FINITE, ERROR)
        elif problem == NEGATIVE:
            yield Finding(
                where, f"{name} is negative, which a mean of squares can't be: {at}", _OTHER_SAVE, Code.NEGATIVE, ERROR
            )
        elif is_split and kind == WEIGHT:
            fix = "a resume goes on from the masters"
            yield Finding(
                where, f"{name} is not the rounded master, as asked for: {at}", fix, Code.SPLIT_WEIGHTS, WARNING
            )
        else:
            yield Finding(where, f"{name} is not the rounded master: {at}", _OTHER_SAVE, Code.NOT_ROUNDED, ERROR)


def find_zeroed(index: CheckpointIndex, not_zero: Collection[State]) -> Iterator[Finding]:
    """Tell of flat ids of a full checkpoint whose moments are all zero although Adam has made steps.

    Gradients of a whole flat tensor are never all zero: such moments were wiped, or never loaded.
    """
    stepped = [
        flat
        for flat in index.sub_groups
        if flat.step > 0 and any(index.params[param].numel for param in flat.params)
        if State(flat.params[0], EXP_AVG_SQ) in index.held
    ]
    for kind in (EXP_AVG, EXP_AVG_SQ):
        zeroed = [flat for flat in stepped if not any(State(param, kind) in not_zero for param in flat.params)]
        if zeroed:
            params = tuple(param for flat in zeroed for param in flat.params)
            what = f"{kind} of {some(params)} is zero throughout, after {zeroed[0].step:g} steps of Adam"
            severity = ERROR if len(zeroed) == len(stepped) else WARNING
            yield Finding(
                index.name, what, f"a resume restarts Adam there; {_OTHER_SAVE}", Code.ALL_ZERO, severity, params
            )


def damaged_elements(
    index: CheckpointIndex, blemishes: Mapping[tuple[State, str], Blemish], saved_as: SavedNames, is_split: bool
) -> Iterator[tuple[State, tuple[int, int]]]:
    """Yield the ranges of elements that can't be trusted: of two states that contradict each other, both."""
    pieces = {piece.name: (name, piece.begin) for name, found in saved_as.items() for piece in found}
    for (state, problem), blemish in blemishes.items():
        if problem == DIFFERS and is_split and state.kind == WEIGHT:
            continue
        name, offset = pieces.get(state.param, (state.param, 0))
        name = index.tied.get(name, name)
        for begin, end in blemish.runs:
            yield state, (begin, end)
            if problem == DIFFERS:
                kind = MASTER if index.params[name].role == "trainable" else FROZEN
                yield State(name, kind), (begin + offset, end + offset)


def lost_elements(index: CheckpointIndex, paths: frozenset[str]) -> Iterator[tuple[State, tuple[int, int]]]:
    """Yield the elements of states that lie in files which can't be read."""
    if paths:
        for state, held in all_held(index):
            for fragment in held.place.cover(0, held.numel) if held.is_here else ():
                if fragment.extent.path in paths:
                    yield state, (fragment.begin, fragment.end)


def elements_in(index: CheckpointIndex, path: str, start: int, stop: int) -> Iterator[tuple[State, tuple[int, int]]]:
    """Yield the elements of states that lie in bytes ``start``..``stop`` of a file."""
    for state, held in all_held(index):
        for fragment in held.place.cover(0, held.numel) if held.is_here else ():
            extent = fragment.extent
            if extent.path == path and extent.start < stop and start < extent.stop:
                yield state, (fragment.begin, fragment.end)


def join(runs: Iterable[tuple[State, tuple[int, int]]]) -> Spans:
    """Return ascending runs of elements that don't touch, for each state."""
    found: dict[State, list[tuple[int, int]]] = {}
    for state, run in runs:
        found.setdefault(state, []).append(run)
    return {state: tuple(_joined(spans)) for state, spans in found.items()}


def _joined(runs: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    begin, end = min(runs)
    for low, high in sorted(runs):
        if low > end:
            yield begin, end
            begin, end = low, high
        end = max(end, high)
    yield begin, end


def all_held(index: CheckpointIndex) -> Iterator[tuple[State, Held]]:
    """Yield everything that is held, the module's weights of ZeRO-1/2 included."""
    yield from index.held.items()
    for name, held in index.module.items():
        yield State(name, MODULE), held


def held_of(index: CheckpointIndex, state: State) -> Held:
    return index.module[state.param] if state.kind == MODULE else index.held[state]


def _coordinates(element: int, shape: tuple[int, ...]) -> str:
    found = []
    for extent in reversed(shape):
        element, inside = divmod(element, extent)
        found.append(inside)
    return str(list(reversed(found)))


BLOCK_ELEMENTS = 1 << 16
_UNSIGNED: Final[dict[int, str]] = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8"}
_EXPONENT: Final[dict[str, int]] = {"F64": 0x7FF << 52, "F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}
"""The bits that are all set in infinities and NaNs."""

Mask = npt.NDArray[np.bool_]
Bytes = bytes | bytearray | memoryview


def any_bit(data: Bytes) -> bool:
    """Whether any bit is set: zeros have none."""
    return bool(np.frombuffer(data, np.uint8).any())


def not_finite(data: Bytes, dtype: str, may_be_infinite: bool) -> Mask | None:
    """Return which elements are NaN, or infinite unless they may be; None if there are none."""
    if dtype not in _EXPONENT:
        return None
    bits, exponent = _bits(data, dtype), _EXPONENT[dtype]
    kind = bits.dtype.type
    without_sign, special = kind(_sign(dtype) - 1), kind(exponent)
    if may_be_infinite:
        return _blockwise(len(bits), lambda block: (bits[block] & without_sign) > special)
    return _blockwise(len(bits), lambda block: (bits[block] & special) == special)


def negative(data: Bytes, dtype: str) -> Mask | None:
    """Return which elements are below zero; None if there are none."""
    if dtype not in _EXPONENT:
        return None
    bits = _bits(data, dtype)
    minus_zero = bits.dtype.type(_sign(dtype))
    return _blockwise(len(bits), lambda block: bits[block] > minus_zero)


def differing(original: Bytes, dtype: str, copy: Bytes, copy_dtype: str, precision: str) -> Mask | None:
    """Return which elements of a copy are not the rounded original, bit for bit; None if there are none.

    A copy in another dtype than ``precision``, that of the weights in training, was made from these weights, or, if
    there were none, from the original itself. Either will do. What is not floating-point is compared if it is alike.
    """
    have, source = _bits(copy, copy_dtype), memoryview(original)
    castable = dtype in _EXPONENT and copy_dtype in _EXPONENT
    if not castable and dtype != copy_dtype:
        return None
    itemsize = ITEMSIZE[dtype]

    def check(block: slice) -> Mask:
        part = source[block.start * itemsize : block.stop * itemsize]
        if not castable:
            plain: Mask = have[block] != _bits(part, dtype)
            return plain
        wrong: Mask = have[block] != _bits(cast(part, dtype, copy_dtype), copy_dtype)
        if precision != copy_dtype and wrong.any():
            rounded_twice = cast(cast(part, dtype, precision), precision, copy_dtype)
            wrong &= have[block] != _bits(rounded_twice, copy_dtype)
        return wrong

    return _blockwise(len(have), check)


def _blockwise(numel: int, check: Callable[[slice], Mask]) -> Mask | None:
    found: Mask | None = None
    for start in range(0, numel, BLOCK_ELEMENTS):
        block = slice(start, min(start + BLOCK_ELEMENTS, numel))
        mask = check(block)
        if mask.any():
            found = np.zeros(numel, np.bool_) if found is None else found
            found[block] = mask
    return found


def _sign(dtype: str) -> int:
    return 1 << (8 * ITEMSIZE[dtype] - 1)


def _bits(data: Bytes, dtype: str) -> npt.NDArray[Any]:
    return np.frombuffer(data, _UNSIGNED[ITEMSIZE[dtype]])
