"""The measurements of bench_save.sh: what saving costs a training, by several ways of saving, in alternation.

A Llama is trained with the Trainer, under ZeRO on two CPU ranks and then without DeepSpeed. In its first step, two
things are measured, in rounds; the order rotates with the rounds, ratios compare runs of the same round, and before
each run the disk has settled (sync).

One save, followed by a training step:

- a plain copy of the same states into memory that is in use already, which is the yardstick;
- a background save, and one that stops training (background=False);
- ``torch.distributed.checkpoint.async_save`` of the same tensors, staged in shared memory by a thread, whose end is
  awaited before the optimizer's step;
- the Trainer's own save, which is not made durable.

Blocks of training steps with saves, which take turns with blocks without: at the disk's own speed with a save at every
step and at every fifth, and on a disk that is slowed down, to several steps for each save, with a save at every fifth.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
os.environ.setdefault("OMP_NUM_THREADS", "1")

COPY, BACKGROUND, STOPPED, ASYNC_SAVE, TRAINER = (
    "plain memory copy",
    "background save",
    "background=False",
    "torch's async_save",
    "Trainer's save",
)
NONE, EVERY_STEP, EVERY_5TH, SLOW_DISK = "no saves", "every step", "every 5th step", "every 5th step, slow disk"
MODES = (BACKGROUND, STOPPED)
MEANING = {
    COPY: "one pass over the states, into memory that is in use already: what a copy costs at least",
    BACKGROUND: "attach() as it is: copied until the next optimizer step, written while training continues",
    STOPPED: "the same files; training stands still until they are durable",
    ASYNC_SAVE: "torch.distributed.checkpoint of the same tensors; the optimizer's step waits for the staging",
    TRAINER: "a full checkpoint as the Trainer writes it, with weights; not made durable",
    NONE: "training steps alone",
    EVERY_STEP: "a save at every step; each waits for the one before",
    EVERY_5TH: "a save at every fifth step",
    SLOW_DISK: "each save takes {steps_per_write:g} steps to write; a save at every fifth step",
}


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
        self.savers = {
            mode: saver_for(self.work / str(number), background=mode == BACKGROUND, **given)
            for number, mode in enumerate(MODES)
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
        self.buffers = [torch.zeros_like(one, device="cpu", pin_memory=self.is_cuda) for one in self.states.values()]
        self.gloo = dist.new_group(backend="gloo")
        self.stager = DefaultStager(StagingOptions(self.is_cuda, True, True, self.is_cuda))
        self.saves = 0
        self.found: dict[str, list[dict[str, float]]] = {}
        self.slowed_to = 0.0
        slow_down(lambda: self.slowed_to)

    def go(self) -> None:
        for saver in self.savers.values():
            self.saves += 1
            saver.save(self.saves)  # the complete base, and whatever is done only once
            saver.finish()
        self.step()
        self.async_save()
        self.found.clear()
        ways = [self.copy, *[lambda mode=mode: self.save(mode) for mode in MODES], self.async_save, self.stock]
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
        self.stager.close()
        for saver in self.savers.values():
            saver.close()

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
        if self.is_first:
            os.sync()
        self.dist.barrier()

    def add(self, name: str, values: Mapping[str, float]) -> None:
        """Record a run: the bytes and CPU seconds of all ranks together, and the times of the slowest."""
        ranks = self.together(values)
        run = {key: (sum if key in ("num_bytes", "cpu_s") else max)(rank[key] for rank in ranks) for key in values}
        self.found.setdefault(name, []).append(run)
        if self.is_first:
            told = ", ".join(f"{key} {value:.3f}" for key, value in run.items() if key != "num_bytes")
            print(f"{name} {len(self.found[name])}: {told}", file=sys.stderr, flush=True)

    def plain_step(self) -> None:
        self.settle()
        began = time.perf_counter()
        self.step()
        self.add("step", {"step_s": time.perf_counter() - began})

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
        self.synchronize()
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

    def save(self, mode: str) -> None:
        saver = self.savers[mode]
        with self.one_save(mode) as values:
            self.saves += 1
            saver.save(self.saves)
            called = time.perf_counter() - self.began
            values |= self.stopped()
            saver.finish()
            report = saver.reports()[-1]
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
        if name == SLOW_DISK:
            # the steps of the blocks before tell more about the present speed than single ones
            blocks = [one["train_s"] / num_steps for one in self.found.get(NONE, ())]
            step_s = statistics.median(blocks or [one["step_s"] for one in self.found["step"]])
            a_save = statistics.median(one["num_bytes"] for one in self.found[BACKGROUND]) / self.dist.get_world_size()
            self.slowed_to = a_save / (self.options.steps_per_write * step_s)
        began, cpu = time.perf_counter(), time.process_time()
        for step in range(num_steps):
            if every and step % every == 0:
                self.saves += 1
                self.savers[mode].save(self.saves)
            self.step()
        values = {"train_s": time.perf_counter() - began}
        if every:
            self.savers[mode].finish()
            self.savers[mode].reports()
        values |= {"durable_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}
        self.slowed_to = 0.0
        self.add(f"{mode}, {name}" if mode else name, values)

    def remove(self, folder: Path) -> None:
        self.dist.barrier()
        if self.is_first:
            shutil.rmtree(folder)
        self.dist.barrier()


def slow_down(speed: Callable[[], float]) -> None:
    """Make every write of llmtailor's files as slow as a disk with this many bytes per second; 0 changes nothing."""
    from llmtailor.engine import streams

    write_all = streams.write_all

    def write_slowly(fd: int, data: Any) -> None:
        if speed():
            time.sleep(len(data) / speed())
        write_all(fd, data)

    streams.write_all = write_slowly


