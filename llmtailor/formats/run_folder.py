"""A training run's folder: the ``checkpoint-N`` that the Trainer writes into it."""

from __future__ import annotations

from pathlib import Path

from llmtailor.codes import Code
from llmtailor.errors import SourceError
from llmtailor.formats.base import display_name
from llmtailor.formats.names import step_of


def list_checkpoints(run: Path) -> dict[int, Path]:
    """Return the checkpoint folders by step, whatever is in them. Raises SourceError if there is no such folder."""
    if not run.is_dir():
        raise SourceError.at(
            display_name(run), "there is no such folder", "name the folder that holds checkpoint-N", Code.NO_CHECKPOINT
        )
    folders = ((step_of(path), path) for path in run.iterdir())
    return {step: path for step, path in folders if step is not None and path.is_dir()}
