"""From one checkpoint to a plain one, by the rooms' own functions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import llmtailor
from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.layout import FileLayout
from llmtailor.checkpoint.optimizer import lay_out_optimizer
from llmtailor.checkpoint.sources import Sources
from llmtailor.compose.fill import plan_composite
from llmtailor.compose.report import Report
from llmtailor.engine.copy import execute
from llmtailor.formats.registry import writer_of
from llmtailor.loaders.write import Wanted
from llmtailor.recipe.strategies import StrategyOptions
from llmtailor.runs.scan import choose_for_run


def compose(run: Path, at: int, ranks: int | None = None, out: Path | None = None) -> Report:
    recipe = choose_for_run(run, at, StrategyOptions("latest"))[0]
    return llmtailor.merge(recipe, out, llmtailor.Options(world_size=ranks))


def to_plain(base: CheckpointIndex, out: Path, world_size: int = 1) -> Path:
    """Write the plain checkpoint that holds what ``base`` does."""
    return convert(base, out, 0, world_size)


def to_zero(base: CheckpointIndex, out: Path, stage: int, world_size: int, precision: str) -> Path:
    """Write the ZeRO checkpoint that holds what a plain ``base`` does."""
    return convert(base, out, stage, world_size, precision)


def convert(base: CheckpointIndex, out: Path, stage: int, world_size: int, dtype: str | None = None) -> Path:
    numels = {name: param.numel for name, param in base.params.items()}
    layout = lay_out_optimizer(
        base.layout,
        numels,
        base.zero.settings,
        base.precision,
        world_size=world_size,
        stage=stage,
        groups=base.groups,
    )
    cut = tuple(replace(one, step=base.steps()[one.params[0]]) for one in layout.sub_groups)
    layouts, _ = writer_of("deepspeed" if stage else "trainer").lay_out(
        base, Wanted(replace(layout, sub_groups=cut), dtype)
    )
    write(layouts, base, out)
    return out


def write(layouts: list[FileLayout], base: CheckpointIndex, out: Path) -> None:
    names = {*base.params, *base.tied, *(state.param for state in base.held)}
    out.mkdir()
    execute(plan_composite(layouts, [base], Sources(dict.fromkeys(names, 0)), 0), out)
