"""Compare rounding and compressing of states with those of another checkout: bytes, and nanoseconds of CPU per element.

    python benchmarks/bench_coder.py BEFORE              # a folder with llmtailor/, such as a git worktree
    python benchmarks/bench_coder.py BEFORE --rounds 9

Masters are those of two trainings of `study`, one save apart; 4 M other elements are drawn for the roundings. Each
round measures both trees, each in a process of its own; times are medians of all rounds, ratios medians of the ratios
of single rounds. Bytes of roundings must be equal. `ADAPTERS` knows what BEFORE calls its functions: the tree of 28
November 2026, which had a coder of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

HERE = Path(__file__).resolve().parent
DRAWN = 1 << 22
SETTINGS = ("tuned", "1e-5")
ENCODINGS = ("F24", "Q8", "Q8_ROOT", "D16")


def now() -> SimpleNamespace:
    from llmtailor.storage import casts, frames, rounding

    return SimpleNamespace(
        kernels=rounding,
        pack=lambda values, dtype, room, base: rounding.pack(values, dtype, room, base),
        encode=frames.encode,
        decode=frames.decode,
        add=casts.add_codes,
        copy=lambda data, room: np.copyto(room, data),
    )


def before() -> SimpleNamespace:
    from llmtailor.storage import casts, encoder, frames

    def pack(values: Any, dtype: str, room: Any, base: Any) -> None:
        if dtype == "D16":
            casts.pack_differences(values, base, room)
        else:
            casts.pack(values, dtype, room)

    def encode(values: Any, older: memoryview) -> bytes:
        room = memoryview(bytearray(frames.room_for(len(values))))
        return bytes(room[: encoder.pack_frame(values, older, room)])

    return SimpleNamespace(
        kernels=casts, pack=pack, encode=encode, decode=frames.decode, add=casts.add_codes, copy=casts.copy
    )


ADAPTERS = {"now": now, "before": before}


def cpu_of(run: Callable[[], object], repeats: int = 3) -> float:
    """Return the median of the CPU seconds of a call; the first one warms up."""
    spent = []
    for _ in range(repeats + 1):
        began = time.process_time()
        run()
        spent.append(time.process_time() - began)
    return statistics.median(spent[1:])


def measure(tree: str, states: Path) -> dict[str, Any]:
    """Return what one tree, which is on the path, takes."""
    from llmtailor.storage import casts

    mine, taken = ADAPTERS[tree](), {}
    kernels, loops = mine.kernels, mine.kernels.loops
    random = np.random.default_rng(0)
    values = random.standard_normal(DRAWN, "<f4") * np.float32(0.02)
    older = values + random.standard_normal(DRAWN, "<f4") * np.float32(1e-6)
    base, room = np.empty(3 * DRAWN, np.uint8), np.empty(4 * DRAWN, np.uint8)
    mine.pack(older, "F24", base, None)
    digests = {}
    for how in ("numba", "without numba"):
        kernels.loops = loops if how == "numba" else lambda: None
        for dtype in ENCODINGS:
            elements = values**2 if dtype == "Q8_ROOT" else values
            size = {"F24": 3 * DRAWN, "D16": DRAWN // 32 * 65}.get(dtype, DRAWN // 128 * 132)
            target = room[:size]
            taken[f"{dtype}, {how}"] = cpu_of(lambda d=dtype, e=elements, t=target: mine.pack(e, d, t, base)) / DRAWN
            digests[f"{dtype}, {how}"] = hashlib.sha256(target).hexdigest()
    kernels.loops = loops
    taken["copy"] = cpu_of(lambda: mine.copy(values.view(np.uint8), room)) / DRAWN
    sizes, step = {}, 1 << 17
    with np.load(states) as held:
        for setting in SETTINGS:
            newest, other = held[f"{setting} 0"], held[f"{setting} 1"]
            older = np.empty(3 * len(other), np.uint8)
            mine.pack(other, "F24", older, None)
            starts = range(0, len(newest), step)
            cuts = [(newest[at:][:step], older.data[3 * at :][: 3 * step]) for at in starts]

            def compress(cuts: Any = cuts) -> list[bytes]:
                return [mine.encode(*one) for one in cuts]

            frames = compress()
            patterns = [casts.widen(one, "F24").view("<u4") for _, one in cuts]

            def expand(frames: Any = frames, patterns: Any = patterns) -> list[Any]:
                return [mine.add(mine.decode(frame), one) for frame, one in zip(frames, patterns, strict=True)]

            wanted = np.empty(3 * len(newest), np.uint8)
            mine.pack(newest, "F24", wanted, None)
            assert (np.concatenate(expand()) == casts.widen(wanted.data, "F24").view("<u4")).all()
            sizes[setting] = sum(map(len, frames)) / len(newest)
            taken[f"compress, {setting}"] = cpu_of(compress, 9) / len(newest)
            taken[f"decompress, {setting}"] = cpu_of(expand, 9) / len(newest)
            kernels.loops = lambda: None
            taken[f"compress, {setting}, without numba"] = cpu_of(compress, 3) / len(newest)
            kernels.loops = loops
    return {"taken": taken, "sizes": sizes, "digests": digests}


def train(target: Path) -> None:
    """Store the masters of both trainings, as of two saves in succession."""
    import torch
    from study.precision import SETTINGS as KNOWN
    from study.train import Training

    torch.set_num_threads(1)
    held = {}
    for name in SETTINGS:
        training = Training(KNOWN[name], seed=0)
        for age in (1, 0):
            training.run_to(KNOWN[name].crash - age * KNOWN[name].every)
            masters = [master.flatten() for master, *_ in training.state().params.values()]
            held[f"{name} {age}"] = torch.cat(masters).numpy()
    np.savez(target, **held)


def run(tree: str, path: Path, states: Path) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": f"{path}"}
    command = [sys.executable, f"{HERE / 'bench_coder.py'}", f"{path}", "--measure", tree, f"{states}"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument("--states", type=Path, help="where the masters of the trainings are, or will be, kept")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure[0], Path(options.measure[1]))))
        return
    with tempfile.TemporaryDirectory() as folder:
        states = options.states or Path(folder) / "masters.npz"
        if not states.exists():
            train(states)
        paths = {"before": options.before.resolve(), "now": HERE.parent}
        rounds = [{tree: run(tree, path, states) for tree, path in paths.items()} for _ in range(options.rounds)]
    first = rounds[0]
    assert first["before"]["digests"] == first["now"]["digests"], "a rounding gives other bytes"
    print("| | before | now | ratio |\n|---|---:|---:|---:|")
    for setting in SETTINGS:
        old, new = (first[tree]["sizes"][setting] for tree in ("before", "now"))
        print(f"| bytes per param, {setting} | {old:.3f} | {new:.3f} | {new / old:.2f} |")
    for name in first["now"]["taken"]:
        pairs = [[one[tree]["taken"][name] * 1e9 for tree in ("before", "now")] for one in rounds]
        old, new = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"| ns, {name} | {old:.2f} | {new:.2f} | {statistics.median(b / a for a, b in pairs):.2f} |")


if __name__ == "__main__":
    main()
