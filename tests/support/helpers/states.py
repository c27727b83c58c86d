"""Comparing what an index refers to with what a live training held."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from llmtailor.checkpoint.index import CheckpointIndex, TensorEntry
from llmtailor.model.dtypes import ITEMSIZE
from llmtailor.model.roles import FROZEN, MASTER, WEIGHT, State
from oracle import any as oracle_any
from oracle.zero3 import MOMENTS, Snapshot, differ
from trainings.harness import Run

PARTS = {
    "embed_tokens": r"embed_tokens|\.wte\.|embed_in",
    "norm": r"^(model|transformer|gpt_neox)\.(norm|ln_f|final_layer_norm)\.",
    "lm_head": r"^(lm_head|embed_out)\.",
}

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64,
}  # fmt: skip


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def mean(values: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Sum in fp64, as averages are made."""
    scaled = [value.double() * (weight / math.fsum(weights)) for value, weight in zip(values, weights, strict=True)]
    return sum(scaled[1:], scaled[0]).float()


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
    """Check an index against what an FSDP training held: see trainings/fsdp.py."""
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
    told = [{k: v for k, v in group.hyper.items() if k != "lt_params"} for group in index.groups]
    assert [{k: v for k, v in group.items() if k != "lt_params"} for group in live["groups"]] == told


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def assert_states(found: Mapping[Any, torch.Tensor], wanted: Mapping[Any, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert not {state: told for state, tensor in wanted.items() if (told := differ(found[state], tensor))}


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


def assert_same_states(found: CheckpointIndex, wanted: CheckpointIndex, odd: CheckpointIndex | None = None) -> None:
    """Check that a checkpoint has the states of another, and in its odd layer, of three, those of a second one.

    Weights only count where they are not rounded masters.
    """
    for state, held in wanted.held.items():
        if state.kind != WEIGHT or found.form.weights_are_states:
            source, there = (odd, odd.held[state]) if odd and ".layers.1." in state.param else (wanted, held)
            assert same(read(found.root, found.held[state]), read(source.root, there)), state


def of_snapshot(snapshot: Snapshot) -> dict[str, Any]:
    states = {name: {"step": torch.tensor(step)} for name, step in snapshot.steps.items()}
    for moment in MOMENTS:
        for name, tensor in snapshot.kind(moment).items():
            states[name][moment] = tensor
    return {"weights": snapshot.kind(MASTER), "states": states}


def held_by(run: Run, step: int) -> dict[str, Any]:
    """Return what a training held when it saved: as it said itself under FSDP, as the oracle reads it of DeepSpeed."""
    return run.held[step] if run.spec.program == "fsdp" else of_snapshot(oracle_any.load(run.checkpoint(step)))


def loaded_by(run: Run, step: int) -> dict[str, Any]:
    """Return what a training held that resumed at a step, before its own first one."""
    if run.spec.program == "fsdp":
        return dict(run.held[step])
    if run.spec.stage < 3:  # DeepSpeed can't be asked before a first step; this is what it saved back
        return of_snapshot(oracle_any.load(run.written_back))
    moments = {name: {moment: run.echo[moment][name] for moment in MOMENTS} for name in run.echo["master"]}
    states = {name: {"step": torch.tensor(run.echo["step"][name]), **of} for name, of in moments.items()}
    return {"weights": run.echo["master"], "states": states}


def in_8_bits(tensor: torch.Tensor, kind: str, ranks: int = 1) -> torch.Tensor:
    """Round a moment to what blocks of 128 codes hold, if ZeRO-3 cuts it over so many ranks."""
    is_root, most = (True, 255) if kind == "exp_avg_sq" else (False, 127)
    rounded = []
    for part in tensor.reshape(-1).split(-(-tensor.numel() // ranks)):
        # torch rounds some square roots wrongly on CPUs
        for block in part.double().sqrt().float().split(128) if is_root else part.split(128):
            unit = block.abs().max() / most
            codes = (block / unit).round() + 0.0 if unit else torch.zeros_like(block)
            if is_root:
                codes[(block > 0) & (codes == 0)] = 1
            rounded.append((codes * unit) ** 2 if is_root else codes * unit)
    return torch.cat(rounded).reshape(tensor.shape)


def in_24_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Round fp32 to odd at its 24th bit."""
    bits = tensor.contiguous().view(torch.int32)
    return torch.where(bits & 0xFF != 0, (bits | 0x100) & ~0xFF, bits).view(torch.float32)


def refined(newest: torch.Tensor, older: torch.Tensor) -> torch.Tensor:
    """Return masters that round to the newest ones' bf16: the older ones, or what is nearest to these.

    That is for neighbors in bf16; of others, the bf16 value itself.
    """
    found = []
    for value, near, step in zip(older.flatten(), older.bfloat16().flatten(), newest.bfloat16().flatten(), strict=True):
        distance = abs(int(near.view(torch.int16)) - int(step.view(torch.int16)))
        if distance == 1:
            edge = (step.float() + near.float()) / 2
            value = edge if edge.bfloat16() == step else edge.nextafter(step.float())
        found.append(step.float() if distance > 1 else value)
    return torch.stack(found).reshape(newest.shape)


def of_16_bits(newest: torch.Tensor, older: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return masters of 24 bits where each of 32 has moved by less than 2**15 such numbers, others as `refined`."""

    def numbers(tensor: torch.Tensor) -> list[int]:
        found = [int(bits) & 0xFFFFFFFF for bits in in_24_bits(tensor).view(torch.int32)]
        return [-(bits & 0x7FFFFFFF) >> 8 if bits >> 31 else bits >> 8 for bits in found]

    part, made = -(-newest.numel() // ranks), []
    for now, then in zip(newest.flatten().split(part), older.flatten().split(part), strict=True):
        for some, before in zip(now.split(32), then.split(32), strict=True):
            pairs = zip(numbers(some), numbers(before), strict=True)
            is_near = all(abs(one - other) < 1 << 15 for one, other in pairs)
            is_near &= not ((some == 0) & some.signbit()).any()
            made.append(in_24_bits(some) if is_near else refined(some, in_24_bits(before)))
    return torch.cat(made).reshape(newest.shape)


def part_of(name: str) -> str | int:
    """Which part a tensor belongs to, in the tests' own words."""
    if layer := re.search(r"\.(?:layers|h)\.(\d+)\.", name):
        return int(layer[1])
    return next((part for part, pattern in PARTS.items() if re.search(pattern, name)), "other")
