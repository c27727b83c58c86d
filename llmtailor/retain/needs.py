"""Which partial checkpoints of a run nothing needs any more. Pure.

Full checkpoints are deleted by the Trainer (``save_total_limit``), and by people. So steps count twice: those that can
be composed of what is there, and those that partial checkpoints alone are good for, as if there were no full ones. A
step needs its own partial checkpoint and those that this one builds on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from llmtailor.core.run import RunCheckpoint, composable_steps, sources_at
from llmtailor.errors import VerificationError
from llmtailor.history.retention import SaveRecord, newest_holders


@dataclass(frozen=True, slots=True)
class Needs:
    """What stays of a run, and what for."""

    before: tuple[int, ...]
    """Steps that can be composed, or are there"""
    kept: tuple[int, ...]
    """Those that will be afterwards; without ``keep`` the same"""
    needed: frozenset[RunCheckpoint]
    """Partial checkpoints that must stay"""


def find_needs(
    checkpoints: Sequence[RunCheckpoint],
    records: Mapping[RunCheckpoint, SaveRecord],
    parts: Sequence[str],
    keep: int | None,
) -> Needs:
    """Decide which partial checkpoints stay: those that the newest ``keep`` composable steps need (None: all of them),
    and those that the newest ``keep`` need that partial checkpoints alone are good for.

    ``records`` are what the partial ones' manifests tell. Those newer than every step that they alone are good for
    stay, too, with what they build on: a later save may complete them.
    """
    before, alone = composable_steps(checkpoints, parts), composable_steps(list(records), parts)
    promised, promised_alone = (steps[-keep:] if keep else steps for steps in (before, alone))
    newest = alone[-1] if alone else -1
    needed: set[RunCheckpoint] = set()
    for one, record in records.items():
        if one.step in {*promised, *promised_alone} or one.step > newest:
            needed |= {one, *_built_on(record, records)}
    for there, steps in ((checkpoints, promised), (list(records), promised_alone)):
        for step in steps:
            needed |= {one for one in (sources_at(there, step, parts) or {}).values() if one.is_partial}
    left = [one for one in checkpoints if not one.is_partial or one in needed]
    _prove(checkpoints, left, promised, parts)
    _prove(list(records), list(needed), promised_alone, parts)
    return Needs(tuple(before), tuple(composable_steps(left, parts)), frozenset(needed))


def _built_on(record: SaveRecord, records: Mapping[RunCheckpoint, SaveRecord]) -> set[RunCheckpoint]:
    found = list(newest_holders(record, records.values()).values())
    return {one for one, other in records.items() if any(other is holder for holder in found)}


def _prove(
    before: Sequence[RunCheckpoint], after: Sequence[RunCheckpoint], promised: Iterable[int], parts: Sequence[str]
) -> None:
    """Check the outcome by itself: every step that is promised is composed of just the same."""
    changed = [step for step in promised if sources_at(before, step, parts) != sources_at(after, step, parts)]
    if changed:
        what = f"step {', '.join(map(str, changed))} would not be composed as before"
        raise VerificationError.at("gc", what, "this is a bug in llmtailor: please report it; nothing was removed")
