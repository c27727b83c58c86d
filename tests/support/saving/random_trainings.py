"""Trainings drawn from a seed, with events in mid-run, kills and rollbacks; `random_oracle` judges what is composed.

``start_ranks("saving.random_trainings", [FOLDER], RANKS, FOLDER)`` runs what FOLDER/order.json says. A training without
kills runs in that process; one that shall be killed in a child.

At each step, everything that the training holds is written by ``torch.save``, before the saver is called. Gradients are
random numbers that follow from the step and the attempt, so that no two attempts agree by chance.
"""

from __future__ import annotations

import copy
import errno
import json
import logging
import os
import random
import shutil
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import Trainer, TrainerCallback, default_data_collator

from llmtailor.copying import streams
from llmtailor.errors import UnsupportedCheckpoint, UsageError
from llmtailor.saving import SaveFailed, attach, saver_for
from oracle import any as any_zero
from trainings.common import Tokens, arguments

WIDTH, VOCAB = 6, 11
POLICIES = (
    *("full", "parity", "round_robin:2", "round_robin:3", "moments_in_turn:2", "moments_in_turn:3", "adaptive:0.5"),
    *("filter:first=1,last=1,every=2,aux_every=2", "budget:12", "parity:aux_every=1", "rounded", "rounded"),
)
ROUNDED = ({"moments": "bf16"}, {"moments": "8bit"}, {"masters": "24bit"}, {"masters": "24bit", "moments": "8bit"})
OPTIMIZERS = (*("AdamW", "AdamW", "amsgrad", "SGD", "Adagrad", "RMSprop", "NAdam"), *["Own"] * 3)
MOMENTS = (("exp_avg", "exp_avg_sq"), ("m", "v"), ("momentum_buffer", "square_avg"))
UNKNOWN = (("a.b", "exp_avg of g"), ("velocity", "energy"), ("state", "0"))
"""The first has a dot, with which no DCP folder can be read"""
COPIES = ("master_param", "fp32_param", "exp_avg_of_w", "z", "momentum_buffer", "m", "param_groups")
EVENTS = (
    *("ema", "buffer", "grow", "cut", "tie", "freeze", "stop", "group", "unfreeze", "rows", "rows.data", "late"),
    *("resize", "drop", "view", "rename"),
)
IN_ENGINES = ("buffer", "grow", "rows", "rows.data")
IN_SHARDS = ("buffer", "grow", "freeze", "group", "rows", "rows.data", "late")

SHARDED = ("fsdp", "zero2", "zero3")


