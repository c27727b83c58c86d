"""Small checkpoints without DeepSpeed, and ways to damage them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from synthetic import SHAPES, Shape, lay_out, make_checkpoint, pickled_as_deepspeed

SMALL = replace(
    SHAPES["tiny"], vocab_size=11, hidden_size=6, intermediate_size=10, num_heads=2, num_kv_heads=1, head_dim=3
)
"""Sizes that 2 and 3 do not divide, so that there is padding."""


def make(
    root: Path,
    step: int,
    *,
    shape: Shape = SMALL,
    world_size: int = 2,
    groups: str = "default",
    sub_group_size: int = 10**9,
    shard_bytes: int = 10**9,
) -> Path:
    """Make ``root/checkpoint-STEP``: a copy, unless it is large, as most tests want the same few."""
    path, layout = root / f"checkpoint-{step}", (shape, world_size, groups, sub_group_size)
    if shape.vocab_size * shape.hidden_size > 10_000:
        make_checkpoint(path, shape, lay_out(*layout), step, shard_bytes=shard_bytes)
    else:
        shutil.copytree(_made(layout, step, shard_bytes), path, copy_function=shutil.copyfile)
    return path


def make_run(run: Path, steps: Iterable[int] = (100, 200, 300), **layout: Any) -> Path:
    """Make checkpoints of several steps; return the run's folder."""
    for step in steps:
        make(run, step, **layout)
    return run


def copied(run: Path, to: Path, steps: Iterable[int] = (4, 6)) -> Path:
    """Copy some checkpoints of a finished training, to be changed."""
    for step in steps:
        shutil.copytree(run / f"checkpoint-{step}", to / f"checkpoint-{step}")
    return to


@cache
def _made(layout: tuple[Shape, int, str, int], step: int, shard_bytes: int) -> Path:
    path = Path(tempfile.mkdtemp(dir=made_folder().name)) / "checkpoint"
    make_checkpoint(path, layout[0], lay_out(*layout), step, shard_bytes=shard_bytes)
    return path


@cache
def made_folder() -> tempfile.TemporaryDirectory[str]:
    """Removed when this process ends"""
    return tempfile.TemporaryDirectory(prefix="llmtailor-tests-")


def optim_states(checkpoint: Path, rank: int = 0) -> Path:
    (path,) = checkpoint.glob(f"global_step*/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return path


def model_states(checkpoint: Path, rank: int = 0) -> Path:
    (path,) = checkpoint.glob(f"global_step*/zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    return path


def load(path: Path) -> Any:
    """Load a torch file with stand-ins for DeepSpeed's classes."""
    with pickled_as_deepspeed():
        return torch.load(path, weights_only=False)


def edit(path: Path, change: Callable[[Any], None]) -> None:
    """Load a torch file, change the tree in place and save it again."""
    with pickled_as_deepspeed():
        tree = torch.load(path, weights_only=False)
        change(tree)
        torch.save(tree, path)


def copy_of_partial(run: Path, folder: Path) -> Path:
    shutil.copytree(run / "partial", folder / "partial")
    return folder
