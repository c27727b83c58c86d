"""What a saver must see of a training: copies of weights, shared memory, and what comes or changes in mid-run."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict

from helpers.commands import call
from llmtailor.errors import UnsupportedCheckpoint
from llmtailor.saving import DcpSaver, SaveFailed, saver_for
from saving.dcp_loop import flat, load_whole, same
from saving.random_trainings import Case, Own

Seen = dict[int, dict[str, torch.Tensor]]


def layers(number: int = 3, **more: Any) -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4) for _ in range(number)]), **more})


def train(
    run: Path,
    model: Any,
    optimizer: Any,
    steps: int,
    policy: str = "full",
    *,
    first: int = 1,
    resumed: Path | None = None,
    at: Callable[[int], None] = lambda step: None,
    after: Callable[[int], None] = lambda step: None,
    late: str = "none",
    failed: list[int] | None = None,
    **options: Any,
) -> Seen:
    """Save at each step, whose gradients are random numbers; return the weights of each.

    Saves may fail only if there is a list for their steps.
    """
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    saver = saver_for(run, model=model, optimizer=optimizer, scheduler=scheduler, policy=policy, **options)
    saver.start(first - 1, resumed_from=resumed)
    seen = {}
    for step in range(first, first + steps):
        at(step)
        torch.manual_seed(step)
        for name, param in model.named_parameters():
            has_grad = param.requires_grad and not name.startswith(late)
            param.grad = torch.randn_like(param) if has_grad else None
        optimizer.step()
        scheduler.step()
        after(step)
        seen[step] = {name: one.clone() for name, one in model.state_dict().items()}
        try:
            saver.save(step).wait(60)
        except SaveFailed:
            if failed is None:
                raise
            failed.append(step)
    saver.close()
    return seen


def weights_of(run: Path, step: int) -> dict[str, torch.Tensor]:
    call("merge", "--run", run, "--at", step)
    return load_file(run / f"checkpoint-{step}" / "model.safetensors")


def adam(model: Any, **options: Any) -> Any:
    return torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2, **options)


@pytest.mark.parametrize("name", ["master_param", "fp32_param", "exp_avg"])
def test_copies_of_weights_are_of_their_step(tmp_path, name):
    """Whatever their name: a resumed optimizer writes them over the weights."""
    model = layers(4).bfloat16()
    kinds = ("square_avg", "exp_avg_sq") if name == "exp_avg" else ("exp_avg", "exp_avg_sq")
    optimizer = Own(model.parameters(), Case("plain", 0, kinds=kinds, copied=name))
    train(tmp_path, model, optimizer, 4, "moments_in_turn:2")
    weights = weights_of(tmp_path, 4)
    states = torch.load(tmp_path / "checkpoint-4" / "optimizer.pt")["state"]
    for number, param in enumerate(weights[one] for one, _ in model.named_parameters()):
        assert torch.equal(states[number][name].bfloat16(), param)


def test_what_comes_in_mid_run_is_saved(tmp_path, caplog):
    """An average begun late, a new buffer, and a buffer that has more elements."""
    model = layers()
    model.register_buffer("queue", torch.arange(3.0))

    def at(step: int) -> None:
        if step == 3:
            model["ema"] = copy.deepcopy(model["layers"]).requires_grad_(False)
            model.register_buffer("count", torch.ones(2))
            model.queue = torch.arange(5.0) + 10

    seen = train(tmp_path, model, adam(model), 4, "parity", at=at)
    assert "new: " in caplog.text and "ema.0.weight" in caplog.text
    weights = weights_of(tmp_path, 4)
    assert weights.keys() == seen[4].keys()
    assert torch.equal(weights["queue"], seen[4]["queue"])


def test_a_head_that_is_untied_in_mid_run_has_its_own_values(tmp_path):
    model = layers(embed_tokens=nn.Embedding(11, 4), lm_head=nn.Linear(4, 11, bias=False))
    model["lm_head"].weight = model["embed_tokens"].weight
    optimizer = adam(model)

    def at(step: int) -> None:
        if step == 2:
            model["lm_head"].weight = nn.Parameter(model["embed_tokens"].weight.detach() + 1)
            optimizer.param_groups[0]["params"].append(model["lm_head"].weight)

    seen = train(tmp_path, model, optimizer, 3, "full", at=at)
    weights = weights_of(tmp_path, 3)
    assert all(torch.equal(weights[name], one) for name, one in seen[3].items())


@pytest.mark.parametrize("policy", ["round_robin:3", "parity"])
def test_weights_over_one_memory_are_of_one_step(tmp_path, policy):
    model = layers(embed_tokens=nn.Embedding(11, 4), lm_head=nn.Linear(4, 11, bias=False))
    model["lm_head"].weight = nn.Parameter(model["embed_tokens"].weight.data)
    train(tmp_path, model, adam(model), 5, policy)
    for step in (3, 4, 5):
        weights = weights_of(tmp_path, step)
        assert torch.equal(weights["embed_tokens.weight"], weights["lm_head.weight"])


@pytest.mark.parametrize("through", ["no_grad", ".data"])
def test_a_row_of_a_frozen_table_that_changes_is_saved(tmp_path, through):
    """Of more rows than a sample reads; torch does not count what is written through ``.data``."""
    model = layers(2)
    model.register_parameter("table", nn.Parameter(torch.zeros(1 << 19, 4), requires_grad=False))

    def after(step: int) -> None:
        with torch.no_grad():
            (model.table.data if through == ".data" else model.table)[3] = step

    failed: list[int] = []
    train(tmp_path, model, adam(model), 4, after=after, failed=failed)
    assert failed == ([2] if through == ".data" else [])  # said, and made good by the next save
    for step in (3, 4):
        assert {*weights_of(tmp_path, step)["table"][3].tolist()} == {float(step)}


def test_an_expert_outside_the_layers_may_be_tied_to_one(tmp_path, caplog):
    model = layers(4, experts=nn.ModuleList([nn.Linear(4, 4) for _ in range(2)]))
    model["experts"][0].bias = model["layers"][0].bias
    train(tmp_path, model, adam(model), 4, "parity")
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]
    weights_of(tmp_path, 4)


def test_amsgrad_in_one_group_and_a_param_without_gradients(tmp_path, caplog):
    model = layers()
    params = [*model.parameters()]
    optimizer = torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:], "amsgrad": True}], lr=1e-2)
    train(tmp_path, model, optimizer, 2, late="layers.2")
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]
    weights_of(tmp_path, 2)
    again = layers()
    params = [*again.parameters()]
    other = torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:], "amsgrad": True}], lr=1e-2)
    other.load_state_dict(torch.load(tmp_path / "checkpoint-2" / "optimizer.pt"))
    for param in params:
        param.grad = torch.ones_like(param)
    other.step()


def test_a_param_that_leaves_its_group_after_a_resume(tmp_path, caplog):
    model = layers()
    train(tmp_path, model, adam(model), 2)
    weights = weights_of(tmp_path, 2)
    model, resumed = layers(), tmp_path / "checkpoint-2"
    optimizer = adam(model)
    model.load_state_dict(weights)
    optimizer.load_state_dict(torch.load(resumed / "optimizer.pt"))

    def at(step: int) -> None:
        if step == 4:
            param = optimizer.param_groups[0]["params"].pop(0)
            optimizer.state.pop(param)
            param.requires_grad_(False)

    seen = train(tmp_path, model, optimizer, 3, at=at, first=3, resumed=resumed, attest="off")
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]
    for step in (3, 5):
        weights = weights_of(tmp_path, step)
        assert all(torch.equal(weights[name], one) for name, one in seen[step].items())


def test_an_optimizer_with_the_moments_of_adam_may_count_elsewhere(tmp_path, caplog):
    model = layers()
    train(tmp_path, model, Own(model.parameters(), Case("plain", 0)), 2, "parity")
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]
    weights_of(tmp_path, 2)


def test_names_with_control_characters_are_refused(tmp_path):
    model = nn.ModuleDict({"a\tb": nn.Linear(2, 2)})
    with pytest.raises(UnsupportedCheckpoint, match="not printable"):
        train(tmp_path, model, adam(model), 1)


@pytest.mark.parametrize("kind", ["master", "frozen", "a/b"])
def test_states_with_reserved_names_are_refused(tmp_path, kind):
    model = layers()
    with pytest.raises(UnsupportedCheckpoint, match="name"):
        train(tmp_path, model, Own(model.parameters(), Case("plain", 0, kinds=(kind, "other"))), 1)


def test_numbered_params_make_each_save_whole_with_a_warning(tmp_path, caplog):
    model = layers()
    optimizer, saver = adam(model), DcpSaver("parity")
    for step in (1, 2):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.save(state, storage_writer=saver.writer(FileSystemWriter(tmp_path / f"step-{step}"), step))
    assert caplog.text.count("each save holds everything") == 1
    found = load_whole(FileSystemReader(tmp_path / "step-2"))
    assert all(same(found[key], one) for key, one in flat(state).items() if isinstance(one, torch.Tensor))


@pytest.mark.parametrize("is_told", [False, True])
@pytest.mark.parametrize("order", ["first", "last"])
def test_an_average_is_of_the_step_of_its_weights(tmp_path, order, is_told):
    """Wherever it is in the tree; a tied weight has one under each name."""
    model = layers(4, embed_tokens=nn.Embedding(11, 4), lm_head=nn.Linear(4, 11, bias=False))
    model["lm_head"].weight = model["embed_tokens"].weight
    optimizer, saver, truth, ema = adam(model), DcpSaver("round_robin:3"), {}, {}
    for step in range(1, 5):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        weights, states = get_state_dict(model, optimizer)
        ema = {name: 0.9 * ema.get(name, one.detach()) + 0.1 * one.detach() for name, one in weights.items()}
        state = {"model": weights, "optimizer": states}
        state = {"ema": ema, **state} if order == "first" else {**state, "ema": ema}
        truth[step] = flat(state)
        writer = saver.writer(FileSystemWriter(tmp_path / f"step-{step}"), step, state if is_told else None)
        dcp.save(state, storage_writer=writer)
    found = load_whole(FileSystemReader(tmp_path / "step-4"))
    ages = {key: {step for step in truth if same(found[key], truth[step][key])} for key in found}
    for name in (one for one, _ in model.named_parameters()):
        names = (name, "lm_head.weight") if name == "embed_tokens.weight" else (name,)
        assert set.intersection(*(own for key, own in ages.items() if any(f".{one}" in f".{key}" for one in names)))


def test_a_schedule_with_milestones_is_saved(tmp_path):
    """torch keeps them in a Counter, and its own reader of weights allows that."""
    model = layers()
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 1, 3])
    saver = saver_for(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler, policy="full")
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    scheduler.step()
    saver.save(1).wait(60)
    saver.close()
    call("merge", "--run", tmp_path)
    call("verify", tmp_path / "checkpoint-1")
    assert torch.load(tmp_path / "checkpoint-1" / "scheduler.pt", weights_only=True) == scheduler.state_dict()
