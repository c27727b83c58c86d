"""Read a ZeRO-1 or ZeRO-2 checkpoint the slow way: load every file with torch, join, cut by hand, believe nothing.

::

    a group, W ranks      param gap param gap ... param | zeros        T elements, padded to a multiple of 2 W
    rank r                the r-th of W equal partitions, P = ceil(T / 2 W) * 2 elements

Names and order come from ``param_shapes``, never from ``param_slice_mappings``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from llmtailor.model.roles import BUFFER, FROZEN, MASTER, WEIGHT, State
from oracle.zero3 import MOMENTS, Snapshot, load_ranks, read_weights

MODEL = "mp_rank_00_model_states.pt"


def load(checkpoint: Path) -> Snapshot:
    """Read a Trainer's checkpoint folder, or a bare one of DeepSpeed's. Moments are there unless every step overflowed.

    ``module`` is read by `load_module`: its params are rounded masters, and a test must be able to doubt it.
    """
    tag = checkpoint / (checkpoint / "latest").read_text()
    model = torch.load(tag / MODEL, map_location="cpu", weights_only=False)
    optims = load_ranks(tag, "optim_states")
    assert [path.name for path in tag.glob("*model_states.pt")] == [MODEL], "more model_states than one"
    world = model["dp_world_size"]
    assert len(optims) == world, f"{tag}: {len(optims)} optim_states of {world} ranks"
    outer = [optim["optimizer_state_dict"] for optim in optims]
    inner = [each["base_optimizer_state"] for each in outer]
    elastic, bf16_optimizer = isinstance(inner[0], list), "zero_stage" not in outer[0]
    per_group = [dict(enumerate(each)) if elastic else each["state"] for each in inner]

    states: dict[State, torch.Tensor] = {}
    steps: dict[str, float] = {}
    shapes: list[dict[str, torch.Size]] = model["param_shapes"]
    assert all(list(each) in ([], list(range(len(shapes)))) for each in per_group), "states of some groups only"
    assert all(len(each["single_partition_of_fp32_groups"]) == len(shapes) for each in outer), "masters of some groups"
    for group, params in enumerate(shapes):
        gaps = outer[0].get("param_alignment_paddings", [[0] * len(params)] * len(shapes))[group]
        total = sum(math.prod(shape) for shape in params.values()) + sum(gaps)
        part = math.ceil(total / (2 * world)) * 2
        paddings = [min(part, max(0, (rank + 1) * part - total)) for rank in range(world)]
        assert [each["group_paddings"][group] for each in outer] == paddings, f"group_paddings, not {paddings}"
        assert {each["partition_count"][group] for each in outer} == {world}, "partition_count"
        partitions = {MASTER: [each["single_partition_of_fp32_groups"][group] for each in outer]}
        if per_group[0]:
            partitions |= {moment: [each[group][moment] for each in per_group] for moment in MOMENTS}
        for kind, per_rank in partitions.items():
            stripped = elastic or (kind == MASTER and not bf16_optimizer)
            lengths = [part - padding * stripped for padding in paddings]
            assert [len(each) for each in per_rank] == lengths, f"{kind} of group {group}: lengths are not {lengths}"
            for name, tensor in cut(torch.cat([each.detach() for each in per_rank]), params, gaps):
                states[State(name, kind)] = tensor
        found = {float(each[group]["step"]) if each else 0.0 for each in per_group}
        assert len(found) == 1, f"group {group}: the ranks are at different steps: {found}"
        steps.update(dict.fromkeys(params, found.pop()))

    tied = dict(model["shared_params"])
    for name, tensor in model["module"].items():
        if name in model["buffer_names"]:
            states[State(name, BUFFER)] = torch.stack([tensor] * world)
        elif name not in steps and name not in tied:
            states[State(name, FROZEN)] = tensor.clone()
    states.update({State(name, WEIGHT): tensor for name, tensor in read_weights(checkpoint).items()})
    rest = _rest(checkpoint, model, optims, elastic)
    return Snapshot(states, steps, [list(params) for params in shapes], {**rest, "tied": tied})


def load_module(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the params, frozen ones and tied names included, and buffers that the model_states hold."""
    tag = checkpoint / (checkpoint / "latest").read_text()
    return dict(torch.load(tag / MODEL, map_location="cpu", weights_only=False)["module"])


def slice_mappings(checkpoint: Path) -> list[list[dict[str, tuple[int, int]]]]:
    """Return, by rank and group, which (start, numel) of the partition a param has, as DeepSpeed's tools are told."""
    optims = load_ranks(checkpoint / (checkpoint / "latest").read_text(), "optim_states")
    return [
        [
            {name: (address.start, address.numel) for name, address in group.items()}
            for group in optim["optimizer_state_dict"]["param_slice_mappings"]
        ]
        for optim in optims
    ]


def cut(vector: torch.Tensor, shapes: dict[str, torch.Size], gaps: Sequence[int]) -> list[tuple[str, torch.Tensor]]:
    """Return the params of a joined vector; all that is left over must be zero."""
    params, at = [], 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
        end = at + math.prod(shape)
        params.append((name, vector[at:end].reshape(shape).clone()))
        at = end + gap
        assert not vector[end:at].any(), f"the gap behind {name} is not zero"
    assert not vector[at:].any(), "the padding is not zero"
    return params


def _rest(checkpoint: Path, model: dict[str, Any], optims: list[dict[str, Any]], elastic: bool) -> dict[str, Any]:
    """What belongs to no param; the ranks must agree about it."""
    per_rank = []
    for optim in optims:
        outer = optim["optimizer_state_dict"]
        inner = outer["base_optimizer_state"]
        states = inner if elastic else list(inner["state"].values())
        scaler = outer.get("loss_scaler")
        per_rank.append(
            {
                "param_groups": None if elastic else inner["param_groups"],
                "step_type": sorted({type(state["step"]).__name__ for state in states}),
                "loss_scaler": scaler and {"class": type(scaler).__name__, **vars(scaler)},
                "zero_stage": int(outer.get("zero_stage", 1)),
                "outer": {key: outer.get(key) for key in ("dynamic_loss_scale", "overflow", "clip_grad", "ds_version")},
                "gaps": outer.get("param_alignment_paddings"),
                "optim_ds_config": optim["ds_config"],
                "ds_version": optim["ds_version"],
            }
        )
    assert all(each == per_rank[0] for each in per_rank), "the ranks disagree about what belongs to no param"
    scheduler, trainer_state = checkpoint / "scheduler.pt", checkpoint / "trainer_state.json"
    return {
        **per_rank[0],
        "counters": {key: value for key, value in model.items() if isinstance(value, int)},
        "lr_scheduler": model["lr_scheduler"],
        "module_names": list(model["module"]),
        "ds_config": model["ds_config"],
        "scheduler": torch.load(scheduler, weights_only=False) if scheduler.exists() else None,
        "trainer_state": json.loads(trainer_state.read_text()) if trainer_state.exists() else None,
        "latest": (checkpoint / "latest").read_text(),
    }
