"""What a checkpoint costs does not grow with its ranks, as far as they are alike; and only what is alike is shared."""

from __future__ import annotations

import gc
import os
import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.checkpoints import SMALL, edit, make, model_states, optim_states
from helpers.render import render
from llmtailor.checkpoint.layout import Copy, Strided
from llmtailor.checkpoint.optimizer import Mesh
from llmtailor.checkpoint.sources import Sources
from llmtailor.compose.fill import plan_composite
from llmtailor.compose.plan import Options, plan_merge
from llmtailor.containers import torch_file
from llmtailor.containers.dcp import METADATA, read_metadata
from llmtailor.containers.torch_file import lay_out_torch_file
from llmtailor.formats.deepspeed.write import RankFiles, ZeroTarget, make_shards
from llmtailor.formats.registry import index_checkpoint, survey_checkpoint
from llmtailor.model.roles import BUFFER, FROZEN, State
from llmtailor.recipe import Recipe
from llmtailor.verify.verify import verify_checkpoint
from synthetic import SHAPES, lay_out, make_checkpoint, make_dcp

WORLDS = (12, 48)
LARGE = replace(SHAPES["1b"], num_layers=2)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A checkpoint of each number of ranks, full of holes."""
    roots = {world: tmp_path_factory.mktemp("ranks") / "checkpoint-100" for world in WORLDS}
    for world, root in roots.items():
        make_checkpoint(root, LARGE, lay_out(LARGE, world), 100, sparse=True)
    return roots


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return make(tmp_path_factory.mktemp("small"), 100, world_size=12, shape=replace(SMALL, tied=True))


def test_alike_files_are_decoded_once(large, monkeypatch):
    decoded = Counter()
    real = torch_file.read_pickle

    def counted(data, where, *more, **options):
        decoded[str(where)] += 1
        return real(data, where, *more, **options)

    monkeypatch.setattr(torch_file, "read_pickle", counted)
    counts = []
    for world in WORLDS:
        decoded.clear()
        assert index_checkpoint(large[world]).world_size == world
        counts.append(sum("_states.pt" in where for where in decoded))
    # of both kinds of file one with a rank of one digit, and one of two; rank 0 alone has the tied names
    assert counts == [5, 5]


def test_a_file_takes_few_reads(large, monkeypatch):
    reads = Counter()
    real = os.pread

    def counted(fd, size, at):
        reads[str(Path(f"/proc/self/fd/{fd}").readlink())] += 1
        return real(fd, size, at)

    monkeypatch.setattr(os, "pread", counted)
    index_checkpoint(large[48])
    of_shards = sorted(count for path, count in reads.items() if "_states.pt" in path)
    assert len(of_shards) == 2 * 48
    assert of_shards[-1] <= 8
    assert of_shards[47] <= 3, "model states are read as a whole, after their end"


def copies_held(plan) -> int:
    """Return how many copies are alive, and make all of the plan's once."""
    gc.collect()
    before = sum(type(one) is Copy for one in gc.get_objects())
    made = sum(type(piece) is Copy for file in plan.files for piece in file.pieces)
    gc.collect()
    assert sum(type(one) is Copy for one in gc.get_objects()) == before, "the pieces of a file stay in memory"
    assert made > before
    return before


def test_a_plan_holds_no_pieces_of_ranks(large, tmp_path):
    held = []
    for world in WORLDS:
        recipe = Recipe(name="test", base=large[world])
        composition = plan_merge(recipe, tmp_path / f"out-{world}", Options())
        held.append(copies_held(composition.plan))
        del composition
    assert held[1] - held[0] <= 3 * (WORLDS[1] - WORLDS[0]), "one for the random states of a rank, and little more"


@pytest.mark.parametrize("world", [1, 3, 13])
def test_a_rank_gets_the_file_that_its_own_tree_makes(small, tmp_path, world):
    base = index_checkpoint(small)
    composition = plan_merge(Recipe(name="test", base=small), tmp_path / "out", Options(world_size=world))
    target = ZeroTarget.of(base, composition.target, base.precision, base.framework)
    alike = [*RankFiles(target, base.zero.engine).layouts(target.tag)]
    own = [lay_out_torch_file(path, tree) for _, path, tree in make_shards(target, base.zero.engine)]
    sources = Sources(dict.fromkeys([*base.params, *base.tied], 0))
    made, wanted = (plan_composite(layouts, [base], sources, 0).files for layouts in (alike, own))
    assert [one.path for one in made] == [one.path for one in wanted]
    for one, other in zip(made, wanted, strict=True):
        assert render(one, base.root) == render(other, base.root), one.path
        assert one.num_bytes == other.num_bytes


def test_ranks_with_frozen_params_and_buffers_of_their_own(tmp_path):
    root = make(tmp_path, 100, world_size=3)
    for rank in range(3):
        edit(model_states(root, rank), lambda tree: freeze(tree, rank))  # noqa: B023
    index = index_checkpoint(root)
    frozen, buffer = index.held[State("extra.weight", FROZEN)], index.held[State("extra.mean", BUFFER)]
    found = [
        (root / one.extent.path).read_bytes()[one.extent.start : one.extent.stop]
        for held in (frozen, buffer)
        for one in held.place.cover(0, held.numel)
    ]
    assert found == [bytes([rank]) * 4 for rank in range(3)] + [bytes([10 + rank]) * 8 for rank in range(3)]


