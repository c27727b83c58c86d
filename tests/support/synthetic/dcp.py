"""Checkpoints of torch.distributed.checkpoint, as FSDP2 over tensor parallelism saves them, with holes for the tensors.

Tensor parallelism cuts the params that transformers' plans cut. What it leaves whole, its first ranks save. The step of
each param is real.
"""

from __future__ import annotations

import itertools
import json
import math
import pickle
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from synthetic.layout import Shape
from synthetic.torch_files import save_with_data

_ROWS = ("embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "gate_up_proj")
_COLUMNS = ("o_proj", "down_proj")
_Chunk = tuple[int, tuple[int, ...], tuple[int, ...]]


def cut(name: str, shape: tuple[int, ...], tp: int, dp: int) -> Iterator[_Chunk]:
    """Yield rank, offsets and sizes of each box."""
    module = name.removesuffix(".weight").rpartition(".")[2]
    at = len(shape) - 1 if module in _COLUMNS else max(len(shape) - 2, 0) if module in _ROWS else None
    for t, d in itertools.product(range(1 if at is None else tp), range(dp)):
        low, size = [0] * len(shape), [*shape]
        if at is not None:
            low[at], size[at] = _part(shape[at], tp, t)
        first, size[0] = _part(size[0], dp, d)
        low[0] += first
        if size[0]:
            yield d * tp + t, tuple(low), tuple(size)


def _part(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return where a rank's part begins, and its size, as ``torch.chunk`` cuts."""
    part = -(-size // ranks)
    return rank * part, max(0, min(part, size - rank * part))


@cache
def _blob(shape: tuple[int, ...]) -> tuple[bytes, int, bytes]:
    """Return what is before and behind the elements of a tensor's blob, and how many bytes these have."""
    num_bytes = 4 * math.prod(shape)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "archive.pt"
        save_with_data(torch.empty(shape), path, [(num_bytes, ())], sparse=True)
        whole = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(4096)
            begin = head.index(b"data/0") + len(b"data/0")
            begin = begin + 2 + 2 if head[begin : begin + 2] == b"FB" else begin
            begin += -begin % 64
            file.seek(begin + num_bytes)
            return head[:begin], num_bytes, file.read(whole)


def make_dcp(root: Path, shape: Shape, tp: int, dp: int, step: int) -> None:
    """Write a checkpoint ``{"model", "optim"}``, with one param group."""
    root.mkdir(parents=True)
    files: list[BinaryIO] = [(root / f"__{rank}_0.distcp").open("wb") for rank in range(tp * dp)]
    names = [Path(file.name).name for file in files]
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    places: list[dict[MetadataIndex, _StorageInfo]] = [{} for _ in files]
    properties = TensorProperties(dtype=torch.float32)

    def put(rank: int, index: MetadataIndex, head: bytes, hole: int, tail: bytes) -> None:
        file = files[rank]
        start = file.tell()
        file.write(head)
        file.seek(hole, 1)
        file.write(tail)
        # the rank that writes the file gets this from each other rank, with texts of its own
        own = replace(index, fqn="".join([*index.fqn]))
        places[rank][own] = _StorageInfo(names[rank], start, file.tell() - start)

    def add(path: tuple[str | int, ...], size: tuple[int, ...], chunks: Iterator[_Chunk]) -> None:
        key, listed = ".".join(map(str, path)), []
        paths[key] = path
        for number, (rank, offsets, sizes) in enumerate(chunks):
            listed.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            put(rank, MetadataIndex(key, torch.Size(offsets), number), *_blob(sizes))
        tensors[key] = TensorStorageMetadata(properties, torch.Size(size), listed)

    def add_object(path: tuple[str | int, ...], value: object) -> None:
        key = ".".join(map(str, path))
        with TemporaryDirectory() as folder:
            torch.save(value, Path(folder) / "archive.pt")
            put(0, MetadataIndex(key), (Path(folder) / "archive.pt").read_bytes(), 0, b"")
        tensors[key], paths[key] = BytesStorageMetadata(), path

    with TemporaryDirectory() as folder:
        torch.save(torch.tensor(float(step)), Path(folder) / "archive.pt")
        counted = (Path(folder) / "archive.pt").read_bytes()
    params = shape.params()
    for name, size in params.items():
        add(("model", name), size, cut(name, size, tp, dp))
    for name, size in params.items():
        for kind in ("exp_avg", "exp_avg_sq"):
            add(("optim", "state", name, kind), size, cut(name, size, tp, dp))
        key = f"optim.state.{name}.step"
        tensors[key] = TensorStorageMetadata(properties, torch.Size(), [ChunkStorageMetadata(*[torch.Size()] * 2)])
        paths[key] = ("optim", "state", name, "step")
        put(0, MetadataIndex(key, torch.Size(), 0), counted, 0, b"")
    options = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "params": [*params]}
    options |= dict.fromkeys(("amsgrad", "maximize", "capturable", "differentiable"), False)
    options |= {"foreach": None, "fused": True, "decoupled_weight_decay": True}
    for option, value in options.items():
        add_object(("optim", "param_groups", 0, option), value)
    for file in files:
        file.truncate()
        file.close()
    with (root / ".metadata").open("wb") as out:
        pickle.dump(Metadata(tensors, paths, {index: at for own in places for index, at in own.items()}), out)
    (root / "config.json").write_text(json.dumps(shape.config()))
