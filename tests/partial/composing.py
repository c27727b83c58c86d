"""From a run's folder to a complete checkpoint, as ``llmtailor merge --run`` does it."""

from __future__ import annotations

from pathlib import Path

import llmtailor
from llmtailor.compose.report import Report
from llmtailor.recipe.strategies import StrategyOptions
from llmtailor.runs.scan import choose_for_run


def compose(run: Path, at: int, ranks: int | None = None, out: Path | None = None) -> Report:
    recipe = choose_for_run(run, at, StrategyOptions("latest"))[0]
    return llmtailor.merge(recipe, out, llmtailor.Options(world_size=ranks))