@dataclass
class Case:
    """A training that follows from a seed."""

    form: str
    seed: int
    layers: int = 3
    dtype: torch.dtype = torch.float32
    tie: str = "none"
    alias: str = "none"
    has_table: bool = False
    large: bool = False
    experts: int = 0
    optimizer: str = "AdamW"
    kinds: tuple[str, str] = MOMENTS[0]
    copied: str | None = None
    factored: bool = False
    num_groups: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    events: list[tuple[int, str]] = field(default_factory=list)
    attempts: list[tuple[int, str]] = field(default_factory=list)
    """Steps to train, and how each attempt ends: close, kill or fail"""

    @classmethod
    def of(cls, form: str, seed: int) -> Case:
        chance = random.Random(f"{form} {seed}")
        pick, is_sharded, is_engine = chance.choice, form in SHARDED, form.startswith("zero")

        def sometimes(share: float) -> bool:
            return chance.random() < share

        case = cls(form, seed, layers=chance.randint(2, 4))
        case.dtype = pick([torch.float32, torch.float32, torch.bfloat16])
        case.tie = pick(["none", "ordinary"] if is_sharded else ["none", "ordinary", "memory", "layers", "in layers"])
        case.alias = "none" if is_sharded else pick(["none", "none", "buffer", "frozen", "slice"])
        case.has_table, case.large = sometimes(0.6), sometimes(0.05)
        case.experts = pick([0, 0, 2])
        case.optimizer = "AdamW" if is_engine else pick(OPTIMIZERS)
        if case.optimizer == "Own":
            case.kinds = pick([*MOMENTS, *UNKNOWN[is_sharded:]])
            case.copied = pick([None, *COPIES])
            case.copied = None if case.copied in case.kinds else case.copied
            case.factored = sometimes(0.3) and not is_sharded
        if case.optimizer == "NAdam":  # torch would cast its mu_product
            case.dtype = torch.float32
        case.num_groups = 2 if case.optimizer == "amsgrad" else chance.randint(1, 2)
        case.options = {"policy": pick(POLICIES), "background": sometimes(0.7), "in_flight": pick([1, 1, 2])}
        case.options |= {"experts": "parts"} if sometimes(0.5) and case.experts else {}
        case.options |= {"keep_composable": 2} if sometimes(0.15) else {}
        if case.options["policy"] != "budget:12" and sometimes(0.15):
            case.options |= pick(ROUNDED)
        known = IN_ENGINES if is_engine else IN_SHARDS if is_sharded else EVENTS
        case.events = sorted((chance.randint(2, 8), event) for event in chance.sample(known, pick([0, 1, 1, 2, 3])))
        ends = ["close", "close", "fail"] if form != "plain" else ["close", "kill", "fail"]
        if is_sharded and case.optimizer == "Adagrad":  # whose states torch does not make for a late group
            case.events = [one for one in case.events if one[1] != "group"]
        case.attempts = [(chance.randint(2, 5), pick(ends)) for _ in range(chance.randint(1, 3))]
        return case

    def has(self, event: str, step: int) -> bool:
        return any(at <= step and one == event for at, one in self.events)


# --- the training ----------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)
        if experts:
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))


class Net(nn.Module):
    _keys_to_ignore_on_save = None  # the Trainer asks for it

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer(case.experts) for _ in range(case.layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.added = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4)).requires_grad_(False)
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        if case.has_table:  # with short rows; a large one is more than any sample reads
            self.table = nn.Parameter(torch.zeros(1 << 19 if case.large else 50, 4), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer.proj(x))
            for expert in getattr(layer, "experts", ()):
                x = x + torch.tanh(expert(x))
        return self.lm_head(self.norm(x)).float().square().mean()


def tied(model: Any, how: str) -> None:
    """Tie weights, by object or by memory."""
    first, second = model.layers[0].proj, model.layers[1].proj
    if how == "ordinary":
        model.lm_head.weight = model.embed_tokens.weight
    elif how == "memory":
        model.lm_head.weight = nn.Parameter(model.embed_tokens.weight.data)
    elif how == "layers":
        second.weight = first.weight
    elif how == "in layers":
        second.weight = nn.Parameter(first.weight.data)
        if hasattr(model.layers[0], "experts"):
            model.layers[1].experts[0].bias = first.bias


def alias(model: Any, how: str) -> None:
    """Put a buffer, or a frozen param, over a weight's memory."""
    weight = model.layers[0].proj.weight
    if how == "buffer":
        model.register_buffer("window", weight.data)
    elif how == "slice":
        model.register_buffer("window", weight.data[1:3])
    elif how == "frozen":
        model.window = nn.Parameter(weight.data, requires_grad=False)


