"""Measure `llmtailor convert` over changes of world size and stage, against `cp -r` and DeepSpeed's ds_to_universal.

    python scripts/bench_convert.py [--shape 0.6b] [--layers 8] [--pairs 8:8 8:4 ...] [--stages 3:2 2:3] [--rounds 3]

One synthetic checkpoint per source world size. A round runs, in turn, `cp -r` of what the conversion makes plus fsync,
the conversion (which fsyncs as well), and ds_to_universal on the same input; the ratios compare runs of the same round.
Disk is what lies in the output folder. Needs DeepSpeed for the last; --no-universal leaves it out. The output of
ds_to_universal is not yet a resumable checkpoint: `load_universal` reads it beside the original.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench_merge import HERE, Usage, fsync_tree, spawn, tree_bytes

STEP = 100
ZERO3 = "3"
STAGES = ["3:2", "2:3", "2:1", "3:none", "none:3"]


def make_source(options: argparse.Namespace, work: Path, world_size: int, stage: str) -> Path:
    """Return a checkpoint of that world size and stage; all but ZeRO-3 are made by converting."""
    root = work / f"source-{world_size}-{stage}"
    found = root / f"checkpoint-{STEP}"
    if found.exists():
        return found
    if stage != ZERO3:
        base = make_source(options, work, world_size, ZERO3)
        command = [sys.executable, "-m", "llmtailor", "convert", str(base), str(found), "--stage", stage, "--quiet"]
    else:
        command = [sys.executable, str(HERE / "synthetic"), str(root), "--steps", str(STEP)]
        command += ["--shape", options.shape, "--world-size", str(world_size)]
        command += ["--layers", str(options.layers)] * bool(options.layers)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return found


def contenders(
    source: Path, made: Path, out: Path, world_size: int, stage: str, universal: bool
) -> dict[str, Callable[[], Usage]]:
    """Return what to measure; leaves in ``made`` what the conversion makes, to be copied."""

    def copy() -> Usage:
        usage = spawn(["cp", "-r", str(made), str(out)])
        fsync_tree(out)
        return usage

    def conversion(target: Path) -> list[str]:
        command = [sys.executable, "-m", "llmtailor", "convert", str(source), str(target), "--quiet"]
        return [*command, "--num-gpu", str(world_size), "--stage", stage]

    spawn(conversion(made))
    found: dict[str, Callable[[], Usage]] = {"cp -r + fsync": copy, "convert": lambda: spawn(conversion(out))}
    if not universal or not (source / "latest").exists():  # it reads DeepSpeed's form only
        return found
    tag = source / (source / "latest").read_text()
    tool = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(tag)]
    tool += ["--output_folder", str(out), "--inject_missing_state"]
    tool += ["--num_extract_workers", "2", "--num_merge_workers", "2"]
    found["ds_to_universal"] = lambda: spawn(tool)
    return found


def measure(options: argparse.Namespace, work: Path) -> None:
    cases = [(int(a), ZERO3, int(b), ZERO3) for a, b in (pair.split(":") for pair in options.pairs)]
    cases += [(options.world_size, a, options.world_size, b) for a, b in (s.split(":") for s in options.stages)]
    print(f"{'ranks':>8} {'stage':>10} {'contender':18}{'median s':>10}{'/ cp':>8}{'peak MB':>10}{'disk GB':>9}")
    made, out = work / "made", work / "out"
    for old, stage_in, new, stage_out in cases:
        source = make_source(options, work, old, stage_in)
        runs = contenders(source, made, out, new, stage_out, options.universal)
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        peak: dict[str, int] = dict.fromkeys(runs, 0)
        disk: dict[str, int] = {}
        for number in range(options.rounds):
            names = list(runs)
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                shutil.rmtree(out, ignore_errors=True)
                subprocess.run(["sync"], check=True)
                began = time.perf_counter()
                usage = runs[name]()
                seconds[name].append(time.perf_counter() - began)
                peak[name] = max(peak[name], usage.peak_bytes)
                disk[name] = tree_bytes(out)
        for name, times in seconds.items():
            pairs = zip(times, seconds["cp -r + fsync"], strict=True)
            ratio = statistics.median(own / copied for own, copied in pairs)
            print(
                f"{old:>3}->{new:<3} {stage_in:>4}->{stage_out:<4} {name:18}"
                f"{statistics.median(times):10.2f}{ratio:8.2f}"
                f"{peak[name] / 1e6:10.1f}{disk[name] / 1e9:9.2f}",
                flush=True,
            )
        shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.6b", help="of the model: tiny, 0.6b, 1b, 8b (default: 0.6b)")
    parser.add_argument("--layers", type=int, help="a number of layers other than the shape's")
    parser.add_argument("--pairs", nargs="*", default=["8:8", "8:4", "8:6", "4:8", "3:2"], help="ZeRO-3 world sizes")
    parser.add_argument("--stages", nargs="*", default=STAGES, help="changes of stage")
    parser.add_argument("--world-size", type=int, default=4, help="of the changes of stage (default: 4)")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--no-universal", dest="universal", action="store_false", help="leave ds_to_universal out")
    parser.add_argument("--work", type=Path, default=Path("bench-run"), help="default: ./bench-run")
    options = parser.parse_args()
    work = options.work.resolve() / "convert"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        measure(options, work)
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
