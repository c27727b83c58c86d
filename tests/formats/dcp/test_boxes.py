"""Checkpoints of FSDP2 over tensor parallelism, in boxes that are cut along both dimensions, as bases of composites."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from helpers.composing import merge, recipe
from helpers.states import read
from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.layout import Cast, Copy, Plan, Strided
from llmtailor.compose.plan import Options, plan_merge
from llmtailor.containers.dcp import read_metadata
from llmtailor.formats.registry import index_checkpoint
from llmtailor.model.roles import MASTER, State
from llmtailor.verify.verify import verify_checkpoint
from synthetic import SHAPES, make_dcp

SHAPE = replace(SHAPES["tiny"], vocab_size=11, hidden_size=12, intermediate_size=20, num_layers=2, head_dim=3)


def make(root: Path, step: int, tp: int, dp: int) -> CheckpointIndex:
    """Make a checkpoint whose elements are random."""
    make_dcp(root, SHAPE, tp, dp, step)
    index = index_checkpoint(root)
    torch.manual_seed(step)
    for held in index.held.values():
        for _, _, extent, _ in held.place.cover(0, held.numel):
            with (root / extent.path).open("r+b") as file:
                file.seek(extent.start)
                file.write(torch.rand(extent.num_bytes // 4).numpy().tobytes())
    return index


def boxes_of(root: Path) -> dict[str, set[tuple[str, tuple[int, ...], tuple[int, ...]]]]:
    """Return the rank's file, offsets and sizes of each chunk of each tensor."""
    found = read_metadata(root, ".metadata", "x")
    return {
        key: {(chunk.blob.path, chunk.offsets, chunk.sizes) for chunk in one.chunks}
        for key, one in found.items()
        if one.is_tensor
    }


@pytest.mark.parametrize(
    ("mesh", "older_mesh", "ranks"),
    [((2, 2), (2, 2), 4), ((2, 3), (3, 2), 4), ((2, 3), (3, 2), 6), ((2, 2), (1, 3), 1)],
)
def test_what_is_cut_by_columns(mesh, older_mesh, ranks, tmp_path):
    """For as many ranks as the base has, it is cut as there, else by rows."""
    base, older = make(tmp_path / "step-200", 200, *mesh), make(tmp_path / "step-100", 100, *older_mesh)
    out = tmp_path / "out"
    merge(base.root, out, {"layer 0": older.root, "norm": older.root}, world_size=ranks)
    assert verify_checkpoint(out, deep=True).is_resumable
    found = index_checkpoint(out)
    assert found.world_size == ranks
    for state, held in found.held.items():
        source = older if ".layers.0." in state.param or state.param == "model.norm.weight" else base
        assert torch.equal(read(out, held), read(source.root, source.held[state])), state
    before, after = (boxes_of(root) for root in (base.root, out))
    columns = {key for key, found in before.items() if any(offsets[1:] > (0,) for _, offsets, _ in found)}
    assert len(columns) > 6 and all((before[key] == after[key]) == (ranks == base.world_size) for key in columns)
    loaded = {"model": {name: torch.zeros(param.shape) for name, param in base.params.items()}}
    dcp.load(loaded, checkpoint_id=out, no_dist=True)
    for name, tensor in loaded["model"].items():
        assert torch.equal(tensor, read(out, found.held[State(name, MASTER)])), name


def totals(plan: Plan) -> tuple[set[tuple[int, str]], Counter[tuple[str | None, int]]]:
    """Return the files that pieces read from, and the bytes of each param that come from each source."""
    read, moved = set(), Counter()
    for piece in (piece for file in plan.files for piece in file.each()):
        if isinstance(piece, (Copy, Cast, Strided)):
            paths = [band.path for band in piece.grid.bands] if isinstance(piece, Strided) else [piece.extent.path]
            read |= {(piece.source, path) for path in paths}
            moved[piece.state.param if piece.state else None, piece.source] += piece.num_bytes
    return read, moved


@pytest.mark.parametrize("ranks", [1, 4, 6])
def test_a_plans_summary_is_that_of_all_pieces(ranks, tmp_path):
    """Although it has each state once, however many ranks save it; and it tells sources with other boxes apart."""
    make_dcp(tmp_path / "step-200", SHAPE, 2, 3, 200)
    digests = set()
    for mesh in ((2, 3), (3, 2), (1, 6)):
        make_dcp(tmp_path / "step-100", SHAPE, *mesh, 100)
        taken = {"layer 0": tmp_path / "step-100", "norm": tmp_path / "step-100"}
        plan = plan_merge(recipe(tmp_path / "step-200", taken), options=Options(world_size=ranks)).plan
        read, moved = totals(plan)
        assert {*plan.summary.read} == read
        assert plan.summary.moved == moved
        digests.add(plan.summary.digest)
        shutil.rmtree(tmp_path / "step-100")
    assert len(digests) == 3
