"""Every way to damage a checkpoint that is known to make a stock resume fail, or go wrong without a word.

Each was tried on stock DeepSpeed and the stock Trainer; the titles are those of docs/findings.md.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from helpers.checkpoints import edit

STEP, OTHER_STEP = 4, 6
Tree = Any


@dataclass(frozen=True)
class Case:
    """A damage and what `verify` must say of it."""

    title: str
    severity: str | None
    """None: it is no damage, and nothing is said."""
    told: str
    damage: Callable[[Path, Path], None]
    """Given the checkpoint, and another one of the same run at `OTHER_STEP`."""
    runs: tuple[str, ...] = ("llama", "zero2")
    deep: bool = False
    """Whether it takes --deep to see it."""


CASES: list[Case] = []


def damage(title: str, severity: str | None, told: str = "", **more: Any) -> Callable[[Any], Any]:
    def add(function: Any) -> Any:
        CASES.append(Case(title, severity, told, function, **more))
        return function

    return add


# --- access ----------------------------------------------------------------------------------------------------------


def tag(checkpoint: Path) -> Path:
    return next(path for path in checkpoint.iterdir() if path.is_dir())


def optim(checkpoint: Path, rank: int = 0) -> Path:
    return next(tag(checkpoint).glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))


def models(checkpoint: Path) -> list[Path]:
    return sorted(tag(checkpoint).glob("*model_states.pt"))


def outer(tree: Tree) -> Tree:
    return tree["optimizer_state_dict"]


def inner(tree: Tree) -> Tree:
    return outer(tree).get("base_optimizer_state") or outer(tree)["optimizer_state_dict"]


def masters(tree: Tree) -> list[torch.Tensor]:
    found = outer(tree).get("fp32_flat_groups")
    return outer(tree)["single_partition_of_fp32_groups"] if found is None else found


def on_ranks(change: Callable[[Tree], object], *ranks: int) -> Callable[[Path, Path], None]:
    """Edit the optim_states of some ranks, or of both."""

    def apply(checkpoint: Path, _: Path) -> None:
        for rank in ranks or (0, 1):
            edit(optim(checkpoint, rank), change)  # type: ignore[arg-type]

    return apply


def on_models(change: Callable[[Tree], object]) -> Callable[[Path, Path], None]:
    def apply(checkpoint: Path, _: Path) -> None:
        for path in models(checkpoint):
            edit(path, change)  # type: ignore[arg-type]

    return apply


def add(title: str, severity: str | None, told: str, change: Callable[[Path, Path], None], **more: Any) -> None:
    damage(title, severity, told, **more)(change)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def on_json(name: str, **changes: object) -> Callable[[Path, Path], None]:
    def apply(checkpoint: Path, _: Path) -> None:
        path = checkpoint / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return apply


def on_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path, Path], None]:
    def apply(checkpoint: Path, _: Path) -> None:
        tensors = load_file(checkpoint / "model.safetensors")
        change(tensors)
        save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})

    return apply


def on_scheduler(change: Callable[[Tree], object]) -> Callable[[Path, Path], None]:
    return lambda checkpoint, _: edit(checkpoint / "scheduler.pt", change)  # type: ignore[arg-type]


# --- the Trainer's files ---------------------------------------------------------------------------------------------


def unlink(*names: str) -> Callable[[Path, Path], None]:
    def apply(checkpoint: Path, _: Path) -> None:
        for name in names:
            for path in checkpoint.glob(name):
                path.unlink()

    return apply


add("no model.safetensors", "note", "there are no weights", unlink("model.safetensors"))
add("no RNG states", "warning", "there are no RNG states", unlink("rng_state_*"))
add("RNG state of one rank missing", "warning", "the RNG state of this rank is missing", unlink("rng_state_1.pth"))
add("no `latest`", "error", "DeepSpeed will not find the tag folder", unlink("latest"))
add("no scheduler.pt", "error", "there is no scheduler state", unlink("scheduler.pt"))
add("no trainer_state.json", "error", "the file is missing", unlink("trainer_state.json"))
add("no config.json", "note", "config.json is missing", unlink("config.json"))
add("no training_args.bin", None, "", unlink("training_args.bin"))
add("trainer_state.json of another step", "error", "global_step is 3", on_json("trainer_state.json", global_step=3))
add(
    "trainer_state.json without a step",
    "error",
    "not a number of steps",
    on_json("trainer_state.json", global_step=None),
)


@damage("`latest` names another tag", "error", "it points to 'global_step9'")
def _(checkpoint, _other):
    (checkpoint / "latest").write_text("global_step9")


@damage("tag folder with a name of its own", "error", "looks for one whose name begins with global_step")
def rename_tag(checkpoint, _other):
    tag(checkpoint).rename(checkpoint / "merged")
    (checkpoint / "latest").write_text("merged")


@damage("the same, beside an empty global_step0", None)
def _(checkpoint, other):
    rename_tag(checkpoint, other)
    (checkpoint / "global_step0").mkdir()


def fewer(tree):
    for key in ("base_lrs", "_last_lr", "lr_lambdas"):
        tree[key] = tree[key][:1]


add(
    "scheduler.pt with fewer entries than param groups",
    "error",
    "1 learning rates for 2 param groups",
    on_scheduler(fewer),
)
add(
    "scheduler.pt with more entries than param groups",
    "error",
    "3 learning rates for 2 param groups",
    on_scheduler(lambda tree: [tree[key].append(tree[key][0]) for key in ("base_lrs", "_last_lr", "lr_lambdas")]),
)
add(
    "scheduler.pt of another step",
    "error",
    "the schedule is at step 3",
    on_scheduler(lambda tree: tree.update(last_epoch=3)),
)
add(
    "learning rate of the param groups not the scheduler's",
    "error",
    "lr of the optimizer's param groups is 0",
    on_ranks(lambda tree: [group.update(lr=0.0) for group in inner(tree)["param_groups"]]),
)
add(
    "no lr_scheduler in a run with a DeepSpeed scheduler",
    "error",
    "the model states hold none",
    on_models(lambda tree: tree.update(lr_scheduler=None)),
    runs=("llama-ds-both",),
)
add(
    "lr_scheduler with fewer entries than param groups",
    "error",
    "0 learning rates for 1 param groups",
    on_models(lambda tree: tree["lr_scheduler"].update(base_lrs=[], _last_lr=[])),
    runs=("llama-ds-adamw",),
)


@damage("folder named after another step", "warning", "its name says step 5, but its content is of step 4")
def _(checkpoint, _other):
    checkpoint.rename(checkpoint.with_name("checkpoint-5"))


def tripled(tree):
    tree["base_lrs"] = [3 * rate for rate in tree["base_lrs"]]


def in_numpy(tree):
    tree["_last_lr"] = [np.float64(rate) for rate in tree["_last_lr"]]


def on_rng(change: Callable[[Tree], object]) -> Callable[[Path, Path], None]:
    return lambda checkpoint, _: edit(checkpoint / "rng_state_1.pth", change)  # type: ignore[arg-type]


add(
    "scheduler.pt whose base_lrs are not the initial_lr of the param groups",
    "error",
    "it starts from learning rate",
    on_scheduler(tripled),
)
add("numbers of numpy in scheduler.pt", "error", "it names numpy", on_scheduler(in_numpy))


@damage("scheduler.pt without a dict", "error", "not a scheduler state")
def _(checkpoint, _other):
    torch.save([1.0], checkpoint / "scheduler.pt")


add(
    "log_history beyond global_step",
    "error",
    "log_history continues to step 9",
    on_json("trainer_state.json", log_history=[{"step": 9, "epoch": 1.0}]),
)


@damage("trainer_state.json with a byte order mark", "error", "not JSON")
def _(checkpoint, _other):
    path = checkpoint / "trainer_state.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())


add("RNG state of a rank empty", "error", "python is missing", on_rng(lambda tree: tree.clear()))
add(
    "counters of torch's generator out of range",
    "error",
    "cpu does not hold a state",
    on_rng(lambda tree: tree["cpu"].__setitem__(8, 0)),
)


@damage("RNG state of a rank copied from another", "warning", "random numbers of another rank")
def _(checkpoint, _other):
    shutil.copy(checkpoint / "rng_state_0.pth", checkpoint / "rng_state_1.pth")


@damage("a scaler.pt beside DeepSpeed's files", "error", "DeepSpeed keeps the loss scale itself")
def _(checkpoint, _other):
    scale = {"scale": 2.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 0}
    torch.save(scale, checkpoint / "scaler.pt")


# --- files that are not whole ----------------------------------------------------------------------------------------

add("optim_states cut short", "error", "truncated", lambda checkpoint, _: cut(optim(checkpoint, 1)))
add("model_states cut short", "error", "truncated", lambda checkpoint, _: cut(models(checkpoint)[-1]))
add("scheduler.pt cut short", "error", "truncated", lambda checkpoint, _: cut(checkpoint / "scheduler.pt"))
add("RNG file cut short", "error", "truncated", lambda checkpoint, _: cut(checkpoint / "rng_state_0.pth"))
add("trainer_state.json cut short", "error", "not JSON", lambda checkpoint, _: cut(checkpoint / "trainer_state.json"))
add("weights cut short", "warning", "truncated", lambda checkpoint, _: cut(checkpoint / "model.safetensors"))
add("config.json cut short", "warning", "not JSON", lambda checkpoint, _: cut(checkpoint / "config.json"))
add(
    "generation_config.json cut short",
    "warning",
    "not JSON",
    lambda checkpoint, _: cut(checkpoint / "generation_config.json"),
)
add("training_args.bin cut short", "warning", "truncated", lambda checkpoint, _: cut(checkpoint / "training_args.bin"))


# --- shards ----------------------------------------------------------------------------------------------------------


@damage("optim_states of a rank missing", "error", "optim_states shard 1 of 2 is missing")
def _(checkpoint, _other):
    optim(checkpoint, 1).unlink()


@damage("model_states missing", "error", "model_states")
def _(checkpoint, _other):
    models(checkpoint)[-1].unlink()


@damage("files without the prefix of the run's precision", "error", "the optimizer shards lack the prefix bf16_")
def _(checkpoint, _other):
    for rank in (0, 1):
        path = optim(checkpoint, rank)
        path.rename(path.with_name(path.name.removeprefix("bf16_")))


@damage("optim_states of another step", "error", "the optimizer states from step 6")
def _(checkpoint, other):
    for rank in (0, 1):
        shutil.copy(optim(other, rank), optim(checkpoint, rank))


@damage("model_states of another step", "error", "the model states are from step 6, but the tag folder says 4")
def _(checkpoint, other):
    for mine, theirs in zip(models(checkpoint), models(other), strict=True):
        shutil.copy(theirs, mine)


@damage("one rank's optim_states of another step", "error", "Adam's step differs from that of rank 0")
def _(checkpoint, other):
    shutil.copy(optim(other, 1), optim(checkpoint, 1))


def halve(tree):
    for state in inner(tree)["state"].values():
        state["exp_avg"] = state["exp_avg"].bfloat16()


def double_ids(tree):
    inner(tree)["param_groups"].pop()


def shorten(kind):
    def change(tree):
        inner(tree)["state"][0][kind] = inner(tree)["state"][0][kind][:-1].clone()

    return change


def shorten_master(tree):
    masters(tree)[0] = masters(tree)[0].detach()[:-1].clone()


add(
    "dp_world_size of more ranks",
    "error",
    "shard 2 of 3 is missing",
    on_models(lambda tree: tree.update(dp_world_size=3)),
)
add(
    "dp_world_size of fewer ranks", "error", "elements instead of", on_models(lambda tree: tree.update(dp_world_size=1))
)
add("no dp_world_size", "error", "dp_world_size is missing", on_models(lambda tree: tree.pop("dp_world_size")))
add("no mp_world_size", "error", "mp_world_size is missing", on_models(lambda tree: tree.pop("mp_world_size")))


@on_ranks
def miscount(tree):
    counts = outer(tree)["partition_count"]
    outer(tree)["partition_count"] = [3] * len(counts) if isinstance(counts, list) else 3


add("partition_count wrong", "warning", "partition_count is 3", miscount)
no_scaler = on_ranks(lambda tree: outer(tree).pop("loss_scaler"))
add("no loss_scaler, ZeRO-3", "error", "loss_scaler is missing", no_scaler, runs=("llama",))
add("no loss_scaler, ZeRO-1/2", None, "", no_scaler, runs=("zero2",))
add(
    "no ds_version, ZeRO-3",
    None,
    "",
    on_ranks(lambda tree: tree.pop("ds_version")),
    runs=("llama",),
)
add(
    "no ds_version, ZeRO-1/2",
    "error",
    "ds_version is missing",
    on_ranks(lambda tree: outer(tree).pop("ds_version"), 1),
    runs=("zero2",),
)
add("a param group less", "error", "param groups", on_ranks(double_ids))
add(
    "state of one id missing",
    "error",
    "is missing; a resume would restart Adam",
    on_ranks(lambda tree: inner(tree)["state"].pop(1)),
)
add("state empty", "error", "the optimizer states from step 0", on_ranks(lambda tree: inner(tree)["state"].clear()))
add(
    "state of a rank empty",
    "error",
    "differs from that of rank 0",
    on_ranks(lambda tree: inner(tree)["state"].clear(), 1),
)
add("last fp32 tensor missing", "error", "1 master", on_ranks(lambda tree: masters(tree).pop()))
add("fp32 list empty", "error", "0 master", on_ranks(lambda tree: masters(tree).clear()))
add("fp32 tensor too short", "error", "elements", on_ranks(shorten_master))
add("exp_avg too short", "error", "exp_avg of", on_ranks(shorten("exp_avg")))
add("exp_avg_sq too short on one rank", "error", "exp_avg_sq of", on_ranks(shorten("exp_avg_sq"), 1))
add("exp_avg in bf16", "warning", "exp_avg of", on_ranks(halve))
add("exp_avg in bf16 on one rank", "error", "the dtype of a state differs", on_ranks(halve, 1))
add(
    "ranks at different steps of Adam",
    "error",
    "Adam's step differs from that of rank 0",
    on_ranks(lambda tree: inner(tree)["state"][0].update(step=torch.tensor(99.0)), 1),
)


@damage("exp_avg without the padding at the end, ZeRO-1/2", "error", "elements instead of", runs=("zero2",))
def _(checkpoint, _other):
    def change(tree):
        for group, padding in enumerate(outer(tree)["group_paddings"]):
            state = inner(tree)["state"][group]
            state["exp_avg"] = state["exp_avg"][: len(state["exp_avg"]) - padding].clone()

    on_ranks(change)(checkpoint, checkpoint)


def as_ints_and_plain_tensors(tree):
    outer(tree)["zero_stage"] = int(outer(tree)["zero_stage"])
    for state in inner(tree)["state"].values():
        state["step"] = int(state["step"])
    masters(tree)[:] = [master.detach().clone() for master in masters(tree)]


add("step as int, plain tensors, zero_stage as int", None, "", on_ranks(as_ints_and_plain_tensors))


@damage("no param_slice_mappings, no param_alignment_paddings", None, runs=("zero2",))
def _(checkpoint, _other):
    def change(tree):
        outer(tree).pop("param_slice_mappings")
        outer(tree).pop("param_alignment_paddings")

    on_ranks(change)(checkpoint, checkpoint)


add("elastic checkpoint", "error", "can't be resumed by stock DeepSpeed", lambda *_: None, runs=("zero2-elastic",))


# --- model states ----------------------------------------------------------------------------------------------------


def fill_module(tree):
    name = next(iter(tree["module"]))
    tree["module"][name] = torch.ones(61, 25, dtype=torch.bfloat16)


def first_param(tree):
    return next(iter(tree["param_shapes"][0]))


def swap_shapes(tree):
    shapes = tree["param_shapes"][0]
    tree["param_shapes"][0] = type(shapes)(reversed(shapes.items()))


add(
    "full tensors in the module, ZeRO-3",
    "error",
    "in full, but ZeRO-3 leaves a placeholder",
    on_models(fill_module),
    runs=("llama",),
)
add(
    "a name missing in the module",
    "error",
    "module lacks",
    on_models(lambda tree: tree["module"].pop(first_param(tree))),
)
add(
    "an unknown name in the module, ZeRO-3",
    "error",
    "have no state",
    on_models(lambda tree: tree["module"].update(more=torch.empty(0))),
    runs=("llama",),
)
add(
    "a param of another shape in the module, ZeRO-1/2",
    "error",
    "module has other shapes",
    on_models(lambda tree: tree["module"].update({first_param(tree): torch.ones(3)})),
    runs=("zero2",),
)
add("param_shapes empty", "error", "the model states describe 0", on_models(lambda tree: tree.update(param_shapes=[])))


@damage(
    "param_shapes not alike on all ranks, ZeRO-3",
    "error",
    "(param_shapes) differs from that of rank 0",
    runs=("llama",),
)
def _(checkpoint, _other):
    edit(models(checkpoint)[1], swap_shapes)


add(
    "a frozen param missing, ZeRO-3",
    "error",
    "list different params",
    on_models(lambda tree: tree["frozen_param_fragments"].popitem()),
    runs=("llama-frozen",),
)
add(
    "all frozen params missing, ZeRO-3",
    "error",
    "not in the model states",
    on_models(lambda tree: tree.update(frozen_param_fragments=None)),
    runs=("llama-frozen",),
)
add(
    "a frozen param missing, ZeRO-2",
    "error",
    "module lacks",
    on_models(lambda tree: tree["module"].pop(next(iter(tree["frozen_param_shapes"])))),
    runs=("zero2-frozen",),
)
add(
    "a tied name whose values are nowhere",
    "error",
    "is tied to nothing",
    on_models(lambda tree: tree["shared_params"] and tree.update(shared_params={"lm_head.weight": "nothing"})),
    runs=("llama-tied", "zero2-tied"),
)
add(
    "a tied name forgotten, ZeRO-3",
    "error",
    "lm_head.weight",
    on_models(lambda tree: tree.update(shared_params={})),
    runs=("llama-tied",),
)


# --- weights ---------------------------------------------------------------------------------------------------------

NORM = "model.norm.weight"
add("weights lack a param", "warning", f"the weights of {NORM} are missing", on_weights(lambda found: found.pop(NORM)))
add(
    "weights of an unknown param",
    "warning",
    "the weights hold more",
    on_weights(lambda found: found.update(more=torch.ones(3))),
)
add(
    "a weight of another shape",
    "warning",
    "other shapes",
    on_weights(lambda found: found.update({NORM: torch.ones(25, 1)})),
)
add(
    "weights in another dtype",
    "note",
    "the weights are F32, but the run trained in BF16",
    on_weights(lambda found: found.update({name: tensor.float() for name, tensor in found.items()})),
)


# --- what only reading shows -----------------------------------------------------------------------------------------


@damage("fp32 of another step", "error", "is not the rounded master", deep=True)
def _(checkpoint, other):
    for rank in (0, 1):
        theirs = torch.load(optim(other, rank), weights_only=False)
        edit(optim(checkpoint, rank), lambda tree, found=theirs: masters(tree).__setitem__(slice(None), masters(found)))


@damage("module of another step, ZeRO-1/2", "error", "the module's weight of", deep=True, runs=("zero2",))
def _(checkpoint, other):
    theirs = torch.load(models(other)[0], weights_only=False)["module"]
    edit(models(checkpoint)[0], lambda tree: tree["module"].update(theirs))


@damage("weights of another step", "error", "weight of", deep=True)
def _(checkpoint, other):
    shutil.copy(other / "model.safetensors", checkpoint / "model.safetensors")


@damage(
    "two flat tensors of equal length swapped",
    "error",
    "is not the rounded master",
    deep=True,
    runs=("llama-layer", "zero2-layer"),
)
def _(checkpoint, _other):
    def swap(tree):
        lengths = [len(master) for master in masters(tree)]
        pair = [number for number, length in enumerate(lengths) if length == max(lengths)][:2]
        first, second = pair
        found = masters(tree)
        found[first], found[second] = found[second].detach().clone(), found[first].detach().clone()

    on_ranks(swap)(checkpoint, checkpoint)


def spoil(kind, value):
    def change(tree):
        tensor = masters(tree)[0] if kind == "master" else inner(tree)["state"][0][kind]
        tensor.detach()[2] = value

    return on_ranks(change, 0)


add("NaN among the masters", "error", "the master of", spoil("master", float("nan")), deep=True)
add("infinity among the moments", "error", "exp_avg of", spoil("exp_avg", float("inf")), deep=True)
add("exp_avg_sq below zero", "error", "but a mean of squares can't be", spoil("exp_avg_sq", -1.0), deep=True)


@damage("a flipped bit that the file's checksum tells", "error", "does not match its checksum in the file", deep=True)
def _(checkpoint, _other):
    path = optim(checkpoint, 1)
    data = bytearray(path.read_bytes())
    at = data.index(b"exp_avg")  # in the pickle: go on to the records behind it
    at = data.index(b"PK\x03\x04", at) + 4000
    data[at] ^= 1
    path.write_bytes(data)
