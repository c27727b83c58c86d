"""Trainings that are killed while they save in the background."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from saving.kills import LIVES
from trainings.harness import start_ranks


@pytest.mark.parametrize("campaign", ["6-1", pytest.param("200-2", marks=pytest.mark.long)])
@pytest.mark.timeout(1800)
def test_the_newest_published_save_survives_a_kill(tmp_path, campaign):
    (folder := tmp_path / campaign).mkdir()
    start_ranks("saving.kills", [folder], 1, folder, 1700)
    steps = json.loads((folder / "steps.json").read_text())
    assert len(steps) >= int(campaign.partition("-")[0]) and len(set(steps)) >= LIVES
