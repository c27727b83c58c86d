"""``llmtailor diff`` on checkpoints of every format, and how elements are compared: held against torch in fp64."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import llmtailor
from helpers.cases import examples
from helpers.checkpoints import edit, make_run, model_states, optim_states
from helpers.commands import call
from helpers.files import cut, edit_json
from helpers.states import DTYPES, raw
from llmtailor.cli.main import DIFFERENT
from llmtailor.model.roles import EXP_AVG, MASTER, WEIGHT, State
from llmtailor.verify.diff import Change, compare
from llmtailor.verify.values import BLOCK_ELEMENTS

# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("diff"), (90, 100))


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run / "checkpoint-100", tmp_path / "checkpoint-100")


def changed(found: llmtailor.Diff) -> set[State]:
    return {one.state for one in found.states if one.change.changed}


def test_a_copy_is_equal(run, copy):
    found = llmtailor.diff(run / "checkpoint-100", copy)
    assert found.is_equal
    assert {"weight", "master", "exp_avg", "exp_avg_sq"} == set(found.kinds)
    call("diff", run / "checkpoint-100", copy)


@pytest.mark.parametrize("options", [["--num-gpu", "5"], ["--stage", "2", "--num-gpu", "3"], ["--to", "universal"]])
def test_another_layout_is_equal(run, tmp_path, options):
    source, out = run / "checkpoint-100", tmp_path / "checkpoint-100"
    call("convert", source, out, *options)
    found = llmtailor.diff(source, out)
    assert not changed(found)
    assert not [one for one in found.training if one.matters]
    assert any(not one.matters for one in found.training)


def test_what_another_format_leaves_out_is_told(run, tmp_path):
    source, out = run / "checkpoint-100", tmp_path / "dcp"
    call("convert", source, out, "--to", "dcp")
    found = llmtailor.diff(source, out)
    assert not changed(found)
    assert {"trainer_state.json", "config.json"} <= {one.what for one in found.training if one.matters}


def change_a_moment(tree):
    tree["optimizer_state_dict"]["optimizer_state_dict"]["state"][0]["exp_avg"][0] += 1


def test_one_element_is_found(run, copy):
    edit(optim_states(copy), change_a_moment)
    found = llmtailor.diff(run / "checkpoint-100", copy)
    assert [state.kind for state in changed(found)] == [EXP_AVG]
    (one,) = (one for one in found.states if one.change.changed)
    assert (one.change.changed, one.change.largest) == (1, pytest.approx(1))
    assert not found.is_equal and not found.training


def test_two_steps_of_a_run_differ_where_expected(run):
    found = llmtailor.diff(run / "checkpoint-90", run / "checkpoint-100")
    assert found.steps == (90, 100)
    assert {"global step", "Adam step", "trainer_state.json: global_step"} <= {one.what for one in found.training}
    assert {MASTER, EXP_AVG, WEIGHT} <= {state.kind for state in changed(found)}


def test_a_hyperparameter_is_found(run, copy):
    def change(tree):
        for group in tree["optimizer_state_dict"]["optimizer_state_dict"]["param_groups"]:
            group["weight_decay"] = 0.5

    for rank in range(len([*optim_states(copy).parent.glob("*optim_states.pt")])):
        edit(optim_states(copy, rank), change)
    what = {one.what.split(" of ")[0] for one in llmtailor.diff(run / "checkpoint-100", copy).training}
    assert what == {"weight_decay"}


def test_random_states_and_files_are_compared(run, copy):
    path = copy / "rng_state_0.pth"
    state = torch.load(path, weights_only=False)
    state["cpu"][100] += 1
    torch.save(state, path)
    edit_json(copy / "config.json", lambda config: {**config, "rope_theta": 7})
    found = llmtailor.diff(run / "checkpoint-100", copy)
    assert sorted(one.what for one in found.training) == ["config.json", "rng_state_0.pth: cpu"]
    assert not changed(found)


def test_kinds_can_be_chosen(run):
    found = llmtailor.diff(run / "checkpoint-90", run / "checkpoint-100", kinds=["master"])
    assert found.kinds == ["master"]
    words = ("diff", run / "checkpoint-90", run / "checkpoint-100", "--kind")
    text = call(*words, "master", "--by", "tensor", "--top", "2", code=DIFFERENT).stdout
    assert "cosine" in text and "and " in text
    told = call(*words, "momentum", code=2).stderr
    assert "valid here" in told and "exp_avg_sq" in told


def test_a_copy_that_is_equal_in_some_kinds_is_not_called_exact(run, copy):
    edit(optim_states(copy), change_a_moment)
    text = call("diff", run / "checkpoint-100", copy, "--kind", "weight").stdout
    assert "equal in weight; other kinds of states were not compared" in text
    found = llmtailor.diff(run / "checkpoint-100", copy, ["weight"])
    assert (found.is_equal, found.chosen) == (True, ("weight",))
    call("diff", run / "checkpoint-100", copy, code=DIFFERENT)


def test_rows_are_sorted_by_their_change(run):
    words = ("diff", run / "checkpoint-90", run / "checkpoint-100", "--by", "tensor", "--kind", "master", "--json")
    rows = json.loads(call(*words, code=DIFFERENT).stdout)["states"]
    assert len(rows) == len({row["label"] for row in rows})
    text = call(*words[:-1], "--sort", "relative", "--top", "1", code=DIFFERENT).stdout
    most = max(rows, key=lambda row: row["relative"])
    assert most["label"] in text and f"{most['relative']:.2e}" in text
    assert sum(f"{row['label']} " in text for row in rows) == 1 and f"and {len(rows) - 1} more" in text


def test_the_heat_map_has_every_layer(run):
    text = call("diff", run / "checkpoint-90", run / "checkpoint-100", code=DIFFERENT).stdout
    head, *lines = text.partition("layers x modules\n")[2].splitlines()
    assert head.split()[0] == "layer" and "q_proj" in head
    layers = [int(line.split()[0]) for line in lines if line.split()[0].isdigit()]
    found = llmtailor.diff(run / "checkpoint-90", run / "checkpoint-100", kinds=["weight"])
    assert sorted(set(layers)) == sorted({one.layer for one in found.states if one.layer is not None})
    assert all(len(line) <= 120 for line in lines)


def test_a_partial_checkpoint_is_compared_as_far_as_it_goes(tmp_path):
    run = make_run(tmp_path / "run", (80, 90, 100, 110))
    full = shutil.copytree(run / "checkpoint-90", tmp_path / "checkpoint-90")
    call("thin", run, "--select", "odd", "--keep-full-last", "2", "--yes")
    (partial,) = (run / "partial").glob("*90")
    found = llmtailor.diff(full, partial)
    assert not changed(found)
    told = {one.what for one in found.training if one.matters}
    kinds = ("weight", "master", "exp_avg", "exp_avg_sq")
    assert told == {f"{kind} of embed_tokens, layers 0, 2, norm, lm_head" for kind in kinds}


@pytest.mark.parametrize("damage", [optim_states, model_states])
def test_a_damaged_checkpoint_is_refused(run, copy, damage):
    cut(damage(copy), 100)
    assert copy.name in call("diff", run / "checkpoint-100", copy, code=4).stderr


# --- elements ---------------------------------------------------------------------------------------------------------


def expected(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float, float, int]:
    """Relative change, largest change, cosine, changed elements: the slow obvious way."""
    one, two = a.double(), b.double()
    norms = one.norm() * two.norm()
    return (
        float((two - one).norm() / one.norm()),
        float((two - one).abs().max()),
        float((one @ two) / norms),
        int((a != b).sum()),
    )


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64"])
@settings(max_examples=examples(25, 100))
@given(seed=st.integers(0, 1 << 30), numel=st.sampled_from([1, 7, BLOCK_ELEMENTS, BLOCK_ELEMENTS + 3]))
def test_changes_are_those_of_torch(dtype, seed, numel):
    random = torch.Generator().manual_seed(seed)
    a = torch.randn(numel, generator=random).to(DTYPES[dtype])
    b = torch.where(torch.rand(numel, generator=random) < 0.5, a, a * 1.25 + 1)
    found = compare(raw(a), dtype, raw(b), dtype)
    relative, largest, cosine, changed = expected(a, b)
    assert found.relative == pytest.approx(relative, rel=1e-9)
    assert found.largest == pytest.approx(largest)
    assert found.cosine == pytest.approx(cosine, rel=1e-9)
    assert (found.numel, found.changed, found.not_finite) == (numel, changed, 0)


def test_tiny_moments_do_not_underflow():
    a, b = torch.full((5,), 1e-30), torch.full((5,), 2e-30)
    found = compare(raw(a), "F32", raw(b), "F32")
    assert found.relative == pytest.approx(1)
    assert found.cosine == pytest.approx(1)


def test_the_wider_dtype_is_rounded():
    master = torch.randn(100, generator=torch.Generator().manual_seed(0))
    weight = master.bfloat16()
    assert compare(raw(master), "F32", raw(weight), "BF16").changed == 0
    weight[3] += 1
    assert compare(raw(weight), "BF16", raw(master), "F32").changed == 1


def test_values_that_are_not_finite_are_counted_and_left_out():
    a = torch.tensor([1.0, float("nan"), 2.0, float("inf")])
    b = torch.tensor([1.0, float("nan"), 3.0, 4.0])
    found = compare(raw(a), "F32", raw(b), "F32")
    assert (found.changed, found.not_finite, found.largest) == (2, 2, 1.0)
    assert found.relative == pytest.approx(1 / np.sqrt(5))


def test_from_nothing_everything_is_infinitely_far():
    zeros, ones = torch.zeros(4), torch.ones(4)
    found = compare(raw(zeros), "F32", raw(ones), "F32")
    assert found.relative == float("inf")
    assert found.cosine is None


def test_a_sign_of_zero_is_a_change_without_distance():
    found = compare(raw(torch.tensor([0.0])), "F32", raw(torch.tensor([-0.0])), "F32")
    assert (found.changed, found.relative) == (1, 0.0)


def test_whole_numbers_are_only_compared_for_equality():
    found = compare(raw(torch.arange(6)), "I64", raw(torch.tensor([0, 1, 9, 3, 4, 5])), "I64")
    assert found == Change(numel=6, changed=1)
