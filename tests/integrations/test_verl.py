"""verl's FSDPCheckpointManager with the plug-in: saves in turns, a kill, and the same command again. Needs verl."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.places import SUPPORT
from llmtailor.frameworks.files import DCP_RECORD
from saving.dcp_checks import read
from saving.dcp_loop import spawn

SCRIPT = SUPPORT / "training_programs" / "try_verl.py"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
PLUG_IN = "VERL_USE_EXTERNAL_MODULES", "llmtailor.integrations.verl"


def train(out: Path, steps: int, *, kill_at: int = 0) -> dict[int, float]:
    """Train to the end, or kill all ranks once a step is saved; return the losses of all steps so far."""
    out.mkdir(exist_ok=True)
    with (out / "log").open("a") as log:
        ranks = spawn([sys.executable, f"{SCRIPT}", f"{out}", f"{steps}"], 2, stdout=log, stderr=log)
    tracker, deadline = out / "latest_checkpointed_iteration.txt", time.monotonic() + 200
    while any(rank.poll() is None for rank in ranks):
        assert time.monotonic() < deadline
        if kill_at and tracker.exists() and int(tracker.read_text()) >= kill_at:
            for rank in ranks:
                rank.kill()
        time.sleep(0.01)
    assert {rank.wait() for rank in ranks} == {-signal.SIGKILL if kill_at else 0}, (out / "log").read_text()[-3000:]
    return dict(map(json.loads, (out / "losses.jsonl").read_text().splitlines()))


def test_a_killed_run_goes_on_as_an_uninterrupted_one(tmp_path, monkeypatch):
    straight = train(tmp_path / "straight", 8)
    monkeypatch.setenv(*PLUG_IN)
    monkeypatch.setenv("LLMTAILOR_POLICY", "full")
    train(tmp_path / "run", 100, kill_at=3)
    losses = train(tmp_path / "run", 8)
    assert "resumed at" in (tmp_path / "run" / "log").read_text()
    assert losses.items() >= straight.items()


def test_saves_in_turn(tmp_path, monkeypatch):
    monkeypatch.setenv(*PLUG_IN)
    monkeypatch.setenv("LLMTAILOR_POLICY", "moments_in_turn:3")
    train(tmp_path / "run", 9, kill_at=3)
    train(tmp_path / "run", 12)
    folders = {*(tmp_path / "run").glob("global_step_*")}
    newest = tmp_path / "run" / "global_step_12"
    assert newest in folders
    assert not [*newest.glob("optim_*")]
    assert [*newest.glob("extra_state_*")]
    assert read(newest / "dcp")
    saved = {step for _, step in json.loads((newest / "dcp" / DCP_RECORD).read_text())["ledger"]["held_by"].values()}
    assert saved == {10, 11, 12}


def test_a_plug_in_that_fails_ends_the_program(monkeypatch):
    monkeypatch.setenv(*PLUG_IN)
    monkeypatch.setenv("LLMTAILOR_POLICY", "adaptive")
    done = subprocess.run([sys.executable, "-c", "import verl"], capture_output=True, text=True)
    assert done.returncode
    assert "llmtailor: the plug-in for verl failed" in done.stderr
