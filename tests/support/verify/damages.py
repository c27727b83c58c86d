"""Every way to damage a checkpoint that is known to make a stock resume fail, or go wrong silently.

A table per layout: title in docs/findings.md -> what is done to the checkpoint, what the finding says, and on which
runs, if not the usual ones. The page says what `verify` and `merge` do then, and what stock software does.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from helpers.checkpoints import edit
from helpers.files import edit_json, flip
from llmtailor.containers.dcp import lay_out_metadata, read_metadata
from llmtailor.containers.torch_file import list_records

STEP, OTHER_STEP = 4, 6
Tree = Any
Change = Callable[[Path, Path], object]
"""Given the checkpoint, and another one: of the same run at `OTHER_STEP`, or of another save with torch"""
Table = dict[str, tuple[Any, ...]]

RANK_0, RANK_1 = "*/*rank_0_*optim_states.pt", "*/*rank_1_*optim_states.pt"
OPTIM, MODEL, RNG = "*/*optim_states.pt", "*/*model_states.pt", "rng_state_1.pth"
WEIGHTS, STATE, SCHEDULER = "model.safetensors", "trainer_state.json", "scheduler.pt"
LAST = slice(1, 2)
"""Of two ranks' files"""


class Optimizer:
    """Finds its way in what holds an optimizer: a shard of any stage of ZeRO, or an optimizer.pt."""

    def __init__(self, tree: Tree):
        self.tree = tree
        self.outer = tree.get("optimizer_state_dict", tree)
        self.inner = self.outer.get("base_optimizer_state") or self.outer.get("optimizer_state_dict", self.outer)
        self.state, self.groups = self.inner.get("state"), self.inner["param_groups"]
        zero12 = "single_partition_of_fp32_groups"
        self.masters = self.outer[zero12] if zero12 in self.outer else self.outer.get("fp32_flat_groups")

    def set_masters(self, change: Callable[[Any], Any], count: int | None = None) -> None:
        self.masters[:count] = [change(master.detach()).clone() for master in self.masters[:count]]

    def set(self, kind: str, change: Callable[[Any], Any], count: int | None = None) -> None:
        for state in list(self.state.values())[:count]:
            state[kind] = change(state.get(kind))

    def drop(self, kind: str, count: int | None = None) -> None:
        for state in list(self.state.values())[:count]:
            del state[kind]

    def set_groups(self, **options: object) -> None:
        for group in self.groups:
            group.update(options)


# --- what is done ----------------------------------------------------------------------------------------------------


