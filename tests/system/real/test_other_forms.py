"""From DeepSpeed to the plain Trainer and back, and from one kind of param groups to the other: stock goes on there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer

from helpers.composing import convert
from llmtailor.param_groups import LayerGroupsMixin
from trainings.alone import Alone
from trainings.alone import train as train_alone
from trainings.catalogue import MIDDLE, long_but
from trainings.harness import Run, Runs, Train
from trainings.spec import Spec

pytestmark = pytest.mark.real

STEPS, SAMPLES = 6, 6
LIKE = {"layers": 3, "rows": 256, "batch": SAMPLES, "steps": STEPS}
"""One process that sees what two ranks with half the batch do"""
REDUCTION = 2e-5
"""Of the loss in fp32, when gradients are summed in another order"""
ROUNDING = 5e-4
"""Of the loss in bf16: other sums are rounded, and autocast keeps norms and logits in fp32, which DeepSpeed rounds"""
NORM = 1e-4
"""Of the loss with other param groups: only the sum in the gradient norm is in another order, and then rounded"""

TO_PLAIN = ["zero3", "zero2"]
FROM_PLAIN = {"3 fp32": (3, None), "2 fp32": (2, None), "3 bf16": (3, "BF16"), "2 bf16": (2, "BF16")}
"""Stage of ZeRO, and ``dtype`` of the recipe"""
REGROUPED = {
    "zero3": "layer",
    "zero2": "layer",
    "llama-tied": "layer",
    "zero3-layer": "default",
    "zero2-layer": "default",
    "llama-tied-layer": "default",
    "zero1-extras-layer": "default",
}
SHORT_REGROUPED = {("zero2", "layer"), ("llama-tied", "layer"), ("zero1-extras-layer", "default")}


def assert_near(name: str, here: dict[int, float], straight: dict[int, float], tolerance: float) -> None:
    there = {step: loss for step, loss in straight.items() if step > MIDDLE}
    print(f"{name}: {there} there, {here} here", file=sys.stderr)
    assert sorted(here) == [5, 6]
    assert here == pytest.approx(there, abs=tolerance, rel=0)


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """fp32 without DeepSpeed, and a resume of it that repeats it exactly."""
    run = train_alone(tmp_path_factory.mktemp("plain"), **LIKE)
    again = train_alone(tmp_path_factory.mktemp("again"), resume_from=run.checkpoint(MIDDLE), **LIKE)
    assert again.losses == {step: loss for step, loss in run.losses.items() if step > MIDDLE}
    return run


@pytest.fixture(scope="module")
def resumed(
    plain_run: Alone, runs: Runs, train: Train, selected: set[Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Run]:
    """All stock resumes under DeepSpeed, on two ranks."""
    root, specs = tmp_path_factory.mktemp("converted"), []
    for name in sorted(FROM_PLAIN.keys() & selected):
        stage, dtype = FROM_PLAIN[name]
        out = root / name / f"checkpoint-{MIDDLE}"
        convert(plain_run.checkpoint(MIDDLE), out, dtype=dtype, stage=stage, world_size=2)
        spec = Spec(name, stage=stage, dtype="bf16" if dtype else "fp32", per_device_batch=SAMPLES // 2, steps=STEPS)
        specs.append(spec.resumed(out, name, save_steps=STEPS))
    for name, groups in sorted(REGROUPED.items() & selected):
        out = convert(runs[name].checkpoint(MIDDLE), root / name / f"checkpoint-{MIDDLE}", groups=groups)
        specs.append(runs[name].spec.resumed(out, f"{name} to {groups}", groups=groups, save_steps=STEPS))
    return train(specs)


@pytest.mark.parametrize("name", TO_PLAIN)
def test_the_plain_trainer_goes_on_from_zero(runs: Runs, name: str, tmp_path: Path) -> None:
    out = convert(runs[name].checkpoint(MIDDLE), tmp_path / f"checkpoint-{MIDDLE}", stage=0, world_size=1)
    here = train_alone(tmp_path / "run", resume_from=out, bf16=True, **LIKE)
    assert_near(f"{name} to plain", here.losses, runs[name].losses, ROUNDING)


class LayerTrainer(LayerGroupsMixin, Trainer):  # type: ignore[misc]
    pass


def test_the_mixin_goes_on_with_layer_groups(plain_run: Alone, tmp_path: Path) -> None:
    out = convert(plain_run.checkpoint(MIDDLE), tmp_path / f"checkpoint-{MIDDLE}", groups="layer")
    here = train_alone(tmp_path / "run", resume_from=out, kind=LayerTrainer, **LIKE)
    assert_near("plain to layer", here.losses, plain_run.losses, REDUCTION)
    assert len(here.trainer.optimizer.param_groups) == 2 * LIKE["layers"] + 3


@pytest.mark.parametrize("name", long_but({"3 fp32", "2 bf16"}, FROM_PLAIN))
def test_deepspeed_goes_on_from_the_plain_trainer(resumed: dict[str, Run], plain_run: Alone, name: str) -> None:
    tolerance = ROUNDING if FROM_PLAIN[name][1] else REDUCTION
    assert_near(f"plain to {name}", resumed[name].losses, plain_run.losses, tolerance)


@pytest.mark.parametrize(("name", "groups"), long_but(SHORT_REGROUPED, REGROUPED.items()))
def test_stock_goes_on_with_other_param_groups(resumed: dict[str, Run], runs: Runs, name: str, groups: str) -> None:
    run = resumed[f"{name} to {groups}"]
    assert_near(run.spec.name, run.losses, runs[name].losses, NORM)
    assert len(run.echo["groups"]) == (2 if groups == "default" else 2 * run.spec.layers + (2 if run.spec.tied else 3))
