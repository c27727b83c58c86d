"""Measures how small a lossless stream of newer masters would be, given those of an earlier save.

python -m study.stream [SEED]
"""

from __future__ import annotations

import sys
import time
import zlib

import numpy as np
import torch

from study.precision import SETTINGS, numbers_of, to_24_bits
from study.train import Training


def main() -> None:
    torch.set_num_threads(1)
    columns = "saves apart | bf16 weights that changed, % | bf16 weights | zlib | ns | 24-bit masters | zlib | ns"
    print(f"| setting | {columns} |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for setting in SETTINGS.values():
        training = Training(setting, seed=int(sys.argv[1]) if len(sys.argv) > 1 else 0)
        masters = {}
        for age in (8, 1, 0):
            training.run_to(setting.crash - age * setting.every)
            masters[age] = torch.cat([one.flatten() for one, *_ in training.state().params.values()])
        for age in (1, 8):
            weights, rest = (_codes(masters[at].bfloat16().float(), 16) for at in (0, age))
            newer, older = (_codes(to_24_bits(masters[at]), 8) for at in (0, age))
            changed = (weights != rest).mean()
            found = [text for change in (weights - rest, newer - older) for text in _bytes(change)]
            print(f"| {setting.name} | {age} | {100 * changed:.0f} | {' | '.join(found)} |", flush=True)


def _codes(values: torch.Tensor, bits: int) -> np.ndarray:
    """Return the numbers of values in their order, in units of the last bit that is kept."""
    return numbers_of(values).numpy().astype(np.int64) >> (bits - 8)


def _bytes(change: np.ndarray) -> tuple[str, str]:
    """Return the bytes per param of changes: their order-0 entropy, and what zlib makes of their bytes in planes, with
    the nanoseconds of CPU time that it takes."""
    _, counts = np.unique(change, return_counts=True)
    share = counts / counts.sum()
    entropy = -(share * np.log2(share)).sum() / 8
    planes = change.astype("<i4").view(np.uint8).reshape(-1, 4).T.tobytes()
    began = time.process_time()
    packed = zlib.compress(planes, 9)
    spent = 1e9 * (time.process_time() - began) / len(change)
    return f"{entropy:.2f}", f"{len(packed) / len(change):.2f} | {spent:.0f}"


if __name__ == "__main__":
    main()
