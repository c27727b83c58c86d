"""tests/support/campaigns/fuzz for some minutes, with a fixed seed: many times what `tests/system/fuzz` does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from helpers.places import SUPPORT


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_fuzzer_finds_nothing(tmp_path: Path) -> None:
    options = ["--seed", "1", "--minutes", "10", "--out", "findings"]
    command = [sys.executable, str(SUPPORT / "campaigns" / "fuzz"), *options]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    assert not (tmp_path / "findings").exists(), done.stdout
