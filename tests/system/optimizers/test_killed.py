"""A training that dies by a signal is composed, and stock resumes it: see tests/support/campaigns/optimizers.py."""

from __future__ import annotations

import pytest

from campaigns.optimizers import trial
from helpers.cases import mostly_long
from trainings.optimizers import ALL

pytestmark = pytest.mark.real


@pytest.mark.parametrize("name", mostly_long(ALL, "adamw_bnb_8bit"))
def test_a_killed_training_is_composed_and_resumed(name, tmp_path):
    found = trial(name, tmp_path, seed=1)
    assert found["full"].is_same and all(one.step for one in found.values())
