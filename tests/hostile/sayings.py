"""Checkpoints whose files are sound, and say what can't be."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from helpers.checkpoints import edit, model_states, optim_states
from hostile.bombs import Build, Bytes, plain, sparse

NORM = "model.norm.weight"


def file(name: str, content: Bytes | Build) -> Build:
    return lambda checkpoint: (plain(content) if isinstance(content, bytes) else content)(checkpoint / name)  # type: ignore[arg-type]


def model(change: Callable[[dict], object]) -> Build:
    """Change model_states on both ranks."""
    return lambda checkpoint: [edit(model_states(checkpoint, rank), change) for rank in (0, 1)].clear()


def optim(change: Callable[[dict], object]) -> Build:
    """Change optim_states on both ranks."""
    return lambda checkpoint: [edit(optim_states(checkpoint, rank), change) for rank in (0, 1)].clear()


def tells(**changes: object) -> Build:
    return model(lambda tree: tree.update(changes))


def shapes(group: int, name: str, shape: object) -> Build:
    return model(lambda tree: tree["param_shapes"][group].update({name: shape}))


def inner(tree: dict) -> dict:
    return tree["optimizer_state_dict"]["optimizer_state_dict"]


def hyper(**changes: object) -> Build:
    return optim(lambda tree: inner(tree)["param_groups"][0].update(changes))


def step(value: object) -> Build:
    """Change Adam's step, which a composite's manifest excuses from agreeing with the other counters."""

    def change(tree: dict) -> None:
        for state in inner(tree)["state"].values():
            state["step"] = value

    def build(checkpoint: Path) -> None:
        file("llmtailor.json", b'{"parts": []}')(checkpoint)
        optim(change)(checkpoint)

    return build


def kind(name: object) -> Build:
    """Call the first moments otherwise."""

    def change(tree: dict) -> None:
        for state in inner(tree)["state"].values():
            state[name] = state.pop("exp_avg")

    return optim(change)


def lists() -> bytes:
    return b"[" + b"[]," * 5_000_000 + b"[]]"


SAYINGS: dict[str, tuple[Build, str]] = {
    "latest of 1 TB": (file("latest", sparse(1 << 40)), "should never need more than"),
    "latest of 10 MB": (file("latest", b"x" * 10_000_000), "should never need more than"),
    "trainer_state.json of 1 TB": (file("trainer_state.json", sparse(1 << 40)), "should never need more than"),
    "config.json of nothing but lists": (file("config.json", lambda path: plain(lists)(path)), "not a JSON object"),
    "trainer_state.json a million levels deep": (file("trainer_state.json", b"[" * 1_000_000), "not JSON"),
    "a global_step of 5000 digits": (file("trainer_state.json", b'{"global_step": %s}' % (b"9" * 5000)), "not JSON"),
    "a global_step that is a text": (file("trainer_state.json", b'{"global_step": "100"}'), "not a number of steps"),
    "a global_step of true": (file("trainer_state.json", b'{"global_step": true}'), "not a number of steps"),
    "a global_step of 1e999": (file("trainer_state.json", b'{"global_step": 1e999}'), "not a number of steps"),
    "a manifest's step of 1e999": (file("llmtailor.json", b'{"parts": [{"part": "norm", "step": 1e999}]}'), "damaged"),
    "a manifest without parts": (file("llmtailor.json", b"{}"), "damaged"),
    "a manifest's part without a name": (file("llmtailor.json", b'{"parts": [{"part": [], "step": 1}]}'), "a part has"),
    "a million ranks by name": (
        file("global_step100/zero_pp_rank_999999_mp_rank_00_model_states.pt", b"x"), "files are for 1000000 ranks",
    ),
    "10**15 ranks": (tells(dp_world_size=10**15), "files are for 1000000000000000 ranks"),
    "no ranks": (tells(dp_world_size=0), "not a valid count"),
    "a negative number of ranks": (tells(dp_world_size=-2), "not a valid count"),
    "True ranks": (tells(dp_world_size=True), "not a valid count"),
    "negative steps": (tells(global_steps=-100), "not a valid count"),
    "2**60 skipped steps": (tells(skipped_steps=2**60), "not a valid count"),
    "shared_params in a list": (tells(shared_params=["a"]), "shared_params is a list"),
    "shared_params in a circle": (tells(shared_params={"a": "b", "b": "a"}), "ties others to it"),
    "shared_params of numbers": (tells(shared_params={1: 2}), "has a int as its name"),
    "buffer_names of numbers": (tells(buffer_names=[1, 2]), "has a int as its name"),
    "buffer_names in a dict": (tells(buffer_names={"a": 1}), "buffer_names is a dict"),
    "degrees in a list": (tells(checkpoint_parallel_dimensions=[2]), "is a list, not a dict"),
    "a degree in text": (tells(checkpoint_parallel_dimensions={"tp_degree": "2"}), "tensor parallelism"),
    "frozen shapes in text": (tells(frozen_param_shapes="x"), "frozen_param_shapes is a str"),
    "a frozen param that is trained": (tells(frozen_param_shapes={NORM: torch.Size([6])}), "twice"),
    "a module in a list": (tells(module=[1]), "module is a list"),
    "a module without params": (tells(module={}), "module lacks"),
    "a module with more params": (model(lambda tree: tree["module"].update(x=torch.empty(0))), "have no state"),
    "ds_config in a list": (tells(ds_config=[1]), "ds_config is a list"),
    "a param of 2**60 elements": (shapes(0, NORM, torch.Size([2**60])), "elements instead of 5764"),
    "a shape of 2**70": (shapes(1, NORM, (2**70,)), "gives no shape"),
    "a shape of 70 dimensions": (shapes(1, NORM, (1,) * 70), "gives no shape"),
    "a param in two groups": (shapes(0, NORM, torch.Size([0])), "twice"),
    "a param named with an escape": (shapes(0, "\x1b[2J", torch.Size([0])), "invalid name"),
    "a param named ''": (shapes(0, "", torch.Size([0])), "invalid name"),
    "a param named with 2000 letters": (shapes(0, "x" * 2000, torch.Size([0])), "invalid name"),
    "a step of NaN": (step(float("nan")), "not a number of steps"),
    "a step of NaN in a tensor": (step(torch.tensor(float("nan"))), "not a number of steps"),
    "a step of infinity": (step(torch.tensor(float("inf"))), "not a number of steps"),
    "a step of 1e38": (step(torch.tensor(1e38)), "not a number of steps"),
    "a step of 10**100": (step(10**100), "not a number of steps"),
    "a negative step": (step(-1), "not a number of steps"),
    "half a step": (step(0.5), "not a number of steps"),
    "a step of True": (step(True), "not a number of steps"),
    "a step in text": (step("3"), "is not a tensor"),
    "a state called master": (kind("master"), "which no optimizer uses"),
    "a state called 3": (kind(3), "has a int as its name"),
    "a state called with an escape": (kind("\x1b[2J"), "invalid name"),
    "the state of nobody": (optim(lambda tree: inner(tree)["state"].update({99: "x"})), "which no param group owns"),
    "other kinds in one state": (optim(lambda tree: inner(tree)["state"][1].pop("exp_avg_sq")), "has the states"),
    "betas in text": (hyper(betas="xy"), ""),
    "betas of 1": (hyper(betas=(1.0, 1.0)), ""),
    "betas in a tensor": (hyper(betas=(torch.ones(1), 0.9)), ""),
    "a learning rate in a tensor": (hyper(lr=torch.tensor(0.1)), ""),
    "a learning rate in a nest": (hyper(lr=[[[[{"a": (1, 2)}]]]]), ""),
    "a stage in text": (
        optim(lambda tree: tree["optimizer_state_dict"].update(zero_stage="3")), "zero_stage is not a number",
    ),
    "a sub_group_size of infinity": (
        optim(lambda tree: tree["ds_config"]["zero_optimization"].update(sub_group_size=float("inf"))), "",
    ),
}  # fmt: skip
"""name -> what is done to a ZeRO-3 checkpoint, and the refusal; without one it may be read"""

UP = "model.layers.0.mlp.up_proj.weight"
PARAM, GLOBAL = f"global_step100_universal/zero/{UP}", "global_step100_universal/zero/optimizer_state.pt"


def in_file(path: str, change: Callable[[dict], object]) -> Build:
    return lambda checkpoint: edit(checkpoint / path, change)


def named(name: str) -> Build:
    """Give a param another name in the model states."""

    def change(tree: dict) -> None:
        (shapes,) = [shapes for shapes in tree["param_shapes"] if UP in shapes]
        shapes[name] = shapes.pop(UP)
        tree["module"][name] = tree["module"].pop(UP)

    return lambda checkpoint: [edit(path, change) for path in checkpoint.glob("*/zero_pp*model_states.pt")].clear()


def nan_step(checkpoint: Path) -> None:
    torch.save(torch.tensor(float("nan")), checkpoint / PARAM / "step.pt")


def pipe(checkpoint: Path) -> None:
    (checkpoint / PARAM / "fp32.pt").unlink()
    os.mkfifo(checkpoint / PARAM / "fp32.pt")


def copy_state(checkpoint: Path) -> None:
    shutil.copy(checkpoint / PARAM / "fp32.pt", checkpoint / PARAM / "weight.pt")


UNIVERSAL: dict[str, tuple[Build, str]] = {
    "a param named as a path outside": (named("../../../x"), "missing|module"),
    "an absolute name": (named("/etc/passwd"), "missing|module"),
    "tensor parallelism": (in_file(f"{PARAM}/fp32.pt", lambda tree: tree.update(vocab_tensor=True)), "vocab_tensor"),
    "a tag outside": (file("latest_universal", b"../x"), "points to"),
    "a pipe": (pipe, "missing"),
    "a state with a name of ours": (copy_state, "weight"),
    "no number as step": (nan_step, "not a number"),
    "sub-groups of nobody": (
        in_file(GLOBAL, lambda tree: tree["param_groups"][0].update(params=[5])), "own the sub-groups",
    ),
    "too many sub-groups": (
        in_file(GLOBAL, lambda tree: tree["param_groups"].append({"params": [2]})), "own 3 sub-groups",
    ),
}  # fmt: skip
"""The same for a universal checkpoint"""
