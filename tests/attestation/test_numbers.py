"""What an optimizer keeps beside large tensors: single numbers of each param, and counters of its groups."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.real

import llmtailor  # noqa: E402
from attestation.test_forms import Two, loop, step  # noqa: E402


class Own(torch.optim.Optimizer):
    """Momentum, and a number of each param that is no tensor"""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                state["moved"] = state.get("moved", 0) + param.numel()
                state["momentum_buffer"] = param.grad.clone()
                param -= group["lr"] * param.grad


KINDS = {
    "mu_product": (torch.optim.NAdam, lambda states, kind: states[kind].fill_(1.0)),
    "eta": (torch.optim.ASGD, lambda states, kind: states[kind].mul_(10)),
    "mu": (torch.optim.ASGD, lambda states, kind: states[kind].mul_(0.5)),
    "moved": (Own, lambda states, kind: states.update({kind: 0})),
}


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_a_param(tmp_path, kind):
    make, change = KINDS[kind]
    model, optimizer, scheduler, accelerator = loop(Two(), make)
    for _ in range(2):
        step(model, optimizer)
    accelerator.save_state(tmp_path / "saved")
    given = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    clean = llmtailor.attest(tmp_path / "saved", **given)
    assert clean.is_same and not clean.mismatches, clean
    states = optimizer.optimizer.state
    for param in model.parameters():
        change(states[param], kind)
    found = llmtailor.attest(tmp_path / "saved", **given)
    assert not found.is_same and not found.rows and found.cause.what == f"{kind} differs"
    assert [(one.what, one.count, one.is_alarm) for one in found.mismatches] == [(kind, 3, True)]
    for param in model.parameters():
        del states[param][kind]
    (lost,) = llmtailor.attest(tmp_path / "saved", **given).mismatches
    assert str(lost).startswith(f"{kind}: missing, ") and lost.is_alarm and lost.count == 3


def test_a_number_that_is_loaded_into_fewer_bits(tmp_path):
    """torch casts it to the dtype of the param."""
    model, optimizer, scheduler, accelerator = loop(Two().bfloat16(), torch.optim.NAdam)
    step(model, optimizer)
    accelerator.save_state(tmp_path / "saved")
    optimizer.load_state_dict(optimizer.state_dict())
    states = optimizer.optimizer.state.values()
    assert {one["mu_product"].dtype for one in states} == {torch.bfloat16}
    found = llmtailor.attest(tmp_path / "saved", model=model, optimizer=optimizer, scheduler=scheduler)
    assert found.is_same and not any(one.is_alarm for one in found.mismatches), found
