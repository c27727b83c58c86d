"""The trainings and the oracle stand on firm ground: stock resumes are exact, and stock tools agree with the oracle."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch

from llmtailor.model.states import BUFFER, FROZEN, MASTER, WEIGHT, State
from oracle.deepspeed_tools import assert_universal_agrees, assert_zero_to_fp32_agrees
from oracle.weights import as_saved
from oracle.zero3 import MOMENTS, Snapshot, assert_same, compose, differ, load
from real.harness import Runs, Train, TrainingFailed, torchrun
from real.runs import MIDDLE, RESUMED, THREE_RANKS, TWO_RANKS

ALL = TWO_RANKS | THREE_RANKS
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
INEXACT = {"llama-cpu-adam"}
"""DeepSpeedCPUAdam computes its bias correction anew after a resume, so the steps that follow differ a little."""


@pytest.mark.parametrize("name", RESUMED)
def test_stock_resume_repeats_the_straight_run(runs: Runs, name: str) -> None:
    straight, resumed = runs[name], runs[f"{name}+resume"]
    last = straight.spec.steps
    expected = {step: log for step, log in straight.logs.items() if step > MIDDLE}
    assert len(expected) == last - MIDDLE
    if name in INEXACT:
        assert resumed.losses == pytest.approx({step: log["loss"] for step, log in expected.items()}, rel=1e-3)
        return
    assert [log["loss"] for log in resumed.logs.values()] == [log["loss"] for log in expected.values()]
    assert [log["grad_norm"] for log in resumed.logs.values()] == [log["grad_norm"] for log in expected.values()]
    again, once = load(resumed.checkpoint(last)), load(straight.checkpoint(last))
    for snapshot in (again, once):  # it tells save_steps and times
        snapshot.rest.pop("trainer_state")
    assert_same(again, once)


@pytest.mark.parametrize("name", RESUMED)
def test_deepspeed_loads_what_the_oracle_reads(runs: Runs, name: str) -> None:
    run = runs[name]
    snapshot, echo = load(run.checkpoint(MIDDLE)), runs[f"{name}+resume"].echo
    assert echo["step"] == snapshot.steps
    for kind in (MASTER, *MOMENTS):
        assert_tensors(echo[kind], snapshot.kind(kind))
    trained = {param: master.to(DTYPES[run.spec.dtype]) for param, master in snapshot.kind(MASTER).items()}
    assert_tensors(echo["weight"], trained | snapshot.kind(FROZEN))
    assert_tensors({param: echo["buffer"][param] for param in snapshot.names(BUFFER)}, rank_0(snapshot))
    counters = {key: snapshot.rest["counters"][key] for key in ("global_steps", "skipped_steps")}
    assert {key: echo[key] for key in counters} == counters
    assert echo["global_step"] == snapshot.rest["trainer_state"]["global_step"] == MIDDLE
    assert echo["scheduler"] == (snapshot.rest["scheduler"] or snapshot.rest["lr_scheduler"])
    groups = [{key: group[key] for key in group if key != "params"} for group in snapshot.rest["param_groups"]]
    assert echo["groups"] == groups


@pytest.mark.parametrize("name", ALL)
def test_weights_are_rounded_masters(runs: Runs, name: str) -> None:
    run = runs[name]
    for step in range(run.spec.save_steps, run.spec.steps + 1, run.spec.save_steps):
        snapshot = load(run.checkpoint(step))
        masters = {param: master.to(DTYPES[run.spec.dtype]) for param, master in snapshot.kind(MASTER).items()}
        saved = as_saved(masters | snapshot.kind(FROZEN), run.spec.arch) | rank_0(snapshot)
        assert_tensors(snapshot.kind(WEIGHT), saved if run.spec.gather else {})


@pytest.mark.parametrize("name", ALL)
def test_the_optimizer_counts_steps_that_were_not_skipped(runs: Runs, name: str) -> None:
    run = runs[name]
    for step in range(run.spec.save_steps, run.spec.steps + 1, run.spec.save_steps):
        snapshot = load(run.checkpoint(step))
        counters = snapshot.rest["counters"]
        assert counters["global_steps"] == step
        assert set(snapshot.steps.values()) == {step - counters["skipped_steps"]}


def test_fp16_skips_its_first_step_and_has_no_moments_yet(runs: Runs) -> None:
    first = load(runs["llama-fp16"].checkpoint(1))
    assert first.rest["counters"]["skipped_steps"] == 1
    assert not first.names("exp_avg")
    assert set(first.steps.values()) == {0.0}


@pytest.mark.parametrize("name", ALL)
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


def test_compose_takes_the_chosen_states(runs: Runs) -> None:
    sources = {str(step): load(runs["llama-layer"].checkpoint(step)) for step in (2, 4)}
    mixed = compose(sources, base="4", choose=lambda param: "2" if ".layers.1." in param else "4")
    assert {param for param, step in mixed.steps.items() if step == 2} == {p for p in mixed.steps if ".layers.1." in p}
    for state, tensor in mixed.states.items():
        source = sources["2" if ".layers.1." in state.param else "4"]
        assert not differ(tensor, source.states[state])
    assert_same(compose(sources, base="4", choose=lambda param: "4"), sources["4"])
    with pytest.raises(AssertionError, match=r"exp_avg of model\.layers\.1"):
        assert_same(mixed, sources["4"])


def test_compose_keeps_the_bases_step_in_a_mixed_flat_id(runs: Runs) -> None:
    sources = {str(step): load(runs["llama"].checkpoint(step)) for step in (2, 4)}
    mixed = compose(sources, base="4", choose=lambda param: "2" if ".layers.1." in param else "4")
    assert set(mixed.steps.values()) == {4.0}
    assert set(compose(sources, base="4", choose=lambda param: "2").steps.values()) == {2.0}


def test_a_resume_in_a_fresh_process_is_exact_too(runs: Runs, train: Train) -> None:
    straight = runs["llama-layer"]
    resumed = train([straight.spec.resumed(straight.checkpoint(2), "again")], 2)["again"]
    assert resumed.losses == {step: loss for step, loss in straight.losses.items() if step > 2}


def test_a_hung_training_is_killed_and_tells_its_log(tmp_path: Path) -> None:
    with pytest.raises(TrainingFailed, match="not done after 0 s"):
        torchrun([TWO_RANKS["llama"]], 2, tmp_path, timeout_s=0.1)


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
