"""Read a ZeRO-3 checkpoint the slow way: load every file with torch, cut by hand, believe nothing.

::

    param (N elements), W ranks, part = ceil(N / W)       0 .. part | part .. 2 part | ...  | .. N  padding
    flat tensor of a flat id on rank r                    the r-th slices of its params, one behind the other
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from llmtailor.model.roles import BUFFER, FROZEN, MASTER, WEIGHT, State

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class Snapshot:
    """Everything that a checkpoint holds, with the padding cut off and the ranks joined."""

    states: dict[State, torch.Tensor]
    """A buffer has one more dimension: every rank has its own."""
    steps: dict[str, float]
    """Of every trainable param"""
    flat_ids: list[list[str]]
    """The params of each flat id, in order"""
    rest: dict[str, Any] = field(default_factory=dict)
    """What belongs to no param: ``param_groups``, ``loss_scaler``, ``counters``, ``scheduler``, ..."""

    def names(self, kind: str) -> list[str]:
        return [state.param for state in self.states if state.kind == kind]

    def kind(self, kind: str) -> dict[str, torch.Tensor]:
        return {state.param: tensor for state, tensor in self.states.items() if state.kind == kind}


def load(checkpoint: Path) -> Snapshot:
    tag = checkpoint / (checkpoint / "latest").read_text()
    models, optims = load_ranks(tag, "model_states"), load_ranks(tag, "optim_states")
    assert len(models) == len(optims) == models[0]["dp_world_size"], f"{tag}: not one file of each kind per rank"
    world = len(models)
    shapes: list[dict[str, torch.Size]] = models[0]["param_shapes"]
    assert all(model["param_shapes"] == shapes for model in models), "param_shapes differ between the ranks"

    states: dict[State, torch.Tensor] = {}
    steps: dict[str, float] = {}
    inner = [optim["optimizer_state_dict"]["optimizer_state_dict"] for optim in optims]
    assert all(list(each["state"]) in ([], list(range(len(shapes)))) for each in inner), "states of some flat ids only"
    for flat_id, params in enumerate(shapes):
        flats = {MASTER: [optim["optimizer_state_dict"]["fp32_flat_groups"][flat_id] for optim in optims]}
        if inner[0]["state"]:  # empty as long as every step overflowed (fp16)
            flats.update({moment: [each["state"][flat_id][moment] for each in inner] for moment in MOMENTS})
        for kind, per_rank in flats.items():
            for name, tensor in cut(per_rank, params, world, zero_padding=kind in MOMENTS):
                states[State(name, kind)] = tensor
        found = {float(each["state"][flat_id]["step"]) if each["state"] else 0.0 for each in inner}
        assert len(found) == 1, f"flat id {flat_id}: the ranks are at different steps: {found}"
        steps.update(dict.fromkeys(params, found.pop()))

    for name, shape in (models[0]["frozen_param_shapes"] or {}).items():
        fragments = [model["frozen_param_fragments"][name] for model in models]
        [(_, states[State(name, FROZEN)])] = cut(fragments, {name: shape}, world, zero_padding=False)
    for name in models[0]["buffer_names"]:
        states[State(name, BUFFER)] = torch.stack([model["module"][name] for model in models])
    states.update({State(name, WEIGHT): tensor for name, tensor in read_weights(checkpoint).items()})
    return Snapshot(states, steps, [list(params) for params in shapes], _rest(checkpoint, models, optims, inner))


def compose(
    snapshots: Mapping[str, Snapshot], base: str, choose: Callable[[str], str], layout: Snapshot | None = None
) -> Snapshot:
    """Say what a composite must hold: ``choose`` names the source of every param, buffer and weight.

    A flat id has only one ``step``: the one that all its params bring along, or else the base's. ``layout`` is a
    checkpoint that is laid out like the composite, if that is not the base.
    """
    shape = snapshots[base]
    layout = layout or shape
    states = {state: snapshots[choose(state.param)].states[state] for state in shape.states}
    steps = {}
    for params in layout.flat_ids:
        brought = {snapshots[choose(param)].steps[param] for param in params}
        for param in params:
            steps[param] = shape.steps[param] if len(brought) > 1 else min(brought)
    return Snapshot(states, steps, layout.flat_ids, layout.rest)


def assert_same(actual: Snapshot, expected: Snapshot, rest: bool = True) -> None:
    """Compare bit for bit; complain about every difference at once."""
    wrong = [f"{_told(state)} is missing" for state in expected.states.keys() - actual.states.keys()]
    wrong += [f"{_told(state)} should not be there" for state in actual.states.keys() - expected.states.keys()]
    for state in expected.states.keys() & actual.states.keys():
        difference = differ(actual.states[state], expected.states[state])
        if difference:
            wrong.append(f"{_told(state)}: {difference}")
    for param in expected.steps.keys() | actual.steps.keys():
        if actual.steps.get(param) != expected.steps.get(param):
            wrong.append(f"step of {param}: {actual.steps.get(param)}, not {expected.steps.get(param)}")
    if actual.flat_ids != expected.flat_ids:
        wrong.append(f"flat ids: {actual.flat_ids}, not {expected.flat_ids}")
    for key in (expected.rest.keys() | actual.rest.keys()) if rest else ():
        if _unmarked(actual.rest.get(key)) != _unmarked(expected.rest.get(key)):
            wrong.append(f"{key}: {actual.rest.get(key)}, not {expected.rest.get(key)}")
    assert not wrong, f"{len(wrong)} differences:\n" + "\n".join(sorted(wrong))


def _unmarked(value: Any) -> Any:
    """Return a trainer state without what a composite states in it: the base's attempt, and how far Adam is behind."""
    if not isinstance(value, dict) or "stateful_callbacks" not in value:
        return value
    ours = {"llmtailor", "llmtailor-optimizer"}
    callbacks = {name: state for name, state in value["stateful_callbacks"].items() if name not in ours}
    return {**value, "stateful_callbacks": callbacks}


