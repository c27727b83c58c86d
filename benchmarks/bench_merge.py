"""The measurements of bench_merge.sh: `llmtailor merge` and `cp -r` in alternation, time and peak memory.

A round runs every contender once, in an order that turns with the rounds, and the ratios compare runs of the same
round, so a disk that gets slower or faster meanwhile does not favour anyone. Before each run the previous output
is gone and the disk has settled (sync). The merge makes its files durable before it returns, so there are two
yardsticks: a plain ``cp -r``, and ``cp -r`` plus an fsync of each file and folder, which is the like-for-like one.

The merge writes large files past the page cache; each is also measured through it, since the disk decides which is
faster. The first line says what kind of disk that is. On a file system with reflinks, ``cp --reflink=always`` plus the
fsyncs is measured too, and the merge without clones.

This module imports nothing large: a child's peak memory counts from its parent's size at the fork.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

HERE = Path(__file__).parent
SYNTHETIC = HERE.parent / "tests" / "support" / "synthetic"
STEP = 100


@dataclass
class Contender:
    """Something that makes a folder of the size of one checkpoint."""

    name: str
    run: Callable[[], Usage]
    seconds: list[float] = field(default_factory=list)
    used: list[Usage] = field(default_factory=list)
    new_bytes: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Usage:
    """What a command took, besides time."""

    cpu_seconds: float
    peak_bytes: int


def spawn(command: list[str], accept: tuple[int, ...] = (0,)) -> Usage:
    """Run a command; what it says is shown only if its exit code is none to `accept`."""
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode not in accept:
            said.seek(0)
            sys.stderr.write(said.read().decode(errors="replace"))
            sys.exit(f"error: exit code {process.returncode} from: {' '.join(command)}")
    return Usage(usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def fsync_tree(root: Path) -> float:
    """Make a tree durable; return the CPU seconds that it took."""
    began = time.process_time()
    for path in [root, *root.rglob("*")]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return time.process_time() - began


def used_bytes(root: Path) -> int:
    """Return how much of the file system is in use, once it has freed what was deleted, or others never pause."""
    used = -1
    for _ in range(10):
        before = used
        os.sync()
        status = os.statvfs(root)
        used = (status.f_blocks - status.f_bfree) * status.f_frsize
        if used == before:
            break
        time.sleep(0.3)
    return used


def has_reflinks(work: Path) -> bool:
    probe = work / "probe"
    probe.write_bytes(bytes(4096))
    command = ["cp", "--reflink=always", str(probe), str(work / "probe-clone")]
    able = subprocess.run(command, capture_output=True).returncode == 0
    for path in (probe, work / "probe-clone"):
        path.unlink(missing_ok=True)
    return able


THROUGH_THE_CACHE = """
from llmtailor.cli.main import main
from llmtailor.copying import streams
streams.bypass_cache = lambda *arguments: False
main()
"""


def disk_of(work: Path) -> str:
    """Return what is known about the disk: file system, device, whether it rotates, its cache, the kernel."""
    status = work.stat()
    number = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    fs_type, device = next((line[line.index("-") + 1 :][:2] for line in mounts if line[2] == number), ("?", "?"))
    known = [f"{fs_type} on {device}"]
    block = Path(f"/sys/dev/block/{number}").resolve()
    queue = next((folder / "queue" for folder in (block, block.parent) if (folder / "queue").is_dir()), None)
    if queue is not None:
        rotates = (queue / "rotational").read_text().strip() == "1"
        known.append("said to rotate" if rotates else "said not to rotate")
        known += [
            f"{name} {(queue / name).read_text().strip()}" for name in ("scheduler", "write_cache", "nr_requests")
        ]
    return ", ".join([*known, f"Linux {os.uname().release}", f"{os.cpu_count()} cores"])


def forget(root: Path) -> None:
    """Drop a tree from the page cache, as far as the kernel listens."""
    for path in root.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def tree_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def recipe(sources: list[Path], num_layers: int, interleaved: bool) -> str:
    """Write a recipe that spreads the layers over the sources: one after the other in turn, or in blocks."""
    lines = ["merge_method: passthrough", f"base_model: {sources[-1]}", "slices:"]
    for layer in range(num_layers):
        source = sources[layer % len(sources) if interleaved else layer * len(sources) // num_layers]
        lines += ["  - sources:", f"      - model: {source}", f"        layer_range: [{layer}, {layer + 1}]"]
    return "\n".join(lines) + "\n"


def make_sources(options: argparse.Namespace, work: Path) -> list[Path]:
    sources = [work / f"checkpoint-{STEP * number}" for number in range(1, max(options.sources) + 1)]
    missing = [str(path).rpartition("-")[2] for path in sources if not path.exists()]
    if missing:
        command = [sys.executable, str(SYNTHETIC), str(work), "--steps", ",".join(missing)]
        command += ["--shape", options.shape, "--world-size", str(options.world_size), "--groups", options.groups]
        command += ["--layers", str(options.layers)] * bool(options.layers) + ["--sparse"] * options.sparse
        subprocess.run(command, check=True)
    return sources


def contenders(options: argparse.Namespace, work: Path, sources: list[Path], out: Path) -> list[Contender]:
    num_layers = json.loads((sources[0] / "config.json").read_text())["num_hidden_layers"]
    if num_layers < len(sources):
        sys.exit(f"error: {num_layers} layers cannot come from {len(sources)} sources")

    def copy(durable: bool, reflink: str = "never") -> Usage:
        usage = spawn(["cp", "-r", f"--reflink={reflink}", str(sources[0]), str(out)])
        return replace(usage, cpu_seconds=usage.cpu_seconds + fsync_tree(out)) if durable else usage

    found = []
    if not options.dry_run:
        found = [Contender("cp -r", lambda: copy(False)), Contender("cp -r + fsync", lambda: copy(True))]
    clones = not options.dry_run and has_reflinks(out.parent)
    if clones:
        found.append(Contender("cp --reflink + fsync", lambda: copy(True, "always")))
    for num in options.sources:
        for name in options.recipes:
            config = work / f"{name}-{num}.yaml"
            config.write_text(recipe(sources[:num], num_layers, interleaved=name == "parity"))
            command = ["merge", str(config), str(out), "--quiet"]
            command += ["--dry-run"] * options.dry_run
            # A plan that would not fit on the disk (exit code 8) is measured all the same.
            accept = (0, 8) if options.dry_run else (0,)
            for label, program in programs(options).items():
                found.append(Contender(f"merge {name}, {num}{label}", partial(spawn, [*program, *command], accept)))
            if clones:
                command = [*options.llmtailor[0].split(), *command, "--clone", "never"]
                found.append(Contender(f"  {name}, {num}, no clones", partial(spawn, command)))
    for ranks in options.ranks:
        command = ["convert", str(sources[0]), str(out), "--num-gpu", str(ranks), "--quiet"]
        for label, program in programs(options).items():
            found.append(Contender(f"convert to {ranks} ranks{label}", partial(spawn, [*program, *command])))
    return found


def programs(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the programs to measure, by what is added to the name of a row."""
    found = {f" [{n + 1}]" if n else "": command.split() for n, command in enumerate(options.llmtailor)}
    if not options.dry_run:
        found[" (cached)"] = [sys.executable, "-c", THROUGH_THE_CACHE]
    return found


