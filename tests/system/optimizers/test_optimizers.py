"""Checkpoints of real optimizers compose, convert and resume to the last bit, whatever they keep.

The oracle takes each param's whole entry of ``optimizer.pt`` from the checkpoint that the recipe names, by torch alone.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers.cases import mostly_long
from helpers.commands import call
from helpers.composing import merge
from helpers.same import assert_same, plain
from helpers.states import in_8_bits
from llmtailor.param_groups import join_optimizers
from saving.loop import Loop
from trainings import killed
from trainings.alone import Alone, finished
from trainings.optimizers import ALL, Made

pytestmark = pytest.mark.real

SHORT = (
    "SGD", "NAdam", "Muon with Adam", "adafactor", "adamw_bnb_8bit", "ademamix", "adamw_torch_4bit",
    "schedule_free_adamw", "optimi Lion",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _eager(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function=None, **_: function or (lambda inner: inner))


class Saved:
    """What the files of a checkpoint hold, by name of the param, read by torch."""

    def __init__(self, root: Path, order: list[str] | None = None) -> None:
        tree = torch.load(root / "optimizer.pt", weights_only=False)
        self.groups = [
            {key: value for key, value in group.items() if key not in ("lt_params", "params")}
            for group in tree["param_groups"]
        ]
        listed = [name for group in tree["param_groups"] for name in group.get("lt_params", ())]
        self.order = listed or order or []
        self.states = {name: plain(tree["state"].get(number, {})) for number, name in enumerate(self.order)}
        self.weights = load_file(root / "model.safetensors")


def compose(folder: Path, base: Path, older: Path) -> Path:
    """Merge layer 0 and the embeddings of an older checkpoint into a base."""
    out = folder / "composed" / base.name
    merge(base, out, {"embed_tokens": older, 0: older})
    return out


def is_of_older(param: str) -> bool:
    return "embed_tokens" in param or ".layers.0." in param


@pytest.mark.parametrize("name", mostly_long(ALL, *SHORT))
def test_an_optimizer(name, tmp_path):
    run, saved = begin(tmp_path / "run", name), begin(tmp_path / "saved", name, {"save_steps": 1, "policy": "full"})
    run.train()
    saved.train()
    saved.finish()
    base, older = run.checkpoint(3), run.checkpoint(2)
    converted = tmp_path / "converted" / base.name
    for args in (("verify", base, "--deep"), ("convert", base, converted), ("verify", converted, "--deep")):
        call(*args)
    copy = Saved(converted)
    new, old = Saved(base, copy.order), Saved(older, copy.order)
    assert_same(copy.states, new.states)
    assert_same(copy.groups, new.groups)

    out = compose(tmp_path, base, older)
    composed = Saved(out)
    for param in composed.order:
        source = old if is_of_older(param) else new
        assert_same(composed.states[param], source.states[param], param)
        assert_same(composed.weights[param], source.weights[param], param)
    assert_same(composed.groups, new.groups)
    call("verify", out, "--deep")

    rebuilt = tmp_path / "rebuilt" / base.name
    call("merge", "--run", saved.folder, "--at", "3", rebuilt)
    assert_same(Saved(rebuilt).states, new.states)
    assert_same(Saved(rebuilt).weights, new.weights)
    resumed = begin(tmp_path / "resumed", name, {"save_steps": 9, "attest": "full", "on_mismatch": "stop"})
    resumed.train(rebuilt)
    assert resumed.losses == {4: run.losses[4]}


THINNED = (
    "adamw_bnb_8bit", "SGD momentum", "adafactor", "schedule_free_adamw", "Muon with Adam", "adamw_torch_4bit", "NAdam",
)  # fmt: skip


@pytest.mark.parametrize("name", mostly_long(THINNED, "adamw_bnb_8bit"))
def test_a_thinned_checkpoint_is_composed_again(name, tmp_path):
    run = begin(tmp_path / "run", name)
    run.train()
    kept = shutil.copytree(run.checkpoint(3), tmp_path / "kept")
    out = tmp_path / "out" / "checkpoint-3"
    call("thin", run.folder, "--strategy", "full", "--yes")
    call("merge", "--run", run.folder, "--at", 3, out)
    assert not run.checkpoint(3).exists()
    found = Saved(out)
    wanted = Saved(kept, found.order)
    assert found.order and wanted.states
    assert_same(found.states, wanted.states)
    assert_same(found.weights, wanted.weights)


CUT = (
    "Adam", "AdamW amsgrad", "RAdam", "Adamax", "Adadelta", "Rprop", "RMSprop centered", "SGD momentum", "adagrad",
    "adamw_torch_fused", "schedule_free_adamw", "optimi Lion", "optimi Adan", "lion_32bit", "rmsprop_bnb",
)  # fmt: skip
"""Optimizers of elementwise states in groups of one kind"""


@pytest.mark.parametrize("name", mostly_long(CUT, "Rprop"))
def test_conversions_to_layouts_that_cut_params_and_back(name, tmp_path):
    run = begin(tmp_path / "run", name)
    run.train()
    wanted = Saved(run.checkpoint(2))
    for options in (("--stage", 2, "--num-gpu", 2), ("--stage", 3, "--num-gpu", 3), ("--to", "fsdp", "--num-gpu", 2)):
        cut, back = (tmp_path / f"{options[1]}-{way}" / "checkpoint-2" for way in ("there", "back"))
        for args in ((run.checkpoint(2), cut, *options), (cut, back, "--to", "trainer")):
            call("convert", *args)
        found = Saved(back)
        assert_same({param: found.states[param] for param in wanted.order}, wanted.states)
        assert_same({param: found.weights[param] for param in wanted.weights}, wanted.weights)


def begin(folder: Path, name: str, attached: dict[str, Any] | None = None) -> Alone:
    """Return a training of four steps that saves each."""
    return killed.begin(folder, name, attached, max_steps=4, save_steps=1)


def as_flash(state: dict[str, Any]) -> dict[str, Any]:
    """What FlashAdamW of flashoptim 0.1.4 saves, which needs a GPU."""
    made: dict[str, Any] = {"step": state["step"].long()}
    for kind in ("exp_avg", "exp_avg_sq"):
        made[f"{kind}::quantized"] = (state[kind] * 1e4).to(torch.int8)
        made[f"{kind}::scales"] = torch.rand(-(-state[kind].numel() // 32)).half()
    return {**made, "error_bits": torch.rand_like(state["exp_avg"]).to(torch.bfloat16)}


def as_anyprecision(state: dict[str, Any]) -> dict[str, Any]:
    """What AnyPrecisionAdamW of torchdistx saves, with Kahan summation."""
    return {**state, "compensation": torch.rand_like(state["exp_avg"]).to(torch.bfloat16)}


LAID_OUT: dict[str, tuple[Any, dict[str, Any]]] = {
    "flash_adamw": (as_flash, {"quantize": True, "master_bytewidth": 4}),
    "adamw_anyprecision": (as_anyprecision, {"use_kahan_summation": True, "momentum_dtype": torch.bfloat16}),
}


@pytest.mark.parametrize("name", LAID_OUT)
def test_files_as_an_optimizer_lays_them_out(name, tmp_path):
    """Of packages that can't run here."""
    change, options = LAID_OUT[name]
    torch.manual_seed(0)
    for step in (2, 4):
        root = shutil.copytree(finished().checkpoint(step), tmp_path / f"checkpoint-{step}")
        tree = torch.load(root / "optimizer.pt")
        keys = ("params", "lr", "betas", "eps", "weight_decay", "initial_lr")
        groups = [{**{key: group[key] for key in keys}, **options} for group in tree["param_groups"]]
        states = {number: change(state) for number, state in tree["state"].items()}
        torch.save({"state": states, "param_groups": groups}, root / "optimizer.pt")
    base, older = tmp_path / "checkpoint-4", tmp_path / "checkpoint-2"
    out = compose(tmp_path, base, older)
    composed = Saved(out)
    new, old = Saved(base, composed.order), Saved(older, composed.order)
    for param in composed.order:
        assert_same(composed.states[param], (old if is_of_older(param) else new).states[param], param)
    call("verify", out, "--deep")


