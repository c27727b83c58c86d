"""Experts as parts: what a run saves, composes, keeps and salvages, held against copies of the live tensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import llmtailor
from helpers.commands import call, run_here
from helpers.files import edit_json
from llmtailor.errors import SourceError
from llmtailor.formats.registry import index_checkpoint
from llmtailor.recipe import Recipe
from saving.loop import Loop, check_states, fold, manifests, read_states

NUM_LAYERS, NUM_EXPERTS = 3, 4
BY_TURNS = "round_robin:5"
SHARES = ("non-expert", *(f"expert {number}" for number in range(NUM_EXPERTS)))
SHARES_OF_ALL = [f"layer {number} {share}" for number in range(NUM_LAYERS) for share in SHARES]
ALL = ["embed_tokens", *SHARES_OF_ALL, "norm", "lm_head"]


def small(run: Path, policy: str = BY_TURNS, **options: object) -> Loop:
    loop = Loop(run, hidden=16, layers=NUM_LAYERS, num_experts=NUM_EXPERTS, policy=policy, **options)
    return loop.start()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A base at step 2, and a fifth of the parts at each of steps 4 to 12. Never write into its folder."""
    loop = small(tmp_path_factory.mktemp("experts") / "run", experts="parts")
    loop.make_saves(6, 2)
    loop.saver.close()
    return loop


@pytest.fixture
def copied(trained, tmp_path):
    with trained.copied(tmp_path / "run") as copy:
        yield copy


def test_saves_hold_single_experts_and_the_rest_of_a_layer(trained):
    assert trained.parts(2) == ALL
    later = [trained.parts(step) for step in (4, 6, 8, 10, 12)]
    assert sorted(part for parts in later for part in parts) == sorted(ALL)
    assert any({"layer 0 expert 1"} <= {*parts} and "layer 0 expert 3" not in parts for parts in later)
    base, *sizes = (
        sum(path.stat().st_size for path in (trained.run / "partial" / f"step-{step:08}").glob("rank-*"))
        for step in range(2, 14, 2)
    )
    assert max(sizes) < base / 2


def test_the_recipe_of_a_run_says_the_same(trained, tmp_path):
    direct = trained.compose(12, tmp_path / "direct")
    call("recipe", trained.run, "-o", tmp_path / "recipe.yaml")
    llmtailor.merge(tmp_path / "recipe.yaml", tmp_path / "out")
    for name in ("model.safetensors", "optimizer.pt"):
        assert (tmp_path / "out" / name).read_bytes() == (direct / name).read_bytes()
    explained = call("recipe", "--explain", tmp_path / "recipe.yaml")
    assert "expert" in explained.stdout
    (tmp_path / "again.yaml").write_text(explained.stdout)
    llmtailor.merge(tmp_path / "again.yaml", tmp_path / "again")
    assert (tmp_path / "again/optimizer.pt").read_bytes() == (direct / "optimizer.pt").read_bytes()


def test_a_recipe_selects_experts_of_complete_checkpoints(trained, tmp_path):
    old, new = (trained.compose(at, tmp_path / str(at)) for at in (2, 12))
    (tmp_path / "recipe.yaml").write_text(
        f"base_model: {new}\nparts: [{{from: {old}, select: [layers 0-1 expert 2, '*.2.mlp.experts.3.*']}}]\n"
    )
    llmtailor.merge(tmp_path / "recipe.yaml", tmp_path / "out")
    wanted, before = trained.wanted(12), trained.wanted(2)
    for layer, expert in ((0, 2), (1, 2), (2, 3)):
        for key in (one for one in wanted if f".layers.{layer}.mlp.experts." in one[0]):
            wanted[key][expert] = before[key][expert]
    check_states(tmp_path / "out", wanted)
    rows = json.loads((tmp_path / "out/llmtailor.json").read_text())["parts"]
    assert {row["part"] for row in rows if row["step"] == 2} >= {"layer 0 expert 2", "layer 2 expert 3"}
    assert all(row["is_whole"] for row in rows)
    total = sum((tmp_path / "out" / name).stat().st_size for name in ("model.safetensors", "optimizer.pt"))
    assert 0.9 * total < sum(row["num_bytes"] for row in rows) < total
    call("verify", "--deep", tmp_path / "out")


