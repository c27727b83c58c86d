"""Composites of real checkpoints: state by state what the recipe says, and what stock DeepSpeed resumes from."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

import llmtailor
from helpers.cases import every
from helpers.composing import Taken, merge
from helpers.files import TOLD, contents
from helpers.states import part_of
from llmtailor.model.roles import FROZEN, MASTER, State
from llmtailor.verify.verify import RESUMABLE, verify_checkpoint
from oracle.deepspeed_tools import assert_universal_agrees, assert_zero_to_fp32_agrees
from oracle.weights import EXPERTS, with_weights
from oracle.zero3 import MOMENTS, Snapshot, assert_same, compose, differ, load
from trainings.catalogue import MIDDLE, ZERO3, long_but
from trainings.harness import Run, Runs, Train

SHORT_MIXED = {
    *("llama-layer", "llama-tied", "llama-fp16", "llama-frozen", "llama-extras-layer", "mixtral"),
    "llama-sub-w3",
}
INDEX = "model.safetensors.index.json"
READ_BY_DEEPSPEED = ["llama", "llama-layer", "llama-sub", "llama-tied", "llama-frozen", "llama-extras", "mixtral"]
MIXED = {"embed_tokens": 2, 1: 4, "norm": 2, "lm_head": 4}
"""part -> step, for parts that don't come from the base, checkpoint-6"""


def mixed(run: Run, out: Path) -> tuple[Path, Callable[[str], str]]:
    """Compose checkpoints 2, 4 and 6 of a run; return the composite and its choice, for the oracle."""
    steps = {part: step for part, step in MIXED.items() if not (run.spec.tied and part == "lm_head")}
    taken = {part: run.checkpoint(step) for part, step in steps.items()}
    tied = load(run.checkpoint(6)).rest["tied"]
    merge(run.checkpoint(6), out, taken)
    return out, lambda name: str(steps.get(part_of(tied.get(name, name)), 6))


def snapshots(run: Run) -> dict[str, Snapshot]:
    return {str(step): snapshot(run, step) for step in (2, 4, 6)}


def snapshot(run: Run, step: int) -> Snapshot:
    """What a checkpoint holds, or, if it has no weights, what a composite that has it as base does."""
    found = load(run.checkpoint(step))
    return found if run.spec.gather else with_weights(found, torch.bfloat16, run.spec.arch)


@pytest.mark.parametrize("name", every(4, ZERO3))
def test_a_checkpoint_merged_with_itself_is_itself(runs: Runs, name: str, tmp_path: Path) -> None:
    run = runs[name]
    source, wanted = run.checkpoint(6), snapshot(run, 6)
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    globs = [] if run.spec.arch in EXPERTS else ["*.weight"]  # fused experts go by other names on disk
    for part in [1, "norm", *globs]:
        out = tmp_path / f"out-{part}".replace("*", "")
        merge(source, out, {part: copy})
        assert_same(load(out), wanted)
        assert not differing_files(source, out)


def differing_files(source: Path, out: Path) -> list[str]:
    """What is carried over is the same to the byte; the shards are laid out anew, and compared state by state."""
    wanted, found = contents(source), contents(out)
    assert found.keys() == wanted.keys() | {*TOLD} | ({"model.safetensors"} if INDEX not in wanted else set())
    return [name for name in wanted if not name.startswith("global_step") and wanted[name] != found[name]]


@pytest.mark.parametrize("name", long_but(SHORT_MIXED, ZERO3))
def test_a_mixed_composite_is_what_the_oracle_says(runs: Runs, name: str, tmp_path: Path) -> None:
    run = runs[name]
    composite, choose = mixed(run, tmp_path / "out")
    sources = snapshots(run)
    wanted = compose(sources, "6", choose)
    assert {choose(state.param) for state in wanted.states} == {"2", "4", "6"}
    found = load(composite)
    assert_same(found, wanted)
    if run.spec.groups == "layer":
        assert {2.0, 4.0, 6.0} <= set(found.steps.values()) | ({6.0} if run.spec.frozen else set())
    stated = found.rest["trainer_state"]["stateful_callbacks"].get("llmtailor-optimizer", {"attributes": {}})
    lags = sorted({max(sources["6"].steps.values()) - step for step in found.steps.values()} - {0})
    assert stated["attributes"].get("step_lags", []) == lags


@pytest.mark.parametrize("name", [*READ_BY_DEEPSPEED, "qwen2-w3", "gpt2-w3"])
def test_deepspeeds_own_tools_read_the_same_out_of_a_composite(runs: Runs, name: str, tmp_path: Path) -> None:
    run = runs[name]
    composite, choose = mixed(run, tmp_path / "out")
    wanted = compose(snapshots(run), "6", choose)
    assert_universal_agrees(wanted, composite, tmp_path)
    assert_zero_to_fp32_agrees(wanted, composite)


RESUMED = [
    *("llama", "llama-layer", "llama-sub", "llama-tied", "llama-fp16", "llama-fp32", "llama-ds-adamw", "llama-ds-both"),
    *("llama-offload", "llama-no-gather", "llama-sharded", "llama-frozen", "llama-extras-layer"),
    *("qwen2", "qwen3-layer", "mistral", "gemma", "gpt2", "gpt-neox", "mixtral", "qwen3-moe"),
    *("llama-w3", "llama-layer-w3", "mixtral-w3"),
]
MIXTURES = [f"{name} mixed" for name in RESUMED]
SHORT_RESUMED = {"llama-fp16", "llama-ds-both"}
SHORT_MIXTURES = {"llama-layer mixed", "llama-extras-layer mixed"}


