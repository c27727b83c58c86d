"""Other optimizers than AdamW, where params are cut: under DeepSpeed ZeRO-1/2/3 and FSDP2, with the real packages.

What is converted, composed and saved has the states that torch reads from the files of the stock training, bit for bit;
stock resumes continue with the losses of the straight run.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import llmtailor
from helpers.composing import compose as compose_run
from helpers.composing import convert, merge, recipe
from llmtailor.checkpoint.optimizer import ParamGroup, lay_out_optimizer
from llmtailor.errors import MismatchError, UnsupportedCheckpoint
from llmtailor.formats.deepspeed.write import refuse_states
from llmtailor.formats.registry import index_checkpoint
from llmtailor.verify.verify import RESUMABLE, verify_checkpoint
from oracle.states import MASTER, QUANT, States, assert_same, compose, states_of
from trainings.catalogue import OPTIMIZERS, OPTIMIZERS_SAVED, SHORT
from trainings.harness import Run, Runs, Train, TrainingFailed
from trainings.harness import train as train_here
from trainings.models import build

pytestmark = pytest.mark.real
STEP = 2
OTHER_STAGE = {0: 2, 1: 3, 2: 3, 3: 2}
RELATIVE = 2e-3
"""Of the loss in bf16, summed up in another order"""


def is_odd(param: str) -> bool:
    return ".layers.1." in param


def is_sound(checkpoint: Path) -> bool:
    """Whether it is resumable without a doubt; Muon alone leaves the other params without states, which is noted."""
    verdict = verify_checkpoint(checkpoint, deep=True)
    return verdict.level == RESUMABLE and all("has no states of" in one.what for one in verdict.findings)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_states_are_cut_for_other_ranks_and_stages(name: str, runs: Runs, tmp_path: Path) -> None:
    source, stage = runs.checkpoint(name), OPTIMIZERS[name].stage
    assert is_sound(source)
    cuts: list[dict[str, Any]] = [{"world_size": 3}, {"stage": OTHER_STAGE[stage], "to": "deepspeed"}]
    for number, options in enumerate(cuts):
        out = convert(source, tmp_path / f"{number}" / "checkpoint-2", **options)
        assert is_sound(out)
        assert_same(states_of(out), states_of(source))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_chain_of_formats_returns_the_states(name: str, runs: Runs, tmp_path: Path) -> None:
    """Under DeepSpeed, Muon's momentum is in bf16: where weights are masters, the same values are in fp32."""
    source, stage = runs.checkpoint(name), OPTIMIZERS[name].stage
    last: dict[str, Any] = {"to": "deepspeed", "stage": stage, "world_size": 2} if stage else {"to": "fsdp"}
    at = source
    for number, options in enumerate([{"to": "trainer"}, {"to": "dcp"}, {"to": "fsdp"}, last]):
        at = convert(at, tmp_path / f"{number}" / "checkpoint-2", **options)
        assert verify_checkpoint(at, deep=True).is_resumable
        assert_same(states_of(at), states_of(source), is_cast=name.startswith("muon"))
    groups = [[index_checkpoint(one).groups[0].hyper.get(key) for key in ("use_muon", "lr")] for one in (source, at)]
    assert groups[0] == groups[1]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_composite_holds_the_states_of_its_sources(name: str, runs: Runs, tmp_path: Path) -> None:
    base, odd = runs.checkpoint(name, 4), runs.checkpoint(name)
    merge(base, tmp_path / "checkpoint-4", {"odd": odd})
    wanted = compose(states_of(base), states_of(odd), is_odd)
    found = states_of(tmp_path / "checkpoint-4")
    if OPTIMIZERS[name].stage:  # steps and single values are of whole groups, which mix params here
        assert_same(tensors(found), tensors(wanted))
    else:
        assert_same(found, wanted)
    assert verify_checkpoint(tmp_path / "checkpoint-4", deep=True).is_resumable


def tensors(states: States) -> States:
    return {
        param: {kind: one for kind, one in kinds.items() if kind != "step" and getattr(one, "ndim", 0)}
        for param, kinds in states.items()
    }