def rotated(runs: list[Callable[[], None]], by: int) -> list[Callable[[], None]]:
    by %= len(runs)
    return runs[by:] + runs[:by]


def ratio(found: Mapping[str, list[dict[str, float]]], name: str, other: str, key: str, per: str = "") -> str:
    """Return the median over the rounds of (this / the other), of amounts per byte if asked for."""
    ratios = [
        one[key] / two[key] * (two[per] / one[per] if per else 1)
        for one, two in zip(found[name], found[other], strict=True)
    ]
    return f"{statistics.median(ratios):.2f}"


def tell(found: Mapping[str, list[dict[str, float]]], title: str, options: argparse.Namespace) -> None:
    """Print the tables."""

    def median(name: str, key: str) -> float:
        return statistics.median(one.get(key, float("nan")) for one in found[name])

    print(f"\n{title}: one save and the step behind it, medians of {options.rounds} rounds")
    heads = ("MB", "stall s", "min", "/ copy", "CPU s", "/ copy", "step +s", "copied s", "GB/s", "durable s")
    print(f"{'':18}" + "".join(f"{head:>10}" for head in heads))
    step = median("step", "step_s")
    for name in (COPY, *MODES, ASYNC_SAVE, TRAINER):
        num_bytes, copied = median(name, "num_bytes"), median(name, "copy_s")
        cells = [
            f"{num_bytes / 1e6:.1f}",
            f"{median(name, 'stall_s'):.3f}",
            f"{min(one['stall_s'] for one in found[name]):.3f}",
            ratio(found, name, COPY, "stall_s", "num_bytes"),
            f"{median(name, 'thread_cpu_s'):.3f}",
            ratio(found, name, COPY, "thread_cpu_s", "num_bytes"),
            "-" if name == COPY else f"{median(name, 'step_s') - step:.3f}",
            f"{copied:.3f}" if copied > 0 else "-",
            f"{num_bytes / copied / 1e9:.2f}" if copied > 0 else "-",
            "-" if name in (COPY, TRAINER) else f"{median(name, 'durable_s'):.3f}",
        ]
        print(f"{name:18}" + "".join(f"{cell:>10}" for cell in cells))
    runs = [name for name in found if name == NONE or ", every" in name]
    print(f"\n{title}: {options.steps} steps, medians of {options.blocks} rounds; a step alone takes {step:.3f} s")
    heads = ("train s", "/ none", "durable s", "CPU s", "/ none")
    print(f"{'':44}" + "".join(f"{head:>10}" for head in heads))
    for name in sorted(runs, key=lambda name: (name != NONE, [*MEANING].index(name.partition(", ")[2] or NONE))):
        cells = [f"{median(name, 'train_s'):.2f}", ratio(found, name, NONE, "train_s")]
        cells += [f"{median(name, 'durable_s'):.2f}", f"{median(name, 'cpu_s'):.2f}", ratio(found, name, NONE, "cpu_s")]
        print(f"{name:44}" + "".join(f"{cell:>10}" for cell in cells))


