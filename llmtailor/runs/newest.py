"""The newest state of a run as one checkpoint, for what restarts a training by itself.

``llmtailor merge --run`` does the same, with more options.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmtailor.compose.plan import Options, plan_merge
from llmtailor.compose.write import preview, settle_output, write
from llmtailor.containers.json import read_json
from llmtailor.errors import TargetError
from llmtailor.findings import folded
from llmtailor.formats.clients import TRAINER_STATE
from llmtailor.recipe.strategies import StrategyOptions
from llmtailor.runs.folder import RunFolder
from llmtailor.runs.scan import choose_for_run

logger = logging.getLogger(__name__)
_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Newest:
    """The checkpoint with the newest state of a run."""

    path: Path
    step: int
    is_new: bool
    """Whether it was written now; otherwise it was there already"""


def compose_newest(
    run: Path, world_size: int | None = None, also: Sequence[Path] = (), *, waits: bool = False
) -> Newest | None:
    """Compose the newest state of a run, unless a complete checkpoint has it.

    Args:
        run: the run's folder.
        world_size: the number of ranks that will resume. None keeps that of the newest save.
        also: staging folders of the run, see `RunFolder`.
        waits: whether another process composes it, for which this one waits without a limit.

    Returns None if the run has no complete partial checkpoint.

    Raises what `runs.scan.choose_for_run`, `plan_merge` and `write` raise.
    """
    run = Path(os.path.abspath(run))
    if not any(RunFolder(folder).complete() for folder in (run, *also)):
        return None
    recipe, opened = choose_for_run(run, None, StrategyOptions("latest"), also=also)
    options = Options(world_size=world_size, reuse=True)
    composition, there = settle_output(plan_merge(recipe, None, options, opened))
    step = composition.report.global_step
    while waits and there is None:
        time.sleep(_POLL_S)
        composition, there = settle_output(composition)
    if there is not None:
        root = composition.indexes[composition.base].root if composition.is_copy else composition.out
        return Newest(root, step, False)
    for notice in folded(composition.report.notices):
        logger.warning("%s", notice)
    try:
        preview(composition)
    except TargetError as error:  # a merge of other saves, or for other ranks, that was killed: nobody will resume it
        logger.warning("%s; it is discarded", error.problems[0].what)
        composition = replace(composition, options=replace(composition.options, restart=True))
    write(composition, notify=logger.info)
    return Newest(composition.out, step, True)


def continues(run: Path, checkpoint: Path) -> bool:
    """Return whether the newest recorded attempt of a run goes back to this checkpoint of the same run.

    A job that names it again is then a restart, perhaps not the first one: later attempts began from newer states.
    Raises SourceError for a damaged record or a damaged ``trainer_state.json``.
    """
    attempts = RunFolder(run).attempts()
    state = checkpoint / TRAINER_STATE
    if not attempts or os.path.abspath(checkpoint.parent) != os.path.abspath(run) or not state.is_file():
        return False
    step = read_json(state, str(state)).get("global_step")
    if not isinstance(step, int):
        return False
    # an attempt from a later step went on from what the one before had saved
    return next((one.step for one in reversed(attempts) if one.step <= step), None) == step
