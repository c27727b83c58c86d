"""Composites of checkpoints of several frameworks."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import llmtailor  # noqa: E402
import oracle.any  # noqa: E402
from helpers.cases import mostly_long  # noqa: E402
from helpers.states import (  # noqa: E402
    assert_holds,
    assert_same_held,
    of_snapshot,
)
from llmtailor.containers.dcp import lay_out_metadata, read_metadata  # noqa: E402
from llmtailor.errors import MismatchError  # noqa: E402
from llmtailor.formats.registry import index_checkpoint  # noqa: E402
from llmtailor.recipe import Recipe, Select  # noqa: E402
from llmtailor.verify.verify import RESUMABLE, verify_checkpoint  # noqa: E402


def long(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.long) for name in names]


def is_odd(name: str) -> bool:
    return ".layers.1." in name


def mix(even: dict[str, Any], odd: dict[str, Any]) -> dict[str, Any]:
    """What a composite holds: odd layers from one training, everything else from another."""
    return {
        kind: {name: copy((odd if is_odd(name) else even)[kind][name]) for name in even[kind]}
        for kind in ("weights", "states")
    }


def compose(base: Path, odd: Path, out: Path, **options: Any) -> Path:
    recipe = Recipe("x", "", base, (Select(odd, ("odd",), "x"),), options.pop("dtype", None), None)
    llmtailor.merge(recipe, out, llmtailor.Options(**options))
    verdict = verify_checkpoint(out, deep=True)
    assert verdict.level == RESUMABLE, verdict.findings
    return out


def of_deepspeed(checkpoint: Path) -> dict[str, Any]:
    return of_snapshot(oracle.any.load(checkpoint))


@pytest.fixture
def mixed(trained, runs):
    """Even layers of an FSDP2 run at step 2, odd ones of a DeepSpeed run at step 4"""
    fsdp, deepspeed = trained.checkpoint("trainer"), runs["llama"].checkpoint(4)
    return fsdp, deepspeed, trained["trainer"].held[2], of_deepspeed(deepspeed)


@pytest.mark.parametrize(
    ("to", "ranks"),
    [
        ("fsdp", 3),
        ("deepspeed", 2),
        pytest.param("dcp", 2, marks=pytest.mark.long),
        pytest.param("trainer", 1, marks=pytest.mark.long),
    ],
)
def test_odd_layers_from_deepspeed_even_ones_from_fsdp(mixed, tmp_path, to, ranks):
    fsdp, deepspeed, even, odd = mixed
    out = compose(fsdp, deepspeed, tmp_path / "checkpoint-2", to=to, world_size=ranks, groups="layer")
    wanted = mix(even, odd)
    if to == "deepspeed":
        assert_same_held(of_deepspeed(out), wanted)
    else:
        index = index_checkpoint(out)
        hyper = [dict(group.hyper) for group in index.groups]
        assert_holds(index, {**wanted, "groups": hyper})
        assert sorted({one.step for one in index.sub_groups}) == [2, 4]


def test_odd_layers_from_fsdp_even_ones_from_deepspeed(mixed, tmp_path):
    """The base decides the format; its groups are the Trainer's two, so one step has to do for both."""
    fsdp, deepspeed, odd, even = mixed
    out = compose(deepspeed, fsdp, tmp_path / "checkpoint-4")
    found, wanted = of_deepspeed(out), mix(even, odd)
    for name, kinds in wanted["states"].items():
        assert float(found["states"][name].pop("step")) == 4
        kinds.pop("step")
    assert_same_held(found, wanted)


@pytest.mark.parametrize("name", ["titan", *long("loop", "hf", "trainer", "columns")])
def test_a_composite_of_two_steps_keeps_the_step_of_each_param(trained, tmp_path, name):
    """Adam's step is stored per param, in both styles of options."""
    live = trained[name].held
    out = compose(trained.checkpoint(name, 4), trained.checkpoint(name, 2), tmp_path / "out")
    assert_holds(index_checkpoint(out), {**mix(live[4], live[2]), "groups": live[4]["groups"]})


def test_torchtitans_other_values_are_carried(trained, tmp_path):
    import torch.distributed.checkpoint as dcp

    out = compose(trained.checkpoint("titan", 4), trained.checkpoint("titan", 2), tmp_path / "step-4", world_size=3)
    states = {"train_state": {"step": torch.zeros((), dtype=torch.int32)}, "lr_scheduler": {"last_epoch": 0}}
    dcp.load(states, checkpoint_id=out, no_dist=True)
    assert int(states["train_state"]["step"]) == 4
    assert states["lr_scheduler"]["last_epoch"] == 4


