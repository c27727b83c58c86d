"""Bad values: finding them in raw little-endian bytes, reporting them, and listing the damaged elements. Pure.

The checks go through some million elements block by block, so that intermediate results stay in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.codes import Code
from llmtailor.errors import PathIn, some
from llmtailor.findings import ERROR, WARNING, Finding
from llmtailor.model.parts import SavedAs
from llmtailor.model.states import EXP_AVG, EXP_AVG_SQ, FROZEN, ITEMSIZE, MASTER, MODULE, WEIGHT, State
from llmtailor.storage.casts import cast
from llmtailor.verify.elements import Elements, held_of

NOT_FINITE, NOT_A_NUMBER, NEGATIVE, DIFFERS, SPLIT = "not finite", "not a number", "negative", "differs", "split"
_CALLED = {MODULE: "the module's weight", FROZEN: "the frozen value", MASTER: "the master"}
_OTHER_SAVE = "they are from different saves, or damaged: copy both files again, or use another checkpoint"
_DIVERGED = "the run had diverged, or the file is damaged: use an older checkpoint"
_SAID: Final[dict[str, tuple[str, str, Code, str]]] = {
    NOT_FINITE: ("is not finite", _DIVERGED, Code.NOT_FINITE, ERROR),
    NEGATIVE: ("is negative, but a mean of squares can't be", _OTHER_SAVE, Code.NEGATIVE, ERROR),
    DIFFERS: ("is not the rounded master", _OTHER_SAVE, Code.NOT_ROUNDED, ERROR),
    SPLIT: ("is not the rounded master, as requested", "a resume uses the masters", Code.SPLIT_WEIGHTS, WARNING),
}
_SAID[NOT_A_NUMBER] = _SAID[NOT_FINITE]


@dataclass(slots=True)
class BadValues:
    """Elements of a state that are wrong in one way."""

    count: int = 0
    runs: list[tuple[int, int]] = field(default_factory=list)
    """One range per chunk, from the first such element to just past the last"""


def find_bad_values(
    index: CheckpointIndex, bad_values: Mapping[tuple[State, str], BadValues], is_split: bool
) -> Iterator[Finding]:
    """Yield a finding per kind of state and bad value. With ``is_split``, weights may differ on purpose."""
    together: dict[tuple[str, str], list[State]] = {}
    for state, problem in bad_values:
        together.setdefault((state.kind, problem), []).append(state)
    for (kind, problem), states in together.items():
        count = sum(bad_values[state, problem].count for state in states)
        first, _ = min(bad_values[states[0], problem].runs)
        held = held_of(index, states[0])
        total = sum(held_of(index, state).numel for state in states)
        tensors = f"in {len(states)} tensors, the first" if len(states) > 1 else "the first"
        where = PathIn(index.name, next(iter(held.place.cover(first, first + 1))).extent.path)
        at = f"{count:,} of {total:,} elements, {tensors} at {_coordinates(first, held.shape)} of {states[0].param}"
        on_purpose = problem == DIFFERS and is_split and kind == WEIGHT
        what, fix, code, severity = _SAID[SPLIT if on_purpose else problem]
        name = f"{_CALLED.get(kind, kind)} of {some(state.param for state in states)}"
        yield Finding(where, f"{name} {what}: {at}", fix, code, severity)


def find_zeroed(index: CheckpointIndex, not_zero: Collection[State]) -> Iterator[Finding]:
    """Report flat tensors of a full checkpoint whose moments are all zero although Adam has made steps.

    The gradients of a whole flat tensor are never all zero: such moments were erased or never loaded.
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
            what = f"{kind} of {some(params)} is all zero after {zeroed[0].step:g} steps of Adam"
            severity = ERROR if len(zeroed) == len(stepped) else WARNING
            yield Finding(
                index.name, what, f"a resume restarts Adam there; {_OTHER_SAVE}", Code.ALL_ZERO, severity, params
            )


def damaged_elements(
    index: CheckpointIndex,
    bad_values: Mapping[tuple[State, str], BadValues],
    saved_as: Mapping[str, tuple[SavedAs, ...]],
    is_split: bool,
) -> Iterator[Elements]:
    """Yield the ranges of elements that can't be trusted; if two states contradict each other, those of both."""
    pieces = {piece.name: (name, piece.begin) for name, found in saved_as.items() for piece in found}
    for (state, problem), found in bad_values.items():
        if problem == DIFFERS and is_split and state.kind == WEIGHT:
            continue
        name, offset = pieces.get(state.param, (state.param, 0))
        name = index.tied.get(name, name)
        for begin, end in found.runs:
            yield state, (begin, end)
            if problem == DIFFERS:
                kind = MASTER if index.params[name].role == "trainable" else FROZEN
                yield State(name, kind), (begin + offset, end + offset)


def _coordinates(element: int, shape: tuple[int, ...]) -> str:
    found = []
    for extent in reversed(shape):
        element, inside = divmod(element, extent)
        found.append(inside)
    return str(list(reversed(found)))


BLOCK_ELEMENTS = 1 << 16
_UNSIGNED: Final[dict[int, str]] = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8"}
_EXPONENT: Final[dict[str, int]] = {"F64": 0x7FF << 52, "F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}
"""The exponent bits, all set in infinities and NaNs"""

Mask = npt.NDArray[np.bool_]
Bytes = bytes | bytearray | memoryview


def any_bit(data: Bytes) -> bool:
    """Return whether any bit is set; none is in zeros."""
    return bool(np.frombuffer(data, np.uint8).any())


_TESTS: Final[dict[str, Callable[[Any, Any, Any], Mask]]] = {
    NOT_FINITE: lambda bits, sign, special: (bits & special) == special,
    NOT_A_NUMBER: lambda bits, sign, special: (bits & ~sign) > special,
    NEGATIVE: lambda bits, sign, special: bits > sign,
}


def find(problem: str, data: Bytes, dtype: str) -> Mask | None:
    """Return which elements are not finite, not a number (buffers may be infinite: they hold masks) or negative.

    Returns None if there are none, as with a dtype that is not floating-point.
    """
    if dtype not in _EXPONENT:
        return None
    bits, test = _bits(data, dtype), _TESTS[problem]
    sign, special = bits.dtype.type(1 << (8 * ITEMSIZE[dtype] - 1)), bits.dtype.type(_EXPONENT[dtype])
    return _blockwise(len(bits), lambda block: test(bits[block], sign, special))


def differing(original: Bytes, dtype: str, copy: Bytes, copy_dtype: str, precision: str) -> Mask | None:
    """Return which elements of a copy are not the rounded original, bit for bit; None if there are none.

    A copy in a dtype other than ``precision``, that of the weights in training, was made from these weights or, if
    there were none, from the original itself. Either is accepted. Other dtypes than floating-point are compared if
    they are the same.
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


def _bits(data: Bytes, dtype: str) -> npt.NDArray[Any]:
    return np.frombuffer(data, _UNSIGNED[ITEMSIZE[dtype]])
