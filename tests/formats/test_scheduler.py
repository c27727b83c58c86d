"""Scheduler states for other param groups, held against what torch and transformers save for those groups."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.optim import lr_scheduler

from helpers.render import render
from llmtailor.containers.torch_file import lay_out_torch_file, read_torch_file
from llmtailor.errors import SourceError
from llmtailor.frameworks.scheduler import regroup_scheduler

SPLIT = (1, 1, 1, 0, 0, 0, 0)
"""Two groups become seven."""
RATES = (2e-3, 5e-4)
STEPS = 3


class Decay:
    """A schedule that keeps its settings: torch saves the attributes of such objects, group by group."""

    def __init__(self, rate: float):
        self.rate = rate

    def __call__(self, step: int) -> float:
        return 1 / (1 + self.rate * step)


def optimizer(from_group):
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": RATES[number]} for number in from_group]
    return torch.optim.AdamW(groups)


def hugging_face(name, **more):
    transformers = pytest.importorskip("transformers")
    return lambda optim, _: transformers.get_scheduler(name, optim, 2, 10, more)


def sequential(optim, _):
    parts = [lr_scheduler.LinearLR(optim), lr_scheduler.CosineAnnealingLR(optim, 10)]
    return lr_scheduler.SequentialLR(optim, parts, [2])


SCHEDULERS = {
    "lambda": lambda optim, groups: lr_scheduler.LambdaLR(optim, [Decay(1.0 + number) for number in groups]),
    "cosine": lambda optim, _: lr_scheduler.CosineAnnealingLR(optim, 10),
    "one cycle": lambda optim, groups: lr_scheduler.OneCycleLR(optim, [RATES[number] for number in groups], 10),
    "cyclic": lambda optim, _: lr_scheduler.CyclicLR(optim, 1e-4, 1e-2, cycle_momentum=False),
    "plateau": lambda optim, groups: lr_scheduler.ReduceLROnPlateau(optim, min_lr=[1e-9 * n for n in groups]),
    "sequential": sequential,
    "HF linear": hugging_face("linear"),
    "HF cosine_with_restarts": hugging_face("cosine_with_restarts", num_cycles=2),
}


def run(make, from_group):
    optim = optimizer(from_group)
    scheduler = make(optim, from_group)
    for _ in range(STEPS):
        optim.step()
        scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
    return optim, scheduler


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_it_is_what_a_run_with_those_groups_would_have_saved(tmp_path, make):
    _, two = run(make, (0, 1))
    optim, seven = run(make, SPLIT)
    torch.save(two.state_dict(), tmp_path / "scheduler.pt")
    tree = read_torch_file(tmp_path, "scheduler.pt", "x/scheduler.pt").tree
    layout = lay_out_torch_file("scheduler.pt", regroup_scheduler(tree, "x", 2, SPLIT))
    (tmp_path / "out.pt").write_bytes(render(layout, tmp_path))
    made = torch.load(tmp_path / "out.pt", weights_only=True)
    assert made == seven.state_dict()
    assert regroup_scheduler(made, "x", 7, (3, 0)) == two.state_dict()

    fresh = make(optim, SPLIT)  # and a scheduler goes on from it
    fresh.load_state_dict(made)
    assert fresh.state_dict() == seven.state_dict()


def test_the_tree_itself_is_left_alone():
    tree = {"base_lrs": [1.0, 2.0], "last_epoch": 3, "_schedulers": [{"_last_lr": [1, 2]}]}
    before = copy.deepcopy(tree)
    made = regroup_scheduler(tree, "x", 2, (1, 0, 1))
    assert made == {"base_lrs": [2.0, 1.0, 2.0], "last_epoch": 3, "_schedulers": [{"_last_lr": [2, 1, 2]}]}
    assert tree == before


def test_deepspeeds_own_schedulers_count_and_keep_no_lists():
    assert regroup_scheduler({"last_batch_iteration": 9}, "x", 1, (0, 0)) == {"last_batch_iteration": 9}
    assert regroup_scheduler(None, "x", 1, (0, 0)) is None


@pytest.mark.parametrize(
    ("tree", "what"),
    [
        ({"base_lrs": [1.0, 2.0, 3.0]}, "base_lrs: there are 3 entries for 2 param groups"),
        ({"_schedulers": [{"_last_lr": [1.0]}]}, "_schedulers: _last_lr: there are 1 entries"),
        ({"warmups": [10, 20]}, "warmups: as many entries as param groups"),
        ([1.0, 2.0], "list, not a dict"),
    ],
)
def test_what_cannot_be_relaid_is_refused(tree, what):
    with pytest.raises(SourceError, match=what):
        regroup_scheduler(tree, "x/scheduler.pt", 2, SPLIT)


def test_lists_that_cannot_be_per_group_stay():
    tree = {"milestones": [1, 2, 3], "_milestones": [5, 6], "base_lrs": [1.0, 1.0]}
    assert regroup_scheduler(tree, "x", 2, (0,)) == {**tree, "base_lrs": [1.0]}
