"""On file systems with reflinks, a partial checkpoint shares blocks with the full one that it replaces."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from helpers.cases import mostly_long
from helpers.commands import run_here
from helpers.files import TOLD, contents
from llmtailor.checkpoint import layout
from llmtailor.formats.partial.json_trees import PADDING
from llmtailor.formats.registry import index_checkpoint
from llmtailor.runs import thin as service
from llmtailor.runs.prune import ThinOptions
from llmtailor.runs.thin_plan import plan_thinning
from synthetic import SHAPES
from thin.scene import call, compose, make_run

STEPS = (100, 200)
SHAPE = replace(SHAPES["tiny"], num_layers=2)
OPTIONS = ThinOptions(1, "parity")


def a_run(root: Path, form: str | None = None) -> Path:
    return make_run(root, STEPS, form, shape=SHAPE)


@pytest.mark.parametrize("form", mostly_long([None, "fsdp"], "fsdp"))
def test_nearly_all_is_shared_and_every_reader_sees_the_same(form, tmp_path, monkeypatch, copied, small_limits):
    original = a_run(tmp_path / "original", form)
    runs = {}
    for name in ("padded", "plain"):
        run = Path(shutil.copytree(original, tmp_path / name))
        (run / "partial").mkdir()
        if name == "plain":
            monkeypatch.setattr(layout, "MIN_PADDED_BYTES", 1 << 60)
        plan = plan_thinning(run, OPTIONS)
        plans = [action.conversion.plan for action in plan.actions if action.conversion]
        sizes = [sum(getattr(one, what) for one in plans) for what in ("shareable_bytes", "num_bytes")]
        runs[name] = run, service.thin(plan, clone="auto"), *sizes
    (padded, moved, shareable, num_bytes), (plain, less, *_) = runs.values()
    assert moved.cloned_bytes == shareable > 2 * less.cloned_bytes
    assert form == "fsdp" or shareable > 0.5 * num_bytes  # of FSDP, many tensors are shorter than a block here
    for step in STEPS[:1]:
        one, other = (run / f"partial/step-{step:08}" for run in (padded, plain))
        assert run_here("verify", one, "--deep").returncode == 0
        for path in sorted(one.glob("rank-*")):
            mine, theirs = load_file(path), load_file(other / path.name)
            own = {key for key in mine if not key.startswith(PADDING)}
            trees = {key for key in own if key.startswith("tree/")}
            assert own - trees == {key for key in theirs if not key.startswith(("tree/", PADDING))}
            assert all(mine[key].equal(theirs[key]) for key in own - trees)
        outs = [compose(run, step, tmp_path / f"{run.name}-{step}") for run in (padded, plain)]
        first, second = map(index_checkpoint, outs)
        assert first.steps() == second.steps() and first.held.keys() == second.held.keys()
        if form is None:  # the files of DCP folders are never padded, so they are the same
            assert contents(outs[0], *TOLD).keys() == contents(outs[1], *TOLD).keys()
        else:
            assert contents(outs[0], *TOLD) == contents(outs[1], *TOLD)


def test_where_nothing_can_be_shared(tmp_path, small_limits):
    """As on the ext4 of most machines: --clone require fails and changes nothing, never copies."""
    run = a_run(tmp_path / "run")
    done = run_here("thin", run, "--strategy", "full", "--clone", "require", "--yes")
    if done.returncode == 0:
        pytest.skip("the file system here has reflinks")
    assert done.returncode == 8 and "can't be shared" in done.stderr
    assert sorted(path.name for path in run.glob("checkpoint-*")) == [f"checkpoint-{step}" for step in STEPS]
    assert not [*run.glob("partial/*step*")]
    assert call("thin", run, "--strategy", "full", "--clone", "never", "--yes")["freed_bytes"] > 0
