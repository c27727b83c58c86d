"""What is said of the first steps after a resume, by the logs of both attempts and by the schedule. Pure."""

from __future__ import annotations

import pytest

from llmtailor.attestation.compare import Losses, rates_off_schedule

LOG = {3: {"loss": 2.5, "learning_rate": 0.004}, 4: {"loss": 2.25, "learning_rate": 0.003}}


def see(changes: dict[int, dict[str, float]]) -> list[str | None]:
    losses = Losses(LOG)
    return [losses.see(step, {**LOG[step], **changes.get(step, {})}) for step in LOG]


@pytest.mark.parametrize("step", [3, 4])
def test_a_loss_of_another_value(step):
    said = [one for one in see({step: {"loss": 2.0}}) if one]
    assert len(said) == 1 and f"the loss of step {step} is 2, " in said[0]


def test_a_learning_rate_of_another_schedule():
    said = see({3: {"learning_rate": 0.0}, 4: {"learning_rate": 0.001}})
    assert said[0] == "the learning rate of step 3 is 0, 0.004 in the abandoned attempt"
    assert not any("learning rate" in (one or "") for one in said[1:])


def test_rates_after_the_first_step():
    assert rates_off_schedule([0.1, None], [0.1, 0.2]) is None
    assert rates_off_schedule([0.1, 0.1], []) is None
    said = rates_off_schedule([0.1, 0.3], [0.1, 0.2])
    assert said == "the learning rate of param group 1 is 0.3, and the scheduler's is 0.2"