class Own(torch.optim.Optimizer):
    """Two running means under any names, maybe an fp32 copy of the weights, and more that is no moment."""

    def __init__(self, params: Any, case: Case) -> None:
        super().__init__(params, {"lr": 1e-2, "decay": 0.9})
        self.case = case

    def load_state_dict(self, state_dict: Any) -> None:
        """Keep fp32 states of bf16 params, as Transformer Engine does; torch casts them."""
        super().load_state_dict(state_dict)
        params = [param for group in self.param_groups for param in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, param in zip(numbers, params, strict=True):
            self.state[param] |= copy.deepcopy(state_dict["state"].get(number, {}))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        first, second = self.case.kinds
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state, grad = self.state[param], param.grad.float()
                if first not in state:
                    state |= {first: torch.zeros_like(grad), second: torch.zeros_like(grad), "count": 0}
                    state |= {self.case.copied: param.detach().float().clone()} if self.case.copied else {}
                    state |= {"row": torch.zeros(param.shape[0])} if self.case.factored else {}
                state["count"] += 1
                state[first].lerp_(grad, 1 - group["decay"])
                state[second].mul_(group["decay"]).addcmul_(grad, grad, value=0.1)
                if self.case.factored:
                    state["row"] += grad.reshape(len(grad), -1).mean(1)
                weight = state[self.case.copied] if self.case.copied else param
                weight.sub_(group["lr"] * state[first] / (state[second].sqrt() + 1e-6))
                if self.case.copied:
                    param.copy_(weight)


def new_optimizer(case: Case, model: Any) -> Any:
    trained = [param for param in model.parameters() if param.requires_grad]
    cut = max(1, len(trained) // 3)
    groups: list[dict[str, Any]] = [{"params": trained[:cut]}, {"params": trained[cut:], "weight_decay": 0.0}]
    if case.optimizer == "amsgrad":
        groups[1]["amsgrad"] = True
    groups = groups if case.num_groups == 2 else [{"params": trained}]
    if case.optimizer == "Own":
        return Own(groups, case)
    if case.optimizer == "SGD":
        return torch.optim.SGD(groups, lr=1e-2, momentum=0.9 * (case.seed % 2 or case.form == "fsdp"))
    if case.optimizer == "RMSprop":
        return torch.optim.RMSprop(groups, lr=1e-2, momentum=0.9, centered=case.seed % 2 == 0)
    kinds: dict[str, Any] = {"Adagrad": torch.optim.Adagrad, "NAdam": torch.optim.NAdam}
    return kinds.get(case.optimizer, torch.optim.AdamW)(groups, lr=1e-2)


def unlisted(optimizer: Any, param: Any) -> None:
    """Take a param out of its group, as loops do that freeze it."""
    for group in optimizer.param_groups:
        group["params"] = [one for one in group["params"] if one is not param]
    optimizer.state.pop(param, None)


def happen(event: str, model: Any, optimizer: Any) -> None:
    """Change a training in mid-run; what new params begin with follows from others."""
    last = optimizer.param_groups[-1] if optimizer is not None else {}
    weight = model.layers[-1].proj.weight
    if event == "ema":
        model.ema = copy.deepcopy(model.layers).requires_grad_(False)
    elif event == "buffer":
        model.register_buffer("late", torch.ones(2))
    elif event == "grow":
        model.count = torch.zeros(len(model.count) + 3, dtype=torch.int64)
    elif event in ("cut", "tie"):
        old, embed = model.lm_head.weight, model.embed_tokens.weight
        if event == "cut" and old is embed:
            model.lm_head.weight = nn.Parameter(embed.detach().clone())
            last["params"] = [*last["params"], model.lm_head.weight]
        elif event == "tie" and old is not embed:
            unlisted(optimizer, old)
            model.lm_head.weight = embed
    elif event == "freeze":
        model.layers[0].proj.bias.requires_grad_(False)
        unlisted(optimizer, model.layers[0].proj.bias)
    elif event == "stop":
        weight.requires_grad_(False)  # and stays in its group
    elif event == "drop":  # a module goes away
        unlisted(optimizer, model.norm.weight)
        unlisted(optimizer, model.norm.bias)
        model.norm = nn.Identity()
    elif event == "group":
        for param in model.added[0].parameters():
            param.requires_grad_(True)
        optimizer.add_param_group({"params": [*model.added[0].parameters()], "lr": torch.tensor(0.02).item()})
    elif event == "unfreeze":
        last["params"] = [*last["params"], *(one.requires_grad_(True) for one in model.added[1].parameters())]
    elif event == "resize":
        old = model.embed_tokens.weight
        new = nn.Parameter(torch.cat([old.detach(), old.detach()[:2]]))
        for group in optimizer.param_groups:
            group["params"] = [new if one is old else one for one in group["params"]]
        optimizer.state.pop(old, None)
        if model.lm_head.weight is old:
            model.lm_head.weight = new
        model.embed_tokens.weight = new
    elif event == "view":
        model.register_buffer("pane", weight.data)
    elif event == "rename":
        model.renamed, model.lm_head = model.lm_head, nn.Identity()
        model.lm_head.weight = model.embed_tokens.weight


@dataclass
class Objects:
    """What a program holds of a training."""

    model: Any
    optimizer: Any = None
    scheduler: Any = None
    wrapper: Any = None
    """An engine, or an Accelerator"""

    @property
    def for_saver(self) -> dict[str, Any]:
        if self.wrapper is not None and hasattr(self.wrapper, "prepare"):
            return {"accelerator": self.wrapper}
        if hasattr(self.wrapper, "save_checkpoint"):
            return {"engine": self.wrapper}
        return {"model": self.wrapper or self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}


def new_training(case: Case, step: int) -> Objects:
    """Return the objects of a training as they are after a step, but untrained."""
    torch.manual_seed(0)
    model = Net(case).to(case.dtype if not case.form.startswith("zero") else torch.float32)
    tied(model, case.tie)
    alias(model, case.alias)
    if case.form.startswith("zero"):
        return new_engine(case, model, step)
    if case.form == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = new_optimizer(case, model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: 1 / (1 + at))
    for at, event in case.events:
        if at <= step:
            happen(event, model, optimizer)
    made = Objects(model, optimizer, scheduler)
    if case.form == "ddp":
        made.wrapper = nn.parallel.DistributedDataParallel(model)
    if case.form == "accelerate":
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        PartialState(cpu=True)
        made.wrapper = Accelerator(cpu=True)
        made.wrapper.prepare(model, optimizer, scheduler)
    return made


def new_engine(case: Case, model: Any, step: int) -> Objects:
    for at, event in case.events:
        if at <= step:
            happen(event, model, None)
    optimizer = new_optimizer(case, model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: 1 / (1 + at))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": int(case.form[-1])},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": case.dtype == torch.bfloat16},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    return Objects(model, optimizer, scheduler, engine)


def advance(case: Case, made: Objects, step: int, attempt: int) -> None:
    """Train a step."""
    model, optimizer, scheduler = made.model, made.optimizer, made.scheduler
    before(case, model, optimizer, step)
    if case.form.startswith("zero"):
        torch.manual_seed(1000 * attempt + 10 * step + dist.get_rank())
        made.wrapper.backward(made.wrapper(torch.randint(VOCAB, (1, 8))))
        made.wrapper.step()
    else:
        give_gradients(case, model, step, attempt)
        optimizer.step()
        grow_scheduler(optimizer, scheduler)
        scheduler.step()
    after(case, model, step, attempt)


def grow_scheduler(optimizer: Any, scheduler: Any) -> None:
    """Tell torch's LambdaLR of new param groups: it knows those that it began with."""
    scheduler.base_lrs += [group["lr"] for group in optimizer.param_groups[len(scheduler.base_lrs) :]]
    scheduler.lr_lambdas = scheduler.lr_lambdas[:1] * len(scheduler.base_lrs)
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])


