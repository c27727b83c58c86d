"""Saves through `DcpSaver` drawn from a seed: policies, ties, copies of weights and nesting of keys, on several ranks.

``start_ranks("saving.random_dcp", [FOLDER], RANKS, FOLDER)`` saves what FOLDER/order.json says, and records all that
``dcp.save`` was given; or it loads the folders with a stock ``dcp.load``, on any number of ranks.
"""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from llmtailor.saving import DcpSaver
from saving.dcp_loop import flat, load_whole, same

POLICIES = ("full", "parity", "round_robin:3", "moments_in_turn:2", "filter:first=1,last=1,every=2,aux_every=2")
STEPS = 4


class Net(nn.Module):
    def __init__(self, tie: str) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.lm_head = nn.Linear(6, 11, bias=False)
        self.frozen = nn.Linear(6, 3).requires_grad_(False)
        self.register_buffer("count", torch.zeros(2))
        if tie == "ordinary":
            self.lm_head.weight = self.embed_tokens.weight
        elif tie == "memory":
            self.lm_head.weight = nn.Parameter(self.embed_tokens.weight.data)
        elif tie == "layers":
            self.layers[2].weight = self.layers[0].weight


def drawn(seed: int, ranks: int) -> dict[str, Any]:
    chance = random.Random(f"{seed} {ranks}")
    is_sharded = ranks > 1 and chance.random() < 0.7
    return {
        "policy": chance.choice(POLICIES),
        "tie": chance.choice(["none", "ordinary", "ordinary", "layers", *(() if is_sharded else ("memory",))]),
        "copies": chance.choice(["none", "first", "last", "inside"]),
        "nesting": chance.choice(["two", "app", "flat", "deep", "flat states"]),
        "is_told": chance.random() < 0.5,
        "is_sharded": is_sharded,
        "resume": chance.choice([None, None, 2, 3]),
        "optimizer": chance.choice(["AdamW", "AdamW", "SGD", "amsgrad"]),
        "shuffled": chance.random() < 0.5,
    }


def new(case: dict[str, Any]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Net(case["tie"])
    if case["is_sharded"]:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for number, layer in enumerate(model.layers):
            if case["tie"] != "layers" or number not in (0, 2):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    trained = [param for param in model.parameters() if param.requires_grad]
    if case["optimizer"] == "SGD":
        return model, torch.optim.SGD(trained, lr=1e-2, momentum=0.9)
    return model, torch.optim.AdamW(trained, lr=1e-2, amsgrad=case["optimizer"] == "amsgrad")


def state_of(case: dict[str, Any], model: Any, optimizer: Any, ema: dict[str, Any], step: int) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=case["nesting"] == "flat states")
    weights, states = get_state_dict(model, optimizer, options=options)
    mine: dict[str, Any] = {"model": weights, "optim": states}
    if case["copies"] == "first":
        mine = {"ema": ema, **mine}
    elif case["copies"] == "last":
        mine |= {"ema": ema}
    elif case["copies"] == "inside":
        mine["model"] = {**{f"ema.{name}": one for name, one in ema.items()}, **weights}
    if case["shuffled"]:
        mine = dict(reversed(mine.items()))
    if case["nesting"] == "app":
        mine = {"app": mine}
    elif case["nesting"] == "deep":
        mine = {"state": {"training": mine}}
    elif case["nesting"] == "flat":
        mine = {**mine.pop("model"), **mine}
    return {**mine, "train": {"step": step}}


def train(case: dict[str, Any], folder: Path) -> None:
    model, optimizer = new(case)
    saver, ema = DcpSaver(case["policy"]), {}
    for step in range(1, STEPS + 1):
        torch.manual_seed(step)
        for param in model.parameters():
            if param.requires_grad:
                param.grad = torch.randn_like(param) if dist.get_world_size() == 1 else torch.ones_like(param) * step
        optimizer.step()
        with torch.no_grad():
            model.count += 1
            for name, one in model.state_dict().items():
                ema[name] = one.clone() if name not in ema else 0.9 * ema[name] + 0.1 * one
        state = state_of(case, model, optimizer, copy.copy(ema), step)
        truth = flat(state)
        if dist.get_rank() == 0:
            torch.save(truth, folder / f"truth-{step}.pt")
        if case["resume"] == step:
            saver = DcpSaver(case["policy"])
            saver.resumed_from(folder / f"step-{step - 1}")
        more = {"state_dict": state} if case["is_told"] else {}
        inner = FileSystemWriter(folder / f"step-{step}")
        dcp.save(state, storage_writer=saver.writer(inner, step, **more))


