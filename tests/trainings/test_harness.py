"""The trainings and the oracle stand on firm ground: stock resumes are exact, and stock tools agree with the oracle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llmtailor.model.roles import BUFFER, FROZEN, MASTER, WEIGHT, State
from oracle.deepspeed_tools import assert_universal_agrees, assert_zero_to_fp32_agrees
from oracle.weights import as_saved
from oracle.zero3 import MOMENTS, Snapshot, assert_same, differ, load
from trainings.catalogue import MIDDLE, ZERO3
from trainings.common import DTYPES
from trainings.harness import Runs, TrainingFailed, train
from trainings.spec import Spec


@pytest.mark.parametrize("name", ZERO3)
def test_weights_are_rounded_masters_and_skipped_steps_are_not_counted(runs: Runs, name: str) -> None:
    run = runs[name]
    for step in range(run.spec.save_steps, run.spec.steps + 1, run.spec.save_steps):
        snapshot = load(run.checkpoint(step))
        masters = {param: master.to(DTYPES[run.spec.dtype]) for param, master in snapshot.kind(MASTER).items()}
        saved = as_saved(masters | snapshot.kind(FROZEN), run.spec.arch) | rank_0(snapshot)
        assert_tensors(snapshot.kind(WEIGHT), saved if run.spec.gather else {})
        counters = snapshot.rest["counters"]
        assert counters["global_steps"] == step
        assert set(snapshot.steps.values()) == {step - counters["skipped_steps"]}


def test_fp16_skips_its_first_step_and_has_no_moments_yet(runs: Runs) -> None:
    first = load(runs["llama-fp16"].checkpoint(1))
    assert first.rest["counters"]["skipped_steps"] == 1
    assert not first.names("exp_avg")
    assert set(first.steps.values()) == {0.0}


@pytest.mark.parametrize("name", ZERO3)
def test_every_param_and_every_step_is_told_apart(runs: Runs, name: str) -> None:
    """States that are equal by chance would hide mix-ups."""
    run = runs[name]
    seen: dict[tuple[object, ...], str] = {}
    for step in (4, 6):
        for state, tensor in load(run.checkpoint(step)).states.items():
            if tensor.numel() > 30 and state.kind in (MASTER, *MOMENTS):
                told = f"{state.kind} of {state.param} at step {step}"
                key = (state.kind, tuple(tensor.flatten()[:30].tolist()))
                assert key not in seen, f"{told} is like {seen[key]}"
                seen[key] = told


@pytest.mark.parametrize(
    "name",
    ["llama", "llama-layer", "llama-layer-sub", "llama-fp16", "llama-extras-layer", "llama-extras-w3", "mixtral-w3"],
)
def test_deepspeeds_tools_agree_with_the_oracle(runs: Runs, name: str, tmp_path: Path) -> None:
    checkpoint = runs[name].checkpoint(MIDDLE)
    snapshot = load(checkpoint)
    assert_universal_agrees(snapshot, checkpoint, tmp_path)
    assert_zero_to_fp32_agrees(snapshot, checkpoint)


def test_a_failed_training_tells_why(tmp_path: Path) -> None:
    with pytest.raises(TrainingFailed, match=r"rank \d ended with code 1(.|\n)*KeyError: 'no-such-model'"):
        train([Spec("failed", "no-such-model")], tmp_path)


def test_bits_are_compared_not_values() -> None:
    nan, zero = torch.tensor([float("nan")]), torch.tensor(0.0)
    assert not differ(nan, nan.clone())
    assert "not -0.0" in differ(zero, -zero)
    assert "float32" in differ(zero, zero.double())


def assert_tensors(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert_same(as_snapshot(actual), as_snapshot(expected))


def as_snapshot(tensors: dict[str, torch.Tensor]) -> Snapshot:
    return Snapshot({State(name, "tensor"): tensor for name, tensor in tensors.items()}, {}, [])


def rank_0(snapshot: Snapshot) -> dict[str, torch.Tensor]:
    """The buffers as safetensors files have them."""
    return {name: copies[0] for name, copies in snapshot.kind(BUFFER).items()}
