"""Checkpoints that don't state which params they hold: PEFT's, and those of optimizers that can't be composed."""

from __future__ import annotations

import re
import shutil

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.real

from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import Trainer  # noqa: E402

from attestation.resuming import found_by  # noqa: E402
from helpers.cases import mostly_long  # noqa: E402
from trainings.alone import Alone  # noqa: E402

STEP, SHOWN = 2, {"save_strategy": "steps", "save_steps": 2, "dropout": 0.0}


class Blocks(torch.optim.Optimizer):
    """Quantized moments, one scale per 64 elements: nothing that has the shape of a param."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)  # casts states to the param's dtype; 8-bit optimizers undo that as well
        for state in self.state.values():
            state["state1"] = state["state1"].to(torch.int8)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                blocks = torch.nn.functional.pad(param.grad.flatten(), (0, -param.numel() % 64)).view(-1, 64)
                scale = blocks.abs().amax(1)
                state["step"] = state.get("step", 0) + 1
                state["absmax"] = scale
                state["state1"] = (blocks / (scale[:, None] + 1e-12) * 127).to(torch.int8)
                param -= group["lr"] * param.grad


class WithBlocks(Trainer):
    def create_optimizer(self, model=None):
        self.optimizer = Blocks([param for param in self.model.parameters() if param.requires_grad])
        return self.optimizer


def adapted(model):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=["q_proj", "up_proj"]))


MADE = {"lora": {"prepare": adapted}, "blocks": {"kind": WithBlocks}}


@pytest.fixture(scope="module", params=MADE)
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    Alone(folder, max_steps=4, **SHOWN, **MADE[request.param]).train()
    return request.param, folder


@pytest.fixture
def run(saved, tmp_path):
    return saved[0], shutil.copytree(saved[1], tmp_path / "run")


def resume(run, change=lambda trainer: None, how="sample"):
    name, folder = run
    return found_by(folder / f"checkpoint-{STEP}", change, how, max_steps=4, **MADE[name])


@pytest.mark.parametrize("how", mostly_long(["sample", "full"], "sample"))
def test_a_clean_resume_is_the_same(run, how):
    found = resume(run, how=how)
    assert found.is_same and found.num_same == found.num_states > 20, found
    assert not [note for note in found.notes if "frozen" not in note]


def _kinds(found):
    return {(row.state_kind, row.kind.value) for row in found.rows if row.is_alarm}


def test_states_of_another_step_and_reset_ones(run):
    kinds = {"exp_avg", "exp_avg_sq"} if run[0] == "lora" else {"absmax", "state1"}

    def older(trainer):
        other = torch.load(run[1] / "checkpoint-4" / "optimizer.pt", weights_only=True)
        trainer.optimizer.load_state_dict(other)

    found = resume(run, older)
    assert _kinds(found) == {(kind, "of another step") for kind in kinds}
    assert found.cause is not None and "step 4" in found.cause.what

    found = resume(run, lambda trainer: trainer.optimizer.state.clear())
    assert _kinds(found) == {(kind, "missing") for kind in kinds}
    assert found.cause is not None and "only the weights" in found.cause.what


def replace_params(trainer):
    """As ``load_state_dict(assign=True)`` does"""
    copied = {name: param.detach().clone() for name, param in trainer.model.named_parameters()}
    trainer.model.load_state_dict(copied, assign=True, strict=False)


def drop_param(trainer):
    trainer.optimizer.param_groups[0]["params"].pop(0)


def freeze(trainer):
    trainer.optimizer.param_groups[0]["params"][0].requires_grad = False


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (replace_params, "made before the model got other params"),
        (drop_param, "other params than it was saved with|not trained: frozen, or left out"),
        (freeze, "params that the checkpoint trains are not trained"),
    ],
)
def test_params_that_are_not_trained(run, change, cause):
    if (run[0], change) == ("lora", replace_params):
        pytest.skip("PEFT's params are replaced by name")
    found = resume(run, change)
    assert not found.is_same and re.search(cause, found.cause.what)


@pytest.mark.parametrize("fault", ["renamed", "lora_B"])
def test_an_adapter_that_peft_loads_in_part(run, fault):
    if run[0] != "lora":
        pytest.skip("adapters only")
    path = run[1] / f"checkpoint-{STEP}" / "adapter_model.safetensors"
    tensors = load_file(path)
    if fault == "renamed":
        left = {key.replace("base_model.model.", "base_model."): one for key, one in tensors.items()}
    else:
        left = {key: one for key, one in tensors.items() if "lora_B" not in key}
    save_file(left, path, {"format": "pt"})
    found = resume(run)
    assert _kinds(found) == {("master", "not in the checkpoint")}
    (row,) = found.rows
    assert len(row.params) == (len(tensors) if fault == "renamed" else len(tensors) / 2)
    assert found.cause is not None and "keys renamed, or left out" in found.cause.what
