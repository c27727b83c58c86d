"""What the processes of a training do that is given specs; see `real.harness.train`."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch.distributed as dist


def train_each(specs_file: Path, folder: Path, kind: type, run: Callable[[Any, Path], dict[int, float]]) -> None:
    """Train one spec after another, and leave the losses of each where `real.harness.Run` finds them."""
    deepspeed.init_distributed("gloo")
    for spec in (kind(**data) for data in json.loads(specs_file.read_text())):
        losses = run(spec, folder)
        if dist.get_rank() == 0:
            (folder / spec.name).mkdir(exist_ok=True)
            (folder / spec.name / "result.json").write_text(json.dumps(losses))
            print(f"=== {spec.name}: {losses}", flush=True)
        gc.collect()
        gc.freeze()
    dist.barrier()