@pytest.mark.parametrize("options", [{}, {"to": "dcp"}], ids=["again", "converted"])
def test_a_composite_of_a_composite_keeps_the_step_of_every_expert(trained, options, tmp_path):
    first = trained.compose(12, tmp_path / "first")
    llmtailor.merge(Recipe(name="again", base=first), tmp_path / "out", llmtailor.Options(**options))
    steps = steps_of(tmp_path / "out")
    assert steps == steps_of(first)
    assert {steps[f"layer 0 {share}"] for share in SHARES} == {4, 6}


def steps_of(composite: Path) -> dict[str, int]:
    rows = json.loads((composite / "llmtailor.json").read_text())["parts"]
    return {row["part"]: row["step"] for row in rows}


def test_with_rebase_each_expert_keeps_its_bias_corrected_moments(trained, tmp_path):
    found = read_states(trained.compose(12, tmp_path / "out", step="rebase"))
    newest = {part["part"]: at for at, made in manifests([trained.run]).items() for part in made["parts"]}
    seen = set()
    for (name, _), wanted in ((key, wanted) for key, wanted in trained.wanted(12).items() if key[1] == "exp_avg"):
        for expert in range(NUM_EXPERTS if ".experts." in name else 0):
            step, at = float(found[name, "step"]), newest[f"layer {name.split('.')[2]} expert {expert}"]
            corrected = found[name, "exp_avg"][expert] / (1 - 0.9**step)
            assert torch.allclose(corrected, wanted[expert] / (1 - 0.9**at), rtol=1e-5, atol=1e-12)
            seen.add(step - at)
    assert len(seen) > 1


def test_commands_tell_experts_apart_only_where_they_differ(trained, tmp_path):
    step = trained.run / "partial" / "step-00000006"
    held = [part for part in trained.parts(6) if part.startswith("layer")]
    inspected = json.loads(run_here("inspect", step, "--json").stdout)
    assert {row["part"] for row in inspected["parts"] if row["held"]} == {*held}
    assert "layer 2" in {row["part"] for row in inspected["parts"]}  # of which the save holds nothing
    manifested = {part["part"]: part["num_bytes"] for part in trained.manifest(6)["parts"]}
    assert {row["part"]: row["num_bytes"] for row in inspected["parts"] if row["held"]} == manifested
    assert "intact" in call("verify", "--deep", step).stdout
    done = run_here("diff", step, trained.run / "partial" / "step-00000002", "--by", "part")
    assert (done.returncode, done.stderr) == (10, "")  # they differ
    call("report", trained.run, "-o", tmp_path / "page.html", "--values")
    assert held[0] in (tmp_path / "page.html").read_text()


def test_a_layer_whose_shares_are_all_of_one_save_has_a_setback(trained):
    """Right after the base, nothing of some layers has been saved again."""
    told = json.loads(run_here("merge", "--run", trained.run, "--at", 4, "--dry-run", "--json").stdout)["parts"]
    estimated = trained.manifest(4)["setback"]
    setback = {row["part"]: row["setback"] for row in told}
    shares = [steps for part, steps in estimated.items() if part.startswith("layer 2 ")]
    assert len(shares) == len(SHARES) and setback["layer 2"] == pytest.approx(sum(shares))
    assert sum(setback.values()) == pytest.approx(sum(estimated.values()))


def test_gc_keeps_what_the_newest_steps_need(copied, tmp_path):
    copied.start_again(BY_TURNS, experts="parts")
    copied.make_saves(5, 2)
    copied.saver.close()
    call("gc", copied.run, "--keep", 2, "--yes")
    left = sorted(int(path.name[5:]) for path in copied.run.glob("partial/step-*"))
    assert left == [12, 14, 16, 18, 20, 22]
    for at in (20, 22):
        copied.check(at, tmp_path / str(at))
    copied.step = 12


