"""Which partial checkpoints are still needed. Pure: it names them, and whoever deletes them is elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from llmtailor.core.run import Past
from llmtailor.errors import SourceError, UsageError
from llmtailor.history.ledger import FIX, WHAT, Ledger


@dataclass(frozen=True, slots=True)
class SaveRecord:
    """A checkpoint on disk, as its manifest describes it: a partial one, or a full one of the Trainer's."""

    step: int
    parts: frozenset[str]
    """What it holds. Ignored for a full one, which holds everything."""
    lineage: str
    held_by: Mapping[str, int] = field(default_factory=dict)
    """Part -> step of the newest save that held it as of this one. Its keys are the parts that were trained then, so
    those that a composite of this step needs."""
    history: Mapping[str, int] = field(default_factory=dict)
    """Earlier lineages that its own continues -> the last step of theirs that belongs to it (see `Ledger`)."""
    is_stock: bool = False
    """A full checkpoint of the Trainer's: complete by itself, and not ours to delete. One of unknown lineage has ""; it
    gives nothing to composites of other steps. List it only if nobody else will delete it (``save_total_limit``):
    partial checkpoints that it makes superfluous are deleted."""

    @classmethod
    def of(cls, ledger: Ledger) -> SaveRecord:
        """Return the record of a ledger's newest save, which must not be missing."""
        newest = {part: step for part, (save, step) in ledger.held_by.items() if save == ledger.saves - 1}
        if not newest:
            raise ValueError("there was no save yet")
        held_by = {part: step for part, (_, step) in ledger.held_by.items()}
        return cls(max(newest.values()), frozenset(newest), ledger.lineage, held_by, ledger.history)

    @classmethod
    def from_json(cls, data: object, where: str) -> SaveRecord:
        """Return the record of the newest save that a manifest's ledger tells of. Raises SourceError."""
        ledger = Ledger.from_json(data, where)
        try:
            return cls.of(ledger)
        except ValueError as error:
            raise SourceError.at(where, f"{WHAT} is damaged: it says that {error}", FIX) from error

    def holds(self, part: str) -> bool:
        return self.is_stock or part in self.parts

    @property
    def past(self) -> Past:
        return Past(self.step, self.lineage, self.history)

    def follows(self, other: SaveRecord) -> bool:
        """Whether the other's states are of this one's own past, or its present."""
        return self.past.includes(other.past)


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
