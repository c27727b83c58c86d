"""The interface of a checkpoint format: its reader, its writer, and their arguments.

A reader turns a folder into a `Draft` of a `CheckpointIndex`. `finish` does the rest, which is the same for all
formats: the framework's files enter the index and are compared with it. A writer turns the base's index, and what is
`Wanted`, into the layouts of files. `formats.registry` lists both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from llmtailor.checkpoint.index import CheckpointIndex, PartSteps, Survey
from llmtailor.checkpoint.layout import FileLayout
from llmtailor.checkpoint.wanted import Wanted
from llmtailor.codes import Code
from llmtailor.errors import PathIn, Problem, Problems, attempt
from llmtailor.findings import NOTE, Finding
from llmtailor.formats.composite import read_part_steps
from llmtailor.frameworks.read import TrainerFiles
from llmtailor.frameworks.rng import find_lost_rng
from llmtailor.frameworks.scheduler import compare_scheduler

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Draft:
    """What a reader has found; `finish` does the rest."""

    problems: Problems
    """All reasons to refuse the checkpoint as a source; `finish` adds more"""
    index: CheckpointIndex | None = None
    """Of the files with states; None if damage hides where they are. Its findings are the reader's."""
    trainer: TrainerFiles | None = None
    """The framework's files; None for a folder without any"""
    check: Callable[[CheckpointIndex], Iterable[Finding]] = lambda index: ()
    """The format's own checks, once the framework's files are in the index. May raise SourceError."""


class Reader(Protocol):
    """A module that reads one format. That of a format with one safetensors file, without an optimizer, would be::

        def detects(root: Path) -> bool:
            return (root / "all.safetensors").is_file()

        def read(root: Path, name: str, framework: str | None = None) -> Draft:
            problems = Problems()
            where = PathIn(name, "all.safetensors")
            file = attempt(lambda: read_header(root, where.path, where), problems)  # places, no values
            if file is None:
                return Draft(problems)  # the damage is all that is known
            index = CheckpointIndex(
                root=root,
                name=name,
                form=Form("all"),
                held={State(param, MASTER): entry for param, entry in file.tensors.items()},
                ...
            )
            return Draft(problems, index)

    `finish` is called next. `registry.READERS` lists the module.
    """

    def detects(self, root: Path) -> bool:
        """Return whether a folder is, or was, a checkpoint of this format; `read` reports what is missing."""

    def read(self, root: Path, name: str, framework: str | None = None) -> Draft:
        """Read what is left of a checkpoint, damaged or not; only the tensor bytes of each ``step`` are read.

        ``framework`` is the one to judge it by; None uses the one that its files indicate.

        Raises SourceError or UnsupportedCheckpoint for a folder that is not a readable checkpoint.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """What writes one format. That of the example of `Reader` would be::

        def lay_out(base: CheckpointIndex, wanted: Wanted) -> tuple[list[FileLayout], list[Problem]]:
            filled = {name: (State(name, MASTER), 0) for name in base.params}  # what fills each tensor
            tensors = {name: TensorEntry("F32", param.shape, Absent()) for name, param in base.params.items()}
            return [lay_out_weights(WeightFile("all.safetensors", tensors, {}, filled), wanted.dtype)], []

        WRITER = Writer(lay_out=lay_out)

    The planner replaces each state by bytes of a source; a writer reads and writes none. `registry` lists it.
    """

    lay_out: Callable[[CheckpointIndex, Wanted], tuple[list[FileLayout], list[Problem]]]
    """Returns the layouts of all files except the tokenizer's, based on a base's, and notices. Raises SourceError,
    UnsupportedCheckpoint or MismatchError for a base that lacks something that the format needs, or can't be stored in
    it."""
    weights_folder: str = ""
    """The folder with weights alone, if they are in one"""
    lay_out_weights: Callable[[CheckpointIndex], list[FileLayout]] | None = None
    """Returns the files with the weights alone, of a format that has them in the files of the optimizer's states"""
    has_linkable_files: Callable[[CheckpointIndex], bool] = lambda index: False
    """Returns whether a composite can have hard links to a checkpoint's files with the optimizer's states"""
    check_linkable: Callable[[CheckpointIndex], None] = lambda index: None
    """Raises UnsupportedCheckpoint for a checkpoint with such files whose states can't be stored again"""


def finish(draft: Draft, root: Path, name: str) -> Survey:
    """Return the index with the framework's files, the steps of a composite's parts, and all findings."""
    steps = attempt(lambda: read_part_steps(root, name), draft.problems)
    if draft.index is None:
        return Survey(None, draft.problems)
    index, trainer = draft.index, draft.trainer
    if trainer is not None:
        index = replace(
            index,
            files={**trainer.files, **index.files},
            held={**index.held, **trainer.weights},
            framework=trainer.framework.name,
            train=replace(index.train, trees=trainer.trees),
            findings=(*trainer.findings, *index.findings),
        )
    findings = [
        *index.findings,
        *(attempt(lambda: [*draft.check(index)], draft.problems) or ()),
        *(_compare_framework_files(index, trainer) if trainer is not None else ()),
        *_links_outside(index),
    ]
    steps = steps or PartSteps()
    frozen = {param.name for param in index.params.values() if param.role == "frozen"}
    unclear = index.train.unclear | (steps.unclear & frozen)
    train = replace(index.train, unclear=unclear)
    known = replace(index, composite=steps, train=train, findings=tuple(findings))
    return Survey(known, draft.problems)


def _compare_framework_files(index: CheckpointIndex, trainer: TrainerFiles) -> Iterator[Finding]:
    if trainer.scheduler is not None:
        groups = [group.hyper for group in index.groups]
        # without ZeRO, the format's check compares the steps
        expected = index.global_step - index.zero.skipped_steps if index.form.has_masters else None
        yield from compare_scheduler(
            trainer.scheduler, PathIn(index.name, trainer.framework.scheduler), groups, expected
        )
    yield from find_lost_rng({*trainer.files, *trainer.inside}, index.world_size, index.name, trainer.framework)


def _links_outside(index: CheckpointIndex) -> list[Finding]:
    """Return findings on symbolic links to outside the folder. They are followed: a Hub cache consists of them."""
    inside = index.root.resolve()
    paths = dict.fromkeys([*index.files, *filter(None, [index.zero.tag])])
    links = [path for path in paths if (index.root / path).is_symlink()]
    outside = [path for path in links if not (index.root / path).resolve().is_relative_to(inside)]
    if not outside:
        return []
    what = f"{len(outside)} of its files are symbolic links to outside the folder: {', '.join(outside[:_SHOWN])}"
    fix = "check their targets if you did not create them: a composite gets copies"
    return [Finding(index.name, what, fix, Code.LINKS_OUTSIDE, NOTE)]


def usual_dtype(dtypes: Iterable[str]) -> str:
    """Return the precision of a training by the dtypes of its weights: ``F32``, ``BF16`` or ``F16``."""
    counts = Counter(dtypes)
    return max(("F32", "BF16", "F16"), key=lambda dtype: counts[dtype])
