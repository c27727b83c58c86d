"""``--layout``: the checkpoint of one client with the files of another, from which that one's own loader resumes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from helpers.checkpoints import copy_of_partial
from helpers.composing import convert
from helpers.states import assert_same_states
from llmtailor.cli.main import cli
from llmtailor.containers.safetensors import SINGLE
from llmtailor.errors import MismatchError, SourceError, UnsupportedCheckpoint
from llmtailor.findings import WARNING
from llmtailor.formats.registry import index_checkpoint
from llmtailor.verify.verify import verify_checkpoint
from thin.scene import call
from trainings.catalogue import LOOPS, LOOPS_SAVED, long_but
from trainings.harness import (
    Run,
    Runs,
    Train,
)
from trainings.spec import Loop

pytestmark = pytest.mark.real
THERE_AND_BACK = {
    "engine-1": "accelerate",
    "engine-2": "accelerate",
    "engine-3": "trainer",
    "accelerate-3": "trainer",
    "accelerate-fsdp": "trainer",
    "accelerate-named": "trainer",
}
"""The losses of the straight run show that nothing is lost on the way."""
DIRECT = {
    "accelerate-2": Loop("engine-of-accelerate", stage=2),
    "engine-3": Loop("accelerate-of-engine", "accelerate", stage=3),
}


def checked(out: Path, client: str) -> Path:
    verdict = verify_checkpoint(out, deep=True)
    assert verdict.is_resumable and verdict.index is not None and verdict.index.framework == client, verdict.findings
    return out


@pytest.fixture(scope="module")
def resumed(runs: Runs, train: Train, selected: set[Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Convert what the tests of this session ask for, and resume from it."""
    folder, specs = tmp_path_factory.mktemp("converted"), []
    for name in sorted(THERE_AND_BACK.keys() & selected):
        own, via = LOOPS[name].client, THERE_AND_BACK[name]
        there = checked(convert(runs.checkpoint(name), folder / f"{name}-there" / "checkpoint-2", layout=via), via)
        back = checked(convert(there, folder / f"{name}-back" / "checkpoint-2", layout=own), own)
        specs.append(LOOPS[name].resumed(back, name))
    for name, spec in DIRECT.items():
        out = convert(runs.checkpoint(name), folder / spec.name / "checkpoint-2", layout=spec.client)
        specs.append(spec.resumed(checked(out, spec.client), spec.name))
    return train(specs)


LONG = {"engine-1", "accelerate-3", "accelerate-named"}
NAMES = long_but(THERE_AND_BACK.keys() - LONG, THERE_AND_BACK)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_lost_there_and_back(name: str, runs: Runs, resumed: dict[str, Run]) -> None:
    assert resumed[name].losses == runs[name].after(2)


def test_the_schedule_goes_on_as_the_other_loader_counts_it(resumed: dict[str, Run]) -> None:
    """An engine steps it with each step, accelerate once per process."""
    run = resumed["engine-of-accelerate"]
    saved = torch.load(run.checkpoint(4) / "global_step4" / "mp_rank_00_model_states.pt", weights_only=False)
    assert run.losses.keys() == {3, 4} and saved["lr_scheduler"]["last_epoch"] == 4
    run = resumed["accelerate-of-engine"]
    assert run.losses.keys() == {3, 4} and torch.load(run.checkpoint(4) / "scheduler.bin")["last_epoch"] == 8
    for name in ("engine-of-accelerate", "accelerate-of-engine"):
        index = index_checkpoint(resumed[name].checkpoint(4))
        assert {one.step for one in index.sub_groups} == {4}


@pytest.mark.parametrize("layout", ["accelerate", "deepspeed"])
@pytest.mark.parametrize("name", ["llama", "zero2", "llama-ds-scheduler"])
def test_what_the_trainer_has_saved(name: str, layout: str, runs: Runs, tmp_path: Path) -> None:
    source = runs[name].checkpoint(2)
    out = checked(convert(source, tmp_path / "checkpoint-2", layout=layout), layout)
    before, after = index_checkpoint(source), index_checkpoint(out)
    assert_same_states(after, before)
    trainers = {"trainer_state.json", "scheduler.pt", "training_args.bin", "rng_state_0.pth", "model.safetensors"}
    assert not trainers & after.files.keys()
    if layout == "deepspeed" and name == "llama":
        model = torch.load(out / after.zero.tag / "zero_pp_rank_0_mp_rank_00_model_states.pt", weights_only=False)
        assert model["lr_scheduler"] == torch.load(source / "scheduler.pt")
    if layout == "accelerate":
        assert (source / "scheduler.pt").exists() == (out / "scheduler.bin").exists()
        states = torch.load(source / "rng_state_1.pth", weights_only=False)
        assert torch.load(out / "random_states_1.pkl", weights_only=False)["random_state"] == states["python"]


