"""From checkpoints to others: by a recipe in code, from a run's folder, and by the rooms' own functions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from llmtailor.recipe import Recipe, Select
from llmtailor.recipe.strategies import StrategyOptions
from llmtailor.runs.scan import choose_for_run

Taken = Mapping[str | int, Path]
"""Selector -> the checkpoint that what it names comes from"""


def recipe(base: Path, taken: Taken | None = None, dtype: str | None = None) -> Recipe:
    parts = tuple(Select(source, (str(selector),), "parts") for selector, source in (taken or {}).items())
    return Recipe("recipe", "", base, parts, dtype, None)


def merge(base: Path, out: Path, taken: Taken | None = None, *, dtype: str | None = None, **options: Any) -> Report:
    return llmtailor.merge(recipe(base, taken, dtype), out, llmtailor.Options(**options))


def convert(source: Path, out: Path, *, dtype: str | None = None, **options: Any) -> Path:
    merge(source, out, dtype=dtype, **options)
    return out


def convert_to_resume(source: Path, out: Path, **options: Any) -> Path:
    """Convert, and complete a trainer_state.json that had to be made, as a note says."""
    convert(source, out, **options)
    state = out / "trainer_state.json"
    if state.exists() and not (source / state.name).exists():
        state.write_text(json.dumps(json.loads(state.read_text()) | {"logging_steps": 1, "save_steps": 4}))
    return out


def compose(run: Path, at: int, ranks: int | None = None, out: Path | None = None) -> Report:
    """Do what ``llmtailor merge --run RUN --at STEP`` does."""
    chosen = choose_for_run(run, at, StrategyOptions("latest"))[0]
    return llmtailor.merge(chosen, out, llmtailor.Options(world_size=ranks))


def to_plain(base: CheckpointIndex, out: Path, world_size: int = 1) -> Path:
    """Write the plain checkpoint that holds what ``base`` does."""
    return _write(base, out, 0, world_size)


def to_zero(base: CheckpointIndex, out: Path, stage: int, world_size: int, precision: str) -> Path:
    """Write the ZeRO checkpoint that holds what a plain ``base`` does."""
    return _write(base, out, stage, world_size, precision)


def _write(base: CheckpointIndex, out: Path, stage: int, world_size: int, dtype: str | None = None) -> Path:
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
