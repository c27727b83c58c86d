"""Measure ``engine.save_checkpoint`` of DeepSpeed with llmtailor's checkpoint engine and with DeepSpeed's own ones.

    python benchmarks/bench_engines.py                       # 25 M params, ZeRO-3, 2 CPU ranks
    python benchmarks/bench_engines.py --hidden-size 2048 --mb-per-s 200

Each way has an engine of its own, with the same model. In rounds, whose order rotates, each saves once and makes
training steps behind it. Before each run the disk has settled (sync); ratios are of the same round. ``async_save`` of
torch gets the tensors of the optimizer's and the model's state dict.

``--mb-per-s`` slows all writes down to a disk of this speed. The ``fast`` and ``decoupled`` engines get DeepSpeed's
writer in Python unless its asynchronous one can be built here.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
OURS, TORCH, FAST, DECOUPLED, ASYNC_SAVE = "llmtailor", "torch", "fast", "decoupled", "async_save"
SPEED = "BENCH_MB_PER_S"
"""The variable with the speed, which DeepSpeed's process for decoupled writing inherits"""


def slow_down() -> None:
    """Let every write take as long as on a disk of the given speed."""
    speed = float(os.environ.get(SPEED, "0")) * 1e6
    if not speed:
        return
    import torch
    from deepspeed.io import PyFileWriter
    from torch.distributed.checkpoint import filesystem

    from llmtailor.copying import streams

    def slowed(write: Callable[..., Any], size: Callable[..., int]) -> Callable[..., Any]:
        def writing(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = write(*args, **kwargs)
            time.sleep(max(0.0, began + size(*args) / speed - time.perf_counter()))
            return result

        return writing

    streams.write_all = slowed(streams.write_all, lambda fd, data: len(data))
    PyFileWriter.write = slowed(PyFileWriter.write, lambda writer, data: len(data))
    save = torch.save
    torch.save = slowed(
        save, lambda *given, **_: Path(given[1]).stat().st_size if {*map(type, given[1:])} == {str} else 0
    )
    filesystem._write_item = slowed(
        filesystem._write_item, lambda _, stream, data, *rest: data.nbytes if hasattr(data, "nbytes") else 0
    )


slow_down()


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        import deepspeed
        import torch
        import torch.distributed as dist
        from deepspeed.ops.op_builder import AsyncIOBuilder

        from llmtailor.saving import attach_engine

        self.torch, self.dist, self.options = torch, dist, options
        self.is_first = dist.get_rank() == 0
        kind = "fast" if AsyncIOBuilder().is_compatible(verbose=False) else "python"
        writer = {"type": kind, "data_parallel": "replica"}
        configs: dict[str, dict[str, Any]] = {
            OURS: {},
            TORCH: {},
            FAST: {"checkpoint": {"writer": writer}},
            DECOUPLED: {"checkpoint": {"writer": {**writer, "decoupled": True}}},
            ASYNC_SAVE: {},
        }
        self.engines = {name: self.engine(deepspeed, more) for name, more in configs.items() if name in options.ways}
        self.saver = attach_engine(self.engines[OURS])
        self.gloo = dist.new_group(backend="gloo")
        self.found: dict[str, list[dict[str, float]]] = {}
        if self.is_first:
            print(f"DeepSpeed's writer: {kind}", file=sys.stderr)

    def engine(self, deepspeed: Any, more: dict[str, Any]) -> Any:
        self.torch.manual_seed(0)
        width = self.options.hidden_size
        layers = [self.torch.nn.Linear(width, width) for _ in range(self.options.num_layers)]
        model = self.torch.nn.Sequential(*layers)
        config = {
            "train_micro_batch_size_per_gpu": 8,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
            "zero_optimization": {"stage": self.options.stage},
            **more,
        }
        return deepspeed.initialize(model=model, model_parameters=[*model.parameters()], config=config)[0]

    def step(self, engine: Any) -> None:
        batch = self.torch.ones(self.options.tokens, self.options.hidden_size, dtype=self.torch.bfloat16)
        engine.backward(engine(batch).square().mean())
        engine.step()

    def go(self) -> None:
        for name in self.engines:
            self.run(name)  # what is done only once
        self.found.clear()
        names = [*self.engines]
        for number in range(self.options.rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                self.run(name)

    def run(self, name: str) -> None:
        """Make a step, then save and make the steps behind it, until the checkpoint is durable."""
        engine, folder = self.engines[name], self.options.work / name
        self.step(engine)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        if self.is_first:
            os.sync()
        self.dist.barrier()
        began = time.perf_counter()
        self.step(engine)
        step_s = time.perf_counter() - began
        before = resident()
        with measured_peak():
            began = time.perf_counter()
            wait = self.async_save(engine, folder) if name == ASYNC_SAVE else self.save(name, engine, folder)
            called = time.perf_counter() - began
            self.step(engine)
            behind = time.perf_counter() - began - called
            values = {"step_s": step_s, "call_s": called, "stall_s": called + max(behind - step_s, 0.0)}
            wait()
            values["durable_s"] = time.perf_counter() - began
        values["peak_mb"] = (peak() - before) / 1e6
        values["mb"] = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6
        self.add(name, values)
        self.dist.barrier()
        if self.is_first:
            shutil.rmtree(folder)
        self.dist.barrier()

    def save(self, name: str, engine: Any, folder: Path) -> Callable[[], None]:
        engine.save_checkpoint(str(folder))
        return self.saver.finish if name == OURS else lambda: sync(folder)

    def async_save(self, engine: Any, folder: Path) -> Callable[[], None]:
        from torch.distributed import checkpoint as dcp

        states = {"model": engine.module_state_dict(), f"optimizer-{self.dist.get_rank()}": tensors_of(engine)}
        future = dcp.async_save(states, checkpoint_id=folder, process_group=self.gloo)
        return future.result

    def add(self, name: str, values: dict[str, float]) -> None:
        ranks: list[Any] = [None] * self.dist.get_world_size()
        self.dist.all_gather_object(ranks, values)
        slowest = {key: max(rank[key] for rank in ranks) for key in values}
        self.found.setdefault(name, []).append(slowest)
        if self.is_first:
            print(name, {key: round(value, 3) for key, value in slowest.items()}, file=sys.stderr, flush=True)

    def tell(self) -> None:
        print(f"\nZeRO-{self.options.stage}, medians of {self.options.rounds} rounds, ratios to {OURS}")
        heads = ("MB", "call s", "stall s", "ratio", "durable s", "ratio", "peak MB")
        print(f"{'':12}" + "".join(f"{head:>11}" for head in heads))
        ours = self.found[OURS]
        for name, runs in self.found.items():

            def median(key: str, runs: Any = runs) -> float:
                return statistics.median(run[key] for run in runs)

            def ratio(key: str, runs: Any = runs) -> str:
                pairs = zip(runs, ours, strict=True)
                return f"{statistics.median(one[key] / max(other[key], 1e-9) for one, other in pairs):.2f}"

            cells = [f"{median('mb'):.0f}", f"{median('call_s'):.3f}", f"{median('stall_s'):.3f}", ratio("stall_s")]
            cells += [f"{median('durable_s'):.3f}", ratio("durable_s"), f"{median('peak_mb'):.0f}"]
            print(f"{name:12}" + "".join(f"{cell:>11}" for cell in cells))
        print(
            """
  call: until save_checkpoint returns; stall: with it, how much longer the step behind it takes than the one before
  durable: until everything is on disk; DeepSpeed's own engines do not make it so: with an fsync after the step
  peak: how much the process grew; for the decoupled engine without its writing process"""
        )


def tensors_of(engine: Any) -> dict[str, Any]:
    inner = engine.optimizer.optimizer
    states = {
        f"{number}.{kind}": value
        for number, state in enumerate(inner.state.values())
        for kind, value in state.items()
        if hasattr(value, "shape")
    }
    return states | {f"{number}.master": master for number, master in enumerate(inner.state)}


def sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def status(key: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[key].split()[0]) << 10


def resident() -> int:
    return status("VmRSS")


def peak() -> int:
    return status("VmHWM")


@contextmanager
def measured_peak() -> Iterator[None]:
    Path("/proc/self/clear_refs").write_text("5")
    yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=1024, help="of the model (default: 1024: 25 M params)")
    parser.add_argument("--num-layers", type=int, default=24, help="default: 24")
    parser.add_argument("--tokens", type=int, default=512, help="of a step on a rank (default: 512)")
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=3, help="of ZeRO (default: 3)")
    parser.add_argument("--ranks", type=int, default=2, help="default: 2")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument("--mb-per-s", type=float, default=0.0, help="speed of the disk, per rank (default: its own)")
    ways = [OURS, TORCH, FAST, DECOUPLED, ASYNC_SAVE]
    parser.add_argument("--ways", nargs="+", choices=ways, default=ways, help="default: all")
    parser.add_argument("--work", type=Path, default=Path("bench-run/engines"), help="default: ./bench-run/engines")
    options = parser.parse_args()
    options.work = options.work.absolute()
    if "RANK" in os.environ:
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed("gloo")
        bench = Bench(options)
        bench.go()
        if bench.is_first:
            bench.tell()
        for engine in bench.engines.values():
            engine.destroy()
        bench.dist.barrier()
        os._exit(0)
    if options.work.exists():
        parser.error(f"{options.work} exists; remove it first")
    options.work.mkdir(parents=True)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(options.ranks)]
    node = {"CROSS_SIZE": "1", "CROSS_RANK": "0", "LOCAL_SIZE": str(options.ranks)}  # as DeepSpeed's launcher sets them
    environment = os.environ | node | {SPEED: str(options.mb_per_s)}
    try:
        done = subprocess.run([*launch, *sys.argv], env=environment)
    finally:
        shutil.rmtree(options.work, ignore_errors=True)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