def report(measured: list[Contender], num_bytes: int) -> None:
    plain, durable = (next((one for one in measured if one.name == name), None) for name in ("cp -r", "cp -r + fsync"))

    def ratio(one: Contender, other: Contender | None, of_cpu: bool = False) -> str:
        if other is None or one is other:
            return "-"
        mine, theirs = ([use.cpu_seconds for use in it.used] if of_cpu else it.seconds for it in (one, other))
        return f"{statistics.median(a / b for a, b in zip(mine, theirs, strict=True)):.2f}"

    heads = f"{'median s':>10}{'min':>8}{'max':>8}{'GB/s':>8}{'/ cp+fsync':>12}{'/ cp':>8}"
    heads += f"{'CPU s':>8}{'/ cp+fsync':>12}{'peak MB':>10}{'new MB':>10}"
    print(f"{'':28}{heads}")
    for one in measured:
        median = statistics.median(one.seconds)
        rate = f"{num_bytes / median / 1e9:.2f}" if durable else "-"
        print(
            f"{one.name:28}{median:10.2f}{min(one.seconds):8.2f}{max(one.seconds):8.2f}{rate:>8}"
            f"{ratio(one, durable):>12}{ratio(one, plain):>8}"
            f"{statistics.median(usage.cpu_seconds for usage in one.used):8.2f}{ratio(one, durable, of_cpu=True):>12}"
            f"{max(usage.peak_bytes for usage in one.used) / 1e6:10.1f}{statistics.median(one.new_bytes) / 1e6:10.1f}"
        )
    print("\nRatios are medians over the rounds of (row / copy in the same round), of the time and of the CPU time.")


