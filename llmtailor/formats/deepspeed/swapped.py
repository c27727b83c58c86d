"""ZeRO-1/2: files of two ranks that have changed places look alike, but for one thing that they tell."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from llmtailor.codes import Code
from llmtailor.core.vectors import Vector
from llmtailor.errors import PathIn, SourceError
from llmtailor.formats.deepspeed.shards12 import PartitionShard


def check_ranks(
    name: str,
    paths: Sequence[str],
    shards: Sequence[PartitionShard | None],
    param_shapes: Sequence[Mapping[str, tuple[int, ...]]],
    vectors: Sequence[Vector],
) -> None:
    """Raise SourceError for a file whose ``param_slice_mappings`` are those of another rank.

    Others that do not fit tell nothing: under ``round_robin_gradients`` DeepSpeed saves wrong ones.
    """
    if any(shard is not None and is_dealt_out(shard) for shard in shards):
        return
    of_rank = [
        tuple(_mapping(shapes, vector, rank) for shapes, vector in zip(param_shapes, vectors, strict=True))
        for rank in range(len(shards))
    ]
    for rank, (path, shard) in enumerate(zip(paths, shards, strict=False)):
        if shard is not None and shard.mappings != of_rank[rank] and shard.mappings in of_rank:
            what = f"its param_slice_mappings are those of rank {of_rank.index(shard.mappings)}"
            raise SourceError.at(
                PathIn(name, path), what, "the files of two ranks are swapped: put them back", Code.FILE_SWAPPED
            )


def _mapping(shapes: Mapping[str, tuple[int, ...]], vector: Vector, rank: int) -> dict[str, tuple[Any, Any]]:
    """Return what DeepSpeed saves of a group: param -> elements on a rank, and where they begin in its partition."""
    low, high = rank * vector.partition, (rank + 1) * vector.partition
    found: dict[str, tuple[Any, Any]] = {}
    for (param, shape), offset in zip(shapes.items(), vector.offsets, strict=True):
        begin, end = max(low, offset), min(high, offset + math.prod(shape))
        if begin < end:
            found[param] = (end - begin, begin - low)
    return found


def is_dealt_out(shard: PartitionShard) -> bool:
    """Whether ``round_robin_gradients`` has dealt the params of a group out; BF16_Optimizer ignores the setting."""
    zero = shard.ds_config.get("zero_optimization")
    dealt = isinstance(zero, dict) and zero.get("round_robin_gradients") is True
    return dealt and shard.variant != "bf16_optimizer"
