"""A training under fully_shard that saves in turns with NVRx's writer (nvidia-resiliency-ext), from another process."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import torch
import torch.distributed as dist

from llmtailor.saving import DcpSaver
from saving.dcp_loop import build, flat, state_of, train_step


def main(folder: str, until: str) -> None:
    from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
    from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
        init_checkpoint_metadata_cache,
        save_state_dict_async_finalize,
        save_state_dict_async_plan,
    )

    torch.set_num_threads(1)
    run, newest = Path(folder), ""
    dist.init_process_group("gloo")
    model, optimizer = build(dist.get_world_size())
    saver = DcpSaver("moments_in_turn")
    init_checkpoint_metadata_cache()
    for step in range(1, int(str(until)) + 1):
        train_step(model, optimizer, step)
        state = state_of(model, optimizer, step)
        truth = flat(state)
        if dist.get_rank() == 0:
            torch.save({"after": newest, "state": truth}, run / f"truth-{step}.pt")
        newest = f"step-{step}"
        writer = saver.writer(FileSystemWriterAsync(run / newest, thread_count=2), step)
        planned = save_state_dict_async_plan(state, writer, enable_cache=True)
        save, _, arguments = writer.get_save_function_and_args()  # the second one copies from GPUs
        process = multiprocessing.get_context("fork").Process(target=save, args=arguments)  # NVRx's queue needs GPUs
        process.start()
        process.join()
        save_state_dict_async_finalize(*planned)
    dist.barrier()
    dist.destroy_process_group()
