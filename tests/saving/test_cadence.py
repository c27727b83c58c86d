"""How often to save when an overhead is given."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtailor.saving.cadence import Costs, SaveDecision, StepTimer
from saving.loop import log_of
from trainings.alone import Alone

seconds = st.floats(1e-3, 1e3)


@given(st.builds(Costs, seconds, st.floats(0, 1e3), seconds), st.floats(1e-3, 1.0))
def test_saving_costs_no_more_than_its_share(costs, overhead):
    cadence = SaveDecision.at(1, 0, costs, overhead, is_busy=False)
    assert costs.save_s <= overhead * cadence.save_steps * costs.step_s * (1 + 1e-9)
    assert costs.write_s <= cadence.save_steps * costs.step_s * (1 + 1e-9)
    fewer = cadence.save_steps - 1
    assert fewer == 0 or costs.save_s > overhead * fewer * costs.step_s or costs.write_s > fewer * costs.step_s
    assert cadence.lost_s == pytest.approx(cadence.save_steps * costs.step_s / 2 + costs.write_s)


def test_nothing_is_due_while_a_save_is_in_progress():
    costs = Costs(1.0, 0.1, 2.0)
    assert SaveDecision.at(30, 10, costs, 0.02, is_busy=True) == SaveDecision(False, 31)
    early = SaveDecision.at(11, 10, costs, 0.02, is_busy=False)
    assert (early.is_due, early.again) == (False, 15)
    assert SaveDecision.at(15, 10, costs, 0.02, is_busy=False).is_due


def test_what_saves_slow_down_counts():
    clock = StepTimer()
    assert clock.costs(0.5, 1.0) is None
    now = 0.0
    for length, is_busy in [(1, False)] * 5 + [(3, True)] * 4:
        now += length
        clock.step(now, is_busy=is_busy)
    assert clock.costs(0.5, 1.0) == Costs(1.0, 0.5 + 4 * 2.0, 1.0)
    clock.saved()
    clock.step(now + 100, is_busy=True)  # it may have waited for the save
    assert clock.costs(0.5, 1.0) == Costs(1.0, 0.5, 1.0)


def test_in_a_training(tmp_path, caplog):
    caplog.set_level(logging.INFO, "llmtailor.saving")
    options = {"policy": "full", "save_steps": "auto", "overhead": 1.0}
    run = Alone(tmp_path / "run", options, max_steps=40, logging_strategy="no").train()
    assert run.saves[0] == 10 and run.saves[-1] == 40 and len(run.saves) > 2
    decided = {line["step"]: line for line in log_of(run.folder) if "save_steps" in line}
    assert set(decided) <= set(run.saves[1:]) and len(decided) >= len(run.saves) - 2
    assert all(line["save_steps"] >= 1 and line["lost_s"] > 0 for line in decided.values())
    assert "a failure costs" in caplog.text
