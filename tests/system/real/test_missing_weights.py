"""A base without safetensors: the composite has them all the same, the very files that stock would have saved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import transformers

from helpers.composing import merge
from helpers.files import edit_json
from llmtailor.model.roles import WEIGHT
from oracle.any import load
from oracle.zero3 import differ
from trainings.harness import Runs

SINGLE = "model.safetensors"
SAVED = {"llama-no-gather": "llama"}
"""Runs that differ in nothing but saving weights"""
STRIPPED = [
    *("llama", "llama-tied", "llama-fp16", "llama-fp32", "llama-frozen", "llama-extras", "qwen2", "gpt2", "gpt-neox"),
    *("mixtral", "qwen3-moe", "zero1", "zero2-tied", "zero2-frozen", "zero2-extras", "zero2-fp16", "zero1-bf16opt"),
]


def without_weights(checkpoint: Path, to: Path) -> Path:
    shutil.copytree(checkpoint, to)
    (to / SINGLE).unlink(missing_ok=True)
    return to


@pytest.mark.parametrize("name", [*SAVED, *STRIPPED])
def test_the_file_is_the_one_that_stock_saves(runs: Runs, name: str, tmp_path: Path) -> None:
    base = without_weights(runs[name].checkpoint(6), tmp_path / "bare")
    merge(base, tmp_path / "out")
    saved = runs[SAVED.get(name, name)].checkpoint(6) / SINGLE
    assert (tmp_path / "out" / SINGLE).read_bytes() == saved.read_bytes()


def test_parts_from_elsewhere_bring_their_weights(runs: Runs, tmp_path: Path) -> None:
    """From a source with weights and from one without: the file is that of a base which had one."""
    whole, bare = runs["llama"], runs["llama-no-gather"]
    taken = {"odd": whole.checkpoint(4), "norm": bare.checkpoint(2)}
    merge(bare.checkpoint(6), tmp_path / "out", taken)
    merge(whole.checkpoint(6), tmp_path / "wanted", {"odd": whole.checkpoint(4), "norm": whole.checkpoint(2)})
    assert (tmp_path / "out" / SINGLE).read_bytes() == (tmp_path / "wanted" / SINGLE).read_bytes()


@pytest.mark.parametrize(("name", "stage"), [("qwen2", 2), ("qwen2", 3), ("zero2-tied", 3), ("zero2-tied", 1)])
def test_tied_names_are_listed_as_the_stage_does(runs: Runs, name: str, stage: int, tmp_path: Path) -> None:
    merge(without_weights(runs[name].checkpoint(6), tmp_path / "bare"), tmp_path / "out", stage=stage)
    merge(runs[name].checkpoint(6), tmp_path / "wanted", stage=stage)
    found, wanted = (load(tmp_path / folder).kind(WEIGHT) for folder in ("out", "wanted"))
    assert found.keys() == wanted.keys() and ("lm_head.weight" in found) == (stage < 3)
    assert not any(differ(found[name], wanted[name]) for name in wanted)


def test_large_weights_are_spread_over_files(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmtailor.formats.safetensors_weights.SHARD_BYTES", 8000)
    merge(runs["llama-no-gather"].checkpoint(6), tmp_path / "out")
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    count = len(files)
    assert count > 3 and files == [f"model-{at:05}-of-{count:05}.safetensors" for at in range(1, count + 1)]
    found, wanted = (load(folder).kind(WEIGHT) for folder in (tmp_path / "out", runs["llama"].checkpoint(6)))
    assert found.keys() == wanted.keys() and not any(differ(found[name], wanted[name]) for name in wanted)
    told = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    assert told == sum(tensor.nbytes for tensor in wanted.values())
    _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info


def test_no_weights_under_doubtful_names(runs: Runs, tmp_path: Path) -> None:
    base = without_weights(runs["mixtral"].checkpoint(6), tmp_path / "bare")
    edit_json(base / "config.json", lambda config: config | {"model_type": "unheard_of"})
    report = merge(base, tmp_path / "out")
    assert not [*(tmp_path / "out").glob("*.safetensors*")]
    (notice,) = [notice for notice in report.notices if "saves a unheard_of may differ" in notice.what]
    assert "trainer.save_model()" in notice.fix
