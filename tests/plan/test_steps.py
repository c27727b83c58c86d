"""Adam's step: when it travels, when the base's stays, and how much that matters."""

from __future__ import annotations

import pytest
import torch

from helpers.indexes import make_index
from llmtailor.checkpoint.optimizer import OptimizerLayout, ParamGroup, SubGroup
from llmtailor.checkpoint.sources import Sources
from llmtailor.compose.averages import bias_factor, choose_steps
from llmtailor.compose.report import step_notices

HYPER = {"betas": (0.9, 0.999)}
GROUPS = (ParamGroup(("a", "b"), HYPER), ParamGroup(("c",), HYPER))
TARGET = OptimizerLayout(3, 2, GROUPS, (SubGroup(0, ("a", "b")), SubGroup(1, ("c",))))


def index(*steps, layout=(("a", "b"), ("c",))):
    cut = enumerate(zip(layout, steps, strict=True))
    return make_index(groups=GROUPS, sub_groups=tuple(SubGroup(number, params, step) for number, (params, step) in cut))


APART = (("a",), ("b",), ("c",))


@pytest.mark.parametrize(
    ("sources", "choice", "expected"),
    [
        # a step travels when all params of a flat id bring it
        ([index(10.0, 10.0), index(5.0, 6.0)], (1, 1, 0), [(5.0, ()), (10.0, ())]),
        # sources that agree need no compromise
        ([index(10.0, 10.0), index(5.0, 5.0), index(5.0, 5.0)], (1, 2, 0), [(5.0, ()), (10.0, ())]),
        # where they differ the base's stays
        ([index(200.0, 200.0), index(100.0, 100.0)], (1, 0, 0), [(200.0, (100.0,)), (200.0, ())]),
        # params that differ in the base itself get its newest, as when one with a step per layer gets fewer groups
        ([index(10.0, 8.0, 3.0, layout=APART)], (0, 0, 0), [(10.0, (8.0,)), (3.0, ())]),
        ([index(8.0, 10.0, 3.0, layout=APART)], (0, 0, 0), [(10.0, (8.0,)), (3.0, ())]),
    ],
)
def test_what_is_chosen(sources, choice, expected):
    found = choose_steps(sources, Sources(dict(zip("abc", choice, strict=True))), base=0, target=TARGET)
    assert [(one.step, one.others) for one in found] == expected


def test_where_they_differ_it_is_said():
    sources = [index(200.0, 200.0), index(100.0, 100.0)]
    choices = choose_steps(sources, Sources({"a": 1, "b": 0, "c": 0}), base=0, target=TARGET)
    (notice,) = step_notices(choices, "base")
    assert "1 of 2 sub-groups" in notice.what and "100" in notice.what and "200" in notice.what
    assert f"{choices[0].worst_factor:.3f}" in notice.what
    assert str(notice).count("\n") == 0
    assert step_notices(choices, "base", rebased=True) == []
    assert step_notices(choose_steps(sources, Sources({"a": 0, "b": 0, "c": 0}), base=0, target=TARGET), "base") == []
    old = [index(20_000.0, 20_000.0), index(19_900.0, 19_900.0)]  # less than 1 % of the first update
    assert step_notices(choose_steps(old, Sources({"a": 1, "b": 0, "c": 0}), base=0, target=TARGET), "base") == []


@pytest.mark.parametrize(("own", "used"), [(5, 10), (100, 200), (50, 1000), (1000, 1100), (10, 5)])
def test_the_factor_is_what_adam_does(own, used):
    """Oracle: torch's own AdamW makes its next update with either step."""

    def update(step):
        param = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = torch.optim.AdamW([param], lr=1.0, betas=(0.9, 0.999), eps=0.0, weight_decay=0.0)
        state = {
            "step": torch.tensor(float(step)),
            "exp_avg": torch.tensor([0.3]).double(),
            "exp_avg_sq": torch.tensor([0.5]).double(),
        }
        optimizer.state[param] = state
        param.grad = torch.tensor([0.7]).double()
        optimizer.step()
        return param.item()

    assert bias_factor(own, used, 0.9, 0.999) == pytest.approx(update(used) / update(own), rel=1e-6)
