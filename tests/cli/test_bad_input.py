"""Whatever a user gets wrong ends in a message with the place and a mend, an exit code, and nothing written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
import torch

from helpers.checkpoints import SMALL, edit, make, make_run, model_states, optim_states
from helpers.commands import run_here
from helpers.composing import convert
from helpers.files import contents
from llmtailor.cli.command import REMOVED
from llmtailor.cli.main import cli
from llmtailor.compose import plan

RECIPE = "base_model: checkpoint-200\nparts:\n  - from: checkpoint-100\n    select: [odd]\n"


@pytest.fixture
def run(tmp_path):
    """A run's folder with two checkpoints that a test may damage."""
    return make_run(tmp_path / "run", (100, 200))


def merge(run: Path, recipe: str = RECIPE, *options: str) -> subprocess.CompletedProcess[str]:
    (run / "recipe.yaml").write_text(recipe)
    return run_here("merge", "recipe.yaml", "out", *options, cwd=run)


def refused(run: Path, code: int, *told: str, recipe: str = RECIPE, options: tuple[str, ...] = ()) -> str:
    """Merge, and demand the refusal that is expected; return stderr."""
    before = contents(run, "recipe.yaml")
    result = merge(run, recipe, *options)
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    for words in told:
        assert words in result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    fixes = [line for line in result.stderr.splitlines() if line.startswith("  fix: ")]
    assert 0 < len(errors) <= len(fixes)
    assert contents(run, "recipe.yaml") == before
    assert not [path for path in run.iterdir() if "staging" in path.name]
    return result.stderr


@pytest.mark.parametrize("ranks", ["100000", "1000000000"])
def test_more_ranks_than_a_param_has_elements(run, ranks):
    refused(run, 5, f"{int(ranks):,} ranks are more than the 1,024", options=("--num-gpu", ranks, "--dry-run"))


def test_many_files_are_told_before_they_are_written(run, monkeypatch):
    monkeypatch.setattr(plan, "_MANY_FILES", 8)
    told = merge(run, RECIPE, "--num-gpu", "3", "--dry-run")
    assert told.returncode == 0
    assert "for 3 ranks, the output has" in told.stderr


