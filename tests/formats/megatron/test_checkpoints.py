"""Megatron-core's checkpoints: read under Hugging Face names, written, and refused."""

from __future__ import annotations

import io
import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.commands import call
from helpers.composing import convert, merge
from helpers.states import read
from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.placement import Contiguous, Extent, StridedRuns
from llmtailor.errors import MismatchError, UnsupportedCheckpoint
from llmtailor.formats.registry import index_checkpoint, output_in
from llmtailor.model.roles import State
from llmtailor.runs.folder import RunFolder
from llmtailor.runs.scan import find_latest
from llmtailor.verify.verify import RESUMABLE, verify_checkpoint
from megatron_core.by_hand import Model, config, fuse, load, save

MODELS = {
    "llama": Model(),
    "tied": Model(is_tied=True),
    "by-layer": Model(is_stacked=False),
    "qwen2": Model("qwen2"),
    "qwen3": Model("qwen3"),
    "mixtral": Model("mixtral"),
}


def assert_has(index: CheckpointIndex, model: Model, kinds: str = "weight master exp_avg exp_avg_sq") -> None:
    states = model.states()
    assert index.params.keys() == model.shapes().keys()
    for kind in kinds.split():
        for name, value in states[kind].items():
            assert torch.equal(read(index.root, index.held[State(name, kind)]), value), (name, kind)


@pytest.mark.parametrize("name", MODELS)
def test_states_are_those_of_the_model(name, tmp_path):
    model = MODELS[name]
    verdict = verify_checkpoint(save(model, tmp_path / "x"), deep=True)
    assert verdict.level == RESUMABLE, verdict.findings
    index = verdict.index
    assert_has(index, model)
    assert [*index.params] == [*model.shapes()]
    assert (index.format, index.global_step, index.world_size, index.precision) == ("megatron", 3, 4, "BF16")
    assert dict(index.tied) == ({"lm_head.weight": "model.embed_tokens.weight"} if model.is_tied else {})
    decays = {name for name, shape in model.shapes().items() if len(shape) > 1}
    assert [set(group.params) for group in index.groups] == [decays, model.shapes().keys() - decays]
    assert [group.hyper["weight_decay"] for group in index.groups] == [0.1, 0.0]
    assert set(index.steps().values()) == {3.0}


@pytest.mark.parametrize("name", MODELS)
def test_a_copy_is_what_torch_loads_of_the_base(name, tmp_path):
    base = save(MODELS[name], tmp_path / "x")
    found, wanted = load(convert(base, tmp_path / "y", world_size=3)), load(base)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(found[key], value) if isinstance(value, torch.Tensor) else found[key] == value, key
    common = torch.load(tmp_path / "y" / "common.pt", weights_only=False)
    before = torch.load(base / "common.pt", weights_only=False)
    args = vars(before.pop("args"))
    del args["attention_backend"]  # a class of Megatron's is not written
    assert vars(common.pop("args")) == args
    assert common == before


@pytest.mark.parametrize(
    ("name", "to"),
    [
        ("llama", "dcp"),
        ("mixtral", "dcp"),
        ("qwen2", "fsdp"),
        ("tied", "trainer"),
        ("llama", "deepspeed"),
        ("qwen3", "dcp"),
    ],
)
def test_there_and_back(name, to, tmp_path):
    model = MODELS[name]
    base = save(model, tmp_path / "x")
    (base / "config.json").write_text(config(model))
    over = convert(base, tmp_path / "over", to=to)
    assert_has(index_checkpoint(over), model, "master exp_avg exp_avg_sq")
    (over / "config.json").write_text(config(model))
    back = convert(over, tmp_path / "back", to="megatron", dtype="BF16", world_size=3)
    assert_has(index_checkpoint(back), model)
    found = load(back)
    for kind, prefix in (("weight", ""), ("exp_avg", "optimizer.state.exp_avg.")):
        for key, value in fuse(model, model.states()[kind], 0.5).items():
            rows = 11 if key.startswith(("embedding", "output")) else None  # without padding
            assert torch.equal(found[prefix + key], value[:rows]), key
    groups = torch.load(back / "common.pt", weights_only=False)["optimizer"]["optimizer"]["param_groups"]
    assert [(one["wd_mult"], one["weight_decay"], one["step"]) for one in groups] == [(1.0, 0.1, 3.0), (0.0, 0.0, 3.0)]


def test_a_layer_of_another_save_and_the_padding_of_the_base(tmp_path):
    old, new = Model(step=3.0, seed=1), Model(step=5.0, seed=2)
    merge(save(new, tmp_path / "new"), tmp_path / "out", {"layers 1": save(old, tmp_path / "old")})
    index = index_checkpoint(tmp_path / "out")
    states = {kind: {**values} for kind, values in new.states().items()}
    for kind, values in old.states().items():
        states[kind] |= {name: value for name, value in values.items() if ".layers.1." in name}
        for name, value in states[kind].items():
            assert torch.equal(read(index.root, index.held[State(name, kind)]), value), (name, kind)
    assert torch.equal(load(tmp_path / "out")["output_layer.weight"][11:], torch.full((3, 6), 0.5).bfloat16())
    assert set(index.steps().values()) == {5.0}


def test_what_the_names_leave_open_is_asked_for(tmp_path):
    folder = save(Model(), tmp_path / "x", num_query_groups=None, vocab_size=None)
    with pytest.raises(UnsupportedCheckpoint) as caught:
        index_checkpoint(folder)
    assert [problem.fix for problem in caught.value.problems] == [
        "put the model's config.json (of Hugging Face) into the folder"
    ] * 2
    (folder / "config.json").write_text(config(Model()))
    assert_has(index_checkpoint(folder), Model())


