"""The interface of a checkpoint format: its reader, its writer, and their arguments.

A reader turns a folder into a `CheckpointIndex` with its `TrainState`. A writer turns the base's index, and what is
`Wanted`, into the layouts of files. Each format is a folder beside this file; `formats.registry` lists them.
"""

from __future__ import annotations

from typing import Protocol

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.layout import FileLayout
from llmtailor.errors import Problem
from llmtailor.loaders.write import Wanted


class Writer(Protocol):
    """A module that writes one format."""

    def check(self, dtype: str | None, allow_split: bool) -> None:
        """Raise MismatchError for what this format can't have: a dtype of the weights, split parts."""
        ...

    def lay_out(self, base: CheckpointIndex, wanted: Wanted) -> tuple[list[FileLayout], list[Problem]]:
        """Return the layouts of all files except the tokenizer's, based on a base's, and notices.

        Raises SourceError or UnsupportedCheckpoint for a base that lacks something that the format needs.
        """
        ...
