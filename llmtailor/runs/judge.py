"""The checkpoints of a run's folder, and which of them belong to its present attempt."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from llmtailor.codes import Code
from llmtailor.errors import Problem
from llmtailor.formats.attempt_mark import stated_attempt
from llmtailor.formats.partial.manifest import FOLDER, step_in_name
from llmtailor.formats.registry import display_name
from llmtailor.runs.attempts import Standing, Timeline, timeline
from llmtailor.runs.folder import Folder, list_checkpoints


def list_all(run: Path) -> list[tuple[int, Path]]:
    """Return the run's checkpoints, full and partial, whatever is in them, with the steps in their names.

    The newest come first; of one step the full one. Raises SourceError if there is no such folder.
    """
    found = [(step, False, path) for step, path in list_checkpoints(run).items()]
    partial = run / FOLDER
    found += [
        (step, True, path)
        for path in (partial.iterdir() if partial.is_dir() else ())
        if (step := step_in_name(path.name)) is not None and path.is_dir()
    ]
    found.sort(key=lambda one: (-one[0], one[1]))
    return [(step, path) for step, _, path in found]


@dataclass(frozen=True)
class Judge:
    """Says which checkpoints of a run are not of its present attempt."""

    run: Path
    timeline: Timeline
    trust_unrecorded: bool = False

    @classmethod
    def of(cls, run: Path, at: int | None, trust_unrecorded: bool = False) -> Judge:
        """Read what tells it: the record of attempts, or else what the checkpoints up to step ``at`` state.

        Raises SourceError for a damaged record.
        """
        attempts = Folder(run).attempts()
        others = () if attempts else [path for step, path in list_all(run) if at is None or step <= at]
        return cls(run, timeline(attempts, filter(None, map(stated_attempt, others))), trust_unrecorded)

    def standing(self, path: Path, step: int) -> Standing:
        """Judge a checkpoint, which need not be readable, by what it states."""
        stated = stated_attempt(path)
        found = self.timeline.judge(step, stated)
        if found is Standing.UNRECORDED and stated is not None:
            root = self.timeline.root(stated)
            if root is not None and root >= self._newest_recorded:  # nothing else went on from there
                return Standing.OWN
        return found

    @cached_property
    def _newest_recorded(self) -> int:
        """The newest step that the present attempt is known to have saved"""
        for step, path in list_all(self.run):
            if self.timeline.judge(step, stated_attempt(path)) is Standing.OWN:
                return step
        return -1

    def why_not(self, path: Path, step: int) -> Problem | None:
        """Say why a checkpoint must not be used beside those of the present attempt, or None."""
        standing = self.standing(path, step)
        name = display_name(path)
        if standing is Standing.GIVEN_UP:
            what = "it is of an attempt that was given up: the run has resumed at an earlier step since"
            return Problem(name, what, "to use it all the same, name it in a recipe", Code.GIVEN_UP)
        if standing is Standing.UNRECORDED and not self.trust_unrecorded:
            what = "it does not say which attempt of the run wrote it, and attempts are recorded here"
            fix = "if it is what the run goes on from, say --trust-unrecorded; or name it in a recipe"
            return Problem(name, what, fix, Code.UNRECORDED)
        return None
