"""Trainings under fully_shard on CPU ranks over gloo, forked from one process, with the saver and the truth.

``mesh`` is FSDP2 over tensor parallelism: MLPs are cut by rows and columns. Under HSDP, some params are frozen, a
frozen module is one that the config does not describe, and it has two names; the learning rate is a tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import default_data_collator

from helpers.composing import compose
from llmtailor import attest
from llmtailor.saving import attach, saver_for
from saving.loop import build
from trainings.common import Tokens, arguments
from trainings.fsdp import FORMS, CpuTrainer, Watch, held

STEPS, VOCAB = 6, 62
RANKS = {"fsdp": 4, "hsdp": 4, "mesh": 4, "partly": 2, "trainer": 2, "experts": 2}
FROZEN = ("embed_tokens", ".layers.1.", "added")


def model_of(kind: str) -> Any:
    """No dimension is a multiple of the ranks, and some ranks have no row of the norms' last chunks."""
    torch.manual_seed(0)
    sizes = {"hidden": 10, "vocab": VOCAB, "intermediate_size": 22, "num_key_value_heads": 1, "head_dim": 6}
    if kind == "experts":
        return build(num_experts=3, num_experts_per_tok=2, **sizes)
    model = build(layers=2, **sizes)
    if kind == "hsdp":
        model.model.added = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3))
        model.model.again = model.model.added
        for name, param in model.named_parameters():
            param.requires_grad = not any(word in name for word in FROZEN)
    return model


def optimizer_for(model: Any, kind: str) -> Any:
    rate = torch.tensor(1e-2) if kind == "hsdp" else 1e-2
    trained = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(trained, lr=rate, foreach=False if kind == "mesh" else None)  # torch has it for one mesh


def shard(model: Any, kind: str) -> None:
    first = {"hsdp": "replicate", "mesh": "data"}.get(kind)
    shape, names = ((2, 2), (first, "shard")) if first else ((RANKS[kind],), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if kind == "mesh":
        rows, columns = ColwiseParallel(), RowwiseParallel()
        for layer in model.model.layers:
            plan = {"gate_proj": rows, "up_proj": rows, "down_proj": columns}
            parallelize_module(layer.mlp, mesh["shard"], plan)
        mesh = mesh["data"]
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    if kind != "partly":  # else embeddings and head are whole on each rank
        fully_shard(model, mesh=mesh)


def as_truth(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what a training holds by param; frozen ones have no states."""
    return {name: {"master": one, **found["states"].get(name, {})} for name, one in found["weights"].items()}


def new_training(kind: str) -> tuple[Any, Any]:
    model = model_of(kind)
    shard(model, kind)
    return model, optimizer_for(model, kind)


def resume(kind: str, folder: Path, at: int, losses: dict[int, float], rank: int) -> None:
    """Go on from a composite of the first save with torch's own loader, and compare the losses."""
    if rank == 0:
        compose(folder / "run", at, out=folder / "composite", to="dcp")
    dist.barrier()
    model, optimizer = new_training(kind)

    def load() -> None:
        states = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
        dcp.load(states, checkpoint_id=folder / "composite")
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optim"])

    load()
    attest(folder / "composite", model=model, optimizer=optimizer, how="full", on_mismatch="stop")
    with torch.no_grad():
        next(iter(model.model.layers)).mlp.down_proj.weight.mul_(2)
    found = attest(folder / "composite", model=model, optimizer=optimizer, on_mismatch="warn")
    assert not found.is_same and found.num_same == found.num_states - 1
    load()
    for step in range(at + 1, STEPS + 1):
        assert step_once(model, optimizer, step, rank // 2) == losses[step]


def step_once(model: Any, optimizer: Any, step: int, seed: int) -> float:
    loss = model(**batch(step, seed)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def train(kind: str, folder: Path, rank: int) -> None:
    model, optimizer = new_training(kind)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    how = {"policy": "round_robin:4", "experts": "parts"} if kind == "experts" else {"policy": "adaptive"}
    how |= {"in_flight": 2} if kind in ("fsdp", "partly") else {}
    saver = saver_for(folder / "run", model=model, optimizer=optimizer, scheduler=scheduler, **how)
    saver.start(0)
    truth, losses = {}, {}
    seed = rank // 2 if kind == "mesh" else rank  # ranks of tensor parallelism see the same data
    for step in range(1, STEPS + 1):
        loss = model(**batch(step, seed)).loss
        loss.backward()
        if kind == "partly":
            for param in (model.model.embed_tokens.weight, model.model.norm.weight, model.lm_head.weight):
                dist.all_reduce(param.grad, dist.ReduceOp.SUM)
                param.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = float(loss.detach())
        if step % 2 == 0:
            model(**batch(step, seed))  # as an evaluation, which leaves the root unsharded
            saver.save(step)
            for module in model.modules():
                if hasattr(module, "reshard"):
                    module.reshard()
            truth[step] = as_truth(held(model, optimizer))
    saver.close()
    if rank == 0:
        torch.save((truth, losses), folder / "truth.pt")
    if kind == "mesh":
        rounded = {"policy": "full", "masters": "24bit", "moments": "8bit"}
        saver = saver_for(folder / "rounded", model=model, optimizer=optimizer, scheduler=scheduler, **rounded)
        saver.start(STEPS)
        saver.save(STEPS)
        saver.close()
        resume(kind, folder, 2, losses, rank)
        compress(folder, *new_training(kind), rank)


def compress(folder: Path, model: Any, optimizer: Any, rank: int) -> None:
    """Save masters as differences from those of the save before."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    how = {"policy": "moments_in_turn:2", "masters": "24bit-delta"}
    saver = saver_for(folder / "compressed", model=model, optimizer=optimizer, scheduler=scheduler, **how)
    saver.start(0)
    truth = {}
    for step in range(1, 4):
        step_once(model, optimizer, step, rank // 2)
        saver.save(step)
        truth[step] = as_truth(held(model, optimizer))
    saver.close()
    if rank == 0:
        torch.save(truth, folder / "compressed.pt")


def batch(step: int, rank: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(100 * step + rank)
    tokens = torch.randint(0, VOCAB, (2, 8))
    return {"input_ids": tokens, "labels": tokens}


def train_with_trainer(folder: Path) -> None:
    """The Trainer with FSDP version 2, from scratch or from a composite."""
    AcceleratorState._reset_state(reset_partial_state=True)
    args = arguments(folder / "run", **FORMS["trainer"], per_device_train_batch_size=2, max_steps=STEPS)
    watch, model = Watch(2), model_of("trainer")
    trainer = CpuTrainer(model, args, default_data_collator, Tokens(), callbacks=[watch])
    attach(trainer, policy="adaptive", save_steps=2)
    trainer.train(resume_from_checkpoint=str(folder / "composite") if folder.name == "resumed" else None)
    if args.process_index == 0:
        truth = {step: as_truth(found) for step, found in watch.held.items()}
        torch.save((truth, watch.losses), folder / "truth.pt")


def main(folder: Path) -> None:
    """A rank of all kinds with so many ranks, one after another: DTensor learns each operation once in a process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for kind, ranks in RANKS.items():
        if ranks == dist.get_world_size() and kind != "trainer" and (folder / kind).is_dir():
            train(kind, folder / kind, rank)
    if dist.get_world_size() == RANKS["trainer"]:
        train_with_trainer(folder / "trainer")
        if rank == 0:
            compose(folder / "trainer" / "run", 2, 2, folder / "resumed" / "composite")
        dist.barrier()
        train_with_trainer(folder / "resumed")
