"""What an optimizer keeps beside large tensors: single numbers of each param, and counters of its groups."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.real

import llmtailor  # noqa: E402
from attestation.resuming import Two, loop, step  # noqa: E402


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


@pytest.mark.parametrize(("value", "told"), [(None, "missing, 2"), (0.0, "is 0, 2"), (1.0, "is 1, 2")])
def test_the_step_of_one_param(tmp_path, value, told):
    model, optimizer, scheduler, accelerator = loop(Two())
    for _ in range(2):
        step(model, optimizer)
    accelerator.save_state(tmp_path / "saved")
    states = optimizer.optimizer.state[model.one.weight]
    if value is None:
        del states["step"]
    else:
        states["step"].fill_(value)
    found = llmtailor.attest(tmp_path / "saved", model=model, optimizer=optimizer, scheduler=scheduler)
    assert not found.is_same and not found.rows and found.cause.what.startswith("Adam's step count")
    (step_of_one,) = found.mismatches
    assert told in str(step_of_one) and step_of_one.count == 1


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


class Counting(Own):
    def __init__(self, params, lr):
        super().__init__(params, lr)
        for group in self.param_groups:
            group |= {"k": 0, "d": torch.tensor(1e-6), "d_coef": 1.0}

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            group["k"], group["d"] = group["k"] + 1, group["d"] * 2


@pytest.mark.parametrize(("key", "value"), [("k", 0), ("d", 1e-6), ("d_coef", 2.0)])
def test_counters_of_a_param_group(tmp_path, key, value):
    model, optimizer, scheduler, accelerator = loop(Two(), Counting)
    step(model, optimizer)
    accelerator.save_state(tmp_path / "saved")
    given = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    clean = llmtailor.attest(tmp_path / "saved", **given)
    assert clean.is_same and not clean.mismatches, clean
    optimizer.param_groups[0][key] = value
    (found,) = llmtailor.attest(tmp_path / "saved", **given).mismatches
    assert found.what == key and found.is_alarm == (key != "d_coef")


def test_a_schedule_and_a_loss_scale_that_the_training_does_not_give(tmp_path):
    model, optimizer, scheduler, accelerator = loop(Two())
    scaler = torch.amp.GradScaler("cpu")
    step(model, optimizer)
    accelerator.scaler = scaler
    accelerator.save_state(tmp_path / "saved")
    torch.save(scaler.state_dict(), tmp_path / "saved" / "scaler.pt")
    given = {"model": model, "optimizer": optimizer}
    found = llmtailor.attest(tmp_path / "saved", **given, scheduler=scheduler, scaler=scaler)
    assert found.is_same and not found.notes, found
    found = llmtailor.attest(tmp_path / "saved", **given)
    assert found.is_same and {note.partition(":")[0] for note in found.notes} == {"schedule", "loss scale"}


def test_what_is_in_no_optimizer_is_not_called_frozen(tmp_path):
    model, optimizer, scheduler, accelerator = loop(Two())
    step(model, optimizer)
    accelerator.save_state(tmp_path / "saved")
    given = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    model.head = torch.nn.Linear(4, 4)
    (note,) = llmtailor.attest(tmp_path / "saved", **given).notes
    assert note.startswith("params that require a gradient") and "frozen" not in note
    model.head.requires_grad_(False)
    (note,) = llmtailor.attest(tmp_path / "saved", **given).notes
    assert note.startswith("frozen params are not in the checkpoint")
