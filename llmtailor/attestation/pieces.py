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
    for name, param in live.items():
        entry = entry_of(index, State(name, KIND_OF_ROLE[param.role]), aliases)
        if entry is None or (param.role != "buffer" and entry.shape != param.shape):
            lost.append(name)
    if not lost:
        return index, frozenset()
    names = find_names()
    files = {state.param: entry for state, entry in index.held.items() if state.kind == WEIGHT}
    joined, converted = join({name: live[name].shape for name in lost}, files, names)
    weights = {State(name, WEIGHT): entry for name, entry in joined.items()}
    return replace(index, held={**index.held, **weights}), converted


def join(
    shapes: Mapping[str, tuple[int, ...]], files: Mapping[str, TensorEntry], names: Names | None
) -> tuple[dict[str, TensorEntry], frozenset[str]]:
    """Return params as entries of their pieces in the weight files, and the params whose pieces are not there.

    A param that is stored as itself, or has some of its pieces only, is in neither: the file lacks it. Without
    safetensors files, weights are in torch's form.
    """
    joined, converted = {}, set()
    for name, shape in shapes.items():
        pieces = () if names is None else names.get(name, ())
        if files and [piece.name for piece in pieces] == [name] and pieces[0].shape == shape:
            continue
        if (entry := _joined(shape, pieces, files)) is not None:
            joined[name] = entry
        elif not _is_cut_off(pieces, files):
            converted.add(name)
    return joined, frozenset(converted)


def _is_cut_off(pieces: Sequence[SavedAs], files: Collection[str]) -> bool:
    there = [piece.name in files for piece in pieces]
    return any(there) and not all(there)


def _joined(shape: Sequence[int], saved_as: Sequence[SavedAs], files: Mapping[str, TensorEntry]) -> TensorEntry | None:
    there = [piece for piece in sorted(saved_as, key=lambda piece: piece.begin) if piece.name in files]
    pieces = [(piece, files[piece.name]) for piece in there]
    at, dtype = 0, pieces[0][1].dtype if pieces else ""
    for piece, entry in pieces:
        is_contiguous = isinstance(entry.place, Contiguous) and entry.dtype == dtype
        if not is_contiguous or piece.begin != at or entry.numel != math.prod(piece.shape):
            return None
        at += entry.numel
    if len(pieces) != len(saved_as) or not pieces or at != math.prod(shape):
        return None
    extents = [entry.place.extent for _, entry in pieces if isinstance(entry.place, Contiguous)]
    cuts = (*(piece.begin for piece in there), at)
    paths, starts = tuple(extent.path for extent in extents), tuple(extent.start for extent in extents)
    return TensorEntry(dtype, tuple(shape), Bundled(paths, starts, cuts, ITEMSIZE[dtype]))
