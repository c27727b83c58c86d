"""What the checkpoint holds beside trained weights and moments, and the training no longer has."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.real

from accelerate import Accelerator  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import llmtailor  # noqa: E402
from helpers.composing import compose  # noqa: E402
from llmtailor.attestation.compare import MismatchKind  # noqa: E402
from llmtailor.saving import saver_for  # noqa: E402


class WithRest(torch.nn.Module):
    """A trained, a frozen and a rotary module, buffers that are shared, that are saved, and that are not"""

    def __init__(self):
        super().__init__()
        self.trained, self.teacher = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).requires_grad_(False)
        self.rotary_emb = torch.nn.Module()
        self.rotary_emb.register_buffer("inv_freq", torch.rand(4))
        self.register_buffer("scale", torch.rand(4))
        self.register_buffer("alias", self.scale)
        self.register_buffer("positions", torch.arange(8))
        self.register_buffer("cache", torch.rand(4), persistent=False)


def save(path, kind=torch.optim.AdamW):
    torch.manual_seed(1)
    accelerator, model = Accelerator(cpu=True), WithRest()
    model, optimizer = accelerator.prepare(model, kind(model.trained.parameters(), lr=1e-2))
    for param in model.trained.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    accelerator.save_state(path)
    return model, optimizer


def transient(model, name, value):
    delattr(model, name)
    model.register_buffer(name, value, persistent=False)


GONE = {
    "module": (lambda model: setattr(model, "teacher", torch.nn.Identity()), {"frozen": 2}),
    "bias": (lambda model: setattr(model.teacher, "bias", None), {"frozen": 1}),
    "buffer": (lambda model: delattr(model, "positions"), {"buffer": 1}),
    "none": (lambda model: setattr(model, "positions", None), {"buffer": 1}),
    "renamed": (lambda model: setattr(model, "student", model._modules.pop("teacher")), {"frozen": 2}),
}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor])
@pytest.mark.parametrize("what", GONE)
def test_what_is_not_in_the_training_is_missing(tmp_path, what, kind):
    model, optimizer = save(tmp_path / "saved", kind)
    clean = llmtailor.attest(tmp_path / "saved", model=model, optimizer=optimizer)
    assert clean.is_same and clean.num_same == clean.num_states
    change, expected = GONE[what]
    change(model)
    found = llmtailor.attest(tmp_path / "saved", model=model, optimizer=optimizer)
    assert not found.is_same and found.num_states == clean.num_states
    assert {row.kind for row in found.rows} == {MismatchKind.MISSING}
    assert {row.state_kind: len(row.params) for row in found.rows} == expected
    assert found.num_same == clean.num_states - sum(expected.values())


def test_a_buffer_that_is_no_longer_saved_is_compared(tmp_path):
    model, optimizer = save(tmp_path / "saved")
    clean = llmtailor.attest(tmp_path / "saved", model=model, optimizer=optimizer)
    transient(model, "positions", torch.arange(8))
    found = llmtailor.attest(tmp_path / "saved", model=model, optimizer=optimizer)
    assert found.is_same and found.num_same == clean.num_same
    transient(model, "positions", torch.zeros(8, dtype=torch.int64))
    found = llmtailor.attest(tmp_path / "saved", model=model, optimizer=optimizer)
    assert not found.is_same and [row.params for row in found.rows] == [("positions",)]


def test_what_older_models_have_saved_is_no_loss(tmp_path):
    """Frequencies of rotary embeddings, what the model lists, and the other names of shared tensors"""
    model, optimizer = save(tmp_path / "saved")
    transient(model.rotary_emb, "inv_freq", torch.zeros(4))
    del model.positions, model.alias
    type(model)._keys_to_ignore_on_load_unexpected = [r"^positions$"]
    try:
        found = llmtailor.attest(tmp_path / "saved", model=model, optimizer=optimizer)
    finally:
        del type(model)._keys_to_ignore_on_load_unexpected
    assert found.is_same and not found.rows, found


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def loop(frozen=()):
    torch.manual_seed(1)
    model = Layers()
    optimizer = torch.optim.AdamW([param for name, param in model.named_parameters() if name not in frozen], lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


@pytest.mark.parametrize("lost", ["layers.0.bias", "layers.3.bias"])
def test_a_param_of_any_part_of_a_composite_is_not_trained(tmp_path, lost):
    """One of the two is in a part that is older than the newest save, so its optimizer step is lower."""
    model, optimizer, scheduler = loop()
    saver = saver_for(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler, policy="round_robin:2")
    saver.start(0)
    for step in range(1, 7):
        model(torch.ones(2, 4)).backward()
        optimizer.step(), scheduler.step(), optimizer.zero_grad()
        if step % 2 == 0:
            saver.save(step)
    saver.close()
    compose(tmp_path, 6)
    root = tmp_path / "checkpoint-6"
    state = torch.load(root / "optimizer.pt")
    assert len({float(of_param["step"]) for of_param in state["state"].values()}) == 2
    for left_out in ((), (lost,)):
        model, optimizer, scheduler = loop()
        model.load_state_dict(load_file(root / "model.safetensors"))
        optimizer.load_state_dict(state), scheduler.load_state_dict(torch.load(root / "scheduler.pt"))
        params = dict(model.named_parameters())
        optimizer.param_groups[0]["params"] = [params[name] for name in params if name not in left_out]
        result = llmtailor.attest(root, model=model, optimizer=optimizer, scheduler=scheduler)
        assert result.is_same is not bool(left_out)
        untrained = {name for row in result.rows if row.kind is MismatchKind.UNTRAINED for name in row.params}
        assert untrained == {*left_out}
