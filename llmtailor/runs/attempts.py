"""Which attempt of a run a checkpoint belongs to, and whether that attempt was abandoned.

A run is a chain of attempts: each start of the training is one, and records which step of which earlier attempt it
continues. Resuming at step 400 abandons everything saved after that step. A composite never mixes abandoned states
with those that replaced them.

There are two sources. ``partial/attempts.json`` lists every start, including one that died before its first save.
Each checkpoint also states its own attempt (`frameworks.trainer_state`), wherever it is copied to.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from llmtailor.checkpoint.lineage import UNRECORDED, Past
from llmtailor.codes import Code
from llmtailor.errors import Problem, SourceError, some
from llmtailor.formats.provenance import stated_attempt
from llmtailor.formats.registry import display_name
from llmtailor.frameworks.files import FOLDER
from llmtailor.runs.folder import ATTEMPTS, RunFolder

FOREVER = sys.maxsize
"""The last step of a lineage that may still continue"""


@dataclass(frozen=True)
class AttemptFilter:
    """Decides which checkpoints of a run do not belong to its current attempt."""

    folder: RunFolder
    present: Past | None
    """The current attempt, open-ended; None: no attempts are known, and every checkpoint belongs to the run"""
    begins_at: int
    """Checkpoints up to this step may be older than the attempt record, and need not state their attempt."""
    trust_unrecorded: bool = False

    @classmethod
    def of(cls, folder: RunFolder, at: int | None, trust_unrecorded: bool = False) -> AttemptFilter:
        """Read the record of attempts or, without one, what the checkpoints up to step ``at`` state.

        Without a record, as in a folder assembled by hand, the current attempt is that of the newest checkpoint that no
        other one abandons. Raises SourceError for a damaged record, and for saves of several runs.
        """
        if recorded := folder.attempts():
            last = recorded[-1]
            own = [past for past in recorded if past.lineage == last.lineage or past.lineage in last.history]
            present = Past(FOREVER, last.lineage, last.history)
            return cls(folder, present, min(past.step for past in own), trust_unrecorded)
        until = [path for step, path in folder.checkpoints() if at is None or step <= at]
        stated = {path: past for path in until if (past := stated_attempt(path)) is not None}
        _check_one_run({path: past for path, past in stated.items() if path.parent.name == FOLDER}, folder.partial)
        return cls(folder, _newest_alive(stated.values()), FOREVER, trust_unrecorded)

    def why_not(self, path: Path, step: int) -> Problem | None:
        """Return why a checkpoint must not be used with those of the current attempt, or None."""
        code, name = self._judge(path, step), display_name(path)
        if code is Code.ABANDONED:
            what = "it belongs to an abandoned attempt: the run has since resumed from an earlier step"
            return Problem(name, what, "to use it anyway, name it in a recipe", code)
        if code is Code.UNRECORDED and not self.trust_unrecorded:
            what = "it does not record its attempt, although this run records attempts"
            fix = "if the run continues from it, use --trust-unrecorded or name it in a recipe"
            return Problem(name, what, fix, code)
        return None

    def _judge(self, path: Path, step: int) -> Code | None:
        """Return how a checkpoint relates to the current attempt; None: it belongs to it.

        ABANDONED: another attempt replaced the one that it belongs to. UNRECORDED: it states no attempt and is later
        than the start of the attempt record, or it belongs to a training that resumed from the current attempt without
        the saver.
        """
        stated = stated_attempt(path)
        if self._is_own(step, stated):
            return None
        root = self._root(stated) if stated else None
        if root is not None and root >= self._newest_recorded:  # nothing else continues from there
            return None
        return Code.ABANDONED if stated and root is None else Code.UNRECORDED

    def _is_own(self, step: int, stated: Past | None) -> bool:
        if self.present is None:
            return True
        return step <= self.begins_at if stated is None else self.present.includes(stated)

    def _root(self, stated: Past) -> int | None:
        """Return the step of the current attempt that an unrecorded training resumed from, or None.

        A training that resumed from a step of an earlier attempt is the current attempt itself.
        """
        if self.present is None or not stated.lineage.startswith(UNRECORDED):
            return None
        step = stated.history.get(self.present.lineage)
        return step if stated.lineage == f"{UNRECORDED}{self.present.lineage}@{step}" else None

    @cached_property
    def _newest_recorded(self) -> int:
        """The newest step that the current attempt is known to have saved"""
        there = self.folder.checkpoints()
        return next((step for step, path in there if self._is_own(step, stated_attempt(path))), -1)


def _check_one_run(stated: Mapping[Path, Past], where: Path) -> None:
    """Raise SourceError unless all partial checkpoints go back to one training. A mirror or a copy has no lock."""
    runs: list[tuple[set[str], list[str]]] = []
    for path, past in stated.items():
        kin = [run for run in runs if not run[0].isdisjoint(past.lineages)]
        runs = [run for run in runs if run not in kin]
        lineages = past.lineages.union(*(run[0] for run in kin))
        runs.append((lineages, [path.name, *(name for run in kin for name in run[1])]))
    if len(runs) > 1:
        what = f"it holds saves of {len(runs)} runs: {'; '.join(some(sorted(names)) for _, names in runs)}"
        fix = f"move those of all runs but one to another folder; or restore {ATTEMPTS}, if it is one run"
        raise SourceError.at(display_name(where), what, fix)


def _newest_alive(stated: Iterable[Past]) -> Past | None:
    known = list(stated)
    alive = [past for past in known if not any(later.abandons(past) for later in known)]
    return max(alive, key=lambda attempt: attempt.step, default=None)