def test_what_is_a_part_of_the_weights_is_never_older_than_they_are(tmp_path):
    """Schedule-free optimizers: with moments in turn, those of half the parts are older than the weights, but ``z`` is
    not; and an average is refused."""
    name, in_turn = "schedule_free_adamw", {"save_steps": 1, "policy": "moments_in_turn:2"}
    run, saved = begin(tmp_path / "run", name), begin(tmp_path / "saved", name, in_turn)
    run.train()
    saved.train()
    saved.finish()
    out = tmp_path / "out" / "checkpoint-4"
    call("merge", "--run", saved.folder, out)
    found, newest = Saved(out), Saved(run.checkpoint(4), Saved(out).order)
    assert_same(found.weights, newest.weights)
    pairs = [(one, newest.states[param]) for param, one in found.states.items()]
    same = {kind: [torch.equal(one[kind], other[kind]) for one, other in pairs] for kind in ("z", "exp_avg_sq")}
    assert all(same["z"]) and not all(same["exp_avg_sq"])
    recipe = tmp_path / "average.yaml"
    shares = [{"model": str(run.checkpoint(step)), "parameters": {"weight": 1}} for step in (3, 4)]
    recipe.write_text(json.dumps({"merge_method": "linear", "base_model": str(run.checkpoint(4)), "models": shares}))
    assert "z may be a copy or a part of the weights" in call("merge", recipe, tmp_path / "average", code=5).stderr


