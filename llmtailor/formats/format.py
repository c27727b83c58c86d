"""The interface of a checkpoint format: its reader, its writer, and their arguments.

A reader turns a folder into a `CheckpointIndex` with its `TrainState`. A writer turns the base's index, and what is
`Wanted`, into the layouts of files. Each format is a folder beside this file; `formats.registry` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from llmtailor.checkpoint.index import TRAINER, CheckpointIndex, Survey
from llmtailor.checkpoint.layout import FileLayout
from llmtailor.checkpoint.optimizer import OptimizerLayout
from llmtailor.containers.torch_alike import open_torch_file
from llmtailor.containers.torch_zip import read_torch_file
from llmtailor.errors import Problem, Problems, SourceError


@dataclass(frozen=True, slots=True)
class Decoded:
    """A stock file's object tree, as data."""

    tree: Any
    archive: str | None = None
    """The stem of the file's name when it was saved; None if unknown"""


@dataclass(frozen=True, slots=True)
class Opened:
    """A stock file that is not decoded yet."""

    decode: Callable[[], Decoded]
    """Raises what `Trees.read` raises"""
    archive: str | None = None
    """See `Decoded.archive`"""
    key: bytes | None = None
    """Equal for files that differ in their names only, or in tensors of more than 8 bytes; None if that is unknown"""


class Trees(Protocol):
    """A reader of one checkpoint's stock files."""

    @property
    def root(self) -> Path: ...

    @property
    def inside(self) -> Collection[str]:
        """Stock files, by relative path, that are not files of the folder"""
        ...

    def read(self, path: str, where: str) -> Decoded:
        """Decode a stock file; no tensor byte is read. Messages call it ``where``.

        Raises SourceError for missing or damaged files, and UnsafePickle for names that are not on the allow-list.
        """
        ...

    def open(self, path: str, where: str) -> Opened:
        """Read a stock file as far as needed to tell whether it is like another one. Raises what `read` raises."""
        ...


@dataclass(frozen=True, slots=True)
class FileTrees:
    """A reader of stock files as stock software writes them."""

    root: Path
    inside: Collection[str] = ()

    def read(self, path: str, where: str) -> Decoded:
        file = read_torch_file(self.root, path, where)
        return Decoded(file.tree, file.archive)

    def open(self, path: str, where: str) -> Opened:
        file = open_torch_file(self.root, path, where)

        def decode() -> Decoded:
            decoded = file.decode()
            return Decoded(decoded.tree, decoded.archive)

        return Opened(decode, file.archive, file.key)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The properties of a composite that its base does not decide."""

    layout: OptimizerLayout
    """The optimizer's layout, with the step of each sub-group"""
    dtype: str | None = None
    """The weights' safetensors dtype; None keeps the base's"""
    from_group: Sequence[int] | None = None
    """For each param group, the base's group whose place in the scheduler's lists it takes; None keeps the base's"""
    is_alone: bool = False
    """Whether the base is the only source"""
    client: str = TRAINER
    """Whose loader will resume from it; see `formats.clients`"""


_Result = TypeVar("_Result")


def attempt(call: Callable[[], _Result], problems: Problems) -> _Result | None:
    """Return the result of a call; add errors about the checkpoint to ``problems``, and raise all others."""
    try:
        return call()
    except SourceError as error:
        problems.add(error)
        return None


class Reader(Protocol):
    """A module that reads one format."""

    def detects(self, root: Path) -> bool:
        """Return whether a folder is, or was, a checkpoint of this format; `survey` reports what is missing."""
        ...

    def survey(self, root: Path, name: str, client: str | None = None) -> Survey:
        """Index what is left of a checkpoint, damaged or not; only the tensor bytes of each ``step`` are read.

        ``client`` is whose loader it is judged by; None for the one that its files say.

        Raises SourceError or UnsupportedCheckpoint for a folder that is not a readable checkpoint.
        """
        ...


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