def test_the_undamaged_case_works(run):
    """In a process of its own, as users have it; all others run here."""
    (run / "recipe.yaml").write_text(RECIPE)
    command = [sys.executable, "-m", "llmtailor", "merge", "recipe.yaml", "out"]
    result = subprocess.run(command, cwd=run, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "wrote out" in result.stdout
    assert (run / "out" / "llmtailor.json").is_file()


# --- sources ---------------------------------------------------------------------------------------------------------


def both(change: Callable[[Path, int], object]) -> Callable[[Path], None]:
    """Do something to the files of both ranks of checkpoint-100."""

    def apply(run: Path) -> None:
        for rank in (0, 1):
            change(run / "checkpoint-100", rank)

    return apply


def from_another(run: Path, other: Path) -> None:
    for which in (optim_states, model_states):
        shutil.copy(which(other, 1), which(run / "checkpoint-100", 1))


def state_of(tree):
    return tree["optimizer_state_dict"]["optimizer_state_dict"]["state"]


def edited(change: Callable[[Any], object]) -> Callable[[Path], None]:
    """Change what one rank has saved of its optimizer."""
    return lambda run: edit(optim_states(run / "checkpoint-100", 1), change)


def config(**changes: object) -> Callable[[Path], None]:
    return both(lambda checkpoint, rank: edit(model_states(checkpoint, rank), lambda tree: tree.update(changes)))


def touch(name: str, content: bytes = b"x") -> Callable[[Path], object]:
    return lambda run: (run / "checkpoint-100" / "global_step100" / name).write_bytes(content)


def only(*files: str) -> Callable[[Path], None]:
    """Make checkpoint-100 consist of these files alone."""

    def apply(run: Path) -> None:
        shutil.rmtree(run / "checkpoint-100")
        (run / "checkpoint-100").mkdir()
        for file in files:
            (run / "checkpoint-100" / file).parent.mkdir(exist_ok=True)
            (run / "checkpoint-100" / file).write_bytes(b"x")

    return apply


def without_zero(checkpoint: Path, rank: int) -> None:
    optim_states(checkpoint, rank).unlink()
    path = model_states(checkpoint, rank)
    path.rename(path.with_name("mp_rank_00_model_states.pt"))


def of_another_stage(run: Path) -> None:
    other = run.parent / "other" / "checkpoint-100"
    convert(run / "checkpoint-100", other, stage=2)
    shutil.copy(optim_states(other, 1), optim_states(run / "checkpoint-100", 1))


def made_anew(**changes: Any) -> Callable[[Path], None]:
    def apply(run: Path) -> None:
        shutil.rmtree(run / "checkpoint-100")
        make(run, 100, **changes)

    return apply


def without_prefix(checkpoint: Path, rank: int) -> None:
    path = optim_states(checkpoint, rank)
    path.rename(path.with_name(path.name.removeprefix("bf16_")))


def halved(tree):
    for state in state_of(tree).values():
        state["exp_avg"] = state["exp_avg"].bfloat16()


LATEST = "checkpoint-100/latest"
SOURCES = [
    # what is there; tests/verify has every damage of one checkpoint
    (lambda run: shutil.rmtree(run / "checkpoint-100"), 4,
     ["checkpoint-100: there is no such checkpoint folder", "checkpoint-200"]),
    (lambda run: [which(run / "checkpoint-100", 1).unlink() for which in (optim_states, model_states)], 4,
     ["optim_states shard 1 of 2 is missing", "model_states shard 1 of 2 is missing"]),
    (lambda run: (run / LATEST).unlink(), 4, [LATEST, "printf %s global_step100"]),
    (lambda run: from_another(run, run / "checkpoint-200"), 4,
     ["global_steps differs from that of rank 0 (200 and 100)", "Adam's step differs"]),
    (lambda run: from_another(run, make(run.parent / "three", 100, world_size=3)), 4,
     ["dp_world_size differs", "partition_count differs from that of rank 0 (3 and 2)"]),
    (of_another_stage, 4, ["an optimizer shard of ZeRO-1 or ZeRO-2, but its model states are of ZeRO-3", "two runs"]),
    (edited(lambda tree: state_of(tree)[0].pop("exp_avg")), 4,
     ["sub-group 0 lacks the state exp_avg, which others have"]),
    (edited(lambda tree: state_of(tree)[0].update(row_factor=torch.zeros(3, 2))), 4,
     ["of another kind than those of the other ranks"]),
    (edited(lambda tree: tree.clear()), 4, ["optimizer_state_dict is missing"]),
    # other parallelism, and other kinds of checkpoint, are refused by name
    (touch("layer_00-model_00-model_states.pt"), 4, ["pipeline parallelism"]),
    (touch("layer_0_expert_0_mp_rank_00_model_states.pt"), 4, ["expert parallelism"]),
    (touch("zero_pp_rank_0_mp_rank_01_model_states.pt"), 4, ["2 tensor-parallel ranks, but"]),
    (lambda run: (run / "checkpoint-100/global_step100/offloaded_tensors").mkdir(), 4, ["NVMe"]),
    (both(without_zero), 4, ["without ZeRO (stage 0)"]),
    (config(mp_world_size=2), 4, ["tensor parallelism"]),
    (config(mp_world_size="2"), 4, ["tensor (model) parallelism"]),
    (config(mp_world_size=2, checkpoint_parallel_dimensions={}), 4, ["save again"]),
    (config(checkpoint_parallel_dimensions={"pp_degree": 2, "tp_degree": 1}), 4, ["pipeline parallelism"]),
    (config(num_experts=[4]), 4, ["expert parallelism"]),
    (config(ds_config={"zero_optimization": {"mics_shard_size": 2}}), 4, ["MiCS"]),
    (config(ds_config={"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}), 4, ["NVMe"]),
    (only("optimizer.pt", "model.safetensors"), 4, ["optimizer.pt"]),  # a plain Trainer's, but no torch file
    (only("pytorch_model_fsdp.bin", "optimizer.bin"), 4, ["not a torch.save file"]),
    (only("pytorch_model_fsdp_0/.metadata"), 4, ["this folder holds weights only"]),
    (only(".metadata"), 4, ["the pickle is damaged"]),
    (only("model.safetensors"), 4, ["weights only"]),
    (only("mp_rank_00_model_states.pt"), 4, ["without ZeRO (stage 0)"]),  # a tag folder, named itself
    (only(), 4, ["this is not a checkpoint"]),
    # sources that do not fit together
    (made_anew(shape=replace(SMALL, num_layers=3)), 5, ["it lacks", "model.layers.3"]),
    (made_anew(shape=replace(SMALL, num_layers=5)), 5, ["it has", "model.layers.4"]),
    (made_anew(shape=replace(SMALL, vocab_size=12)), 5, ["shapes differ", "[12, 6] instead of [11, 6]"]),
    (made_anew(shape=replace(SMALL, tied=True)), 5,
     ["its tied weights are lm_head.weight", "lacks lm_head.weight"]),
    (made_anew(groups="layer"), 5, ["it has 11 param groups (", "has 2 param groups ("]),
    (both(without_prefix), 5, ["it was trained in F32, the base in BF16"]),
    (both(lambda checkpoint, rank: edit(optim_states(checkpoint, rank), halved)), 5,
     ["exp_avg of", "is BF16 instead of F32"]),
]  # fmt: skip


@pytest.mark.parametrize(("change", "code", "told"), SOURCES, ids=[row[2][-1][:40] for row in SOURCES])
def test_sources(run, change, code, told):
    change(run)
    refused(run, code, *told)


def test_a_runs_folder_and_a_tag_folder(run):
    refused(run, 4, "name one of checkpoint-100, checkpoint-200", recipe=RECIPE.replace("checkpoint-100", "."))
    inside = RECIPE.replace("checkpoint-100", "checkpoint-100/global_step100")
    refused(run, 4, "the tag folder inside a checkpoint", recipe=inside)


# --- the target ------------------------------------------------------------------------------------------------------


def test_the_output_exists(run):
    (run / "out").mkdir()
    (run / "out" / "trainer_state.json").write_text("x")
    refused(run, 6, "out: the output already exists", "--force")
    assert merge(run, RECIPE, "--force").returncode == 0
    assert (run / "out" / "trainer_state.json").read_text() != "x"


def test_the_output_is_a_source(run):
    recipe = RECIPE.replace("checkpoint-200", "out")
    (run / "checkpoint-200").rename(run / "out")
    refused(run, 6, "the output is", "which is a source", recipe=recipe, options=("--force",))


def test_no_space(run):
    """A sparse source that is larger than the disk; the plan is made, and refused before a byte is written."""
    path = run / "checkpoint-200" / "huge.bin"
    with path.open("wb") as file:
        file.truncate(shutil.disk_usage(run).free + (1 << 30))
    result = merge(run)
    assert result.returncode == 8
    assert "bytes are needed, but" in result.stderr
    assert not (run / "out").exists()
    assert merge(run, RECIPE, "--dry-run").returncode == 8


# --- all at once -----------------------------------------------------------------------------------------------------


def test_everything_is_said_at_once(run):
    (run / "checkpoint-100" / "latest").write_text("nowhere")
    (run / "checkpoint-200" / "trainer_state.json").unlink()
    (run / "out").mkdir()
    recipe = RECIPE + "  - from: checkpoint-300\n    select: [99, nrom]\n"
    stderr = refused(
        run, 3, "99", "nrom", "checkpoint-100/latest", "checkpoint-300", "trainer_state.json", "out: ",
        recipe=recipe,
    )  # fmt: skip
    assert "6 problems; nothing was written" in stderr


@pytest.mark.parametrize(("debug", "wanted"), [("1", True), ("0", False), ("", False)])
def test_a_traceback_only_on_demand(run, debug, wanted):
    """With all causes, and the message as ever."""
    result = run_here("merge", "nowhere.yaml", cwd=run, env={"LLMTAILOR_DEBUG": debug})
    assert result.returncode == 3
    assert ("Traceback" in result.stderr) is wanted
    assert ("FileNotFoundError: [Errno 2]" in result.stderr) is wanted
    message = "the recipe can't be read: No such file or directory\n  fix: give the path of a readable recipe file"
    assert result.stderr.endswith(f"error: nowhere.yaml: {message}\n")


@pytest.mark.parametrize("arguments", [["inspect", "checkpoint-100"], ["--help"]])
def test_a_reader_that_has_gone(run, arguments):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "llmtailor", *arguments]
    result = subprocess.run(command, cwd=run, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (result.returncode, result.stderr) == (141, "")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["marge", "recipe.yaml"], "No such command 'marge'. Did you mean 'merge'?"),
        (["thin", ".", "--select", "evn"], "did you mean 'even'?"),
        (["thin", ".", "--select", "layer3"], "did you mean 'layer 3'?"),
        (["diff", "checkpoint-100", "checkpoint-200", "--kind", "exp_agv"], "did you mean 'exp_avg'?"),
    ],
)
def test_near_misses_get_a_suggestion(run, words, told):
    result = run_here(*words, cwd=run)
    assert (result.returncode, told in result.stderr) == (2, True), result.stderr


def test_completion_of_the_shell(run):
    asked = {"_LLMTAILOR_COMPLETE": "bash_complete", "COMP_WORDS": "llmtailor me", "COMP_CWORD": "1"}
    result = run_here(cwd=run, env=asked)
    assert (result.returncode, result.stdout, result.stderr) == (0, "plain,merge\n", "")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("merge", "it needs a recipe"),
        ("nonsense", "No such command"),
        ("merge a --num-gpu none", "not a valid integer"),
        ("merge a b c", "unexpected extra argument"),
        ("thin run --never", "No such option"),
    ],
)
def test_usage(tmp_path, words, told):
    result = run_here(*words.split(), cwd=tmp_path)
    assert (result.returncode, told in result.stderr, "Traceback" in result.stderr) == (2, True, False), result.stderr


# --- an option that is gone is refused with what does its job now ----------------------------------------------------


@pytest.mark.parametrize(("command", "option"), REMOVED)
def test_a_removed_option_is_refused_with_what_does_its_job(command, option, tmp_path):
    result = run_here(command, "x", option, cwd=tmp_path)
    assert result.returncode == 2
    lines = [f"error: {option}: llmtailor {command} has no such option", f"  fix: {REMOVED[command, option]}"]
    assert result.stderr.splitlines() == lines
    flags = {flag for param in cli.get_command(click.Context(cli), command).params for flag in param.opts}
    assert option not in flags and {word for word in lines[1].split() if word[:2] == "--"} <= flags