def differ(actual: torch.Tensor, expected: torch.Tensor) -> str:
    """Describe how two tensors differ in their bits (NaNs and the sign of zero count), or return ''."""
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        return f"{actual.dtype} {tuple(actual.shape)}, not {expected.dtype} {tuple(expected.shape)}"
    if actual.numel() == 0:
        return ""
    bits = [tensor.detach().reshape(-1, 1).contiguous().view(torch.uint8) for tensor in (actual, expected)]
    where = (bits[0] != bits[1]).any(dim=1).nonzero().flatten().tolist()
    if not where:
        return ""
    first = where[0]
    values = actual.flatten()[first].item(), expected.flatten()[first].item()
    return f"{len(where)} of {actual.numel()} elements differ, the first is {first}: {values[0]}, not {values[1]}"


def _told(state: State) -> str:
    return f"{state.kind} of {state.param}"


def read_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Read the safetensors files; an index must say the truth about them."""
    weights: dict[str, torch.Tensor] = {}
    files: dict[str, str] = {}
    for path in sorted({*checkpoint.glob("*.safetensors")} - {checkpoint / "adapter_model.safetensors"}):
        for name, tensor in load_file(path).items():
            assert name not in files, f"{name} is in two safetensors files"
            weights[name], files[name] = tensor, path.name
    index = checkpoint / "model.safetensors.index.json"
    if index.exists():
        told = json.loads(index.read_text())["weight_map"]  # the total_size beside it counts ZeRO-3's padding, too
        assert told == files, "the index of the safetensors files is wrong"
    else:
        assert set(files.values()) <= {"model.safetensors"}, "several safetensors files and no index"
    return weights


def load_ranks(tag: Path, what: str) -> list[dict[str, Any]]:
    """Load the files of all ranks, by the number in the name."""
    found = {}
    for path in tag.glob(f"*_{what}.pt"):
        rank = re.fullmatch(rf"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_{what}\.pt", path.name)
        assert rank, f"what is {path}?"
        found[int(rank[1])] = torch.load(path, map_location="cpu", weights_only=False)
    assert sorted(found) == list(range(len(found))), f"{tag}: ranks {sorted(found)}"
    return [found[rank] for rank in sorted(found)]


def cut(
    flats: Sequence[torch.Tensor], shapes: dict[str, torch.Size], world: int, zero_padding: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the params of a flat id, joined from the ranks' flat tensors."""
    offset = 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        part = math.ceil(numel / world)
        whole = torch.cat([flat.detach()[offset : offset + part] for flat in flats])
        assert len(whole) == part * world, f"{name}: a flat tensor is too short"
        assert not zero_padding or not whole[numel:].any(), f"{name}: the padding of a moment is not zero"
        yield name, whole[:numel].reshape(shape).clone()
        offset += part
    assert {len(flat) for flat in flats} == {offset}, f"flat tensors of {[len(flat) for flat in flats]}, not {offset}"


def _rest(
    checkpoint: Path, models: list[dict[str, Any]], optims: list[dict[str, Any]], inner: list[dict[str, Any]]
) -> dict[str, Any]:
    """What belongs to no param; it must be the same on every rank."""
    outer = [optim["optimizer_state_dict"] for optim in optims]
    per_rank = [
        {
            "param_groups": inner[rank]["param_groups"],
            "step_type": sorted({type(state["step"]).__name__ for state in inner[rank]["state"].values()}),
            "loss_scaler": {"class": type(outer[rank]["loss_scaler"]).__name__, **vars(outer[rank]["loss_scaler"])},
            "zero_stage": int(outer[rank]["zero_stage"]),
            "outer": {key: outer[rank][key] for key in ("dynamic_loss_scale", "overflow", "partition_count")},
            "counters": {key: value for key, value in models[rank].items() if isinstance(value, int)},
            "lr_scheduler": models[rank]["lr_scheduler"],
            "module_names": list(models[rank]["module"]),
            "ds_config": models[rank]["ds_config"],
            "ds_version": models[rank]["ds_version"],
            "optim_ds_config": optims[rank]["ds_config"],
        }
        for rank in range(len(models))
    ]
    assert all(each == per_rank[0] for each in per_rank), "the ranks disagree about what belongs to no param"
    scheduler, trainer_state = checkpoint / "scheduler.pt", checkpoint / "trainer_state.json"
    return {
        **per_rank[0],
        "tied": dict(models[0]["shared_params"]),
        "scheduler": torch.load(scheduler, weights_only=False) if scheduler.exists() else None,
        "trainer_state": json.loads(trainer_state.read_text()) if trainer_state.exists() else None,
        "latest": (checkpoint / "latest").read_text(),
    }
