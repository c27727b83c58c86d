"""Measure `llmtailor convert` over changes of format, world size and stage, against `cp -r` and others' tools.

    python benchmarks/bench_convert.py [--shape 0.6b] [--layers 8] [--cases 3@8:3@4 dcp@4:dcp@2 ...] [--rounds 3]

A case is FROM@RANKS:TO@RANKS, where FROM and TO are a ZeRO stage (1, 2, 3, none) or a format (fsdp, dcp, verl,
megatron, universal). A round runs, in turn, `cp -r` of what the conversion makes plus fsync, the conversion (which
fsyncs too), and others' tools on the same input: ds_to_universal, whose output `load_universal` reads beside the
original, and torch's dcp.load followed by dcp.save, and dcp_to_torch_save, which do not fsync. Ratios compare runs of
the same round. Disk is what lies in the output folder. --no-others leaves the other tools out.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench_merge import HERE, SYNTHETIC, Usage, fsync_tree, spawn, tree_bytes

STEP = 100
COPY = "cp -r + fsync"
STAGES = ("1", "2", "3", "none")
CASES = [
    *("3@8:3@8", "3@8:3@4", "3@8:3@6", "3@4:3@8", "3@3:3@2"),
    *("3@4:2@4", "2@4:3@4", "2@4:1@4", "3@4:none@1", "none@1:3@4"),
    *("dcp@4:dcp@4", "dcp@4:dcp@2", "fsdp@4:fsdp@2", "3@4:fsdp@4", "fsdp@4:3@4"),
]


@dataclass(frozen=True)
class Form:
    """A form that a checkpoint has: a ZeRO stage (1, 2, 3, none) or a format of ``convert --to``; and its ranks."""

    name: str
    ranks: int

    @classmethod
    def parse(cls, text: str) -> Form:
        name, _, ranks = text.partition("@")
        return cls(name, int(ranks or 4))

    def __str__(self) -> str:
        return f"{self.name}@{self.ranks}"

    def options(self) -> list[str]:
        """Return the options of ``convert`` that make it."""
        groups = ["--groups", "one"] if self.name == "verl" else []
        return ["--stage" if self.name in STAGES else "--to", self.name, "--num-gpu", str(self.ranks), *groups]


def make_source(options: argparse.Namespace, work: Path, form: Form) -> Path:
    """Return a checkpoint of that form; all but ZeRO-3 are made by converting."""
    root = work / f"source-{form}"
    found = root / f"checkpoint-{STEP}"
    if found.exists():
        return found
    if form.name != "3":
        base = make_source(options, work, Form("3", form.ranks))
        command = [sys.executable, "-m", "llmtailor", "convert", str(base), str(found), "--quiet", *form.options()]
    else:
        command = [sys.executable, str(SYNTHETIC), str(root), "--steps", str(STEP)]
        command += ["--shape", options.shape, "--world-size", str(form.ranks)]
        command += ["--layers", str(options.layers)] * bool(options.layers)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return found


def contenders(source: Path, made: Path, out: Path, old: Form, new: Form) -> dict[str, Callable[[], Usage]]:
    """Return what to measure; leaves in ``made`` what the conversion makes, to be copied."""

    def copy() -> Usage:
        usage = spawn(["cp", "-r", str(made), str(out)])
        fsync_tree(out)
        return usage

    def conversion(target: Path) -> list[str]:
        return [sys.executable, "-m", "llmtailor", "convert", str(source), str(target), "--quiet", *new.options()]

    spawn(conversion(made))
    found: dict[str, Callable[[], Usage]] = {COPY: copy, "convert": lambda: spawn(conversion(out))}
    if "dcp" in (old.name, new.name):
        for name in ("load_save", "to_torch") if old.name == "dcp" else ():
            command = [sys.executable, str(HERE / "dcp_tools.py"), name, str(source), str(out)]
            found[f"dcp {name}"] = lambda command=command: spawn(command)
    elif old.name in "123":
        tag = source / (source / "latest").read_text()
        tool = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(tag)]
        tool += ["--output_folder", str(out), "--inject_missing_state"]
        tool += ["--num_extract_workers", "2", "--num_merge_workers", "2"]
        found["ds_to_universal"] = lambda: spawn(tool)
    return found


def measure(options: argparse.Namespace, work: Path) -> None:
    cases = [[Form.parse(form) for form in case.split(":")] for case in options.cases]
    columns = f"{'median s':>10}{'/ cp':>8}{'CPU s':>8}{'peak MB':>10}{'disk GB':>9}"
    print(f"{'from':>12} -> {'to':12} {'contender':18}{columns}")
    made, out = work / "made", work / "out"
    for old, new in cases:
        source = make_source(options, work, old)
        runs = contenders(source, made, out, old, new)
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        used: dict[str, list[Usage]] = {name: [] for name in runs}
        disk: dict[str, int] = {}
        for number in range(options.rounds):
            names = [name for name in runs if options.others or name in (COPY, "convert")]
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                shutil.rmtree(out, ignore_errors=True)
                subprocess.run(["sync"], check=True)
                began = time.perf_counter()
                used[name].append(runs[name]())
                seconds[name].append(time.perf_counter() - began)
                disk[name] = tree_bytes(out)
        for name in disk:
            ratio = statistics.median(own / copied for own, copied in zip(seconds[name], seconds[COPY], strict=True))
            cpu = statistics.median(one.cpu_seconds for one in used[name])
            peak = max(one.peak_bytes for one in used[name])
            print(
                f"{old!s:>12} -> {new!s:12} {name:18}{statistics.median(seconds[name]):10.2f}{ratio:8.2f}{cpu:8.2f}"
                f"{peak / 1e6:10.1f}{disk[name] / 1e9:9.2f}",
                flush=True,
            )
        shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.6b", help="of the model, as in tests/support/synthetic (default: 0.6b)")
    parser.add_argument("--layers", type=int, help="a number of layers other than the shape's")
    parser.add_argument("--cases", nargs="*", default=CASES, help=f"default: {' '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--no-others", dest="others", action="store_false", help="leave others' tools out")
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
