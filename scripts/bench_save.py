"""The measurements of bench_save.sh: what a save costs a training, by several ways of saving, in alternation.

A Llama is trained for one step with the Trainer and DeepSpeed, so that there are optimizer states. Then, in rounds,
the same states are saved by

- the Trainer's own save (DeepSpeed's shards, gathered weights, scheduler, RNG), as it returns, and plus an fsync of
  what it wrote: it does not make its files durable, the others do;
- a partial save that holds everything (policy full), and one that holds half (parity, the saves behind the base);
- a plain write of the same bytes as each of these two: every rank writes the live tensors into one file, and fsyncs.

The order turns with the rounds, ratios compare runs of the same round, and before each run the disk has settled
(sync). Times are from the start of the first rank to the end of the last. Peak memory is what a rank's resident size
rises by during the save, the largest over ranks and rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

os.environ |= {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
os.environ.setdefault("OMP_NUM_THREADS", "1")

CHUNK_BYTES = 32 << 20
STOCK, SYNCED, FULL, PARITY = "Trainer's save", "Trainer's save + fsync", "partial, full", "partial, parity"
PLAIN_FULL, PLAIN_PARITY = "plain write of full", "plain write of parity"
YARDSTICK = {FULL: PLAIN_FULL, PARITY: PLAIN_PARITY}


@dataclass
class Measured:
    """One way of saving, over the rounds."""

    seconds: list[float] = field(default_factory=list)
    num_bytes: int = 0
    peak_bytes: list[int] = field(default_factory=list)


def resident() -> tuple[int, int]:
    """Return this process's resident bytes: now, and at most since `forget_peak`."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]) * 1024, int(status["VmHWM"].split()[0]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def tree_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def fsync_tree(root: Path) -> None:
    for path in [root, *root.rglob("*")]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


