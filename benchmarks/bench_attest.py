"""What attesting a resume costs, compared with loading the checkpoint and with one read of its states.

    python benchmarks/bench_attest.py --hidden-size 512 --num-layers 8

One process, a Llama with AdamW in fp32, saved in the Trainer's files. Each round, in rotating order: load (weights and
optimizer, as the Trainer does), one read of all states into a buffer that is reused, and attesting a sample and every
byte. The buffer's size decides what a read costs, because a small one stays in the processor's cache: "read 1 MB" and
"read", with the size that attesting reads at once. Times and CPU times are medians; ratios compare runs of the same
round; the peak is how far the process's memory grows. Files are in the page cache. ``--cold`` empties it before each
load and each read, as after a restart; attesting then runs right after a load, as it does in a resume.

The fixed cost of attesting, which the index of the checkpoint has, is that of a sample of a tiny model.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
os.environ.setdefault("OMP_NUM_THREADS", "1")

LOAD, READ, READ_1M, SAMPLE, FULL = "load", "read", "read 1 MB", "sample", "full"
FILES = ("model.safetensors", "optimizer.pt")


def peak_mb() -> float:
    """Return the peak of resident memory since `forget_peak`, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1e3


def forget_peak() -> None:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def measure(call: Callable[[], object]) -> dict[str, float]:
    forget_peak()
    before, began, cpu = peak_mb(), time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    call()
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = time.perf_counter() - began
    return {
        "s": seconds,
        "cpu_s": used.ru_utime + used.ru_stime - cpu.ru_utime - cpu.ru_stime,
        "mb": peak_mb() - before,
    }


def read_all(folder: Path, num_bytes: int) -> None:
    room = memoryview(bytearray(num_bytes))
    for name in FILES:
        with (folder / name).open("rb", buffering=0) as file:
            while file.readinto(room):
                pass


def forget_pages(folder: Path) -> None:
    os.sync()
    for name in FILES:
        with (folder / name).open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def make(folder: Path, options: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Train one step, save as the Trainer does, and return model, optimizer and scheduler."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    config = LlamaConfig(
        vocab_size=options.vocab_size,
        hidden_size=options.hidden_size,
        intermediate_size=options.hidden_size * 8 // 3,
        num_hidden_layers=options.num_layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    tokens = torch.arange(64) % options.vocab_size
    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, max_steps=1, save_steps=1, per_device_train_batch_size=1, report_to=[],
        disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=[{"input_ids": tokens, "labels": tokens}] * 4)
    trainer.train()
    return trainer.model, trainer.optimizer, trainer.lr_scheduler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=512, help="of the model (default: 512)")
    parser.add_argument("--num-layers", type=int, default=8, help="default: 8")
    parser.add_argument("--vocab-size", type=int, default=16_000, help="default: 16000")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument("--cold", action="store_true", help="empty the page cache before each load and read")
    parser.add_argument("--work", type=Path, help="where to work (default: a temporary folder)")
    options = parser.parse_args()

    import torch
    from safetensors.torch import load_file

    import llmtailor
    from llmtailor.attestation.compare import READ_BYTES

    work = Path(tempfile.mkdtemp(prefix="bench-attest-", dir=options.work))
    model, optimizer, scheduler = make(work, options)
    folder = work / "checkpoint-1"
    num_bytes = sum((folder / name).stat().st_size for name in FILES)
    numel = sum(param.numel() for param in model.parameters())
    num_states = 3 * len([*model.parameters()])

    def load() -> None:
        model.load_state_dict(load_file(folder / FILES[0]))
        optimizer.load_state_dict(torch.load(folder / FILES[1], weights_only=True))

    def attest(how: Any) -> None:
        found = llmtailor.attest(folder, model=model, optimizer=optimizer, scheduler=scheduler, how=how)
        assert found.is_same and found.num_states == num_states, found

    runs: dict[str, Callable[[], object]] = {
        LOAD: load,
        READ: lambda: read_all(folder, READ_BYTES),
        READ_1M: lambda: read_all(folder, 1 << 20),
        SAMPLE: lambda: attest(SAMPLE),
        FULL: lambda: attest(FULL),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    names = [*runs]
    try:
        for name in names:  # imports, and pages of the files
            runs[name]()
        for number in range(options.rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                if options.cold and name in (LOAD, READ, READ_1M):
                    forget_pages(folder)
                elif options.cold:
                    load()
                found[name].append(measure(runs[name]))
    finally:
        shutil.rmtree(work)

    def ratio(name: str, other: str, key: str) -> str:
        pairs = zip(found[name], found[other], strict=True)
        return f"{statistics.median(one[key] / max(two[key], 1e-9) for one, two in pairs):.3f}"

    print(f"{numel / 1e6:.1f} M params, {num_states} states, {num_bytes / 1e6:.0f} MB, {options.rounds} rounds")
    heads = ("s", "CPU s", "s / load", "CPU / load", "s / read", "CPU / read", "CPU / 1 MB", "peak MB")
    print(f"{'':10}" + "".join(f"{head:>12}" for head in heads))
    for name, ones in found.items():
        cells = [f"{statistics.median(one[key] for one in ones):.3f}" for key in ("s", "cpu_s")]
        cells += [ratio(name, other, key) for other in (LOAD, READ) for key in ("s", "cpu_s")]
        cells += [ratio(name, READ_1M, "cpu_s")]
        cells += [f"{max(one['mb'] for one in ones):.0f}"]
        print(f"{name:10}" + "".join(f"{cell:>12}" for cell in cells))


if __name__ == "__main__":
    main()
