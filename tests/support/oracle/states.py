"""What an optimizer keeps of each param, of any optimizer and format: read by torch, joined and cut by hand.

Of DeepSpeed's files (ZeRO-1/2: one vector per group in equal partitions; ZeRO-3: each param in equal slices), of DCP
folders by torch's own loader, and of the Trainer's ``optimizer.pt``. Under ZeRO-1/2, DeepSpeed's Muon keeps the
momentum of all params that overlap a rank's partition, each whole, so some are on two ranks, which must agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from oracle import zero3, zero12
from oracle.zero3 import load_ranks

MASTER, QUANT = "master", "__bnb_optimizer_quant_state__"
States = dict[str, dict[str, Any]]
"""Param -> kind -> a whole tensor, or a single value; ``master`` among them"""


def states_of(checkpoint: Path) -> States:
    """Read the trained params' states of a checkpoint of the Trainer, DeepSpeed, accelerate or DCP."""
    if (checkpoint / ".metadata").exists():
        tree = _load_dcp(checkpoint)
        return _named(tree["optim"], tree["model"])
    if (checkpoint / "optimizer_0").is_dir():
        optimizer = _load_dcp(checkpoint / "optimizer_0")["optimizer"]
        return _named(optimizer, _load_dcp(checkpoint / "pytorch_model_fsdp_0")["model"])
    if (checkpoint / "optimizer.pt").exists():
        tree = torch.load(checkpoint / "optimizer.pt", weights_only=False)
        weights = {key: one for path in checkpoint.glob("*.safetensors") for key, one in load_file(path).items()}
        listed = [name for group in tree["param_groups"] for name in group.get("param_names") or group["lt_params"]]
        return {
            name: {MASTER: weights[name], **_flattened(tree["state"].get(number, {}))}
            for number, name in enumerate(listed)
        }
    return _of_zero(checkpoint / (checkpoint / "latest").read_text())


def assert_same(found: States, wanted: States, *, is_cast: bool = False) -> None:
    """Compare bit for bit; with ``is_cast`` dtypes may differ, but not the values."""
    assert found.keys() == wanted.keys()
    wrong = []
    for param, kinds in wanted.items():
        assert found[param].keys() == kinds.keys(), (param, found[param].keys(), kinds.keys())
        for kind, value in kinds.items():
            other = found[param][kind]
            if kind == "step" or not isinstance(value, torch.Tensor):
                is_same = (other is None) == (value is None) and (value is None or float(other) == float(value))
            else:
                is_same = (is_cast or other.dtype == value.dtype) and torch.equal(other.double(), value.double())
            wrong += [] if is_same else [f"{kind} of {param}"]
    assert not wrong, wrong


def compose(even: States, odd: States, is_odd: Any) -> States:
    """Take whole params from one of two."""
    return {param: (odd if is_odd(param) else even)[param] for param in even}


def _flattened(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: one for key, one in {**state, **state.get(QUANT, {})}.items() if key != QUANT}


def _load_dcp(folder: Path) -> dict[str, Any]:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    tree: dict[str, Any] = {}
    _load_state_dict(tree, storage_reader=FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return tree


def _named(optimizer: Mapping[str, Any], weights: Mapping[str, Any]) -> States:
    trained = [name for group in optimizer["param_groups"] for name in group["params"]]
    return {name: {MASTER: weights[name], **_flattened(optimizer["state"].get(name, {}))} for name in trained}


def _of_zero(tag: Path) -> States:
    model = torch.load(next(tag.glob("*rank_00_model_states.pt")), weights_only=False)
    outer = [one["optimizer_state_dict"] for one in load_ranks(tag, "optim_states")]
    is_zero3 = "fp32_flat_groups" in outer[0]
    masters = [one["fp32_flat_groups" if is_zero3 else "single_partition_of_fp32_groups"] for one in outer]
    inner = [one["optimizer_state_dict" if is_zero3 else "base_optimizer_state"]["state"] for one in outer]
    found: States = {}
    for number, shapes in enumerate(model["param_shapes"]):
        for param in shapes:
            found[param] = {}
        kinds = [_flattened(each[number]) for each in inner]
        assert all(one.keys() == kinds[0].keys() for one in kinds)
        for kind in (MASTER, *kinds[0]):
            values = [each[number] for each in masters] if kind == MASTER else [each[kind] for each in kinds]
            if kind == "step" or not (isinstance(values[0], torch.Tensor) and values[0].dim()):
                for param in shapes:
                    found[param][kind] = values[0]
                continue
            ranks = [one.detach() for one in values]
            joined = (
                zero3.cut(ranks, shapes, len(ranks), zero_padding=False) if is_zero3 else _partitions(ranks, shapes)
            )
            for param, tensor in joined:
                found[param][kind] = tensor
    return found


def _partitions(ranks: Sequence[torch.Tensor], shapes: dict[str, torch.Size]) -> list[tuple[str, torch.Tensor]]:
    total = sum(math.prod(shape) for shape in shapes.values())
    part = math.ceil(total / (2 * len(ranks))) * 2
    if all(len(one) == part for one in ranks) or sum(map(len, ranks)) == total:
        return zero12.cut(torch.cat([*ranks])[:total], shapes, [0] * len(shapes))
    return [*_whole(ranks, shapes, part).items()]


def _whole(ranks: Sequence[torch.Tensor], shapes: Mapping[str, torch.Size], part: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for rank, tensor in enumerate(ranks):
        begin = at = 0
        for param, shape in shapes.items():
            end = begin + math.prod(shape)
            if begin < (rank + 1) * part and end > rank * part:
                own = tensor[at : at + end - begin].reshape(shape)
                assert torch.equal(found.setdefault(param, own), own), f"the ranks disagree about {param}"
                at += end - begin
            begin = end
        assert at == len(tensor), f"rank {rank} has {len(tensor)} elements, not {at}"
    return found
