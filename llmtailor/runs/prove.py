"""Whether a step of a run can be composed, before anybody needs it: what a saver asks after its first save."""

from __future__ import annotations

from pathlib import Path

from llmtailor.compose.plan import plan_merge
from llmtailor.compose.prove import prove
from llmtailor.errors import SourceError
from llmtailor.recipe.strategies import StrategyOptions
from llmtailor.runs.folder import RunFolder
from llmtailor.runs.scan import choose_for_run


def prove_step(run: Path, step: int) -> None:
    """Plan what ``llmtailor merge --run RUN --at STEP`` writes, and read its outline back. No state is read or written.

    Raises a TailorError with the reasons if the step can't be composed, and OSError.
    """
    recipe, opened = choose_for_run(run, step, StrategyOptions("latest"))
    # the output is a name only: the run may have a full checkpoint of the step
    composition = plan_merge(recipe, RunFolder(run).partial / f"composite-of-{step}", opened=opened)
    if composition.report.global_step != step:
        raise SourceError(recipe.notices)
    prove(composition)