def test_a_checkpoint_that_lacks_its_clients_state_is_another_clients(runs: Runs, tmp_path: Path) -> None:
    source = tmp_path / "checkpoint-2"
    shutil.copytree(runs["llama"].checkpoint(2), source)
    (source / "trainer_state.json").unlink()
    with pytest.raises(SourceError, match="the Trainer can't resume without it"):
        convert(source, tmp_path / "refused")
    checked(convert(source, tmp_path / "out", layout="deepspeed"), "deepspeed")


def test_a_run_of_partial_checkpoints_for_another_loader(runs: Runs, tmp_path: Path) -> None:
    run = copy_of_partial(runs["accelerate-2-saver"].folder, tmp_path / "run")
    assert LOOPS_SAVED["accelerate-2-saver"].client == "accelerate"
    told = call("merge", "--run", run, "--layout", "deepspeed")
    assert index_checkpoint(checked(Path(told["out"]), "deepspeed")).global_step == 4
    assert "engine.load_checkpoint" in (Path(told["out"]) / "README.md").read_text()


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("engine-3", {"layout": "lightning"}, "use --layout trainer, accelerate or deepspeed"),
        ("engine-3", {"layout": "deepspeed", "stage": 0}, "use --stage 1, 2 or 3"),
        ("accelerate-ddp", {"layout": "deepspeed"}, "use --layout trainer or accelerate"),
        ("accelerate-2", {"layout": "accelerate", "to": "dcp"}, "leave out --layout, or name another format with --to"),
    ],
)
def test_what_can_not_be_done_is_told_with_what_can(
    name: str, options: dict[str, Any], told: str, runs: Runs, tmp_path: Path
) -> None:
    with pytest.raises(MismatchError, match=f"--layout: .*(\n.*)*{told}"):
        convert(runs.checkpoint(name), tmp_path / "out", **options)


def test_weights_in_several_files_are_refused_where_one_is_read(runs: Runs, tmp_path: Path) -> None:
    source = tmp_path / "checkpoint-2"
    convert(runs.checkpoint("accelerate-ddp"), source, layout="trainer")
    model = AutoModelForCausalLM.from_pretrained(source)
    (source / SINGLE).unlink()
    model.save_pretrained(source, max_shard_size="40KB")
    verdict = verify_checkpoint(source, deep=True)  # of a composite, whose weights the user has sharded anew
    assert verdict.is_resumable and {one.severity for one in verdict.findings} == {WARNING}
    assert any("the weights are no longer in the files that were written" in one.what for one in verdict.findings)
    with pytest.raises(UnsupportedCheckpoint, match=f"{SINGLE} only"):
        convert(source, tmp_path / "out", layout="accelerate")


def test_a_schedule_that_had_to_be_made_is_told(runs: Runs, tmp_path: Path) -> None:
    source = tmp_path / "checkpoint-2"
    shutil.copytree(runs.checkpoint("accelerate-2"), source)
    (source / "scheduler.bin").unlink()
    words = ("convert", source, tmp_path / "out", "--layout", "deepspeed", "--json")
    result = CliRunner().invoke(cli, [*map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    assert "lr_scheduler in the model states is made for step 2" in result.output
    checked(tmp_path / "out", "deepspeed")


def test_a_loop_without_a_scheduler_gets_no_rates_for_one(runs: Runs, tmp_path: Path) -> None:
    base = tmp_path / "run" / "checkpoint-4"
    shutil.copytree(runs.checkpoint("accelerate-ddp", 4), base)
    (base / "scheduler.bin").unlink()
    state = torch.load(base / "optimizer.bin", weights_only=False)
    for group in state["param_groups"]:
        del group["initial_lr"]
    torch.save(state, base / "optimizer.bin")
    back = convert(convert(base, tmp_path / "fsdp", to="fsdp"), tmp_path / "back", stage=0)
    made = torch.load(back / "optimizer.bin", weights_only=False)
    assert not [group for group in made["param_groups"] if "initial_lr" in group]
    for path in tmp_path.glob("fsdp/**/.metadata"):
        assert "initial_lr" not in path.read_bytes().decode("latin-1")
