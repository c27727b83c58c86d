"""The measurements of bench_save.sh: what saving costs a training, by several ways of saving, in alternation.

A Llama is trained with the Trainer, under ZeRO on two CPU ranks and then without DeepSpeed. In its first step, two
things are measured, in rounds; the order rotates with the rounds, ratios compare runs of the same round, and before
each run the disk has settled (sync).

One save, followed by a training step:

- a plain copy of the same states into memory that is in use already, which is the yardstick;
- a plain write of these states, with fsync, the yardstick for the disk;
- a background save, and one that stops training (background=False);
- ``torch.distributed.checkpoint.async_save`` of the same tensors, staged in shared memory by a thread, whose end is
  awaited before the optimizer's step;
- the Trainer's own save, which is not made durable.

Blocks of training steps with saves, which take turns with blocks without: at the disk's own speed with a save at every
step and at every fifth, and on a disk that is slowed down, to several steps for each save, with a save at every fifth.

With ``--every N``, there are only such blocks, with a save at every N-th step, and one, two or three saves in progress
at once (``in_flight``), at the disk's own speed and on a disk whose speed varies. Before, the CPU time of a save is
compared with that of a bare copy and write of the same bytes, while training stands still.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bench_save_runs import (
    ASYNC_SAVE,
    BACKGROUND,
    BARE,
    COPY,
    COST,
    EVERY_5TH,
    EVERY_STEP,
    MODES,
    NONE,
    SLOW_DISK,
    STOPPED,
    TRAINER,
    UNEVEN_DISK,
    WRITE,
    Bench,
)

os.environ |= {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
os.environ.setdefault("OMP_NUM_THREADS", "1")

MEANING = {
    COPY: "one pass over the states, into memory that is in use already: what a copy costs at least",
    WRITE: "one file of the same bytes per rank, with fsync, while training stands still: what a disk takes at least",
    BACKGROUND: "attach() as it is: copied until the next optimizer step, written while training continues",
    STOPPED: "the same files; training stands still until they are durable",
    ASYNC_SAVE: "torch.distributed.checkpoint of the same tensors; the optimizer's step waits for the staging",
    TRAINER: "a full checkpoint as the Trainer writes it, with weights; not made durable",
    NONE: "training steps alone",
    EVERY_STEP: "a save at every step; each waits for the one before",
    EVERY_5TH: "a save at every fifth step",
    SLOW_DISK: "each save takes {steps_per_write:g} steps to write; a save at every fifth step",
    COST: "a background save while training stands still: CPU time of all threads",
    BARE: "a thread copies and writes as many bytes, without anything else: the price of the bytes themselves",
    UNEVEN_DISK: "for as many steps as between two saves, a save would take 3 times as long to write; then 0.3 times",
}


Found = Mapping[str, list[dict[str, float]]]


def ratio(found: Found, name: str, other: str, key: str, per: str = "") -> str:
    """Return the median over the rounds of (this / the other), of amounts per byte if asked for."""
    ratios = [
        one[key] / two[key] * (two[per] / one[per] if per else 1)
        for one, two in zip(found[name], found[other], strict=True)
    ]
    return f"{statistics.median(ratios):.2f}"


def tell(found: Found, title: str, options: argparse.Namespace) -> None:
    """Print the tables."""
    if options.every:
        step, save = (statistics.median(one[key] for one in found[BACKGROUND]) for key in ("plain_s", "durable_s"))
        print(f"\n{title}: a step takes {step:.2f} s, a save is durable after {save:.2f} s")
        steps = options.every * median_of(found, "step", "cpu_s")
        for name in (COST, BARE):
            cpu = median_of(found, name, "cpu_s")
            print(f"{name}: {cpu:.3f} CPU s, {100 * cpu / steps:.1f} % of those of {options.every} steps")
        print(f"their ratio: {ratio(found, COST, BARE, 'cpu_s')}, median of {options.rounds} rounds")
    else:
        tell_saves(found, title, options)
    tell_blocks(found, title, options)


def median_of(found: Found, name: str, key: str) -> float:
    return statistics.median(one.get(key, float("nan")) for one in found[name])


def tell_saves(found: Found, title: str, options: argparse.Namespace) -> None:
    median = partial(median_of, found)
    print(f"\n{title}: one save and the step behind it, medians of {options.rounds} rounds")
    heads = ("MB", "stall s", "min", "/ copy", "CPU s", "/ copy", "step +s", "copied s", "GB/s", "durable s")
    print(f"{'':18}" + "".join(f"{head:>10}" for head in heads))
    step = median("step", "step_s")
    for name in (COPY, WRITE, *MODES, ASYNC_SAVE, TRAINER):
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


def tell_blocks(found: Found, title: str, options: argparse.Namespace) -> None:
    median = partial(median_of, found)

    def quiet(name: str) -> float:
        steps = (f"step {number}" for number in range(options.steps))
        return sum(min(one[step] for one in found[name]) for step in steps)

    runs = [name for name in found if name == NONE or ", every" in name]
    print(f"\n{title}: {options.steps} steps, medians of {options.blocks} rounds")
    heads = ("train s", "/ none", "quiet s", "/ none", "stalled s", "durable s", "CPU s", "/ none")
    print(f"{'':44}" + "".join(f"{head:>10}" for head in heads))
    cadences = [NONE, EVERY_STEP, EVERY_5TH, SLOW_DISK]
    for name in (
        runs if options.every else sorted(runs, key=lambda name: cadences.index(name.partition(", ")[2] or name))
    ):
        cells = [f"{median(name, 'train_s'):.2f}", ratio(found, name, NONE, "train_s")]
        cells += [f"{quiet(name):.2f}", f"{quiet(name) / quiet(NONE):.2f}"]
        cells += [f"{median(name, key):.2f}" for key in ("stalled_s", "durable_s", "cpu_s")]
        cells += [ratio(found, name, NONE, "cpu_s")]
        print(f"{name:44}" + "".join(f"{cell:>10}" for cell in cells))


def explain(options: argparse.Namespace) -> None:
    print("\nRows")
    for name, meaning in MEANING.items():
        print(f"  {name}: {meaning.format(**vars(options))}")
    print(
        """
