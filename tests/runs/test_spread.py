"""What `policy` says that the ranks of a mesh have is what torch gives them."""

from __future__ import annotations

import itertools
import math

import pytest
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from llmtailor.checkpoint.optimizer import Mesh
from llmtailor.runs.spread import axes_of, check_mesh, spread

PLAN = {
    "embed": "embedding_rowwise",
    "layers.*.attn.k_proj": "colwise",
    "layers.*.attn.o_proj": "rowwise",
    "layers.*.experts.gate_up": "packed_colwise",
    "layers.*.experts.down": "rowwise",
    "layers.*.experts": "moe_tp_experts",
}
SHAPES = {
    "embed.weight": (51, 12),
    "layers.0.attn.k_proj.weight": (10, 12),
    "layers.0.attn.k_proj.bias": (10,),
    "layers.0.attn.o_proj.weight": (12, 10),
    "layers.0.attn.o_proj.bias": (12,),
    "layers.0.experts.gate_up": (3, 16, 12),
    "layers.0.experts.down": (3, 12, 8),
    "layers.0.norm.weight": (12,),
    "layers.0.scale": (),
}
CUTS = {
    "embed.weight": 0,
    "layers.0.attn.k_proj.weight": 0,
    "layers.0.attn.k_proj.bias": 0,
    "layers.0.attn.o_proj.weight": 1,
    "layers.0.experts.gate_up": 1,
    "layers.0.experts.down": 2,
}
"""The dimension that tensor parallelism cuts: the plan's words, by hand"""


def sizes_by_torch(name: str, tp: int, dp: int) -> dict[tuple[int, int], int]:
    """Return the elements of each rank (tensor parallel, data parallel), without those that another one saves."""
    shape, sizes = SHAPES[name] or (1,), {}
    for t, d in itertools.product(range(tp), range(dp)):
        cut = CUTS.get(name)
        first: Placement = _StridedShard(0, split_factor=tp) if cut == 0 and tp > 1 else Shard(0)
        how = (first, Replicate() if cut is None else Shard(cut))
        local, _ = _compute_local_shape_and_global_offset(shape, (dp, tp), [d, t], how)
        sizes[t, d] = math.prod(local) if cut is not None or t == 0 else 0
    return sizes


@pytest.mark.parametrize(("tp", "dp"), [(1, 4), (2, 1), (2, 3), (3, 2), (4, 8), (5, 60)])
def test_ranks_have_what_torch_gives_them(tp, dp):
    found = spread(axes_of(Mesh(tp, dp, 2)), SHAPES, PLAN)
    have = {name: sizes_by_torch(name, tp, dp) for name in SHAPES}
    assert found.on_rank_0 == {name: sizes[0, 0] for name, sizes in have.items()}
    assert all(max(sizes.values()) == sizes[0, 0] for sizes in have.values())
    assert found.num_writing == sum(any(sizes[rank] for sizes in have.values()) for rank in have["embed.weight"])
    assert found.ranks == tp * dp * 2
    assert found.packed == (("layers.0.experts.gate_up",) if tp > 1 else ())


@pytest.mark.parametrize(
    ("mesh", "plan", "told"),
    [
        (Mesh(tp=2), {}, ["no plan"]),
        (Mesh(tp=12, dp=2), PLAN, ["without any of layers.0.attn.k_proj.weight", "does not divide the 5 heads"]),
        (Mesh(dp_replicate=4), PLAN, ["is DDP"]),
        (Mesh(tp=5, dp=3, dp_replicate=4), PLAN, []),
    ],
)
def test_meshes_that_a_training_can_not_have(mesh, plan, told):
    problems = check_mesh(axes_of(mesh), SHAPES, plan, {"num_key_value_heads": 5})
    assert len(problems) == len(told)
    assert all(words in one.what and one.fix for one, words in zip(problems, told, strict=True))
