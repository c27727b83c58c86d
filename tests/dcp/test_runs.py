"""The commands on runs of FSDP."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

import llmtailor
from helpers.cases import mostly_long
from helpers.commands import run_here
from helpers.composing import convert
from helpers.states import read
from llmtailor.formats.registry import index_checkpoint
from llmtailor.model.roles import State


@pytest.fixture
def run(runs, tmp_path):
    """A copy of a run's folder"""

    def copy(name):
        shutil.copytree(runs[name].folder, tmp_path / "run")
        return tmp_path / "run"

    return copy


@pytest.mark.parametrize("name", ["trainer", "titan"])
def test_a_run_is_composed(run, runs, name):
    folder = run(name)
    done = run_here("merge", "--run", str(folder), "--strategy", "parity", str(folder / "out"), "--json")
    assert done.returncode == 0, done.stderr
    steps = {row["part"]: row["step"] for row in json.loads(done.stdout)["parts"]}
    assert steps == {part: 2 if part == "layer 1" else 4 for part in steps}
    index = index_checkpoint(folder / "out")
    for step, param in ((2, "model.layers.1.mlp.up_proj.weight"), (4, "model.layers.2.mlp.up_proj.weight")):
        live = runs[name].held[step]["states"][param]["exp_avg"]
        assert torch.equal(read(index.root, index.held[State(param, "exp_avg")]), live)


def test_what_a_lost_file_held_comes_from_an_older_step(run, runs):
    """Rank 0's file has no options of param groups, so that the rest is still readable."""
    folder = run("trainer")
    (folder / "checkpoint-4/optimizer_0/__0_0.distcp").unlink()
    done = run_here("salvage", "--fragments", str(folder), "-o", str(folder / "out"))
    assert done.returncode == 0, done.stderr
    index, name = index_checkpoint(folder / "out"), "model.layers.1.mlp.up_proj.weight"
    moment = read(index.root, index.held[State(name, "exp_avg")])
    old, new = (runs["trainer"].held[step]["states"][name]["exp_avg"] for step in (2, 4))
    rows = -(-len(moment) // 2)
    assert torch.equal(moment, torch.cat([old[:rows], new[rows:]]))


@pytest.mark.parametrize("name", mostly_long(["trainer", "titan", "hf", "full"], "trainer", "hf"))
def test_an_output_is_replaced(runs, tmp_path, name):
    """Only by --force, and only if it holds nothing else"""
    source, out = runs.checkpoint(name), tmp_path / "out"
    convert(source, out)
    with pytest.raises(llmtailor.TailorError, match="already exists"):
        convert(source, out)
    convert(source, out, replace=True, checksum=True)
    (out / "notes.txt").touch()
    with pytest.raises(llmtailor.TailorError, match=r"notes\.txt"):
        convert(source, out, replace=True)
