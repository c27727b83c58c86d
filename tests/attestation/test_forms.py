"""Weights that are stored in another form than the training has them, and what can't be compared."""

from __future__ import annotations

import shutil

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.real

from transformers import Trainer  # noqa: E402

import llmtailor  # noqa: E402
from attestation.resuming import (  # noqa: E402
    Two,
    found_by,
    loop,
    step,
)
from helpers.cases import mostly_long  # noqa: E402
from llmtailor.errors import SourceError, UnsupportedCheckpoint  # noqa: E402
from llmtailor.live.attesting import open_on_first  # noqa: E402
from llmtailor.live.torch_training import TorchTraining  # noqa: E402
from llmtailor.model.roles import MASTER  # noqa: E402
from llmtailor.ranks.team import Ranks  # noqa: E402
from llmtailor.storage.local import OpenFiles  # noqa: E402
from trainings.alone import Alone, train  # noqa: E402


class Converting(Trainer):
    """Loads fused experts from the file that has each of them, which the Trainer's own method does not do."""

    def _load_from_checkpoint(self, checkpoint, model=None):
        self.model.load_state_dict(type(self.model).from_pretrained(checkpoint).state_dict())


def begin(folder, **made):
    Alone(folder, max_steps=1, layers=2, save_strategy="steps", save_steps=1, **made).train()
    return folder / "checkpoint-1"


def lose_experts(trainer):
    with torch.no_grad():
        for name, param in trainer.model.named_parameters():
            if ".experts." in name:
                param.zero_()


@pytest.mark.parametrize("optim", mostly_long(["adamw_torch", "adafactor"], "adafactor"))
def test_experts_that_are_fused_in_memory_only(tmp_path, optim):
    made = {"arch": "qwen3_moe", "optim": optim}
    checkpoint = begin(tmp_path / "run", **made)
    again = {"max_steps": 2, "layers": 2, "kind": Converting, **made}
    found = found_by(checkpoint, **again)
    assert found.is_same and found.num_same == found.num_states and not found.notes, found
    found = found_by(checkpoint, lose_experts, **again)
    (row,) = found.rows
    assert row.kind.value == "zero" and all(".experts." in name for name in row.params)


def test_experts_are_matched_by_the_live_model(tmp_path):
    """Without config.json, nobody but the model can say what the file calls its params."""
    checkpoint = begin(tmp_path / "run", arch="qwen3_moe")
    (checkpoint / "config.json").unlink()
    trainer = Alone(tmp_path / "again", arch="qwen3_moe", layers=2).trainer
    training = TorchTraining(trainer.model, trainer.create_optimizer())
    opened = open_on_first(training, checkpoint, Ranks.here())
    assert opened.training is training and not opened.converted
    trained = {name for name, fact in training.params.items() if fact.role == "trainable"}
    assert {state.param for state in opened.index.held if state.kind == MASTER} == trained


@pytest.mark.parametrize(
    "kind", mostly_long(["PromptTuningConfig", "PromptEncoderConfig", "PrefixTuningConfig"], "PromptEncoderConfig")
)
def test_adapters_whose_files_hold_computed_tensors(tmp_path, kind):
    peft = pytest.importorskip("peft")
    config = getattr(peft, kind)(num_virtual_tokens=3, task_type="CAUSAL_LM")
    made = {"prepare": lambda model: peft.get_peft_model(model, config)}
    found = found_by(begin(tmp_path / "run", **made), max_steps=2, layers=2, **made)
    assert found.is_same and found.num_same == found.num_states > 0, found
    assert [note for note in found.notes if "prompt_encoder" in note and "stored in another form" in note]


@pytest.mark.parametrize(("rows", "columns"), [(12, 8), (8, 16)])
def test_a_param_of_another_shape_with_the_same_leading_elements(tmp_path, rows, columns):
    model, optimizer, _, accelerator = loop(Two())
    step(model, optimizer)
    accelerator.save_state(tmp_path / "saved")
    other = Two(rows, columns)
    adam = torch.optim.AdamW(other.parameters(), lr=1e-2)
    step(other, adam)
    with torch.no_grad():
        for mine, saved in zip(other.parameters(), model.parameters(), strict=True):
            mine.copy_(saved.reshape(-1)[: mine.numel()].reshape(mine.shape))
            for kind, value in adam.state[mine].items():
                whole = optimizer.optimizer.state[saved][kind]
                value.copy_(whole.reshape(-1)[: value.numel()].reshape(value.shape))
    found = llmtailor.attest(tmp_path / "saved", model=other, optimizer=adam)
    assert {row.state_kind for row in found.rows} == {"master", "exp_avg", "exp_avg_sq"}
    assert {row.params for row in found.rows} == {("one.weight",)}
    assert {row.detail for row in found.rows} == {f"16x8 in the checkpoint, {rows}x{columns} in the training"}


