"""More damages of DeepSpeed's files, as in `damages`: those that no table of fields makes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from helpers.checkpoints import edit
from verify.damages import Tree, add, damage, inner, masters, models, on_models, on_ranks, optim, tag


def swap_groups(tree: Tree) -> None:
    inner(tree)["param_groups"].reverse()


def two_dimensions(tree: Tree) -> None:
    masters(tree)[0] = masters(tree)[0].detach().reshape(1, -1).clone()


def moment_of_two_dimensions(tree: Tree) -> None:
    state = inner(tree)["state"][0]
    state["exp_avg"] = state["exp_avg"].reshape(1, -1).clone()


def moment_of_numbers(tree: Tree) -> None:
    inner(tree)["state"][0]["exp_avg"] = [0.0, 0.0]


add("param groups in another order", "error", "param groups", on_ranks(swap_groups))
add("a master in two dimensions", "error", "instead of being flat", on_ranks(two_dimensions))
add("exp_avg in two dimensions", None, "", on_ranks(moment_of_two_dimensions))
add("exp_avg as a list", "error", "exp_avg of sub-group 0 is not a tensor", on_ranks(moment_of_numbers))
add(
    "no step in Adam's state",
    "error",
    "the step of sub-group 0 is missing",
    on_ranks(lambda tree: inner(tree)["state"][0].pop("step")),
)
add(
    "no exp_avg_sq on one rank",
    "error",
    "the kinds of optimizer state differs",
    on_ranks(lambda tree: [state.pop("exp_avg_sq") for state in inner(tree)["state"].values()], 1),
)
add(
    "DeepSpeed's scheduler at another step",
    "error",
    "the schedule is at step 8",
    on_models(lambda tree: tree["lr_scheduler"].update(last_batch_iteration=7)),
    runs=("llama-ds-both",),
)
add(
    "a buffer missing",
    "error",
    "module lacks",
    on_models(lambda tree: tree["module"].pop(tree["buffer_names"][0])),
    runs=("zero2-extras", "llama-extras"),
)


def change_placeholder(value: object) -> None:
    def apply(tree: Tree) -> None:
        tree["module"][next(iter(tree["module"]))] = value

    title = "no tensor" if value is None else "a placeholder of two dimensions"
    told = "is not a tensor" if value is None else "but ZeRO-3 leaves a placeholder"
    add(f"{title} in the module, ZeRO-3", "error", told, on_models(apply), runs=("llama",))


change_placeholder(None)
change_placeholder(torch.zeros(0, 5))


@damage("lr_scheduler of one rank at another step", "error", "lr_scheduler differs", runs=("llama-ds-adamw",))
def _(checkpoint, _other):
    edit(models(checkpoint)[1], lambda tree: tree["lr_scheduler"].update(last_epoch=2))


@damage(
    "a buffer of another shape on one rank, ZeRO-3",
    "error",
    "shapes or dtypes of buffers differs",
    runs=("llama-extras",),
)
def _(checkpoint, _other):
    edit(models(checkpoint)[1], lambda tree: tree["module"].update({tree["buffer_names"][1]: torch.zeros(7)}))


@damage(
    "fragments of frozen params of another shape",
    "error",
    "frozen",
    runs=("llama-frozen", "zero2-frozen"),
)
def _(checkpoint, _other):
    def change(tree: Tree) -> None:
        fragments = tree["frozen_param_fragments"]
        name = next(iter(fragments))
        fragments[name] = fragments[name].reshape(1, -1).clone()

    on_models(change)(checkpoint, checkpoint)


@damage("fragments of frozen params of another run, ZeRO-2", "error", "the module's", deep=True, runs=("zero2-frozen",))
def _(checkpoint, _other):
    def change(tree: Tree) -> None:
        fragments = tree["frozen_param_fragments"]
        fragments.update({name: fragment + 1 for name, fragment in fragments.items()})

    on_models(change)(checkpoint, checkpoint)


def wipe(kind: str, groups: int) -> Callable[[Tree], None]:
    def change(tree: Tree) -> None:
        for state in list(inner(tree)["state"].values())[:groups]:
            state[kind].zero_()

    return change


for kind in ("exp_avg", "exp_avg_sq"):
    add(f"{kind} wiped", "error", "is all zero", on_ranks(wipe(kind, 2)), deep=True)
    add(f"{kind} of one group wiped", "warning", "is all zero", on_ranks(wipe(kind, 1)), deep=True)


@damage("one more file that DeepSpeed takes for model states", "error", "refuses to resume")
def _(checkpoint, _other):
    path = models(checkpoint)[0]
    shutil.copy(path, path.with_name(path.name.replace("mp_rank_00_", "mp_rank_00_copy_")))


@damage("shard of a rank that the run had not", "warning", "shards of 3 ranks")
def _(checkpoint, _other):
    for path in (optim(checkpoint, 1), models(checkpoint)[-1]):
        if "rank_1_" in path.name:
            tree = torch.load(path, weights_only=False)
            torch.save(tree, path.with_name(path.name.replace("rank_1_", "rank_2_")))


@damage("optim_states of one rank under the name of another", "error", "it is the shard of another rank")
def _(checkpoint, _other):
    shutil.copy(optim(checkpoint, 0), optim(checkpoint, 1))


@damage("the same, saved again, ZeRO-1/2", "error", "are those of rank 0", runs=("zero2", "zero1-bf16opt"))
def _(checkpoint, _other):
    torch.save(torch.load(optim(checkpoint, 0), weights_only=False), optim(checkpoint, 1))


@damage("the same, saved again, ZeRO-3", "error", "is not the rounded master", deep=True, runs=("llama",))
def _(checkpoint, _other):
    torch.save(torch.load(optim(checkpoint, 0), weights_only=False), optim(checkpoint, 1))


@damage("optim_states without a byte", "error", "the file is empty")
def _(checkpoint, _other):
    optim(checkpoint, 1).write_bytes(b"")


@damage("optim_states of zeros", "error", "not a torch.save file")
def _(checkpoint, _other):
    path = optim(checkpoint, 1)
    path.write_bytes(bytes(path.stat().st_size))


def write_latest(title: str, severity: str | None, told: str, text: str) -> None:
    def apply(checkpoint: Path, _: Path) -> None:
        (checkpoint / "latest").write_text(text.replace("TAG", tag(checkpoint).name), encoding="utf-8")

    add(title, severity, told, apply)


write_latest("`latest` with a newline and blanks", None, "", " TAG \n")
write_latest("`latest` without a word", "error", "it points to ''", "\n")
write_latest("`latest` with a byte-order mark", "error", "not a folder of this checkpoint", "\ufeffTAG")
write_latest("`latest` with two lines", "error", "not a folder of this checkpoint", "TAG\nTAG")
