"""The Trainer under DDP without DeepSpeed, and adapters (PEFT) under DeepSpeed."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainingArguments

from helpers.composing import convert, merge
from helpers.states import part_of
from llmtailor.errors import UnsupportedCheckpoint
from llmtailor.formats.registry import index_checkpoint
from llmtailor.model.roles import MASTER, State
from llmtailor.verify.verify import verify_checkpoint
from oracle.any import load
from oracle.zero3 import assert_same, compose, differ
from trainings.catalogue import DDP, MIDDLE, PEFT
from trainings.harness import Run, Runs, Train
from trainings.models import build

pytestmark = pytest.mark.real

ADAPTER = "adapter_model.safetensors"
NOISE = 5e-4
"""Of the loss in bf16, with another stage of ZeRO"""
RUNS = [*DDP, *PEFT]
CROSSED = {"lora3": 2, "lora2": 3}
"""run -> stage that it is converted to"""


def copy(checkpoint: Path, to: Path) -> Path:
    shutil.copytree(checkpoint, to)
    return to


@pytest.fixture(scope="module")
def resumed(runs: Runs, train: Train, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Stock continues composites of two copies of one checkpoint, and ones in other layouts."""
    root, specs = tmp_path_factory.mktemp("composites"), []
    for name in RUNS:
        source, out = runs.checkpoint(name, MIDDLE), root / name / f"checkpoint-{MIDDLE}"
        merge(source, out, {"odd": copy(source, root / name / "copy")})
        specs.append(runs[name].spec.resumed(out, name, save_steps=6))
    for name, stage in CROSSED.items():
        out = root / "crossed" / name / f"checkpoint-{MIDDLE}"
        convert(runs.checkpoint(name, MIDDLE), out, stage=stage)
        specs.append(runs[name].spec.resumed(out, f"{name} crossed", stage=stage, save_steps=6))
    one = convert(runs.checkpoint("dropout", MIDDLE), root / "one" / f"checkpoint-{MIDDLE}", world_size=1)
    two = convert(one, root / "two" / f"checkpoint-{MIDDLE}", world_size=2)
    specs.append(runs["dropout"].spec.resumed(two, "dropout through one", save_steps=6))
    return train(specs)


def straight(run: Run) -> dict[int, dict[str, float]]:
    """What the run itself logged behind `MIDDLE`, but for the times."""
    return {step: told(log) for step, log in run.logs.items() if step > MIDDLE}


def told(log: Mapping[str, float]) -> dict[str, float]:
    return {key: log[key] for key in ("loss", "grad_norm", "learning_rate")}


@pytest.mark.parametrize("name", RUNS)
def test_a_stock_resume_from_one_step_repeats_the_straight_run(runs: Runs, resumed: dict[str, Run], name: str) -> None:
    assert {step: told(log) for step, log in resumed[name].logs.items()} == straight(runs[name])


