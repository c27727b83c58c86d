"""DCP folders of a loop's own making: under which keys model and optimizer are, and what the optimizer lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from helpers.commands import call
from helpers.composing import convert, merge
from helpers.states import assert_same_held
from llmtailor.codes import Code
from llmtailor.errors import SourceError
from llmtailor.findings import ERROR
from llmtailor.formats.registry import index_checkpoint
from llmtailor.verify.verify import RESUMABLE, verify_checkpoint

Wrap = Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]


class Model(torch.nn.Module):
    def __init__(self, *, has_unused: bool = False) -> None:
        super().__init__()
        self.model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))})
        if has_unused:
            self.model["layers"][1].unused = torch.nn.Linear(8, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.model["layers"]:
            rows = layer(rows)
        return rows


class Loop:
    def __init__(self, wrap: Wrap, *, has_unused: bool = False) -> None:
        self.wrap = wrap
        self.model = Model(has_unused=has_unused)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def step(self) -> None:
        self.model(torch.randn(4, 8)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        dcp.save(self.wrap(*get_state_dict(self.model, self.optimizer)), checkpoint_id=folder, no_dist=True)

    def load(self, folder: Path) -> Loop:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.load(self.wrap(model, optimizer), checkpoint_id=folder, no_dist=True)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        return self

    def held(self) -> dict[str, Any]:
        weights = {name: param.detach().clone() for name, param in self.model.named_parameters()}
        states = {name: self.optimizer.state[param] for name, param in self.model.named_parameters()}
        copies = {name: {kind: value.clone() for kind, value in kinds.items()} for name, kinds in states.items()}
        return {"weights": weights, "states": {name: kinds for name, kinds in copies.items() if kinds}}


def train(wrap: Wrap, run: Path, *, has_unused: bool = False) -> Mapping[int, dict[str, Any]]:
    """Save checkpoints of steps 2 and 4, and return what was held then."""
    torch.manual_seed(0)
    loop, held = Loop(wrap, has_unused=has_unused), dict[int, dict[str, Any]]()
    for step in range(1, 5):
        loop.step()
        if step % 2 == 0:
            loop.save(run / f"checkpoint-{step}")
            held[step] = loop.held()
    return held


def mix(even: Mapping[str, Any], odd: Mapping[str, Any]) -> dict[str, Any]:
    return {
        kind: {name: (odd if ".1." in name else even)[kind][name] for name in even[kind]}
        for kind in ("weights", "states")
    }


def in_app(model: dict[str, Any], optim: dict[str, Any]) -> dict[str, Any]:
    return {"app": {"model": model, "optim": optim}}


def in_state(model: dict[str, Any], optim: dict[str, Any]) -> dict[str, Any]:
    return {"trainer": {"state": {"net": model, "optimizers": optim}}}


def in_list(model: dict[str, Any], optim: dict[str, Any]) -> dict[str, Any]:
    return {"trainer": [{"optimizer": optim, **model}]}


def beside_others(model: dict[str, Any], optim: dict[str, Any]) -> dict[str, Any]:
    average = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
    scheduler = {"last_epoch": 4, "base_lrs": [0.1]}
    data = {"state": {"seen": torch.ones(3), "files": ["a"]}}
    return {"data": data, "app": {"average": average, "model": model, "optim": optim, "lr_scheduler": scheduler}}


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(in_app, id="PyTorch's recipe"),
        pytest.param(in_state, id="deeper", marks=pytest.mark.long),
        pytest.param(in_list, id="below a list", marks=pytest.mark.long),
        pytest.param(beside_others, id="beside others"),
    ],
)
def test_model_and_optimizer_below_further_keys(tmp_path, wrap):
    """Outputs have the keys of their base, so the same loop loads them."""
    run = tmp_path / "run"
    held = train(wrap, run)
    assert verify_checkpoint(run / "checkpoint-4", deep=True).level == RESUMABLE
    mixed = mix(held[4], held[2])
    for name, options in (("copied", {}), ("linked", {"reference": True}), ("more ranks", {"world_size": 3})):
        merge(run / "checkpoint-4", tmp_path / name, {"odd": run / "checkpoint-2"}, **options)
        assert_same_held(Loop(wrap).load(tmp_path / name).held(), mixed)
    call("thin", str(run), "--strategy", "parity", "--yes")
    call("merge", "--run", str(run), str(tmp_path / "composed"))
    assert index_checkpoint(tmp_path / "composed").dcp.root == index_checkpoint(tmp_path / "copied").dcp.root
    Loop(wrap).load(tmp_path / "composed")
    convert(tmp_path / "copied", tmp_path / "fsdp", to="fsdp")
    there = convert(tmp_path / "fsdp", tmp_path / "dcp", to="dcp")
    plain = Loop(lambda model, optim: {"model": model, "optim": optim}).load(there)
    assert_same_held(plain.held(), mixed)


@pytest.mark.parametrize(
    ("wrap", "told"),
    [
        (lambda model, optim: {"app": {"model": model}}, "no optimizer states.* its keys begin with app.model"),
        (lambda model, optim: {"app": {"optim": optim}}, "no weights under .* no other keys"),
        (lambda model, optim: {"app": {"optim": optim}, "net": {"w": torch.ones(3)}}, "no weights under .* with net.w"),
        (
            lambda model, optim: {"gen": {"model": model, "optim": optim}, "disc": {"optim": optim}},
            "several optimizers: disc.optim, gen.optim",
        ),
    ],
)
def test_keys_without_a_training_are_named(tmp_path, wrap, told):
    train(wrap, tmp_path)
    with pytest.raises(SourceError, match=told):
        index_checkpoint(tmp_path / "checkpoint-4")


@pytest.mark.parametrize("to", [None, "fsdp", "trainer"])
def test_a_param_that_never_had_a_gradient(tmp_path, to):
    """torch's loader asks for the states of every param, so the stock folder does not load: outputs have zeros."""

    def usual(model: dict[str, Any], optim: dict[str, Any]) -> dict[str, Any]:
        return {"model": model, "optim": optim}

    held = train(usual, tmp_path, has_unused=True)
    newer, older, out = (tmp_path / name for name in ("checkpoint-4", "checkpoint-2", "out"))
    verdict = verify_checkpoint(newer, deep=True)
    assert [(one.severity, one.code) for one in verdict.findings] == [(ERROR, Code.STATE_MISSING)]
    with pytest.raises(dcp.api.CheckpointException, match="Missing key"):
        Loop(usual, has_unused=True).load(newer)
    merge(newer, out, {"odd": older}, to=to)
    if to is not None:
        assert verify_checkpoint(out, deep=True).is_resumable
        out = convert(out, tmp_path / "back", to="dcp")
    mixed = mix(held[4], held[2])
    for name in ("weight", "bias"):
        param = f"model.layers.1.unused.{name}"
        zeros = torch.zeros_like(mixed["weights"][param])
        mixed["states"][param] = {"step": torch.tensor(0.0), "exp_avg": zeros, "exp_avg_sq": zeros}
    assert verify_checkpoint(out, deep=True).level == RESUMABLE
    assert_same_held(Loop(usual, has_unused=True).load(out).held(), mixed)
