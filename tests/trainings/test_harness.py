"""The trainings and the oracle stand on firm ground: stock resumes are exact, and stock tools agree with the oracle."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from llmtailor.model.roles import BUFFER, FROZEN, MASTER, WEIGHT, State
from oracle.deepspeed_tools import assert_universal_agrees, assert_zero_to_fp32_agrees
from oracle.weights import as_saved
from oracle.zero3 import MOMENTS, Snapshot, assert_same, differ, load
from trainings.catalogue import MIDDLE, RESUMED, ZERO3
from trainings.common import DTYPES
from trainings.harness import HERE, TIMEOUT_S, Run, Runs, TrainingFailed, environment, start_ranks, train
from trainings.spec import Spec

INEXACT = {"llama-cpu-adam"}
"""DeepSpeedCPUAdam computes its bias correction anew after a resume, so the steps that follow differ a little."""


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
def test_torchrun_trains_the_same(runs: Runs, tmp_path: Path) -> None:
    """A resume in processes of its own, and by the usual launcher, is exact too."""
    straight = runs["llama-layer"]
    spec = straight.spec.resumed(straight.checkpoint(2), "again")
    (tmp_path / "specs.json").write_text(json.dumps([spec.to_json()]))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = [str(HERE / "trainer.py"), str(tmp_path / "specs.json"), str(tmp_path)]
    done = subprocess.run([*launch, *words], env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S)
    assert not done.returncode, done.stdout + done.stderr
    again = Run(spec, tmp_path / "again")
    assert again.losses == straight.after(2)


@pytest.mark.parametrize(
    ("kills", "timeout_s", "told"), [(False, 2, "not done after 2 s"), (True, 60, "rank 1 ended with code -9")]
)
def test_a_rank_that_hangs_or_dies_ends_all_and_the_log_is_told(
    tmp_path, kills: bool, timeout_s: int, told: str
) -> None:
    if kills:
        (tmp_path / "kill").touch()
    with pytest.raises(TrainingFailed, match=rf"{told}(.|\n)*rank 0 hangs"):
        start_ranks("trainings.unlucky", [tmp_path / "kill"], 2, tmp_path, timeout_s)
    ranks = [path.name for path in tmp_path.glob("[0-9]*")]
    assert len(ranks) == 2
    while any(is_running(rank) for rank in ranks):  # a test that hangs here has left one behind
        time.sleep(0.01)


def test_a_failed_training_tells_why(tmp_path: Path) -> None:
    with pytest.raises(TrainingFailed, match=r"rank \d ended with code 1(.|\n)*KeyError: 'no-such-model'"):
        train([Spec("failed", "no-such-model")], tmp_path)


def is_running(rank: str) -> bool:
    try:
        return "State:\tZ" not in Path("/proc", rank, "status").read_text()
    except OSError:
        return False


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
