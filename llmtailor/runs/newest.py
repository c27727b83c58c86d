"""The newest state of a run as one checkpoint, for what restarts a training by itself.

``llmtailor merge --run`` does the same, with more options.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmtailor.compose.plan import Options, plan_merge
from llmtailor.compose.write import preview, settle_output, write
from llmtailor.containers.json import read_json
from llmtailor.errors import TargetError
from llmtailor.formats.clients import TRAINER_STATE
from llmtailor.recipe.strategies import StrategyOptions
from llmtailor.runs.folder import RunFolder
from llmtailor.runs.scan import recipe_for_run

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Newest:
    """The checkpoint with the newest state of a run."""

    path: Path
    step: int
    is_new: bool
    """Whether it was written now; otherwise it was there already"""


def compose_newest(run: Path, world_size: int | None = None, also: Sequence[Path] = ()) -> Newest | None:
    """Compose the newest state of a run, unless a complete checkpoint has it.

    Args:
        run: the run's folder.
        world_size: the number of ranks that will resume. None keeps that of the newest save.
        also: staging folders of the run, see `RunFolder`.

    Returns None if the run has no complete partial checkpoint.

    Raises what `runs.scan.recipe_for_run`, `plan_merge` and `write` raise.
    """
    run = Path(os.path.abspath(run))
    if not any(RunFolder(folder).complete() for folder in (run, *also)):
        return None
    recipe = recipe_for_run(run, None, StrategyOptions("latest"), also=also)
    composition, there = settle_output(plan_merge(recipe, None, Options(world_size=world_size, reuse=True)))
    step = composition.report.global_step
    if there is not None:
        root = composition.indexes[composition.base].root if composition.is_copy else composition.out
        return Newest(root, step, False)
    for notice in composition.report.notices:
        logger.warning("%s", notice)
    try:
        preview(composition)
    except TargetError as error:  # a merge of other saves, or for other ranks, that was killed: nobody will resume it
        logger.warning("%s; it is discarded", error.problems[0].what)
        composition = replace(composition, options=replace(composition.options, restart=True))
    write(composition, notify=logger.info)
    return Newest(composition.out, step, True)


def continues(run: Path, checkpoint: Path) -> bool:
    """Return whether the newest recorded attempt of a run began from this checkpoint of the same run.

    A job that names it again is then a restart of that attempt, whose own saves are newer.
    Raises SourceError for a damaged record or a damaged ``trainer_state.json``.
    """
    attempts = RunFolder(run).attempts()
    state = checkpoint / TRAINER_STATE
    if not attempts or os.path.abspath(checkpoint.parent) != os.path.abspath(run) or not state.is_file():
        return False
    return read_json(state, str(state)).get("global_step") == attempts[-1].step