def test_a_base_needs_the_number_of_key_heads(tmp_path):
    over = convert(save(Model(), tmp_path / "x"), tmp_path / "over", to="dcp")
    with pytest.raises(UnsupportedCheckpoint, match="key and value heads"):
        convert(over, tmp_path / "back", to="megatron")


def _by_bucket(folder: Path) -> None:
    common = torch.load(folder / "common.pt", weights_only=False)
    common["optimizer"]["param_state_sharding_type"] = "dp_reshardable"
    torch.save(common, folder / "common.pt")


def _zarr(folder: Path) -> None:
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))


def _one_more_group(folder: Path) -> None:
    common = torch.load(folder / "common.pt", weights_only=False)
    groups = common["optimizer"]["optimizer"]["param_groups"]
    groups.append(groups[0])
    torch.save(common, folder / "common.pt")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_by_bucket, "dp_reshardable.*--dist-ckpt-optim-fully-reshardable"),
        (_zarr, "zarr.*--ckpt-format torch_dist"),
        (_one_more_group, "do not list their params"),
    ],
)
def test_refused_by_name(damage, message, tmp_path):
    damage(folder := save(Model(), tmp_path / "x"))
    with pytest.raises(UnsupportedCheckpoint, match=f"(?s){message}"):
        index_checkpoint(folder)


def test_tensors_without_a_counterpart(tmp_path):
    folder = save(replace(Model(), is_stacked=False), tmp_path / "x")
    data = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(data.replace(b"mlp.linear_fc2.weight", b"mlp.linear_fcX.weight"))
    with pytest.raises(UnsupportedCheckpoint, match="linear_fcX"):
        index_checkpoint(folder)


def test_groups_that_differ_in_more_than_decay(tmp_path):
    over = convert(save(Model(), tmp_path / "x"), tmp_path / "over", to="trainer")
    (over / "config.json").write_text(config(Model()))
    tree = torch.load(over / "optimizer.pt", weights_only=False)
    names = tree["param_groups"][0]["lt_params"]
    first = {**tree["param_groups"][0], "params": [0], "lt_params": names[:1], "lr": 0.5}
    rest = {**tree["param_groups"][0], "params": tree["param_groups"][0]["params"][1:], "lt_params": names[1:]}
    tree["param_groups"] = [first, rest, *tree["param_groups"][1:]]
    torch.save(tree, over / "optimizer.pt")
    with pytest.raises(MismatchError, match="differ in lr"):
        convert(over, tmp_path / "back", to="megatron", dtype="BF16")


def test_selected_runs():
    place = StridedRuns(Contiguous(Extent("f", 100, 132), 4), (0, 2, 5), (1, 4))
    assert [(*one[:2], *one.extent[1:]) for one in place.cover(0, 5)] == [(0, 2, 104, 112), (2, 5, 116, 128)]
    assert [(*one[:2], *one.extent[1:]) for one in place.cover(1, 4)] == [(1, 2, 108, 112), (2, 4, 116, 124)]


def test_a_removed_data_file_is_reported(tmp_path):
    folder = save(Model(), tmp_path / "x")
    shutil.move(folder / "__0_1.distcp", tmp_path)
    verdict = verify_checkpoint(folder)
    assert any("__0_1.distcp" in f"{finding.where}" for finding in verdict.findings)


def test_a_run_of_iterations(tmp_path):
    """The newest is damaged, as after a save that was cut off; Megatron's tracker still names the one before it."""
    run = tmp_path / "run"
    models = {step: Model(step=step, seed=step) for step in (2, 3, 4)}
    for step, model in models.items():
        save(model, run / f"iter_{step:07}")
    (run / "latest_checkpointed_iteration.txt").write_text("3")
    (run / "iter_0000004" / ".metadata").unlink()
    assert [*RunFolder(run).full()] == [2, 3, 4]
    assert find_latest(run).path == run / "iter_0000003"
    parity = json.loads(call("merge", "--run", run, "--step", "base", "--strategy", "parity", "--json").stdout)
    assert (parity["out"], parity["global_step"]) == (str(run / "iter_0000003-merged"), 3)
    found = index_checkpoint(run / "iter_0000003-merged")
    for state, held in found.held.items():
        source = models[2 if ".layers.1." in state.param else 3].states()[state.kind]
        if state.param in source:
            assert torch.equal(read(found.root, held), source[state.param]), state
    shutil.rmtree(run / "iter_0000004")
    assert output_in(run, 4) == run / "iter_0000004"


def test_a_flipped_bit_in_an_object_that_stays_pickled(tmp_path):
    """Also one outside the records, which have checksums: in the zip's headers and directory"""
    folder = save(MODELS["llama"], tmp_path / "x")
    places = pickle.loads((folder / ".metadata").read_bytes()).storage_data
    place = next(one for index, one in places.items() if "rng_state" in index.fqn or "_extra_state" in index.fqn)
    path = folder / place.relative_path
    sound, harmful = path.read_bytes(), 0
    for at in range(place.offset, place.offset + place.length, 29):
        flipped = sound[:at] + bytes([sound[at] ^ 8]) + sound[at + 1 :]
        try:
            torch.load(io.BytesIO(flipped[place.offset : place.offset + place.length]), weights_only=False)
        except Exception:
            harmful += 1
            path.write_bytes(flipped)
            assert not verify_checkpoint(folder, deep=True).is_intact, at
    assert harmful > 5
