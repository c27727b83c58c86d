"""The way in: what a folder holds, whatever its format."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

from llmtailor.checkpoint.index import CheckpointIndex, Survey
from llmtailor.codes import Code
from llmtailor.containers.json import read_json
from llmtailor.errors import (
    PathIn,
    Problems,
    SourceError,
    printable,
)
from llmtailor.findings import NOTE, Finding
from llmtailor.formats.manifest import read_part_steps
from llmtailor.formats.partial.index import index_partial
from llmtailor.formats.partial.read import looks_partial
from llmtailor.formats.plain.read import is_plain, survey_plain
from llmtailor.formats.trainer import CONFIG
from llmtailor.formats.zero.common import attempt
from llmtailor.formats.zero.read import survey_deepspeed
from llmtailor.model.find_parts import dissect_model
from llmtailor.model.parts import Anatomy
from llmtailor.model.states import WEIGHT
from llmtailor.timing import Stopwatch

logger = logging.getLogger(__name__)
_SHOWN = 3


def index_checkpoint(root: Path, name: str | None = None) -> CheckpointIndex:
    """Index the checkpoint in a folder; messages call it ``name``.

    Raises SourceError for one that is missing or damaged, UnsupportedCheckpoint for a kind that can't be read.
    """
    return survey_checkpoint(root, name).sound_index()


def survey_checkpoint(root: Path, name: str | None = None) -> Survey:
    """Index what is left of a checkpoint, damaged or not, and tell of all damage.

    Raises SourceError or UnsupportedCheckpoint for a folder that is no checkpoint of a kind that can be read.
    """
    name, watch = name or display_name(root), Stopwatch()
    try:
        if looks_partial(root):
            survey = _survey_partial(root, name)
        else:
            survey = survey_plain(root, name) if is_plain(root) else survey_deepspeed(root, name)
        steps = attempt(lambda: read_part_steps(root, name), survey.problems)
        if survey.index is None:
            logger.info("%s can't be indexed", name)
            return survey
        about = (survey.index.format, survey.index.global_step, survey.index.world_size, len(survey.index.files))
        logger.info("indexed %s in %s: %s, step %d, %d ranks, %d files", name, watch.lap(), *about)
        findings = (*survey.index.findings, *_links_outside(survey.index))
        return replace(survey, index=replace(survey.index, part_steps=steps or {}, findings=findings))
    except OSError as error:
        mend = "run as a user who may read the checkpoint" if isinstance(error, PermissionError) else "check the disk"
        raise SourceError.at(
            name, f"can't read {error.filename}: {error.strerror or error}", mend, Code.FILE_UNREADABLE
        ) from error


def _survey_partial(root: Path, name: str) -> Survey:
    problems = Problems()
    index = attempt(lambda: index_partial(root, name, lambda *at: survey_deepspeed(*at).sound_index()), problems)
    return Survey(index, problems)


def _links_outside(index: CheckpointIndex) -> list[Finding]:
    """Tell of symbolic links that lead out of the folder. They are followed: a Hub cache consists of them."""
    inside = index.root.resolve()
    paths = dict.fromkeys([*index.files, *filter(None, [index.tag])])
    links = [path for path in paths if (index.root / path).is_symlink()]
    outside = [path for path in links if not (index.root / path).resolve().is_relative_to(inside)]
    if not outside:
        return []
    what = f"{len(outside)} of its files are symbolic links out of the folder: {', '.join(outside[:_SHOWN])}"
    return [
        Finding(
            index.name,
            what,
            "look where they lead if you did not make them: a composite gets copies",
            Code.LINKS_OUTSIDE,
            NOTE,
        )
    ]


def display_name(path: Path) -> str:
    """Return a path as messages show it: relative to the current folder where that is shorter."""
    absolute = os.path.abspath(path)
    relative = os.path.relpath(absolute)
    return printable(relative if len(relative) < len(absolute) and not relative.startswith("../..") else absolute)


def dissect_checkpoint(index: CheckpointIndex) -> Anatomy:
    """Return the parts of the model in a checkpoint."""
    numels = {name: param.numel for name, param in index.params.items()}
    numels |= {state.param: held.numel for state, held in index.held.items() if state.kind == WEIGHT}
    config = read_json(index.root / CONFIG, PathIn(index.name, CONFIG)) if CONFIG in index.files else None
    return dissect_model([*numels, *index.tied], dict(index.tied), numels, config)


def absent_parts(index: CheckpointIndex, anatomy: Anatomy) -> frozenset[str]:
    """Return the parts that a partial checkpoint has left out, if only some state of them."""
    return frozenset(anatomy.part_of[state.param] for state, held in index.held.items() if not held.is_here)
