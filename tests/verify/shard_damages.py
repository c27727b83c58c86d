"""More damages of DeepSpeed's files, as in `damages`."""

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


# --- what must agree ---


def on_scalers(change: Callable[[Tree], object]) -> Callable[[Path, Path], None]:
    """Edit the optim_states of all ranks, with DeepSpeed's own classes: the stand-ins lack one."""

    def apply(checkpoint: Path, _: Path) -> None:
        for rank in (0, 1):
            tree = torch.load(optim(checkpoint, rank), weights_only=False)
            change(tree)
            torch.save(tree, optim(checkpoint, rank))

    return apply


def states(tree: Tree) -> list[Tree]:
    return list(inner(tree)["state"].values())


def round_masters(tree: Tree) -> None:
    masters(tree)[:] = [master.detach().bfloat16() for master in masters(tree)]


def moments_as_ints(tree: Tree) -> None:
    for state in states(tree):
        state["exp_avg"] = state["exp_avg"].int()


def module_as(dtype: torch.dtype, key: str = "module") -> Callable[[Tree], None]:
    return lambda tree: tree[key].update({name: tensor.to(dtype) for name, tensor in tree[key].items()})


def call_it_fp32(checkpoint: Path, _: Path) -> None:
    """Have the checkpoint say that the run was in fp32, so that what is bf16 has been rounded."""
    for rank in (0, 1):
        path = optim(checkpoint, rank)
        edit(path, lambda tree: tree["ds_config"].update(bf16={"enabled": False}))
        path.rename(path.with_name(path.name.removeprefix("bf16_")))


def decay_the_norms(tree: Tree) -> None:
    decaying, resting = inner(tree)["param_groups"]
    decaying["weight_decay"], resting["weight_decay"] = 0.0, decaying["weight_decay"]


def scaler_of_step_0(tree: Tree) -> None:
    tree["optimizer_state_dict"]["loss_scaler"].cur_iter = 0


def step_of_one(tree: Tree) -> None:
    states(tree)[0]["step"] += 1


FROZEN = ("llama-frozen", "zero2-frozen")
fragments = "frozen_param_fragments"
add("Adam's steps of flat ids that differ, in no composite", "error", "Adam's steps are", on_ranks(step_of_one))
add("masters in another dtype than fp32", "error", "where DeepSpeed keeps fp32", on_ranks(round_masters))
add("moments as integers", "error", "no floating-point type", on_ranks(moments_as_ints))
add(
    "the module as integers, ZeRO-1/2",
    "error",
    "no floating-point type",
    on_models(module_as(torch.int32)),
    runs=("zero2",),
)
add("frozen params in fewer bits than the run has", "error", "the run trained in F32", call_it_fp32, runs=FROZEN)
add(
    "frozen params in another format",
    "warning",
    "the run trained in BF16",
    on_models(module_as(torch.float16, fragments)),
    runs=FROZEN,
)
add(
    "the module in another dtype, ZeRO-1/2",
    "warning",
    "the run trained in BF16",
    on_models(module_as(torch.float16)),
    runs=("zero2",),
)
add("weight decay on norms and biases alone", "error", "weight decay is on vectors alone", on_ranks(decay_the_norms))
add(
    "a loss scaler of another step",
    "warning",
    "the loss scaler has counted 0",
    on_scalers(scaler_of_step_0),
    runs=("llama-fp16", "zero2-fp16"),
)
add(
    "amsgrad without max_exp_avg_sq",
    "error",
    "max_exp_avg_sq is missing",
    on_ranks(lambda tree: [group.update(amsgrad=True) for group in inner(tree)["param_groups"]]),
)