def load(case: dict[str, Any], folder: Path) -> None:
    """Load the newest folder, and compare with what one process reads."""
    model, optimizer = new({**case, "is_sharded": dist.get_world_size() > 1})
    ema = {name: torch.zeros_like(one) for name, one in model.state_dict().items()}
    state = state_of(case, model, optimizer, ema, 0)
    for _, one in sorted(flat_live(state).items()):
        if isinstance(one, torch.Tensor) and one.is_floating_point():
            one.detach().zero_()
    dcp.load(state, checkpoint_id=folder / f"step-{STEPS}")
    wanted = load_whole(dcp.FileSystemReader(folder / f"step-{STEPS}"))
    found = flat(state)
    wrong = [key for key in found if not same(found[key], wanted[key])]
    assert not wrong, (case, wrong)


def flat_live(state: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(state, dict):
        return {prefix: state}
    return {key: one for name, value in state.items() for key, one in flat_live(value, f"{prefix}{name}.").items()}


def faults(case: dict[str, Any], folder: Path, step: int) -> list[str]:
    """Return what is wrong with the folder of a step, by what was recorded."""
    truth = {at: torch.load(folder / f"truth-{at}.pt", weights_only=False) for at in range(1, step + 1)}
    found = load_whole(dcp.FileSystemReader(folder / f"step-{step}"))
    wrong = [f"{key} is missing" for key in truth[step].keys() - found.keys()]
    names = ("embed_tokens.weight", "lm_head.weight",
             *(f"layers.{number}.{kind}" for number in range(4) for kind in ("weight", "bias")))  # fmt: skip
    same_as = {"ordinary": names[:2], "memory": names[:2], "layers": ("layers.0.weight", "layers.2.weight")}
    steps: dict[str, dict[str, set[int]]] = {}
    for key, value in found.items():
        ages = {at for at in truth if same(value, truth[at].get(key))}
        if not ages:
            wrong.append(f"{key} is of no step")
        name = next((one for one in names if f".{one}." in f".{key}."), None)
        is_group = "param_groups" in key
        if name is None or is_group:
            wrong += [] if step in ages else [f"{key} is of {ages}, not of step {step}"]
            continue
        is_state = ".state." in f".{key}" and not key.endswith(name)
        # two params over one memory have moments of their own, but one param is listed under one of its names
        owners = same_as.get(case["tie"], ()) if name in same_as.get(case["tie"], ()) else (name,)
        for owner in owners if not is_state or case["tie"] != "memory" else (name,):
            kinds = steps.setdefault(owner, {})
            kind = "moments" if is_state else "weights"
            kinds[kind] = kinds.get(kind, set(truth)) & ages
    for name, kinds in steps.items():
        in_turn = case["policy"].startswith("moments_in_turn")
        if not kinds["weights"] or not kinds.get("moments", {0}):
            wrong.append(f"{name} has tensors of several steps: {kinds}")
        elif in_turn and step not in kinds["weights"]:
            wrong.append(f"{name} has weights of {kinds['weights']}")
        elif not in_turn and not kinds["weights"] & kinds.get("moments", kinds["weights"]):
            wrong.append(f"{name} has weights of {kinds['weights']} and moments of {kinds['moments']}")
    return wrong


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    order = json.loads((folder / "order.json").read_text())
    for seed in order["seeds"]:
        case, own = drawn(seed, order["ranks"]), folder / f"{order['ranks']}-{seed}"
        own.mkdir(exist_ok=True)
        load(case, own) if order["loads"] else train(case, own)
        dist.barrier()
