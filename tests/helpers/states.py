"""Comparing what an index refers to with what a live training held."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from llmtailor.checkpoint.index import CheckpointIndex, TensorEntry
from llmtailor.model.roles import FROZEN, ITEMSIZE, MASTER, WEIGHT, State
from oracle.zero3 import MOMENTS, Snapshot

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64}


def read(root: Path, held: TensorEntry) -> torch.Tensor:
    """Read a state, fragment by fragment."""
    data = bytearray()
    for fragment in held.place.cover(0, held.numel):
        with (root / fragment.extent.path).open("rb") as file:
            file.seek(fragment.extent.start)
            data += file.read(fragment.extent.num_bytes)
        assert fragment.extent.num_bytes == (fragment.end - fragment.begin) * ITEMSIZE[held.dtype]
    assert len(data) == math.prod(held.shape) * ITEMSIZE[held.dtype]
    return torch.frombuffer(data, dtype=DTYPES[held.dtype]).reshape(held.shape)


def assert_holds(index: CheckpointIndex, live: Mapping[str, Any]) -> None:
    """Check an index against `train.held`."""
    states, weights = live["states"], live["weights"]
    assert sorted(index.steps()) == sorted(states)
    assert {name for name in index.params if index.params[name].role != "buffer"} == set(weights)
    for name, weight in weights.items():
        kind = MASTER if name in states else FROZEN
        assert index.params[name].role == ("trainable" if name in states else "frozen")
        assert same(read(index.root, index.held[State(name, kind)]), weight), name
        assert same(read(index.root, index.held[State(name, WEIGHT)]), weight), name
    for name, kinds in states.items():
        assert index.steps()[name] == float(kinds["step"])
        for kind in kinds.keys() - {"step"}:
            assert same(read(index.root, index.held[State(name, kind)]), kinds[kind]), (name, kind)
    told = [dict(group.hyper.items()) for group in index.groups]
    assert [{k: v for k, v in group.items() if k != "lt_params"} for group in live["groups"]] == told


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def assert_same_held(now: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Check that two trainings hold the same weights and states, bit for bit."""
    assert now["weights"].keys() == before["weights"].keys()
    for name, weight in before["weights"].items():
        assert same(now["weights"][name], weight), name
    assert now["states"].keys() == before["states"].keys()
    for name, kinds in before["states"].items():
        assert dict.fromkeys(kinds).keys() == now["states"][name].keys()
        for kind, value in kinds.items():
            assert same(now["states"][name][kind], value), (name, kind)


def of_snapshot(snapshot: Snapshot) -> dict[str, Any]:
    states = {name: {"step": torch.tensor(step)} for name, step in snapshot.steps.items()}
    for moment in MOMENTS:
        for name, tensor in snapshot.kind(moment).items():
            states[name][moment] = tensor
    return {"weights": snapshot.kind(MASTER), "states": states}
