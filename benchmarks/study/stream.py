"""Measures how large masters of 24 bits are as compressed differences from those of an earlier save.

python -m study.stream [SEED]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from llmtailor.storage import casts, rounding
from llmtailor.storage.frames import ELEMENTS, decode, encode
from study.precision import SETTINGS
from study.train import Training

AGES = (8, 4, 2, 1, 0)


def main() -> None:
    torch.set_num_threads(1)
    rounding.loops()
    columns = "saves apart | bf16 weights that changed, % | entropy | bytes per param | ns to compress | to decompress"
    print(f"| setting | {columns} |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for setting in SETTINGS.values():
        training = Training(setting, seed=int(sys.argv[1]) if len(sys.argv) > 1 else 0)
        masters = {}
        for age in AGES:
            training.run_to(setting.crash - age * setting.every)
            masters[age] = torch.cat([one.flatten() for one, *_ in training.state().params.values()])
        for age in sorted({*AGES} - {0}):
            changed = (masters[0].bfloat16() != masters[age].bfloat16()).float().mean()
            measured = " | ".join(
                f"{one:.2f}" if at < 2 else f"{one:.1f}" for at, one in enumerate(_measure(masters, age))
            )
            print(f"| {setting.name} | {age} | {100 * changed:.0f} | {measured} |", flush=True)


def _measure(masters: dict[int, torch.Tensor], age: int) -> tuple[float, ...]:
    """Return the bytes per param of the entropy of single differences and of what is stored, and the nanoseconds of CPU
    time per param to compress and to decompress them."""
    newest, older = (rounding.pack(masters[at].numpy(), "F24") for at in (0, age))
    numel, step = masters[0].numel(), 3 * ELEMENTS
    starts = range(0, len(newest), step)

    def compress() -> list[bytes]:
        values = masters[0].numpy()
        return [encode(values[at // 3 :][:ELEMENTS], older.data[at : at + step]) for at in starts]

    def decompress() -> list[np.ndarray]:
        patterns = [casts.widen(older.data[at : at + step], "F24").view("<u4") for at in starts]
        return [casts.add_codes(decode(frame), before) for frame, before in zip(frames, patterns, strict=True)]

    frames, spent = _timed(compress)
    found, spent_again = _timed(decompress)
    assert (np.concatenate(found) == casts.widen(newest.data, "F24").view("<u4")).all()
    _, counts = np.unique(np.concatenate([decode(frame) for frame in frames]), return_counts=True)
    share = counts / counts.sum()
    entropy = -(share * np.log2(share)).sum() / 8
    return entropy, sum(map(len, frames)) / numel, 1e9 * spent / numel, 1e9 * spent_again / numel


def _timed(call: Callable[[], list]) -> tuple[list, float]:
    call()
    spent = []
    for _ in range(3):
        began = time.process_time()
        made = call()
        spent.append(time.process_time() - began)
    return made, min(spent)


if __name__ == "__main__":
    main()
