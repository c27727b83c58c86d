"""Params that have had no gradient yet, and params without dimensions, in saves of a loop with a real optimizer."""

from __future__ import annotations

import json
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


def train(run: Path, make: Callable[[Any], Any], policy: str, steps: int, first: int) -> tuple[Any, Any]:
    """Return a model and its optimizer after steps that were all saved; one param gets gradients from ``first`` on."""
    model = new_model()
    optimizer = make(model)
    scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    saver = saver_for(run, model=model, optimizer=optimizer, scheduler=scheduler, policy=policy)
    saver.start(0)
    for step in range(1, steps + 1):
        for param_name, param in model.named_parameters():
            param.grad = None if param_name == LATE and step < first else torch.randn_like(param)
        optimizer.step()
        scheduler.step()
        saver.save(step).wait()
    saver.close()
    return model, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_param_without_gradients_is_saved_and_composed(name, tmp_path):
    make = OPTIMIZERS[name]
    model, optimizer = train(tmp_path / "run", make, "full", 2, 9)
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


def test_a_first_gradient_between_two_saves_in_turn(tmp_path):
    """Each of the two saves has the states of its own parts, of which only the later one has all."""
    run, make = tmp_path / "run", of(optim.SGD, momentum=0.9)
    model, optimizer = train(run, make, "round_robin:2", 3, 3)
    done = run_here("merge", "--run", run, tmp_path / "checkpoint-3")
    assert done.returncode == 0, done.stderr
    tree = torch.load(tmp_path / "checkpoint-3" / "optimizer.pt", weights_only=True)
    names = [name for group in tree["param_groups"] for name in group["lt_params"]]
    buffer = tree["state"][names.index(LATE)]["momentum_buffer"]
    assert torch.equal(buffer, optimizer.state[model.get_parameter(LATE)]["momentum_buffer"])


@pytest.mark.parametrize("name", ["NAdam", "Adam, Muon"])
def test_a_first_gradient_after_the_save_of_the_moments(name, tmp_path):
    """The masters are newer than the moments, which were saved when there were none."""
    run, make, out = tmp_path / "run", OPTIMIZERS[name], tmp_path / "checkpoint-2"
    train(run, make, "moments_in_turn", 2, 2)
    done = run_here("merge", "--run", run, out)
    assert done.returncode == 0 and f"had no states of {LATE}" in done.stderr, done.stderr
    assert run_here("verify", out, "--deep").returncode == 0
    for options in (("--to", "fsdp"), ("--to", "dcp"), ("--to", "deepspeed", "--stage", 2)):
        done = run_here("merge", "--run", run, tmp_path / "other", *options)
        assert done.returncode in (4, 5), done.stderr
        assert LATE in done.stderr or "different states" in done.stderr
        assert not (tmp_path / "other").exists()
    tree = torch.load(out / "optimizer.pt", weights_only=True)
    names = [name for group in tree["param_groups"] for name in group["lt_params"]]
    assert {*range(len(names))} - {*tree["state"]} == {names.index(LATE)}
    make(new_model()).load_state_dict(tree)


def test_states_that_the_base_lacks_are_not_mixed_in(tmp_path):
    run = tmp_path / "run"
    train(run, of(optim.SGD, momentum=0.9), "full", 2, 2)
    for step in (1, 2):
        assert run_here("merge", "--run", run, "--at", str(step), tmp_path / f"checkpoint-{step}").returncode == 0
    parts = [{"from": str(tmp_path / "checkpoint-2"), "select": [1]}]
    recipe = tmp_path / "recipe.yaml"
    document = {"base_model": str(tmp_path / "checkpoint-1"), "merge_method": "passthrough", "parts": parts}
    recipe.write_text(json.dumps(document))
    done = run_here("merge", recipe, tmp_path / "out")
    assert done.returncode == 5 and f"has any of {LATE}" in done.stderr


def test_numbers_that_are_nan_read_back_as_planned(tmp_path):
    run, out = tmp_path / "run", tmp_path / "checkpoint-1"
    train(run, of(optim.NAdam), "full", 1, 1)
    assert run_here("merge", "--run", run, out).returncode == 0
    tree = torch.load(out / "optimizer.pt", weights_only=True)
    tree["state"][0]["mu_product"] = float("nan")
    torch.save(tree, out / "optimizer.pt")
    done = run_here("convert", out, tmp_path / "copy" / out.name)
    assert "bug" not in done.stderr and done.returncode == 0, done.stderr
    tree["param_groups"][0]["momentum_decay"] = float("nan")
    torch.save(tree, out / "optimizer.pt")
    done = run_here("convert", out, tmp_path / "again" / out.name)
    assert done.returncode == 5 and "momentum_decay of param group 0 is NaN" in done.stderr


def test_a_joined_optimizer_keeps_its_states_if_others_do_not_fit():
    model = new_model()
    joined = adam_before_muon(model)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    joined.step()
    tree = joined.state_dict()
    tree["param_groups"][1]["params"] = tree["param_groups"][1]["params"][1:]
    with pytest.raises(ValueError, match="params instead of"):
        joined.load_state_dict(tree)
    assert joined.state