def before(case: Case, model: Any, optimizer: Any, step: int) -> None:
    for at, event in case.events:
        if at == step:
            happen(event, model, optimizer)


def give_gradients(case: Case, model: Any, step: int, attempt: int) -> None:
    has_late = any(event == "late" and step < at for at, event in case.events)
    torch.manual_seed(1000 * attempt + step)
    for name, param in model.named_parameters():
        grad = torch.randn(param.shape).to(param.dtype)
        if isinstance(param, DTensor):
            grad = distribute_tensor(grad, param.device_mesh, param.placements)
        is_late = has_late and name.startswith("layers.1.")
        param.grad = grad if param.requires_grad and not is_late else None


@torch.no_grad()
def after(case: Case, model: Any, step: int, attempt: int) -> None:
    """Change what the optimizer does not."""
    model.count += step
    if hasattr(model, "late"):
        model.late.mul_(1.5)
    if hasattr(model, "ema"):
        for mine, other in zip(model.ema.parameters(), model.layers.parameters(), strict=True):
            mine.lerp_(other.to(mine.dtype), 0.5)
    for event in ("rows", "rows.data"):
        if case.has_table and case.has(event, step):
            is_zero3 = hasattr(model.table, "ds_id")
            with deepspeed.zero.GatheredParameters([model.table], modifier_rank=0, enabled=is_zero3):
                table = model.table.to_local() if isinstance(model.table, DTensor) else model.table
                rows = table.data if event == "rows.data" else table
                if len(rows) and (not is_zero3 or dist.get_rank() == 0):
                    rows[(7919 * step) % len(rows)] = step + attempt / 8


