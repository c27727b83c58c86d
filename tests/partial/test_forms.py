"""Composites of partial checkpoints in other forms, and what salvage makes of damaged ones."""

from __future__ import annotations

import shutil

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytestmark = pytest.mark.real

from safetensors.torch import load_file  # noqa: E402

import llmtailor  # noqa: E402
from helpers.commands import run_here  # noqa: E402
from llmtailor.formats.registry import index_checkpoint  # noqa: E402
from llmtailor.model.states import EXP_AVG, EXP_AVG_SQ, MASTER  # noqa: E402
from llmtailor.recipe.strategies import StrategyOptions  # noqa: E402
from llmtailor.runs.scan import recipe_for_run  # noqa: E402
from plain.composing import read  # noqa: E402
from salvage.damage import truncate  # noqa: E402


@pytest.mark.parametrize("name", ["z3", pytest.param("z3-mixtral", marks=pytest.mark.long)])
def test_without_deepspeed_the_weights_are_the_masters_by_the_params_own_names(trained, name, tmp_path):
    done = trained[name]
    made = {}
    for form, stage in (("zero", None), ("plain", 0)):
        recipe = recipe_for_run(done.folder, done.saves[-1], StrategyOptions("latest"))
        llmtailor.merge(recipe, tmp_path / form, llmtailor.Options(stage=stage))
        made[form] = index_checkpoint(tmp_path / form)
    states = [state for state in made["zero"].held if state.kind in (MASTER, EXP_AVG, EXP_AVG_SQ)]
    assert {state.param for state in states} == load_file(tmp_path / "plain/model.safetensors").keys()
    for state in states:
        zero, plain = (read(tmp_path / form, made[form].held[state]) for form in ("zero", "plain"))
        assert torch.equal(zero, plain), state


def test_salvage_takes_elements_of_saves_with_frozen_params(trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained["z1-extras"].folder, run)
    truncate(next((run / "partial" / f"step-{trained['z1-extras'].saves[-1]:08}").glob("rank-00000-*")))
    done = run_here("salvage", run, "--fragments", "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert llmtailor.verify_checkpoint(tmp_path / "out", deep=True).is_resumable
