"""How a mesh of ranks shares the states of a model: tensor parallelism as transformers plans it, then FSDP2. Pure.

Tensor parallelism (``tp``) cuts a param along one dimension, or leaves it whole on each of its ranks. FSDP2 (``dp``)
cuts the rows of what is left. Both cut as ``torch.chunk``, so rank 0 has the most of each param. Of equal copies, which
tensor parallelism and HSDP (``dp_replicate``) make, a saver writes the first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmtailor.checkpoint.optimizer import Mesh
from llmtailor.errors import Problem, some


@dataclass(frozen=True, slots=True)
class Spread:
    """What the ranks of a mesh have of a model."""

    mesh: Mapping[str, int]
    """The ranks by kind of parallelism"""
    on_rank_0: Mapping[str, int]
    """Param -> elements"""
    num_writing: int
    """Ranks that have an element of which no rank before them has a copy"""
    packed: tuple[str, ...] = ()
    """Params of which tensor parallelism gives each rank several boxes, such as half of gate and half of up"""

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh.values())


def axes_of(mesh: Mesh) -> dict[str, int]:
    """Return the number of ranks by kind of parallelism; kinds that are not used are left out, but for ``dp``."""
    given = {axis: size or 1 for axis, size in mesh._asdict().items()}
    return {axis: size for axis, size in given.items() if axis == "dp" or size > 1}


def style_of(name: str, plan: Mapping[str, str]) -> str:
    """Return how transformers' plan for tensor parallelism, module or param -> style, cuts a param; empty if not."""
    own = re.sub(r"\d+", "*", name)
    return plan.get(own) or plan.get(own.rpartition(".")[0], "")


def find_cuts(shapes: Mapping[str, tuple[int, ...]], plan: Mapping[str, str]) -> dict[str, int]:
    """Return the dimension along which tensor parallelism cuts each param that it cuts.

    Checked against transformers 5.23.
    """
    cuts = {}
    for name, shape in shapes.items():
        style = style_of(name, plan)
        if style == "embedding_rowwise":
            cuts[name] = 0
        elif style.startswith("embedding_colwise") or ("rowwise" in style and len(shape) > 1):
            cuts[name] = len(shape) - 1
        elif "colwise" in style:
            cuts[name] = max(len(shape) - 2, 0)
    return cuts


def check_mesh(
    mesh: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]], plan: Mapping[str, str], config: Mapping[str, Any]
) -> list[Problem]:
    """Return why a training of the model can't have this mesh."""
    problems, tp, cuts = [], mesh.get("tp", 1), find_cuts(shapes, plan)
    if tp > 1 and not cuts:
        what = "this transformers has no plan for tensor parallelism of the model"
        problems.append(Problem("--mesh", what, "omit tp"))
    if small := [name for name, at in cuts.items() if shapes[name][at] < tp]:
        what = f"tp={tp} leaves ranks without any of {some(small)}"
        problems.append(Problem("--mesh", what, f"use at most tp={min(shapes[name][cuts[name]] for name in small)}"))
    heads = config.get("num_key_value_heads") or config.get("num_attention_heads")
    if isinstance(heads, int) and heads % tp and any(name.endswith("k_proj.weight") for name in cuts):
        what = f"tp={tp} does not divide the {heads} heads of keys and values"
        problems.append(Problem("--mesh", what, f"use a divisor of {heads}"))
    if (replicas := mesh.get("dp_replicate", 1)) > 1 and tp * mesh["dp"] == 1:
        what = f"dp_replicate={replicas} without dp is DDP, whose ranks share a save"
        problems.append(Problem("--mesh", what, f"use dp={replicas}"))
    return problems


def spread(mesh: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]], plan: Mapping[str, str]) -> Spread:
    """Return what the ranks of a mesh have of a model that `check_mesh` accepts for it."""
    cuts = find_cuts(shapes, plan)
    tp, dp = mesh.get("tp", 1), mesh["dp"]
    on_rank_0, writing = dict[str, int](), [0] * tp
    for name, shape in shapes.items():
        sizes = list(shape or (1,))
        cut = cuts.get(name) if tp > 1 else None
        for rank in range(tp if cut is not None else 1):  # the first one has the copy that is written
            local = list(sizes)
            if cut is not None:
                local[cut] = _chunk(sizes[cut], tp, rank)
            if not math.prod(local):
                continue
            rows = _chunk(local[0], dp, 0)
            writing[rank] = max(writing[rank], -(-local[0] // rows))
            if rank == 0:
                on_rank_0[name] = math.prod((rows, *local[1:]))
    packed = tuple(name for name in cuts if tp > 1 and style_of(name, plan).startswith("packed"))
    return Spread(mesh, on_rank_0, sum(writing), packed)


def _chunk(size: int, ranks: int, rank: int) -> int:
    """Return the size of a rank's part, as ``torch.chunk`` cuts."""
    part = -(-size // ranks)
    return max(0, min(part, size - rank * part))
