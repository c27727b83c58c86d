"""A pytest plugin for DeepSpeed's tests: `save_checkpoint` leaves what `llmtailor convert` makes of the checkpoint.

It is converted to another number of ranks and back. `convert --to universal` takes the place of ds_to_universal.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed.comm as dist
import pytest
from deepspeed.checkpoint import ds_to_universal
from deepspeed.runtime.engine import DeepSpeedEngine

from peers import seam

multiprocessing.set_forkserver_preload([__name__])  # the tests' ranks are forked from this server: patch it too


stock_save = DeepSpeedEngine.save_checkpoint


def save_checkpoint(self: DeepSpeedEngine, save_dir: str, tag: str | None = None, **options: Any) -> Any:
    result = stock_save(self, save_dir, tag=tag, **options)
    dist.barrier()
    try:
        if dist.get_rank() == 0:
            ranks, tag = dist.get_world_size(), tag or Path(save_dir, "latest").read_text()
            saved = Path(save_dir, tag)
            seam.convert(saved, saved, ("--num-gpu", ranks + 1), ("--num-gpu", ranks), tag=tag)
    finally:
        dist.barrier()
    return result


def to_universal(args: SimpleNamespace) -> None:
    source = Path(args.input_folder)
    seam.convert(source, Path(args.output_folder), ("--to", "universal"), tag=f"{source.name}_universal")


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Make DeepSpeed's distributed fixtures fixtures: pytest 8.4 and later don't know the attribute that marks them."""
    for name, made in list(vars(collector.obj).items()) if isinstance(collector, pytest.Module) else ():
        if isinstance(made, type) and getattr(made, "is_dist_fixture", False) and made.world_size:
            function = pytest.fixture(name=name)(lambda request, made=made: made()(request))
            setattr(collector.obj, f"{name}_fixture", function)  # the ranks look for the class by its name


DeepSpeedEngine.save_checkpoint = save_checkpoint
ds_to_universal.main = to_universal
