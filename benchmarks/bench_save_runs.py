"""What bench_save.py measures: single saves, and blocks of training steps with saves.

It works on CUDA as on the CPU. There, a step ends with a synchronization of the device; a save does not, because what
it still copies must run beside the training's kernels. The plain copy goes into pinned memory, on the current stream.
"""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

COPY, WRITE, BACKGROUND, STOPPED, ASYNC_SAVE, TRAINER = (
    "plain memory copy",
    "plain write",
    "background save",
    "background=False",
    "torch's async_save",
    "Trainer's save",
)
NONE, EVERY_STEP, EVERY_5TH, SLOW_DISK = "no saves", "every step", "every 5th step", "every 5th step, slow disk"
UNEVEN_DISK, IN_FLIGHT = "uneven disk", "in_flight="
COST, BARE = "background save, idle", "bare copy and write"
MODES = (BACKGROUND, STOPPED)
BLOCK, WRITE_BYTES = 4096, 8 << 20


class Bench:
    """All ways of saving one training's states. Every rank makes the same calls."""

    def __init__(self, trainer: Any, options: argparse.Namespace) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        from llmtailor.saving import saver_for

        self.torch, self.dist, self.trainer, self.options = torch, dist, trainer, options
        self.is_cuda = options.device == "cuda"
        self.work: Path = options.work
        self.is_first = trainer.args.process_index == 0
        self.batch = next(iter(trainer.get_train_dataloader()))
        if trainer.is_deepspeed_enabled:
            given = {"engine": trainer.model_wrapped}
        else:
            given = {"model": trainer.model, "optimizer": trainer.optimizer}
        given |= {"scheduler": trainer.lr_scheduler, "policy": options.policy, "keep_composable": 1}
        kinds: dict[str, dict[str, Any]] = {mode: {"background": mode == BACKGROUND} for mode in MODES}
        if options.every:
            kinds = {BACKGROUND: {}} | {f"{IN_FLIGHT}{number}": {"in_flight": number} for number in (1, 2, 3)}
        self.savers: dict[str, Any] = {
            mode: saver_for(self.work / str(number), **how, **given) for number, (mode, how) in enumerate(kinds.items())
        }
        saver = self.savers[BACKGROUND]
        fragments = saver.training.fragments([*saver.model.part_of])
        storages = {one.tensor.untyped_storage().data_ptr(): one.tensor for one in fragments}
        self.states = {  # whole storages: async_save stages no less, and the fewer the tensors the faster
            f"{trainer.args.process_index}.{number}": torch.empty(0, dtype=one.dtype, device=one.device).set_(
                one.untyped_storage()
            )
            for number, one in enumerate(storages.values())
        }
        if options.every:
            self.bare = Bare(self.work, [*self.states.values()])
            self.bare.save(0)
            self.bare.finish()
        self.buffers = [torch.zeros_like(one, device="cpu", pin_memory=self.is_cuda) for one in self.states.values()]
        self.gloo = dist.new_group(backend="gloo")
        self.stager = DefaultStager(StagingOptions(self.is_cuda, True, True, self.is_cuda))
        self.saves = 0
        self.found: dict[str, list[dict[str, float]]] = {}
        self.slowed_to: Callable[[float], float] = lambda now: 0.0
        slow_down(lambda now: self.slowed_to(now))

    def go(self) -> None:
        for saver in self.savers.values():
            self.saves += 1
            saver.save(self.saves)  # the complete base, and whatever is done only once
            saver.finish()
            saver.reports()
        self.step()
        if self.options.every:
            self.in_flight()
        else:
            self.all_ways()
        self.stager.close()
        for saver in self.savers.values():
            saver.close()

    def in_flight(self) -> None:
        """Compare several saves in progress at once with one, and with none."""
        for number in range(self.options.rounds):
            self.plain_step()
            self.save(BACKGROUND)
            self.found[BACKGROUND][-1]["plain_s"] = self.found["step"][-1]["step_s"]
            for run in rotated([lambda: self.cost(COST), lambda: self.cost(BARE)], number):
                run()
        every = self.options.every
        runs: list[Callable[[], None]] = [lambda: self.block(NONE)]
        for mode in self.savers:
            for disk in ("", f", {UNEVEN_DISK}") if mode.startswith(IN_FLIGHT) else ():
                name = f"every {every}th step{disk}"
                runs.append(lambda mode=mode, name=name: self.block(name, mode, every))
        for number in range(self.options.blocks):
            for run in rotated(runs, number):
                run()

    def all_ways(self) -> None:
        self.async_save()
        self.found.clear()
        saves = [lambda mode=mode: self.save(mode) for mode in MODES]
        ways = [self.copy, self.write, *saves, self.async_save, self.stock]
        for number in range(self.options.rounds):
            for run in rotated([self.plain_step, *ways], number):
                run()
        runs: list[Callable[[], None]] = [lambda: self.block(NONE)]
        for mode in MODES:
            for name, every in ((EVERY_STEP, 1), (EVERY_5TH, 5), (SLOW_DISK, 5)):
                runs.append(lambda mode=mode, name=name, every=every: self.block(name, mode, every))
        for number in range(self.options.blocks):
            for run in rotated(runs, number):
                run()

    def step(self) -> None:
        """Make a training step, as the Trainer's loop does."""
        trainer = self.trainer
        trainer.training_step(trainer.model_wrapped, self.batch)
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
        trainer.model_wrapped.zero_grad()
        self.synchronize()

    def synchronize(self) -> None:
        if self.is_cuda:
            self.torch.cuda.synchronize()

    def together(self, values: Mapping[str, float]) -> list[dict[str, float]]:
        ranks: list[Any] = [None] * self.dist.get_world_size()
        self.dist.all_gather_object(ranks, dict(values))
        return ranks

    def settle(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # else one way may live in what another has freed
        self.synchronize()
        if self.is_first:
            os.sync()
        self.dist.barrier()

    def add(self, name: str, values: Mapping[str, float]) -> None:
        """Record a run: the bytes and CPU seconds of all ranks together, and the times of the slowest."""
        ranks = self.together(values)
        run = {key: (sum if key in ("num_bytes", "cpu_s") else max)(rank[key] for rank in ranks) for key in values}
        self.found.setdefault(name, []).append(run)
        if self.is_first:
            told = ", ".join(f"{key} {value:.3f}" for key, value in run.items() if key.endswith("_s"))
            print(f"{name} {len(self.found[name])}: {told}", file=sys.stderr, flush=True)

    def plain_step(self) -> None:
        self.settle()
        began, cpu = time.perf_counter(), time.process_time()
        self.step()
        self.add("step", {"step_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu})

    def cost(self, name: str) -> None:
        """Take the CPU time of a save, of all threads, while training stands still."""
        self.settle()
        saver = self.bare if name == BARE else self.savers[BACKGROUND]
        self.saves += 1
        cpu = time.process_time()
        saver.save(self.saves)
        while saver.is_busy:
            time.sleep(0.05)
        self.add(name, {"cpu_s": time.process_time() - cpu})
        saver.finish()
        saver.reports()

    @contextmanager
    def one_save(self, name: str) -> Iterator[dict[str, float]]:
        """Time a block, which calls `stopped` when training may go on, and a training step behind it."""
        self.settle()
        values: dict[str, float] = {}
        self.began, self.cpu = time.perf_counter(), time.thread_time()
        yield values
        self.add(name, values)

    def stopped(self) -> dict[str, float]:
        """Make a step; return what the save has cost the thread of the training so far."""
        values = {"stall_s": time.perf_counter() - self.began, "thread_cpu_s": time.thread_time() - self.cpu}
        self.step()
        return {**values, "step_s": time.perf_counter() - self.began}

    def copy(self) -> None:
        for _ in range(2):  # the second time, everything is warm
            self.settle()
            began, cpu = time.perf_counter(), time.thread_time()
            for buffer, state in zip(self.buffers, self.states.values(), strict=True):
                buffer.copy_(state, non_blocking=self.is_cuda)
            self.synchronize()
            stall, cpu = time.perf_counter() - began, time.thread_time() - cpu
        num_bytes = sum(buffer.nbytes for buffer in self.buffers)
        self.add(COPY, {"stall_s": stall, "thread_cpu_s": cpu, "copy_s": stall, "num_bytes": num_bytes})

    def write(self) -> None:
        from llmtailor.live.tensors import bytes_of

        path = self.work / f"plain-{self.trainer.args.process_index}"
        with self.one_save(WRITE) as values:
            with path.open("xb") as file:
                for state in self.states.values():
                    file.write(bytes_of(state.cpu()))
                file.flush()
                os.fsync(file.fileno())
            values |= self.stopped()
            values |= {"durable_s": values["stall_s"], "num_bytes": path.stat().st_size}
        path.unlink()

    def save(self, mode: str) -> None:
        saver = self.savers[mode]
        with self.one_save(mode) as values:
            self.saves += 1
            saver.save(self.saves)
            called = time.perf_counter() - self.began
            values |= self.stopped()
            saver.finish()
            (report,) = saver.reports()
            # the saver's own count of the stall, with the wait before the optimizer's step
            values |= {"call_s": called, "stall_s": report.stall_s, "copy_s": report.copy_s}
            values |= {"durable_s": report.publish_s, "num_bytes": report.num_bytes / self.dist.get_world_size()}

    def async_save(self) -> None:
        from torch.distributed import checkpoint as dcp
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        folder, waited = self.work / "async_save", 0.0

        def wait(*_: object) -> None:
            nonlocal waited
            began = time.perf_counter()
            response.staging_completion.result()
            waited += time.perf_counter() - began

        with self.one_save(ASYNC_SAVE) as values:
            response = dcp.async_save(
                self.states, checkpoint_id=folder, process_group=self.gloo, async_stager=self.stager
            )
            called = time.perf_counter() - self.began
            hook = register_optimizer_step_pre_hook(wait)
            values |= self.stopped()
            hook.remove()
            response.upload_completion.result()
            values |= {"call_s": called, "stall_s": called + waited, "durable_s": time.perf_counter() - self.began}
            values["num_bytes"] = sum(state.nbytes for state in self.states.values())
        self.remove(folder)

    def stock(self) -> None:
        with self.one_save(TRAINER) as values:
            self.trainer._save_checkpoint(self.trainer.model_wrapped, trial=None)
            values |= self.stopped()
        folder = next(self.work.glob("checkpoint-*"))
        num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        self.found[TRAINER][-1]["num_bytes"] = num_bytes
        self.remove(folder)

    def block(self, name: str, mode: str = "", every: int = 0) -> None:
        """Make training steps, with a save at every n-th of them."""
        num_steps = self.options.steps
        self.settle()
        # the steps of the blocks before tell more about the present speed than single ones
        blocks = [one["train_s"] / num_steps for one in self.found.get(NONE, ())]
        step_s = statistics.median(blocks or [one["step_s"] for one in self.found["step"]])
        a_save = statistics.median(one["num_bytes"] for one in self.found[BACKGROUND]) / self.dist.get_world_size()
        if name == SLOW_DISK:
            self.slowed_to = lambda now: a_save / (self.options.steps_per_write * step_s)
        elif name.endswith(UNEVEN_DISK):
            cadence, started = every * step_s, time.perf_counter()
            self.slowed_to = lambda now: a_save / cadence / (0.3 if (now - started) // cadence % 2 else 3)
        began, cpu = time.perf_counter(), time.process_time()
        values, reached = {}, began
        for step in range(num_steps):
            if every and step % every == 0:
                self.saves += 1
                self.savers[mode].save(self.saves)
            self.step()
            values[f"step {step}"] = time.perf_counter() - reached
            reached += values[f"step {step}"]
        values["train_s"] = reached - began
        if every:
            self.savers[mode].finish()
        values |= {"durable_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}
        values["stalled_s"] = sum(one.stall_s for one in self.savers[mode].reports()) if every else 0.0
        self.slowed_to = lambda now: 0.0
        self.add(f"{mode}, {name}" if mode else name, values)

    def remove(self, folder: Path) -> None:
        self.dist.barrier()
        if self.is_first:
            shutil.rmtree(folder)
        self.dist.barrier()


class Bare:
    """What the bytes of a save cost at least: a thread copies them to memory in huge pages, which is in use already,
    and writes that past the page cache, in large requests. Nothing is summed, described or waited for. The file before
    is deleted, as the savers delete theirs."""

    def __init__(self, work: Path, states: list[Any]) -> None:
        import torch

        from llmtailor.copying.streams import huge_pages

        self.path, self.states = work / f"bare-{os.getpid()}", states
        self.num_bytes = sum(state.nbytes for state in states)
        pages = huge_pages(-(-self.num_bytes // BLOCK) * BLOCK)
        self.memory, self.pages = torch.frombuffer(pages, dtype=torch.uint8), pages
        self.memory.zero_()
        self.thread: threading.Thread | None = None

    def save(self, number: int) -> None:
        self.finish()
        self.thread = threading.Thread(target=self.run, args=(number,))
        self.thread.start()

    def run(self, number: int) -> None:
        from llmtailor.storage.local import bypass_cache, write_all

        at = 0
        for state in self.states:
            self.memory[at : at + state.nbytes].copy_(state.view(self.memory.dtype))
            at += state.nbytes
        old, path = [*self.path.parent.glob(f"{self.path.name}.*")], self.path.with_suffix(f".{number}")
        with path.open("xb", buffering=0) as file:
            bypass_cache(file.fileno())
            for start in range(0, len(self.pages), WRITE_BYTES):
                write_all(file.fileno(), self.pages[start : start + WRITE_BYTES])
            os.fsync(file.fileno())
        for one in old:
            one.unlink()

    @property
    def is_busy(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def finish(self) -> None:
        if self.thread is not None:
            self.thread.join()

    def reports(self) -> list[Any]:
        return []


def slow_down(speed: Callable[[float], float]) -> None:
    """Make all writes of llmtailor's files together as slow as a disk that has so many bytes per second at a time; 0
    changes nothing."""
    from llmtailor.copying import streams

    write_all, lock, free_at = streams.write_all, threading.Lock(), 0.0

    def write_slowly(fd: int, data: Any) -> None:
        nonlocal free_at
        now = time.perf_counter()
        if bytes_per_s := speed(now):
            with lock:
                until = free_at = max(now, free_at) + len(data) / bytes_per_s
            write_all(fd, data)
            time.sleep(max(0.0, until - time.perf_counter()))
        else:
            write_all(fd, data)

    streams.write_all = write_slowly


def rotated(runs: list[Callable[[], None]], by: int) -> list[Callable[[], None]]:
    by %= len(runs)
    return runs[by:] + runs[:by]
