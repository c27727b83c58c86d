"""Full checkpoints that become partial ones with rounded states, and composites of these."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from helpers.commands import run_here
from helpers.files import edit_json
from helpers.states import in_8_bits, in_24_bits, read, refined
from llmtailor.errors import UsageError
from llmtailor.formats.registry import index_checkpoint
from llmtailor.model.precision import PrecisionOptions
from llmtailor.model.roles import State
from llmtailor.runs.prune import ThinOptions
from llmtailor.runs.thin_plan import plan_thinning
from oracle import any as oracle_any
from oracle.zero3 import MOMENTS
from thin.scene import call, compose, make_run


def nearest(value: torch.Tensor, exact: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the value if it may be the exact one rounded."""
    one, other = (tensor.double().sqrt() if kind == "exp_avg_sq" else tensor for tensor in (value, exact))
    return value if ((one - other).abs() <= other.abs().max() / 250).all() else exact


@pytest.mark.real
@pytest.mark.parametrize("name", ["llama", "zero2"])
def test_composites_have_the_newest_weights(tmp_path, runs, name):
    """Masters of 24 bits and moments of 8 are saved in turn, and the bf16 weights of the other masters."""
    for step in (2, 4, 6):
        shutil.copytree(runs.checkpoint(name, step), tmp_path / f"checkpoint-{step}")
    truth = {step: oracle_any.load(runs.checkpoint(name, step)) for step in (2, 4, 6)}
    words = ("--strategy", "moments_in_turn:2", "--masters", "bf16", "--moments", "8bit", "--yes")
    before = [row["num_bytes"] for row in call("thin", tmp_path, *words)["checkpoints"]]
    partial = tmp_path / "partial" / "step-00000004"
    assert sum(one.stat().st_size for one in partial.glob("rank-*")) < before[1] / 2
    done = run_here("verify", partial, "--deep")
    assert done.returncode == 0 and "moments were saved in 8 bits" in done.stdout
    found, older = oracle_any.load(compose(tmp_path, 4, tmp_path / "out")), 0
    call("verify", tmp_path / "out", "--deep")
    for key, value in found.states.items():
        exact = truth[4].states[key]
        if key.kind == "master":
            wanted = [in_24_bits(exact), refined(exact, in_24_bits(truth[2].states[key]))]
            assert torch.equal(value.bfloat16(), exact.bfloat16())
        elif key.kind not in MOMENTS:
            wanted = [exact]
        elif name == "llama":
            wanted = [in_8_bits(truth[step].states[key], key.kind, 2) for step in (4, 2)]
        else:  # the ranks' partitions begin blocks anywhere
            wanted = [nearest(value, truth[step].states[key], key.kind) for step in (4, 2)]
        assert any(torch.equal(value, one) for one in wanted), key
        older += torch.equal(value, wanted[-1]) and len(wanted) > 1
    assert 0 < older < len(found.states)


@pytest.mark.real
@pytest.mark.parametrize("name", ["columns", "no-fsdp"])
def test_states_that_lie_in_many_pieces_are_rounded_piece_by_piece(tmp_path, runs, name):
    steps = sorted(runs[name].held)[:2]
    for step in steps:
        shutil.copytree(runs.checkpoint(name, step), tmp_path / f"checkpoint-{step}")
    words = ("--strategy", "full", "--masters", "24bit", "--moments", "8bit", "--yes", "--trust-unrecorded")
    call("thin", tmp_path, *words)
    assert not (tmp_path / f"checkpoint-{steps[0]}").exists()
    found = index_checkpoint(compose(tmp_path, steps[0], tmp_path / "out"))
    for param, exact in runs[name].held[steps[0]]["states"].items():
        assert torch.equal(
            read(found.root, found.held[State(param, "master")]),
            in_24_bits(runs[name].held[steps[0]]["weights"][param]),
        )
        for kind in MOMENTS:
            value = read(found.root, found.held[State(param, kind)])
            assert torch.equal(value, nearest(value, exact[kind], kind)), (param, kind)


