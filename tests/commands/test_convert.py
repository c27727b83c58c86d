"""Other world sizes, ZeRO stages and steps: what goes through any chain of conversions comes back unchanged."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import llmtailor
import oracle.any
from campaigns.fuzz import make_sound
from helpers.cases import diagonal, every, examples
from helpers.checkpoints import SMALL, make, make_run
from helpers.commands import call
from helpers.composing import convert
from helpers.states import read, same
from helpers.strategies import shapes
from llmtailor.checkpoint.optimizer import without_names
from llmtailor.formats.registry import index_checkpoint
from llmtailor.model.roles import MASTER
from llmtailor.verify.verify import RESUMABLE, verify_checkpoint
from oracle import zero3
from synthetic import pickled_as_deepspeed

MOMENTS = ("exp_avg", "exp_avg_sq")
RECIPE = "base_model: checkpoint-200\nparts:\n  - {from: checkpoint-100, select: [odd]}\n"


@pytest.mark.parametrize("stage", every(2, [1, 2, 3]))
def test_weights_of_another_dtype_are_rounded_once_from_the_masters(tmp_path, stage):
    """Also those of a composite whose weights are in a third dtype."""
    at = convert(make(tmp_path / "run", 100, shape=SMALL), tmp_path / "source", stage=stage)
    for number, dtype in enumerate([torch.float16, torch.float32, torch.bfloat16, torch.float16]):
        out = tmp_path / str(number)
        told = {torch.float16: "F16", torch.float32: "F32", torch.bfloat16: "BF16"}[dtype]
        convert(at, out, dtype=told)
        with pickled_as_deepspeed():
            masters = oracle.any.load(out).kind(MASTER)
        weights = load_file(out / "model.safetensors")
        assert masters
        assert not [name for name, master in masters.items() if zero3.differ(weights[name], master.to(dtype))]
        at = out


def load(checkpoint: Path) -> zero3.Snapshot:
    with pickled_as_deepspeed():
        snapshot = zero3.load(checkpoint)
    snapshot.rest["counters"].pop("global_samples", None)
    return snapshot


@st.composite
def chains(draw):
    shape = draw(shapes(max_layers=3))
    layout = {
        "shape": shape,
        "world_size": draw(st.integers(1, 4)),
        "groups": draw(st.sampled_from(["default", "layer"])),
        "sub_group_size": draw(st.sampled_from([10, 10**9])),
    }
    hop = st.tuples(st.integers(1, 3), st.integers(1, 5), st.sampled_from(["keep", "layer", "default"]))
    hops = draw(st.lists(hop, min_size=1, max_size=3))
    return layout, hops


@given(chains())
@settings(max_examples=examples(4, 25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_chain_of_stages_world_sizes_and_groups_leads_back(tmp_path_factory, case):
    layout, hops = case
    root = tmp_path_factory.mktemp("chain")
    source = at = make(root, 100, **layout)
    for number, (stage, world_size, groups) in enumerate(hops):
        at = convert(at, root / f"hop-{number}", stage=stage, world_size=world_size, groups=groups)
        manifest = json.loads((at / "llmtailor.json").read_text())
        names = {path.name for path in at.glob("global_step100/*")}
        assert len([name for name in names if name.endswith("optim_states.pt")]) == world_size
        assert ("mp_rank_00_model_states.pt" in names) == (stage < 3)
        assert manifest["world_size"] == world_size
    back = convert(at, root / "back", stage=3, world_size=layout["world_size"], groups=layout["groups"])
    zero3.assert_same(load(back), load(source))
    assert (source / "model.safetensors").read_bytes() == (back / "model.safetensors").read_bytes()
    shutil.rmtree(root)


@pytest.mark.parametrize("tied", [False, True])
def test_through_the_plain_trainers_form_and_back(tmp_path, tied):
    """Without DeepSpeed the weights are the masters; coming back, bf16 has to be said."""
    source = make(tmp_path, 100, shape=replace(SMALL, tied=tied))
    plain = convert(source, tmp_path / "plain", stage=0)
    assert not (plain / "latest").exists()
    weights = load_file(plain / "model.safetensors")
    masters = load(source).kind(MASTER)
    assert weights.keys() == masters.keys()
    assert all(torch.equal(weights[name], masters[name]) for name in masters)
    again = convert(plain, tmp_path / "again", groups="layer")
    two = convert(again, tmp_path / "two", dtype="BF16", world_size=3, stage=2, groups="default")
    back = load(convert(two, tmp_path / "back", world_size=2, stage=3))
    wanted = load(source)
    assert back.flat_ids == wanted.flat_ids
    assert back.steps == wanted.steps
    assert back.states.keys() == wanted.states.keys()
    assert all(torch.equal(back.states[state], tensor) for state, tensor in wanted.states.items())
    hyper = [without_names(group) for group in back.rest["param_groups"]]  # the plain form needs the names of params
    assert hyper == [without_names(group) for group in wanted.rest["param_groups"]]
    assert back.rest["scheduler"] == wanted.rest["scheduler"]


def test_plain_checkpoints_refuse_to_be_rounded(tmp_path):
    with pytest.raises(llmtailor.TailorError, match="lose what was trained"):
        convert(make(tmp_path, 100), tmp_path / "out", dtype="BF16", stage=0)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def two(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path, (100, 200))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def test_rebase_keeps_the_bias_corrected_moments(two):
    """Oracle: scale by hand, in fp64, those moments whose step is not their group's."""
    llmtailor.merge(two / "recipe.yaml", two / "base")
    llmtailor.merge(two / "recipe.yaml", two / "rebased", llmtailor.Options(step="rebase"))
    plain, rebased = load(two / "base"), load(two / "rebased")
    assert plain.steps == rebased.steps
    changed = 0
    for state, tensor in plain.states.items():
        odd = any(f"layers.{layer}." in state.param for layer in (1, 3))
        if odd and state.kind in MOMENTS:
            beta = {"exp_avg": 0.9, "exp_avg_sq": 0.999}[state.kind]
            wanted = (tensor.double() * ((1 - beta**200) / (1 - beta**100))).float()
            assert torch.equal(rebased.states[state], wanted)
            changed += not torch.equal(wanted, tensor)
            corrected = tensor.double() / (1 - beta**100)
            assert torch.allclose(rebased.states[state].double() / (1 - beta**200), corrected, rtol=1e-6, atol=0)
        else:
            assert torch.equal(rebased.states[state], tensor)
    assert changed > 10


