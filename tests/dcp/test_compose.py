"""Composites of checkpoints of several frameworks."""

from __future__ import annotations

import shutil
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import llmtailor
import oracle.any
from helpers.cases import mostly_long
from helpers.composing import convert, merge, recipe
from helpers.states import assert_holds, assert_same_held, held_by, of_snapshot
from llmtailor.containers.dcp import lay_out_metadata, read_metadata
from llmtailor.errors import MismatchError
from llmtailor.formats.registry import index_checkpoint
from llmtailor.verify.verify import RESUMABLE, verify_checkpoint


def is_odd(name: str) -> bool:
    return ".layers.1." in name


def mix(even: dict[str, Any], odd: dict[str, Any]) -> dict[str, Any]:
    """What a composite holds: odd layers from one training, everything else from another."""
    return {
        kind: {name: copy((odd if is_odd(name) else even)[kind][name]) for name in even[kind]}
        for kind in ("weights", "states")
    }


def compose(base: Path, odd: Path, out: Path, **options: Any) -> Path:
    merge(base, out, {"odd": odd}, **options)
    verdict = verify_checkpoint(out, deep=True)
    assert verdict.level == RESUMABLE, verdict.findings
    return out


@pytest.fixture
def mixed(runs):
    """Even layers of an FSDP2 run at step 2, odd ones of a DeepSpeed run at step 4"""
    fsdp, deepspeed = runs.checkpoint("trainer"), runs.checkpoint("llama", 4)
    return fsdp, deepspeed, held_by(runs["trainer"], 2), held_by(runs["llama"], 4)


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
        assert_same_held(of_snapshot(oracle.any.load(out)), wanted)
    else:
        index = index_checkpoint(out)
        hyper = [dict(group.hyper) for group in index.groups]
        assert_holds(index, {**wanted, "groups": hyper})
        assert sorted({one.step for one in index.sub_groups}) == [2, 4]


def test_odd_layers_from_fsdp_even_ones_from_deepspeed(mixed, tmp_path):
    """The base decides the format; its groups are the Trainer's two, so one step has to do for both."""
    fsdp, deepspeed, odd, even = mixed
    out = compose(deepspeed, fsdp, tmp_path / "checkpoint-4")
    found, wanted = of_snapshot(oracle.any.load(out)), mix(even, odd)
    for name, kinds in wanted["states"].items():
        assert float(found["states"][name].pop("step")) == 4
        kinds.pop("step")
    assert_same_held(found, wanted)


@pytest.mark.parametrize("name", mostly_long(["titan", "loop", "hf", "trainer", "columns"], "titan"))
def test_a_composite_of_two_steps_keeps_the_step_of_each_param(runs, tmp_path, name):
    """Adam's step is stored per param, in both styles of options."""
    live = runs[name].held
    out = compose(runs.checkpoint(name, 4), runs.checkpoint(name, 2), tmp_path / "out")
    assert_holds(index_checkpoint(out), {**mix(live[4], live[2]), "groups": live[4]["groups"]})


def test_torchtitans_other_values_are_carried(runs, tmp_path):
    import torch.distributed.checkpoint as dcp

    out = compose(runs.checkpoint("titan", 4), runs.checkpoint("titan", 2), tmp_path / "step-4", world_size=3)
    states = {"train_state": {"step": torch.zeros((), dtype=torch.int32)}, "lr_scheduler": {"last_epoch": 0}}
    dcp.load(states, checkpoint_id=out, no_dist=True)
    assert int(states["train_state"]["step"]) == 4
    assert states["lr_scheduler"]["last_epoch"] == 4


def test_a_tensor_in_a_schedulers_state_stays_in_it(runs, tmp_path):
    """As a tensor of its own in the folder, a later reader would not find it in the scheduler's state."""
    there, again, back = tmp_path / "there", tmp_path / "again", tmp_path / "back"
    source = shutil.copytree(runs.checkpoint("trainer"), tmp_path / runs.checkpoint("trainer").name)
    rates = torch.tensor([0.5, 2.0])
    torch.save({**torch.load(source / "scheduler.pt"), "rates": rates}, source / "scheduler.pt")
    convert(source, there, to="dcp")
    convert(there, again, world_size=3)
    convert(again, back, to="fsdp")
    for folder in (there, again):
        entries = read_metadata(folder, ".metadata", "x")
        assert not entries["lr_scheduler.rates"].is_tensor
        assert all(entry.is_tensor for key, entry in entries.items() if key.endswith(".step"))
    assert torch.equal(torch.load(back / "scheduler.pt")["rates"], rates)


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
def test_what_has_no_counterpart_is_said(runs, tmp_path, name, to, told):
    source = runs.checkpoint(name)
    notices = llmtailor.plan_merge(recipe(source), tmp_path / "out", llmtailor.Options(to=to)).report.notices
    assert all(any(each in notice.what for notice in notices) for each in told), notices
    assert all(notice.fix for notice in notices)


@pytest.mark.parametrize(
    ("name", "told", "dtype", "options"),
    [
        ("titan", "not param groups", None, {"groups": "layer"}),
        ("loop", "has no ZeRO stages", None, {"to": "dcp", "stage": 3}),
        ("loop", "lose what was trained", "BF16", {"to": "dcp"}),
    ],
)
def test_what_a_format_does_not_have_is_refused(runs, tmp_path, name, told, dtype, options):
    with pytest.raises(MismatchError, match=told):
        convert(runs.checkpoint(name), tmp_path / "out", dtype=dtype, **options)


def test_buffers_are_known_from_the_other_source(runs, tmp_path):
    """As a training saves them, without llmtailor's list"""
    source, there = runs["llama-extras-layer"].checkpoint(4), tmp_path / "there"
    convert(source, there, to="dcp")
    entries = read_metadata(there, ".metadata", "x")
    assert entries.pop("llmtailor.buffers")
    (there / ".metadata").write_bytes(lay_out_metadata(".metadata", entries).pieces[0].data)
    (there / "llmtailor.json").unlink()
    assert index_checkpoint(there).params != index_checkpoint(source).params
    for base, other in ((there, source), (source, there)):
        out = tmp_path / f"on-{base.name}"
        merge(base, out, {"odd": other}, **({"to": "deepspeed", "stage": 3} if base == source else {}))
        assert index_checkpoint(out).params == index_checkpoint(source).params


@pytest.mark.parametrize("to", mostly_long(["dcp", "fsdp"], "fsdp"))
def test_buffers_and_frozen_params_survive_the_way_through(runs, tmp_path, to):
    """A DCP folder does not tell them from each other; llmtailor's own lists the buffers."""
    source, there, back = runs["llama-extras-layer"].checkpoint(4), tmp_path / "there", tmp_path / "back"
    convert(source, there, to=to, world_size=3)
    assert verify_checkpoint(there, deep=True).level == RESUMABLE
    convert(there, back, dtype="BF16", to="deepspeed", world_size=2, stage=3)
    first, last = oracle.any.load(source), oracle.any.load(back)
    assert index_checkpoint(there).params == index_checkpoint(source).params
    assert first.names("buffer") == last.names("buffer") and first.names("frozen") == last.names("frozen")
    for state, tensor in first.states.items():
        if state.kind == "buffer":  # all ranks resume with rank 0's
            assert torch.equal(last.states[state], tensor[:1].expand_as(tensor)), state
        elif state.kind != "weight":
            assert torch.equal(last.states[state], tensor), state
