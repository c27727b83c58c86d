"""The drill in a short form: a real training, killed in the middle of a save, comes back by one command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainings.harness import TIMEOUT_S, environment

pytestmark = [pytest.mark.real, pytest.mark.long]
SCRIPTS = Path(__file__).parents[2] / "scripts"
EVERY, STEPS = 2, 12


@pytest.fixture(scope="module")
def drill(tmp_path_factory):
    work = tmp_path_factory.mktemp("drill")
    words = ["--kills", "2", "--steps", str(STEPS), "--save-steps", str(EVERY), "--other-ranks", "1"]
    words += ["--hidden-size", "32", "--num-layers", "4", "--work", str(work), "--json", str(work / "found.json")]
    command = [sys.executable, str(SCRIPTS / "drill.py"), *words]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((work / "found.json").read_text())


def test_a_killed_run_comes_back(drill):
    in_save, any_moment = drill["kills"]
    assert in_save["hit"] is not None
    assert in_save["back"] == in_save["hit"] - EVERY
    assert (in_save["ranks"], any_moment["ranks"]) == (1, 2)
    for kill in drill["kills"]:
        assert kill["back"] > 0
        assert kill["back"] % EVERY == 0
        assert kill["at"] - kill["back"] <= EVERY


def test_it_goes_on_where_it_was(drill):
    losses, straight = drill["losses"], drill["uninterrupted"]
    assert list(losses) == [str(step) for step in range(1, STEPS + 1)]
    after = str(drill["kills"][0]["back"] + 1)
    # some moments are some steps older; a new model's loss would be farther off
    assert losses[after] == pytest.approx(straight[after], abs=0.1)
    assert losses["1"] > straight[after] + 0.1


def test_it_saves_less(drill):
    # folders are listed in no order; the largest is the complete base
    *later, base = sorted(drill["partial_bytes"])
    assert len(later) == STEPS / EVERY - 1
    assert base < drill["full_bytes"]
    assert max(later) < 0.7 * base