def explain(options: argparse.Namespace) -> None:
    print("\nRows")
    for name, meaning in MEANING.items():
        print(f"  {name}: {meaning.format(**vars(options))}")
    print(
        """
Columns
  stall: how long training stood still, in the call and before the optimizer's step (slowest rank)
  / copy: the stall, or the CPU time, per byte as a multiple of the plain memory copy in the same round
  CPU s of one save: of the training's own thread, before the step; steadier than the stall on a busy machine
  step +s: how much longer the save and the step behind it took than a step alone, whatever the reason
  copied, GB/s: from the call until all states were in host memory, of all ranks together
  durable: from the call, or the first step, until everything was on disk, with fsync
  / none: time, or CPU time of all threads of all ranks, as a multiple of the same steps without saves"""
    )


def train(options: argparse.Namespace) -> None:
    """Be one rank: train a step, measure, report."""
    import torch
    from demo_train import deepspeed_config
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

    class Tokens(torch.utils.data.Dataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return 1 << 16

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            tokens = torch.arange(index, index + options.tokens) % options.vocab_size
            return {"input_ids": tokens, "labels": tokens}

    class AtTheEnd(TrainerCallback):  # type: ignore[misc]
        """Measures inside the training, where every object is as at a save."""

        def on_step_end(self, args: object, state: object, control: Any, **kwargs: object) -> None:
            control.should_save = False
            bench = Bench(trainer, options)
            bench.go()
            if bench.is_first:
                tell(bench.found, title, options)
                options.json_path.write_text(json.dumps({title: bench.found}))

    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # torch's async_save needs a group that exchanges CPU tensors
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo")
    if options.stage:
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # as in demo_train
    set_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocab_size,
        hidden_size=options.hidden_size,
        intermediate_size=options.hidden_size * 8 // 3,
        num_hidden_layers=options.num_layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    arguments = TrainingArguments(
        output_dir=str(options.work),
        deepspeed=deepspeed_config(options.stage) if options.stage else None,
        use_cpu=options.device == "cpu",
        bf16=options.stage > 0 or options.device == "cuda",
        per_device_train_batch_size=1,
        max_steps=1,
        save_steps=1,
        disable_tqdm=True,
        report_to=[],
    )
    model = LlamaForCausalLM(config)
    numel = sum(param.numel() for param in model.parameters())
    kind = f"ZeRO-{options.stage}" if options.stage else "plain"
    title = f"{kind}, {arguments.world_size} {options.device} ranks, {numel / 1e6:.1f} M params"
    trainer = Trainer(model=model, args=arguments, train_dataset=Tokens(), callbacks=[AtTheEnd()])
    trainer.train()
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=384, help="of the model (default: 384: 24 M params)")
    parser.add_argument("--num-layers", type=int, default=8, help="default: 8")
    parser.add_argument("--vocab-size", type=int, default=16_000, help="default: 16000")
    parser.add_argument("--tokens", type=int, default=128, help="of a step on a rank: how long it takes (default: 128)")
    parser.add_argument(
        "--stages", type=int, nargs="+", choices=range(4), default=[3, 0], help="of ZeRO, 0: plain (default: 3 0)"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default: cpu")
    parser.add_argument("--ranks", type=int, default=2, help="default: 2")
    parser.add_argument("--policy", default="full", help="what the background saves hold (default: full)")
    parser.add_argument("--rounds", type=int, default=7, help="of single saves (default: 7)")
    parser.add_argument("--blocks", type=int, default=2, help="rounds of training with saves (default: 2)")
    parser.add_argument("--steps", type=int, default=50, help="of training (default: 50)")
    parser.add_argument(
        "--steps-per-write", type=float, default=4.0, help="how long the slow disk takes for a save (default: 4 steps)"
    )
    parser.add_argument("--work", type=Path, default=Path("bench-run/save"), help="default: ./bench-run/save")
    parser.add_argument("--json", type=Path, dest="json_path", help="write the single measurements to this file too")
    options = parser.parse_args()
    options.work = options.work.absolute()
    if "RANK" in os.environ:
        (options.stage,) = options.stages
        train(options)
        return
    if options.work.exists():
        parser.error(f"{options.work} exists; remove it first")
    environment = os.environ | ({"DS_ACCELERATOR": "cpu"} if options.device == "cpu" else {})
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(options.ranks)]
    found: dict[str, Any] = {}
    try:
        for stage in options.stages:
            one = options.work / str(stage)
            one.mkdir(parents=True)
            words = ["--stages", str(stage), "--work", str(one / "run"), "--json", str(one / "found.json")]
            subprocess.run([*launch, *sys.argv, *words], env=environment, check=True)
            found |= json.loads((one / "found.json").read_text())
            shutil.rmtree(one)
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
    finally:
        shutil.rmtree(options.work, ignore_errors=True)
    explain(options)
    if options.json_path:
        options.json_path.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
