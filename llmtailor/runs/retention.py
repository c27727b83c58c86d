"""Which partial checkpoints are still needed. Pure: it names them, and whoever deletes them is elsewhere.

Which partial checkpoints of a run nothing needs any more. Pure.

Full checkpoints are deleted by the Trainer (``save_total_limit``), and by people. So steps count twice: those that can
be composed of what is there, and those that partial checkpoints alone are good for, as if there were no full ones. A
step needs its own partial checkpoint and those that this one builds on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from llmtailor.checkpoint.lineage import Ledger, SaveRecord
from llmtailor.errors import UsageError, VerificationError
from llmtailor.recipe import candidates
from llmtailor.recipe.candidates import RunCheckpoint, sources_at


def newest_holders(record: SaveRecord, records: Iterable[SaveRecord]) -> dict[str, SaveRecord]:
    """Return for every part the newest checkpoint that holds it, of what `record` builds on; for some there is none.

    A full checkpoint goes before a partial one of the same step.
    """
    past = [one for one in _in_order(records) if record.follows(one)]
    return {part: one for one in past for part in record.held_by if one.holds(part)}


def holders(record: SaveRecord, records: Iterable[SaveRecord]) -> dict[str, SaveRecord] | None:
    """Return for every part the newest checkpoint to take it from, to compose the state at `record`'s step.

    None if that is not possible. Where a partial checkpoint was deleted by hand the next older one is taken, which
    `record.held_by` then contradicts: the part is older than the policy allowed.
    """
    found = newest_holders(record, records)
    return found if found.keys() >= record.held_by.keys() else None


def composable_steps(records: Sequence[SaveRecord]) -> list[int]:
    """Return the steps that a complete checkpoint can be composed for, the newest last."""
    return sorted({record.step for record in records if holders(record, records) is not None})


def lost_parts(ledger: Ledger, records: Iterable[SaveRecord]) -> set[str]:
    """Return the parts whose newest save is gone. A run that resumes has older states of them than the ledger says.

    So it must forget that they were saved (`Ledger.without`): their age would not be what it seems.
    """
    there = newest_holders(_tip(ledger), records)
    return {part for part, (_, step) in ledger.held_by.items() if part not in there or there[part].step < step}


def needed(records: Sequence[SaveRecord], ledger: Ledger, keep: int) -> set[int]:
    """Return the steps of the partial checkpoints that must stay. `ledger` is the running one, after its newest save.

    These are what the newest `keep` composable steps need, as `holders` says (a step always needs itself, because every
    save holds something), and whatever holds the newest state of a part, for the steps to come. Steps count by the
    run's own past; as long as an abandoned attempt has newer ones, its newest `keep` stay as well. Partial checkpoints
    of other runs always stay.
    """
    if keep < 1:
        raise ValueError("keep at least one composable step")
    kin = [record for record in records if _is_kin(record, ledger)]
    tip = _tip(ledger)
    able = [record for record in _in_order(kin) if holders(record, kin) is not None]
    own = [record for record in able if tip.follows(record)]
    kept = [record for some in (able, own) for record in _newest(some, keep)]

    stay = [record for record in records if not _is_kin(record, ledger)]
    for record in [*kept, tip]:
        stay += newest_holders(record, kin).values()
    return {record.step for record in stay if not record.is_stock}


def check_keep(keep_composable: int | None) -> None:
    """Raise UsageError for a number of steps to keep that is none."""
    if keep_composable is not None and (type(keep_composable) is not int or keep_composable < 1):
        fix = "keep 1 composable step or more; leave it out to keep everything"
        raise UsageError.at("keep_composable", f"it is {keep_composable!r}", fix)


def deletable(records: Sequence[SaveRecord], ledger: Ledger, keep: int) -> list[int]:
    """Return the steps of the partial checkpoints that nothing needs, the oldest first (see `needed`)."""
    return sorted({record.step for record in records if not record.is_stock} - needed(records, ledger, keep))


def _newest(records: Iterable[SaveRecord], keep: int) -> list[SaveRecord]:
    """Return one record for each of the newest steps. A full checkpoint, if there is one, needs no partial one."""
    at = {record.step: record for record in records}
    return [at[step] for step in sorted(at)[-keep:]]


def _tip(ledger: Ledger) -> SaveRecord:
    """Return the run's present, which holds nothing by itself."""
    held_by = {part: step for part, (_, step) in ledger.held_by.items()}
    return SaveRecord(ledger.step or 0, frozenset(), ledger.lineage, held_by, ledger.history)


def _is_kin(record: SaveRecord, ledger: Ledger) -> bool:
    """Whether both go back to the same complete base."""
    return not {record.lineage, *record.history}.isdisjoint({ledger.lineage, *ledger.history})


def _in_order(records: Iterable[SaveRecord]) -> list[SaveRecord]:
    return sorted(records, key=lambda record: (record.step, record.is_stock))


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
    before, alone = candidates.composable_steps(checkpoints, parts), candidates.composable_steps(list(records), parts)
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
    return Needs(tuple(before), tuple(candidates.composable_steps(left, parts)), frozenset(needed))


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
