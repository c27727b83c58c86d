"""Trainings with the saver: what it wrote, what goes wrong, and what goes on from it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import llmtailor
from helpers.commands import call, run_here
from helpers.composing import compose
from helpers.files import contents, cut, names
from helpers.same import differences
from helpers.states import in_8_bits, in_24_bits, of_16_bits, read, refined
from llmtailor.formats.registry import index_checkpoint
from llmtailor.model.roles import EXP_AVG, EXP_AVG_SQ, MASTER
from llmtailor.recipe.strategies import StrategyOptions
from llmtailor.runs.choose import choose_for_run
from oracle.any import load
from oracle.zero3 import MOMENTS, differ
from saving.loop import KINDS, States, fold, log_of
from trainings.catalogue import CHECKED, LIVELY, SAVED
from trainings.harness import Run

# --- composites against what the Trainer itself saved, and what processes without DeepSpeed held ----------------------

NOT_OURS = {"zero_to_fp32.py", "zero_to_torch.py"}
"""Files of the Trainer's checkpoints that no resume reads"""
ABOUT = {"llmtailor.json", "README.md"}


def without_saver(log: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The Trainer's log without what the saver put there"""
    return [line for line in log if not any(key.startswith("checkpoint/") for key in line)]


def newest(done: Run, at: int) -> dict[str, int]:
    """Return the step that each part's newest state is of, by the manifests, oldest first."""
    held = {part["part"]: step for step in done.saves if step <= at for part in done.manifest(step)["parts"]}
    return dict(sorted(held.items(), key=lambda item: item[1]))


def newest_masters(done: Run, at: int) -> dict[str, int]:
    """Return the step that each part's newest masters are of: a save may have them without the moments."""
    saves = {step: done.manifest(step) for step in done.saves if step <= at}
    return {one["part"]: step for step, found in saves.items() for one in (*found["parts"], *found.get("masters", ()))}


def check_composite(done: Run, at: int, scratch: Path) -> dict[str, int]:
    held = newest(done, at)
    ours, stock = scratch / "ours", scratch / "stock"
    compose(done.folder, at, done.spec.ranks, out=ours)
    if not done.spec.stage:
        compare_plain(done, at, ours)
        return held
    compose_stock(done, held, at, stock)
    if (done.spec.options or {}).get("moments"):
        compare_rounded(done, at, ours, stock)
    else:
        compare_files(ours, stock, names(ours))
    return held


def compose_stock(done: Run, held: dict[str, int], at: int, out: Path) -> None:
    """Compose the same from the checkpoints that the Trainer itself has made."""
    masters = newest_masters(done, at)
    parts: list[dict[str, object]] = []
    for part, step in held.items():
        select = int(part[6:]) if part[6:].isdecimal() else part
        parts.append({"from": str(done.stock(masters[part])), "select": select})
        parts += [{"from": str(done.stock(step)), "select": select, "only": "moments"}] * (masters[part] != step)
    recipe = out.with_name(f"{out.name}.yaml")
    recipe.write_text(yaml.safe_dump({"base_model": str(done.stock(at)), "parts": parts}))
    llmtailor.merge(recipe, out, llmtailor.Options(world_size=done.spec.ranks))


def compare_rounded(done: Run, at: int, ours: Path, stock: Path) -> None:
    found, wanted = load(ours).states, load(stock).states
    assert found.keys() == wanted.keys()
    saved = [load(done.stock(step)).states for step in done.saves if step <= at]
    is_8bit = done.spec.options["moments"] == "8bit"
    for state, tensor in wanted.items():
        rounded = [tensor]
        if state.kind in MOMENTS:
            rounded = [in_8_bits(tensor, state.kind, done.spec.ranks) if is_8bit else tensor.bfloat16().float()]
        elif state.kind == MASTER and done.spec.options["masters"] == "bf16":
            rounded = [of_16_bits(tensor, older[state], done.spec.ranks) for older in saved]
            rounded += [refined(tensor, in_24_bits(older[state])) for older in saved]
        elif state.kind == MASTER:
            rounded = [in_24_bits(tensor)]
        assert any(not differ(found[state], one) for one in rounded), state


def compare_files(ours: Path, stock: Path, paths: set[str]) -> None:
    """Demand the same files, and in them the same trees, to the bit and the type."""
    assert names(stock) - names(ours) <= NOT_OURS
    assert not names(ours) - names(stock) - ABOUT
    wrong: list[str] = []
    for path in sorted(paths - ABOUT):
        if path.endswith((".pt", ".pth")):
            trees = [torch.load(folder / path, weights_only=False) for folder in (ours, stock)]
            wrong += [f"{path}{where}" for where in differences(*trees)]
        elif path == "trainer_state.json":
            states = [json.loads((folder / path).read_text()) for folder in (ours, stock)]
            for state in states:
                state["log_history"] = without_saver(state["log_history"])
                state["stateful_callbacks"].pop("llmtailor-optimizer", None)  # see below
            wrong += [f"{path}{where}" for where in differences(*states)]
        elif path.endswith("adapter_config.json"):
            wrong += [path] if sets_as_lists(ours / path) != sets_as_lists(stock / path) else []
        elif (ours / path).read_bytes() != (stock / path).read_bytes():
            wrong.append(path)
    assert not wrong, "\n".join(wrong)


def sets_as_lists(path: Path) -> dict[str, object]:
    """Read PEFT's config; some of its lists are sets, which it writes in another order each time."""
    content = json.loads(path.read_text())
    return {key: sorted(value) if isinstance(value, list) else value for key, value in content.items()}


def compare_plain(done: Run, at: int, composite: Path) -> None:
    """Without DeepSpeed all states lie in two files, under numbers, which the process has told the order of."""
    is_adapter = done.spec.arch.endswith("+lora")
    weights_file = "adapter_model.safetensors" if is_adapter else "model.safetensors"
    changing = {"optimizer.pt", weights_file}
    compare_files(composite, done.stock(at), names(composite) - changing)
    stated = json.loads((composite / "trainer_state.json").read_text())["stateful_callbacks"]
    steps = [one["step"] for one in torch.load(composite / "optimizer.pt")["state"].values()]
    lags = sorted({at - int(step) for step in steps} - {0})
    assert stated.get("llmtailor-optimizer", {"attributes": {"step_lags": []}})["attributes"]["step_lags"] == lags
    masters = newest_masters(done, at)
    saves = {step: done.manifest(step) for step in done.saves if step <= at}
    truths = {step: done.truth(step) for step in saves}
    now = truths[at]

    def newest_of(value: Callable[[int, torch.Tensor], torch.Tensor]) -> States:
        made = {
            step: {name: {kind: value(step, of[kind][name]) for kind in KINDS} for name in of[MASTER]}
            for step, of in truths.items()
        }
        return fold(made, saves)

    saved, step_of = newest_of(lambda step, state: state), newest_of(lambda step, state: torch.full_like(state, step))
    weights = {name: saved[name, MASTER] for name in now[MASTER]}
    if is_adapter:  # saved under the names of PEFT, and without the model below
        weights = {name.replace(".modules_to_save", "").replace(".default", ""): one for name, one in weights.items()}
    else:
        weights |= now["frozen"]
    for name in now["buffer"]:
        weights[name] = truths[masters.get(f"layer {layer_of(name)}", at)]["buffer"][name]
    stored = load_file(composite / weights_file)
    tied = not is_adapter and json.loads((composite / "config.json").read_text()).get("tie_word_embeddings")
    assert stored.keys() == weights.keys() - ({"lm_head.weight"} if tied else set())
    assert not [name for name, tensor in stored.items() if differ(tensor, weights[name])]
    optimizer, base = (torch.load(folder / "optimizer.pt") for folder in (composite, done.stock(at)))
    groups = [{key: value for key, value in group.items() if key != "lt_params"} for group in optimizer["param_groups"]]
    assert not list(differences(groups, base["param_groups"]))
    assert list(optimizer["state"]) == list(range(len(now["order"])))
    for number, name in enumerate(now["order"]):
        wanted = {kind: saved[name, kind] for kind in MOMENTS}
        steps = step_of[name, EXP_AVG].unique().tolist()
        # one tensor has one step of Adam: the base's if they differ
        wanted = {"step": truths[int(steps[0]) if len(steps) == 1 else at]["step"][name], **wanted}
        assert not list(differences(dict(optimizer["state"][number]), wanted)), name


def layer_of(name: str) -> str:
    return name.split(".layers.")[1].split(".")[0]


# --- tests ------------------------------------------------------------------------------------------------------------

pytestmark = pytest.mark.real

SPEEDS = ("_runtime", "_per_second")
INEXACT = {"z3-cpu-adam", "z3-rounded", "z2-rounded", "z3-bf16"}
"""DeepSpeedCPUAdam computes its bias correction anew after a resume, so the steps that follow differ a little; and so
they do after moments that were saved rounded."""


# Composites: what the processes held, and what the Trainer would have saved, bit for bit


@pytest.mark.parametrize("name", CHECKED)
def test_the_first_save_is_a_complete_checkpoint(runs, name, tmp_path):
    done = runs[name]
    first = done.saves[0]
    assert set(check_composite(done, first, tmp_path).values()) == {first}


@pytest.mark.parametrize("name", CHECKED)
def test_a_composite_has_of_every_part_the_newest_that_was_saved(runs, name, tmp_path):
    done = runs[name]
    last = done.saves[-1]
    assert set(check_composite(done, last, tmp_path).values()) == set(done.saves[-1 if name == "z3-full" else -2 :])


@pytest.mark.parametrize(
    ("name", "at", "steps"),
    [
        ("z3-again", 6, {4, 6}),  # what it went on from, and what it saved itself
        ("z3-again", 8, {6, 8}),
        ("z3-bf16-again", 6, {4, 6}),  # no differences from saves of another process
        ("z3-bf16-again", 8, {6, 8}),
        ("z3-twice", 8, {6, 8}),
        ("z3-then-filter", 8, {6, 8}),
        ("z3-on-3", 6, {4, 6}),  # of 2 and of 3 ranks
        ("z3-on-3", 8, {6, 8}),
        ("z3-full-on-3", 8, {8}),
    ],
)
def test_it_is_so_after_failures_too(runs, name, at, steps, tmp_path):
    assert set(check_composite(runs[name], at, tmp_path).values()) == steps


def test_masters_that_differ_from_another_save_need_it(runs, tmp_path):
    """gc keeps it. Without it, these masters count as not saved."""
    done, run = runs["z3-bf16"], tmp_path / "run"
    shutil.copytree(done.folder / "partial", run / "partial")
    manifest = done.manifest(8)
    bases = {one["part"]: one["base"] for one in manifest["masters"]}
    assert {*bases.values()} == {done.manifest(6)["save_id"]}
    compose(done.folder, 8, 2, out=tmp_path / "whole")
    call("gc", run, "--keep", 1, "--yes")
    assert sorted(one.name for one in (run / "partial").glob("step-*")) == ["step-00000006", "step-00000008"]
    compose(run, 8, 2, out=tmp_path / "kept")
    assert contents(tmp_path / "kept", *ABOUT) == contents(tmp_path / "whole", *ABOUT)
    recipe = tmp_path / "r.yaml"
    parts = [{"from": "run/partial/step-00000006", "select": [*bases], "only": "moments"}]
    recipe.write_text(yaml.safe_dump({"base_model": "run/partial/step-00000008", "parts": parts}))
    call("merge", recipe, tmp_path / "by recipe", "--checksum")
    shutil.move(run / "partial" / "step-00000006", tmp_path / "elsewhere")
    shutil.copytree(done.partial(2), run / "partial" / "step-00000002")
    parts[0]["from"] = "run/partial/step-00000002"
    recipe.write_text(yaml.safe_dump({"base_model": "run/partial/step-00000008", "parts": parts}))
    wrong = call("merge", recipe, tmp_path / "by recipe, without", code=5).stderr
    assert "its masters are differences from those of another save: put that back beside it" in wrong
    call("merge", "--run", run, "--at", 8, tmp_path / "older")
    rows = json.loads((tmp_path / "older" / "llmtailor.json").read_text())["parts"]
    steps = {row["part"]: row["step"] for row in rows}
    assert {steps[part] for part in bases if part in steps} == {2}
    full = tmp_path / "full"
    shutil.copytree(done.folder / "partial", full / "partial")
    for step in (6, 8):
        shutil.copytree(done.stock(step), full / f"checkpoint-{step}")
    thinned = call("thin", full, "--strategy", "full", "--yes", "--trust-unrecorded").stdout
    assert "the composite of step 6 would have older states without it" in thinned and (full / "checkpoint-6").exists()


# Training that goes on from composites: by the stock Trainer, and with the saver attached


def comparable(done):
    """The log line by line, without times, and without the summary of this process's own steps."""
    return [
        {key: value for key, value in line.items() if not key.endswith(SPEEDS)}
        for line in without_saver(done.result()["log"])
        if "train_loss" not in line
    ]


@pytest.mark.parametrize("name", LIVELY)
def test_the_saver_changes_nothing_in_a_training(runs, name):
    """Dropout, gradient accumulation, evaluations at the steps that are saved, and a schedule that follows them."""
    watched, alone = runs[name], runs[f"{name}-alone"]
    assert comparable(watched) == comparable(alone)
    lines = comparable(alone)
    assert sum("loss" in line for line in lines) == 8 and sum("eval_loss" in line for line in lines) == 4
    rates = [line["learning_rate"] for line in lines if "loss" in line]
    assert len(set(rates)) > 2
    about = [line for line in watched.result()["log"] if "checkpoint/bytes" in line]
    assert [line["checkpoint/step"] for line in about] == watched.saves == [2, 4, 6, 8]
    assert {"checkpoint/bytes", "checkpoint/stall_s", "checkpoint/stalest_part_steps"} <= about[0].keys()


@pytest.mark.parametrize("resume", [f"{name}@{job.every}" for name, job in SAVED.items()])
def test_a_stock_resume_from_a_complete_save_repeats_the_straight_run(runs, resume):
    name = resume.partition("@")[0]
    done, resumed = runs[name], runs[resume]
    assert resumed.spec.policy is None
    if name in INEXACT:
        assert resumed.losses == pytest.approx(done.losses, rel=1e-3)
    else:
        assert comparable(resumed) == comparable(done)
    summary = resumed.result()["log"][-1]
    own = [resumed.losses[step] for step in after(resumed)]
    assert len(own) == done.spec.steps - resumed.spec.at
    assert summary["train_loss"] == pytest.approx(sum(own) / len(own))


def after(done):
    return [step for step in done.losses if step > done.spec.at]


@pytest.mark.parametrize("resume", ["z3@6", "z3-layer@4", "z2@4", "z1@4", "ddp@4"])
def test_a_stock_resume_from_halves_stays_near_the_straight_run(runs, resume):
    done, resumed = runs[resume.partition("@")[0]], runs[resume]
    assert len(set(newest(resumed, resumed.spec.at).values())) == 2
    straight = done.losses
    spread = max(straight.values()) - min(straight.values())
    for step in after(resumed):
        assert resumed.losses[step] != straight[step]
        assert abs(resumed.losses[step] - straight[step]) < spread / 2


@pytest.mark.parametrize(
    ("name", "taken_up"),
    [("z3-again", [4]), ("z3-bf16-again", [4]), ("z3-twice", [4, 6]), ("z3-on-3", [4]), ("z3-then-filter", [4])],
)
def test_the_record_of_saves_is_taken_up(runs, name, taken_up):
    """No new complete base, the policy goes on where it was, and the log of saves is one."""
    done, straight = runs[name], runs["z3-bf16" if name == "z3-bf16-again" else "z3"]
    assert done.saves == straight.saves == [2, 4, 6, 8]
    for step in done.saves:
        ledger = done.manifest(step)["ledger"]
        assert ledger["saves"] == step // 2
        assert sorted(ledger["history"].values()) == [end for end in taken_up if end < step]
    parts = {step: [part["part"] for part in done.manifest(step)["parts"]] for step in done.saves}
    if name != "z3-then-filter":
        assert parts == {step: [part["part"] for part in straight.manifest(step)["parts"]] for step in straight.saves}
    else:
        assert parts[8] == ["embed_tokens", "layer 0", "layer 2", "norm", "lm_head"]
    given_up = [step for step in (6, 8) if step > taken_up[-1]]
    moved = sorted(path.name for path in (done.folder / "partial").glob("step-*.abandoned*"))
    assert [name for name in moved if int(name[5:13]) in given_up]
    [warning] = done.messages
    assert all(f"step-{step:08}" in warning for step in given_up)


def lines_of(done):
    """The log of saves, by step; what was saved again after a failure goes before what was given up."""
    return {line["step"]: line for line in log_of(done.folder)}


def exact_drift(before, now, params):
    """|w - w_saved| / |w_saved| from the truth."""
    moved = size = 0.0
    for param in params:
        old, new = before[param].double(), now[param].double()
        moved, size = moved + float((new - old).square().sum()), size + float(old.square().sum())
    return math.sqrt(moved / size)


MEASURED = [name for name in CHECKED if name != "ddp-mixtral"]
"""Its fused experts, whole on a rank, are too large to be kept whole."""


def held_at(done: Run, step: int, kind: str) -> dict[str, torch.Tensor]:
    """Return what the processes held, by their own word or as the Trainer has saved it."""
    return dict(load(done.stock(step)).kind(kind) if done.spec.stage else done.truth(step)[kind])


@pytest.mark.parametrize("name", MEASURED)
def test_change_is_measured_since_a_parts_own_last_save(runs, name):
    """Also right after a resume. Small tensors are kept whole, so that only rounding is between both."""
    done = runs[name]
    base = done.manifest(done.saves[0])["parts"]
    masters = {step: held_at(done, step, MASTER) for step in done.saves}
    for step in done.saves[1:]:
        held, line = newest(done, step - 1), lines_of(done)[step]
        squares, costs = held_at(done, step, "exp_avg_sq"), {}
        for part in base:
            before, now = masters[held[part["part"]]], masters[step]
            exact = exact_drift(before, now, part["params"])
            assert line["drift"][part["part"]] == pytest.approx(exact, rel=1e-4), (step, part["part"])
            costs[part["part"]] = sum(
                float((squares[one].double().sqrt() * (now[one].double() - before[one].double()).abs()).sum())
                for one in part["params"]
            )
        found = line["expected_loss"]
        # under fp16, the first steps are skipped
        correction = (
            sum(costs.values()) / sum(found.values()) if done.spec.dtype == "fp16" else math.sqrt(1 - 0.999**step)
        )
        assert found == pytest.approx({part: cost / correction for part, cost in costs.items()}, rel=1e-3)


# Saves that go wrong, and trainings that are refused


@pytest.mark.parametrize("name", ["full-0", "full-1"])
def test_a_full_disk_costs_one_save(runs, name, tmp_path):
    """Training goes on as if nothing had been, one warning says what happened, and the next save makes up for it."""
    done = runs[name]
    assert len(done.losses) == done.spec.steps
    assert done.saves == [2, 6]
    assert not list((done.folder / "partial").glob("step-00000004*"))
    [warning] = done.messages
    rank = done.spec.disturb["rank"]
    assert (
        "step 4 failed" in warning
        and any(
            f"{name}: can't write" in warning for name in (f"rank-{rank:05}-of-00002.safetensors", "training_args.bin")
        )
        and "fix:" in warning
    )
    lines = log_of(done.folder)
    assert [(line["step"], "failed" in line) for line in lines] == [(2, False), (4, True), (6, False)]
    assert [part["why"] for part in done.manifest(6)["parts"]] == ["odd half"] * 2
    assert set(check_composite(done, 6, tmp_path).values()) == {2, 6}


def test_a_slow_disk_tears_nothing(runs, tmp_path):
    """Several steps pass while a save is written."""
    done = runs["slow-skip"]
    assert len(done.losses) == done.spec.steps
    skipped = [message for message in done.messages if "still being written" in message]
    assert len(skipped) == done.spec.steps - len(done.saves) > 0
    assert done.saves[-1] == done.spec.steps
    for step in done.saves:
        assert set(check_composite(done, step, tmp_path / str(step)).values()) == {step}


def test_each_node_saves_on_its_own_disk_first(runs, tmp_path):
    done = runs["nodes"]
    assert done.saves == [2, 4, 6]
    for step in done.saves:
        check_composite(done, step, tmp_path / str(step))
    for rank in (0, 1):
        [folder] = (done.folder / "nodes" / str(rank) / "partial").glob("step-*")
        assert folder.name == "step-00000006"
        tensors = sorted(path.name for path in folder.glob("*.safetensors"))
        assert tensors == [f"frozen-0000{rank}-of-00002.safetensors", f"rank-0000{rank}-of-00002.safetensors"]
        assert (folder / "manifest.json").read_bytes() == (done.partial(6) / "manifest.json").read_bytes()
    lines = log_of(done.folder)
    assert all(line["copied_s"] >= line["publish_s"] > 0 for line in lines)


def test_the_disks_of_all_nodes_make_up_a_save(runs, tmp_path):
    """The run's folder has lost a save; the nodes' folders, copied into one, still have it."""
    done, run, nodes = runs["nodes"], tmp_path / "run", tmp_path / "nodes"
    shutil.copytree(done.folder / "partial", run / "partial")
    shutil.rmtree(run / "partial" / "step-00000006")
    one = run_here("merge", "--run", run, "--also", done.folder / "nodes" / "0", "--dry-run", "--json")
    assert json.loads(one.stdout)["global_step"] == 4
    for rank in (0, 1):
        shutil.copytree(done.folder / "nodes" / str(rank), nodes, dirs_exist_ok=True)
    both = run_here("merge", "--run", run, "--also", nodes, tmp_path / "out", "--json")
    assert json.loads(both.stdout)["global_step"] == 6


@pytest.mark.parametrize(("name", "files"), [("frozen-2", 1), ("frozen-3", 2)])
def test_frozen_params_are_written_once_and_again_when_they_change(runs, name, files, tmp_path):
    done = runs[name]
    inodes = {step: [path.stat().st_ino for path in sorted(done.partial(step).glob("frozen-*"))] for step in done.saves}
    assert [len(found) for found in inodes.values()] == [files] * 3
    assert inodes[2] == inodes[4] and not set(inodes[4]) & set(inodes[6])
    check_composite(done, 6, tmp_path)  # has them as they are now


@pytest.mark.parametrize("name", ["z3-teacher"])
def test_frozen_params_that_change_right_after_each_step_are_saved_as_they_were(runs, name, tmp_path):
    done = runs[name]
    assert done.saves == [2, 4, 6]
    for step in done.saves:
        check_composite(done, step, tmp_path / str(step))


def test_small_files_that_do_not_change_are_links(runs):
    done = runs["z3-extras-w3"]
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert len({(done.partial(step) / name).stat().st_ino for step in done.saves}) == 1


@pytest.mark.parametrize("name", ["z3-fp16", "z2-fp16"])
def test_nothing_is_saved_before_the_first_step_of_the_optimizer(runs, name):
    """fp16: the first steps overflow."""
    done = runs[name]
    assert done.saves == [2, 3, 4, 5, 6]
    [warning] = done.messages
    assert "step 1: save skipped" in warning
    assert [part["why"] for part in done.manifest(2)["parts"]] == ["complete base"] * 6


@pytest.mark.parametrize("name", ["z3", pytest.param("z3-mixtral", marks=pytest.mark.long)])
def test_without_deepspeed_the_weights_are_the_masters_by_the_params_own_names(runs, name, tmp_path):
    done = runs[name]
    made = {}
    for form, stage in (("zero", None), ("plain", 0)):
        recipe = choose_for_run(done.folder, done.saves[-1], StrategyOptions("latest"))[0]
        llmtailor.merge(recipe, tmp_path / form, llmtailor.Options(stage=stage))
        made[form] = index_checkpoint(tmp_path / form)
    states = [state for state in made["zero"].held if state.kind in (MASTER, EXP_AVG, EXP_AVG_SQ)]
    assert {state.param for state in states} == load_file(tmp_path / "plain/model.safetensors").keys()
    for state in states:
        zero, plain = (read(tmp_path / form, made[form].held[state]) for form in ("zero", "plain"))
        assert torch.equal(zero, plain), state


def test_a_damaged_save_with_frozen_params_is_salvaged(runs, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(runs["z1-extras"].folder, run)
    cut(next((run / "partial" / f"step-{runs['z1-extras'].saves[-1]:08}").glob("rank-00000-*")))
    call("salvage", run, "-o", tmp_path / "out")
    assert llmtailor.verify_checkpoint(tmp_path / "out", deep=True).is_resumable


# Experts as parts of their own, in trainings of a Mixtral whose experts transformers fuses: here, so that no other
# worker of the tests trains the same again


def experts_of(manifest):
    return [part["part"] for part in manifest["parts"] if " expert " in part["part"]]


@pytest.mark.parametrize("name", ["z3-experts", "z2-experts", "ddp-experts"])
def test_a_composite_has_the_newest_of_every_expert(runs, name, tmp_path):
    done = runs[name]
    assert len(experts_of(done.manifest(2))) == 9
    mixed = []
    for step in done.saves[1:]:
        held = check_composite(done, step, tmp_path / str(step))
        steps = {layer: {held[f"layer {layer} expert {number}"] for number in range(3)} for layer in range(3)}
        mixed += [layer for layer in steps if len(steps[layer]) > 1]
    assert mixed, "no layer had experts of several steps"
    assert any(0 < len(experts_of(done.manifest(step))) < 9 for step in done.saves)


@pytest.mark.parametrize("name", ["ddp-experts"])
def test_the_change_of_each_expert_is_its_own(runs, name):
    done = runs[name]
    masters = {step: done.truth(step)["master"] for step in done.saves}
    for step in done.saves[1:]:
        held, line = newest(done, step - 1), lines_of(done)[step]
        for part in experts_of(done.manifest(2)):
            _, layer, _, number = part.split()
            since = masters[held[part]]
            names = [name for name in since if f".layers.{layer}.mlp.experts." in name]
            assert len(names) == 2
            before, now = ({name: of[name][int(number)] for name in names} for of in (since, masters[step]))
            assert line["drift"][part] == pytest.approx(exact_drift(before, now, names), rel=1e-4), (step, part)
        chosen = experts_of(done.manifest(step))
        left_out = [part for part in experts_of(done.manifest(2)) if part not in chosen]
        assert chosen and left_out
