"""The setting with real files: DeepSpeed ZeRO-3 in bf16, savers of several policies, and ``llmtailor merge --run``.

All savers watch the same training; each writes to a folder of its own. Then the training fails, and goes on from the
composite of each.

    torchrun --nproc_per_node 1 -m study.zero3 CACHE SEEDS [POLICIES]
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch

from llmtailor.saving import saver_for
from study.run import Cells
from study.text import batch, digest, held_out
from study.train import BATCH, LENGTH, Size, new_model

NAME, SIZE, RATE = "zero3-bf16", Size(48, 6, 128), 2e-3
STEPS, EVERY, CRASH = 160, 8, 120
POLICIES = (
    *("full", "parity", "filter", "round_robin:4", "adaptive:0.5", "adaptive:0.25", "moments_in_turn:4", "rounded"),
)


class Engine:
    """A DeepSpeed engine that is trained like `study.train.Training`."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        model = new_model(SIZE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": True},
        }
        self.engine: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        self.seed = seed
        self._held_out = held_out("sources", 96, LENGTH).split(48)

    def run(self, begin: int, end: int, savers: tuple[Any, ...] = ()) -> None:
        for step in range(begin, end):
            rate = RATE * min(1.0, step / (0.05 * STEPS) + 1e-2) * 0.5 * (1 + math.cos(math.pi * step / STEPS))
            for group in self.engine.optimizer.param_groups:
                group["lr"] = rate
            tokens = batch("sources", BATCH, LENGTH, self.seed, step)
            self.engine.backward(self.engine(input_ids=tokens, labels=tokens).loss)
            self.engine.step()
            if (step + 1) % EVERY == 0:
                for saver in savers:
                    saver.save(step + 1)

    def loss(self) -> float:
        with torch.no_grad():
            losses = [self.engine(input_ids=one, labels=one).loss.item() for one in self._held_out]
        return math.fsum(losses) / len(losses)


def run_seed(seed: int, cells: Cells, policies: Sequence[str]) -> None:
    """Run the cells of a seed, unless they are all there."""
    text = digest("sources")
    cells.drop_others(text, NAME, seed)
    if all(cells.has(NAME, seed, policy) for policy in policies):
        return
    folder = Path(tempfile.mkdtemp())
    try:
        one = Engine(seed)
        runs = {policy: folder / str(number) for number, policy in enumerate(policies)}
        savers = {
            policy: saver_for(run, engine=one.engine, policy=policy, background=False) for policy, run in runs.items()
        }
        for saver in savers.values():
            saver.start(0)
        one.run(0, CRASH, tuple(savers.values()))
        now = one.loss()
        shares = {}
        for policy, saver in savers.items():
            saver.close()
            base, *others = (report.num_bytes for report in saver.reports())
            shares[policy] = fmean(others) / base
        one.run(CRASH, STEPS)
        end = one.loss()
        for policy, run in runs.items():
            subprocess.run([sys.executable, "-m", "llmtailor", "merge", "--run", run, "--quiet"], check=True)
            one.engine.load_checkpoint(str(run / f"checkpoint-{CRASH}"))
            cell: dict[str, Any] = {
                "setting": NAME,
                "seed": seed,
                "name": policy,
                "end": end,
                "text": text,
                "share": shares[policy],
                "now": {CRASH: one.loss() - now},
            }
            one.run(CRASH, STEPS)
            cell["gap"] = one.loss() - end
            cells.put(cell, NAME, seed, policy)
            print(NAME, seed, policy, cell["now"], f"{cell['gap']:+.4f}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    policies = sys.argv[3].split(",") if len(sys.argv) > 3 else POLICIES
    for seed in range(*map(int, sys.argv[2].split("-"))):
        run_seed(seed, Cells(Path(sys.argv[1])), policies)


if __name__ == "__main__":
    main()
