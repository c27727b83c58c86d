"""What `attach` refuses, before anything is trained."""

from __future__ import annotations

import pytest

from llmtailor.errors import UsageError
from llmtailor.policies.check import NUM_SAVES
from llmtailor.saving import attach
from saving.policy_runs import Custom
from trainings.alone import Alone

pytestmark = pytest.mark.real


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"policy": "partiy"}, "did you mean 'parity'"),
        ({"policy": "round_robin:4", "max_staleness": 2}, "max_staleness is 2"),
        ({"save_steps": 0}, "save_steps is 0"),
        ({"keep_composable": 0}, "keep_composable: it is 0"),
        ({"keep_composable": 1.5}, "keep_composable: it is 1.5"),
    ],
)
def test_what_makes_no_sense(tmp_path, options, told):
    trainer = Alone(tmp_path).trainer
    callbacks = list(trainer.callback_handler.callbacks)
    with pytest.raises(UsageError, match=told):
        attach(trainer, **options)
    assert trainer.callback_handler.callbacks == callbacks


def test_a_policy_is_tested_once(tmp_path):
    """When the saver is attached, and not again when training begins."""
    asked = []

    def choose(now):
        asked.append(now.save)
        return dict.fromkeys(now.parts, "all")

    run = Alone(tmp_path / "run", {"policy": Custom(choose), "save_steps": 1, "max_staleness": 5}, max_steps=3)
    assert len(asked) == 2 * NUM_SAVES, "once straight, once resumed"
    run.train()
    assert asked[2 * NUM_SAVES :] == [1, 2]
