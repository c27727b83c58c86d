"""Whatever a user gets wrong ends in a message with the place and a mend, an exit code, and nothing written."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import llmtailor
from helpers.checkpoints import SMALL, edit, make, model_states, optim_states
from helpers.commands import run_here
from llmtailor.recipe import Recipe

RECIPE = "base_model: checkpoint-200\nparts:\n  - from: checkpoint-100\n    select: [odd]\n"


@pytest.fixture(scope="session")
def pristine(tmp_path_factory):
    root = tmp_path_factory.mktemp("pristine")
    for step in (100, 200):
        make(root, step)
    return root


@pytest.fixture
def run(pristine, tmp_path):
    """A run's folder with two checkpoints that a test may damage."""
    shutil.copytree(pristine, tmp_path / "run")
    return tmp_path / "run"


def merge(run: Path, recipe: str = RECIPE, *options: str) -> subprocess.CompletedProcess[str]:
    (run / "recipe.yaml").write_text(recipe)
    return run_here("merge", "recipe.yaml", "out", *options, cwd=run)


def refused(run: Path, code: int, *told: str, recipe: str = RECIPE, options: tuple[str, ...] = ()) -> str:
    """Merge, and demand the refusal that is expected; return stderr."""
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    result = merge(run, recipe, *options)
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    for words in told:
        assert words in result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    fixes = [line for line in result.stderr.splitlines() if line.startswith("  fix: ")]
    assert errors
    assert len(fixes) >= len(errors)
    (run / "recipe.yaml").unlink()
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == {
        path: data for path, data in before.items() if path.name != "recipe.yaml"
    }
    assert not [path for path in run.iterdir() if "staging" in path.name]
    return result.stderr


def test_the_undamaged_case_works(run):
    """In a process of its own, as users have it; all others run here."""
    (run / "recipe.yaml").write_text(RECIPE)
    command = [sys.executable, "-m", "llmtailor", "merge", "recipe.yaml", "out"]
    result = subprocess.run(command, cwd=run, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "wrote out" in result.stdout
    assert (run / "out" / "llmtailor.json").is_file()


# --- the recipe ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "told"),
    [
        ("base_modle: checkpoint-200\n" + RECIPE, ["base_modle", "base_model", "recipe.yaml:1"]),
        ("base_model: [unclosed\nparts: {", ["recipe.yaml:"]),
        ("- just\n- a list\n", ["recipe.yaml"]),
        ("", ["recipe.yaml"]),
        (RECIPE.replace("odd", "12"), ["12", "4 layers"]),
        (RECIPE.replace("odd", "lm_hed"), ["lm_hed", "lm_head"]),
        (
            "slices:\n"
            "  - sources: [{model: checkpoint-100, layer_range: [0, 3]}]\n"
            "  - sources: [{model: checkpoint-200, layer_range: [2, 4]}]\n"
            "base_model: checkpoint-200\n",
            ["layer 2"],
        ),
        ("parts:\n  - from: checkpoint-100\n    select: [odd, norm]\n", ["embed_tokens", "lm_head", "layer"]),
        (RECIPE + "merge_method: slerp\n", ["slerp", "passthrough"]),
        (RECIPE + "output: ${NOWHERE_AT_ALL}/out\n", ["NOWHERE_AT_ALL"]),
    ],
)
def test_recipes(run, recipe, told):
    refused(run, 3, *told, recipe=recipe)


def test_a_missing_recipe(run):
    result = run_here("merge", "nowhere.yaml", cwd=run)
    assert result.returncode == 3
    assert "nowhere.yaml" in result.stderr
    assert "Traceback" not in result.stderr


# --- one source ------------------------------------------------------------------------------------------------------


def test_a_missing_checkpoint(run):
    shutil.rmtree(run / "checkpoint-100")
    refused(run, 4, "checkpoint-100: there is no such checkpoint folder", "checkpoint-200")


def test_a_runs_folder_and_a_tag_folder(run):
    refused(run, 4, "name one of checkpoint-100, checkpoint-200", recipe=RECIPE.replace("checkpoint-100", "."))
    inside = RECIPE.replace("checkpoint-100", "checkpoint-100/global_step100")
    refused(run, 4, "the tag folder inside a checkpoint", recipe=inside)


@pytest.mark.parametrize("which", [optim_states, model_states])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_shard(run, which, rank):
    which(run / "checkpoint-100", rank).unlink()
    # with the last rank's files of one kind gone, the other kind still tells how many there were
    refused(run, 4, f"shard {rank} of 2 is missing")


def test_both_files_of_the_last_rank_missing(run):
    optim_states(run / "checkpoint-100", 1).unlink()
    model_states(run / "checkpoint-100", 1).unlink()
    refused(run, 4, "optim_states shard 1 of 2 is missing", "model_states shard 1 of 2 is missing")


def test_shards_of_a_larger_run_beside(run):
    for which in (optim_states, model_states):
        path = which(run / "checkpoint-100", 1)
        shutil.copy(path, str(path).replace("rank_1_mp", "rank_2_mp"))
    refused(run, 4, "shards of 3 ranks, but they say that 2 ranks saved them")


