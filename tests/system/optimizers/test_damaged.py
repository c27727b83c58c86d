"""What is missing from the states of an optimizer other than Adam is found, in optimizer.pt and in DCP folders."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from helpers.commands import call
from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.containers.json import FileTrees
from llmtailor.errors import PathIn, SourceError
from llmtailor.formats.registry import index_checkpoint
from llmtailor.formats.torch_optimizer import read_optimizer
from llmtailor.model.roles import State
from trainings.alone import finished

pytestmark = pytest.mark.real

LOST, LOST_ID = "up.weight", 1  # scale is first


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(1.0))


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": optim.AdamW,
    "Adagrad": optim.Adagrad,
    "NAdam": optim.NAdam,
    "RMSprop": lambda params: optim.RMSprop(params, momentum=0.9),
    "SGD": lambda params: optim.SGD(params, momentum=0.9),
}


@cache
def trained(name: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return a model's states, and those of its optimizer by name and by id."""
    torch.manual_seed(0)
    model = Model()
    optimizer = OPTIMIZERS[name](model.parameters())
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    return (*get_state_dict(model, optimizer), optimizer.state_dict())


def write_dcp(root: Any, name: str, change: Callable[[dict[Any, Any], Any], object]) -> CheckpointIndex:
    weights, states, _ = trained(name)
    states = copy.deepcopy(states)
    change(states["state"], LOST)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=root, no_dist=True)
    return index_checkpoint(root, "x")


def lose(*kinds: str) -> Callable[[dict[Any, Any], Any], object]:
    return lambda state, param: [state[param].pop(kind) for kind in kinds] if kinds else state.pop(param)


def put(kind: str, value: Any) -> Callable[[dict[Any, Any], Any], object]:
    return lambda state, param: state[param].update({kind: value})


DAMAGES = {
    "a scalar": ("NAdam", lose("mu_product"), "mu_product"),
    "a step": ("RMSprop", lose("step"), "step of"),
    "another shape": ("RMSprop", put("square_avg", torch.zeros(3, 5)), "shape"),
    "a number for all of a moment": ("AdamW", put("exp_avg", torch.tensor(0.5)), "exp_avg of"),
}


@pytest.mark.parametrize("case", [*DAMAGES, "a param's states"])
def test_damage_is_found_in_a_dcp_folder(case, tmp_path):
    name, change, told = DAMAGES.get(case, ("Adagrad", lose(), "no states of up.weight"))
    assert write_dcp(tmp_path / "whole", name, lambda *_: None).params
    with pytest.raises(SourceError, match=told):
        write_dcp(tmp_path / "damaged", name, change)


@pytest.mark.parametrize("case", DAMAGES)
def test_damage_is_found_in_optimizer_pt(case, tmp_path):
    name, change, told = DAMAGES[case]
    states = copy.deepcopy(trained(name)[2])

    def read() -> Any:
        torch.save(states, tmp_path / "optimizer.pt")
        return read_optimizer(FileTrees(tmp_path), PathIn("x", "optimizer.pt"))

    assert read().kinds
    change(states["state"], LOST_ID)
    with pytest.raises(SourceError, match="no step of its own" if case == "a step" else told):
        read()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_param_without_dimensions_has_its_states(name, tmp_path):
    index = write_dcp(tmp_path / "checkpoint-1", name, lambda *_: None)
    kinds = trained(name)[1]["state"]["scale"].keys() - {"step"}
    assert {state.kind for state in index.held if state.param == "scale"} >= kinds
    assert State("scale", "master") in index.held


@pytest.mark.parametrize("value", [[0.9], {"a": 1}])
def test_an_option_of_any_type_decides_which_states_a_param_has(value, tmp_path):
    """It is a key of no dict: that would be a bug in llmtailor, exit code 1."""
    root = shutil.copytree(finished().checkpoint(4), tmp_path / "checkpoint-4")
    tree = torch.load(root / "optimizer.pt")
    for group in tree["param_groups"]:
        group["momentum"] = value
    torch.save(tree, root / "optimizer.pt")
    call("verify", root)
