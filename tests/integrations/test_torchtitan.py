"""torchtitan's own trainer saves in turns, is killed, and goes on with the same command. Needs torchtitan."""

from __future__ import annotations

import importlib.util
import json
import signal
import sys
import time
from pathlib import Path

import fsspec
import pytest

from helpers.places import SUPPORT
from helpers.s3 import s3_server, settings
from llmtailor.frameworks.files import DCP_RECORD
from saving.dcp_checks import read
from saving.dcp_checks import read_store as read_in_store
from saving.dcp_loop import complete, complete_in_store, same, spawn, step_of

SCRIPT = SUPPORT / "training_programs" / "try_torchtitan.py"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


def train(out: Path, *options: str, until: int = 0) -> None:
    """Train to the end, or kill all ranks once a checkpoint of the step ``until`` is complete."""
    command = [sys.executable, f"{SCRIPT}", f"{out}", "--training.steps", "20", *options]
    with (out.parent / f"{out.name}.log").open("a") as log:
        ranks = spawn(command, 2, stdout=log, stderr=log)
    deadline = time.monotonic() + 300
    while any(rank.poll() is None for rank in ranks):
        assert time.monotonic() < deadline
        if until and (out / "checkpoint" / f"step-{until}" / ".metadata").exists():
            for rank in ranks:
                rank.kill()
        time.sleep(0.01)
    assert {rank.wait() for rank in ranks} == {-signal.SIGKILL if until else 0}


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_killed_run_goes_on_and_ends_as_an_uninterrupted_one(tmp_path, mode):
    stock, out = tmp_path / "stock", tmp_path / "out"
    train(stock, "--stock")
    mine = ["--checkpoint.policy", "full", "--checkpoint.async-mode", mode]
    train(out, *mine, until=10)
    train(out, *mine)
    assert "Loading the checkpoint from" in (tmp_path / "out.log").read_text()
    wanted, found = read(stock / "checkpoint" / "step-20"), read(out / "checkpoint" / "step-20")
    assert found.keys() == wanted.keys()
    assert [key for key in wanted if not key.startswith("train_state") and not same(wanted[key], found[key])] == []


def test_in_an_object_store(tmp_path, monkeypatch):
    with s3_server() as port:
        for name, value in settings(port).items():
            monkeypatch.setenv(name, value)
        url = f"s3://bucket/{tmp_path.name}"
        fsspec.filesystem("s3", skip_instance_cache=True).mkdir("bucket")
        options = ["--checkpoint.folder", url, "--checkpoint.interval", "2", "--training.steps"]
        train(tmp_path / "out", *options, "8")
        train(tmp_path / "out", *options, "12")
        assert f"Loading the checkpoint from {url}/step-8" in (tmp_path / "out.log").read_text()
        for folder in (folders := complete_in_store(url)):
            fs = fsspec.filesystem("s3", skip_instance_cache=True)
            assert read_in_store(folder)["train_state.step"] == step_of(folder)
            saved = json.loads(fs.cat_file(f"{folder}/{DCP_RECORD}"))["ledger"]["held_by"].values()
            assert {step for _, step in saved} == {*range(step_of(folder) - 6, step_of(folder) + 1, 2)}
        assert [step_of(folder) for folder in folders][-1] == 12


def test_saves_in_turn_survive_deletions_and_a_kill(tmp_path):
    out = tmp_path / "out"
    train(out, "--checkpoint.interval", "2", until=12)
    train(out, "--checkpoint.interval", "2")
    assert "step-2" not in [folder.name for folder in complete(out / "checkpoint")]
    for folder in complete(out / "checkpoint"):
        assert read(folder)["train_state.step"] == step_of(folder)
        saved = {step for _, step in json.loads((folder / DCP_RECORD).read_text())["ledger"]["held_by"].values()}
        assert saved == {*range(step_of(folder) - 6, step_of(folder) + 1, 2)}, (
            "four groups took turns, also over the kill"
        )
