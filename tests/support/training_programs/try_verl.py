#!/usr/bin/env python3
"""A rank of a loop with verl's FSDPCheckpointManager on a CPU: ``try_verl.py OUT STEPS``.

It finds the newest checkpoint, keeps two, and records each loss, with the functions that verl's trainers use.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parents[1]))
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path, get_checkpoint_tracker_filename
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

from trainings.models import build

out, steps = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
torch.manual_seed(0)
model = build("llama", 3, tied=False)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=100)
manager = FSDPCheckpointManager(model, optimizer, scheduler)

step, newest = 0, find_latest_ckpt_path(out)
if newest is not None:
    manager.load_checkpoint(newest)
    step = int(newest.rpartition("_")[2])
    print("resumed at", step)
while step < steps:
    step += 1
    rows = torch.randint(50, (2, 8), generator=torch.Generator().manual_seed(step * 10 + dist.get_rank()))
    loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    manager.save_checkpoint(str(out / f"global_step_{step}"), global_step=step, max_ckpt_to_keep=2)
    if dist.get_rank() == 0:
        with (out / "losses.jsonl").open("a") as file:
            file.write(json.dumps([step, loss.item()]) + "\n")
        tracker = Path(get_checkpoint_tracker_filename(str(out)))
        tracker.with_suffix(".tmp").write_text(str(step))
        tracker.with_suffix(".tmp").replace(tracker)
dist.destroy_process_group()