# DDP


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_random_states_of_several_processes(runs: Runs, ranks: int, tmp_path: Path) -> None:
    source = runs["dropout"].checkpoint(MIDDLE)
    assert (index_checkpoint(source).form.stage, index_checkpoint(source).world_size) == (0, 2)
    out = convert(source, tmp_path / "out", world_size=ranks)
    found = {path.name: path.read_bytes() for path in out.glob("rng_state*")}
    names = ["rng_state.pth"] if ranks == 1 else [f"rng_state_{rank}.pth" for rank in range(ranks)]
    assert found == {name: (source / f"rng_state_{at % 2}.pth").read_bytes() for at, name in enumerate(names)}
    for name in ("model.safetensors", "scheduler.pt", "trainer_state.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    optimizers = [torch.load(folder / "optimizer.pt", weights_only=True)["state"] for folder in (out, source)]
    assert all(
        torch.equal(optimizers[0][number][kind], tensor)
        for number, state in optimizers[1].items()
        for kind, tensor in state.items()
    )
    assert index_checkpoint(out).world_size == ranks


def test_each_process_goes_on_with_its_own_random_numbers(runs: Runs, resumed: dict[str, Run]) -> None:
    """By way of one process, the second gets the random numbers of the first, and dropout shows it."""
    after, wanted = resumed["dropout through one"].losses, resumed["dropout"].losses
    print(f"ddp: {wanted} with both random states, {after} with one", file=sys.stderr)
    assert after != wanted
    assert after == pytest.approx(wanted, abs=0.05)


def test_deepspeeds_one_group_becomes_the_trainers_two(runs: Runs, tmp_path: Path) -> None:
    """The Trainer makes two, and torch loads no others."""
    source = runs["llama-ds-both"].checkpoint(6)
    assert len(index_checkpoint(source).groups) == 1
    out = convert(source, tmp_path / "out", to="trainer")
    model = build("llama", runs["llama-ds-both"].spec.layers, tied=False)
    trainer = Trainer(model, TrainingArguments(str(tmp_path / "run"), use_cpu=True, weight_decay=0.1, report_to=[]))
    optimizer = trainer.create_optimizer()
    optimizer.load_state_dict(torch.load(out / "optimizer.pt", weights_only=True))
    assert len({group["weight_decay"] for group in optimizer.param_groups}) == 1, "as under DeepSpeed"
    wanted = load(source).states
    for name, param in model.named_parameters():
        for moment in ("exp_avg", "exp_avg_sq"):
            assert not differ(optimizer.state[param][moment], wanted[State(name, moment)])
    lists = torch.load(out / "scheduler.pt", weights_only=True)
    assert len(lists["_last_lr"]) == len(lists["lr_lambdas"]) == 2
    assert verify_checkpoint(out).is_resumable
    assert len(index_checkpoint(convert(source, tmp_path / "one", to="trainer", groups="one")).groups) == 1


# Adapters


@pytest.mark.parametrize("name", CROSSED)
def test_adapters_go_on_with_another_stage(runs: Runs, resumed: dict[str, Run], name: str) -> None:
    after, wanted = resumed[f"{name} crossed"].losses, runs[name].losses
    print(f"{name} to stage {CROSSED[name]}: {wanted} there, {after} here", file=sys.stderr)
    assert after == pytest.approx({step: wanted[step] for step in (5, 6)}, abs=NOISE, rel=0)


@pytest.mark.parametrize("name", PEFT)
@pytest.mark.parametrize("have", ["whole", "none", "empty"])
def test_the_adapter_file_is_the_one_that_stock_saves(runs: Runs, name: str, have: str, tmp_path: Path) -> None:
    """Also where the base has none, or an empty one."""
    base, saved = copy(runs[name].checkpoint(6), tmp_path / "base"), runs[name].checkpoint(6) / ADAPTER
    if have == "none":
        (base / ADAPTER).rename(base / "adapter_model.bin")
    if have == "empty":
        save_file({}, base / ADAPTER)
    out = tmp_path / "out"
    report = merge(base, out)
    assert (out / ADAPTER).read_bytes() == saved.read_bytes()
    assert [path.name for path in out.iterdir() if "model." in path.name] == [ADAPTER]
    assert not report.notices


def test_an_adapter_is_composed_with_its_masters(runs: Runs, tmp_path: Path) -> None:
    run = runs["lora2"]
    taken = {1: run.checkpoint(2), "lm_head": run.checkpoint(4)}
    out = tmp_path / "out"
    merge(run.checkpoint(6), out, taken)
    steps = {1: "2", "lm_head": "4"}
    choose = lambda name: steps.get(part_of(name.removeprefix("base_model.model.")), "6")  # noqa: E731
    wanted = compose({step: load(run.checkpoint(int(step))) for step in ("2", "4", "6")}, "6", choose)
    assert_same(load(out), wanted, rest=False)
    files = {step: load_file(run.checkpoint(int(step)) / ADAPTER) for step in ("2", "4", "6")}
    found = load_file(out / ADAPTER)
    assert found.keys() == files["6"].keys()
    assert not any(differ(tensor, files[choose(name)][name]) for name, tensor in found.items())
    assert any(differ(tensor, files["6"][name]) for name, tensor in found.items())
    model = PeftModel.from_pretrained(build("qwen2", 3, tied=True), out)
    loaded = get_peft_model_state_dict(model)
    assert all(torch.equal(loaded[name], tensor.float()) for name, tensor in found.items())


def test_frozen_params_stay_out_of_the_shards(runs: Runs, tmp_path: Path) -> None:
    """An empty ``frozen_param_fragments`` would make DeepSpeed look for the frozen params of the model in it."""
    at = runs["lora2"].checkpoint(6)
    for number, stage in enumerate((1, 3, 2)):
        at = convert(at, tmp_path / str(number), stage=stage)
        model = torch.load(next(at.glob("global_step6/*model_states.pt")), weights_only=False)
        assert (model["frozen_param_shapes"], model["frozen_param_fragments"]) == (None, None)
    assert (at / ADAPTER).read_bytes() == (runs["lora2"].checkpoint(6) / ADAPTER).read_bytes()


def test_an_adapter_by_other_names_is_carried_or_left_out(runs: Runs, tmp_path: Path) -> None:
    run = runs["lora3"]
    base = copy(run.checkpoint(6), tmp_path / "base")
    tensors = load_file(base / ADAPTER)
    save_file({name.replace("lora_A", "lora_X"): tensor for name, tensor in tensors.items()}, base / ADAPTER)
    out = tmp_path / "carried"
    report = merge(base, out)
    assert (out / ADAPTER).read_bytes() == (base / ADAPTER).read_bytes()
    assert not report.notices
    out = tmp_path / "left"
    report = merge(base, out, {1: run.checkpoint(4)})
    assert not (out / ADAPTER).exists()
    assert [
        notice.what.partition(":")[0] for notice in report.notices if notice.where == f"{report.base}/{ADAPTER}"
    ] == ["the file is left out"]


def test_adapters_in_folders_of_their_own(runs: Runs, train: Train, tmp_path: Path) -> None:
    """A trained one that is not called ``default``, beside a frozen one, which no shard holds."""
    run = runs["loras1"]
    base, source = run.checkpoint(6), run.checkpoint(4)
    assert not {"adapter_config.json", "config.json", "model.safetensors"} & {path.name for path in base.iterdir()}
    out = tmp_path / "out"
    report = merge(base, out, {1: source})
    assert not [notice for notice in report.notices if "adapter" in f"{notice.where}{notice.what}"]
    choose = lambda name: source if part_of(name.removeprefix("base_model.model.")) == 1 else base  # noqa: E731
    stock = {one: load_file(one / "policy" / ADAPTER) for one in (base, source)}
    found = load_file(out / "policy" / ADAPTER)
    assert found.keys() == stock[base].keys()
    assert not any(differ(tensor, stock[choose(name)][name]) for name, tensor in found.items())
    assert any(differ(tensor, stock[base][name]) for name, tensor in found.items())
    for path in (f"reference/{ADAPTER}", "reference/adapter_config.json", "policy/adapter_config.json"):
        assert (out / path).read_bytes() == (base / path).read_bytes()
    assert not (out / "model.safetensors").exists()
    assert [one.code for one in verify_checkpoint(out, deep=True).findings] == []

    plain, third = convert(base, tmp_path / "plain", stage=0), convert(base, tmp_path / "third", stage=3)
    masters = {state.param: tensor for state, tensor in load(base).states.items() if state.kind == MASTER}
    written = load_file(plain / "policy" / ADAPTER)
    assert len(written) == len(masters)
    for param, tensor in masters.items():
        assert not differ(written[param.replace(".modules_to_save", "").replace(".policy", "")], tensor)
    assert (plain / "reference" / ADAPTER).read_bytes() == (base / "reference" / ADAPTER).read_bytes()
    again = convert(plain, tmp_path / "again")
    assert (again / "policy" / ADAPTER).read_bytes() == (plain / "policy" / ADAPTER).read_bytes()
    done = train([run.spec.resumed(third, "loras1 crossed", stage=3, save_steps=8, steps=8)])
    assert {*done["loras1 crossed"].losses} == {7, 8}


@pytest.mark.parametrize("name", PEFT)
def test_an_adapter_without_deepspeed_has_the_masters(runs: Runs, name: str, tmp_path: Path) -> None:
    source = runs[name].checkpoint(6)
    out = convert(source, tmp_path / "out", stage=0)
    rounded, found = load_file(source / ADAPTER), load_file(out / ADAPTER)
    masters = {
        state.param.replace(".modules_to_save", "").replace(".default", ""): tensor
        for state, tensor in load(source).states.items()
        if state.kind == MASTER
    }
    assert found.keys() == rounded.keys() == masters.keys()
    assert not any(differ(found[param], tensor) for param, tensor in masters.items())
    again = convert(out, tmp_path / "again")
    assert (again / ADAPTER).read_bytes() == (out / ADAPTER).read_bytes()
    verdict = verify_checkpoint(out, deep=True)
    assert verdict.is_resumable and not [finding for finding in verdict.findings if finding.severity == "error"]
    with pytest.raises(UnsupportedCheckpoint, match="does not state the precision"):
        convert(out, tmp_path / "back", stage=2)


def test_what_the_trainer_itself_saves_of_an_adapter_without_deepspeed_is_refused(runs: Runs, tmp_path: Path) -> None:
    plain = copy(runs["dropout"].checkpoint(6), tmp_path / "plain")
    (plain / "model.safetensors").unlink()
    shutil.copy(runs["lora3"].checkpoint(6) / "adapter_config.json", plain)
    with pytest.raises(UnsupportedCheckpoint, match="a PEFT run without DeepSpeed"):
        index_checkpoint(plain)