@pytest.mark.parametrize("name", ["NAdam", "stable_adamw"])
def test_a_universal_checkpoint_has_no_place_for_single_values(name, tmp_path):
    run = begin(tmp_path / "run", name).train()
    told = call("convert", run.checkpoint(3), tmp_path / "out", "--to", "universal", code=4).stderr
    assert "the format has no place for that" in told


def test_joined_optimizers_may_have_other_states_of_the_same_class(tmp_path):
    def make(model: Any) -> Any:
        named = dict(model.named_parameters())
        embeddings = [param for name, param in named.items() if "embed" in name]
        others = [param for name, param in named.items() if "embed" not in name]
        kinds = [torch.optim.AdamW(embeddings, amsgrad=True), torch.optim.AdamW(others)]
        return join_optimizers(model, kinds)

    often = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    run = Alone(tmp_path / "run", layers=2, rows=64, **often, **Made(make=make).given())
    run.train()
    call("verify", run.checkpoint(1), "--deep")


def test_sparse_gradients_of_embeddings(tmp_path):
    """SparseAdam, joined with AdamW: saved in a loop, composed, and continued with the same states."""

    def make(model: Any) -> Any:
        model.model.embed_tokens.sparse = True
        named = dict(model.named_parameters())
        embedding = named.pop("model.embed_tokens.weight")
        kinds = [torch.optim.SparseAdam([embedding], lr=1e-2), torch.optim.AdamW(named.values(), lr=1e-2)]
        return join_optimizers(model, kinds)

    loop, resumed = (Loop(tmp_path / name, make=make, policy="full") for name in ("run", "resumed"))
    out = loop.trained(2).compose(2, tmp_path / "out" / "checkpoint-2")
    call("verify", out, "--deep")
    resumed.model.load_state_dict(load_file(out / "model.safetensors"))
    resumed.optimizer.load_state_dict(torch.load(out / "optimizer.pt"))
    resumed.step = 2
    for each in (loop, resumed):
        each.train(2)
    assert_same(resumed.truth, {4: loop.truth[4]})


def test_an_optimizer_without_states_is_said_to_have_none(tmp_path, caplog):
    caplog.set_level("INFO", logger="llmtailor")
    for name, said in (("SGD", True), ("SGD momentum", False)):
        caplog.clear()
        begin(tmp_path / name, name, {"save_steps": 4}).train().finish()
        assert ("the optimizer keeps no states of the params" in caplog.text) == said


ROUNDED = (
    "Adam", "AdamW amsgrad", "CAME", "Muon beside AdamW", "Muon with Adam", "NAdam", "RAdam", "adamw_torch",
    "adamw_torch_4bit", "adamw_torch_8bit", "adamw_torch_fused", "optimi AdamW", "optimi Adan", "stable_adamw",
    "torchao fp8",
)  # fmt: skip
"""Those of which the default policy rounds something: the table in docs/optimizers.md"""


@pytest.mark.parametrize("name", mostly_long(ALL, "SGD", "NAdam", "adafactor", "optimi Lion"))
def test_the_default_policy_rounds_adams_two_moments_and_nothing_else(name, tmp_path):
    run, saved = begin(tmp_path / "run", name), begin(tmp_path / "saved", name, {"save_steps": 1})
    run.train()
    saved.train()
    saved.finish()
    out = tmp_path / "out" / "checkpoint-3"
    call("merge", "--run", saved.folder, "--at", "3", out)
    found, exact = Saved(out), Saved(run.checkpoint(3), Saved(out).order)
    assert_same(found.weights, exact.weights)
    rounded = set()
    for param, states in exact.states.items():
        pair = [states.get(kind) for kind in ("exp_avg", "exp_avg_sq")]
        is_adams = all(isinstance(one, torch.Tensor) and one.shape == exact.weights[param].shape for one in pair)
        for kind, value in states.items():
            is_rounded = is_adams and kind in ("exp_avg", "exp_avg_sq") and value.dtype == torch.float32
            rounded |= {kind} if is_rounded else set()
            assert_same(found.states[param][kind], in_8_bits(value, kind) if is_rounded else value, param)
    assert bool(rounded) == (name in ROUNDED)
    call("verify", out, "--deep")
    begin(tmp_path / "resumed", name, {"save_steps": 9, "attest": "full", "on_mismatch": "stop"}).train(out)
