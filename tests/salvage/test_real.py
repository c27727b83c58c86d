"""Damaged runs of real trainings: what is salvaged holds, bit for bit, what the oracle says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.cases import diagonal, mostly_long
from helpers.checkpoints import copied
from helpers.files import cut
from helpers.states import assert_states
from llmtailor.errors import SourceError
from llmtailor.model.roles import EXP_AVG, MASTER, WEIGHT, State
from llmtailor.salvage.plan import Salvage, plan_salvage, rows
from oracle.any import load
from oracle.zero3 import Snapshot, assert_same
from salvage.damage import chosen, flip_state, salvage, shard, without_rank
from trainings.harness import Runs


def sources(found: Salvage) -> dict[str, set[int]]:
    """part -> the steps that it comes from"""
    steps: dict[str, set[int]] = {}
    for row in rows(found):
        steps.setdefault(row.part, set()).add(row.step)
    return steps


@pytest.mark.parametrize("name", mostly_long(["zero2", "zero1-bf16opt", "zero2-aligned"], "zero2", "zero1-bf16opt"))
def test_a_lost_partition_sends_back_the_parts_that_lie_in_it(runs: Runs, name: str, tmp_path: Path) -> None:
    """ZeRO-1/2: a rank's partition is a stretch of each group's vector, so the others' params are whole."""
    run = copied(runs[name].folder, tmp_path / "run")
    lost = without_rank(run / "checkpoint-6", 1, tmp_path / "marked")
    newer, older = load(run / "checkpoint-6"), load(run / "checkpoint-4")
    shard(run / "checkpoint-6", "optim", 1).unlink()
    found, out = salvage(run)
    structure = found.composition.structure  # type: ignore[union-attr]
    hit = {structure.part_of[param] for param, mask in lost.items() if mask.any()}
    assert hit and {part for part, steps in sources(found).items() if steps == {4}} == hit
    kept = {part for part, steps in sources(found).items() if steps == {6}}
    assert kept == set(structure.parts) - hit
    assert kept and out.name == "salvaged-checkpoint-6"
    assert_states(load(out).states, chosen(newer, older, lambda param: structure.part_of[param] in hit))


@pytest.mark.parametrize("name", ["llama", "zero2-layer"])
def test_where_every_part_lies_on_all_ranks_a_lost_one_leaves_none_whole(runs: Runs, name: str, tmp_path: Path) -> None:
    run = copied(runs[name].folder, tmp_path / "run")
    shard(run / "checkpoint-6", "optim", 0).unlink()
    found = plan_salvage(run)
    assert found.composition is None and not found.is_intact
    assert found.base.index.root == run / "checkpoint-4"


@pytest.mark.parametrize(("rank", "name"), diagonal([0, 1], ["llama-tied", "llama", "qwen2"]))
def test_model_states_of_one_rank_can_be_made_from_anothers(runs: Runs, name: str, rank: int, tmp_path: Path) -> None:
    """They hold nothing but counters where nothing is frozen; only rank 0's name what is tied."""
    run = copied(runs[name].folder, tmp_path / "run")
    shard(run / "checkpoint-6", "model", rank).unlink()
    found, out = salvage(run)
    assert set().union(*sources(found).values()) == {6}
    assert_same(load(out), load(runs[name].checkpoint(6)))


def test_buffers_and_frozen_params_of_a_lost_rank_go_back_with_their_part(runs: Runs, tmp_path: Path) -> None:
    name = "llama-extras-layer"
    run = copied(runs[name].folder, tmp_path / "run")
    cut(shard(run / "checkpoint-6", "model", 1))
    found, out = salvage(run)
    newer, older = load(runs[name].checkpoint(6)), load(run / "checkpoint-4")
    steps = sources(found)
    assert steps["norm"] == {6} and steps["layer 0"] == {4}
    part_of = found.composition.structure.part_of  # type: ignore[union-attr]
    assert_states(load(out).states, chosen(newer, older, lambda param: steps[part_of[param]] == {4}))


@pytest.mark.parametrize(
    "name", mostly_long(["llama", "llama-sharded", "mixtral", "zero2-tied"], "llama-sharded", "mixtral", "zero2-tied")
)
def test_lost_weights_are_rounded_from_the_masters(runs: Runs, name: str, tmp_path: Path) -> None:
    run = copied(runs[name].folder, tmp_path / "run")
    cut(next(iter(sorted((run / "checkpoint-6").glob("*.safetensors")))))
    _, out = salvage(run)
    assert_same(load(out), load(runs[name].checkpoint(6)))


