"""The measurements of saves in a short form: every way of saving is run, and every run is measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainings.harness import TIMEOUT_S, environment

pytestmark = [pytest.mark.real, pytest.mark.long]
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bench_save.py"
ROUNDS, BLOCKS, STEPS = 2, 2, 6
WAYS = {
    "plain memory copy",
    "plain write",
    "background save",
    "background=False",
    "torch's async_save",
    "Trainer's save",
}
CADENCES = {"every step", "every 5th step", "every 5th step, slow disk"}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    work = tmp_path_factory.mktemp("bench")
    words = ["--hidden-size", "64", "--num-layers", "2", "--vocab-size", "500", "--tokens", "16"]
    words += ["--rounds", str(ROUNDS), "--blocks", str(BLOCKS), "--steps", str(STEPS)]
    words += ["--work", str(work / "run"), "--json", str(work / "found.json")]
    command = [sys.executable, str(SCRIPT), *words]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert not (work / "run").exists()
    return ran.stdout, json.loads((work / "found.json").read_text())


def test_every_way_is_measured_in_every_round(done):
    _, found = done
    assert [title.partition(",")[0] for title in found] == ["ZeRO-3", "plain"]
    for runs in found.values():
        modes = {f"{mode}, {cadence}" for mode in ("background save", "background=False") for cadence in CADENCES}
        assert runs.keys() == WAYS | modes | {"step", "no saves"}
        assert {len(runs[name]) for name in WAYS | {"step"}} == {ROUNDS}
        assert {len(runs[name]) for name in modes | {"no saves"}} == {BLOCKS}
        assert all(one["stall_s"] > 0 for name in WAYS for one in runs[name])


def test_ways_of_the_same_states_hold_the_same_bytes(done):
    for runs in done[1].values():
        copied = runs["plain memory copy"][0]["num_bytes"]
        for name in ("plain write", "torch's async_save"):
            assert {one["num_bytes"] for one in runs[name]} == {copied}
        for one in runs["background save"] + runs["background=False"]:  # with headers, without padding
            assert one["num_bytes"] == pytest.approx(copied, rel=0.2)


def test_each_row_and_column_is_explained(done):
    told, _ = done
    _, _, explained = told.partition("\nRows\n")
    rows, _, columns = explained.partition("\nColumns\n")
    for name in WAYS | CADENCES | {"no saves"}:
        assert f"  {name}: " in rows
    for name in ("stall", "copied", "durable", "/ copy", "/ none", "step +s"):
        assert f"  {name}" in columns or f", {name}" in columns