def shard(checkpoint: Path, rank: int) -> Path:
    (path,) = checkpoint.glob(f"*/*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return path


def models(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.glob(MODEL))


def on(pattern: str, change: Callable[[Tree], object], at: slice = slice(None)) -> Change:
    """Edit torch files, all of that name or some."""
    return lambda root, _: [edit(path, change) for path in sorted(root.glob(pattern))[at]]  # type: ignore[arg-type]


def optim(change: Callable[[Optimizer], object], rank: int | None = None) -> Change:
    """Edit the optimizer's states of a rank, or of all."""
    at = slice(None) if rank is None else slice(rank, rank + 1)
    return both(*(on(name, lambda tree: change(Optimizer(tree)), at) for name in (OPTIM, "optimizer.pt")))


def master(change: Callable[[Any], Any], count: int | None = None, rank: int | None = None) -> Change:
    return optim(lambda it: it.set_masters(change, count), rank)


def state(kind: str, change: Callable[[Any], Any], count: int | None = None, rank: int | None = None) -> Change:
    return optim(lambda it: it.set(kind, change, count), rank)


def drop(kind: str, count: int | None = None, rank: int | None = None) -> Change:
    return optim(lambda it: it.drop(kind, count), rank)


def options(**options: object) -> Change:
    return optim(lambda it: it.set_groups(**options))


def model(change: Callable[[Tree], object]) -> Change:
    return on(MODEL, change)


def put(pattern: str, *path: str, at: slice = slice(None), **fields: object) -> Change:
    return on(pattern, lambda tree: within(tree, path).update(fields), at)


def pop(pattern: str, *path: str) -> Change:
    return on(pattern, lambda tree: within(tree, path[:-1]).pop(path[-1]))


def within(tree: Tree, path: tuple[str, ...]) -> Tree:
    return within(tree[path[0]], path[1:]) if path else tree


def unlink(*names: str) -> Change:
    return lambda root, _: [path.unlink() for name in names for path in root.glob(name)]


def mkdir(name: str) -> Change:
    return lambda root, _: (root / name).mkdir()


def rmtree(pattern: str) -> Change:
    return lambda root, _: [shutil.rmtree(path) for path in root.glob(pattern)]


def take(*patterns: str) -> Change:
    """Replace files by those of the other checkpoint."""

    def apply(root: Path, other: Path) -> None:
        for pattern in patterns:
            for mine, theirs in zip(sorted(root.glob(pattern)), sorted(other.glob(pattern)), strict=True):
                shutil.copy(theirs, mine)

    return apply


def copy(source: str, target: str) -> Change:
    def apply(root: Path, _: Path) -> None:
        (path,) = root.glob(source)
        shutil.copy(path, next(root.glob(target), root / target))

    return apply


def cut(pattern: str, num_bytes: int = -100) -> Change:
    def apply(root: Path, _: Path) -> None:
        path = sorted(root.glob(pattern))[-1]
        path.write_bytes(path.read_bytes()[:num_bytes])

    return apply


def write(name: str, data: str | bytes) -> Change:
    return lambda root, _: (root / name).write_bytes(data.encode() if isinstance(data, str) else data)


def prepend(name: str, data: bytes) -> Change:
    return lambda root, _: (root / name).write_bytes(data + (root / name).read_bytes())


def on_json(name: str, **changes: object) -> Change:
    return lambda root, _: edit_json(root / name, lambda tree: {**tree, **changes})


def on_weights(change: Callable[[dict[str, Any]], object]) -> Change:
    def apply(root: Path, _: Path) -> None:
        tensors = load_file(root / WEIGHTS)
        change(tensors)
        save_file(tensors, root / WEIGHTS, {"format": "pt"})

    return apply


def weights(**tensors: Any) -> Change:
    return on_weights(lambda found: found.update(tensors))


def both(*changes: Change) -> Change:
    return lambda root, other: [change(root, other) for change in changes]


def save(name: str, content: object) -> Change:
    return lambda root, _: torch.save(content, root / name)


def shorter(tensor: Any) -> Any:
    return tensor[:-1].clone()


def as_row(tensor: Any) -> Any:
    return tensor.reshape(1, -1).clone()


def third(value: float) -> Callable[[Any], Any]:

    def change(tensor: Any) -> Any:
        tensor[2] = value
        return tensor

    return change


# --- DeepSpeed -------------------------------------------------------------------------------------------------------

RATES, LR = ("base_lrs", "_last_lr", "lr_lambdas"), "lr_scheduler"
NO_RATES = {"base_lrs": [], "_last_lr": []}
NORM = "model.norm.weight"
SCALE = {"scale": 2.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 0}


def spoil_counter(tree: Tree) -> None:
    tree["cpu"][8] = 0


def rename(name: str) -> Change:
    return lambda root, _: root.rename(root.with_name(name))


def rename_tag(root: Path, _: Path) -> None:
    next(root.glob("global_step*")).rename(root / "merged")
    (root / "latest").write_text("merged")


def latest(text: str) -> Change:
    return lambda root, _: write("latest", text.replace("TAG", next(root.glob("global_step*")).name))(root, root)


def without_prefix(root: Path, _: Path) -> None:
    for path in root.glob(OPTIM):
        path.rename(path.with_name(path.name.removeprefix("bf16_")))


def one_more(value: Any) -> Any:
    return value + 1


def wrong_count(it: Optimizer) -> None:
    counts = it.outer["partition_count"]
    it.outer["partition_count"] = [3] * len(counts) if isinstance(counts, list) else 3


def drop_padding(it: Optimizer) -> None:
    for group, padding in enumerate(it.outer["group_paddings"]):
        state = it.state[group]
        state["exp_avg"] = state["exp_avg"][: len(state["exp_avg"]) - padding].clone()


def spell_otherwise(it: Optimizer) -> None:
    it.outer["zero_stage"] = int(it.outer["zero_stage"])
    it.set("step", int)
    it.set_masters(torch.Tensor.clone)


def first_param(tree: Tree) -> str:
    return str(next(iter(tree["param_shapes"][0])))


def in_module(value: Any) -> Change:
    """Give the first param of the module a value that it should not have."""
    return model(lambda tree: tree["module"].update({next(iter(tree["module"])): value}))


def swap_shapes(tree: Tree) -> None:
    shapes = tree["param_shapes"][0]
    tree["param_shapes"][0] = type(shapes)(reversed(shapes.items()))


def masters_of_another_step(root: Path, other: Path) -> None:
    for rank in (0, 1):
        theirs = Optimizer(torch.load(shard(other, rank), weights_only=False)).masters
        edit(shard(root, rank), lambda tree, found=theirs: Optimizer(tree).masters.__setitem__(slice(None), found))


def module_of_another_step(root: Path, other: Path) -> None:
    theirs = torch.load(models(other)[0], weights_only=False)["module"]
    edit(models(root)[0], lambda tree: tree["module"].update(theirs))


def swap_masters(it: Optimizer) -> None:
    lengths = [len(master) for master in it.masters]
    first, second = [number for number, length in enumerate(lengths) if length == max(lengths)][:2]
    it.masters[first], it.masters[second] = (it.masters[at].detach().clone() for at in (second, first))


def flip_a_moment(root: Path, _: Path) -> None:
    path = shard(root, 1)
    data = path.read_bytes()
    behind_the_pickle = data.index(b"PK\x03\x04", data.index(b"exp_avg"))
    flip(path, behind_the_pickle + 4000)


def frozen(change: Callable[[Any], Any]) -> Change:
    """Change the fragments of frozen params."""
    return model(lambda tree: tree[HELD].update({name: change(tensor) for name, tensor in tree[HELD].items()}))


def module_as(dtype: torch.dtype) -> Change:
    return model(lambda tree: tree["module"].update({name: one.to(dtype) for name, one in tree["module"].items()}))


def more_model_states(root: Path, _: Path) -> None:
    path = models(root)[0]
    shutil.copy(path, path.with_name(path.name.replace("mp_rank_00_", "mp_rank_00_copy_")))


def third_rank(root: Path, _: Path) -> None:
    for path in (shard(root, 1), models(root)[-1]):
        if "rank_1_" in path.name:
            tree = torch.load(path, weights_only=False)
            torch.save(tree, path.with_name(path.name.replace("rank_1_", "rank_2_")))


def swap_shards(root: Path, _: Path) -> None:
    """Under no name of their own, as engines save that hand torch an open file."""
    trees = [torch.load(shard(root, rank), weights_only=False) for rank in (1, 0)]
    for rank, tree in enumerate(trees):
        with shard(root, rank).open("wb") as file:
            torch.save(tree, file)


def save_shard_again(root: Path, _: Path) -> None:
    torch.save(torch.load(shard(root, 0), weights_only=False), shard(root, 1))


def of_zeros(root: Path, _: Path) -> None:
    path = shard(root, 1)
    path.write_bytes(bytes(path.stat().st_size))


def decay_the_norms(it: Optimizer) -> None:
    decaying, resting = it.groups
    decaying["weight_decay"], resting["weight_decay"] = 0.0, decaying["weight_decay"]


def call_it_fp32(root: Path, other: Path) -> None:
    """Have the checkpoint say that the run was in fp32, so that what is bf16 has been rounded."""
    on(OPTIM, lambda tree: tree["ds_config"].update(bf16={"enabled": False}))(root, other)
    without_prefix(root, other)


def scaler_of_step_0(root: Path, _: Path) -> None:
    """With DeepSpeed's own classes: no stand-in has it."""
    for path in root.glob(OPTIM):
        tree = torch.load(path, weights_only=False)
        tree["optimizer_state_dict"]["loss_scaler"].cur_iter = 0
        torch.save(tree, path)


HELD = "frozen_param_fragments"
DS_BOTH, DS_ADAMW, FP16 = ("llama-ds-both",), ("llama-ds-adamw",), ("llama-fp16", "zero2-fp16")
LAYERS = ("llama-layer", "zero2-layer")
FROZEN, EXTRAS = ("llama-frozen", "zero2-frozen"), ("zero2-extras", "llama-extras")
no_scaler = optim(lambda it: it.outer.pop("loss_scaler"))

DEEPSPEED: Table = {
    # the Trainer's files
    "no model.safetensors": (unlink(WEIGHTS), "there are no weights"),
    "no RNG states": (unlink("rng_state_*"), "there are no RNG states"),
    "RNG state of one rank missing": (unlink(RNG), "the RNG state of this rank is missing"),
    "no `latest`": (unlink("latest"), "DeepSpeed will not find the tag folder"),
    "no scheduler.pt": (unlink(SCHEDULER), "there is no scheduler state"),
    "no trainer_state.json": (unlink(STATE), "the file is missing"),
    "no config.json": (unlink("config.json"), "config.json is missing"),
    "no training_args.bin": (unlink("training_args.bin"),),
    "trainer_state.json of another step": (on_json(STATE, global_step=3), "global_step is 3"),
    "trainer_state.json without a step": (on_json(STATE, global_step=None), "not a number of steps"),
    "`latest` names another tag": (latest("global_step9"), "it points to 'global_step9'"),
    "tag folder with a name of its own": (rename_tag, "looks for one whose name begins with global_step"),
    "the same, beside an empty global_step0": (both(rename_tag, mkdir("global_step0")),),
    "`latest` with a newline and blanks": (latest(" TAG \n"),),
    "`latest` without a word": (latest("\n"), "it points to ''"),
    "`latest` with a byte-order mark": (latest("\ufeffTAG"), "not a folder of this checkpoint"),
    "`latest` with two lines": (latest("TAG\nTAG"), "not a folder of this checkpoint"),
    "folder named after another step": (rename("checkpoint-5"), "its content is of step 4"),
    "scheduler.pt with fewer entries than param groups": (
        on(SCHEDULER, lambda tree: [tree[key].pop() for key in RATES]),
        "1 learning rates for 2 param groups",
    ),
    "scheduler.pt with more entries than param groups": (
        on(SCHEDULER, lambda tree: [tree[key].append(tree[key][0]) for key in RATES]),
        "3 learning rates for 2 param groups",
    ),
    "scheduler.pt of another step": (put(SCHEDULER, last_epoch=3), "the schedule is at step 3"),
    "scheduler.pt whose base_lrs are not the initial_lr of the param groups": (
        on(SCHEDULER, lambda tree: tree.update(base_lrs=[3 * rate for rate in tree["base_lrs"]])),
        "it starts from learning rate",
    ),
    "numbers of numpy in scheduler.pt": (
        on(SCHEDULER, lambda tree: tree.update(_last_lr=[np.float64(rate) for rate in tree["_last_lr"]])),
        "it names numpy",
    ),
    "scheduler.pt without a dict": (save(SCHEDULER, [1.0]), "not a scheduler state"),
    "learning rate of the param groups not the scheduler's": (options(lr=0.0), "param groups is 0"),
    "no lr_scheduler in a run with a DeepSpeed scheduler": (put(MODEL, lr_scheduler=None), "hold none", DS_BOTH),
    "lr_scheduler with fewer entries than param groups": (put(MODEL, LR, **NO_RATES), "0 learning", DS_ADAMW),
    "DeepSpeed's scheduler at another step": (put(MODEL, LR, last_batch_iteration=7), "is at step 8", DS_BOTH),
    "lr_scheduler of one rank at another step": (put(MODEL, LR, at=LAST, last_epoch=2), "lr_scheduler", DS_ADAMW),
    "log_history beyond global_step": (on_json(STATE, log_history=[{"step": 9, "epoch": 1.0}]), "continues to step 9"),
    "trainer_state.json with a byte order mark": (prepend(STATE, b"\xef\xbb\xbf"), "not JSON"),
    "RNG state of a rank empty": (save(RNG, {}), "python is missing"),
    "counters of torch's generator out of range": (on(RNG, spoil_counter), "cpu does not hold a state"),
    "RNG state of a rank copied from another": (copy("rng_state_0.pth", RNG), "random numbers of another rank"),
    "a scaler.pt beside DeepSpeed's files": (save("scaler.pt", SCALE), "DeepSpeed keeps the loss scale itself"),
    # files that are not whole
    "optim_states cut short": (cut(OPTIM), "truncated"),
    "model_states cut short": (cut(MODEL), "truncated"),
    "scheduler.pt cut short": (cut(SCHEDULER), "truncated"),
    "RNG file cut short": (cut("rng_state_0.pth"), "truncated"),
    "trainer_state.json cut short": (cut(STATE), "not JSON"),
    "weights cut short": (cut(WEIGHTS), "truncated"),
    "config.json cut short": (cut("config.json"), "not JSON"),
    "generation_config.json cut short": (cut("generation_config.json"), "not JSON"),
    "training_args.bin cut short": (cut("training_args.bin"), "truncated"),
    "optim_states without a byte": (cut(OPTIM, 0), "the file is empty"),
    "optim_states of zeros": (of_zeros, "not a torch.save file"),
    # shards
    "optim_states of a rank missing": (unlink(RANK_1), "optim_states shard 1 of 2 is missing"),
    "model_states missing": (lambda root, _: models(root)[-1].unlink(), "model_states"),
    "one more file that DeepSpeed takes for model states": (more_model_states, "refuses to resume"),
    "shard of a rank that the run had not": (third_rank, "shards of 3 ranks"),
    "optim_states of one rank under the name of another": (copy(RANK_0, RANK_1), "rank"),
    "optim_states of two ranks swapped, which do not name their file, ZeRO-1/2": (swap_shards, "are those of rank"),
    "the same, saved again, ZeRO-1/2": (save_shard_again, "are those of rank 0", ("zero2", "zero1-bf16opt")),
    "the same, saved again, ZeRO-3 (--deep)": (save_shard_again, "is not the rounded master"),
    "files without the prefix of the run's precision": (without_prefix, "the optimizer shards lack the prefix bf16_"),
    "optim_states of another step": (take(OPTIM), "the optimizer states from step 6"),
    "model_states of another step": (take(MODEL), "the model states are from step 6, but the tag folder says 4"),
    "one rank's optim_states of another step": (take(RANK_1), "Adam's step differs"),
    "dp_world_size of more ranks": (put(MODEL, dp_world_size=3), "shard 2 of 3 is missing"),
    "dp_world_size of fewer ranks": (put(MODEL, dp_world_size=1), "elements instead of"),
    "no dp_world_size": (pop(MODEL, "dp_world_size"), "dp_world_size is missing"),
    "no mp_world_size": (pop(MODEL, "mp_world_size"), "mp_world_size is missing"),
    "partition_count wrong": (optim(wrong_count), "partition_count is 3"),
    "no loss_scaler, ZeRO-3": (no_scaler, "loss_scaler is missing"),
    "no loss_scaler, ZeRO-1/2": (no_scaler,),
    "no ds_version, ZeRO-3": (pop(OPTIM, "ds_version"),),
    "no ds_version, ZeRO-1/2": (optim(lambda it: it.outer.pop("ds_version"), 1), "ds_version is missing"),
    "a param group less": (optim(lambda it: it.groups.pop()), "param groups"),
    "param groups in another order": (optim(lambda it: it.groups.reverse()), "param groups"),
    "state of one id missing": (optim(lambda it: it.state.pop(1)), "is missing; a resume would restart Adam"),
    "state empty": (optim(lambda it: it.state.clear()), "the optimizer states from step 0"),
    "state of a rank empty": (optim(lambda it: it.state.clear(), 1), "differs from that of rank 0"),
    "last fp32 tensor missing": (optim(lambda it: it.masters.pop()), "1 flat master"),
    "fp32 list empty": (optim(lambda it: it.masters.clear()), "0 flat master"),
    "fp32 tensor too short": (master(shorter, 1), "elements"),
    "a master in two dimensions": (master(as_row, 1), "instead of being flat"),
    "masters in another dtype than fp32": (master(torch.Tensor.bfloat16), "DeepSpeed keeps fp32"),
    "exp_avg too short": (state("exp_avg", shorter, 1), "exp_avg of"),
    "exp_avg_sq too short on one rank": (state("exp_avg_sq", shorter, 1, 1), "exp_avg_sq of"),
    "exp_avg in bf16": (state("exp_avg", torch.Tensor.bfloat16), "exp_avg of"),
    "exp_avg in bf16 on one rank": (state("exp_avg", torch.Tensor.bfloat16, None, 1), "the dtype of a state differs"),
    "exp_avg in two dimensions": (state("exp_avg", as_row, 1),),
    "exp_avg as a list": (state("exp_avg", lambda _: [0.0, 0.0], 1), "of sub-group 0 is not a tensor"),
    "moments as integers": (state("exp_avg", torch.Tensor.int), "no floating-point type"),
    "no step in Adam's state": (drop("step", 1), "the step of sub-group 0 is missing"),
    "no exp_avg_sq on one rank": (drop("exp_avg_sq", None, 1), "kinds of optimizer state differs"),
    "ranks at different steps of Adam": (state("step", lambda _: torch.tensor(99.0), 1, 1), "Adam's step differs"),
    "Adam's steps of flat ids that differ, in no composite": (state("step", one_more, 1), "Adam's steps"),
    "exp_avg without the padding at the end, ZeRO-1/2": (optim(drop_padding), "elements instead of"),
    "step as int, plain tensors, zero_stage as int": (optim(spell_otherwise),),
    "no param_slice_mappings, no param_alignment_paddings": (
        optim(lambda it: [it.outer.pop(f"param_{what}") for what in ("slice_mappings", "alignment_paddings")]),
        "",
        ("zero2",),
    ),
    "elastic checkpoint": (both(), "can't be resumed by stock DeepSpeed", ("zero2-elastic",)),
    "weight decay on norms and biases alone": (optim(decay_the_norms), "weight decay is on vectors alone"),
    "a loss scaler of another step": (scaler_of_step_0, "the loss scaler has counted 0", FP16),
    "amsgrad without max_exp_avg_sq": (options(amsgrad=True), "max_exp_avg_sq is missing"),
    # model states
    "full tensors in the module, ZeRO-3": (in_module(torch.ones(61, 25, dtype=torch.bfloat16)), "in full, but ZeRO-3"),
    "no tensor in the module, ZeRO-3": (in_module(None), "is not a tensor"),
    "a placeholder of two dimensions in the module, ZeRO-3": (in_module(torch.zeros(0, 5)), "leaves a placeholder"),
    "a name missing in the module": (model(lambda tree: tree["module"].pop(first_param(tree))), "module lacks"),
    "an unknown name in the module, ZeRO-3": (put(MODEL, "module", more=torch.empty(0)), "have no state"),
    "a param of another shape in the module, ZeRO-1/2": (
        model(lambda tree: tree["module"].update({first_param(tree): torch.ones(3)})),
        "module has other shapes",
    ),
    "the module as integers, ZeRO-1/2": (module_as(torch.int32), "no floating-point type"),
    "the module in another dtype, ZeRO-1/2": (module_as(torch.float16), "the run trained in BF16"),
    "param_shapes empty": (put(MODEL, param_shapes=[]), "the model states describe 0"),
    "param_shapes not alike on all ranks, ZeRO-3": (on(MODEL, swap_shapes, LAST), "(param_shapes) differs"),
    "a buffer missing": (model(lambda tree: tree["module"].pop(tree["buffer_names"][0])), "module lacks", EXTRAS),
    "a buffer of another shape on one rank, ZeRO-3": (
        on(MODEL, lambda tree: tree["module"].update({tree["buffer_names"][1]: torch.zeros(7)}), LAST),
        "dtypes of buffers differs",
        EXTRAS[1:],
    ),
    "a frozen param missing, ZeRO-3": (model(lambda tree: tree[HELD].popitem()), "list different params", FROZEN[:1]),
    "all frozen params missing, ZeRO-3": (put(MODEL, **{HELD: None}), "not in the model states", FROZEN[:1]),
    "a frozen param missing, ZeRO-2": (
        model(lambda tree: tree["module"].pop(next(iter(tree["frozen_param_shapes"])))),
        "module lacks",
        FROZEN[1:],
    ),
    "fragments of frozen params of another shape": (frozen(as_row), "frozen", FROZEN),
    "fragments of frozen params of another run, ZeRO-2 (--deep)": (frozen(one_more), "the module's", FROZEN[1:]),
    "frozen params in fewer bits than the run has": (call_it_fp32, "the run trained in F32", FROZEN),
    "frozen params in another format": (frozen(torch.Tensor.half), "the run trained in BF16", FROZEN),
    "a tied name whose values are nowhere": (
        model(lambda tree: tree["shared_params"] and tree.update(shared_params={"lm_head.weight": "nothing"})),
        "is tied to nothing",
        ("llama-tied", "zero2-tied"),
    ),
    "a tied name forgotten, ZeRO-3": (put(MODEL, shared_params={}), "lm_head.weight", ("llama-tied",)),
    # weights
    "weights lack a param": (on_weights(lambda found: found.pop(NORM)), f"the weights of {NORM} are missing"),
    "weights of an unknown param": (weights(more=torch.ones(3)), "the weights hold more"),
    "a weight of another shape": (weights(**{NORM: torch.ones(25, 1)}), "other shapes"),
    "weights in another dtype": (
        on_weights(lambda found: found.update({name: tensor.float() for name, tensor in found.items()})),
        "the run trained in BF16",
    ),
    # what only reading shows
    "fp32 of another step (--deep)": (masters_of_another_step, "is not the rounded master"),
    "module of another step, ZeRO-1/2 (--deep)": (module_of_another_step, "the module's weight of"),
    "weights of another step (--deep)": (take(WEIGHTS), "weight of"),
    "two flat tensors of equal length swapped (--deep)": (optim(swap_masters), "is not the rounded master", LAYERS),
    "NaN among the masters (--deep)": (master(third(float("nan")), 1, 0), "the master of"),
    "infinity among the moments (--deep)": (state("exp_avg", third(float("inf")), 1, 0), "exp_avg of"),
    "exp_avg_sq below zero (--deep)": (state("exp_avg_sq", third(-1.0), 1, 0), "a mean of squares can't be"),
    "exp_avg wiped (--deep)": (state("exp_avg", torch.zeros_like), "is all zero"),
    "exp_avg of one group wiped (--deep)": (state("exp_avg", torch.zeros_like, 1), "is all zero"),
    "exp_avg_sq wiped (--deep)": (state("exp_avg_sq", torch.zeros_like), "is all zero"),
    "exp_avg_sq of one group wiped (--deep)": (state("exp_avg_sq", torch.zeros_like, 1), "is all zero"),
    "a flipped bit that the file's checksum tells (--deep)": (flip_a_moment, "its checksum in the file"),
}

# --- the Trainer without DeepSpeed -----------------------------------------------------------------------------------


def swap_states(first: int, second: int) -> Change:
    return optim(lambda it: it.state.update({first: it.state[second], second: it.state[first]}))


def more_ids(it: Optimizer) -> None:
    it.state[len(it.state)] = it.state[0]
    it.groups[1]["params"].append(len(it.state) - 1)


def more_kinds(it: Optimizer) -> None:
    it.state[0]["more"] = it.state[0]["exp_avg"]


def swap_options(it: Optimizer) -> None:
    first, second = it.groups
    first["params"], second["params"] = second["params"], first["params"]
    it.groups.reverse()


def swap_ids(it: Optimizer) -> None:
    ids = it.groups[0]["params"]
    ids[1], ids[2] = ids[2], ids[1]


def at_step(step: float, count: int | None = None) -> Change:
    return state("step", lambda _: torch.tensor(step), count)


def split_weights(root: Path, _: Path) -> None:
    tensors = load_file(root / WEIGHTS)
    parts = {"a-part.safetensors": sorted(tensors)[::2], "another.safetensors": sorted(tensors)[1::2]}
    for path, names in parts.items():
        save_file({name: tensors[name] for name in names}, root / path)
    weight_map = {name: path for path, names in parts.items() for name in names}
    (root / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (root / WEIGHTS).unlink()


def add_old_weights(root: Path, _: Path) -> None:
    torch.save(load_file(root / WEIGHTS), root / "pytorch_model.bin")


TRAINER: Table = {
    "base_lrs not the initial_lr of the param groups": (put(SCHEDULER, base_lrs=[1.0, 1.0]), "it starts from"),
    "hyperparameters of the param groups swapped": (optim(swap_options), "only vectors have weight decay"),
    "ids of the params out of order": (optim(swap_ids), "out of order"),
    "eps missing": (optim(lambda it: [group.pop("eps") for group in it.groups]), "eps is missing"),
    "lr NaN": (options(lr=float("nan")), "lr is nan"),
    "amsgrad without its states": (options(amsgrad=True), "max_exp_avg_sq is missing"),
    "Adam's step of a param beyond the schedule's": (at_step(99.0, 1), "is 99, but the schedule"),
    "Adam's step of a param 0": (at_step(0.0, 1), "is 0, but the schedule"),
    "Adam's step of one param alone behind": (at_step(1.0, 1), "is 1, but the schedule"),
    "integers for a moment": (state("exp_avg", torch.Tensor.int, 1), "not floating-point"),
    "integers for a weight": (on_weights(lambda found: found.update({NORM: found[NORM].int()})), "not floating-point"),
    "pytorch_model.bin beside shards of safetensors": (both(add_old_weights, split_weights), "two sets of weights"),
    "pytorch_model.bin beside model.safetensors": (add_old_weights,),
    "a folder of FSDP": (mkdir("pytorch_model_fsdp_0"), "belongs to an FSDP"),
    "scaler.pt of a run without fp16": (save("scaler.pt", SCALE), "without a loss scale"),
    "no scheduler.pt": (unlink(SCHEDULER), "loads neither the schedule nor the optimizer"),
    "no optimizer.pt": (unlink("optimizer.pt"), "the file is missing"),
    "neither of them": (unlink("optimizer.pt", SCHEDULER), "no optimizer state"),
    "optimizer.pt cut short": (cut("optimizer.pt", 5000), "truncated"),
    "no trainer_state.json": (unlink(STATE), "the file is missing"),
    "no training_args.bin": (unlink("training_args.bin"),),
    "no RNG state": (unlink("rng_state.pth"), "there are no RNG states"),
    "no weights": (unlink(WEIGHTS), "there are no weights"),
    "weights lack a layer": (
        on_weights(lambda found: [found.pop(name) for name in [*found] if ".layers.1." in name]),
        "a resume would keep their initial values",
    ),
    "weights in files of any name, by an index": (split_weights,),
    "a weight of another shape": (weights(**{NORM: torch.zeros(3)}), "has shape [3]"),
    "states of some ids missing": (optim(lambda it: [it.state.pop(1), it.state.pop(3)]), "starts from zero moments"),
    "states of all ids missing": (optim(lambda it: it.state.clear()), "no states, but"),
    "a state that no param has": (optim(lambda it: it.state.update({99: it.state[0]})), "id 99, which no param group"),
    "exp_avg_sq of a param missing": (optim(lambda it: it.state[1].pop("exp_avg_sq")), "state[1].exp_avg_sq"),
    "another kind of state in one param": (optim(more_kinds), "lacks more, which others have"),
    "no step of a param": (drop("step", 1), "no step of its own"),
    "states of different shapes swapped": (swap_states(0, 3), "the state of id 0 has shape"),
    "a moment of another shape": (state("exp_avg", lambda _: torch.zeros(3), 1), "different shapes"),
    "a param group with more ids": (optim(more_ids), "such params"),
    "an id in two param groups": (optim(lambda it: it.groups[1]["params"].append(3)), "own id 3 twice"),
    "fewer names than ids": (optim(lambda it: it.groups[0].update(lt_params=["x"])), "16 ids and 1 names"),
    "moments in another dtype": (state("exp_avg", torch.Tensor.half), "a resume casts it"),
    "optimizer.pt of an older step": (at_step(2.0), "from step 2, but the schedule is at step 4"),
    "trainer_state.json of another step": (write(STATE, '{"global_step": 3}'), "global_step is 3"),
    "scheduler.pt with fewer entries": (put(SCHEDULER, base_lrs=[1.0], _last_lr=[1.0]), "1 learning rates for 2 param"),
    "config.json cut short": (write("config.json", "{"), "not JSON"),
    "config.json of another model": (on_json("config.json", num_hidden_layers=1), "ids, but the model has"),
    "NaN among the weights (--deep)": (on_weights(lambda found: third(float("nan"))(found[NORM])), "is not finite"),
}

UNJUDGED: Table = {
    "no config.json": (unlink("config.json"), "config.json: the file is missing"),
    "an id less": (
        optim(lambda it: [it.state.pop(3), it.groups[0]["params"].remove(3)]),
        "the shapes do not show which",
    ),
    "another optimizer": (state("projector", lambda _: [torch.ones(1)]), "its optimizer is GaLore"),
    "three groups": (optim(lambda it: it.groups.append({**it.groups[1], "params": []})), "not the Trainer's two"),
    "an unknown model": (on_json("config.json", architectures=["Nothing"]), "no model class Nothing"),
}
"""What can't be read here, which does not mean that it is damaged"""

# --- FSDP and torch.distributed.checkpoint ---------------------------------------------------------------------------


def without(*endings: str) -> Change:
    """Drop keys from ``.metadata``, as a save of a smaller state dict would."""

    def change(root: Path, _: Path) -> None:
        entries = read_metadata(root, ".metadata", "x")
        kept = {key: entry for key, entry in entries.items() if not key.endswith(endings)}
        assert len(kept) < len(entries)
        (root / ".metadata").write_bytes(b"".join(one.data for one in lay_out_metadata(".metadata", kept).each()))

    return change


def flip_a_weight(root: Path, _: Path) -> None:
    blob = read_metadata(root, ".metadata", "x")["model.lm_head.weight"].chunks[1].blob
    flip(root / blob.path, blob.start + 704 + 40)


def round_weights(root: Path, _: Path) -> None:
    """What `dcp.save` makes of a model that was cast for inference."""
    saved = load_all(root)
    saved["model"] = {name: tensor.bfloat16() for name, tensor in saved["model"].items()}
    shutil.rmtree(root)
    dcp.save(saved, checkpoint_id=root, no_dist=True)


def load_all(root: Path) -> dict[str, Any]:
    saved: dict[str, Any] = {}
    planner = dcp.default_planner._EmptyStateDictLoadPlanner()
    dcp.state_dict_loader._load_state_dict(saved, dcp.FileSystemReader(root), planner=planner, no_dist=True)
    return saved


def point_outside(root: Path, _: Path) -> None:
    path = root / ".metadata"
    path.write_bytes(path.read_bytes().replace(b"__1_0.distcp", b"/etc/passwd_"))


HEAD, BLOB = "lm_head.weight", "__1_0.distcp"
FSDP, HF, FULL = ("trainer",), ("hf",), ("full",)

DCP: Table = {
    "a lost data file": (unlink(BLOB), "the file is missing"),
    "a truncated data file": (write(BLOB, b"PK" * 1000), "refers to byte"),
    "no .metadata": (unlink(".metadata"), "the save was not finished"),
    "the .metadata of another save": (take(".metadata"), "the file is missing"),
    "a data file of another save": (take(BLOB), "", ("columns",)),
    "a moment is missing": (without(f"{HEAD}.exp_avg"), f"exp_avg of {HEAD} is missing"),
    "the states of a param are missing": (
        without(*(f"{HEAD}.{kind}" for kind in ("exp_avg", "exp_avg_sq", "step"))),
        f"no state of {HEAD}",
    ),
    "a step is missing": (without(f"{HEAD}.step"), "the optimizer's step of"),
    "an option of one param group is missing": (without("param_groups.1.eps"), "eps of param group 1 is missing"),
    "a weight is missing": (without(f"model.{HEAD}"), f"the weights of {HEAD} are missing"),
    "a rank's file of a wider save": (copy(BLOB, "__5_0.distcp"), "another save wrote"),
    "a later save was not finished": (write(".metadata.tmp", ""), "a later save"),
    "rounded weights": (round_weights, "fewer bits than their moments"),
    "a flipped bit (--deep)": (flip_a_weight, "does not match its checksum"),
    "a path to outside": (point_outside, "not a data file"),
    "the optimizer of another save": (take("optimizer_0/.metadata", "optimizer_0/*.distcp"), "from step 4", FSDP),
    "a rank's optimizer of another save": (take(f"optimizer_0/{BLOB}"), "have different steps", FSDP),
    "no optimizer": (rmtree("optimizer_0"), "the folder is missing", FSDP),
    "no weights": (rmtree("pytorch_model_fsdp_0"), "the folder is missing", FSDP),
    "no scheduler": (unlink(SCHEDULER), "neither schedule nor optimizer", FSDP),
    "no trainer state": (unlink(STATE), "the file is missing", FSDP),
    "a counter that is behind": (on_json(STATE, global_step=1), "global_step is 1", FSDP),
    "a rank's weights are lost": (unlink("shard-00001-*"), "the weights of 1 rank are missing", HF),
    "a truncated rank's weights": (cut("shard-00001-*"), "truncated", HF),
    "a truncated pytorch_model_fsdp.bin": (cut("pytorch_model_fsdp.bin"), "truncated", FULL),
    "a truncated optimizer.bin": (cut("optimizer.bin"), "truncated", FULL),
}

# --- DeepSpeed universal ---------------------------------------------------------------------------------------------

UP = "model.layers.0.mlp.up_proj.weight"
PARAM, GLOBAL = f"*/zero/{UP}", "*/zero/optimizer_state.pt"


def steps(path: str, step: float) -> Change:
    return lambda root, _: [torch.save(torch.tensor(step), one) for one in root.glob(path)]


def swap_files(root: Path, _: Path) -> None:
    (folder,) = root.glob(PARAM)
    one, other, between = (folder / f"{name}.pt" for name in ("fp32", "exp_avg", "x"))
    one.rename(between)
    other.rename(one)
    between.rename(other)


def flip_a_master(root: Path, _: Path) -> None:
    (path,) = root.glob(f"{PARAM}/fp32.pt")
    name = str(path.relative_to(root))
    start = next(one.start for one in list_records(root, name, "x") if one.name.endswith("/data/0"))
    flip(root / name, start + 5)


UNIVERSAL: Table = {
    "no `latest_universal`": (unlink("latest_universal"), "the file is missing"),
    "`latest_universal` names another tag": (write("latest_universal", "global_step7"), "points to 'global_step7'"),
    "no optimizer_state.pt": (unlink(GLOBAL), "missing"),
    "optimizer_state.pt cut short": (cut(GLOBAL, 500), "truncated"),
    "no model states": (unlink("*/*rank_0_*model_states.pt"), "missing"),
    "a master is missing": (unlink(f"{PARAM}/fp32.pt"), "the file is missing"),
    "a moment is missing": (unlink(f"{PARAM}/exp_avg.pt"), "the file is missing"),
    "a file of a param cut short": (cut(f"{PARAM}/exp_avg.pt", 500), "truncated"),
    "a param's folder is missing": (rmtree(PARAM), "the file is missing"),
    "a tensor of another shape": (
        on(f"{PARAM}/fp32.pt", lambda tree: tree.update(param=torch.zeros(3, 3))),
        "has shape [3, 3]",
    ),
    "master and moment swapped": (swap_files, "was saved as"),
    "a step is missing": (unlink(f"{PARAM}/step.pt"), "none"),
    "another step of a param": (steps(f"{PARAM}/step.pt", 7.0), "have the steps 4, 7"),
    "another step in optimizer_state.pt": (
        on(GLOBAL, lambda tree: Optimizer(tree).state.update({0: {"step": 7}})),
        "is 7, but",
    ),
    "no loss scaler": (pop(GLOBAL, "loss_scaler"),),
    "no param groups": (pop(GLOBAL, "param_groups"), "param_groups is missing"),
    "a flipped bit (--deep)": (flip_a_master, "checksum"),
}
