"""Real processes are killed or asked to stop: the output is absent, the sources untouched, and the next one goes on.

`tests/faults` does so at every single operation; here the files are large.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from faults.scene import RECIPE, contents
from helpers.cases import mostly_long
from helpers.checkpoints import make
from llmtailor.engine.staging import peek
from synthetic import SHAPES

LARGE = replace(SHAPES["tiny"], vocab_size=20_000, hidden_size=256, intermediate_size=1024, num_heads=8)
"""About 170 MB a checkpoint: long enough to be interrupted in the middle."""
COMMAND = [sys.executable, "-m", "llmtailor", "merge", "recipe.yaml", "out"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    for step in (100, 200):
        make(root, step, shape=LARGE, world_size=8)
    (root / "recipe.yaml").write_text(RECIPE)
    return root


@pytest.fixture(scope="module")
def wanted(run):
    """What an undisturbed merge writes."""
    subprocess.run(COMMAND, cwd=run, check=True, capture_output=True)
    found = contents(run / "out")
    shutil.rmtree(run / "out")
    return found


def written(staging: Path) -> int:
    total = 0
    for path in staging.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def durable(run: Path) -> int:
    """Return how many bytes would be kept if the merge were interrupted now."""
    left = peek(run / "out")
    return left.num_bytes if left else 0


def interrupt(run: Path, number: int, num_bytes: int, *options: str, kept: bool = False) -> tuple[int, str]:
    """Start a merge and send a signal once so many bytes lie in the staging folder; return exit code and stderr.

    With ``kept``, the signal also waits for the first file that is durable.
    """
    command = [*COMMAND, *options]
    process = subprocess.Popen(command, cwd=run, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    staging = run / ".out.llmtailor-staging"
    while process.poll() is None and not (
        staging.exists() and written(staging) >= num_bytes and (durable(run) or not kept)
    ):
        time.sleep(0.0005)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    return process.returncode, stderr


def go_on(run: Path, wanted: dict[str, str], *options: str) -> str:
    """Run the merge again, undisturbed, and take its output away; return its stderr."""
    again = subprocess.run([*COMMAND, *options], cwd=run, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert contents(run / "out") == wanted
    assert not (run / ".out.llmtailor-staging").exists()
    shutil.rmtree(run / "out")
    return again.stderr


@pytest.mark.parametrize("num_bytes", mostly_long([0, 20 << 20, 120 << 20], 120 << 20))
def test_kill_9_leaves_no_output_and_the_next_run_goes_on(run, wanted, num_bytes):
    before = contents(run / "checkpoint-100"), contents(run / "checkpoint-200")
    code, _ = interrupt(run, signal.SIGKILL, num_bytes, kept=num_bytes >= 100 << 20)
    assert code == -signal.SIGKILL, "the merge was over before it could be killed"
    assert not (run / "out").exists()
    kept = durable(run)
    assert kept or num_bytes < 100 << 20
    stderr = go_on(run, wanted)
    assert not kept or f"{kept:,} of" in stderr
    assert (contents(run / "checkpoint-100"), contents(run / "checkpoint-200")) == before


@pytest.mark.parametrize("number", mostly_long([signal.SIGINT, signal.SIGTERM], signal.SIGTERM))
def test_a_polite_signal_says_how_to_go_on(run, wanted, number):
    code, stderr = interrupt(run, number, 100 << 20, kept=True)
    assert code == 130
    assert "error: interrupted\n" in stderr
    assert f"it resumes with {peek(run / 'out').num_bytes:,} of" in stderr
    assert "Traceback" not in stderr
    assert not (run / "out").exists()
    assert "resuming the merge" in go_on(run, wanted)


@pytest.mark.long
def test_kill_9_while_replacing_keeps_the_old_output(run, wanted):
    (run / "out").mkdir()
    (run / "out" / "trainer_state.json").write_text("old")
    code, _ = interrupt(run, signal.SIGKILL, 50 << 20, "--force")
    assert code == -signal.SIGKILL
    assert set(contents(run / "out")) == {"trainer_state.json"}
    go_on(run, wanted, "--force")
