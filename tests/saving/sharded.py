"""Trainings under fully_shard on CPU ranks over gloo, forked from one process, with the saver and the truth."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from llmtailor.saving import saver_for

STEPS, VOCAB = 6, 62
RANKS = {"fsdp": 3, "hsdp": 4, "partly": 2}


def build() -> LlamaForCausalLM:
    """No dimension is a multiple of the ranks, and some ranks have no row of the norms' last chunks."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=10,
        intermediate_size=22,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=6,
    )
    return LlamaForCausalLM(config)


def shard(model: Any, kind: str) -> None:
    shape, names = ((2, 2), ("replicate", "shard")) if kind == "hsdp" else ((RANKS[kind],), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    if kind != "partly":  # else embeddings and head are whole on each rank
        fully_shard(model, mesh=mesh)


def whole(value: Any) -> Any:
    return value.full_tensor().clone() if hasattr(value, "full_tensor") else value.clone()


def train(kind: str, folder: Path, rank: int) -> None:
    model = build()
    shard(model, kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    saver = saver_for(folder / "run", model=model, optimizer=optimizer, scheduler=scheduler, policy="parity")
    saver.start(0)
    truth, losses = {}, {}
    for step in range(1, STEPS + 1):
        loss = model(**batch(step, rank)).loss
        loss.backward()
        if kind == "partly":
            for param in (model.model.embed_tokens.weight, model.model.norm.weight, model.lm_head.weight):
                dist.all_reduce(param.grad, dist.ReduceOp.SUM)
                param.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = float(loss.detach())
        if step % 2 == 0:
            model(**batch(step, rank))  # as an evaluation, which leaves the root unsharded
            saver.save(step)
            truth[step] = {
                name: {"master": whole(param.detach()), **{k: whole(v) for k, v in optimizer.state[param].items()}}
                for name, param in sharded_params(model)
            }
    saver.close()
    if rank == 0:
        torch.save((truth, losses), folder / "truth.pt")


def sharded_params(model: Any) -> list[tuple[str, Any]]:
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    return list(model.named_parameters())


def batch(step: int, rank: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(100 * step + rank)
    tokens = torch.randint(0, VOCAB, (2, 8))
    return {"input_ids": tokens, "labels": tokens}


def main(kind: str, folder: Path) -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = RANKS[kind]
    pids = []
    for rank in range(ranks):
        if (pid := os.fork()) == 0:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            torch.set_num_threads(1)
            dist.init_process_group("gloo")
            code = 1
            try:
                train(kind, folder, rank)
                code = 0
            finally:
                sys.stderr.flush()
                if code == 0:
                    dist.destroy_process_group()
                    os._exit(0)
        pids.append(pid)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)


if __name__ == "__main__":
    sys.exit(max(main(kind, Path(sys.argv[1]) / kind) for kind in RANKS))