Columns
  stall, stalled: how long training stood still, in the call and before the optimizer's step (slowest rank)
  / copy: the stall, or the CPU time, per byte as a multiple of the plain memory copy in the same round
  CPU s of one save: of the training's own thread, before the step; steadier than the stall on a busy machine
  step +s: how much longer the save and the step behind it took than a step alone, whatever the reason; on
    CUDA the only column with the optimizer's wait, which is on the device
  quiet s: each step of a block as fast as it was in any round, which leaves out what disturbs the machine now and then
  copied, GB/s: from the call until all states were in host memory, of all ranks together
  durable: from the call, or the first step, until everything was on disk, with fsync
  / none: time, or CPU time of all threads of all ranks, as a multiple of the same steps without saves"""
    )


def train(options: argparse.Namespace) -> None:
    """Be one rank: train a step, measure, report."""
    import torch

    sys.path.append(str(Path(__file__).parents[1] / "scripts"))
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
    parser.add_argument("--tokens", type=int, default=64, help="of a step on a rank (default: 64)")
    parser.add_argument(
        "--stages", type=int, nargs="+", choices=range(4), default=[3, 0], help="of ZeRO, 0: plain (default: 3 0)"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default: cpu")
    parser.add_argument("--ranks", type=int, default=2, help="default: 2")
    parser.add_argument("--policy", default="full", help="what the background saves hold (default: full)")
    parser.add_argument("--rounds", type=int, default=7, help="of single saves (default: 7)")
    parser.add_argument("--blocks", type=int, default=5, help="of training steps, for each cadence (default: 5)")
    parser.add_argument("--steps", type=int, default=10, help="in a block (default: 10)")
    parser.add_argument(
        "--steps-per-write", type=float, default=4.0, help="how long the slow disk takes for a save (default: 4 steps)"
    )
    parser.add_argument("--every", type=int, default=0, metavar="N", help="compare saves in flight, at every N-th step")
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
    environment = os.environ | {"DS_ACCELERATOR": options.device}
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