@pytest.mark.parametrize("which", [optim_states, model_states])
@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda data: data[:-100], "truncated"),
        (lambda data: data[: len(data) // 2], "truncated"),
        (lambda data: b"", "empty"),
        (lambda data: b"not a zip at all", "not a torch.save file"),
    ],
)
def test_a_damaged_shard(run, which, damage, told):
    path = which(run / "checkpoint-100", 1)
    path.write_bytes(damage(path.read_bytes()))
    refused(run, 4, path.name, told)


def test_damaged_weights(run):
    path = run / "checkpoint-200" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    refused(run, 4, "model.safetensors", "truncated")


@pytest.mark.parametrize("content", ["global_step300", "", "../checkpoint-200", "global_step100/x"])
def test_latest_pointing_nowhere(run, content):
    (run / "checkpoint-100" / "latest").write_text(content)
    refused(run, 4, "checkpoint-100/latest", "global_step100")


def test_latest_missing(run):
    (run / "checkpoint-100" / "latest").unlink()
    refused(run, 4, "checkpoint-100/latest", "printf %s global_step100")


def test_model_states_from_another_step(run):
    for rank in (0, 1):
        shutil.copy(model_states(run / "checkpoint-200", rank), model_states(run / "checkpoint-100", rank))
    refused(run, 4, "the model states are from step 200, but the tag folder says 100")


def test_optimizer_states_from_another_step(run):
    for rank in (0, 1):
        shutil.copy(optim_states(run / "checkpoint-200", rank), optim_states(run / "checkpoint-100", rank))
    refused(run, 4, "the model states are from step 100", "the optimizer states from step 200")


def test_one_rank_from_another_step(run):
    shutil.copy(optim_states(run / "checkpoint-200", 1), optim_states(run / "checkpoint-100", 1))
    shutil.copy(model_states(run / "checkpoint-200", 1), model_states(run / "checkpoint-100", 1))
    refused(run, 4, "global_steps differs from that of rank 0 (200 and 100)", "Adam's step differs")


def test_a_rank_of_another_world_size(run, tmp_path):
    other = make(tmp_path / "three", 100, world_size=3)
    shutil.copy(optim_states(other, 1), optim_states(run / "checkpoint-100", 1))
    shutil.copy(model_states(other, 1), model_states(run / "checkpoint-100", 1))
    refused(run, 4, "dp_world_size differs", "partition_count differs from that of rank 0 (3 and 2)")


def test_a_shard_of_another_stage(run, tmp_path):
    other = tmp_path / "other" / "checkpoint-100"
    llmtailor.merge(Recipe("x", "", run / "checkpoint-100", (), None, None), other, llmtailor.Options(stage=2))
    shutil.copy(optim_states(other, 1), optim_states(run / "checkpoint-100", 1))
    told = refused(run, 4, "an optimizer shard of ZeRO-1 or ZeRO-2, but its model states are of ZeRO-3", "two runs")
    assert "only ZeRO-3" not in told


def state_of(tree):
    return tree["optimizer_state_dict"]["optimizer_state_dict"]["state"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda tree: state_of(tree).pop(1), "the optimizer state of sub-group 1 is missing"),
        (lambda tree: state_of(tree).clear(), "Adam's step differs"),
        (lambda tree: tree["optimizer_state_dict"]["fp32_flat_groups"].pop(), "1 master tensors"),
        (lambda tree: state_of(tree)[0].update(exp_avg=torch.zeros(3)), "exp_avg of sub-group 0 has 3 elements"),
        (lambda tree: state_of(tree)[0].pop("exp_avg"), "but sub-group 0 has master, exp_avg_sq"),
        (lambda tree: state_of(tree)[0].update(step=torch.tensor(99.0)), "Adam's step differs"),
        (lambda tree: tree["optimizer_state_dict"].pop("loss_scaler"), "loss_scaler is missing"),
        (
            lambda tree: state_of(tree)[0].update(row_factor=torch.zeros(3, 2)),
            "of another kind than those of the other ranks",
        ),
        (lambda tree: tree.clear(), "optimizer_state_dict is missing"),
    ],
)
def test_what_stock_deepspeed_swallows(run, change, told):
    edit(optim_states(run / "checkpoint-100", 1), change)
    refused(run, 4, told)


def test_an_empty_state_on_every_rank(run):
    for rank in (0, 1):
        edit(optim_states(run / "checkpoint-100", rank), lambda tree: state_of(tree).clear())
    refused(run, 4, "the optimizer states from step 0")


def test_a_short_flat_tensor_on_every_rank(run):
    def shorten(tree):
        flats = tree["optimizer_state_dict"]["fp32_flat_groups"]
        flats[1] = flats[1].detach()[:-1].clone()
        for kind in ("exp_avg", "exp_avg_sq"):
            state_of(tree)[1][kind] = state_of(tree)[1][kind][:-1].clone()

    for rank in (0, 1):
        edit(optim_states(run / "checkpoint-100", rank), shorten)
    refused(run, 4, "elements instead of")


