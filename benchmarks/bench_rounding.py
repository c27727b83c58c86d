"""Measure the CPU time of saving states in each precision, as a multiple of a memory copy of what the save reads.

    python benchmarks/bench_rounding.py                          # 67 M params
    python benchmarks/bench_rounding.py --params 256 --rounds 3  # 268 M

A save is the saver's own path for states in host memory: one thread copies them into the arena, another rounds or
compresses them, computes checksums and writes, and the file is made durable. CPU time is that of the whole process, so
the kernel's share counts. ``compute`` is rounding or compressing alone. The copy is into memory that is in use already.
In each round, all of this runs once for each case; ratios are of the same round, and each run begins when the disk has
settled.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from llmtailor.background.arena import Arena
from llmtailor.background.bases import DeltaBases
from llmtailor.background.packing import LiveTensors
from llmtailor.background.snapshot import Snapshot
from llmtailor.background.writing import Share, lay_out_compressed, write_share
from llmtailor.checkpoint.layout import FileLayout
from llmtailor.formats.partial.json_trees import lay_out_tensors
from llmtailor.live.tensors import bytes_of
from llmtailor.model.dtypes import D24, DIFFERENCES, F24
from llmtailor.model.precision import Precision
from llmtailor.model.roles import EXP_AVG, EXP_AVG_SQ, MASTER
from llmtailor.storage import rounding
from llmtailor.storage.frames import ELEMENTS, encode

TENSOR = 1 << 22
"""Elements of each tensor: 4096 x 1024"""
GROUPS = 3


class Case(NamedTuple):
    title: str
    precision: Precision
    kinds: Mapping[str, float]
    """The share of the params whose states of a kind are saved"""
    numba: bool = True


EVERY = {MASTER: 1.0, EXP_AVG: 1.0, EXP_AVG_SQ: 1.0}
IN_TURN = {MASTER: 1.0, EXP_AVG: 1 / GROUPS, EXP_AVG_SQ: 1 / GROUPS}
CASES = (
    Case("exact, full", Precision(), EVERY),
    Case("exact masters", Precision(), {MASTER: 1.0}),
    Case("24-bit masters", Precision("24bit"), {MASTER: 1.0}),
    Case("16-bit differences", Precision("bf16"), {MASTER: 1.0}),
    Case("compressed differences", Precision("24bit-delta"), {MASTER: 1.0}),
    Case("8-bit moments", Precision(moments="8bit"), {EXP_AVG: 1.0, EXP_AVG_SQ: 1.0}),
    Case("24-bit masters, 8-bit moments in 3 groups", Precision("24bit", "8bit"), IN_TURN),
    Case("bf16 masters, 8-bit moments in 3 groups", Precision("bf16", "8bit"), IN_TURN),
    Case("compressed masters, 8-bit moments in 3 groups", Precision("24bit-delta", "8bit"), IN_TURN),
    Case("24-bit masters, 8-bit moments in 3 groups, without numba", Precision("24bit", "8bit"), IN_TURN, numba=False),
    Case("bf16 masters, 8-bit moments in 3 groups, without numba", Precision("bf16", "8bit"), IN_TURN, numba=False),
)


def cpu_of(run: Callable[..., object], *given: object) -> float:
    os.sync()
    began = time.process_time()
    run(*given)
    return time.process_time() - began


class Bench:
    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.states: dict[str, list[torch.Tensor]] = {kind: [] for kind in EVERY}
        for _ in range(count):
            drawn = torch.randn(TENSOR, generator=generator)
            self.states[MASTER].append(drawn * 0.02)
            self.states[EXP_AVG].append(drawn * 1e-5)
            self.states[EXP_AVG_SQ].append(drawn.square() * 1e-10)
        self.bases = [torch.from_numpy(rounding.pack(one.numpy(), F24)) for one in self.states[MASTER]]
        for one in self.states[MASTER]:  # a few steps of fine-tuning later
            one.add_(torch.randn(TENSOR, generator=generator), alpha=1e-6)
        self.room = torch.zeros(4 * count, TENSOR)
        self.arena = Arena(256 << 20, pinned=False)

    def live(self, case: Case) -> tuple[Share, list[torch.Tensor]]:
        """Return what is saved, and all that is read."""
        live, bases, entries, read, compressed = LiveTensors(), DeltaBases(), [], [], []
        for kind, share in case.kinds.items():
            tensors = self.states[kind]
            whole = case.kinds.get(EXP_AVG, 0) * len(tensors)
            for number, tensor in enumerate(tensors[: round(len(tensors) * share)]):
                dtype = case.precision.dtypes(with_moments=number < round(whole))[kind]
                is_base = dtype == F24 and case.precision.has_differences
                base = bases.coming(f"{number}", 0, TENSOR) if dtype in DIFFERENCES or is_base else None
                if dtype in DIFFERENCES:
                    base.copy_(self.bases[number])
                read += [tensor] if dtype not in DIFFERENCES else [tensor, base.view(torch.float32)]
                if dtype == D24:
                    [piece] = live.entry(f"{number}", tensor).content
                    compressed.append((f"{number}", (0, TENSOR), piece, bytes_of(base)))
                else:
                    entries.append(live.entry(f"{kind}.{number}", tensor, dtype, base=base))
        files = (lay_out_tensors("states.safetensors", entries, {}),) if entries else (FileLayout("empty", ()),)
        more = lay_out_compressed("masters.delta", {}, compressed) if compressed else None
        return Share(files=files, live=live, compressed=more), read

    def copy(self, read: list[torch.Tensor]) -> None:
        for room, tensor in zip(self.room, read, strict=False):
            room[: len(tensor)].copy_(tensor)

    def compute(self, share: Share) -> None:
        """Round or compress everything."""
        room = self.arena.memory[: 8 << 20]
        compressed = dict(share.compressed.tensors) if share.compressed else {}
        for piece, older in compressed.items():
            values = share.live.tensors[int(piece.extent.path)].flat.numpy()
            for at in range(0, len(values), ELEMENTS):
                encode(values[at : at + ELEMENTS], older[3 * at : 3 * (at + ELEMENTS)])
        numbers = {int(piece.extent.path) for piece in compressed}
        for live in (live for number, live in enumerate(share.live.tensors) if number not in numbers):
            for at in range(0, live.num_bytes, len(room)):
                end = min(at + len(room), live.num_bytes)
                live.fill(at, end, room[: end - at])

    def save(self, share: Share, folder: Path) -> None:
        snapshot = Snapshot(share.live, share.copied, self.arena, 600, time.monotonic())
        snapshot.start()
        write_share(folder, share, snapshot)
        snapshot.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=64, help="in units of 2 ** 20 (default: 64)")
    parser.add_argument("--rounds", type=int, default=7, help="default: 7")
    parser.add_argument("--work", type=Path, default=Path(), help="where files are written (default: here)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    bench, loops = Bench(max(options.params >> 2, GROUPS)), rounding.loops
    if loops() is None:
        raise SystemExit("error: numba is not installed")
    numel = len(bench.bases) * TENSOR
    found: dict[str, list[tuple[float, float, float]]] = {case.title: [] for case in CASES}
    sizes: dict[str, tuple[float, float]] = {}
    for number in range(options.rounds + 1):
        for case in CASES:
            rounding.loops = loops if case.numba else lambda: None
            share, read = bench.live(case)
            copied, computed = cpu_of(bench.copy, read), cpu_of(bench.compute, share)
            with tempfile.TemporaryDirectory(dir=options.work) as folder:
                saved = cpu_of(bench.save, share, Path(folder))
                written = sum(path.stat().st_size for path in Path(folder).iterdir())
            sizes[case.title] = sum(one.nbytes for one in read), written
            if number:  # the first round warms up
                found[case.title].append((copied, computed, saved))
    print(f"{numel / 1e6:.0f} M params, medians of {options.rounds} rounds; bytes and nanoseconds of CPU per param\n")
    print("| | reads | writes | copy | compute | / copy | save | / copy |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for title, rows in found.items():
        copied, computed, saved = (statistics.median(column) / numel * 1e9 for column in zip(*rows, strict=True))
        shares = [statistics.median(row[at] / row[0] for row in rows) for at in (1, 2)]
        read_bytes, written = (size / numel for size in sizes[title])
        print(
            f"| {title} | {read_bytes:.2f} | {written:.2f} | {copied:.2f} | {computed:.2f} | {shares[0]:.2f} "
            f"| {saved:.2f} | {shares[1]:.2f} |"
        )


if __name__ == "__main__":
    main()
