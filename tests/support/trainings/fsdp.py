"""FSDP trainings on CPU ranks over gloo, each saved by its framework's own functions: see `Fsdp.kind`.

The Trainer with ``fsdp`` runs plain DDP on a CPU without saying so, because accelerate knows FSDP on accelerators only.
`CpuTrainer` tells accelerate that these ranks are an accelerator's; everything else is stock: what shards the model,
saves and loads. The other kinds are loops without a Trainer.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from accelerate.utils.fsdp_utils import (
    load_fsdp_model,
    load_fsdp_optimizer,
    save_fsdp_model,
    save_fsdp_optimizer,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map
from transformers import Trainer, default_data_collator
from transformers.trainer_callback import TrainerControl, TrainerState

import llmtailor
from llmtailor.saving import AttestResume
from trainings import common, fsdp1
from trainings.common import DECAY, DTYPES, RATE, Logs, Losses, Tokens, arguments_of, batch, checkpoint_of, train_each
from trainings.models import tokenizer
from trainings.spec import Fsdp


class CpuTrainer(Trainer):  # type: ignore[misc]
    def create_accelerator_and_postprocess(self) -> None:
        assert self.args.device  # makes the PartialState
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
        super().create_accelerator_and_postprocess()


def whole(tensor: Any) -> Any:
    """Return a tensor with the elements of all ranks."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().clone() if isinstance(tensor, torch.Tensor) else tensor


def held(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return what a training holds, whole, by the names of the params."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    states = {
        name: {kind: whole(value) for kind, value in optimizer.state[param].items()}
        for name, param in model.named_parameters()
        if param in optimizer.state
    }
    weights = {name: whole(param) for name, param in model.named_parameters()}
    buffers = {name: whole(buffer) for name, buffer in model.named_buffers()}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {"weights": weights, "states": states, "buffers": buffers, "groups": groups}


