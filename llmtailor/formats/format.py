"""What a format of checkpoints is: a reader and a writer, and what they are given.

A reader goes from a folder to a `CheckpointIndex` with its `TrainState`. A writer goes from those of a base, and from
what is `Wanted`, to the layouts of files. A format is a folder beside this file; `formats.registry` lists them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from llmtailor.checkpoint.index import CheckpointIndex, Survey
from llmtailor.checkpoint.layout import FileLayout
from llmtailor.checkpoint.optimizer import OptimizerLayout
from llmtailor.containers.torch_zip import read_torch_file
from llmtailor.errors import Problem


@dataclass(frozen=True, slots=True)
class Decoded:
    """A stock file's object tree, as data."""

    tree: Any
    archive: str | None = None
    """The stem of the name that the file was saved under; None where that is not known"""


class Trees(Protocol):
    """Reads the stock files of one checkpoint."""

    @property
    def root(self) -> Path: ...

    @property
    def inside(self) -> Collection[str]:
        """Stock files, by relative path, that are no files of the folder."""
        ...

    def read(self, path: str, where: str) -> Decoded:
        """Decode a stock file; no tensor byte is read. Messages call it ``where``.

        Raises SourceError for what is missing or damaged, and UnsafePickle for names that are not on the allow-list.
        """
        ...


@dataclass(frozen=True, slots=True)
class FileTrees:
    """Stock files as stock software writes them."""

    root: Path
    inside: Collection[str] = ()

    def read(self, path: str, where: str) -> Decoded:
        file = read_torch_file(self.root, path, where)
        return Decoded(file.tree, file.archive)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a composite shall be where its base does not decide it."""

    layout: OptimizerLayout
    """Of the optimizer, with the step of each sub-group"""
    dtype: str | None = None
    """Of the weights, a safetensors dtype; None keeps the base's"""
    from_group: Sequence[int] | None = None
    """For each param group the base's whose place in the scheduler's lists it takes; None: they are the base's"""
    is_alone: bool = False
    """Whether nothing comes from another source than the base"""


class Reader(Protocol):
    """A module that reads one format."""

    def detects(self, root: Path) -> bool:
        """Whether a folder is, or was, a checkpoint of this format; `survey` says what it lacks."""
        ...

    def survey(self, root: Path, name: str) -> Survey:
        """Index what is left of a checkpoint, damaged or not; no tensor byte is read but those of each ``step``.

        Raises SourceError or UnsupportedCheckpoint for a folder that is no checkpoint of a kind that can be read.
        """
        ...


class Writer(Protocol):
    """A module that writes one format."""

    def check(self, dtype: str | None, allow_split: bool) -> None:
        """Raise MismatchError for what has no meaning in this format: a dtype of the weights, parts that are split."""
        ...

    def lay_out(self, base: CheckpointIndex, wanted: Wanted) -> tuple[list[FileLayout], list[Problem]]:
        """Return the layouts of all files but those of the tokenizer, after those of a base, and notices.

        Raises SourceError or UnsupportedCheckpoint for a base that has not all that the format needs.
        """
        ...
