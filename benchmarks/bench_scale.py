"""How `inspect`, `verify` and the planning of a `merge` grow with the number of ranks, on sparse checkpoints.

    python benchmarks/bench_scale.py --shape 70b --ranks 16 64 256
    python benchmarks/bench_scale.py --shape 671b --ranks 1024 --tp 8
    python benchmarks/bench_scale.py --shape 671b --ranks 16 64 --tp 8 --format dcp

makes two checkpoints of each size (ZeRO-3 in bf16, or FSDP2 in fp32, over tensor parallelism), in which the tensors'
bytes are holes, and runs each command in a process of its own. CPU and wall seconds are the shortest of the rounds, the
peak is of resident memory, and preads are counted. ``growth`` is the exponent k of seconds ~ ranks^k since the row
above.

This module imports nothing large: a child's peak memory counts from its parent's size at the fork.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
SYNTHETIC = HERE.parent / "tests" / "support" / "synthetic"
STEPS = (100, 200)
NO_SPACE = 8
RECIPE = """\
merge_method: passthrough
base_model: {newer}
slices:
- sources: [{{model: {older}, layer_range: [0, {half}]}}]
- sources: [{{model: {newer}, layer_range: [{half}, {layers}]}}]
"""
_COUNTED = """
import json, os, sys
count, pread = 0, os.pread
def counted(*args):
    global count
    count += 1
    return pread(*args)
os.pread = counted
out, sys.argv = sys.argv[1], ["llmtailor", *sys.argv[2:]]
from llmtailor.cli.main import main
try:
    main()
finally:
    with open(out, "w") as file:
        json.dump(count, file)
"""


@dataclass(frozen=True)
class Usage:
    """What one run of a command took."""

    wall: float
    cpu: float
    peak_bytes: int
    preads: int


def run(command: list[str]) -> Usage:
    """Run llmtailor in a process of its own; a failure ends the measurement."""
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "said").open("w+b") as said:
        count, began = Path(folder) / "count", time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-c", _COUNTED, str(count), *command], stdin=subprocess.DEVNULL, stdout=said, stderr=said
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode not in (0, NO_SPACE):  # a plan is reported before its size is compared with the disk
            said.seek(0)
            sys.exit(f"error: exit code {process.returncode} from {' '.join(command)}\n{said.read().decode()[-2000:]}")
        wall = time.monotonic() - began
        return Usage(wall, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, json.loads(count.read_text()))


def make(folder: Path, shape: str, ranks: int, tp: int, form: str) -> list[Path]:
    """Make the checkpoints unless they are there."""
    roots = [folder / f"checkpoint-{step}" for step in STEPS]
    if not all(root.exists() for root in roots):
        shutil.rmtree(folder, ignore_errors=True)
        steps = ",".join(map(str, STEPS))
        options = ["--shape", shape, "--world-size", str(ranks), "--steps", steps, "--sparse"]
        options += ["--tp", str(tp), "--format", form]
        subprocess.run([sys.executable, str(SYNTHETIC), str(folder), *options], check=True, stderr=sys.stderr)
    return roots


def commands(folder: Path, roots: list[Path], what: list[str]) -> dict[str, list[str]]:
    """Return the commands to measure, by name."""
    layers = json.loads((roots[0] / "config.json").read_text())["num_hidden_layers"]
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(older=roots[0], newer=roots[1], half=layers // 2, layers=layers))
    known = {
        "inspect": ["inspect", str(roots[0]), "--json"],
        "verify": ["verify", str(roots[0]), "--json"],
        "plan": ["merge", str(recipe), str(folder / "out"), "--dry-run", "--json"],
    }
    return {name: known[name] for name in what}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="70b", help="of the model, as in tests/support/synthetic (default: 70b)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64], help="numbers of ranks (default: 16 64)")
    parser.add_argument("--tp", type=int, default=1, help="of these, ranks of tensor parallelism (default: 1)")
    parser.add_argument("--format", choices=["deepspeed", "dcp"], default="deepspeed", help="of the checkpoints")
    parser.add_argument("--commands", nargs="+", default=["inspect", "verify", "plan"], help="which to measure")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each command (default: 2)")
    parser.add_argument("--folder", type=Path, help="where the checkpoints are kept; otherwise they are temporary")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        table: dict[str, list[tuple[int, Usage]]] = {name: [] for name in options.commands}
        for ranks in options.ranks:
            folder = (options.folder or Path(temporary)) / f"{options.shape}-{ranks}-tp{options.tp}-{options.format}"
            roots = make(folder, options.shape, ranks, options.tp, options.format)
            for name, command in commands(folder, roots, options.commands).items():
                runs = [run(command) for _ in range(options.rounds)]
                best = min(runs, key=lambda one: one.cpu)
                table[name].append((ranks, best))
                print(f"{name} {ranks}: {best}", file=sys.stderr)
            if not options.folder:
                shutil.rmtree(folder)
    print(f"| {options.shape} | ranks | CPU s | growth | wall s | peak MB | preads | preads / file |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name, rows in table.items():
        before: tuple[int, Usage] | None = None
        for ranks, used in rows:
            growth = f"{math.log(used.cpu / before[1].cpu) / math.log(ranks / before[0]):.2f}" if before else ""
            files = (2 if options.format == "deepspeed" else 1) * ranks * (len(STEPS) if name == "plan" else 1)
            print(
                f"| {name} | {ranks} | {used.cpu:.2f} | {growth} | {used.wall:.2f} | {used.peak_bytes / 1e6:.0f} "
                f"| {used.preads:,} | {used.preads / files:.1f} |"
            )
            before = (ranks, used)


if __name__ == "__main__":
    main()