def test_small_files(runs: Runs, tmp_path: Path) -> None:
    """What a run never changes comes from another checkpoint, what can be told is written, random numbers are lost."""
    run = copied(runs["llama"].folder, tmp_path / "run")
    broken = run / "checkpoint-6"
    (broken / "latest").unlink()
    (broken / "config.json").write_text("{")
    (broken / "rng_state_1.pth").write_bytes(b"")
    found, out = salvage(run)
    assert (out / "latest").read_text() == "global_step6"
    assert (out / "config.json").read_bytes() == (run / "checkpoint-4/config.json").read_bytes()
    assert (out / "rng_state_0.pth").exists() and not (out / "rng_state_1.pth").exists()
    told = json.loads((out / "llmtailor.json").read_text())["notices"]
    assert {"rng_state_1.pth", "config.json", "latest"} <= {Path(notice["where"]).name for notice in told}
    assert_same(load(out), load(runs["llama"].checkpoint(6)))
    assert sources(found)["norm"] == {6}


@pytest.mark.parametrize(("name", "lost"), diagonal(["llama", "zero2"], ["scheduler.pt", "trainer_state.json"]))
def test_the_schedule_comes_with_the_trainer_state(runs: Runs, name: str, lost: str, tmp_path: Path) -> None:
    """All of it from the older checkpoint, so that learning rate, data order and step agree; the model is newer."""
    run = copied(runs[name].folder, tmp_path / "run")
    (run / "checkpoint-6" / lost).unlink()
    found, out = salvage(run)
    newer, older = load(runs[name].checkpoint(6)), load(run / "checkpoint-4")
    assert out.name == "salvaged-checkpoint-4" and set().union(*sources(found).values()) == {6}
    composed = load(out)
    assert_same(composed, Snapshot(newer.states, newer.steps, older.flat_ids, older.rest))
    stated = composed.rest["trainer_state"]["stateful_callbacks"]["llmtailor-optimizer"]
    assert stated["attributes"]["step_lags"] == [4 - 6]
    assert any("trained on again" in notice.what for notice in found.composition.report.notices)  # type: ignore[union-attr]


def test_deep_finds_damaged_bytes(runs: Runs, tmp_path: Path) -> None:
    """A moment fails its checksum: its part goes back. A weight contradicts a master whose checksum is right."""
    run = copied(runs["llama-layer"].folder, tmp_path / "run")
    param = "model.layers.1.mlp.up_proj.weight"
    flip_state(run / "checkpoint-6", State(param, EXP_AVG), 3)
    flip_state(run / "checkpoint-6", State("model.norm.weight", WEIGHT), 0)
    assert plan_salvage(run).is_intact
    found, out = salvage(run, deep=True)
    newer, older = load(runs["llama-layer"].checkpoint(6)), load(run / "checkpoint-4")
    assert {part for part, steps in sources(found).items() if steps == {4}} == {"layer 1"}
    assert_states(load(out).states, chosen(newer, older, lambda name: ".layers.1." in name))


def test_deep_masters_that_fail_their_checksum_go_back(runs: Runs, tmp_path: Path) -> None:
    run = copied(runs["zero2"].folder, tmp_path / "run")
    flip_state(run / "checkpoint-6", State("lm_head.weight", MASTER), 5)
    found, _ = salvage(run, deep=True)
    assert {4} in sources(found).values() and sources(found)["lm_head"] == {4}


def test_a_part_that_no_checkpoint_holds_whole_is_named(runs: Runs, tmp_path: Path) -> None:
    run = copied(runs["llama"].folder, tmp_path / "run")
    shard(run / "checkpoint-6", "optim", 1).unlink()
    shard(run / "checkpoint-4", "optim", 0).unlink()
    with pytest.raises(SourceError, match="no checkpoint holds all of it") as refusal:
        plan_salvage(run)
    assert {"embed_tokens", "layer 1", "norm"} <= {problem.where for problem in refusal.value.problems}


def test_no_base(runs: Runs, tmp_path: Path) -> None:
    run = copied(runs["llama"].folder, tmp_path / "run")
    (run / "checkpoint-6/scheduler.pt").unlink()
    (run / "checkpoint-4/trainer_state.json").write_text("no JSON")
    with pytest.raises(SourceError, match="no checkpoint can be the base"):
        plan_salvage(run)


def test_an_intact_run_is_left_alone(runs: Runs) -> None:
    found = plan_salvage(runs["llama"].folder)
    assert found.is_intact and len(found.sources) == 1
