"""Composes a step of a run, by default the newest; ``llmtailor merge --run`` does the same with more options."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.compose.plan import Options, plan_merge
from llmtailor.compose.readback import prove
from llmtailor.compose.report import Report
from llmtailor.compose.resume import choose_output, preview
from llmtailor.compose.write import write
from llmtailor.errors import DamagedSource, SourceError, TargetError
from llmtailor.formats.registry import index_checkpoint
from llmtailor.recipe.strategies import StrategyOptions
from llmtailor.runs.choose import choose_for_run
from llmtailor.runs.folder import RunFolder
from llmtailor.runs.scan import Index
from llmtailor.storage.local import absolute, as_path

logger = logging.getLogger(__name__)
T = TypeVar("T")
_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Newest:
    """The checkpoint with the newest state of a run."""

    path: Path
    step: int
    is_new: bool
    """Whether it was written now; otherwise it was there already"""


def merge_run(
    run: str | Path,
    out: str | Path | None = None,
    options: Options | None = None,
    *,
    at: int | None = None,
    strategy: str | StrategyOptions = "latest",
) -> Report:
    """Compose the newest state of a run's folder, as ``llmtailor merge --run`` does; return the report.

    Args:
        run: the run's folder.
        out: the folder to write. None: where a resume finds it, unless a checkpoint there has this state already; then
            nothing is written, and the report names that one.
        options: see `Options`. None keeps ranks, format and param groups of the run.
        at: the highest step to use; None for any.
        strategy: ``latest``, ``parity`` or ``filter``.

    Raises what `plan_merge` and `write` raise.
    """
    how = StrategyOptions(strategy) if isinstance(strategy, str) else strategy
    options = options or Options(reuse=out is None, step="auto")

    def compose(index: Index) -> Report:
        recipe, opened = choose_for_run(as_path(run), at, how, index=index)
        composition, there = plan_merge(recipe, out, options, opened), None
        if options.reuse:
            composition, there = choose_output(composition)
        if there is not None:
            return replace(composition.report, out=f"{there}")
        write(composition)
        return composition.report

    return without_damaged(compose)


def without_damaged(compose: Callable[[Index], T]) -> T:
    """Return what ``compose`` returns. If it finds that the bytes of a checkpoint are damaged, call it again without
    that one: an older state of the run is better than none.

    It gets what `scan_run` takes as ``index``. Raises what it raises for other reasons.
    """
    damaged: dict[Path, DamagedSource] = {}

    def index(path: Path) -> CheckpointIndex:
        if path in damaged:
            raise damaged[path]
        return index_checkpoint(path)

    while True:
        try:
            return compose(index)
        except DamagedSource as error:
            if not error.roots - damaged.keys():
                raise
            damaged |= dict.fromkeys(error.roots, error)


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

    Raises what `choose_for_run`, `plan_merge` and `write` raise.
    """
    run = absolute(run)
    if not any(RunFolder(folder).complete() for folder in (run, *also)):
        return None
    return without_damaged(partial(_compose_newest, run, world_size, also, waits))


def _compose_newest(run: Path, world_size: int | None, also: Sequence[Path], waits: bool, index: Index) -> Newest:
    options = Options(world_size=world_size, reuse=True, step="auto")
    while True:
        names = frozenset(run.iterdir())
        recipe, opened = choose_for_run(run, None, StrategyOptions("latest"), also=also, index=index)
        composition, there = choose_output(plan_merge(recipe, None, options, opened))
        while waits and there is None and names == frozenset(run.iterdir()):
            time.sleep(_POLL_S)
            composition, there = choose_output(composition)
        if not waits or there is not None:
            break  # otherwise the other process may have published between this one's scan and its choice of a name
    step = composition.report.global_step
    if there is not None:
        root = composition.indexes[composition.base].root if composition.is_copy else composition.out
        return Newest(root, step, False)
    for notice in composition.report.shown_notices:
        logger.warning("%s", notice)
    try:
        preview(composition)
    except TargetError as error:  # a merge of other saves, or for other ranks, that was killed and will not be resumed
        logger.warning("%s; it is discarded", error.problems[0].what)
        composition = replace(composition, options=replace(composition.options, restart=True))
    write(composition, notify=logger.info)
    return Newest(composition.out, step, True)


def prove_step(run: Path, step: int, index: Index = index_checkpoint, *, plans: bool = True) -> None:
    """Plan what ``llmtailor merge --run RUN --at STEP`` writes, and read its outline back. No state is read or written.

    Without ``plans``, only choose its sources and compare their indexes, which is several times faster.

    ``index`` is that of `scan_run`. Raises a TailorError with the reasons if the step can't be composed, and OSError.
    """
    recipe, opened = choose_for_run(run, step, StrategyOptions("latest"), index=index)
    if not plans and recipe.base is not None and opened.indexes[recipe.base].global_step == step:
        return
    # the output is a name only: the run may have a full checkpoint of the step
    composition = plan_merge(recipe, RunFolder(run).partial / f"composite-of-{step}", opened=opened)
    if composition.report.global_step != step:
        raise SourceError(recipe.notices)
    prove(composition)