def test_nothing_that_can_be_compared_is_not_the_same(tmp_path):
    model, optimizer, _, accelerator = loop(Two(), torch.optim.SGD)
    accelerator.save_state(tmp_path / "saved", safe_serialization=False)
    with pytest.raises(UnsupportedCheckpoint, match="not one of its states can be compared"):
        llmtailor.attest(tmp_path / "saved", model=model, optimizer=optimizer)


def test_weights_in_torchs_form_are_a_note(tmp_path):
    model, optimizer, scheduler, accelerator = loop(Two())
    step(model, optimizer)
    accelerator.save_state(tmp_path / "saved", safe_serialization=False)
    found = llmtailor.attest(tmp_path / "saved", model=model, optimizer=optimizer, scheduler=scheduler)
    assert found.is_same and found.num_same == 6
    assert [note for note in found.notes if note.startswith("weights of 3 params are stored in another form")]


@pytest.mark.parametrize(
    ("dtype", "scale", "cause", "kinds"),
    [
        (
            torch.float16,
            1e-5,
            "moments were reset to zero, or rounded to it",
            {("exp_avg", "zero"), ("exp_avg_sq", "zero")},
        ),
        (torch.bfloat16, 1.0, "all states were rounded: the training has another precision", set()),
    ],
)
def test_a_training_in_a_smaller_dtype(tmp_path, dtype, scale, cause, kinds):
    """torch casts the states that it loads to the dtype of the params."""
    model, optimizer, _, accelerator = loop(Two())
    step(model, optimizer, scale)
    accelerator.save_state(tmp_path / "saved")
    other = Two().to(dtype)
    other.load_state_dict(model.state_dict())
    adam = torch.optim.AdamW(other.parameters(), lr=1e-2)
    adam.load_state_dict(optimizer.state_dict())
    found = llmtailor.attest(tmp_path / "saved", model=other, optimizer=adam)
    assert not found.is_same and found.num_same == 0 and found.cause.what.startswith(cause)
    assert {(row.state_kind, row.kind.value) for row in found.rows if row.is_alarm} == kinds


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


def untie(model):
    name = "lm_head" if hasattr(model, "lm_head") else "head"
    head = model.get_submodule(name)
    head.weight = torch.nn.Parameter(head.weight.detach().clone())


def test_a_head_that_is_untied_after_loading(tmp_path):
    model, optimizer, _, accelerator = loop(Tied())
    step(model, optimizer)
    accelerator.save_state(tmp_path / "saved")
    assert llmtailor.attest(tmp_path / "saved", model=model, optimizer=optimizer).is_same
    untie(model)
    found = llmtailor.attest(tmp_path / "saved", model=model, optimizer=optimizer)
    assert not found.is_same and "not tied as they were" in found.cause.what, found


def test_a_trainers_head_that_is_untied_after_loading(tmp_path):
    checkpoint = begin(tmp_path / "run", tied=True)
    found = found_by(checkpoint, max_steps=2, layers=2, tied=True)
    assert found.is_same, found
    found = found_by(checkpoint, lambda trainer: untie(trainer.model), max_steps=2, layers=2, tied=True)
    assert not found.is_same and "not tied as they were" in found.cause.what, found


def test_a_refusal_by_name_is_not_dropped(tmp_path):
    """A scheduler of another save: the states alone would be the same."""
    run = train(tmp_path / "run")
    checkpoint, model = run.checkpoint(4), run.trainer.model
    shutil.copy(run.checkpoint(2) / "scheduler.pt", checkpoint)
    with pytest.raises(SourceError, match=r"scheduler\.pt"):
        llmtailor.attest(checkpoint, model=model, optimizer=run.trainer.optimizer)


def test_the_search_for_other_values_ends(tmp_path, monkeypatch):
    count = 150
    model, optimizer, _, accelerator = loop(torch.nn.ParameterList(torch.ones(40) * at for at in range(count)))
    step(model, optimizer)
    accelerator.save_state(tmp_path / "saved")
    with torch.no_grad():
        for param in model.parameters():
            param.uniform_()
            for value in optimizer.optimizer.state[param].values():
                value.uniform_()
    reads, read_into = [], OpenFiles.read_into

    def counting(*args):
        reads.append(args)
        read_into(*args)

    monkeypatch.setattr(OpenFiles, "read_into", counting)
    found = llmtailor.attest(tmp_path / "saved", model=model, optimizer=optimizer)
    assert {(row.kind.value, len(row.params)) for row in found.rows} == {("other values", count)}
    assert len(reads) < 10 * len(found.rows) * count  # all pairs of alike states: 150 times as many
    assert "where the other values come from was looked up for some states only" in found.notes