def whole(value: Any) -> Any:
    """Return a copy of a state, joined."""
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def snapshot(case: Case, made: Objects, attempt: int, scratch: Path) -> dict[str, Any]:
    """Return all that a training holds, by the names of the model; of an engine, what it has saved."""
    model, optimizer, scheduler = made.model, made.optimizer, made.scheduler
    if case.form.startswith("zero"):
        shutil.rmtree(scratch, ignore_errors=True) if dist.get_rank() == 0 else None
        dist.barrier()
        made.wrapper.save_checkpoint(str(scratch))
        dist.barrier()
        found = {**read_zero(scratch), "attempt": attempt} if dist.get_rank() == 0 else {}
        dist.barrier()
        return found
    names = {param: name for name, param in model.named_parameters()}
    held = model.state_dict(keep_vars=True)
    places: dict[int, set[str]] = {}
    for name, tensor in held.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.numel():
            places.setdefault(local.untyped_storage().data_ptr(), set()).add(name)
    first: dict[int, str] = {}
    return {
        "attempt": attempt,
        "model": {name: whole(tensor) for name, tensor in held.items()},
        "tied": {name: first.setdefault(id(tensor), name) for name, tensor in held.items()},
        "shared": [place for place in places.values() if len(place) > 1],
        "groups": [[names[param] for param in group["params"]] for group in optimizer.param_groups],
        "options": [{key: whole(one) for key, one in group.items() if key != "params"}
                    for group in optimizer.param_groups],
        "states": {names[param]: {kind: whole(one) for kind, one in state.items()}
                   for param, state in optimizer.state.items() if state and param in names},
        "scheduler": scheduler.last_epoch,
    }  # fmt: skip


# --- attempts --------------------------------------------------------------------------------------------------------


class Told(logging.Handler):
    """What the saver says, in a file that survives a kill."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.WARNING)
        self.path = path

    def emit(self, record: logging.LogRecord) -> None:
        with self.path.open("a") as file:
            file.write(f"{json.dumps([record.levelname, record.getMessage()])}\n")


def read_zero(folder: Path) -> dict[str, Any]:
    """Return what DeepSpeed's files hold, read the slow way."""
    found = any_zero.load(folder)
    tensors = {kind: found.kind(kind) for kind in ("master", "frozen", "buffer", "exp_avg", "exp_avg_sq")}
    tied = found.rest["tied"]
    model = {**tensors["master"], **tensors["frozen"], **{name: one[0] for name, one in tensors["buffer"].items()}}
    names = {**{name: name for name in model}, **tied}
    groups = found.rest["param_groups"] or ()
    states = {name: {kind: tensors[kind][name] for kind in ("exp_avg", "exp_avg_sq")} for name in tensors["exp_avg"]}
    return {
        "model": {name: model[stored] for name, stored in names.items()},
        "tied": names,
        "shared": [{name, stored} for name, stored in tied.items()],
        "groups": found.flat_ids,
        "options": [{key: one for key, one in group.items() if key != "params"} for group in groups],
        "states": {name: {**found_of, "step": found.steps[name]} for name, found_of in states.items()},
        "scheduler": found.rest["lr_scheduler"]["last_epoch"],
    }


