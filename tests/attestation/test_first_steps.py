"""What is said of the first steps after a resume, by the logs of both attempts and by the schedule. Pure."""

from __future__ import annotations

import copy

import pytest

from llmtailor.attestation.compare import (
    Kind,
    Losses,
    Mismatch,
    Schedule,
    Subject,
    compare_schedule,
    rates_off_schedule,
)
from llmtailor.attestation.report import Attestation, Row, lines_of

torch = pytest.importorskip("torch")

from llmtailor.saving.attesting import schedule_of  # noqa: E402

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


def test_equal_losses_of_another_schedule_are_no_evidence():
    assert not any("evidence" in (one or "") for one in see({4: {"learning_rate": 0.001}}))
    losses = Losses(LOG, is_evidence=False)
    assert [losses.see(step, LOG[step]) for step in LOG] == [None, None]


def test_rates_after_the_first_step():
    assert rates_off_schedule([0.1, None], [0.1, 0.2]) is None
    assert rates_off_schedule([0.1, 0.1], []) is None
    said = rates_off_schedule([0.1, 0.3], [0.1, 0.2])
    assert said == "the learning rate of param group 1 is 0.3, and the scheduler's is 0.2"


def schedulers():
    from torch.optim import lr_scheduler as of

    return {
        "lambda": lambda adam: of.LambdaLR(adam, lambda step: 0.9**step),
        "step": lambda adam: of.StepLR(adam, 2),
        "multi": lambda adam: of.MultiStepLR(adam, [2, 4]),
        "constant": lambda adam: of.ConstantLR(adam, 0.5, 3),
        "linear": lambda adam: of.LinearLR(adam, 0.1, 1.0, 10),
        "exponential": lambda adam: of.ExponentialLR(adam, 0.9),
        "polynomial": lambda adam: of.PolynomialLR(adam, 10),
        "cosine": lambda adam: of.CosineAnnealingLR(adam, 10),
        "restarts": lambda adam: of.CosineAnnealingWarmRestarts(adam, 4),
        "cyclic": lambda adam: of.CyclicLR(adam, 0.001, 0.1, cycle_momentum=False),
        "one_cycle": lambda adam: of.OneCycleLR(adam, 0.1, 20),
        "plateau": lambda adam: of.ReduceLROnPlateau(adam),
        "sequential": lambda adam: of.SequentialLR(
            adam, [of.LinearLR(adam, 0.1, 1.0, 2), of.CosineAnnealingLR(adam, 8)], [2]
        ),
        "chained": lambda adam: of.ChainedScheduler([of.LinearLR(adam, 0.1, 1.0, 2), of.ExponentialLR(adam, 0.9)]),
    }


def stands_at(kind, steps):
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=0.01)
    scheduler = schedulers()[kind](adam)
    for number in range(steps):
        adam.step()
        scheduler.step(*([1.0 / (number + 1)] if kind == "plateau" else []))
    return scheduler


def saved_and_resumed(kind, as_kind):
    saved = stands_at(kind, 3).state_dict()
    resumed = stands_at(as_kind, 0)
    resumed.load_state_dict(copy.deepcopy(saved))
    return schedule_of(resumed, None), Schedule(saved, rates=saved["_last_lr"])


@pytest.mark.parametrize("kind", schedulers())
def test_where_a_schedule_of_any_kind_stands(kind):
    live, saved = saved_and_resumed(kind, kind)
    assert compare_schedule(live, saved) == ([], [])
    restarted = schedule_of(stands_at(kind, 0), None)
    assert any(one.is_alarm for one in compare_schedule(restarted, saved)[0])


@pytest.mark.parametrize(("kind", "other"), [("cosine", "step"), ("exponential", "one_cycle"), ("linear", "restarts")])
def test_a_schedule_of_another_kind(kind, other):
    found, _ = compare_schedule(*saved_and_resumed(kind, other))
    assert found and not any(one.is_alarm for one in found)


def test_the_report_names_the_ranks():
    row = Row("exp_avg", Kind.ZERO, "", ("a",), (1,), True)
    counter = Mismatch(Subject.COUNTER, "global_steps", 0, 4, True, ranks=(0, 1))
    lines = lines_of(Attestation("x", 4, "full", 9, (row,), (counter,), world_size=4))
    assert lines[1:] == [
        "  exp_avg of 1 param: zero: a (on rank 1)",
        "  global_steps is 0, 4 in the checkpoint (on ranks 0, 1)",
    ]
