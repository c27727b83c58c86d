"""Nothing that goes wrong in a save ends a training, once its optimizer is known: it is `SaveFailed`, or a warning."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from llmtailor.background.run_record import RunRecord
from llmtailor.codes import Code
from llmtailor.saving import SaveFailed
from saving.loop import Disk, Loop


class Tokenizer:
    def save_pretrained(self, folder):
        raise KeyError("vocabulary")


def linear():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def training(run, model, **options):
    """A training that has made a step; an optimizer that can't be saved would be refused here."""
    loop = Loop(run, model=model, loss=lambda model: model(torch.randn(2, 4)).square().mean(), **options).start()
    loop.train()
    assert loop.saver.has_state()
    return loop


BEFORE = {
    "sparse buffer": lambda model: model.register_buffer("odd", torch.eye(3).to_sparse()),
    "buffer without data": lambda model: model.register_buffer("odd", torch.empty(3, device="meta")),
    "tokenizer that fails": lambda model: None,
    "param of two tensors": lambda model: model.register_parameter(
        "odd", nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2)))
    ),
}
AFTER = {
    "scheduler that fails": lambda loop: setattr(loop.scheduler, "state_dict", lambda: 1 / 0),
    "moments of another kind": lambda loop: loop.optimizer.state[loop.model[0].weight].update(exp_avg="text"),
    "param replaced": lambda loop: setattr(
        loop.model[0], "weight", nn.Parameter(loop.model[0].weight.detach().clone())
    ),
    "group shortened": lambda loop: loop.optimizer.param_groups[0]["params"].pop(),
    "state of an unknown type": lambda loop: loop.optimizer.param_groups[0].update(lr=object),
}
KNOWN = ("moments of another kind", "param replaced", "state of an unknown type")


@pytest.mark.parametrize(("policy", "background"), [("full", True), ("adaptive", False)])
@pytest.mark.parametrize("odd", [*BEFORE, *AFTER])
def test_an_odd_model_costs_the_save(tmp_path, odd, policy, background):
    BEFORE.get(odd, lambda model: None)(model := linear())
    tokenizer = Tokenizer() if odd == "tokenizer that fails" else None
    loop = training(tmp_path, model, policy=policy, background=background, tokenizer=tokenizer)
    AFTER.get(odd, lambda loop: None)(loop)
    with pytest.raises(SaveFailed) as caught:
        loop.save().wait(60)
    assert [one.code for one in caught.value.problems] == [Code.UNSUPPORTED if odd in KNOWN else Code.OTHER]
    loop.saver.close()
    assert not loop.saves


def test_another_optimizer_with_params_of_its_own_kind_steps(tmp_path, monkeypatch):
    """The hook before its step can't ask where they are stored, so it waits for everything."""
    disk, run = Disk(monkeypatch), Loop(tmp_path / "run", policy="full").start()
    other = nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2)))
    run.train()
    disk.pause_s = 0.05
    save = run.save()
    other.grad = TwoTensor(torch.ones(2), torch.ones(2))
    torch.optim.SGD([other], lr=1.0).step()
    save.wait(60)
    run.saver.close()
    assert other.a.tolist() == [0.0, 0.0]
    run.check(1, tmp_path / "out")


@pytest.mark.parametrize("background", [True, False])
def test_what_goes_wrong_after_publishing_does_not_make_the_save_fail(tmp_path, monkeypatch, caplog, background):
    def fail(*_):
        raise RuntimeError("retention")

    monkeypatch.setattr(RunRecord, "published", fail)
    loop = training(tmp_path, linear(), policy="full", background=background)
    assert loop.save().wait(60).step == 1
    assert loop.make_saves().step == 2
    loop.saver.close()
    assert loop.saves == [1, 2]
    assert "after the save at step 2: retention" in caplog.text