def measure(options: argparse.Namespace, work: Path) -> None:
    out = (options.out.resolve() if options.out else work) / "out"
    shutil.rmtree(out, ignore_errors=True)
    sources = make_sources(options, work)
    num_bytes = tree_bytes(sources[0])
    measured = contenders(options, work, sources, out)
    print(f"disk: {disk_of(out.parent)}; sources {'from the disk' if options.cold else 'in the page cache'}")
    print(f"{num_bytes / 1e9:.2f} GB a checkpoint, {options.world_size} ranks, {options.groups} groups, in {work}")
    for number in range(options.rounds):
        turn = number % len(measured)
        for contender in measured[turn:] + measured[:turn]:
            if options.cold:
                for source in sources:
                    forget(source)
            before, began = used_bytes(out.parent), time.perf_counter()
            contender.used.append(contender.run())
            contender.seconds.append(time.perf_counter() - began)
            contender.new_bytes.append(used_bytes(out.parent) - before)
            print(f"round {number + 1}: {contender.name}: {contender.seconds[-1]:.2f} s", file=sys.stderr)
            shutil.rmtree(out, ignore_errors=options.dry_run)
    report(measured, num_bytes)
    if options.json_path:
        runs = {
            one.name: {
                "seconds": one.seconds,
                "cpu_seconds": [usage.cpu_seconds for usage in one.used],
                "peak_bytes": [usage.peak_bytes for usage in one.used],
                "new_bytes": one.new_bytes,
            }
            for one in measured
        }
        options.json_path.write_text(json.dumps({"num_bytes": num_bytes, "runs": runs}, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.6b", help="of the model, as in tests/support/synthetic (default: 0.6b)")
    parser.add_argument("--layers", type=int, help="a number of layers other than the shape's")
    parser.add_argument("--world-size", type=int, default=8, help="ranks (default: 8)")
    parser.add_argument("--groups", choices=["default", "layer"], default="default", help="param groups")
    parser.add_argument("--sources", type=int, nargs="+", default=[2], help="numbers of sources (default: 2)")
    parser.add_argument("--recipes", nargs="+", choices=["halves", "parity"], default=["halves", "parity"])
    parser.add_argument("--ranks", type=int, nargs="*", default=[], help="also convert to these numbers of ranks")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument("--cold", action="store_true", help="drop the sources from the page cache before each run")
    parser.add_argument("--sparse", action="store_true", help="sources full of holes (outputs are full size)")
    parser.add_argument("--dry-run", action="store_true", help="measure the planning only; nothing is written")
    parser.add_argument("--work", type=Path, default=Path("bench-run"), help="where; default: ./bench-run")
    parser.add_argument("--out", type=Path, help="a folder on another disk, for the outputs (default: that of --work)")
    parser.add_argument("--keep", action="store_true", help="keep the sources, and use those already there")
    parser.add_argument(
        "--llmtailor",
        nargs="+",
        default=[f"{sys.executable} -m llmtailor"],
        help="the command to measure; more commands get rows of their own",
    )
    parser.add_argument("--json", type=Path, dest="json_path", help="write the single measurements to this file too")
    options = parser.parse_args()
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)

    work = options.work.resolve() / "-".join(
        [options.shape, f"{options.layers or 'all'}layers", f"{options.world_size}ranks", options.groups]
        + ["sparse"] * options.sparse
    )
    work.mkdir(parents=True, exist_ok=True)
    try:
        measure(options, work)
    finally:
        if not options.keep:
            shutil.rmtree(work)


if __name__ == "__main__":
    main()
