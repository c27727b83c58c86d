"""Averages of real trainings: of any mix of formats against torch, and resumed by the stock Trainer and DeepSpeed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import llmtailor
import oracle.any
from helpers.composing import convert
from helpers.states import DTYPES, assert_states, held_by, mean, read
from llmtailor.checkpoint.sources import AVERAGE, NEWEST, RESET
from llmtailor.codes import Code
from llmtailor.errors import MismatchError
from llmtailor.formats.registry import index_checkpoint
from llmtailor.model.roles import MASTER, MODULE, WEIGHT, State
from llmtailor.recipe import Average, Recipe, Select, WholeModel
from llmtailor.verify.verify import RESUMABLE, verify_checkpoint
from oracle.zero3 import MOMENTS, differ
from trainings.alone import finished
from trainings.alone import train as train_alone
from trainings.catalogue import DEEPSPEED, FSDP, MIDDLE
from trainings.harness import Run, Runs, Train
from trainings.loaded import assert_loaded

Member = tuple[str, int, float]
"""A run, a step, and a weight"""


def merge(base: Path, members: list[tuple[Path, float]], moments: str, out: Path, **options: Any) -> Path:
    recipe = Recipe(name="x", base=base, rules=(WholeModel(Average(tuple(members), moments), None, "x"),))
    llmtailor.merge(recipe, out, llmtailor.Options(**options))
    verdict = verify_checkpoint(out, deep=True)
    assert verdict.level == RESUMABLE, verdict.findings
    return out


@pytest.mark.parametrize(
    ("base", "members", "options"),
    [
        ("llama", [("llama", 2, 1), ("llama-sub-w3", 4, 2), ("zero2-w3", 6, 0.5)], {"stage": 2, "world_size": 3}),
        ("zero2-rr", [("zero2-rr", 4, 1), ("zero1-bf16opt", 2, 3)], {}),
        ("trainer", [("llama", 4, 0.25), ("trainer", 2, 0.75)], {"to": "fsdp", "world_size": 3}),
        pytest.param("llama", [("no-fsdp", 2, 1), ("zero2", 4, 1), ("trainer", 2, 1)], {}, marks=pytest.mark.long),
        pytest.param("no-fsdp", [("no-fsdp", 2, 1), ("llama-sub-w3", 4, 1)], {}, marks=pytest.mark.long),
    ],
    ids=["zero3 and zero2 to zero2 on 3", "round robin", "fsdp and zero3 to fsdp", "three formats to zero3", "plain"],
)
def test_any_mix_of_formats(
    runs: Runs, tmp_path: Path, base: str, members: list[Member], options: dict[str, Any]
) -> None:
    weights = [weight for *_, weight in members]
    sources = [(runs.checkpoint(name, step), weight) for name, step, weight in members]
    out = merge(runs.checkpoint(base, 2 if base in FSDP else 6), sources, NEWEST, tmp_path / "out", **options)

    index = index_checkpoint(out)
    lives = [held_by(runs[name], step) for name, step, _ in members]
    newest = max(zip(members, lives, strict=True), key=lambda pair: pair[0][1])[1]
    assert {state.param for state in index.held if state.kind == MASTER} == set(newest["states"])
    for param, states in newest["states"].items():
        master = mean([live["weights"][param] for live in lives], weights)
        for kind in (MASTER, WEIGHT):
            entry = index.held[State(param, kind)]
            assert not differ(read(out, entry).flatten(), master.to(DTYPES[entry.dtype]).flatten()), (param, kind)
        for moment in MOMENTS:
            entry = index.held[State(param, moment)]
            assert not differ(read(out, entry).flatten(), states[moment].flatten()), (param, moment)
        assert index.steps()[param] == float(states["step"])
    for (name, _), entry in index.zero.module.items():  # ZeRO-1/2
        param = index.tied.get(name, name)
        assert not differ(read(out, entry), read(out, index.held[State(param, MASTER)]).to(DTYPES[entry.dtype])), MODULE


CASES = [("llama", NEWEST), ("llama", AVERAGE), ("llama", RESET), ("llama", "itself"), ("zero2", RESET)]


@pytest.fixture(scope="module")
def resumed(
    runs: Runs, train: Train, tmp_path_factory: pytest.TempPathFactory, selected: set[Any]
) -> dict[tuple[str, str], tuple[Path, Run]]:
    """Stock resumes from the average of steps 2 and 4, or of step 4 and itself"""
    root, specs, outs = tmp_path_factory.mktemp("averages"), [], {}
    asked = [case for case in CASES if case in selected or (case[1] == RESET and case[0] in selected)]
    for name, moments in asked:
        newest = runs[name].checkpoint(MIDDLE)
        other = newest if moments == "itself" else runs[name].checkpoint(2)
        members = [(other, 0.3), (newest, 0.4)]
        out = root / name / moments / f"checkpoint-{MIDDLE}"
        out.parent.mkdir(parents=True)
        outs[name, moments] = merge(newest, members, AVERAGE if moments == "itself" else moments, out)
        spec = replace(DEEPSPEED[name], save_steps=6)
        specs.append(spec.resumed(out, f"{name} {moments}"))
    done = train(specs)
    return {case: (outs[case], done[" ".join(case)]) for case in asked}


@pytest.mark.parametrize(
    "case",
    [CASES[1], *(pytest.param(case, marks=pytest.mark.long) for case in CASES if case != CASES[1])],
    ids=" ".join,
)
def test_stock_resumes_from_an_average(
    resumed: dict[tuple[str, str], tuple[Path, Run]], runs: Runs, case: tuple[str, str], tmp_path: Path
) -> None:
    """Also llmtailor knows what that training saves: Adam's steps of a reset are behind the run's for good."""
    name, moments = case
    out, run = resumed[case]
    assert_loaded(run, oracle.any.load(out))
    straight = {step: loss for step, loss in runs[name].losses.items() if step > MIDDLE}
    assert run.losses.keys() == straight.keys() and all(map(math.isfinite, run.losses.values()))
    assert (run.losses == straight) == (moments == "itself")
    after = oracle.any.load(run.checkpoint(6))
    assert set(after.steps.values()) == {2 if moments == RESET else 6}
    assert verify_checkpoint(run.checkpoint(6), deep=True).level == RESUMABLE
    again = convert(run.checkpoint(6), tmp_path / "checkpoint-6", stage=3 - run.spec.stage % 2, world_size=3)
    assert oracle.any.load(again).steps == after.steps and verify_checkpoint(again, deep=True).level == RESUMABLE


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.long), "zero2"])
def test_the_first_step_after_a_reset_is_that_of_a_new_optimizer(
    resumed: dict[tuple[str, str], tuple[Path, Run]], name: str
) -> None:
    """After a step from zeros, exp_avg is 0.1 g and exp_avg_sq 0.001 g^2; after two, both stay within these bounds."""
    _, run = resumed[name, RESET]
    after = oracle.any.load(run.checkpoint(6))
    for param, first in after.kind(MOMENTS[0]).items():
        second = after.states[State(param, MOMENTS[1])].double()
        # (0.09 g1 + 0.1 g2)^2 <= (0.09^2 / 0.000999 + 0.1^2 / 0.001) * (0.000999 g1^2 + 0.001 g2^2)
        assert (first.double() ** 2 <= 18.2 * second + 1e-30).all(), param


@pytest.mark.parametrize("moments", [pytest.param(AVERAGE, marks=pytest.mark.long), RESET])
def test_the_plain_trainer_resumes_too(tmp_path: Path, moments: str) -> None:
    """Each param has its own step there, so a part of a group can be reset."""
    run = finished()
    members = tuple((run.checkpoint(step), 1.0) for step in (2, 4))
    rule = Select(Average(members, moments), ("0",), "x")
    out = tmp_path / "checkpoint-4"
    llmtailor.merge(Recipe(name="x", base=run.checkpoint(4), rules=(rule,)), out)
    assert verify_checkpoint(out, deep=True).level == RESUMABLE
    resumed = train_alone(tmp_path / "resumed", resume_from=out, steps=6)
    assert sorted(resumed.losses) == [5, 6] and all(map(math.isfinite, resumed.losses.values()))
    last = resumed.checkpoint(6)
    assert {step for param, step in index_checkpoint(last).steps().items() if ".layers.0." in param} == {
        2 if moments == RESET else 6
    }
    verdict = verify_checkpoint(last, deep=True)
    assert verdict.level == RESUMABLE and not verdict.findings


@pytest.mark.parametrize(
    "to", ["deepspeed", *(pytest.param(to, marks=pytest.mark.long) for to in ("universal", "trainer", "fsdp"))]
)
@pytest.mark.parametrize("moments", [NEWEST, RESET])
def test_what_is_saved_later_states_how_far_adam_is_off(runs: Runs, tmp_path: Path, to: str, moments: str) -> None:
    """Without a manifest, as a training saves it, and then without the statement. The average is newer than its base,
    or its moments are reset."""
    name = runs["llama"]
    members = [(name.checkpoint(4), 1.0), (name.checkpoint(6), 1.0)]
    out = merge(name.checkpoint(4), members, moments, tmp_path / "checkpoint-4", to=to)
    (out / "llmtailor.json").unlink()
    assert verify_checkpoint(out).level == RESUMABLE
    state = json.loads((out / "trainer_state.json").read_text())
    lag = state["stateful_callbacks"].pop("llmtailor-optimizer")["attributes"]["step_lags"]
    assert lag == [4 if moments == RESET else -2]
    (out / "trainer_state.json").write_text(json.dumps(state))
    assert verify_checkpoint(out).level != RESUMABLE or to == "fsdp"
    assert Code.STEPS_DIFFER in {finding.code for finding in verify_checkpoint(out).findings}


@pytest.mark.parametrize(
    "name", ["llama-tied", *(pytest.param(name, marks=pytest.mark.long) for name in ("llama-frozen", "zero2-extras"))]
)
def test_other_kinds_of_model(runs: Runs, tmp_path: Path, name: str) -> None:
    """Tied params have one average; frozen params and buffers are the newest's."""
    paths = [runs[name].checkpoint(step) for step in (2, 4)]
    sources = [oracle.any.load(path) for path in paths]
    out = merge(runs[name].checkpoint(6), [(path, 1.0) for path in paths], NEWEST, tmp_path / "out")
    wanted, tied = dict(sources[1].states), sources[1].rest["tied"]
    for state, newest in sources[1].states.items():
        master = State(tied.get(state.param, state.param), MASTER)
        if state.kind in (MASTER, WEIGHT) and master in wanted:
            wanted[state] = mean([source.states[master] for source in sources], [1, 1]).to(newest.dtype)
    assert_states(oracle.any.load(out).states, wanted)


def test_experts_with_other_names_on_disk_are_not_averaged(runs: Runs, tmp_path: Path) -> None:
    checkpoint = runs["mixtral"].checkpoint(4)
    with pytest.raises(MismatchError, match="layers 0-2: the weights on disk have other names"):
        merge(checkpoint, [(checkpoint, 1.0)], NEWEST, tmp_path / "out")
