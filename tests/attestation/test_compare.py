"""What is said of the first steps after a resume, by the logs of both attempts and by the schedule. Pure."""

from __future__ import annotations

import copy

import pytest

from llmtailor.attestation.compare import (
    LearningRates,
    LossMonitor,
    Mismatch,
    MismatchKind,
    Subject,
    compare_schedule,
    rates_off_schedule,
    sample_runs,
)
from llmtailor.attestation.report import Attestation, MismatchGroup, lines_of

torch = pytest.importorskip("torch")

from llmtailor.live.attesting import schedule_of  # noqa: E402

LOG = {3: {"loss": 2.5, "learning_rate": 0.004}, 4: {"loss": 2.25, "learning_rate": 0.003}}


def see(changes: dict[int, dict[str, float]]) -> list[str | None]:
    losses = LossMonitor(LOG)
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
    losses = LossMonitor(LOG, is_evidence=False)
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
    return schedule_of(resumed, None), LearningRates(saved, rates=saved["_last_lr"])


@pytest.mark.parametrize("kind", schedulers())
def test_where_a_schedule_of_any_kind_stands(kind):
    live, saved = saved_and_resumed(kind, kind)
    assert compare_schedule(live, saved) == ([], [])
    restarted = schedule_of(stands_at(kind, 0), None)
    assert any(one.is_alarm for one in compare_schedule(restarted, saved)[0])


CHANGED = {
    "restarts": [("T_cur", 1, True), ("T_mult", 2, False)],
    "one_cycle": [("total_steps", 60, False)],
    "cosine": [("T_max", 60, False)],
    "plateau": [("best", 0.1, True), ("num_bad_epochs", 2, True), ("factor", 0.5, False)],
    "multi": [("milestones", {2: 1, 5: 1}, False)],
    "sequential": [("_milestones", [5], False)],
}


@pytest.mark.parametrize(
    ("kind", "key", "value", "is_alarm"), [(kind, *one) for kind in CHANGED for one in CHANGED[kind]]
)
def test_what_a_schedule_consists_of(kind, key, value, is_alarm):
    """Where it stands is an alarm if it differs, and what it computes by is a note."""
    saved, live = stands_at(kind, 3).state_dict(), stands_at(kind, 3)
    setattr(live, key, value)
    (found,) = compare_schedule(schedule_of(live, None), LearningRates(saved))[0]
    assert (found.what, found.live, found.is_alarm) == (f"schedule: {key}", value, is_alarm)


@pytest.mark.parametrize(
    ("kind", "key", "value", "is_alarm"),
    [
        ("sequential", "T_max", 60, False),
        ("sequential", "last_epoch", 0, True),
        ("chained", "gamma", 0.5, False),
        ("chained", "last_epoch", 0, True),
    ],
)
def test_what_an_inner_schedule_consists_of(kind, key, value, is_alarm):
    saved, live = stands_at(kind, 3).state_dict(), stands_at(kind, 3)
    setattr(live._schedulers[1], key, value)
    (found,) = compare_schedule(schedule_of(live, None), LearningRates(saved))[0]
    assert (found.what, found.live, found.is_alarm) == (f"schedule 1: {key}", value, is_alarm)


@pytest.mark.parametrize(("steps", "number"), [(1, 0), (3, 1)])
def test_another_rule_of_an_inner_schedule(steps, number):
    """Each that has had its turn"""

    def stands(*rules):
        adam = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=0.01)
        of = torch.optim.lr_scheduler
        scheduler = of.SequentialLR(adam, [of.LambdaLR(adam, rule) for rule in rules], [2])
        for _ in range(steps):
            adam.step()
            scheduler.step()
        return scheduler

    rules = [lambda step: 0.1 + step, lambda step: 0.5**step]
    saved = stands(*rules)
    assert compare_schedule(schedule_of(stands(*rules), None), LearningRates(saved.state_dict()))[0] == []
    for changed in range(2):
        others = [(lambda step: 0.3 / (1 + step)) if at == changed else rule for at, rule in enumerate(rules)]
        live = stands(*rules)
        for scheduler, rule in zip(live._schedulers, others, strict=True):
            scheduler.lr_lambdas = [rule]
        found = compare_schedule(schedule_of(live, None), LearningRates(saved.state_dict()))[0]
        told = {f"schedule {changed}: the learning rate of param group 0 at its step"} if changed <= number else set()
        assert {one.what for one in found} == told


class Rule:
    def __init__(self, total):
        self.total = total

    def __call__(self, step):
        return max(0.0, 1 - step / self.total) if step > 5 else 1.0


def test_the_attributes_of_a_rule_that_is_an_object():
    def stands(total):
        adam = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=0.01)
        return torch.optim.lr_scheduler.LambdaLR(adam, Rule(total))

    live, saved = stands(60), LearningRates(stands(20).state_dict())
    assert [str(one) for one in compare_schedule(schedule_of(live, None), saved)[0]] == [
        "schedule: rule 0: total is 60, 20 in the checkpoint"
    ]
    live.load_state_dict(stands(20).state_dict())
    assert compare_schedule(schedule_of(live, None), saved)[0] == []


RATES = {1: (0.4, 0.4, 0.3), 2: (0.3, 0.3, 0.2), 3: (0.2, 0.2, 0.1)}


def test_logged_rates():
    """Some versions log the rate of before a step, some that of after it."""
    state = {"last_epoch": 3}
    after = {step: (rates[2], *rates[1:]) for step, rates in RATES.items()}
    for logged in (RATES, after, {}):
        assert compare_schedule(LearningRates(state, logged=logged), LearningRates(state)) == ([], [])
    (found,) = compare_schedule(LearningRates(state, logged=RATES | {2: (0.35, 0.3, 0.2)}), LearningRates(state))[0]
    assert str(found) == "schedule: the learning rate of step 2 is 0.3, 0.35 in the checkpoint" and not found.is_alarm


@pytest.mark.parametrize(("kind", "other"), [("cosine", "step"), ("exponential", "one_cycle"), ("linear", "restarts")])
def test_a_schedule_of_another_kind(kind, other):
    found, _ = compare_schedule(*saved_and_resumed(kind, other))
    assert found and not any(one.is_alarm for one in found)


def test_the_report_names_the_ranks():
    row = MismatchGroup("exp_avg", MismatchKind.ZERO, "", ("a",), (1,), True)
    counter = Mismatch(Subject.COUNTER, "global_steps", 0, 4, True, ranks=(0, 1))
    lines = lines_of(Attestation("x", 4, "full", 9, (row,), (counter,), world_size=4))
    assert lines[1:] == [
        "  exp_avg of 1 param: zero: a (on rank 1)",
        "  global_steps is 0, 4 in the checkpoint (on ranks 0, 1)",
    ]


@pytest.mark.parametrize("numel", [0, 1, 4096, 4097, 5000, 100_001])
def test_samples_have_the_first_and_the_last_elements(numel):
    runs = sample_runs(numel)
    assert not numel or (runs[0][0], runs[-1][1]) == (0, numel)
    assert sum(end - begin for begin, end in runs) == min(numel, 4096)