def load(case: Case, folder: Path, made: Objects) -> None:
    """Load a composite as a stock loop does."""
    model, optimizer, scheduler = made.model, made.optimizer, made.scheduler
    if case.form.startswith("zero"):
        path, _ = made.wrapper.load_checkpoint(str(folder))
        assert path is not None
        return
    if case.form == "accelerate":
        made.wrapper.load_state(str(folder))
        return
    if case.form == "fsdp":
        weights, states = get_state_dict(model, optimizer)
        tree = {"model": weights, "optim": states}
        dcp.load(tree, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=tree["model"], optim_state_dict=tree["optim"])
        scheduler.last_epoch = json.loads((folder / "llmtailor.json").read_text())["global_step"]
        return
    lacking, unknown = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    names = {id(one): name for name, one in model.named_parameters()}
    aliases = {name for name, one in model.state_dict(keep_vars=True).items() if names.get(id(one), name) != name}
    assert not unknown and {*lacking} <= aliases, (lacking, unknown)
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
    scheduler.load_state_dict(torch.load(folder / "scheduler.pt", weights_only=True))


def live(case: Case, folder: Path, number: int, begin: int, resume: Path | None, steps: int, end: str) -> None:
    """Train one attempt on this rank, from scratch or from a composite."""
    chance = random.Random(f"{case.form} {case.seed} {number}")
    rank = dist.get_rank() if dist.is_initialized() else 0
    told = Told(folder / f"told-{rank}.jsonl")
    logging.getLogger("llmtailor").addHandler(told)
    write_all, count = streams.write_all, [chance.randint(1, 12)]

    def write(fd: int, data: bytes | memoryview) -> None:
        count[0] -= 1
        if count[0] <= 0 and end == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if count[0] in (0, -1, -2) and end == "fail" and rank == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_all(fd, data)

    streams.write_all = write
    try:
        if case.form == "trainer":

            def record(made: Objects, step: int) -> None:
                if step > begin:
                    torch.save(snapshot(case, made, number, folder), folder / "truth" / f"{step}.pt")

            through_trainer(case, folder, number, begin, resume, steps, record)
            return
        training = new_training(case, begin)
        if resume is not None:
            load(case, resume, training)
        saver = saver_for(folder / "run", **training.for_saver, **case.options)
        saver.start(begin, resumed_from=resume if number % 2 else None)
        for step in range(begin + 1, begin + steps + 1):
            advance(case, training, step, number)
            found = snapshot(case, training, number, folder / "stock")
            if rank == 0:
                torch.save(found, folder / "new.pt")
                (folder / "new.pt").rename(folder / "truth" / f"{step}.pt")  # at once, because a kill may come
            if chance.random() < 0.8:
                is_awaited = chance.random() < 0.5
                with suppress(SaveFailed):
                    save = saver.save(step)
                    if save is not None and is_awaited:
                        save.wait(60)
        saver.close()
    finally:
        streams.write_all = write_all
        logging.getLogger("llmtailor").removeHandler(told)


def through_trainer(
    case: Case,
    folder: Path,
    number: int,
    begin: int,
    resume: Path | None,
    steps: int,
    seen: Callable[[Any, int], None],
    has_saver: bool = True,
) -> None:
    """Do what `live` does, with the Trainer: it steps, saves and loads."""
    made = new_training(case, begin)

    class Drawn(Trainer):  # type: ignore[misc]
        def training_step(self, *_: Any, **__: Any) -> torch.Tensor:
            before(case, made.model, made.optimizer, self.state.global_step + 1)
            give_gradients(case, made.model, self.state.global_step + 1, number)
            grow_scheduler(made.optimizer, made.scheduler)
            return torch.zeros(())

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen(made, state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            after(case, made.model, state.global_step, number)
            seen(made, state.global_step)

    args = arguments(folder / "run", max_steps=begin + steps, max_grad_norm=0.0)
    objects = (made.optimizer, made.scheduler)
    trainer = Drawn(made.model, args, default_data_collator, Tokens(), callbacks=[Watch()], optimizers=objects)
    if has_saver:
        attach(trainer, save_steps=1, **case.options)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)


