"""Writes a safetensors file front to back, tensor after tensor, in one sequential run."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from llmtailor.formats.partial.manifest import BundleFact
from llmtailor.storage.checksums import crc32

CHUNK_BYTES = 32 << 20
"""What is in CPU memory at once, beside the tensors themselves."""
_GATHER_BYTES = 1 << 20

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}
"""torch's dtypes by their names in safetensors files."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor to be written, on any device."""

    key: str
    tensor: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


def write_bundle(path: Path, entries: Sequence[Entry], metadata: Mapping[str, str]) -> BundleFact:
    """Write a new safetensors file and fsync it; return its size and CRC-32.

    Tensors are written in the order given, which should be by falling item size so that all are aligned; at most
    `CHUNK_BYTES` of them are copied at a time. Raises OSError.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for entry in entries:
        stop = at + entry.num_bytes
        shape = list(entry.tensor.shape)
        header[entry.key] = {"dtype": DTYPES[entry.tensor.dtype], "shape": shape, "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    size, crc = 0, 0
    # the checksum is computed beside the write, not after it
    with path.open("xb", buffering=0) as file, ThreadPoolExecutor(1) as beside:
        for chunk in _gathered(chain([memoryview(head)], _chunks(entries))):
            summed = beside.submit(crc32, chunk, crc)
            _write(file.fileno(), chunk)
            size, crc = size + len(chunk), summed.result()
        os.fsync(file.fileno())
    return BundleFact(path.name, size, crc)


def _chunks(entries: Sequence[Entry]) -> Iterator[memoryview]:
    for entry in entries:
        flat = entry.tensor.detach().reshape(-1)
        per_chunk = max(1, CHUNK_BYTES // flat.element_size())
        for begin in range(0, flat.numel(), per_chunk):
            piece = flat[begin : begin + per_chunk].to("cpu").contiguous()
            yield bytes_of(piece)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, without a copy."""
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array)


def _gathered(chunks: Iterable[memoryview]) -> Iterator[memoryview]:
    """Join small neighbours, which are many where params are cut over many ranks."""
    small = bytearray()
    for chunk in chunks:
        if len(small) + len(chunk) > _GATHER_BYTES and small:
            yield memoryview(small)
            small = bytearray()
        if len(chunk) > _GATHER_BYTES:
            yield chunk
        else:
            small += chunk
    if small:
        yield memoryview(small)


def _write(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]
