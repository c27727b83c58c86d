"""Takes the optimizer out of a full checkpoint: a folder of links to what is left takes its place at once.

How old the parts of what can be composed are, now and afterwards. Pure.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.containers.safetensors import read_weights
from llmtailor.errors import VerificationError
from llmtailor.formats.trainer import OPTIMIZER, SCALER, SCHEDULER
from llmtailor.formats.zero.files import LATEST
from llmtailor.recipe.candidates import RunCheckpoint, sources_at
from llmtailor.runs.folder import link_or_copy, sync
from llmtailor.runs.places import making, old, remove_replaced
from llmtailor.runs.to_partial import check_unchanged
from llmtailor.storage.local import replace_folder

_OF_A_RESUME = re.compile(r"rng_state(_\d+)?\.pth|zero_to_\w+\.py")


def is_kept(path: str) -> bool:
    """Whether a file of a full checkpoint stays when its optimizer goes: all that is no state of a resume."""
    return "/" not in path and path not in (LATEST, OPTIMIZER, SCHEDULER, SCALER) and not _OF_A_RESUME.fullmatch(path)


def reduce_to_weights(index: CheckpointIndex) -> None:
    """Replace a full checkpoint by one without the optimizer's states; nothing is copied where files can be linked.

    Raises VerificationError if the weights don't read back, SourceError if it changes meanwhile, or OSError. It is
    whole until it is replaced.
    """
    root = index.root
    staging = making(root)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    for path in index.files:
        if is_kept(path):
            link_or_copy(root / path, staging / path)
    sync(staging)
    if read_weights(staging, index.name) != read_weights(root, index.name):
        raise VerificationError.at(index.name, "its weights would not be there any more", "report this bug")
    check_unchanged(index)
    replace_folder(staging, root, old(root))
    sync(root.parent)
    remove_replaced(root, now_at=staging if staging.exists() else old(root))


@dataclass(frozen=True, slots=True)
class Age:
    """The oldest parts of the composite of a step."""

    steps_back: int
    """How many steps before it they were saved; 0 if all are of that step"""
    parts: tuple[str, ...]
    """Which they are; empty if all are of that step"""


@dataclass(frozen=True, slots=True)
class StepAge:
    """A step that stays composable."""

    step: int
    now: Age | None
    """None if it can't be composed now"""
    afterwards: Age


def compare_ages(
    before: Sequence[RunCheckpoint], after: Sequence[RunCheckpoint], steps: Iterable[int], parts: Sequence[str]
) -> tuple[StepAge, ...]:
    """Say of each step that can be composed of what is left how old its parts will be, and are."""
    found = ((step, _age(before, step, parts), _age(after, step, parts)) for step in steps)
    return tuple(StepAge(step, now, afterwards) for step, now, afterwards in found if afterwards is not None)


def _age(checkpoints: Sequence[RunCheckpoint], step: int, parts: Sequence[str]) -> Age | None:
    sources = sources_at(checkpoints, step, parts)
    if sources is None:
        return None
    back = {part: step - sources[part].step_of(part) for part in parts}
    most = max(0, *back.values())
    return Age(most, tuple(part for part in parts if most and back[part] == most))
