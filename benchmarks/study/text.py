"""Real text that is on every machine: the sources of Python's standard library, and the descriptions of installed
packages. Bytes are tokens."""

from __future__ import annotations

import random
import sysconfig
import zlib
from functools import cache
from pathlib import Path

import torch

HELD_OUT = 1 << 16
"""Bytes at the end that no training sees"""
_MOST = 6 << 20


@cache
def corpus(name: str) -> torch.Tensor:
    """Return the bytes of ``sources`` or ``descriptions``, files in a fixed order that has nothing to do with names."""
    if name == "sources":
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = [path for path in root.rglob("*.py") if not {"site-packages", "test"} & {*path.parts}]
    else:
        root = Path(sysconfig.get_paths()["purelib"])
        paths = [*root.glob("*.dist-info/METADATA")]
    found = bytearray()
    ordered = sorted(paths, key=lambda path: str(path.relative_to(root)))
    random.Random(0).shuffle(ordered)
    for path in ordered:
        if len(found) < _MOST:
            found += path.read_bytes()[: 1 << 16]
    return torch.frombuffer(found, dtype=torch.uint8)


def digest(*names: str) -> int:
    """Return a checksum of the bytes; descriptions change whenever a package is installed."""
    return zlib.crc32(b"".join(corpus(name).numpy().tobytes() for name in names))


def batch(name: str, size: int, length: int, order: int, step: int) -> torch.Tensor:
    """Return the batch of a step: [size, length] tokens, the same for the same order and step."""
    text = corpus(name)
    generator = torch.Generator().manual_seed(order * 1_000_003 + step)
    starts = torch.randint(0, len(text) - HELD_OUT - length, (size,), generator=generator)
    return torch.stack([text[start : start + length] for start in starts.tolist()]).long()


def held_out(name: str, num: int, length: int) -> torch.Tensor:
    """Return [num, length] tokens that no training sees."""
    text = corpus(name)[-HELD_OUT:]
    starts = torch.linspace(0, len(text) - length, num).long().tolist()
    return torch.stack([text[start : start + length] for start in starts]).long()