@pytest.fixture(scope="module")
def resumed(runs: Runs, train: Train, selected: set[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Stock resumes, at `MIDDLE`, from a composite of two copies of one checkpoint (``NAME``) and, at 6 and for two
    steps more, from the mixed composite (``NAME mixed``)."""
    root, specs = tmp_path_factory.mktemp("composites"), []
    for name in (name for name in RESUMED if name in selected):
        run, folder = runs[name], root / name
        shutil.copytree(run.checkpoint(MIDDLE), folder / "copy")
        taken: Taken = {"odd": folder / "copy", "norm": folder / "copy"}
        merge(run.checkpoint(MIDDLE), folder / f"checkpoint-{MIDDLE}", taken)
        specs.append(run.spec.resumed(folder / f"checkpoint-{MIDDLE}", name, save_steps=run.spec.steps))
    for name in (name for name in RESUMED if f"{name} mixed" in selected):
        composite, _ = mixed(runs[name], root / f"{name} mixed" / "checkpoint-6")
        specs.append(runs[name].spec.resumed(composite, f"{name} mixed", steps=8, save_steps=8))
    return train(specs)


@pytest.mark.parametrize("name", long_but(SHORT_RESUMED, RESUMED))
def test_a_stock_resume_from_one_step_repeats_the_straight_run(resumed: dict[str, Run], runs: Runs, name: str) -> None:
    straight = runs[name].after(MIDDLE)
    assert len(straight) == 2
    assert resumed[name].losses == straight
    assert [log["grad_norm"] for log in resumed[name].logs.values()] == [
        runs[name].logs[step]["grad_norm"] for step in straight
    ]


@pytest.mark.parametrize("mixture", long_but(SHORT_MIXTURES, MIXTURES))
def test_stock_deepspeed_holds_what_was_planned(resumed: dict[str, Run], runs: Runs, mixture: str) -> None:
    """Before the first step after the resume, the engine's states are those of the oracle's composite."""
    run, echo = runs[mixture.split()[0]], resumed[mixture].echo
    assert sorted(resumed[mixture].losses) == [7, 8]
    tied = load(run.checkpoint(6)).rest["tied"]
    steps = {part: step for part, step in MIXED.items() if not (run.spec.tied and part == "lm_head")}
    wanted = compose(snapshots(run), "6", lambda name: str(steps.get(part_of(tied.get(name, name)), 6)))
    assert echo["step"] == wanted.steps
    for kind in (MASTER, *MOMENTS):
        assert echo[kind].keys() == wanted.kind(kind).keys()
        for param, tensor in wanted.kind(kind).items():
            assert not differ(echo[kind][param], tensor), State(param, kind)
    for param, tensor in wanted.kind(FROZEN).items():
        assert not differ(echo["weight"][param], tensor), param


@pytest.mark.parametrize("mixture", ["llama-layer mixed"])
def test_steps_travel_with_layers_through_a_stock_resume(resumed: dict[str, Run], mixture: str) -> None:
    """Layer-aligned groups: what is saved after the resume has counted on from each layer's own step, and is not taken
    for a mixture of two saves."""
    verdict = verify_checkpoint(resumed[mixture].checkpoint(8), deep=True)
    assert verdict.level == RESUMABLE and not verdict.findings
    after = load(resumed[mixture].checkpoint(8))
    assert after.steps["model.layers.1.mlp.up_proj.weight"] == 4 + 2
    assert after.steps["model.embed_tokens.weight"] == 2 + 2
    assert after.steps["model.layers.0.mlp.up_proj.weight"] == 6 + 2


@pytest.mark.parametrize("name", ["llama-sharded", "mixtral"])
@pytest.mark.parametrize(("dtype", "torch_dtype"), [("float32", torch.float32), ("float16", torch.float16)])
def test_dtype_casts_the_weights_and_nothing_else(
    runs: Runs, tmp_path: Path, dtype: str, torch_dtype: torch.dtype, name: str
) -> None:
    """They are rounded once: from the masters."""
    run = runs[name]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"base_model": str(run.checkpoint(6)), "dtype": dtype}))
    report = llmtailor.merge(recipe, tmp_path / "out")
    assert not [notice for notice in report.notices if notice.where == "dtype"]
    wanted, found = load(run.checkpoint(6)), load(tmp_path / "out")
    whole = {state: tensor for state, tensor in wanted.states.items() if state.kind != "weight"}
    weights = with_weights(Snapshot(whole, {}, (), {}), torch_dtype, run.spec.arch).kind("weight")
    weights = {param: tensor.to(torch_dtype) for param, tensor in weights.items()}
    twice = {state: tensor.to(torch_dtype) for state, tensor in wanted.states.items() if state.kind == "weight"}
    assert {state.param for state in twice} == weights.keys()
    assert any(differ(tensor, weights[state.param]) for state, tensor in twice.items())
    wanted.states |= {State(param, "weight"): tensor for param, tensor in weights.items()}
    assert_same(found, wanted)
    assert yaml.safe_load((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype


def test_a_composite_is_a_source_like_any_other(runs: Runs, tmp_path: Path) -> None:
    """Composing from a composite: the values are right, and the report knows the true age of each part."""
    run = runs["llama-layer"]
    first, choose = mixed(run, tmp_path / "first")
    report = merge(first, tmp_path / "second", {0: run.checkpoint(2)})
    wanted = compose(snapshots(run), "6", lambda name: "2" if part_of(name) == 0 else choose(name))
    assert_same(load(tmp_path / "second"), wanted)
    assert {row.part: row.step for row in report.parts} == {
        "embed_tokens": 2, "layer 0": 2, "layer 1": 4, "layer 2": 6, "norm": 2, "lm_head": 4,
    }  # fmt: skip
