"""Params that have had no gradient yet, and params without dimensions, in saves of a loop with a real optimizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import optim

from helpers.commands import run_here
from llmtailor.saving import saver_for
from llmtailor.training import join_optimizers
from trainings.models import build

pytestmark = pytest.mark.real

LATE = "model.layers.1.self_attn.q_proj.weight"


def of(kind: Any, **options: Any) -> Callable[[Any], Any]:
    return lambda model: kind(model.parameters(), **{"lr": 1e-3, **options})


def adam_before_muon(model: Any) -> Any:
    """The first states are Adam's."""
    named = dict(model.named_parameters())
    matrices = [name for name, param in named.items() if ".layers." in name and param.ndim > 1]
    rest = [param for name, param in named.items() if name not in matrices]
    return join_optimizers(model, [optim.AdamW(rest), optim.Muon([named[name] for name in matrices])])


def new_model() -> Any:
    torch.manual_seed(0)
    model = build("llama", 2, False)
    model.scale = torch.nn.Parameter(torch.tensor(1.0))
    return model


OPTIMIZERS = {
    "RAdam": of(optim.RAdam),
    "NAdam": of(optim.NAdam),
    "ASGD": of(optim.ASGD),
    "Adam, Muon": adam_before_muon,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_param_without_gradients_is_saved_and_composed(name, tmp_path):
    model, make = new_model(), OPTIMIZERS[name]
    optimizer = make(model)
    scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    saver = saver_for(tmp_path / "run", model=model, optimizer=optimizer, scheduler=scheduler, policy="full")
    saver.start(0)
    for step in (1, 2):
        for param_name, param in model.named_parameters():
            param.grad = None if param_name == LATE else torch.randn_like(param)
        optimizer.step()
        scheduler.step()
        saver.save(step).wait()
    saver.close()
    out = tmp_path / "checkpoint-2"
    for args in (("merge", "--run", tmp_path / "run", out), ("verify", out, "--deep")):
        done = run_here(*args)
        assert done.returncode == 0, done.stderr + done.stdout
    assert_continues_alike(model, optimizer, make, out)


def assert_continues_alike(model: Any, optimizer: Any, make: Callable[[Any], Any], out: Path) -> None:
    """The next step, the first with gradients for all params, changes both trainings alike."""
    other = new_model()
    other.load_state_dict(model.state_dict())
    resumed = make(other)
    resumed.load_state_dict(torch.load(out / "optimizer.pt", weights_only=True))
    for param, twin in zip(model.parameters(), other.parameters(), strict=True):
        param.grad = torch.randn_like(param)
        twin.grad = param.grad.clone()
    optimizer.step()
    resumed.step()
    for param, twin in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(param, twin)
        assert {*optimizer.state[param]} == {*resumed.state[twin]}
