"""Nothing that goes wrong in a save ends a training, once its optimizer is known: it is `SaveFailed`, or a warning."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn  # noqa: E402
from torch.testing._internal.two_tensor import TwoTensor  # noqa: E402

from llmtailor.codes import Code  # noqa: E402
from llmtailor.saving import SaveFailed, saver_for  # noqa: E402
from llmtailor.saving.save import RunRecord  # noqa: E402
from saving.loop import Disk, Loop  # noqa: E402


class Training:
    """Two linear layers; ``before`` and ``after`` the saver is made, something odd happens to them."""

    def __init__(self, run, before=lambda training: None, after=lambda training: None, **options):
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.tokenizer = None
        before(self)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)
        self.saver = saver_for(
            run,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            tokenizer=self.tokenizer,
            **options,
        )
        self.saver.start(0)
        self.train()
        assert self.saver.has_state()  # an optimizer that can't be saved is refused here
        after(self)

    def train(self):
        self.model(torch.randn(2, 4)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def sparse_buffer(training):
    training.model.register_buffer("odd", torch.eye(3).to_sparse())


def buffer_without_data(training):
    training.model.register_buffer("odd", torch.empty(3, device="meta"))


def param_of_two_tensors(training):
    training.model.register_parameter("odd", nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2))))


def tokenizer_that_fails(training):
    class Fails:
        def save_pretrained(self, folder):
            raise KeyError("vocabulary")

    training.tokenizer = Fails()


def scheduler_that_fails(training):
    training.scheduler.state_dict = lambda: 1 / 0


def moments_of_another_kind(training):
    training.optimizer.state[training.model[0].weight]["exp_avg"] = "text"


def param_replaced(training):
    training.model[0].weight = nn.Parameter(training.model[0].weight.detach().clone())


def group_shortened(training):
    training.optimizer.param_groups[0]["params"].pop()


def state_of_an_unknown_type(training):
    training.optimizer.param_groups[0]["lr"] = object


BEFORE = (sparse_buffer, buffer_without_data, param_of_two_tensors, tokenizer_that_fails)
AFTER = (scheduler_that_fails, moments_of_another_kind, param_replaced, group_shortened, state_of_an_unknown_type)


@pytest.mark.parametrize(("policy", "background"), [("full", True), ("adaptive", False)])
@pytest.mark.parametrize("happens", [*BEFORE, *AFTER])
def test_an_odd_model_costs_the_save(tmp_path, happens, policy, background):
    when = {"before" if happens in BEFORE else "after": happens}
    training = Training(tmp_path, policy=policy, background=background, **when)
    with pytest.raises(SaveFailed) as caught:
        training.saver.save(1).wait(60)
    is_known = happens in (moments_of_another_kind, param_replaced, state_of_an_unknown_type)
    assert [one.code for one in caught.value.problems] == [Code.UNSUPPORTED if is_known else Code.OTHER]
    training.saver.close()
    assert not training.saver.folder.complete()


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
    training = Training(tmp_path, policy="full", background=background)
    assert training.saver.save(1).wait(60).step == 1
    training.train()
    assert training.saver.save(2).wait(60).step == 2
    training.saver.close()
    assert [*training.saver.folder.complete()] == [1, 2]
    assert "after the save at step 2: retention" in caplog.text
