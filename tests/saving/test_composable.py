"""Whatever the saver accepts can be composed, and a saver that finds the contrary says so with its first save."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_model

import llmtailor
from helpers.cases import mostly_long
from llmtailor.formats.registry import index_checkpoint
from llmtailor.recipe import Recipe
from llmtailor.verify.verify import verify_checkpoint
from saving.loop import Loop, build, log_of


class Buffers(torch.nn.Module):
    """Buffers of all kinds, and a param of another dtype."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.rand(3))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("scratch", torch.rand(2), persistent=False)
        self.low = torch.nn.Parameter(torch.rand(4).to(torch.bfloat16))


def add_teacher(model):
    model.teacher = copy.deepcopy(model)


def add_copy_of_a_layer(model):
    model.model.reference = copy.deepcopy(model.model.layers[0])


def add_shared(model):
    model.added, model.tied = torch.nn.Linear(16, 5), torch.nn.Linear(16, 5)
    model.again, model.tied.weight = model.added, model.added.weight


def add_buffers(model):
    model.added = Buffers()
    model.again = model.added


ADDED = (add_teacher, add_copy_of_a_layer, add_shared, add_buffers)


def make(run, add, *, tied, **options):
    """A loop of a model with frozen modules that its config does not describe."""
    torch.manual_seed(0)
    model = build(hidden=16, layers=2, vocab=32, num_key_value_heads=1, tie_word_embeddings=tied)
    trained = {*model.parameters()}
    for one in ADDED if add is None else (add,):
        one(model)
    for param in {*model.parameters()} - trained:
        param.requires_grad = False
    rate, betas = torch.tensor(1e-2), (torch.tensor(0.9), torch.tensor(0.999))
    return Loop(run, model=model, rate=rate, betas=betas, **options)


def state_of(loop):
    return copy.deepcopy([loop.model.state_dict(), loop.optimizer.state_dict()])


@pytest.mark.parametrize("tied", mostly_long([False, True], True))
@pytest.mark.parametrize("add", mostly_long([None, *ADDED], None))
def test_modules_that_no_config_describes_and_tensors_as_options(tmp_path, add, tied, caplog):
    """Composites hold them, also after a conversion into ZeRO and back, and torch continues to the last bit."""
    loop = make(tmp_path / "run", add, tied=tied, policy="parity").start()
    truth = {}
    for step in (1, 2, 3):
        loop.make_saves()
        truth[step] = state_of(loop)
    loop.saver.close()
    assert not caplog.records

    out, mixed = (loop.compose(step, tmp_path / f"checkpoint-{step}") for step in (1, 3))
    saved, found = index_checkpoint(tmp_path / "run" / "partial" / "step-00000001"), index_checkpoint(out)
    assert (found.params, found.tied) == (saved.params, saved.tied)
    for composite in (out, mixed):
        verdict = verify_checkpoint(composite, deep=True)
        assert verdict.is_resumable and not verdict.findings

    zero, back = tmp_path / "zero", tmp_path / "back"
    llmtailor.merge(Recipe(name="x", base=out), zero, llmtailor.Options(stage=2, world_size=2))
    llmtailor.merge(Recipe(name="x", base=zero), back, llmtailor.Options(stage=0, world_size=1))
    for source in (out, back):
        again = make(tmp_path / "unused", add, tied=tied)
        load_model(again.model, source / "model.safetensors")
        content = torch.load(source / "optimizer.pt", weights_only=True)
        for group in content["param_groups"]:
            del group["lt_params"]
        again.optimizer.load_state_dict(content)
        again.step = 1
        torch.testing.assert_close(state_of(again), truth[1], rtol=0, atol=0)
        again.train()
        torch.testing.assert_close(state_of(again), truth[2], rtol=0, atol=0)


class BadConfig:
    """Writes a config.json that nobody can read."""

    def save_pretrained(self, folder):
        (folder / "config.json").write_text("{")


@pytest.mark.parametrize("background", [True, False])
def test_a_save_that_can_not_be_composed_is_reported_at_once(tmp_path, caplog, background):
    """At each save; training and saves continue."""
    loop = Loop(tmp_path, tokenizer=BadConfig(), background=background).trained(3)
    assert loop.saves == [1, 2, 3]
    errors = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert errors and all("can't be composed into a checkpoint" in text and "config.json" in text for text in errors)
    assert [line["step"] for line in log_of(tmp_path) if "not_composable" in line][:1] == [1]


def test_the_proof_moves_no_state(tmp_path, monkeypatch):
    """What it writes is at its full size, but has holes where the states will be."""
    from llmtailor.compose import readback as prove

    seen, check = {}, prove.check_written

    def look(composition, folder):
        for path in folder.rglob("*"):
            seen[path.name] = path.stat().st_size, path.stat().st_blocks * 512
        check(composition, folder)

    loop = Loop(tmp_path, hidden=256).start()
    with monkeypatch.context() as patch:
        patch.setattr(prove, "check_written", look)
        loop.make_saves()
        loop.saver.close()
    out = loop.compose(1, tmp_path / "out")
    for name in ("model.safetensors", "optimizer.pt"):
        size, taken = seen[name]
        assert size == (out / name).stat().st_size and taken < size / 4
