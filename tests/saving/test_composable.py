"""Whatever the saver accepts can be composed, and a saver that finds the contrary says so with its first save."""

from __future__ import annotations

import copy
import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file, load_model  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

import llmtailor  # noqa: E402
from helpers.composing import compose  # noqa: E402
from llmtailor.formats.registry import index_checkpoint  # noqa: E402
from llmtailor.recipe import Recipe  # noqa: E402
from llmtailor.saving import saver_for  # noqa: E402
from llmtailor.verify.verify import verify_checkpoint  # noqa: E402
from saving.loop import Loop  # noqa: E402

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


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


def build(add, *, tied):
    """A model with frozen modules that its config does not describe."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=tied))
    trained = [*model.parameters()]
    for one in ADDED if add is None else (add,):
        one(model)
    for param in {*model.parameters()} - {*trained}:
        param.requires_grad = False
    rate, betas = torch.tensor(1e-2), (torch.tensor(0.9), torch.tensor(0.999))
    return model, torch.optim.AdamW(trained, lr=rate, betas=betas)


def step_once(model, optimizer, step):
    torch.manual_seed(step)
    tokens = torch.randint(0, 32, (2, 8))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model, optimizer):
    return copy.deepcopy([model.state_dict(), optimizer.state_dict()])


def same(one, two):
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(two) and len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, torch.Tensor):
        return isinstance(two, torch.Tensor) and one.dtype == two.dtype and torch.equal(one, two)
    return one == two


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("add", [None, *ADDED])
def test_modules_that_no_config_describes_and_tensors_as_options(tmp_path, add, tied, caplog):
    """Composites hold them, also after a conversion into ZeRO and back, and torch continues to the last bit."""
    model, optimizer = build(add, tied=tied)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    saver = saver_for(tmp_path / "run", model=model, optimizer=optimizer, scheduler=schedule, policy="parity")
    saver.start(0)
    truth = {}
    for step in (1, 2, 3):
        step_once(model, optimizer, step)
        schedule.step()
        truth[step] = state_of(model, optimizer)
        saver.save(step)
    saver.close()
    assert not caplog.records

    out = tmp_path / "checkpoint-1"
    compose(tmp_path / "run", 1, out=out)
    compose(tmp_path / "run", 3, out=tmp_path / "mixed")
    saved, found = index_checkpoint(tmp_path / "run" / "partial" / "step-00000001"), index_checkpoint(out)
    assert (found.params, found.tied) == (saved.params, saved.tied)
    for composite in (out, tmp_path / "mixed"):
        verdict = verify_checkpoint(composite, deep=True)
        assert verdict.is_resumable and not verdict.findings

    zero, back = tmp_path / "zero", tmp_path / "back"
    llmtailor.merge(Recipe("x", "", out, (), None, None), zero, llmtailor.Options(stage=2, world_size=2))
    llmtailor.merge(Recipe("x", "", zero, (), None, None), back, llmtailor.Options(stage=0, world_size=1))
    for source in (out, back):
        again, other = build(add, tied=tied)
        load_model(again, source / "model.safetensors")
        content = torch.load(source / "optimizer.pt", weights_only=True)
        for group in content["param_groups"]:
            del group["lt_params"]
        other.load_state_dict(content)
        assert same(state_of(again, other), truth[1])
        step_once(again, other, 2)
        assert same(state_of(again, other), truth[2])


class BadConfig:
    """Writes a config.json that nobody can read."""

    def save_pretrained(self, folder):
        (folder / "config.json").write_text("{")


@pytest.mark.parametrize("background", [True, False])
def test_a_save_that_can_not_be_composed_is_reported_at_once(tmp_path, caplog, background):
    """Once; training and saves continue."""
    loop = Loop(tmp_path, tokenizer=BadConfig(), background=background).start()
    for _ in range(3):
        loop.train()
        loop.save()
    loop.saver.close()
    assert loop.saves == [1, 2, 3]
    (record,) = caplog.records
    assert "can't be composed into a checkpoint" in record.message and "config.json" in record.message
    lines = [json.loads(line) for line in (tmp_path / "partial" / "saves.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "not_composable" in line] == [1]


def test_the_proof_moves_no_state(tmp_path, monkeypatch):
    """What it writes is at its full size, but has holes where the states will be."""
    from llmtailor.compose import write as prove

    seen = {}

    def look(composition, folder):
        for path in folder.rglob("*"):
            if path.is_file():
                seen[path.name] = path.stat().st_size, path.stat().st_blocks * 512
        check(composition, folder)

    check = prove.check_written
    with monkeypatch.context() as during_the_save:
        during_the_save.setattr(prove, "check_written", look)
        loop = Loop(tmp_path, hidden=256).start()
        loop.train()
        loop.save()
        loop.saver.close()
    sizes = {path.name: path.stat().st_size for path in compose_into(tmp_path).iterdir()}
    for name in ("model.safetensors", "optimizer.pt"):
        size, taken = seen[name]
        assert size == sizes[name] and taken < size / 4


def compose_into(run):
    compose(run, 1, out=run / "out")
    assert load_file(run / "out" / "model.safetensors")
    return run / "out"
