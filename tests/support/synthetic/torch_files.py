"""Files as torch.save writes them, with DeepSpeed's classes, whose bytes are streamed in afterwards."""

from __future__ import annotations

import struct
import sys
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import torch
from isal import isal_zlib


class ZeroStageEnum(IntEnum):
    """Stands in for DeepSpeed's enum; its pickle says the same."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


class LossScaler:
    """Stands in for DeepSpeed's static loss scaler; its pickle says the same."""

    def __init__(self) -> None:
        self.cur_scale = 1.0
        self.dynamic = False


class fragment_address:
    """Stands in for DeepSpeed's record of where a param lies (ZeRO-1/2)."""


STAND_INS: dict[str, type] = {
    "deepspeed.utils.tensor_fragment": fragment_address,
    "deepspeed.runtime.zero.config": ZeroStageEnum,
    "deepspeed.runtime.fp16.loss_scaler": LossScaler,
}


@contextmanager
def pickled_as_deepspeed() -> Iterator[None]:
    """Have the stand-ins pickled under the names of DeepSpeed's classes."""
    real = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "deepspeed"}
    for path, stand_in in STAND_INS.items():
        words = path.split(".")
        for depth in range(1, len(words) + 1):
            name = ".".join(words[:depth])
            sys.modules[name] = ModuleType(name)
        setattr(sys.modules[path], stand_in.__name__, stand_in)
        stand_in.__module__ = path
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
            del sys.modules[name]
        sys.modules.update(real)


def save_with_data(tree: Any, path: Path, storages: Iterable[tuple[int, Iterable[memoryview]]], sparse: bool) -> None:
    """torch.save `tree`, whose tensors are never read, and stream the bytes of its storages into the file.

    `storages` are sizes and bytes in the order in which pickling meets them.
    """
    with torch.serialization.skip_data(), pickled_as_deepspeed():
        torch.save(tree, path)
    with zipfile.ZipFile(path) as archive:
        records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        directory = archive.start_dir
    checksums: dict[str, int] = {}
    with path.open("r+b", buffering=1 << 20) as file:
        for key, (num_bytes, chunks) in enumerate(storages):
            info = records[f"data/{key}"]
            assert info.file_size == num_bytes, f"{path}: storage {key} has {info.file_size} bytes, not {num_bytes}"
            start = info.header_offset
            file.seek(start)
            header = file.read(30)
            start += 30 + sum(struct.unpack("<HH", header[26:]))
            crc = _fill(file, start, num_bytes, chunks, sparse)
            checksums[info.filename] = crc
            if info.flag_bits & 8:  # the CRC stands behind the data
                file.seek(start + num_bytes)
                assert file.read(4) == b"PK\x07\x08", f"{path}: no data descriptor behind {info.filename}"
                file.write(struct.pack("<I", crc))
            else:
                file.seek(info.header_offset + 14)
                file.write(struct.pack("<I", crc))
        _patch_directory(file, directory, checksums)


def _fill(file: BinaryIO, start: int, num_bytes: int, chunks: Iterable[memoryview], sparse: bool) -> int:
    """Write `chunks` at `start` (or leave the hole as it is) and return their CRC-32."""
    if sparse and num_bytes > 4:  # `step` is written all the same
        return _crc_of_zeros(num_bytes)
    crc = 0
    file.seek(start)
    for chunk in chunks:
        crc = isal_zlib.crc32(chunk, crc)
        file.write(chunk)
    assert file.tell() == start + num_bytes
    return crc


@lru_cache
def _crc_of_zeros(num_bytes: int) -> int:
    """Return the CRC-32 of a hole, joined from those of its halves."""
    if num_bytes <= 4096:
        return isal_zlib.crc32(bytes(num_bytes))
    half = num_bytes // 2
    return isal_zlib.crc32_combine(_crc_of_zeros(num_bytes - half), _crc_of_zeros(half), half)


def _patch_directory(file: BinaryIO, at: int, checksums: dict[str, int]) -> None:
    """Set CRCs in the zip's central directory."""
    while True:
        file.seek(at)
        entry = file.read(46)
        if entry[:4] != b"PK\x01\x02":
            return
        name_length, extra_length, comment_length = struct.unpack("<HHH", entry[28:34])
        name = file.read(name_length).decode()
        if name in checksums:
            file.seek(at + 16)
            file.write(struct.pack("<I", checksums[name]))
        at += 46 + name_length + extra_length + comment_length
