"""Universal checkpoints as sources: those of DeepSpeed's own script, and those of llmtailor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import llmtailor
import oracle.any
from helpers.commands import run_here as run
from helpers.composing import convert, merge
from helpers.states import read
from llmtailor.errors import MismatchError, SourceError, TargetError
from llmtailor.formats.registry import index_checkpoint
from llmtailor.model.roles import BUFFER, WEIGHT
from llmtailor.recipe import Recipe, Select
from llmtailor.verify.verify import RESUMABLE, verify_checkpoint
from oracle.deepspeed_tools import to_universal
from oracle.zero3 import Snapshot

NAMES = ["llama-extras-layer", "zero1-bf16opt"]
LONG = ["llama", "llama-fp16", "llama-frozen", "llama-tied", "gpt-neox", "mixtral", "llama-sub-w3", "llama-ds-both"]
LONG += ["llama-sharded", "zero1", "zero2", "zero2-aligned", "zero2-tied", "zero2-fp16", "zero1-extras-layer"]
LONG += ["zero2-w3"]
CASES: list[Any] = [*NAMES, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)]


def same(one: Snapshot, other: Snapshot) -> None:
    assert one.states.keys() == other.states.keys()
    for state, tensor in one.states.items():
        assert torch.equal(other.states[state], tensor), state
    assert one.steps == other.steps
    for key in ("param_groups", "counters", "scheduler"):
        assert str(one.rest.get(key)) == str(other.rest.get(key))


@pytest.mark.parametrize("name", CASES)
def test_what_deepspeeds_script_writes_is_read(runs, tmp_path, name):
    source = runs[name].checkpoint(2)
    out = to_universal(source, tmp_path / "checkpoint-2")
    verdict = verify_checkpoint(out, deep=True)
    assert verdict.level == RESUMABLE, verdict.findings
    index, wanted = index_checkpoint(out), oracle.any.load(source)
    assert index.steps() == wanted.steps
    compared = 0
    for state, tensor in wanted.states.items():
        if state.kind != BUFFER or index.form.has_buffers_by_rank:
            assert torch.equal(read(out, index.held[state]).flatten(), tensor.flatten()), state
            compared += state.kind != WEIGHT
    assert compared >= 3 * len(wanted.steps)
    same(oracle.any.load(convert(out, tmp_path / "back", to="deepspeed")), wanted)


@pytest.mark.parametrize("name", [*CASES, pytest.param("zero2-rr", marks=pytest.mark.long)])
def test_there_and_back(runs, tmp_path, name):
    """Everything that a resume reads comes back, through two universal checkpoints on other ranks."""
    source = runs[name].checkpoint(2)
    world_size = index_checkpoint(source).world_size
    there = convert(source, tmp_path / "there", to="universal")
    again = convert(there, tmp_path / "again", world_size=5)
    for out in (there, again):
        verdict = verify_checkpoint(out, deep=True)
        assert verdict.level == RESUMABLE, verdict.findings
    same(oracle.any.load(convert(there, tmp_path / "back", to="deepspeed")), oracle.any.load(source))
    back = oracle.any.load(convert(again, tmp_path / "back-again", to="deepspeed", world_size=world_size))
    wanted = oracle.any.load(source)
    for state, tensor in wanted.states.items():
        if state.kind != BUFFER:
            assert torch.equal(back.states[state], tensor), state
    assert back.steps == wanted.steps


@pytest.mark.parametrize("to", ["universal", pytest.param("deepspeed", marks=pytest.mark.long)])
def test_a_composite_with_a_partial_checkpoint(runs, tmp_path, to):
    """Odd layers from a universal checkpoint, the rest from a partial one; also the other way round."""
    run_folder = tmp_path / "run"
    for step in (2, 4):
        shutil.copytree(runs["llama"].checkpoint(step), run_folder / f"checkpoint-{step}")
    done = run("thin", run_folder, "--strategy", "full", "--yes")
    assert done.returncode == 0, done.stderr
    (partial,) = (run_folder / "partial").glob("step-*")
    universal = convert(runs["llama"].checkpoint(4), tmp_path / "universal", to="universal")
    new, old = (oracle.any.load(runs["llama"].checkpoint(step)) for step in (4, 2))
    for base, odd, even_from, odd_from in ((partial, universal, old, new), (universal, partial, new, old)):
        out = tmp_path / f"out-{base.name}"
        merge(base, out, {"odd": odd}, to=to)
        if to == "universal":
            out = convert(out, tmp_path / f"back-{base.name}", to="deepspeed")
        held = oracle.any.load(out)
        for state, tensor in held.states.items():
            wanted = (odd_from if ".layers.1." in state.param else even_from).states[state]
            assert torch.equal(tensor, wanted), state


def test_what_the_format_loses_is_said(runs, tmp_path):
    out = tmp_path / "out"
    convert(runs["zero1-extras-layer"].checkpoint(2), out, to="universal")
    told = " ".join(notice["what"] for notice in json.loads((out / "llmtailor.json").read_text())["notices"])
    for said in ("neither frozen params nor buffers", "differ in weight_decay", "one counter to all"):
        assert said in told
    convert(runs["zero2-rr"].checkpoint(2), tmp_path / "rr", to="universal")
    assert "mixes up the params" in (tmp_path / "rr" / "llmtailor.json").read_text()
    mixed = Recipe("x", "", runs["llama-layer"].checkpoint(4), (), None, None)
    older = runs["llama-layer"].checkpoint(2)
    mixed = Recipe("x", "", mixed.base, (Select(older, ("odd",), "x"),), None, None)
    llmtailor.merge(mixed, tmp_path / "mixed", llmtailor.Options(to="universal"))
    assert "gives all params one step" in (tmp_path / "mixed" / "llmtailor.json").read_text()
    steps = index_checkpoint(tmp_path / "mixed").steps()
    assert {step for name, step in steps.items() if ".layers.1." in name} == {2} and set(steps.values()) == {2, 4}


def test_commands_know_it(runs, tmp_path):
    source, out = runs["llama"].checkpoint(2), tmp_path / "run" / "checkpoint-2"
    convert(source, out, to="universal")
    done = run("inspect", out, "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["format"] == "universal"
    assert run("verify", out, "--deep").returncode == 0
    assert str(out) in run("latest", out.parent).stdout
    again = run("convert", source, out, "--to", "universal", "--num-gpu", "3", "--force")
    assert again.returncode == 0, again.stderr
    assert index_checkpoint(out).world_size == 3
    (out / "global_step2_universal/zero/mine").touch()
    with pytest.raises(TargetError, match="zero/mine"):
        llmtailor.merge(Recipe("x", "", source, (), None, None), out, llmtailor.Options(replace=True))


def test_what_can_not_be_one_is_refused(runs, tmp_path):
    source = runs["llama"].checkpoint(2)
    with pytest.raises(MismatchError, match="needs a ZeRO stage"):
        convert(source, tmp_path / "out", to="universal", stage=0)
    with pytest.raises(SourceError, match="round_robin_gradients"):
        index_checkpoint(to_universal(runs["zero2-rr"].checkpoint(2), tmp_path / "rr"))
    inside = convert(source, tmp_path / "checkpoint-2", to="universal") / "global_step2_universal"
    with pytest.raises(SourceError, match="tag folder inside a universal checkpoint"):
        index_checkpoint(inside)


def test_one_beside_a_zero_checkpoint_is_left_aside(runs, tmp_path):
    """``ds_to_universal`` writes next to its source."""
    root = tmp_path / "checkpoint-2"
    shutil.copytree(runs["llama"].checkpoint(2), root)
    universal = convert(root, tmp_path / "universal", to="universal")
    for name in ("latest_universal", "global_step2_universal"):
        shutil.move(universal / name, root / name)
    assert index_checkpoint(root).format == "deepspeed-zero3"
    assert verify_checkpoint(Path(root)).level == RESUMABLE


@pytest.mark.parametrize("fragments", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_run_with_a_damaged_one_is_salvaged(runs, tmp_path, fragments):
    """The damaged part, or only the damaged param, comes from the older checkpoint."""
    folder, out, lost = tmp_path / "run", tmp_path / "checkpoint-4", "model.layers.1.mlp.up_proj.weight"
    for step in (2, 4):
        convert(runs["llama"].checkpoint(step), folder / f"checkpoint-{step}", to="universal")
    (folder / f"checkpoint-4/global_step4_universal/zero/{lost}/exp_avg.pt").unlink()
    assert run("verify", folder / "checkpoint-4").returncode == 7
    done = run("salvage", folder, "-o", out, *(["--fragments"] if fragments else []))
    assert done.returncode == 0, done.stderr
    back = oracle.any.load(convert(out, tmp_path / "back", to="deepspeed"))
    new, old = (oracle.any.load(runs["llama"].checkpoint(step)) for step in (4, 2))
    for state, tensor in back.states.items():
        is_old = state.param == lost if fragments else ".layers.1." in state.param
        if state.kind != WEIGHT:
            assert torch.equal(tensor, (old if is_old else new).states[state]), state