@dataclass(frozen=True)
class Case:
    """A conversion from which stock resumes."""

    source: str
    options: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        return "-".join([self.source, *(f"{key}-{value}" for key, value in self.options)])


def cases_of(name: str) -> list[Case]:
    stage = OPTIMIZERS[name].stage
    others = [(("world_size", 3),), (("stage", OTHER_STAGE[stage]),)] if stage else []
    return [Case(name), *(Case(name, options) for options in others)]


KEPT = [Case("muon-2", (("stage", 3),)), Case("bnb-lion-2"), Case("fsdp-stable")]
CASES = [
    pytest.param(case, id=str(case), marks=() if case in KEPT else pytest.mark.long)
    for name in OPTIMIZERS
    for case in cases_of(name)
]


@pytest.fixture(scope="module")
def resumed(
    runs: Runs, train: Train, selected: set[Any], tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, Run]:
    folder, specs = tmp_path_factory.mktemp("converted"), []
    for case in (case for name in OPTIMIZERS for case in cases_of(name) if case in selected):
        options = dict(case.options)
        out = convert(runs.checkpoint(case.source), folder / f"{case}" / "checkpoint-2", **options)
        ranks = options.get("world_size", 2)
        changes = {"ranks": ranks, "per_device_batch": 6 // ranks, "stage": options.get("stage")}
        spec = OPTIMIZERS[case.source]
        changes["stage"] = spec.stage if changes["stage"] is None else changes["stage"]
        specs.append(spec.resumed(out, str(case), save_steps=4, **changes))
    for name in (name for name in OPTIMIZERS_SAVED if name in selected):
        for at in (1, 4):
            run = shutil.copytree(runs[name].folder, folder / f"{name}-{at}")
            compose_run(run, at)
            spec = replace(OPTIMIZERS_SAVED[name], saver="", save_steps=5, steps=4 + at // 4)
            specs.append(spec.resumed(run / f"checkpoint-{at}", f"{name}-{at}"))
    return train(specs)


@pytest.mark.parametrize("case", CASES)
def test_stock_resumes_from_what_is_converted(case: Case, runs: Runs, resumed: Mapping[str, Run]) -> None:
    found, wanted = resumed[str(case)].losses, runs[case.source].after(STEP)
    assert found.keys() == wanted.keys()
    assert found == wanted if not case.options else found == pytest.approx(wanted, rel=RELATIVE)


@pytest.mark.parametrize("name", OPTIMIZERS_SAVED)
def test_the_saver_takes_the_states_in_turn(name: str, runs: Runs, resumed: Mapping[str, Run]) -> None:
    """The first save is complete: stock resumes from it with the losses of the straight run. Later ones have all
    masters, and the states of each param from the newest save that has them."""
    stock = name.removesuffix("-saver")
    assert runs[name].losses == runs[stock].losses
    assert resumed[f"{name}-1"].losses == runs[stock].after(1)
    assert_same(states_of(composed(resumed, name, 1)), states_of(runs.checkpoint(stock, 1)))
    found = tensors(states_of(composed(resumed, name, 4)))
    held = {step: tensors(states_of(runs.checkpoint(stock, step))) for step in (3, 4)}
    ages = {param: [step for step in held if is_same(kinds, held[step][param])] for param, kinds in found.items()}
    assert all(ages.values()) and {3, 4} <= {step for steps in ages.values() if len(steps) == 1 for step in steps}
    assert all(found[param][MASTER].equal(held[4][param][MASTER]) for param in found)
    assert resumed[f"{name}-4"].losses.keys() == {5}


def composed(resumed: Mapping[str, Run], name: str, step: int) -> Path:
    return Path(resumed[f"{name}-{step}"].spec.resume_from)


def is_same(kinds: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    return all(one.equal(others[kind]) for kind, one in kinds.items() if kind != MASTER)


@pytest.mark.parametrize("name", ["muon-1", "muon-2", "muon-3"])
def test_muon_is_written_for_what_deepspeed_and_others_have(name: str, runs: Runs, tmp_path: Path) -> None:
    plain = convert(runs.checkpoint(name), tmp_path / "plain" / "checkpoint-2", to="trainer")
    wanted = recipe(plain, dtype="BF16")
    report = llmtailor.merge(
        wanted, tmp_path / "back" / "checkpoint-2", llmtailor.Options(to="deepspeed", stage=2, world_size=3)
    )
    assert any("a resume rounds it to BF16" in one.what for one in report.notices)
    assert_same(states_of(tmp_path / "back" / "checkpoint-2"), states_of(plain))
    with pytest.raises(UnsupportedCheckpoint, match=r"no exp_avg or exp_avg_sq of .*, which a universal"):
        convert(runs.checkpoint(name), tmp_path / "universal", to="universal")


def test_states_in_blocks_are_refused_under_deepspeed(runs: Runs, tmp_path: Path) -> None:
    """In files, and in the training at its first step."""
    with pytest.raises(UnsupportedCheckpoint, match=r"optimizer state state1 is U8 .* not one value for each element"):
        index_checkpoint(runs.checkpoint("bnb-8bit-2"))
    spec = replace(runs["bnb-8bit-2"].spec, name="refused", saver="full")
    with pytest.raises(TrainingFailed, match="the state state1 of the optimizer AdamW8bit is not one"):
        train_here([spec], tmp_path)


def states_of_accelerate(checkpoint: Path) -> States:
    """Of files without DeepSpeed and FSDP; `trainings.optimizers.of` orders the params."""
    tree, weights = torch.load(checkpoint / "optimizer.bin"), load_file(checkpoint / "model.safetensors")
    names = sorted((name for name, _ in build("llama", 3, False).named_parameters()), key=lambda name: "norm" in name)
    states = {name: tree["state"][number] for number, name in enumerate(names)}
    return {name: {MASTER: weights[name], **state.pop(QUANT, {}), **state} for name, state in states.items()}


def test_states_in_blocks_are_composed_under_ddp(runs: Runs, train: Train, tmp_path: Path) -> None:
    """Files of accelerate, from two ranks."""
    base, odd = runs.checkpoint("ddp-8bit", 3), runs.checkpoint("ddp-8bit")
    assert is_sound(base)
    copied, composed = convert(base, tmp_path / "copied" / base.name), tmp_path / "composed" / base.name
    merge(base, composed, {"odd": odd})
    held = states_of_accelerate(base)
    assert any(
        one.dtype is torch.uint8 for kinds in held.values() for one in kinds.values() if one is not kinds["step"]
    )
    assert_same(states_of_accelerate(copied), held)
    assert_same(states_of_accelerate(composed), compose(held, states_of_accelerate(odd), is_odd))
    spec = runs["ddp-8bit"].spec
    resumed = train([spec.resumed(out, out.parent.name) for out in (copied, composed)])
    assert resumed["copied"].losses == runs["ddp-8bit"].after(3)
    assert resumed["composed"].losses.keys() == {4}


@pytest.mark.parametrize("to", ["deepspeed", "fsdp"])
def test_states_of_rows_are_refused_where_params_are_cut(to: str, runs: Runs, tmp_path: Path) -> None:
    options = {"stage": 2} if to == "deepspeed" else {}
    wanted = r"keeps col_var, row_var of .*, one value for each row or column: they can't be cut"
    with pytest.raises(MismatchError, match=wanted):
        convert(runs.checkpoint("ddp-adafactor"), tmp_path / "out", to=to, **options)


def test_params_with_different_states_share_no_group_of_deepspeed(runs: Runs) -> None:
    index = index_checkpoint(runs.checkpoint("muon-2"))
    numels = {name: param.numel for name, param in index.params.items()}
    groups = [ParamGroup(tuple(param for group in index.groups for param in group.params), {})]
    settings = (index.zero.settings, index.precision)
    layout = lay_out_optimizer(index.layout, numels, *settings, world_size=2, stage=3, groups=groups)
    with pytest.raises(MismatchError, match=r"different states of the optimizer: .*momentum_buffer"):
        refuse_states(index, layout)


def test_the_short_suite_has_each_mechanism() -> None:
    assert {*OPTIMIZERS} & SHORT == {"muon-2", "bnb-lion-2", "adafactor-1", "fsdp-stable"}
