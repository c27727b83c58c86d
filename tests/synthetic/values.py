"""The elements of every state."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np
import torch

from synthetic.layout import FlatId, Layout


class Values:
    """Pseudo-random elements of every state: a block of numbers, read from a place that depends on the state."""

    BLOCK = 1_000_003

    def __init__(self, step: int):
        self.step = step
        normal = np.random.default_rng(0).standard_normal(self.BLOCK).astype(np.float32)
        master = normal * np.float32(0.02)
        weight = torch.from_numpy(master).to(torch.bfloat16).view(torch.int16).numpy()
        # Each block twice in a row, so that any run of BLOCK elements is contiguous.
        self._blocks = {
            "master": np.tile(master, 2),
            "weight": np.tile(weight, 2),
            "exp_avg": np.tile(normal * np.float32(1e-3), 2),
            "exp_avg_sq": np.tile((normal * np.float32(1e-3)) ** 2, 2),
        }

    def stream(self, param: str, kind: str, begin: int, end: int) -> Iterator[memoryview]:
        """Yield the bytes of elements ``begin``..``end``. A weight is its master, rounded to bf16."""
        seed = f"{self.step} {param} {'master' if kind == 'weight' else kind}"
        shift = zlib.crc32(seed.encode())
        block = self._blocks[kind]
        while begin < end:
            at = (begin + shift) % self.BLOCK
            num = min(end - begin, self.BLOCK)
            yield memoryview(block[at : at + num]).cast("B")
            begin += num


def flat_bytes(layout: Layout, flat: FlatId, kind: str, rank: int, values: Values) -> Iterator[memoryview]:
    """Yield the bytes of a flat tensor of one rank."""
    # DeepSpeed saves uninitialised memory behind the masters, and zeros behind the moments.
    padding = np.float32(1e31 if kind == "master" else 0).tobytes()
    for param in flat.params:
        part, numel = layout.part(param), layout.numel(param)
        begin, end = min(rank * part, numel), min((rank + 1) * part, numel)
        yield from values.stream(param, kind, begin, end)
        if end - begin < part:
            yield memoryview(padding * (part - (end - begin)))