class Watch(Logs):
    """Keeps what is logged, and what the training holds at each save and when it continues a checkpoint."""

    def __init__(self, every: int, resumes: bool = False) -> None:
        super().__init__()
        self.every = every
        self.resumes = resumes
        self.held: dict[int, Any] = {}

    def wants(self, step: int) -> bool:
        """Whether to keep what the training holds: gathering it takes longer than a step."""
        is_first = self.resumes and not self.held
        return step not in self.held and (is_first or step > 0 == step % self.every)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.wants(state.global_step):
            self.held[state.global_step] = held(kwargs["model"], kwargs["optimizer"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.held[state.global_step] = held(kwargs["model"], kwargs["optimizer"])


def new_model(spec: Fsdp) -> Any:
    return common.new_model(spec).to(DTYPES[spec.dtype])


FORMS = {
    kind: {
        "fsdp": True,
        "fsdp_config": {
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": form,
        },
    }
    for kind, form in (("trainer", "SHARDED_STATE_DICT"), ("full", "FULL_STATE_DICT"))
}


def run_trainer(spec: Fsdp, folder: Path) -> Watch:
    AcceleratorState._reset_state(reset_partial_state=True)  # it remembers the kind of the run before
    args = arguments_of(spec, folder, **FORMS.get(spec.kind, {}))
    watch = Watch(spec.save_steps, spec.resume_from is not None)
    kind = CpuTrainer if spec.kind in FORMS else Trainer
    trainer = kind(
        model=new_model(spec),
        args=args,
        train_dataset=Tokens(),
        data_collator=default_data_collator,
        callbacks=[watch],
    )
    trainer.add_callback(AttestResume(on_mismatch="stop"))
    trainer.train(resume_from_checkpoint=checkpoint_of(spec, folder))
    return watch


class Loop:
    """A training loop without a Trainer."""

    def __init__(self, spec: Fsdp) -> None:
        self.spec = spec
        self.model = new_model(spec)
        if spec.kind == "fsdp1":
            self.model = fsdp1.shard(self.model)
        else:
            ranks = dist.get_world_size()
            if spec.replicas > 1:
                mesh = init_device_mesh("cpu", (spec.replicas, ranks // spec.replicas), mesh_dim_names=("ddp", "fsdp"))
            else:
                mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        trained = [(name, param) for name, param in self.model.named_parameters() if param.requires_grad]
        norms = [param for name, param in trained if "norm" in name]
        others = [param for name, param in trained if "norm" not in name]
        groups = [{"params": others, "weight_decay": DECAY}, {"params": norms, "weight_decay": 0.0}]
        if spec.kind == "verl":  # which gives it all params, frozen ones too
            groups = [{"params": [*self.model.parameters()], "weight_decay": DECAY}]
        self.optimizer = torch.optim.AdamW(groups, lr=RATE)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 - step / 20)
        self.step = 0

    def held(self) -> dict[str, Any]:
        return (fsdp1.held if self.spec.kind == "fsdp1" else held)(self.model, self.optimizer)

    def train(self, until: int, watch: Watch, save: Any) -> None:
        ranks, rank, size = dist.get_world_size(), dist.get_rank(), self.spec.per_device_batch
        while self.step < until:
            if watch.wants(self.step):
                watch.held[self.step] = self.held()
            loss = self.model(**batch((self.step * ranks + rank) * size, size)).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.step += 1
            told = loss.detach().clone()
            dist.all_reduce(told)
            watch.logs[self.step] = {"loss": float(told / ranks)}
            if self.step % self.spec.save_steps == 0:
                save(self)
        watch.held[self.step] = self.held()


def save_loop(loop: Loop, folder: Path) -> None:
    """``{model, optim}``, and nothing else"""
    model, optim = get_state_dict(loop.model, loop.optimizer)
    dcp.save({"model": model, "optim": optim}, checkpoint_id=folder / f"checkpoint-{loop.step}")


def save_columns(loop: Loop, folder: Path) -> None:
    """As `save_loop`, each matrix cut along its columns, as tensor parallelism does."""

    def cut(value: Any) -> Any:
        is_matrix = isinstance(value, DTensor) and value.dim() > 1
        return value.redistribute(placements=[Shard(1)]) if is_matrix else value

    states = tree_map(cut, dict(zip(("model", "optim"), get_state_dict(loop.model, loop.optimizer), strict=True)))
    dcp.save(states, checkpoint_id=folder / f"checkpoint-{loop.step}")


def load_loop(loop: Loop, source: Path) -> None:
    model, optim = get_state_dict(loop.model, loop.optimizer)
    dcp.load({"model": model, "optim": optim}, checkpoint_id=source)
    set_state_dict(loop.model, loop.optimizer, model_state_dict=model, optim_state_dict=optim)
    loop.step = int(next(iter(loop.optimizer.state.values()))["step"])
    loop.scheduler.last_epoch = loop.step


FLAT = StateDictOptions(flatten_optimizer_state_dict=True, strict=False)


def titan_states(loop: Loop) -> tuple[dict[str, Any], dict[str, Any]]:
    """torchtitan keeps the model's names at the top, beside ``optimizer``, ``lr_scheduler``, ``train_state``."""
    model = get_model_state_dict(loop.model)
    counters = {"step": torch.tensor(loop.step, dtype=torch.int32), "ntokens_seen": torch.tensor(100)}
    optimizer = get_optimizer_state_dict(loop.model, loop.optimizer, options=FLAT)
    return model, {**model, "optimizer": optimizer, "lr_scheduler": loop.scheduler, "train_state": counters}


def save_titan(loop: Loop, folder: Path) -> None:
    dcp.save(titan_states(loop)[1], checkpoint_id=folder / f"step-{loop.step}")


def load_titan(loop: Loop, source: Path) -> None:
    model, states = titan_states(loop)
    dcp.load(states, checkpoint_id=source)
    set_model_state_dict(loop.model, {name: states[name] for name in model}, options=FLAT)
    set_optimizer_state_dict(loop.model, loop.optimizer, optim_state_dict=states["optimizer"], options=FLAT)
    loop.step = int(states["train_state"]["step"])


def save_hf(loop: Loop, folder: Path) -> None:
    from transformers.distributed.checkpoint import _save_model_checkpoint_distributed, save_optimizer_distributed

    out = folder / f"checkpoint-{loop.step}"
    if dist.get_rank() == 0:
        out.mkdir(parents=True)
    dist.barrier()
    _save_model_checkpoint_distributed(loop.model, out)
    save_optimizer_distributed(loop.model, loop.optimizer, str(out / "optimizer_0"))
    save_rest(loop, out)


def save_rest(loop: Loop, out: Path) -> None:
    """Save what the Trainer has beside model and optimizer."""
    rng = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}
    torch.save(rng, out / f"rng_state_{dist.get_rank()}.pth")
    if dist.get_rank() == 0:
        torch.save(loop.scheduler.state_dict(), out / "scheduler.pt")
        state = TrainerState(global_step=loop.step, logging_steps=1, stateful_callbacks=[TrainerControl()])
        state.train_batch_size = loop.spec.per_device_batch
        state.save_to_json(str(out / "trainer_state.json"))


def load_hf(loop: Loop, source: Path) -> None:
    from transformers.distributed.checkpoint import _load_model_checkpoint_distributed, load_optimizer_distributed

    _load_model_checkpoint_distributed(loop.model, source)
    load_optimizer_distributed(loop.model, loop.optimizer, str(source / "optimizer_0"))
    load_rest(loop, source)


def load_rest(loop: Loop, source: Path) -> None:
    loop.scheduler.load_state_dict(torch.load(source / "scheduler.pt"))
    loop.step = int(json.loads((source / "trainer_state.json").read_text())["global_step"])


def save_fsdp1(loop: Loop, folder: Path) -> None:
    out = folder / f"checkpoint-{loop.step}"
    fsdp1.save(loop.model, loop.optimizer, out)
    save_rest(loop, out)


def load_fsdp1(loop: Loop, source: Path) -> None:
    fsdp1.load(loop.model, loop.optimizer, source)
    load_rest(loop, source)


def tools() -> tuple[Any, Any]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    return plugin, Accelerator(cpu=True)


def save_ranks(loop: Loop, folder: Path) -> None:
    out = folder / f"checkpoint-{loop.step}"
    save_fsdp_model(*tools(), loop.model, str(out), use_dcp=False)
    save_fsdp_optimizer(*tools(), loop.optimizer, loop.model, str(out), use_dcp=False)
    save_rest(loop, out)


def load_ranks(loop: Loop, source: Path) -> None:
    load_fsdp_model(*tools(), loop.model, str(source), use_dcp=False)
    load_fsdp_optimizer(*tools(), loop.optimizer, loop.model, str(source), use_dcp=False)
    load_rest(loop, source)


def verl_file(folder: Path, kind: str) -> Path:
    return folder / f"{kind}_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"


def save_verl(loop: Loop, folder: Path) -> None:
    """As verl's FSDPCheckpointManager.save_checkpoint with FSDP2"""
    out = folder / f"global_step_{loop.step}" / "actor"
    out.mkdir(parents=True, exist_ok=True)
    torch.save(loop.model.state_dict(), verl_file(out, "model"))
    torch.save(loop.optimizer.state_dict(), verl_file(out, "optim"))
    rng = {"cpu": torch.get_rng_state(), "numpy": np.random.get_state(), "random": random.getstate()}
    torch.save({"lr_scheduler": loop.scheduler.state_dict(), "rng": rng}, verl_file(out, "extra_state"))
    if dist.get_rank() == 0:
        loop.model.config.save_pretrained(out / "huggingface")
        tokenizer().save_pretrained(out / "huggingface")
        config = {"FSDP_version": 2, "world_size": dist.get_world_size()}
        (out / "fsdp_config.json").write_text(json.dumps(config, indent=4))
    dist.barrier()


def load_verl(loop: Loop, source: Path) -> None:
    """As verl's FSDPCheckpointManager.load_checkpoint"""
    loop.model.load_state_dict(torch.load(verl_file(source, "model"), weights_only=False), strict=True)
    loop.optimizer.load_state_dict(torch.load(verl_file(source, "optim"), weights_only=False))
    extra = torch.load(verl_file(source, "extra_state"), weights_only=False)
    if "rng" in extra:
        torch.set_rng_state(extra["rng"]["cpu"])
        np.random.set_state(extra["rng"]["numpy"])
        random.setstate(extra["rng"]["random"])
    loop.scheduler.load_state_dict(extra["lr_scheduler"])
    loop.step = loop.scheduler.last_epoch


KINDS = {
    "fsdp1": (save_fsdp1, load_fsdp1),
    "loop": (save_loop, load_loop),
    "columns": (save_columns, load_loop),
    "titan": (save_titan, load_titan),
    "hf": (save_hf, load_hf),
    "ranks": (save_ranks, load_ranks),
    "verl": (save_verl, load_verl),
}


def run_loop(spec: Fsdp, folder: Path) -> Watch:
    save, load = KINDS[spec.kind]
    loop, watch = Loop(spec), Watch(spec.save_steps, spec.resume_from is not None)
    if spec.resume_from:
        load(loop, folder / spec.resume_from)
        if spec.kind != "fsdp1":
            held = {"model": loop.model, "optimizer": loop.optimizer, "scheduler": loop.scheduler}
            llmtailor.attest(folder / spec.resume_from, **held, step=loop.step, on_mismatch="stop")
    loop.train(spec.steps, watch, lambda loop: save(loop, folder / spec.name))
    return watch


def run(spec: Fsdp, folder: Path) -> Losses:
    (folder / spec.name).mkdir(exist_ok=True)
    watch = run_loop(spec, folder) if spec.kind in KINDS else run_trainer(spec, folder)
    if dist.get_rank() == 0:
        torch.save(watch.held, folder / spec.name / "held.pt")
    return watch.losses


def main(specs_file: Path, folder: Path) -> None:
    train_each(specs_file, folder, run)