def in_a_child(work: Callable[[], object]) -> None:
    """Do something in a child that may be killed."""
    pid = os.fork()
    if not pid:
        code = 0
        try:
            work()
        except Exception:
            traceback.print_exc()
            code = 1
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL), f"the attempt ended with code {code}"


def attempts(case: Case, folder: Path, judge: Any, everywhere: Callable[[Any], Any]) -> None:
    """Train all attempts of a case, each from a composite of the one before; rank 0 judges the composites."""
    chance = random.Random(f"{case.form} {case.seed} resumes")
    rank = dist.get_rank() if dist.is_initialized() else 0
    begin, resume = 0, None
    if rank == 0:
        (folder / "truth").mkdir(parents=True)
    everywhere(None)
    for number, (steps, end) in enumerate(case.attempts):
        work = lambda: live(case, folder, number, begin, resume, steps, end)  # noqa: B023, E731
        try:
            in_a_child(work) if end == "kill" else work()
        except (UnsupportedCheckpoint, UsageError) as error:
            if rank == 0:
                judge.refused(error)
            return
        found = judge.attempt(number) if rank == 0 else None
        composites: dict[int, str] = everywhere(found)
        """Step -> a composite in which nothing is old"""
        for step, out in composites.items():
            resumed(case, folder, Path(out), step, judge if rank == 0 else None)
        everywhere(None)
        if not composites or number == len(case.attempts) - 1:
            return
        begin = everywhere(chance.choice([max(composites), *composites]))
        if rank == 0:
            resume = judge.roll_back(begin)
        resume = everywhere(resume)


def resumed(case: Case, folder: Path, composite: Path, step: int, judge: Any) -> None:
    """Load a composite in which nothing is old into new objects; two more steps must equal those that followed."""
    truth = {at: torch.load(path, weights_only=False) for at in (step, step + 1, step + 2)
             if (path := folder / "truth" / f"{at}.pt").exists()}  # fmt: skip
    attempt = truth[step]["attempt"]
    if case.form == "trainer":
        more = sum(one["attempt"] == attempt for one in truth.values()) - 1

        def compare(made: Objects, at: int) -> None:
            judge.same(snapshot(case, made, attempt, folder), truth[at], f"the Trainer from {composite.name}, at {at}")

        if more:
            through_trainer(case, folder, attempt, step, composite, more, compare, has_saver=False)
        return
    training = new_training(case, step)
    load(case, composite, training)
    for at, wanted in truth.items():
        if wanted["attempt"] != attempt:
            return
        if at > step:
            advance(case, training, at, attempt)
        found = snapshot(case, training, attempt, folder / "stock")
        if judge is not None:
            judge.same(found, wanted, f"what torch loads from {composite.name}, at step {at}")


def main(folder: Path) -> None:
    """Run the cases of an order; write what the judge has found."""
    from saving.random_oracle import Judge

    torch.set_num_threads(1)
    order = json.loads((folder / "order.json").read_text())
    is_alone = order["form"] in ("plain", "trainer")
    if not is_alone:
        deepspeed.init_distributed("gloo")

    def everywhere(value: Any) -> Any:
        values = [value]
        if not is_alone:
            dist.broadcast_object_list(values, src=0)
        return values[0]

    for seed in order["seeds"]:
        case = Case.of(order["form"], seed)
        own = folder / f"{case.form}-{seed}"
        judge = Judge(case, own)
        try:
            attempts(case, own, judge, everywhere)
        except Exception:
            if is_alone or dist.get_rank() == 0:
                judge.wrong(traceback.format_exc())
            if not is_alone:
                raise
        finally:
            if is_alone or dist.get_rank() == 0:
                judge.write(folder / f"{case.form}-{seed}.json")
        if not judge.faults and (is_alone or dist.get_rank() == 0):
            shutil.rmtree(own, ignore_errors=True)