class Bench:
    """All ways of saving one engine's states. Every rank makes the same calls."""

    def __init__(self, trainer: object, options: argparse.Namespace) -> None:
        import torch.distributed as dist

        from llmtailor.saving import saver_for

        self.dist = dist
        self.trainer = trainer
        self.work: Path = options.work
        self.rounds: int = options.rounds
        self.is_first = dist.get_rank() == 0
        self.measured = {name: Measured() for name in (STOCK, SYNCED, FULL, PLAIN_FULL, PARITY, PLAIN_PARITY)}
        given = {"engine": trainer.model_wrapped, "scheduler": trainer.lr_scheduler}
        self.savers = {
            name: saver_for(self.work / name.split()[-1], policy=name.split()[-1], **given) for name in YARDSTICK
        }
        self.saves = 0
        self.held: dict[str, tuple[str, ...]] = {}
        for name in self.savers:
            self.partial(name)  # the complete base

    def go(self) -> None:
        runs: list[Callable[[], None]] = [self.stock]
        for name in YARDSTICK:
            runs += [lambda name=name: self.timed_partial(name), lambda name=name: self.plain(name)]
        for number in range(self.rounds):
            turn = number % len(runs)
            # the plain write needs to know which bytes: those of the save before
            for run in runs[turn:] + runs[:turn]:
                run()

    @contextmanager
    def timed(self, *names: str) -> Iterator[Callable[[str], None]]:
        """Time a block as the first name, or up to the calls of what is yielded."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # else a save may live in what was freed before, unseen
        if self.is_first:
            os.sync()
        self.dist.barrier()
        forget_peak()
        before, began = resident()[0], time.perf_counter()
        seconds: dict[str, float] = {}

        def lap(name: str) -> None:
            self.dist.barrier()
            seconds[name] = time.perf_counter() - began

        yield lap
        lap(names[-1])
        peaks: list[int] = [0] * self.dist.get_world_size()
        self.dist.all_gather_object(peaks, resident()[1] - before)
        for name in names:
            self.measured[name].seconds.append(seconds[name])
            self.measured[name].peak_bytes.append(max(peaks))
            if self.is_first:
                print(f"round {len(self.measured[name].seconds)}: {name}: {seconds[name]:.2f} s", file=sys.stderr)

    def stock(self) -> None:
        folder = self.work / "checkpoint-1"
        with self.timed(STOCK, SYNCED) as lap:
            self.trainer._save_checkpoint(self.trainer.model_wrapped, trial=None)
            lap(STOCK)
            if self.is_first:
                fsync_tree(folder)
        for name in (STOCK, SYNCED):
            self.measured[name].num_bytes = tree_bytes(folder)
        self.remove(folder)

    def timed_partial(self, name: str) -> None:
        with self.timed(name):
            num_bytes = self.partial(name)
        self.measured[name].num_bytes = num_bytes
        saver = self.savers[name]
        for step, folder in saver.folder.complete().items():
            if step < self.saves:
                self.remove(folder)

    def partial(self, name: str) -> int:
        self.saves += 1
        report = self.savers[name].save(self.saves)
        self.held[name] = tuple(report.parts)
        return report.num_bytes

    def plain(self, name: str) -> None:
        saver, path = self.savers[name], self.work / f"plain-{self.dist.get_rank()}"
        params = [param for part in self.held[name] for param in saver.model.params_of[part]]
        with self.timed(YARDSTICK[name]):
            write_plainly(path, (one.tensor for one in saver.training.fragments(params)))
        sizes: list[int] = [0] * self.dist.get_world_size()
        self.dist.all_gather_object(sizes, path.stat().st_size)
        self.measured[YARDSTICK[name]].num_bytes = sum(sizes)
        path.unlink()

    def remove(self, folder: Path) -> None:
        self.dist.barrier()
        if self.is_first:
            shutil.rmtree(folder)
        self.dist.barrier()


def write_plainly(path: Path, tensors: Iterable[object]) -> None:
    from llmtailor.saving.live import bytes_of

    with path.open("xb", buffering=1 << 20) as file:
        for tensor in tensors:
            data = bytes_of(tensor.contiguous())
            for start in range(0, len(data), CHUNK_BYTES):
                file.write(data[start : start + CHUNK_BYTES])
        file.flush()
        os.fsync(file.fileno())


def report(measured: dict[str, Measured]) -> None:
    def ratio(one: Measured, other: Measured) -> str:
        return f"{statistics.median(a / b for a, b in zip(one.seconds, other.seconds, strict=True)):.2f}"

    heads = f"{'median s':>10}{'min':>8}{'max':>8}{'MB':>10}{'MB/s':>8}{'/ plain':>9}{'/ Trainer':>11}{'peak MB':>9}"
    print(f"\n{'':24}{heads}")
    for name, one in measured.items():
        median = statistics.median(one.seconds)
        plain = ratio(one, measured[YARDSTICK[name]]) if name in YARDSTICK else "-"
        print(
            f"{name:24}{median:10.2f}{min(one.seconds):8.2f}{max(one.seconds):8.2f}{one.num_bytes / 1e6:10.1f}"
            f"{one.num_bytes / median / 1e6:8.0f}{plain:>9}{ratio(one, measured[STOCK]):>11}"
            f"{max(one.peak_bytes) / 1e6:9.1f}"
        )
    print("\nRatios are medians over the rounds of (time of the row / time of the yardstick in the same round).")


def train(options: argparse.Namespace) -> None:
    """Be one rank: train a step, measure, report."""
    import deepspeed
    import torch
    from demo_train import Counting, deepspeed_config
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

    class AtTheEnd(TrainerCallback):
        """Measures inside the training, where every object is as at a save."""

        def on_step_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
            control.should_save = False
            bench = Bench(trainer, options)
            bench.go()
            if bench.is_first:
                report(bench.measured)
                if options.json_path:
                    told = {name: vars(one) for name, one in bench.measured.items()}
                    options.json_path.write_text(json.dumps(told, indent=2) + "\n")

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
        deepspeed=deepspeed_config(options.stage),
        use_cpu=True,
        bf16=True,
        per_device_train_batch_size=1,
        max_steps=1,
        save_steps=1,
        disable_tqdm=True,
        report_to=[],
    )
    model = LlamaForCausalLM(config)
    if arguments.process_index == 0:
        numel = sum(param.numel() for param in model.parameters())
        print(f"{numel / 1e6:.1f} M params, ZeRO-{options.stage}, {arguments.world_size} ranks, in {options.work}")
    trainer = Trainer(model=model, args=arguments, train_dataset=Counting(), callbacks=[AtTheEnd()])
    trainer.train()
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--hidden-size", type=int, default=768, help="of the model (default: 768, with 12 layers 127 M)"
    )
    parser.add_argument("--num-layers", type=int, default=12, help="default: 12")
    parser.add_argument("--vocab-size", type=int, default=32_000, help="default: 32000")
    parser.add_argument("--stage", type=int, choices=[1, 2, 3], default=3, help="of ZeRO (default: 3)")
    parser.add_argument("--ranks", type=int, default=2, help="default: 2")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument("--work", type=Path, default=Path("bench-run/save"), help="default: ./bench-run/save")
    parser.add_argument("--json", type=Path, dest="json_path", help="write the single measurements to this file too")
    options = parser.parse_args()
    options.work = options.work.absolute()
    if "RANK" in os.environ:
        train(options)
        return
    if options.work.exists():
        parser.error(f"{options.work} exists; remove it first")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(options.ranks)]
    code = 1
    try:
        code = os.spawnv(os.P_WAIT, sys.executable, [*launch, *sys.argv])
    finally:
        shutil.rmtree(options.work, ignore_errors=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
