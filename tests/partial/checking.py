"""Hold composites of partial checkpoints against the truth that the training processes wrote down."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

import llmtailor
from helpers.composing import compose
from helpers.same import differences
from llmtailor.model.roles import BUFFER, FROZEN, MASTER
from oracle.any import load
from oracle.zero3 import MOMENTS, differ
from trainings.harness import Run

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


def steps_of(name: str, count: int, held: dict[str, int], part: str) -> list[int]:
    """Return the step of the newest save of a param, or of each of the experts that are fused in it."""
    layer = f"layer {layer_of(name)}" if ".layers." in name else part
    parts = [f"{layer} expert {number}" for number in range(count)] if ".experts." in name else [part]
    return [max(held.get(one, -1), held.get(layer, -1)) for one in parts]


def expected(name: str, kind: str, held: dict[str, int], truths: dict[int, dict[str, Any]], part: str) -> torch.Tensor:
    """Return the newest state that was saved of a param; of fused experts that of each."""
    now = truths[max(held.values())][kind][name]
    steps = steps_of(name, len(now), held, part)
    if ".experts." not in name:
        return truths[steps[0]][kind][name]
    return torch.stack([truths[step][kind][name][number] for number, step in enumerate(steps)])


def is_rounded(done: Run) -> bool:
    """Whether its saves have moments rounded to bf16"""
    return (done.spec.options or {}).get("moments") == "bf16"


def check_composite(done: Run, at: int, scratch: Path) -> dict[str, int]:
    """Compose the state at a step, compare it with the truth, and return the step that each part is of."""
    held = newest(done, at)
    ours, stock = scratch / "ours", scratch / "stock"
    compose(done.folder, at, done.spec.ranks, out=ours)
    if not done.spec.stage:
        compare_plain(done, held, at, ours)
        return held
    if not is_rounded(done):
        compose_stock(done, held, at, stock)
        compare_folders(ours, stock)
    compare_with_truth(done, held, at, ours)
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


def compare_folders(ours: Path, stock: Path) -> None:
    """Demand the same files, and in them the same trees, to the bit and the type."""
    compare_files(ours, stock, files(ours))


def compare_files(ours: Path, stock: Path, paths: set[str]) -> None:
    assert files(stock) - files(ours) <= NOT_OURS
    assert not files(ours) - files(stock) - ABOUT
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
        elif path == "adapter_config.json":
            wrong += [path] if sets_as_lists(ours / path) != sets_as_lists(stock / path) else []
        elif (ours / path).read_bytes() != (stock / path).read_bytes():
            wrong.append(path)
    assert not wrong, "\n".join(wrong)


def sets_as_lists(path: Path) -> dict[str, object]:
    """Read PEFT's config; some of its lists are sets, which it writes in another order each time."""
    content = json.loads(path.read_text())
    return {key: sorted(value) if isinstance(value, list) else value for key, value in content.items()}


def compare_with_truth(done: Run, held: dict[str, int], at: int, composite: Path) -> None:
    """Demand every state that the processes had at the step of its part."""
    snapshot = load(composite)
    part_of = {param: part["part"] for part in done.manifest(done.saves[0])["parts"] for param in part["params"]}
    masters = newest_masters(done, at)
    truths = {step: done.truth(step) for step in {at, *held.values(), *masters.values()}}
    for state, tensor in snapshot.states.items():
        if state.kind in (MASTER, *MOMENTS) and not done.spec.round_robin:
            of_kind = masters if state.kind == MASTER else held
            truth = expected(state.param, state.kind, of_kind, truths, part_of.get(state.param, ""))
            if state.kind in MOMENTS and is_rounded(done):
                truth = truth.bfloat16().to(truth.dtype)
            assert not differ(tensor, truth), state
        elif state.kind == FROZEN:
            assert not differ(tensor, truths[at]["frozen"][state.param]), state
        elif state.kind == BUFFER:  # they go with the layer
            truth = truths[masters.get(f"layer {layer_of(state.param)}", at)]
            assert not differ(tensor[0], truth["buffer"][state.param]), state
    kinds = [state.kind for state in snapshot.states]
    trained = [param for param, fact in done.manifest(at)["params"].items() if fact["role"] == "trainable"]
    assert kinds.count(MASTER) == kinds.count("exp_avg") == kinds.count("exp_avg_sq") == len(trained)
    assert kinds.count(FROZEN) == (0 if done.spec.arch.endswith("+lora") else len(truths[at]["frozen"]))


def compare_plain(done: Run, held: dict[str, int], at: int, composite: Path) -> None:
    """Without DeepSpeed all states lie in two files, under numbers, which the process has told the order of."""
    is_adapter = done.spec.arch.endswith("+lora")
    weights_file = "adapter_model.safetensors" if is_adapter else "model.safetensors"
    changing = {"optimizer.pt", weights_file}
    compare_files(composite, done.stock(at), files(composite) - changing)
    stated = json.loads((composite / "trainer_state.json").read_text())["stateful_callbacks"]
    steps = [one["step"] for one in torch.load(composite / "optimizer.pt")["state"].values()]
    lags = sorted({at - int(step) for step in steps} - {0})
    assert stated.get("llmtailor-optimizer", {"attributes": {"step_lags": []}})["attributes"]["step_lags"] == lags
    masters = newest_masters(done, at)
    truths = {step: done.truth(step) for step in {at, *held.values(), *masters.values()}}
    part_of = {param: part["part"] for part in done.manifest(done.saves[0])["parts"] for param in part["params"]}
    now = truths[at]
    weights = {name: expected(name, MASTER, masters, truths, part_of.get(name, "")) for name in now[MASTER]}
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
        wanted = {kind: expected(name, kind, held, truths, part_of.get(name, "")) for kind in MOMENTS}
        steps = {*steps_of(name, len(wanted["exp_avg"]), held, part_of.get(name, ""))}
        # one tensor has one step of Adam: the base's if they differ
        wanted = {"step": truths[steps.pop() if len(steps) == 1 else at]["step"][name], **wanted}
        assert not list(differences(dict(optimizer["state"][number]), wanted)), name


def layer_of(name: str) -> str:
    return name.split(".layers.")[1].split(".")[0]


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
