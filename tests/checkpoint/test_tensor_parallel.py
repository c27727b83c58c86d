"""Maps of shards that DeepSpeed's own classes describe: fused weights, blocks of several ranks, uneven cuts."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmtailor.checkpoint.placement import Contiguous, Extent
from llmtailor.errors import SourceError, UnsupportedCheckpoint
from llmtailor.formats.deepspeed.autotp import read_cuts

affine = pytest.importorskip("deepspeed.checkpoint.affine")
MAPS = {
    "rows": lambda: affine.contiguous_split_map((7, 5), [4, 3], 0),
    "columns": lambda: affine.contiguous_split_map((7, 5), [2, 0, 3], 1),
    "replicated": lambda: affine.replicated_map((6,), 3),
    "a number": lambda: affine.replicated_map((), 2),
    "fused qkv": lambda: affine.sub_param_map((32, 3), [16, 8, 8], [[8, 8], [4, 4], [5, 3]], 0),
    "fused columns": lambda: affine.sub_param_map((3, 12), [8, 4], [[5, 3], [2, 2]], 1),
    "kv on all ranks": lambda: affine.segmented_map((10, 3), [(6, False), (4, True)], 0, 2, [[4, 2]]),
    "blocks": lambda: affine.block_gather_map((8, 3), {0: [0, 3], 1: [2, 1]}, 2, 0),
    "nothing": lambda: affine.contiguous_split_map((0, 5), [0, 0], 0),
}


def tree_of(described: Any, **changes: Any) -> dict[str, Any]:
    params = {f"^{re.escape('a.weight')}$": described.to_dict()}
    info = {"affine_map": {"version": 1, "params": params}, "autotp_unsupported_parameter_patterns": {}, **changes}
    return {"universal_checkpoint_info": info}


@pytest.mark.parametrize("name", MAPS)
def test_shards_join_and_spread_as_deepspeed_cuts_them(name: str, tmp_path: Path) -> None:
    described = MAPS[name]()
    shape, degree = described.logical_shape, len(described.shard_shapes)
    full = torch.arange(1, described.numel + 1, dtype=torch.float32).reshape(shape)
    shards = [described.extract(full, rank) for rank in range(degree)]
    for rank, shard in enumerate(shards):
        (tmp_path / f"{rank}").write_bytes(shard.numpy().tobytes())
    cut = read_cuts(tree_of(described), degree, "here")["a.weight"]
    assert cut.shape == shape and [one.shape for one in cut.shards] == [tuple(one.shape) for one in shards]
    places = [Contiguous(Extent(f"{rank}", 0, 4 * one.numel()), 4) for rank, one in enumerate(shards)]
    joined = cut.join(places)
    for place in joined:
        data = b"".join(
            (tmp_path / path).read_bytes()[start:stop] for *_, (path, start, stop), _ in place.cover(0, full.numel())
        )
        assert np.array_equal(np.frombuffer(data, "<f4"), full.numpy().ravel())
    assert len(joined) == (degree if name in ("replicated", "a number", "kv on all ranks") else 1)
    for rank, shard in enumerate(shards):
        for begin, end in [(0, shard.numel()), (shard.numel() // 3, shard.numel() // 2)]:
            own = cut.runs(rank)
            runs = [*own(begin, end)] if own else [(begin, end - begin, 1, 0)]
            starts = [(first + row * stride, width) for first, width, rows, stride in runs for row in range(rows)]
            found = [full.ravel()[first : first + width] for first, width in starts]
            assert torch.equal(torch.cat([*found, torch.empty(0)]), shard.ravel()[begin:end])


def damaged(where: str, value: Any) -> dict[str, Any]:
    tree = copy.deepcopy(tree_of(MAPS["fused qkv"]()))
    [entry] = tree["universal_checkpoint_info"]["affine_map"]["params"].values()
    holder: Any = {"entry": entry}
    *above, last = where.split("/")
    for key in above:
        holder = holder[int(key) if key.isdigit() else key]
    holder[int(last) if last.isdigit() else last] = value
    return tree


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("entry/ranks/0/pieces/0/source/0", 3),  # over another piece, with a gap behind it
        ("entry/ranks/0/pieces/0/dest/0", 3),
        ("entry/ranks/0/pieces", []),
        ("entry/ranks/0/shard_shape", [16, 3]),
        ("entry/logical_shape", [33, 3]),
        ("entry/logical_shape", [-1, 3]),
        ("entry/ranks", {0: {}}),
        ("entry/ranks/1/pieces/0/shape", ["8", 3]),
        ("entry/ranks/1/pieces/0/source", None),
        ("entry/ranks/1/pieces/0/source/1", [None, None]),
        ("entry/ranks/1/pieces/0/source/0", -3),
        ("entry/ranks/1/pieces/0/source/0", 1.5),
        ("entry/ranks/1/pieces/0", 7),
    ],
)
def test_maps_that_leave_elements_out_or_say_nothing(where: str, value: Any) -> None:
    with pytest.raises(SourceError, match=r"a\.weight"):
        read_cuts(damaged(where, value), 2, "here")


def test_what_is_not_described_is_refused() -> None:
    tree = tree_of(MAPS["rows"](), autotp_unsupported_parameter_patterns={r"^b\.weight$": "interleaved"})
    with pytest.raises(UnsupportedCheckpoint, match=r"cut b\.weight in a way"):
        read_cuts(tree, 2, "here")
    with pytest.raises(UnsupportedCheckpoint, match="scaled"):
        read_cuts(tree_of(affine.replicated_map((6,), 2, scale=0.5)), 2, "here")
    tree = tree_of(MAPS["rows"](), affine_map={"version": 2})
    with pytest.raises(UnsupportedCheckpoint, match="version 2"):
        read_cuts(tree, 2, "here")