def freeze(tree, rank: int) -> None:
    tree["module"]["extra.weight"] = torch.empty(0, dtype=torch.bfloat16)
    tree["module"]["extra.mean"] = torch.full((8,), 10 + rank, dtype=torch.uint8)
    tree["buffer_names"] = ["extra.mean"]
    tree["frozen_param_shapes"]["extra.weight"] = torch.Size([6])
    tree["frozen_param_fragments"]["extra.weight"] = torch.full((4,), rank, dtype=torch.uint8).view(torch.bfloat16)


@pytest.mark.parametrize("kind", ["step", "pickle"])
def test_one_rank_that_is_not_alike_is_found(tmp_path, kind):
    root = make(tmp_path, 100, world_size=12)

    def change(tree):
        inner = tree["optimizer_state_dict"]
        if kind == "step":  # 4 bytes of a tensor: the pickle is the same
            inner["optimizer_state_dict"]["state"][0]["step"] += 1
        else:
            inner["overflow"], inner["dynamic_loss_scale"] = True, True

    edit(optim_states(root, 7), change)
    problems = [one for error in survey_checkpoint(root).problems.errors for one in error.problems]
    assert problems
    assert {one.path.rpartition("/")[2] for one in problems} == {optim_states(root, 7).name}


def test_an_alike_file_under_another_ranks_name_is_found(tmp_path):
    root = make(tmp_path, 100, world_size=12)
    model_states(root, 8).write_bytes(model_states(root, 7).read_bytes())
    problems = [one for error in survey_checkpoint(root).problems.errors for one in error.problems]
    assert [one.path.rpartition("/")[2] for one in problems] == [model_states(root, 8).name]
    assert "rank_7_" in problems[0].what


def test_a_finding_is_reported_for_every_rank(tmp_path):
    root = make(tmp_path, 100, world_size=3)
    for rank in range(3):
        edit(model_states(root, rank), lambda tree: tree.update(global_samples=-1))
    paths = [one.path for one in survey_checkpoint(root).index.findings if "global_samples" in one.what]
    assert [path.rpartition("/")[2] for path in paths] == [model_states(root, rank).name for rank in range(3)]


@pytest.mark.parametrize(("stage", "mesh"), [(2, Mesh(dp=3)), (3, Mesh(dp=3)), (3, Mesh(tp=1, dp=2))])
def test_a_plan_of_tensor_parallel_ranks_does_not_list_rows(tmp_path, stage, mesh):
    """Of a tensor that is cut by columns, each row is a run of the state, also where the output is not cut so."""
    planned = []
    for hidden in (64, 128):
        shape = replace(SMALL, hidden_size=hidden, intermediate_size=128, num_kv_heads=2, head_dim=4)
        root = tmp_path / f"{hidden}" / "checkpoint-100"
        make_checkpoint(root, shape, lay_out(shape, 4, tp=2), 100, sparse=True)
        recipe = Recipe(name="test", base=root)
        files = plan_merge(recipe, tmp_path / f"out-{hidden}", Options(stage=stage, mesh=mesh)).plan.files
        assert any(isinstance(piece, Strided) for file in files for piece in file.pieces)
        planned.append(sum(len(file.pieces) for file in files))
    assert planned[1] < 1.1 * planned[0]  # slices cut other rows


# --- torch.distributed.checkpoint: a chunk of each tensor for each rank -----------------------------------------------


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """Folders of FSDP2 over two tensor-parallel ranks, with different numbers of ranks."""
    roots = {world: tmp_path_factory.mktemp("dcp") / "checkpoint-100" for world in WORLDS}
    for world, root in roots.items():
        make_dcp(root, LARGE, 2, world // 2, 100)
    return roots


def test_a_chunk_takes_few_bytes(sharded):
    peaks, chunks = [], []
    for root in sharded.values():
        gc.collect()
        tracemalloc.start()
        chunks.append(sum(len(entry.chunks) for entry in read_metadata(root, METADATA, "x").values()))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert chunks[1] > 3 * chunks[0]
    assert peaks[1] - peaks[0] < 500 * (chunks[1] - chunks[0]), "as objects, a chunk takes several thousand"


def test_planning_reads_a_few_headers_of_a_file(sharded, tmp_path, monkeypatch):
    reads = Counter()
    real = os.pread

    def counted(fd, size, at):
        reads[Path(f"/proc/self/fd/{fd}").readlink().name] += 1
        return real(fd, size, at)

    monkeypatch.setattr(os, "pread", counted)
    plan_merge(Recipe(name="test", base=sharded[48]), tmp_path / "out", Options())
    blobs = Counter(
        chunk.blob.path for entry in read_metadata(sharded[48], METADATA, "x").values() for chunk in entry.chunks
    )
    assert sum(reads[path] < blobs[path] / 3 for path in blobs) > 40, "the others have forms that are new"


def test_a_plan_of_sharded_tensors_holds_no_pieces_of_ranks(sharded, tmp_path):
    held = []
    for world, root in sharded.items():
        composition = plan_merge(Recipe(name="test", base=root), tmp_path / f"out-{world}", Options())
        held.append(copies_held(composition.plan))
        del composition
    assert held[1] == held[0]


def test_verify_reads_the_header_of_each_blob(tmp_path):
    root = tmp_path / "checkpoint-100"
    make_dcp(root, SMALL, 1, 2, 100)
    key = "model.model.layers.1.input_layernorm.weight"
    blob = read_metadata(root, METADATA, "x")[key].chunks[1].blob
    with (root / blob.path).open("r+b") as file:
        file.seek(blob.start)
        file.write(b"XX")
    assert not verify_checkpoint(root).is_intact
    assert [one.path for one in verify_checkpoint(root).findings if one.severity == "error"] == [blob.path]
