"""Params that have had no gradient yet, and params without dimensions, in saves of a loop with a real optimizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import optim

from helpers.commands import call, run_here
from helpers.composing import merge
from helpers.same import assert_same
from llmtailor.errors import MismatchError
from llmtailor.param_groups import join_optimizers
from saving.loop import Loop, read_states
from trainings.models import build
from trainings.optimizers import matrices_and_rest

pytestmark = pytest.mark.real

LATE = "model.layers.1.self_attn.q_proj.weight"


def of(kind: Any, **options: Any) -> Callable[[Any], Any]:
    return lambda model: kind(model.parameters(), **{"lr": 1e-3, **options})


def adam_before_muon(model: Any) -> Any:
    """The first states are Adam's."""
    matrices, rest = matrices_and_rest(model)
    return join_optimizers(model, [optim.AdamW(rest.values()), optim.Muon(matrices.values())])


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


def train(run: Path, make: Callable[[Any], Any], policy: str, steps: int, first: int) -> Loop:
    """Return a training of steps that were all saved; one param gets gradients from ``first`` on."""

    def loss(model: Any) -> Any:
        used = [param for name, param in model.named_parameters() if name != LATE or loop.step + 1 >= first]
        return sum((param * torch.randn_like(param)).sum() for param in used)

    loop = Loop(run, model=new_model(), make=make, loss=loss, policy=policy)
    return loop.trained(steps)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_param_without_gradients_is_saved_and_composed(name, tmp_path):
    make = OPTIMIZERS[name]
    loop = train(tmp_path / "run", make, "full", 2, 3)
    out = loop.compose(2, tmp_path / "checkpoint-2")
    call("verify", out, "--deep")
    resumed = Loop(tmp_path / "resumed", model=new_model(), make=make, loss=loop.loss, policy="full")
    resumed.model.load_state_dict(load_file(out / "model.safetensors"))
    resumed.optimizer.load_state_dict(torch.load(out / "optimizer.pt", weights_only=True))
    resumed.step = 2
    resumed.train()
    loop.train()
    assert_same(resumed.truth, {3: loop.truth[3]})


def test_a_single_value_of_a_param_without_dimensions_is_as_old_as_its_moments(tmp_path):
    """It has the shape of its param, as moments have."""
    loop = train(tmp_path / "run", of(optim.NAdam), "moments_in_turn:4", 4, 1)
    states = read_states(loop.compose(4, tmp_path / "checkpoint-4"))
    steps = {
        kind: {step for step in loop.truth if torch.equal(states["scale", kind], loop.truth[step]["scale"][kind])}
        for kind in ("exp_avg", "mu_product")
    }
    assert steps["exp_avg"] == steps["mu_product"] and steps["exp_avg"] < {1, 2, 3, 4}


def test_a_first_gradient_between_two_saves_in_turn(tmp_path):
    """Each of the two saves has the states of its own parts, of which only the later one has all."""
    loop = train(tmp_path / "run", of(optim.SGD, momentum=0.9), "round_robin:2", 3, 3)
    found = read_states(loop.compose(3, tmp_path / "checkpoint-3"))
    assert torch.equal(found[LATE, "momentum_buffer"], loop.truth[3][LATE]["momentum_buffer"])


@pytest.mark.parametrize("name", ["NAdam", "Adam, Muon"])
def test_a_first_gradient_after_the_save_of_the_moments(name, tmp_path):
    """The masters are newer than the moments, which were saved when there were none."""
    run, make, out = tmp_path / "run", OPTIMIZERS[name], tmp_path / "checkpoint-2"
    train(run, make, "moments_in_turn", 2, 2)
    assert f"had no states of {LATE}" in call("merge", "--run", run, out).stderr
    call("verify", out, "--deep")
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
    loop = train(tmp_path / "run", of(optim.SGD, momentum=0.9), "full", 2, 2)
    base, newer = (loop.compose(step, tmp_path / f"checkpoint-{step}") for step in (1, 2))
    with pytest.raises(MismatchError, match=f"has any of {LATE}"):
        merge(base, tmp_path / "out", {1: newer})


def test_numbers_that_are_nan_read_back_as_planned(tmp_path):
    out = train(tmp_path / "run", of(optim.NAdam), "full", 1, 1).compose(1, tmp_path / "checkpoint-1")
    tree = torch.load(out / "optimizer.pt", weights_only=True)
    tree["state"][0]["mu_product"] = float("nan")
    torch.save(tree, out / "optimizer.pt")
    (out / "llmtailor.json").unlink()  # which has the file's checksum
    assert "bug" not in call("convert", out, tmp_path / "copy" / out.name).stderr
    tree["param_groups"][0]["momentum_decay"] = float("nan")
    torch.save(tree, out / "optimizer.pt")
    told = call("convert", out, tmp_path / "again" / out.name, code=5).stderr
    assert "momentum_decay of param group 0 is NaN" in told


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
