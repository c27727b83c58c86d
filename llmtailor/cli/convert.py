"""``llmtailor convert``"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from llmtailor.cli.command import Command
from llmtailor.cli.options import PATH, target_options


@click.command(
    name="convert",
    cls=Command,
    exit_codes={
        0: "OUT is complete; with --dry-run: it fits",
        7: "the output did not read back as planned and was removed; OUT is absent",
        8: "also with --dry-run, if the output does not fit",
    },
)
@click.argument("checkpoint", type=PATH)
@click.argument("out", type=PATH, required=False)
@target_options
def command(checkpoint: Path, out: Path | None, **options: Any) -> None:
    """Convert CHECKPOINT to another number of GPUs, ZeRO stage or set of param groups, and write it to OUT.

    This is a merge with one source: every state is copied unchanged, in one pass, with flat memory. OUT defaults to
    CHECKPOINT-converted beside CHECKPOINT.

    \b
    Examples:
      llmtailor convert runs/x/checkpoint-400 runs/x-on-4/checkpoint-400 --num-gpu 4
      llmtailor convert runs/x/checkpoint-400 out/checkpoint-400 --stage 2 --num-gpu 16
      llmtailor convert runs/x/checkpoint-400 out/checkpoint-400 --groups layer
    """
    from llmtailor.cli.running import run_merge, take_target
    from llmtailor.recipe.recipe import Recipe

    target = take_target(options)
    base = checkpoint.absolute()
    out = out or base.with_name(f"{base.name}-converted")
    run_merge(Recipe(f"convert {checkpoint}", "", base, (), None, None), out, target)
