"""Weight files for a checkpoint that has none, laid out from what is known of its params alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from llmtailor.core.extents import Contiguous, Extent
from llmtailor.core.index import CheckpointIndex, Held, Param, SavedAs
from llmtailor.core.states import BUFFER, FROZEN, ITEMSIZE, MASTER, WEIGHT, State
from llmtailor.formats.disk_names import AS_IN_MEMORY, Naming, on_disk
from llmtailor.formats.safetensors_files import SINGLE, WeightFile

SHARD_BYTES = 5_000_000_000
"""Weights above this are spread over several files, which are then written side by side."""


def new_weights(
    index: CheckpointIndex, naming: Naming = AS_IN_MEMORY, *, dtype: str | None = None, list_tied: bool = False
) -> tuple[WeightFile, ...]:
    """Lay out all params and buffers of a checkpoint as weight files. Nothing of its folder is read.

    They are called what the checkpoint says that the run would call them, or else what ``naming`` says.
    ``dtype`` is that of params; None gives them what the training run has: its precision, and a frozen param what that
    is held in. Buffers keep theirs. ``list_tied`` also lists tied names, as ZeRO-1/2 runs do.
    """
    tensors: dict[str, Held] = {}
    filled_by: dict[str, tuple[State, int]] = {}
    for param, stored in _listed(index, list_tied):
        held_as = _dtype(stored, index, dtype)
        for tensor in _tensors(param, index, naming):
            # where it lies in the output, the layout decides
            tensors[tensor.name] = Held(held_as, tensor.shape, Contiguous(Extent("", 0, 0), ITEMSIZE[held_as]))
            filled_by[tensor.name] = (State(stored.name, WEIGHT), tensor.begin)
    # the order of the safetensors library, so that the files are those that the Trainer would have written
    ordered = sorted(tensors.items(), key=lambda item: (-ITEMSIZE[item[1].dtype], item[0]))
    return tuple(
        WeightFile(path, shard, {"format": "pt"}, {name: filled_by[name] for name in shard})
        for path, shard in _shard(ordered)
    )


def _tensors(param: Param, index: CheckpointIndex, naming: Naming) -> Iterable[SavedAs]:
    if index.saved_as is None:
        return on_disk(param, naming)
    return index.saved_as.get(param.name, (SavedAs(param.name, param.shape),))  # a tied name is no param of its own


def _listed(index: CheckpointIndex, list_tied: bool) -> Iterator[tuple[Param, Param]]:
    """Yield every param under the name it is listed by, and as it is stored."""
    yield from ((param, param) for param in index.params.values())
    if list_tied:
        yield from (
            (replace(index.params[stored], name=name), index.params[stored]) for name, stored in index.tied.items()
        )


def _dtype(param: Param, index: CheckpointIndex, dtype: str | None) -> str:
    if param.role == "buffer":
        held = index.held.get(State(param.name, BUFFER))  # an empty one may not be held
        return held.dtype if held else "F32"
    if dtype or param.role == "trainable":
        if index.stage == 0 and not dtype:  # the weights are the masters
            return index.held[State(param.name, MASTER)].dtype
        return dtype or index.precision
    return index.held[State(param.name, FROZEN)].dtype


def _shard(tensors: Iterable[tuple[str, Held]]) -> list[tuple[str, dict[str, Held]]]:
    """Spread tensors over files, by path."""
    shards: list[dict[str, Held]] = [{}]
    room = SHARD_BYTES
    for name, held in tensors:
        if shards[-1] and held.num_bytes > room:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = held
        room -= held.num_bytes
    count = len(shards)
    paths = [SINGLE] if count == 1 else [f"model-{at:05}-of-{count:05}.safetensors" for at in range(1, count + 1)]
    return list(zip(paths, shards, strict=True))