@pytest.mark.parametrize(
    ("name", "to", "told"),
    [
        ("titan", "fsdp", ["its values under train_state", "no trainer_state.json"]),
        ("titan", "deepspeed", ["train in F32", "its values under train_state"]),
        ("loop", "trainer", ["scheduler.pt is made for step 2", "no trainer_state.json"]),
        ("trainer", "dcp", ["trainer_state.json, config and the like have no place"]),
        ("llama", "fsdp", ["loss scale, counters and ds_config are left out"]),
    ],
)
def test_what_has_no_counterpart_is_said(trained, runs, tmp_path, name, to, told):
    source = runs[name].checkpoint(2) if name == "llama" else trained.checkpoint(name)
    recipe = Recipe("x", "", source, (), None, None)
    notices = llmtailor.plan_merge(recipe, tmp_path / "out", llmtailor.Options(to=to)).report.notices
    assert all(any(each in notice.what for notice in notices) for each in told), notices
    assert all(notice.fix for notice in notices)


def test_groups_can_not_be_rebuilt_where_there_are_none(trained, tmp_path):
    with pytest.raises(MismatchError, match="not param groups"):
        recipe = Recipe("x", "", trained.checkpoint("titan"), (), None, None)
        llmtailor.merge(recipe, tmp_path / "out", llmtailor.Options(groups="layer"))


def test_a_stage_is_deepspeeds(trained, tmp_path):
    recipe = Recipe("x", "", trained.checkpoint("loop"), (), None, None)
    with pytest.raises(MismatchError, match="has no ZeRO stages"):
        llmtailor.merge(recipe, tmp_path / "out", llmtailor.Options(to="dcp", stage=3))
    with pytest.raises(MismatchError, match="lose what was trained"):
        llmtailor.merge(replace(recipe, dtype="BF16"), tmp_path / "out", llmtailor.Options(to="dcp"))


def test_buffers_are_known_from_the_other_source(runs, tmp_path):
    """As a training saves them, without llmtailor's list"""
    source, there = runs["llama-extras-layer"].checkpoint(4), tmp_path / "there"
    llmtailor.merge(Recipe("x", "", source, (), None, None), there, llmtailor.Options(to="dcp"))
    entries = read_metadata(there, ".metadata", "x")
    assert entries.pop("llmtailor.buffers")
    (there / ".metadata").write_bytes(lay_out_metadata(".metadata", entries).pieces[0].data)
    (there / "llmtailor.json").unlink()
    assert index_checkpoint(there).params != index_checkpoint(source).params
    for base, other in ((there, source), (source, there)):
        out = tmp_path / f"on-{base.name}"
        recipe = Recipe("x", "", base, (Select(other, ("odd",), "x"),), None, None)
        llmtailor.merge(recipe, out, llmtailor.Options(to="deepspeed", stage=3) if base == source else None)
        assert index_checkpoint(out).params == index_checkpoint(source).params


@pytest.mark.parametrize("to", mostly_long(["dcp", "fsdp"], "fsdp"))
def test_buffers_and_frozen_params_survive_the_way_through(runs, tmp_path, to):
    """A DCP folder does not tell them from each other; llmtailor's own lists the buffers."""
    source, there, back = runs["llama-extras-layer"].checkpoint(4), tmp_path / "there", tmp_path / "back"
    llmtailor.merge(Recipe("x", "", source, (), None, None), there, llmtailor.Options(to=to, world_size=3))
    assert verify_checkpoint(there, deep=True).level == RESUMABLE
    options = llmtailor.Options(to="deepspeed", world_size=2, stage=3)
    llmtailor.merge(Recipe("x", "", there, (), "BF16", None), back, options)
    first, last = oracle.any.load(source), oracle.any.load(back)
    assert index_checkpoint(there).params == index_checkpoint(source).params
    assert first.names("buffer") == last.names("buffer") and first.names("frozen") == last.names("frozen")
    for state, tensor in first.states.items():
        if state.kind == "buffer":  # all ranks resume with rank 0's
            assert torch.equal(last.states[state], tensor[:1].expand_as(tensor)), state
        elif state.kind != "weight":
            assert torch.equal(last.states[state], tensor), state
