"""What a save costs by policy: stall, CPU time of all threads, host memory, and the time until it is durable.

    torchrun --standalone --nproc_per_node 2 benchmarks/bench_policies.py zero3     # or zero2, fsdp2
    python benchmarks/bench_policies.py plain

Savers of several policies watch one training of a Llama in fp32 (under ZeRO in bf16). After a complete first save of
each, every policy makes one save per round, followed by a training step. The order rotates, and ratios compare saves of
the same round.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from llmtailor.saving import saver_for

POLICIES = ("full", "moments_in_turn:4", "rounded", "budget:5.1")
STEP = "a step alone"


def trained(kind: str, hidden: int, layers: int, device: str) -> tuple[dict[str, Any], Any]:
    """Return what `saver_for` gets, and a function that makes a training step."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    model: Any = LlamaForCausalLM(config).to(device)
    tokens = torch.randint(0, 8192, (1, 64), device=device)
    if kind.startswith("zero"):
        import deepspeed

        how = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": int(kind[4:])},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": True},
        }
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
        engine: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=how)[0]

        def step() -> None:
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()

        return {"engine": engine}, step
    if kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device, (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}, step


def measure(options: argparse.Namespace, folder: Path) -> dict[str, list[dict[str, float]]]:
    held, step = trained(options.kind, options.hidden_size, options.num_layers, options.device)
    savers = {policy: saver_for(folder / policy.replace(":", "-"), policy=policy, **held) for policy in POLICIES}
    for _ in range(2):
        step()
    for saver in savers.values():
        saver.start(0)
        saver.save(1).wait()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in (*POLICIES, STEP)}
    number, names = 1, [*POLICIES, STEP]
    for at in range(options.rounds):
        for name in names[at % len(names) :] + names[: at % len(names)]:
            number += 1
            os.sync()
            cpu, begun = time.process_time(), time.perf_counter()
            save = savers[name].save(number) if name in savers else None
            step()
            seconds = time.perf_counter() - begun
            report = save.wait() if save else None
            cell = {"step_s": seconds, "cpu_s": time.process_time() - cpu}
            if report:
                cell |= {"stall_s": report.stall_s, "durable_s": report.write_s}
                cell |= {"buffer_bytes": report.buffer_bytes, "num_bytes": report.num_bytes}
            found[name].append(cell)
    for saver in savers.values():
        saver.close()
    return found


def tell(found: dict[str, list[dict[str, float]]], options: argparse.Namespace, ranks: int) -> None:
    alone = statistics.median(cell["cpu_s"] for cell in found[STEP])
    print(f"\n{options.kind}, {ranks} ranks, {options.device}: medians of {options.rounds} rounds")
    print("| policy | bytes | stall | / full | CPU of the save | / full | durable after | buffer |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name in POLICIES:
        cells, full = found[name], found["full"]

        def median(key: str, cells: list[dict[str, float]] = cells) -> float:
            return statistics.median(cell[key] for cell in cells)

        stall = statistics.median(one["stall_s"] / two["stall_s"] for one, two in zip(cells, full, strict=True))
        cpu = [(one["cpu_s"] - alone) / (two["cpu_s"] - alone) for one, two in zip(cells, full, strict=True)]
        print(
            f"| {name} | {median('num_bytes') / 1e6:.0f} MB | {1000 * median('stall_s'):.0f} ms | {stall:.2f} | "
            f"{1000 * (median('cpu_s') - alone):.0f} ms | {statistics.median(cpu):.2f} | "
            f"{median('durable_s'):.2f} s | {median('buffer_bytes') / 1e6:.0f} MB |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("plain", "fsdp2", "zero2", "zero3"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--num-layers", type=int, default=6)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--work", type=Path, help="where to save; default: a temporary folder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ or options.kind.startswith("zero"):
        dist.init_process_group("gloo" if options.device == "cpu" else None)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    box = [tempfile.mkdtemp(dir=options.work)] if ranks == 1 or dist.get_rank() == 0 else [None]
    if dist.is_initialized():
        dist.broadcast_object_list(box)
    folder = Path(str(box[0]))
    try:
        found = measure(options, folder)
        if ranks == 1 or dist.get_rank() == 0:
            tell(found, options, ranks)
    finally:
        if dist.is_initialized():
            dist.barrier()
        if ranks == 1 or dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