def test_what_is_no_rounding_is_refused(tmp_path):
    run = make_run(tmp_path / "run", (100, 200), "trainer")
    with pytest.raises(UsageError, match="only DeepSpeed's bf16 trainings have bf16 weights"):
        plan_thinning(run, ThinOptions(1, "full", (), PrecisionOptions("bf16")))
    done = run_here("thin", run, "--keep-optimizer-last", 1, "--moments", "8bit")
    assert done.returncode == 2 and "they round optimizer states, of which none are kept" in done.stderr


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_moment_that_8_bits_cannot_hold_is_refused(tmp_path, value):
    run = make_run(tmp_path / "run", (100, 200), "trainer")
    path = run / "checkpoint-100" / "optimizer.pt"
    tree = torch.load(path, weights_only=False)
    tree["state"][0]["exp_avg_sq"].view(-1)[3] = value
    torch.save(tree, path)
    done = run_here("thin", run, "--strategy", "full", "--moments", "8bit", "--yes")
    assert done.returncode == 4 and "omit --moments 8bit" in done.stderr, done.stderr
    assert (run / "checkpoint-100").is_dir() and not list(run.glob("partial/step-*"))


def test_a_save_of_the_saver_with_rounded_states_replaces_a_full_checkpoint(tmp_path):
    """What is there already is compared as it is rounded."""
    run = make_run(tmp_path / "run", (100, 200, 300))
    words = ("--strategy", "full", "--masters", "24bit", "--moments", "8bit", "--yes")
    kept = {step: shutil.copytree(run / f"checkpoint-{step}", tmp_path / f"{step}") for step in (100, 200)}
    call("thin", run, *words)
    for step, full in kept.items():
        shutil.move(full, run / f"checkpoint-{step}")
    assert [row["is_written"] for row in call("thin", run, "--strategy", "full", "--yes")["checkpoints"]] == [False] * 3
    shutil.copytree(make_run(tmp_path / "other", (100,)) / "checkpoint-100", run / "checkpoint-100")
    [shard] = (run / "checkpoint-100").glob("global_step*/bf16_zero_pp_rank_1*optim_states.pt")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 64
    shard.write_bytes(data)
    done = run_here("thin", run, "--strategy", "full", "--yes")
    assert done.returncode == 7 and "its values differ from those of" in done.stderr


@pytest.fixture(scope="module")
def rounded(tmp_path_factory):
    """A partial checkpoint with rounded states."""
    run = make_run(tmp_path_factory.mktemp("rounded") / "run", (100, 200))
    call("thin", run, "--strategy", "full", "--masters", "24bit", "--moments", "8bit", "--yes")
    return run / "partial" / "step-00000100"


@pytest.mark.parametrize("packed", ['{"master": ["F24"]}', "[1]", '{"master": "Q8"}', '{"exp_avg": "D16"}', "{", "{}"])
def test_metadata_that_is_not_right_is_refused(tmp_path, rounded, packed):
    shard = Path(shutil.copytree(rounded, tmp_path / rounded.name)) / "rank-00000-of-00002.safetensors"
    with safe_open(shard, "pt") as file:
        metadata = {**file.metadata(), "packed": packed}
    save_file(load_file(shard), shard, metadata)

    def with_its_size(manifest):
        next(one for one in manifest["bundles"] if one["path"] == shard.name)["num_bytes"] = shard.stat().st_size

    edit_json(shard.parent / "manifest.json", with_its_size)
    done = run_here("inspect", shard.parent)
    assert done.returncode == 4 and "fix: leave this checkpoint out; its save is damaged" in done.stderr


def test_what_a_killed_thin_left_is_freed(tmp_path):
    run = make_run(tmp_path / "run", (100, 200))
    before = call("thin", run, "--strategy", "full")["freed_bytes"]
    left = run / "partial" / ".step-00000100.llmtailor-thinning"
    left.mkdir(parents=True)
    (left / "file").write_bytes(bytes(4321))
    assert call("thin", run, "--strategy", "full")["freed_bytes"] == before + 4321