def test_thin_makes_partial_checkpoints_of_composites_of_experts(copied, tmp_path):
    wanted = copied.wanted(8)
    for at in (8, 12):
        copied.compose(at, copied.run / f"checkpoint-{at}")
    shutil.rmtree(copied.run / "partial/step-00000008")
    call("thin", copied.run, "--keep-full-last", 1, "--strategy", "full", "--yes")
    assert not (copied.run / "checkpoint-8").exists()
    (made,) = json.loads(call("merge", "--run", copied.run, "--at", 8, "--dry-run", "--json").stdout)["sources"]
    assert made["name"].endswith("step-00000008")
    check_states(copied.compose(8, tmp_path / "out"), wanted)


def test_salvage_takes_each_expert_from_its_newest_intact_save(copied):
    (copied.run / "partial/step-00000010" / "rank-00000-of-00001.safetensors").write_bytes(b"damaged")
    call("salvage", copied.run)
    intact = {step: made for step, made in manifests([copied.run]).items() if step != 10}
    check_states(copied.run / "salvaged-checkpoint-12", fold(copied.truth, intact))


def test_whole_layers_and_experts_in_one_run(tmp_path):
    """The record of saves is taken up both ways: experts after layers at once, layers after experts when held whole."""
    loop = small(tmp_path / "run", "parity")
    loop.make_saves(2, 2)
    assert "layer 0" in loop.parts(2)
    loop.start_again(BY_TURNS, experts="parts")
    loop.make_saves(3, 2)
    assert all(0 < len(loop.parts(step)) < 8 for step in (6, 8, 10))
    assert any(" expert " in part for part in loop.parts(6))
    loop.start_again("parity")
    loop.make_saves(3, 2)
    assert {f"layer {number}" for number in range(3)} <= {*loop.parts(12)}
    assert len(loop.parts(14)) < len(loop.parts(12))
    loop.saver.close()
    for at in range(4, 18, 2):
        loop.check(at, tmp_path / str(at))


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = torch.nn.Linear(6, 6)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(NUM_EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(expert(torch.tanh(self.attn(x))) for expert in self.experts)


def test_experts_with_tensors_of_their_own(tmp_path):
    def loss(model):
        return model.layers(torch.randn(3, 6)).square().mean()

    model = torch.nn.Module()
    model.layers = torch.nn.Sequential(Block(), Block())
    loop = Loop(tmp_path / "run", model=model, loss=loss, policy="round_robin:3", experts="parts").trained(4)
    assert loop.parts(2) == [f"layer 0 {share}" for share in SHARES[:4]]
    loop.check(3, tmp_path / "out")


def piece(content: dict, part: str) -> dict:
    return next(one for one in content["parts"] if one["part"] == part)["pieces"]


NAME = "model.layers.0.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        ([0, 512], "same elements"),
        ([512, 4096], "do not exist"),
        ([700, 700], "do not exist"),
        ([-1, 512], "not a count"),
        ([512, 1000], "do not make up the param"),
        ([512], "not enough values"),
    ],
)
def test_a_manifest_that_lies_about_experts_is_refused(copied, run, reason):
    step = copied.run / "partial" / "step-00000004"
    assert piece(copied.manifest(4), "layer 0 expert 1")[NAME] == [512, 1024]
    edit_json(step / "manifest.json", lambda content: piece(content, "layer 0 expert 1").update({NAME: run}))
    with pytest.raises(SourceError, match=reason):
        index_checkpoint(step)


LIES = {"[[0,511]]": "other elements", "[[512,0]]": "neither a count", "[]": "other elements"}


@pytest.mark.parametrize(("runs", "reason"), LIES.items())
def test_a_rank_shard_that_lies_about_experts_is_refused(copied, runs, reason):
    step = copied.run / "partial" / "step-00000004"
    path = step / "rank-00000-of-00001.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    begin = json.loads(header["__metadata__"]["begin"])
    begin[NAME] = json.loads(runs)
    header["__metadata__"]["begin"] = json.dumps(begin)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    made = len(text).to_bytes(8, "little") + text + content[8 + size :]
    path.write_bytes(made)
    edit_json(step / "manifest.json", lambda content: content["bundles"][0].update(num_bytes=len(made)))
    with pytest.raises(SourceError, match=reason):
        index_checkpoint(step)
