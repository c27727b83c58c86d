"""Params that the weight files hold under another name, or in several tensors: transformers fuses experts in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from llmtailor.attestation.compare import entry_of
from llmtailor.checkpoint.index import CheckpointIndex, TensorEntry
from llmtailor.checkpoint.placement import Bundled, Contiguous
from llmtailor.formats.partial.manifest import ParamFact
from llmtailor.model.dtypes import ITEMSIZE
from llmtailor.model.parts import Param, SavedAs
from llmtailor.model.roles import KIND_OF_ROLE, WEIGHT, State

Names = Mapping[str, Sequence[SavedAs]]


def aliases_of(tied: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the other names of each tied param."""
    aliases: dict[str, list[str]] = {}
    for name, stored in tied.items():
        aliases.setdefault(stored, []).append(name)
    return aliases


def with_pieces(
    index: CheckpointIndex,
    live: Mapping[str, Param | ParamFact],
    tied: Mapping[str, str],
    find_names: Callable[[], Names | None],
) -> tuple[CheckpointIndex, frozenset[str]]:
    """Return an index that also has the weights that are stored in another form, and the params of which it has none.

    ``find_names`` returns what each param is saved as, None if that is unknown; it is called only if needed.
    """
    lost, aliases = [], aliases_of(tied)
    for name, one in live.items():
        entry = entry_of(index, State(name, KIND_OF_ROLE[one.role]), aliases)
        if entry is None or (one.role != "buffer" and entry.shape != one.shape):
            lost.append(name)
    if not lost:
        return index, frozenset()
    names = find_names()
    files = {state.param: held for state, held in index.held.items() if state.kind == WEIGHT}
    found, converted = join({name: live[name].shape for name in lost}, files, names)
    return replace(index, held={**index.held, **{State(name, WEIGHT): held for name, held in found.items()}}), converted


def join(
    shapes: Mapping[str, tuple[int, ...]], files: Mapping[str, TensorEntry], names: Names | None
) -> tuple[dict[str, TensorEntry], frozenset[str]]:
    """Return params as entries of their pieces in the weight files, and the params whose pieces are not there.

    A param that is stored as itself, or has some of its pieces only, is in neither: the file lacks it. Without
    safetensors files, weights are in torch's form.
    """
    found, converted = {}, set()
    for name, shape in shapes.items():
        ones = () if names is None else names.get(name, ())
        if files and [one.name for one in ones] == [name] and ones[0].shape == shape:
            continue
        if (entry := _joined(shape, ones, files)) is not None:
            found[name] = entry
        elif not _is_cut_off(ones, files):
            converted.add(name)
    return found, frozenset(converted)


def _is_cut_off(ones: Sequence[SavedAs], files: Collection[str]) -> bool:
    there = [one.name in files for one in ones]
    return any(there) and not all(there)


def _joined(shape: tuple[int, ...], ones: Sequence[SavedAs], files: Mapping[str, TensorEntry]) -> TensorEntry | None:
    pieces = [(one, files[one.name]) for one in sorted(ones, key=lambda one: one.begin) if one.name in files]
    at, dtype = 0, pieces[0][1].dtype if pieces else ""
    for one, held in pieces:
        is_contiguous = isinstance(held.place, Contiguous) and held.dtype == dtype
        if not is_contiguous or one.begin != at or held.numel != math.prod(one.shape):
            return None
        at += held.numel
    if len(pieces) != len(ones) or not pieces or at != math.prod(shape):
        return None
    extents = [held.place.extent for _, held in pieces if isinstance(held.place, Contiguous)]
    cuts = (*(one.begin for one, _ in pieces), at)
    paths, starts = tuple(one.path for one in extents), tuple(one.start for one in extents)
    return TensorEntry(dtype, shape, Bundled(paths, starts, cuts, ITEMSIZE[dtype]))
