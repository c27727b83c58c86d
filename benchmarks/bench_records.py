"""Measure what it costs a merge of partial saves to compare what it reads with their records.

    python benchmarks/bench_records.py [--shape 0.6b] [--layers 8] [--world-size 4] [--num-gpu 2] [--rounds 5]

Each round merges the two halves of a run, with and without the comparison in turn; ratios are of the same round.
Everything is in this process, so that starting Python and planning do not count.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from bench_merge import SYNTHETIC, tree_bytes

from llmtailor.compose.plan import Options, plan_merge
from llmtailor.compose.write import write
from llmtailor.recipe.strategies import StrategyOptions
from llmtailor.runs.choose import choose_for_run

STEPS = (100, 200, 300)


def make_run(options: argparse.Namespace, run: Path) -> None:
    command = [sys.executable, str(SYNTHETIC), str(run), "--steps", ",".join(map(str, STEPS))]
    command += ["--shape", options.shape, "--world-size", str(options.world_size), "--layers", str(options.layers)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    thin = [sys.executable, "-m", "llmtailor", "thin", str(run), "--strategy", "parity", "--yes"]
    subprocess.run(thin, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.6b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--num-gpu", type=int, help="ranks of the output; default: as many")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, required=True, help="a folder on the disk to measure; emptied")
    options = parser.parse_args()
    run, out = options.work / "run", options.work / "out"
    shutil.rmtree(options.work, ignore_errors=True)
    make_run(options, run)
    recipe = choose_for_run(run, STEPS[1], StrategyOptions("latest"))[0]
    seconds: dict[bool, list[float]] = {True: [], False: []}
    cpu: dict[bool, list[float]] = {True: [], False: []}
    for number in range(options.rounds + 1):
        for compare in (True, False) if number % 2 else (False, True):
            plan = plan_merge(recipe, out, replace(Options(clone="never", compare=compare), world_size=options.num_gpu))
            subprocess.run(["sync"], check=True)
            began, used = time.perf_counter(), time.process_time()
            write(plan)
            if number:  # the first round fills the page cache
                seconds[compare].append(time.perf_counter() - began)
                cpu[compare].append(time.process_time() - used)
            print(f"{tree_bytes(out):,} bytes", "compared" if compare else "as they are", end="\r", flush=True)
            shutil.rmtree(out)
    for what, of in (("seconds", seconds), ("CPU seconds", cpu)):
        ratio = statistics.median(one / other for one, other in zip(of[True], of[False], strict=True))
        with_it, without = (statistics.median(of[compare]) for compare in (True, False))
        print(f"{what}: {with_it:.3f} with the comparison, {without:.3f} without; {ratio:.3f} times")


if __name__ == "__main__":
    main()
