"""Killed at any moment, thin and gc take nothing away that is promised; the same command then completes."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from subprocess import CompletedProcess

import pytest

pytest.importorskip("torch")

from helpers.cases import mostly_long
from llmtailor.checkpoint.lineage import Ledger, composable_steps
from llmtailor.runs.scan import scan_run
from thin.killed import run_and_die
from thin.scene import SHORT, compose, contents, folders, make_run, save_partial

STEPS = (100, 200, 300)
MOMENTS = int(os.environ.get("LLMTAILOR_KILLS", "3"))
"""Of each command; 1000 kills it before every single change."""


def killed(limit: int, run: Path, *words: str) -> CompletedProcess[str]:
    """Run a command in a fork of this process, which kills itself before a change of a file."""
    said = run.parent / "said"
    child = os.fork()
    if child == 0:
        run_and_die(limit, [words[0], str(run), *words[1:]], said)
    _, status = os.waitpid(child, 0)
    return CompletedProcess(words, os.waitstatus_to_exitcode(status), "", said.read_text())


def moments(run: Path, *words: str) -> list[int]:
    """Spread moments over a whole undisturbed run; that leaves its outcome in ``run``."""
    done = killed(0, run, *words)
    assert done.returncode == 0, done.stderr
    count = int(done.stderr.splitlines()[-1])
    return sorted({1 + number * (count - 1) // (MOMENTS - 1) for number in range(MOMENTS)})


def composable(run: Path) -> list[int]:
    scan = scan_run(run, every_chain=True)
    return composable_steps(scan.usable, scan.structure.parts)


@pytest.mark.parametrize("form", [None, *mostly_long(["fsdp", "dcp", "universal"])])
def test_thin(tmp_path, form):
    original = make_run(tmp_path / "original", STEPS, form, shape=SHORT)
    command = ("thin", "--strategy", "parity", "--yes")
    wanted = Path(shutil.copytree(original, tmp_path / "run-wanted"))
    at = moments(wanted, *command)
    composites = {step: contents(compose(wanted, step, tmp_path / f"out-{step}")) for step in STEPS[:2]}
    for moment in at:
        run = Path(shutil.copytree(original, tmp_path / f"run-{moment}"))
        assert killed(moment, run, *command).returncode == -signal.SIGKILL
        assert composable(run) == list(STEPS), f"killed at {moment}: {folders(run)}"
        done = killed(0, run, *command)
        assert done.returncode == 0, done.stderr
        assert folders(run) == folders(wanted)
        for step, composite in composites.items():
            assert contents(compose(run, step, tmp_path / f"out-{moment}-{step}")) == composite
        shutil.rmtree(run)


@pytest.mark.parametrize(
    ("can_exchange", "form"),
    [
        (True, "dcp"),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((False, None), (True, None), (False, "fsdp"))),
    ],
)
def test_thin_to_weights(tmp_path, can_exchange, form, monkeypatch):
    if not can_exchange:  # as on NFS
        monkeypatch.setenv("LLMTAILOR_TEST_NO_EXCHANGE", "1")
    original = make_run(tmp_path / "original", STEPS[:2], form, shape=SHORT)
    command = ("thin", "--keep-optimizer-last", "1", "--yes")
    wanted = Path(shutil.copytree(original, tmp_path / "run-wanted"))
    for moment in moments(wanted, *command):
        run = Path(shutil.copytree(original, tmp_path / f"run-{moment}"))
        assert killed(moment, run, *command).returncode == -signal.SIGKILL
        assert 200 in composable(run)
        there = [run / name for name in folders(run) if "checkpoint-100" in name]
        assert any(is_whole(path, like) for path in there for like in (original, wanted))
        assert killed(0, run, *command).returncode == 0
        assert folders(run) == folders(wanted)
        assert contents(run / "checkpoint-100") == contents(wanted / "checkpoint-100")


def is_whole(path: Path, run: Path) -> bool:
    return contents(path) == contents(run / "checkpoint-100")


def test_gc(tmp_path):
    full = make_run(tmp_path / "full", STEPS, shape=SHORT)
    original = tmp_path / "original"
    original.mkdir()
    ledger = Ledger("saver")
    parts = ("embed_tokens", "layer 0", "layer 1", "norm", "lm_head")
    for step in STEPS:
        ledger = save_partial(original, full / f"checkpoint-{step}", parts, ledger)
    command = ("gc", "--keep", "1", "--yes")
    wanted = Path(shutil.copytree(original, tmp_path / "run-wanted"))
    at = moments(wanted, *command)
    assert folders(wanted) == ["partial/step-00000300"]
    composite = contents(compose(wanted, 300, tmp_path / "out"))
    for moment in at:
        run = Path(shutil.copytree(original, tmp_path / f"run-{moment}"))
        assert killed(moment, run, *command).returncode == -signal.SIGKILL
        assert composable(run)[-1] == 300
        assert killed(0, run, *command).returncode == 0
        assert folders(run) == folders(wanted)
        assert contents(compose(run, 300, tmp_path / f"out-{moment}")) == composite
