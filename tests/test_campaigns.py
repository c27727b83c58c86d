"""The campaigns beside this file, with fixed seeds: many times what the tests beside them try."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGNS_FOLDER = Path(__file__).parent / "campaigns"
CAMPAIGNS = {
    "faults": ["faults.py", "--seed", "1", "--kills", "50", "--races", "5"],
    "histories": ["histories.py", "--first", "1000", "--runs", "100"],
    "fuzz": ["fuzz", "--seed", "1", "--minutes", "10", "--out", "findings"],
}


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", CAMPAIGNS)
def test_a_campaign_finds_nothing(name: str, tmp_path: Path) -> None:
    script, *options = CAMPAIGNS[name]
    command = [sys.executable, str(CAMPAIGNS_FOLDER / script), *options]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    assert not (tmp_path / "findings").exists(), done.stdout
