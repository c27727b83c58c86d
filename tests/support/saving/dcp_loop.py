"""A training under fully_shard that saves through dcp.save in turns, and keeps what it held at each save.

``python -m saving.dcp_loop FOLDER UNTIL KEEP`` is one rank of it: it loads the newest complete folder and goes on. With
the policy ``stock``, it saves everything, without llmtailor. With a bucket of S3, it saves there; with the bucket
``shards``, it saves safetensors files, which hold tensors only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsspec.core import url_to_fs
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter, StorageReader
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from helpers.s3 import settings
from llmtailor.frameworks.files import DCP_RECORD
from llmtailor.saving import DcpSaver

LAYERS = 4


class Model(torch.nn.Module):
    """Layers of equal size, so that groups are known by hand; 7 rows are no multiple of 2 or 3 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(7, 7) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x.square().sum()


def build(ranks: int) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_step(model: Any, optimizer: Any, step: int) -> None:
    torch.manual_seed(step * 100 + dist.get_rank())
    model(torch.randn(3, 7)).backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: Any, optimizer: Any, step: int, is_flat: bool = False) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    weights, states = get_state_dict(model, optimizer, options=options)
    return {"model": weights, "optim": states, "train": {"step": step}}


def whole(tensor: Any) -> Any:
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().clone() if isinstance(tensor, torch.Tensor) else tensor


def flat(state: Any, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of a state dict, whole, under the keys that DCP gives them."""
    items = state.items() if isinstance(state, dict) else enumerate(state)
    found: dict[str, Any] = {}
    for key, value in items:
        is_tree = isinstance(value, dict) or (isinstance(value, list) and any(isinstance(one, dict) for one in value))
        found |= flat(value, f"{prefix}{key}.") if is_tree else {f"{prefix}{key}": whole(value)}
    return found


def same(mine: Any, other: Any) -> bool:
    return torch.equal(mine, other) if isinstance(mine, torch.Tensor) else bool(mine == other)


def step_of(folder: Path | str) -> int:
    return int(str(folder).rpartition("step-")[2])


def tensors_of(state: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors of a state, nested as they are, and its numbers as tensors."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found[key] = tensors_of(value)
        elif isinstance(value, torch.Tensor):
            found[key] = value
        elif isinstance(value, int | float | tuple):
            found[key] = torch.tensor(value)
    return found


def complete(run: Path, file: str = ".metadata") -> list[Path]:
    """The complete folders, oldest first."""
    return sorted((one.parent for one in run.glob(f"step-*/{file}")), key=step_of)


def complete_in_store(url: str) -> list[str]:
    fs, path = url_to_fs(url)
    fs.invalidate_cache()
    found = fs.find(path)
    return sorted((f"{url}/{one.split('/')[-2]}" for one in found if one.endswith("/.metadata")), key=step_of)


def load(model: Any, optimizer: Any, folder: Path | str, shards: bool = False) -> dict[str, Any]:
    """Load with stock functions alone; return what the folder holds."""
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()  # makes the states
    optimizer.zero_grad()
    state = state_of(model, optimizer, -1, is_flat=shards)
    if shards:
        loaded = tensors_of(state)  # those of the training, and new ones for numbers
        dcp.load(loaded, storage_reader=HuggingFaceStorageReader(f"{folder}"))
    else:
        dcp.load(state, checkpoint_id=folder)
    options = StateDictOptions(flatten_optimizer_state_dict=shards)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"], options=options)
    return loaded if shards else state


def load_whole(reader: StorageReader) -> dict[str, Any]:
    """Load a folder in this process, with stock functions, as whole tensors."""
    entries = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.full(one.size, -1, dtype=one.properties.dtype) if hasattr(one, "size") else None
        for key, one in entries.items()
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def spawn(command: list[str], ranks: int, **options: Any) -> list[subprocess.Popen[bytes]]:
    """Start a program in so many ranks, without a launcher that may outlive them."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # nobody else can take its port
    common = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": f"{ranks}", "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": f"{store.port}", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    started = [
        subprocess.Popen(command, env={**common, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}, **options)
        for rank in range(ranks)
    ]
    started[0].store = store  # type: ignore[attr-defined]  # for as long as the ranks
    return started


def main(
    folder: str,
    until: str,
    keep: str = "0",
    how: str = "sync",
    policy: str = "moments_in_turn",
    bucket: str = "",
    port: str = "0",
) -> None:
    torch.set_num_threads(1)
    os.environ.update(settings(int(str(port))))
    shards = str(bucket) == "shards"
    url = f"s3://{bucket}" if bucket and not shards else ""
    run, until, keep, how, policy = Path(folder), int(str(until)), int(str(keep)), str(how), str(policy)
    dist.init_process_group("cpu:gloo" if how != "sync" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, optimizer = build(ranks)
    saver, step = DcpSaver() if policy == "stock" else DcpSaver(policy), 0
    mark = DCP_RECORD if shards else ".metadata"
    there = complete_in_store(url) if url else complete(run, mark)
    newest: Path | str | None = max(there, key=step_of, default=None)
    if newest is not None:
        state = load(model, optimizer, newest, shards)
        step = step_of(newest)
        saver.resumed_from(newest)
        loaded = flat(state)
        if rank == 0:
            told = {"folder": f"step-{step_of(newest)}", "ranks": ranks, "state": loaded}
            torch.save(told, run / f"loaded-{os.getpid()}.tmp")
            (run / f"loaded-{os.getpid()}.tmp").rename(run / f"loaded-{os.getpid()}.pt")
    dist.barrier()
    if rank == 0:
        (run / f"began-{os.getpid()}").touch()
    pending = None
    while step < until:
        step += 1
        train_step(model, optimizer, step)
        state = state_of(model, optimizer, step, is_flat=shards)
        state = tensors_of(state) if shards else state
        truth = flat(state)
        if rank == 0:
            after = f"step-{step_of(newest)}" if newest is not None else ""
            torch.save({"after": after, "state": truth}, run / f"truth-{step}.tmp")
            (run / f"truth-{step}.tmp").rename(run / f"truth-{step}.pt")
        path = f"{url}/step-{step}" if url else run / f"step-{step}"
        inner = HuggingFaceStorageWriter(f"{path}", save_distributed=True) if shards else FileSystemWriter(path)
        inner = FsspecWriter(path) if url else inner
        writer = inner if policy == "stock" else saver.writer(inner, step)
        if how == "sync":
            dcp.save(state, storage_writer=writer)
        else:
            kind = dcp.state_dict_saver.AsyncCheckpointerType(how)
            pending = dcp.async_save(state, storage_writer=writer, async_checkpointer_type=kind)
            pending.result()
        newest = path
        if rank == 0 and keep:
            for old in complete_in_store(url)[:-keep] if url else complete(run, mark)[:-keep]:
                url_to_fs(url)[0].rm(old, recursive=True) if url else shutil.rmtree(old)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # gloo's threads may abort the interpreter's end when the other rank has gone