class Evil:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {shlex.quote(str(self.marker))}",)


@pytest.mark.parametrize("file", ["optim", "model", "scheduler.pt", "rng_state_1.pth"])
def test_unsafe_pickles(run, file, tmp_path):
    checkpoint = run / "checkpoint-200"
    path = {"optim": optim_states(checkpoint), "model": model_states(checkpoint)}.get(file, checkpoint / file)
    edit(path, lambda tree: tree.update(extra=[Evil(tmp_path / "ran")]))
    refused(run, 4, path.name, "system")
    assert not (tmp_path / "ran").exists()
    torch.load(path, weights_only=False) if file not in ("optim",) else None
    assert file == "optim" or (tmp_path / "ran").exists()  # the exploit is a real one


def touch(name):
    return lambda checkpoint: (checkpoint / "global_step100" / name).write_bytes(b"x")


def no_zero(checkpoint):
    for rank in (0, 1):
        optim_states(checkpoint, rank).unlink()
        path = model_states(checkpoint, rank)
        path.rename(path.with_name("mp_rank_00_model_states.pt"))


def config(**changes):
    def change(checkpoint):
        for rank in (0, 1):
            edit(model_states(checkpoint, rank), lambda tree: tree.update(changes))

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (touch("layer_00-model_00-model_states.pt"), "pipeline parallelism"),
        (touch("layer_0_expert_0_mp_rank_00_model_states.pt"), "expert parallelism"),
        (touch("zero_pp_rank_0_mp_rank_01_model_states.pt"), "tensor (model) parallelism"),
        (lambda checkpoint: (checkpoint / "global_step100/offloaded_tensors").mkdir(), "NVMe"),
        (no_zero, "without ZeRO (stage 0)"),
        (config(mp_world_size=2), "tensor (model) parallelism"),
        (config(checkpoint_parallel_dimensions={"pp_degree": 2, "tp_degree": 1}), "pipeline parallelism"),
        (config(num_experts=[4]), "expert parallelism"),
        (config(ds_config={"zero_optimization": {"mics_shard_size": 2}}), "MiCS"),
        (config(ds_config={"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}), "NVMe"),
    ],
)
def test_other_parallelism_is_refused_by_name(run, change, told):
    change(run / "checkpoint-100")
    refused(run, 4, told)


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (["optimizer.pt", "model.safetensors"], "optimizer.pt"),  # a plain Trainer's, but no torch file
        (["pytorch_model_fsdp.bin", "optimizer.bin"], "not a torch.save file"),
        (["pytorch_model_fsdp_0/.metadata"], "this folder holds weights only"),
        ([".metadata"], "the pickle is damaged"),
        (["model.safetensors"], "weights only"),
        (["mp_rank_00_model_states.pt"], "without ZeRO (stage 0)"),  # a tag folder, named itself
        ([], "this is not a checkpoint"),
    ],
)
def test_other_kinds_of_checkpoint_are_refused_by_name(run, files, told):
    shutil.rmtree(run / "checkpoint-100")
    (run / "checkpoint-100").mkdir()
    for file in files:
        (run / "checkpoint-100" / file).parent.mkdir(exist_ok=True)
        (run / "checkpoint-100" / file).write_bytes(b"x")
    refused(run, 4, told)


# --- sources that do not fit together --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"shape": replace(SMALL, num_layers=3)}, ["it lacks", "model.layers.3"]),
        ({"shape": replace(SMALL, num_layers=5)}, ["it has", "model.layers.4"]),
        ({"shape": replace(SMALL, vocab_size=12)}, ["shapes differ", "[12, 6] instead of [11, 6]"]),
        ({"shape": replace(SMALL, tied=True)}, ["its tied weights are lm_head.weight", "lacks lm_head.weight"]),
        ({"groups": "layer"}, ["its param groups do not match", "11 param groups", "2 param groups"]),
    ],
)
def test_sources_that_differ(run, changes, told):
    shutil.rmtree(run / "checkpoint-100")
    make(run, 100, **changes)
    refused(run, 5, *told)


def test_precision_differs(run):
    for rank in (0, 1):
        path = optim_states(run / "checkpoint-100", rank)
        path.rename(path.with_name(path.name.removeprefix("bf16_")))
    refused(run, 5, "it was trained in F32, the base in BF16")


def test_dtypes_differ(run):
    def cast(tree):
        for state in state_of(tree).values():
            state["exp_avg"] = state["exp_avg"].bfloat16()

    for rank in (0, 1):
        edit(optim_states(run / "checkpoint-100", rank), cast)
    refused(run, 5, "exp_avg of", "is BF16 instead of F32")


def test_no_trainer_state_in_the_base(run):
    (run / "checkpoint-200" / "trainer_state.json").unlink()
    refused(run, 4, "checkpoint-200/trainer_state.json")


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


def test_usage(run):
    for arguments in (["merge"], ["nonsense"], ["merge", "a", "--num-gpu", "none"], ["merge", "a", "b", "c"]):
        result = run_here(*arguments, cwd=run)
        assert result.returncode == 2
        assert "Traceback" not in result.stderr