def test_the_source_policy_refuses_what_it_cannot_do(two):
    assert "100, 200" in call("merge", "recipe.yaml", "out", "--step", "source", code=5).stderr
    assert not (two / "out").exists()


@pytest.mark.parametrize("groups", ["default", "layer"])
def test_layer_groups_keep_a_step_per_layer(tmp_path, groups):
    """Also if sources have the Trainer's two groups, and layer groups are made on the way."""
    make_run(tmp_path, (100, 200), groups=groups)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    llmtailor.merge(tmp_path / "recipe.yaml", tmp_path / "out", llmtailor.Options(groups="layer", step="source"))
    found, old, new = (load(tmp_path / name) for name in ("out", "checkpoint-100", "checkpoint-200"))
    assert len(found.flat_ids) == 2 * SMALL.num_layers + 3
    for name, step in found.steps.items():
        odd = any(f"layers.{layer}." in name for layer in (1, 3))
        assert step == (100 if odd else 200)
        for kind in (MASTER, *MOMENTS):
            source = old if odd else new
            assert torch.equal(found.kind(kind)[name], source.kind(kind)[name])
    assert len(found.rest["scheduler"]["base_lrs"]) == len(found.rest["param_groups"]) == 11


def test_convert_on_the_command_line(two):
    assert "no rule names" not in call("convert", "checkpoint-200", "--num-gpu", "3", "--stage", "2").stderr
    described = json.loads(call("inspect", "checkpoint-200-converted", "--json").stdout)
    assert (described["zero_stage"], described["world_size"], described["global_step"]) == (2, 3, 200)
    call("convert", "checkpoint-200-converted", "back", "--num-gpu", "2", "--stage", "3")
    zero3.assert_same(load(two / "back"), load(two / "checkpoint-200"))
    call("convert", "nowhere", code=4)
    call("convert", "checkpoint-200", "--stage", "4", code=2)


