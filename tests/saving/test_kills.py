"""Trainings that are killed while they save in the background."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from real.harness import environment

TESTS = Path(__file__).parents[1]
CAMPAIGN = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from saving.kills import campaign
print(json.dumps(campaign(Path(sys.argv[2]), int(sys.argv[3]), seed=int(sys.argv[4]))))
"""


@pytest.mark.parametrize(("kills", "seed"), [(12, 1), pytest.param(200, 2, marks=pytest.mark.long)])
@pytest.mark.timeout(1800)
def test_the_newest_published_save_survives_a_kill(tmp_path, kills, seed):
    command = [sys.executable, "-c", CAMPAIGN, str(TESTS), str(tmp_path), str(kills), str(seed)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    steps = [int(step) for step in done.stdout.strip("[]\n").split(",")]
    assert len(steps) >= kills and len(set(steps)) > 3
