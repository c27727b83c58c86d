"""Runs without DeepSpeed, and partial checkpoints as holders: the plain Trainer, trained in this process."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from helpers.files import cut
from helpers.states import read
from llmtailor.formats.registry import index_checkpoint
from llmtailor.model.roles import EXP_AVG, State
from llmtailor.salvage.plan import Salvage, plan_salvage, rows
from llmtailor.verify.verify import verify_checkpoint
from salvage.damage import flip_state, salvage
from trainings.alone import train

pytestmark = pytest.mark.real
PARAM = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two trainings that do the same, in one folder; the second saves one half of the model after the other."""
    folder = train(tmp_path_factory.mktemp("run")).folder
    saved = train(tmp_path_factory.mktemp("partial"), attached={"policy": "parity", "save_steps": 1})
    shutil.copytree(saved.folder / "partial", folder / "partial")
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def states(root: Path) -> dict[State, torch.Tensor]:
    return {state: read(root, held) for state, held in index_checkpoint(root).held.items() if held.is_here}


def compose(run: Path, **options: object) -> tuple[Salvage, dict[State, torch.Tensor]]:
    found, out = salvage(run, **options)
    return found, states(out)


def test_a_moment_that_fails_its_checksum_sends_its_part_back(run: Path) -> None:
    shutil.rmtree(run / "partial")
    newer, older = states(run / "checkpoint-4"), states(run / "checkpoint-2")
    flip_state(run / "checkpoint-4", State(PARAM, EXP_AVG), 7)
    assert plan_salvage(run).is_intact
    found, composed = compose(run, deep=True)
    assert {row.part for row in rows(found) if row.step == 2} == {"layer 1"}
    assert composed.keys() == newer.keys()
    for state, tensor in composed.items():
        assert torch.equal(tensor, (older if ".layers.1." in state.param else newer)[state]), state


@pytest.mark.parametrize("lost", ["optimizer.pt", "model.safetensors"])
def test_without_deepspeed_half_a_checkpoint_gives_nothing(run: Path, lost: str) -> None:
    """Weights without moments, or moments without weights, are no states to go on from."""
    shutil.rmtree(run / "partial")
    cut(run / "checkpoint-4" / lost)
    found = plan_salvage(run)
    assert found.composition is None and found.base.index.root == run / "checkpoint-2"


def test_a_lost_schedule_comes_with_older_trainer_state(run: Path) -> None:
    shutil.rmtree(run / "partial")
    newer = states(run / "checkpoint-4")
    (run / "checkpoint-4" / "scheduler.pt").unlink()
    found, composed = compose(run)
    assert found.base.step == 2 and composed.keys() == newer.keys()
    assert all(torch.equal(tensor, newer[state]) for state, tensor in composed.items())


def test_partial_checkpoints_hold_what_the_full_one_lost(run: Path) -> None:
    """Step 4 is in two partial checkpoints, together with step 3: nothing goes back as far as step 2."""
    held = {step: states(run / f"partial/step-{step:08}") for step in (3, 4)}
    cut(run / "checkpoint-4" / "optimizer.pt")
    found, composed = compose(run)
    steps = {row.part: row.step for row in rows(found)}
    assert set(steps.values()) == {3, 4} and found.base.step == 4
    assert found.base.index.form.is_partial
    part_of = found.composition.structure.part_of  # type: ignore[union-attr]
    compared = 0
    for state, tensor in composed.items():
        own = held[steps[part_of[state.param]]]
        if state in own:
            assert torch.equal(tensor.flatten(), own[state].flatten()), state
            compared += 1
    assert compared == sum(state.kind != "weight" for state in composed)


def test_a_damaged_partial_checkpoint_is_passed_over(run: Path) -> None:
    shutil.rmtree(run / "checkpoint-4")
    (bundle,) = (run / "partial/step-00000004").glob("rank-*.safetensors")
    cut(bundle)
    found, _ = compose(run)
    assert {row.step for row in rows(found)} == {2, 3} and found.base.step == 3
    assert found.newest[0] == 4 and found.refused
    assert not verify_checkpoint(run / "partial/step-00000004").is_resumable