# --- other formats, of synthetic and of partial checkpoints -----------------------------------------------------------


@st.composite
def chains_of_formats(draw):
    layout = {
        "shape": draw(shapes(max_layers=2)),
        "world_size": draw(st.integers(1, 3)),
        "groups": draw(st.sampled_from(["default", "layer"])),
    }
    hop = st.tuples(st.sampled_from(["fsdp", "dcp", "deepspeed"]), st.integers(1, 5))
    return layout, draw(st.lists(hop, min_size=1, max_size=4))


@given(chains_of_formats())
@settings(max_examples=examples(2, 40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_chain_of_formats_leads_back(tmp_path_factory, case):
    layout, hops = case
    root = tmp_path_factory.mktemp("chain")
    source = at = make(root, 100, **layout)
    wanted = index_checkpoint(source)
    for number, (to, ranks) in enumerate([*hops, ("deepspeed", layout["world_size"])]):
        dtype = "BF16" if to == "deepspeed" and not index_checkpoint(at).form.has_masters else None
        out = root / f"hop-{number}"
        convert(at, out, dtype=dtype, to=to, world_size=ranks, stage=3 if to == "deepspeed" else None)
        verdict = verify_checkpoint(out, deep=True)
        assert verdict.level == RESUMABLE or all(one.severity != "error" for one in verdict.findings), verdict.findings
        found = index_checkpoint(out)
        assert (found.params, found.tied, found.steps()) == (wanted.params, wanted.tied, wanted.steps())
        assert found.group_params == wanted.group_params
        at = out
    before, after = load(source), load(at)
    assert after.steps == before.steps
    for state, tensor in before.states.items():
        if state.kind in (MASTER, *MOMENTS):
            assert torch.equal(after.states[state], tensor), state
        elif state.kind == "frozen":
            assert torch.equal(after.states[state], tensor.to(after.states[state].dtype)), state
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return make_sound(tmp_path_factory.mktemp("sound"))


@pytest.mark.parametrize(("to", "form"), diagonal(["dcp", "fsdp"], ("partial", "partial2", "partial0")))
def test_every_state_of_a_partial_checkpoint_is_there(sound, tmp_path, to, form):
    out = convert(sound[form], tmp_path / "out", to=to, world_size=3)
    before, after = index_checkpoint(sound[form]), index_checkpoint(out)
    assert verify_checkpoint(out, deep=True).level == RESUMABLE
    assert (after.params, after.tied, after.steps()) == (before.params, before.tied, before.steps())
    assert after.group_params == before.group_params and after.world_size == 3
    states = [state for state in before.held if state.kind in (MASTER, *MOMENTS)]
    assert len(states) == 3 * len(before.steps())
    for state in states:
        there = [read(index.root, index.held[state]).flatten() for index in (before, after)]
        assert same(*there), state


def test_other_groups_of_a_model_of_unknown_order(tmp_path):
    """Its params have names, so naming them is no way out."""
    convert(make(tmp_path, 100), tmp_path / "dcp", to="dcp")
    plain = convert(tmp_path / "dcp", tmp_path / "plain", to="trainer")
    (plain / "config.json").unlink(missing_ok=True)
    told = call("convert", plain, tmp_path / "out", "--groups", "layer", code=4).stderr
    assert "save_pretrained" in told and "lt_params" not in told
