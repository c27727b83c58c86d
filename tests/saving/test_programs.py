"""The programs around saving in their short forms: the drill, the measurements, the study of fidelity."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers.cases import mostly_long
from helpers.places import ROOT
from helpers.states import in_8_bits, in_24_bits, of_16_bits, refined
from trainings.harness import TIMEOUT_S, environment

EVERY, STEPS = 2, 12
ROUNDS, BLOCKS = 2, 2
WAYS = {
    "plain memory copy",
    "plain write",
    "background save",
    "background=False",
    "torch's async_save",
    "Trainer's save",
}
CADENCES = {"every step", "every 5th step", "every 5th step, slow disk"}


def run(script: str, folder: Path, *words: object) -> tuple[str, dict]:
    """Run a program on a small model; return what it prints and what it finds."""
    command = [sys.executable, str(ROOT / script), *map(str, words), "--json", str(folder / "found.json")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads((folder / "found.json").read_text())


@pytest.mark.real
@pytest.mark.long
def test_the_drill(tmp_path):
    """A real training, killed in the middle of a save, comes back by one command."""
    words = ["--kills", 2, "--steps", STEPS, "--save-steps", EVERY, "--other-ranks", 1, "--work", tmp_path]
    _, drill = run("scripts/drill.py", tmp_path, *words, "--hidden-size", 32, "--num-layers", 4)
    in_save, any_moment = drill["kills"]
    assert in_save["hit"] is not None
    assert in_save["back"] == in_save["hit"] - EVERY
    assert (in_save["ranks"], any_moment["ranks"]) == (1, 2)
    for kill in drill["kills"]:
        assert kill["back"] > 0
        assert kill["back"] % EVERY == 0
        assert kill["at"] - kill["back"] <= EVERY
    losses, straight = drill["losses"], drill["uninterrupted"]
    assert list(losses) == [str(step) for step in range(1, STEPS + 1)]
    after = str(in_save["back"] + 1)
    # some moments are some steps older; a new model's loss would be farther off
    assert losses[after] == pytest.approx(straight[after], abs=0.1)
    assert losses["1"] > straight[after] + 0.1
    # folders are listed in no order; the largest is the complete base
    *later, base = sorted(drill["partial_bytes"])
    assert len(later) == STEPS / EVERY - 1
    assert base < drill["full_bytes"]
    assert max(later) < 0.7 * base


@pytest.mark.real
@pytest.mark.long
def test_every_way_of_saving_is_measured_and_explained(tmp_path):
    words = ["--hidden-size", 64, "--num-layers", 2, "--vocab-size", 500, "--tokens", 16, "--work", tmp_path / "run"]
    words += ["--rounds", ROUNDS, "--blocks", BLOCKS, "--steps", 6]
    told, found = run("benchmarks/bench_save.py", tmp_path, *words)
    assert not (tmp_path / "run").exists()
    assert [title.partition(",")[0] for title in found] == ["ZeRO-3", "plain"]
    for runs in found.values():
        modes = {f"{mode}, {cadence}" for mode in ("background save", "background=False") for cadence in CADENCES}
        assert runs.keys() == WAYS | modes | {"step", "no saves"}
        assert {len(runs[name]) for name in WAYS | {"step"}} == {ROUNDS}
        assert {len(runs[name]) for name in modes | {"no saves"}} == {BLOCKS}
        assert all(one["stall_s"] > 0 for name in WAYS for one in runs[name])
        copied = runs["plain memory copy"][0]["num_bytes"]
        for name in ("plain write", "torch's async_save"):
            assert {one["num_bytes"] for one in runs[name]} == {copied}
        for one in runs["background save"] + runs["background=False"]:  # with headers, without padding
            assert one["num_bytes"] == pytest.approx(copied, rel=0.2)
    rows, _, columns = told.partition("\nRows\n")[2].partition("\nColumns\n")
    for name in WAYS | CADENCES | {"no saves"}:
        assert f"  {name}: " in rows
    for name in ("stall", "copied", "durable", "/ copy", "/ none", "step +s"):
        assert f"  {name}" in columns or f", {name}" in columns


@pytest.mark.parametrize("policy", mostly_long(["adaptive:0.5", "moments_in_turn:3"], "moments_in_turn:3"))
def test_the_study_composes_what_the_saver_composes(policy, monkeypatch, tmp_path):
    """In memory, where ``merge --run`` composes from files."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    check = importlib.import_module("study.check").check
    assert check(policy, tmp_path) == 3 * (9 * 4 + 3)


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0])
def test_the_study_rounds_as_the_saver_does(scale, monkeypatch):
    """Against the slow functions that the saver's own are held against."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    study = importlib.import_module("study.precision")
    older = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    newest = older + scale * torch.randn(1000, generator=torch.Generator().manual_seed(2))
    assert torch.equal(study.to_24_bits(newest), in_24_bits(newest))
    assert torch.equal(study.differing(newest, in_24_bits(older)), of_16_bits(newest, older, 1))
    assert torch.equal(study.under(newest.bfloat16(), in_24_bits(older)), refined(newest, in_24_bits(older)))
    assert torch.equal(study.to_8_bits(newest) + 0.0, in_8_bits(newest, "exp_avg"))
    # torch rounds some roots otherwise, see `in_8_bits`
    assert torch.allclose(study.to_8_bits(newest**2, is_square=True), in_8_bits(newest**2, "exp_avg_sq"), rtol=1e-5)
