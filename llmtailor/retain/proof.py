"""The last check before anything is removed: can the step be composed from what stays, as ``merge`` would do it?"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from llmtailor.compose import plan_merge
from llmtailor.core.anatomy import Anatomy
from llmtailor.core.run import Assignment, RunCheckpoint, newest_resumable, sources_at, usable_at
from llmtailor.errors import Problem, TailorError, Unanswered, VerificationError
from llmtailor.formats.base import index_checkpoint
from llmtailor.recipe.parse import parse_recipe
from llmtailor.recipe.write import write_recipe
from llmtailor.runs import describe_checkpoint

_FIX = "this is a bug in llmtailor: please report it; nothing was removed"


def check_on_disk(promised: RunCheckpoint, anatomy: Anatomy) -> None:
    """Raise VerificationError if a checkpoint on the disk is not what was decided with."""
    found = describe_checkpoint(index_checkpoint(promised.path), anatomy)
    if found != promised or found.past != promised.past:
        raise VerificationError.at(promised.path, "it does not hold what was decided", _FIX)


def check_composable(run: Path, left: Iterable[RunCheckpoint], step: int, anatomy: Anatomy) -> None:
    """Plan the composite of a step from the checkpoints that will be left; nothing is written.

    Raises VerificationError, with every problem, if that can't be done.
    """
    usable = usable_at(left, step)
    sources, base = sources_at(usable, step, anatomy.parts), newest_resumable(usable)
    if sources is None or base is None:
        raise VerificationError.at(run, f"step {step} could not be composed any more", _FIX)
    title = f"step {step} after thinning"
    recipe = write_recipe(Assignment(base, sources, dict.fromkeys(sources, "newest"), title), anatomy, None)
    try:
        parsed = parse_recipe(recipe, name=title, folder=run, environ=os.environ)
        plan_merge(parsed, run / f".checkpoint-{step}.llmtailor-never-written")
    except Unanswered:
        raise
    except TailorError as error:
        raise VerificationError((*error.problems, Problem(str(run), f"step {step} can't be composed", _FIX))) from error
