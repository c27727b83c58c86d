"""Real checkpoints of the plain Trainer: indexed, converted into themselves, resumed."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from helpers.cases import mostly_long
from helpers.composing import convert
from helpers.files import TOLD, names
from helpers.same import assert_same
from helpers.states import read
from llmtailor.checkpoint.optimizer import without_names
from llmtailor.findings import ERROR
from llmtailor.formats.registry import index_checkpoint
from llmtailor.formats.trainer.read import detects
from llmtailor.model.roles import FROZEN, MASTER, WEIGHT, State
from llmtailor.verify.verify import RESUMABLE, verify_checkpoint
from trainings.alone import NamedGroups, finished, train
from trainings.common import MOMENTS

pytestmark = pytest.mark.real


def freeze_embeddings(model):
    model.get_input_embeddings().weight.requires_grad_(False)


def add_frozen(model):
    """A module that the config does not describe, with integers among its buffers."""
    norm = torch.nn.BatchNorm1d(4, affine=False)
    model.added = torch.nn.Sequential(torch.nn.Linear(6, 4), norm).requires_grad_(False)


class TensorRates(NamedGroups):
    def create_optimizer(self, model=None):
        for group in super().create_optimizer(model).param_groups:
            group["lr"], group["betas"] = torch.tensor(group["lr"]), tuple(map(torch.tensor, group["betas"]))
        return self.optimizer


RUNS = {
    "llama": {"arch": "llama"},
    "qwen2-tied": {"arch": "qwen2", "tied": True},
    "gpt2-tied": {"arch": "gpt2", "tied": True},
    "bf16": {"arch": "llama", "dtype": torch.bfloat16},
    "frozen": {"arch": "llama", "prepare": freeze_embeddings},
    "named": {"arch": "llama", "kind": NamedGroups},
    "added": {"arch": "llama", "prepare": add_frozen},
    "added-tensors": {"arch": "llama", "prepare": add_frozen, "kind": TensorRates},
    "named-tied": {"arch": "qwen2", "tied": True, "kind": NamedGroups},
}


@pytest.fixture(scope="module", params=mostly_long(RUNS, *(RUNS.keys() - {"named", "gpt2-tied", "qwen2-tied"})))
def trained(request, tmp_path_factory):
    name = request.param
    return name, finished() if name == "llama" else train(tmp_path_factory.mktemp(name), **RUNS[name])


def test_an_index_says_what_the_live_optimizer_holds(trained):
    name, run = trained
    root = run.checkpoint(4)
    assert detects(root)
    index = index_checkpoint(root, name)
    model = run.trainer.model
    live = run.truth.at[4]
    trainable = [param for param, value in model.named_parameters() if value.requires_grad]
    assert sorted(index.steps()) == sorted(trainable) == sorted(live)
    for param, value in model.named_parameters():
        kind = MASTER if value.requires_grad else FROZEN
        assert index.params[param].role == ("trainable" if value.requires_grad else "frozen")
        assert torch.equal(read(root, index.held[State(param, kind)]), value.detach())
        assert torch.equal(read(root, index.held[State(param, WEIGHT)]), value.detach())
    for param, state in live.items():
        assert index.steps()[param] == state["step"] == 4
        for moment in MOMENTS:
            assert torch.equal(read(root, index.held[State(param, moment)]), state[moment])
    assert index.precision == ("BF16" if name == "bf16" else "F32")
    assert (index.form.stage, index.world_size, index.global_step) == (0, 1, 4)
    assert bool(index.tied) == ("tied" in name)
    if "tied" in name:
        assert set(index.tied) == {"lm_head.weight"} and not set(index.tied) & set(index.params)
    assert bool(index.findings) == (name in ("frozen", "added"))


def test_a_checkpoint_converted_into_itself_resumes_with_the_same_losses(trained, tmp_path):
    name, run = trained
    source = run.checkpoint(2)
    out = convert(source, tmp_path / "checkpoint-2")
    assert names(out) - {*TOLD} == names(source)
    assert_same(*(dict(sorted(load_file(folder / "model.safetensors").items())) for folder in (out, source)))
    ours, theirs = (torch.load(folder / "optimizer.pt", weights_only=True) for folder in (out, source))
    assert_same(ours["state"], theirs["state"])
    assert_same(*([group["params"] for group in one["param_groups"]] for one in (ours, theirs)))
    again, first = (index_checkpoint(folder, name) for folder in (out, source))
    for what in ("params", "tied", "group_params", "sub_groups"):
        assert getattr(again, what) == getattr(first, what)
    hyper = [[without_names(group.hyper) for group in index.groups] for index in (again, first)]
    assert hyper[0] == hyper[1]
    resumed = train(tmp_path / "resumed", resume_from=out, **RUNS[name])
    assert resumed.losses == {step: run.losses[step] for step in (3, 4)}
    saved = torch.load(resumed.checkpoint(4) / "optimizer.pt", weights_only=True)  # stock keeps the names
    assert [tuple(group["lt_params"]) for group in saved["param_groups"]] == [*again.group_params]


def test_a_composite_has_the_names_that_a_resume_looks_for(tmp_path):
    """transformers saves the head of GPT-NeoX by another name than it has in memory, and a resume does not find it."""
    run = train(tmp_path / "run", "gpt_neox")
    source = run.checkpoint(2)
    (finding,) = [one for one in index_checkpoint(source, "x").findings if one.severity == ERROR]
    assert "a resume does not find them" in finding.what and "llmtailor convert" in finding.fix
    convert(source, tmp_path / "checkpoint-2")
    assert verify_checkpoint(tmp_path / "checkpoint-2", deep=True).level == RESUMABLE
    resumed = train(tmp_path / "resumed", "gpt_neox", resume_from=tmp_path / "checkpoint-2")
    assert resumed.losses == {step: run.losses[step] for step in (3, 4)}
