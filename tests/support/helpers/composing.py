"""From checkpoints to others: by a recipe in code, from a run's folder, and by the rooms' own functions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import llmtailor
from llmtailor.compose.report import Report
from llmtailor.recipe import Recipe, Select
from llmtailor.recipe.strategies import StrategyOptions
from llmtailor.runs.choose import choose_for_run

Taken = Mapping[str | int, Path]
"""Selector -> the checkpoint that what it names comes from"""


def recipe(base: Path, taken: Taken | None = None, dtype: str | None = None) -> Recipe:
    parts = tuple(Select(source, (str(selector),), "parts") for selector, source in (taken or {}).items())
    return Recipe(name="recipe", base=base, rules=parts, dtype=dtype)


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


def compose(run: Path, at: int, ranks: int | None = None, out: Path | None = None, **options: Any) -> Report:
    """Do what ``llmtailor merge --run RUN --at STEP`` does."""
    chosen = choose_for_run(run, at, StrategyOptions("latest"))[0]
    return llmtailor.merge(chosen, out, llmtailor.Options(world_size=ranks, **options))
