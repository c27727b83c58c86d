"""Universal checkpoints of DeepSpeed's own script, and of llmtailor: as sources, and as what DeepSpeed resumes from."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import llmtailor
import oracle.any
from helpers.cases import mostly_long
from helpers.checkpoints import copied
from helpers.commands import call
from helpers.commands import run_here as run
from helpers.composing import convert, convert_to_resume, merge
from helpers.states import assert_same_held, held_by, loaded_by, read
from llmtailor.errors import MismatchError, SourceError, TargetError
from llmtailor.formats.registry import index_checkpoint
from llmtailor.model.roles import BUFFER, WEIGHT
from llmtailor.recipe import Recipe, Select
from llmtailor.verify.verify import RESUMABLE, verify_checkpoint
from oracle.deepspeed_tools import to_universal
from oracle.zero3 import Snapshot
from trainings.catalogue import DEEPSPEED
from trainings.harness import Run
from trainings.spec import Spec

# --- as sources -------------------------------------------------------------------------------------------------------

READ = ["llama-extras-layer", "zero1-bf16opt"]
LONG_READ = [
    *("llama", "llama-fp16", "llama-frozen", "llama-tied", "gpt-neox", "mixtral", "llama-sub-w3", "llama-sharded"),
    *("llama-ds-both", "zero1", "zero2", "zero2-aligned", "zero2-tied", "zero2-fp16", "zero1-extras-layer", "zero2-w3"),
]
READ_CASES = mostly_long([*READ, *LONG_READ], *READ)


def same(one: Snapshot, other: Snapshot) -> None:
    assert one.states.keys() == other.states.keys()
    for state, tensor in one.states.items():
        assert torch.equal(other.states[state], tensor), state
    assert one.steps == other.steps
    for key in ("param_groups", "counters", "scheduler"):
        assert str(one.rest.get(key)) == str(other.rest.get(key))


@pytest.mark.parametrize("name", READ_CASES)
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


@pytest.mark.parametrize("name", mostly_long([*READ, *LONG_READ, "zero2-rr"], READ[0]))
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
    run_folder = copied(runs["llama"].folder, tmp_path / "run", (2, 4))
    call("thin", run_folder, "--strategy", "full", "--yes")
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
    mixed = Recipe(name="x", base=runs["llama-layer"].checkpoint(4))
    older = runs["llama-layer"].checkpoint(2)
    mixed = Recipe(name="x", base=mixed.base, rules=(Select(older, ("odd",), "x"),))
    llmtailor.merge(mixed, tmp_path / "mixed", llmtailor.Options(to="universal"))
    assert "gives all params one step" in (tmp_path / "mixed" / "llmtailor.json").read_text()
    steps = index_checkpoint(tmp_path / "mixed").steps()
    assert {step for name, step in steps.items() if ".layers.1." in name} == {2} and set(steps.values()) == {2, 4}


def test_commands_know_it(runs, tmp_path):
    source, out = runs["llama"].checkpoint(2), tmp_path / "run" / "checkpoint-2"
    convert(source, out, to="universal")
    done = call("inspect", out, "--json")
    assert json.loads(done.stdout)["format"] == "universal"
    call("verify", out, "--deep")
    assert str(out) in run("latest", out.parent).stdout
    call("convert", source, out, "--to", "universal", "--num-gpu", "3", "--force")
    assert index_checkpoint(out).world_size == 3
    (out / "global_step2_universal/zero/mine").touch()
    with pytest.raises(TargetError, match="zero/mine"):
        convert(source, out, replace=True)


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


def test_a_run_with_a_damaged_one_is_salvaged(runs, tmp_path):
    """The damaged part comes from the older checkpoint."""
    folder, out, lost = tmp_path / "run", tmp_path / "checkpoint-4", "model.layers.1.mlp.up_proj.weight"
    for step in (2, 4):
        convert(runs["llama"].checkpoint(step), folder / f"checkpoint-{step}", to="universal")
    (folder / f"checkpoint-4/global_step4_universal/zero/{lost}/exp_avg.pt").unlink()
    call("verify", folder / "checkpoint-4", code=7)
    call("salvage", folder, "-o", out)
    back = oracle.any.load(convert(out, tmp_path / "back", to="deepspeed"))
    new, old = (oracle.any.load(runs["llama"].checkpoint(step)) for step in (4, 2))
    for state, tensor in back.states.items():
        if state.kind != WEIGHT:
            assert torch.equal(tensor, (old if ".layers.1." in state.param else new).states[state]), state


# --- as what DeepSpeed resumes from -----------------------------------------------------------------------------------

STEP = 2


@dataclass(frozen=True)
class Case:
    """A universal checkpoint, and the run that resumes from it."""

    source: str
    """A run of trainings/catalogue.py"""
    stage: int
    ranks: int = 2
    is_own: bool = True
    """Whether llmtailor has made it; otherwise ds_to_universal"""

    def __str__(self) -> str:
        return f"{self.source}-to-{self.stage}-on-{self.ranks}{'' if self.is_own else '-by-deepspeed'}"

    def spec(self, out: Path) -> Spec:
        own = DEEPSPEED.get(self.source)
        # with round_robin_gradients DeepSpeed's loader mixes up the params, as a notice says
        changes = {"stage": self.stage, "steps": 4, "save_steps": 4, "round_robin": False, "load_universal": True}
        batch = (own.per_device_batch if own else 3) if self.ranks == 2 else 2
        base = own or DEEPSPEED["llama"]
        return base.resumed(out, str(self), ranks=self.ranks, per_device_batch=batch, **changes)


SHORT = [Case("llama", 3), Case("zero1-bf16opt", 1), Case("no-fsdp", 2)]
LONG = [Case("llama", 2), Case("llama", 3, is_own=False), Case("llama-ds-both", 3), Case("titan", 1)]
LONG += [Case(name, stage) for name in ("llama-frozen", "llama-tied", "gpt-neox", "mixtral") for stage in (1, 2, 3)]
LONG += [
    case
    for name in ("zero1", "zero2", "zero3", "zero2-aligned", "zero2-tied", "zero2-rr", "zero1-bf16opt", "zero2-layer")
    for stage in (1, 2, 3)
    for ranks in (2, 3)
    if (case := Case(name, stage, ranks)) not in SHORT
]
LONG += [Case(f"zero{stage}", stage, ranks, is_own=False) for stage in (1, 2, 3) for ranks in (2, 3)]
CASES = mostly_long([*SHORT, *LONG], *SHORT)


@pytest.fixture(scope="module")
def resumed(runs, train, selected, tmp_path_factory) -> dict[str, Run]:
    folder, specs = tmp_path_factory.mktemp("converted"), []
    for case in (case for case in (*SHORT, *LONG) if case in selected):
        source, out = runs.checkpoint(case.source, STEP), folder / str(case) / f"checkpoint-{STEP}"
        if case.is_own:
            dtype = None if case.source in DEEPSPEED else "BF16"
            convert_to_resume(source, out, dtype=dtype, to="universal", world_size=case.ranks)
        else:
            to_universal(source, out)
        specs.append(case.spec(out))
    return train(specs)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_deepspeed_holds_what_the_source_held(runs, resumed, case):
    run, wanted = resumed[str(case)], held_by(runs[case.source], STEP)
    assert_same_held(loaded_by(run, STEP), wanted)
    for name, weight in run.echo["weight"].items():
        if name in wanted["weights"]:
            assert torch.equal(weight, wanted["weights"][name].bfloat16()), name
    decay = [group["weight_decay"] for group in run.echo["groups"]]
    if case.is_own or case.stage < 3:
        assert len(decay) == 1 or 0.0 in decay
    else:  # DeepSpeed gives the options of the first group to all, if they are in the file
        assert set(decay) == {0.1}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_goes_on(runs, resumed, case):
    losses = resumed[str(case)].losses
    assert losses.keys() == {3, 4}
    straight = runs[case.source].losses
    if case.source not in DEEPSPEED:
        if case.source == "no-fsdp":  # the others see other samples
            assert losses[3] == pytest.approx(straight[3], rel=1e-2)  # fp32 before, bf16 now
    elif case.ranks == 2:
        assert losses[3] == straight[3]
        is_exact = case.stage < 3 or case.source == "llama-ds-both"
        assert (losses[4] == straight[4]) == is_exact
    elif (theirs := resumed.get(str(replace(case, is_own=False)))) and case.stage < 3:
        assert losses == theirs.losses
    else:
        assert losses[3] == pytest.approx(straight[3], rel=1e-5)
