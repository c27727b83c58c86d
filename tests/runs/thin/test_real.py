"""Real runs, thinned out: what is composed of them afterwards is what the full checkpoints would have given."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import llmtailor
from helpers.cases import mostly_long
from helpers.checkpoints import copied
from helpers.same import differences
from oracle.any import load
from oracle.zero3 import Snapshot, assert_same
from oracle.zero3 import compose as compose_slowly
from thin.scene import call, compose, folders, sources, thinned
from trainings.harness import Runs

NAMES = [
    *("llama", "llama-sub", "llama-layer", "llama-tied-layer", "llama-frozen", "llama-extras-layer", "llama-ds-both"),
    *("llama-sharded", "gpt2", "mixtral"),
    *("zero1", "zero1-bf16opt-rr", "zero1-extras-layer", "zero2-rr", "zero2-aligned", "zero2-frozen", "zero2-tied"),
    *("llama-extras-w3", "qwen2-w3", "zero1-extras-w3", "zero2-layer-w3"),
]
STEPS = (2, 4, 6)
ODD_HALF = re.compile(r"\.(?:layers|h)\.\d*[13579]\.|^(lm_head|embed_out)\.|\.wpe\.")
"""What parity keeps of the second checkpoint in a row: odd layers, lm_head, and what else the model has"""


def snapshots(folder: Path) -> dict[str, Snapshot]:
    return {str(step): load(folder / f"checkpoint-{step}") for step in STEPS}


@pytest.mark.parametrize(
    "name", mostly_long(NAMES, "llama-layer", "llama-ds-both", "gpt2", "zero1-extras-layer", "zero2-tied", "qwen2-w3")
)
def test_every_step_is_composed_as_from_full_checkpoints(runs: Runs, name: str, tmp_path: Path) -> None:
    originals = runs[name].folder
    run = copied(originals, tmp_path / "run", STEPS)
    told = thinned(run, "--strategy", "parity")
    assert folders(run) == ["checkpoint-6", "partial/step-00000002", "partial/step-00000004"]
    assert told["composable_before"] == told["composable_after"] == list(STEPS)

    full = snapshots(originals)
    tied = full["4"].rest["tied"]
    for step in STEPS[:2]:
        out, original = compose(run, step, tmp_path / f"out-{step}"), originals / f"checkpoint-{step}"

        def newest(param: str, step: int = step) -> str:
            return str(step) if ODD_HALF.search(tied.get(param, param)) else "2"

        assert_same(load(out), compose_slowly(full, str(step), newest))
        for rng in original.glob("rng_state*"):
            assert not [*differences(*(torch.load(at / rng.name, weights_only=False) for at in (out, original)))]
        for file in ("config.json", "training_args.bin", "generation_config.json"):
            assert (out / file).read_bytes() == (original / file).read_bytes()
    assert set(sources(tmp_path / "out-4").values()) == {2, 4}


def test_a_composite_counts_as_full(runs: Runs, tmp_path: Path) -> None:
    """Its parts stay as old as they are, though the partial checkpoint says that it holds them at its own step."""
    originals = runs["llama-layer"].folder
    run = copied(originals, tmp_path / "run", STEPS)
    recipe = run / "recipe.yaml"
    recipe.write_text("base_model: checkpoint-4\nparts: [{from: checkpoint-2, select: [1, norm]}]\n")
    llmtailor.merge(recipe, tmp_path / "composite")
    (run / "checkpoint-4").rename(tmp_path / "gone")
    (tmp_path / "composite").rename(run / "checkpoint-4")
    wanted = load(run / "checkpoint-4")
    told = call("thin", run, "--strategy", "full", "--yes")
    assert [row["is"] for row in told["checkpoints"]] == [
        "deepspeed-zero3 on 2 ranks",
        "composite, deepspeed-zero3 on 2 ranks",
        "deepspeed-zero3 on 2 ranks",
    ]
    assert_same(load(compose(run, 4, tmp_path / "out")), wanted)
    inspected = {part["part"]: part["step"] for part in call("inspect", run / "partial/step-00000004")["parts"]}
    assert (inspected["layer 1"], inspected["norm"], inspected["layer 0"]) == (2, 2, 4)


@pytest.mark.parametrize(
    "name", mostly_long(["llama-frozen", "zero2-frozen", "llama-extras-w3"], "llama-frozen", "zero2-frozen")
)
def test_frozen_params_take_space_once(runs: Runs, name: str, tmp_path: Path) -> None:
    run = copied(runs[name].folder, tmp_path / "run", STEPS)
    thinned(run, "--strategy", "full")
    files = sorted(run.glob("partial/*/frozen-*"))
    assert len(files) == 2 * (3 if name.endswith("w3") else 1 if name.startswith("zero2") else 2)
    assert all(path.stat().st_nlink == 2 for path in files)
    assert_same(load(compose(run, 4, tmp_path / "out")), load(runs[name].checkpoint(4)))


@pytest.mark.parametrize("name", ["llama", "zero2-tied"])
def test_without_its_optimizer_a_checkpoint_is_a_model(runs: Runs, name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run = copied(runs[name].folder, tmp_path / "run", STEPS)
    told = thinned(run, "--keep-optimizer-last", 1)
    assert (told["composable_before"], told["composable_after"]) == ([2, 4, 6], [6])
    for step in (2, 4):
        left = run / f"checkpoint-{step}"
        assert {path.name for path in left.iterdir()} == {
            *("config.json", "generation_config.json", "model.safetensors", "trainer_state.json", "training_args.bin")
        }
        loaded, model = (AutoModelForCausalLM.from_pretrained(at) for at in (left, runs[name].checkpoint(step)))
        assert not [*differences(loaded.state_dict(), model.state_dict())]
    assert_same(load(run / "checkpoint-6"), load(runs[name].checkpoint(6)))
