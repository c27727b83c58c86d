"""Which partial checkpoints are needed: tables made by hand, and a slow search that must agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtailor.checkpoint.lineage import Ledger, RunCheckpoint, is_complete, lost_parts, partial_sources, present_of
from llmtailor.model.parts import Part
from llmtailor.runs.gc import deletable, needed

A, B, C = map(Part, ("layer 0", "layer 1", "norm"))


@dataclass
class Disk:
    """A run's folder: what its saves leave there, one folder per step."""

    parts: Sequence[str] = (A, B, C)
    ledger: Ledger = field(default_factory=lambda: Ledger("L1"))
    partial: dict[int, RunCheckpoint] = field(default_factory=dict)
    ledgers: dict[int, Ledger] = field(default_factory=dict)
    lineages: int = 1

    def save(self, step: int, *saved: str) -> Disk:
        """Save some parts; none named means all of them."""
        self.ledger = self.ledger.after(step, saved or self.parts, self.parts)
        self.partial[step] = RunCheckpoint.saved(Path(f"step-{step:08}"), self.ledger)
        self.ledgers[step] = self.ledger
        return self

    def resume(self, step: int) -> Disk:
        self.ledger = self.ledgers[step].resumed(self._new_lineage(), step)
        return self

    def start_anew(self) -> Disk:
        self.ledger = Ledger(self._new_lineage())
        return self

    def _new_lineage(self) -> str:
        self.lineages += 1
        return f"L{self.lineages}"

    @property
    def saves(self) -> list[RunCheckpoint]:
        return list(self.partial.values())

    @property
    def complete(self) -> list[int]:
        """The steps that partial checkpoints alone can compose."""
        return sorted(save.step for save in self.saves if is_complete(save, self.saves))

    def needed(self, keep: int) -> list[int]:
        return sorted(needed(self.saves, self.ledger, keep))

    def sources(self, step: int) -> dict[str, int] | None:
        """Return the step that each part of a composite would come from."""
        save = self.partial[step]
        found = {part: one.step for part, one in partial_sources(save, self.saves).items()}
        return found if is_complete(save, self.saves) else None


def test_a_plain_run():
    disk = Disk().save(50).save(100, A).save(150, B).save(200, A).save(250, C)
    assert disk.complete == [50, 100, 150, 200, 250]
    assert disk.sources(250) == {A: 200, B: 150, C: 250}
    assert disk.sources(150) == {A: 100, B: 150, C: 50}
    assert disk.needed(1) == [150, 200, 250]
    assert disk.needed(2) == [50, 150, 200, 250]  # 200 has C from the base
    assert disk.needed(3) == [50, 100, 150, 200, 250]
    assert disk.needed(99) == [50, 100, 150, 200, 250]
    assert deletable(disk.saves, disk.ledger, 1) == [50, 100]
    assert deletable(disk.saves, disk.ledger, 2) == [100]
    with pytest.raises(ValueError, match="1 or more"):
        disk.needed(0)


def test_nothing_yet():
    assert needed([], Ledger("L1"), 1) == set()
    assert Disk().save(50).needed(1) == [50]
    with pytest.raises(ValueError, match="no save"):
        RunCheckpoint.saved(Path(), Ledger("L1"))


def test_a_gap_is_filled_with_something_older():
    disk = Disk().save(50).save(100, A).save(150, A).save(200, B)
    del disk.partial[150]
    assert disk.sources(200) == {A: 100, B: 200, C: 50}
    assert disk.needed(1) == [50, 100, 200]
    assert lost_parts(disk.ledger, disk.saves) == {A}
    # The next save must hold A, whatever the policy wants.
    disk.ledger = disk.ledger.without({A})
    assert lost_parts(disk.ledger, disk.saves) == set()
    assert "layer 0" not in disk.ledger.last


def test_a_gap_that_nothing_fills():
    disk = Disk().save(50).save(100, A).save(150, B)
    del disk.partial[50]
    assert disk.complete == []
    assert disk.sources(150) is None
    assert lost_parts(disk.ledger, disk.saves) == {C}
    # Neither is composable, but both hold a newest state: once C is saved, everything is there.
    assert disk.needed(1) == [100, 150]
    disk.save(200, C)
    assert disk.complete == [200]
    assert disk.needed(1) == disk.needed(2) == [100, 150, 200]


def test_a_second_run_in_the_folder():
    disk = Disk().save(50).save(500, A).start_anew().save(60).save(100, B)
    assert disk.complete == [50, 60, 100, 500]
    assert disk.sources(100) == {A: 60, B: 100, C: 60}
    assert disk.sources(500) == {A: 500, B: 50, C: 50}
    assert disk.needed(1) == [50, 60, 100, 500]  # the other run's stay, and do not count
    assert disk.save(150).needed(1) == [50, 150, 500]
    # The new run's base in the place of the old one's: what relied on that can't be composed any more.
    disk = Disk().save(50).save(500, A).start_anew().save(50).save(100, B)
    assert disk.complete == [50, 100]


def test_a_resume_from_the_newest():
    disk = Disk().save(50).save(100, A).resume(100).save(150, B).resume(150).save(200, C)
    assert disk.sources(200) == {A: 100, B: 150, C: 200}
    assert disk.needed(1) == [100, 150, 200]
    assert disk.needed(2) == [50, 100, 150, 200]


def test_a_resume_from_earlier_forgets_what_came_later():
    disk = Disk().save(50).save(100, A).save(150, B).save(200, C).resume(100)
    assert disk.needed(1) == [50, 100, 150, 200]  # nothing is saved yet, and step 200 is the newest
    disk.save(160, A)
    assert disk.sources(160) == {A: 160, B: 50, C: 50}  # and not B from the abandoned 150
    assert disk.sources(200) == {A: 100, B: 150, C: 200}
    assert disk.needed(1) == [50, 100, 150, 160, 200]
    # Once the run has passed them, the abandoned ones go.
    disk.save(210, B)
    assert disk.needed(1) == [50, 160, 210]
    assert disk.needed(2) == [50, 100, 150, 160, 200, 210]
    assert deletable(disk.saves, disk.ledger, 1) == [100, 150, 200]


def test_a_save_in_the_place_of_an_abandoned_one():
    disk = Disk().save(50).save(100, A).save(150, B).save(200, C).resume(100).save(150, A)
    assert disk.sources(150) == {A: 150, B: 50, C: 50}
    assert disk.sources(200) == {A: 100, B: 50, C: 200}  # B of 150 is gone; that of the base remains


def test_parts_that_are_unfrozen_later():
    disk = Disk(parts=(A, B)).save(50).save(100, A)
    disk.parts = (A, B, C)
    disk.save(150, C).save(200, B)
    assert disk.complete == [50, 100, 150, 200]
    assert disk.sources(100) == {A: 100, B: 50}
    assert disk.sources(200) == {A: 100, B: 200, C: 150}


# --- the slow search -------------------------------------------------------------------------------------------------


@st.composite
def disks(draw: st.DrawFn) -> Disk:
    """Runs with resumes, forks, other runs, and folders deleted by hand."""
    disk = Disk().save(draw(st.integers(1, 5)))
    subsets = st.lists(st.sampled_from([A, B, C]), min_size=1, max_size=2, unique=True)
    for kind in draw(st.lists(st.sampled_from("sssssrda"), max_size=14)):
        step = (disk.ledger.step or 0) + draw(st.integers(1, 4))
        if kind == "s":
            disk.save(step, *(draw(subsets) if disk.ledger.step else ()))
        elif kind == "r":
            disk.resume(draw(st.sampled_from(sorted(disk.ledgers))))
        elif kind == "d" and disk.partial:
            del disk.partial[draw(st.sampled_from(sorted(disk.partial)))]
        elif kind == "a":
            disk.start_anew().save(draw(st.integers(1, 20)))
    return disk


Found = Mapping[str, tuple[int, str]]


def past_of(save: RunCheckpoint) -> dict[str, int]:
    return {**{old: min(until, save.step) for old, until in save.past.history.items()}, save.past.lineage: save.step}


def search(saves: Sequence[RunCheckpoint], past: Mapping[str, int], parts: Sequence[str]) -> Found:
    """Look for the newest holder of each part, going back step by step."""
    found = {}
    for part in parts:
        for step in range(max(past.values()), 0, -1):
            there = [one for one in saves if one.step == step and step <= past.get(one.past.lineage, 0)]
            if there := [one for one in there if part in one.parts]:
                found[part] = (step, there[0].past.lineage)
                break
    return found


def outcomes(disk: Disk, saves: Sequence[RunCheckpoint], keep: int) -> list[tuple[int, Found]]:
    """Return what the steps to keep, as of the whole disk, would be composed of with these saves only."""
    ledger = disk.ledger
    family = {ledger.lineage, *ledger.history}
    present = past_of(present_of(ledger))
    kin = [one for one in disk.saves if family & {one.past.lineage, *one.past.history}]
    points = []
    for group in (kin, [one for one in kin if one.step <= present.get(one.past.lineage, 0)]):
        able: dict[int, RunCheckpoint] = {}
        for one in sorted(group, key=lambda one: one.step):
            if len(search(kin, past_of(one), list(one.needed_parts))) == len(one.needed_parts):
                able[one.step] = one
        points += [able[step] for step in sorted(able)[-keep:]]
    left = [one for one in saves if one in kin]
    made: list[tuple[int, Found]] = [(0, search(left, present, list(ledger.held_by)))]
    for one in points:
        if one in left:
            made.append((one.step, search(left, past_of(one), list(one.needed_parts))))
    return made


@given(disks(), st.integers(1, 4))
def test_a_save_is_needed_exactly_if_its_loss_would_be_noticed(disk, keep):
    saves = disk.saves
    found = needed(saves, disk.ledger, keep)
    family = {disk.ledger.lineage, *disk.ledger.history}
    before = outcomes(disk, saves, keep)
    for lost in saves:
        is_kin = bool(family & {lost.past.lineage, *lost.past.history})
        is_noticed = outcomes(disk, [one for one in saves if one is not lost], keep) != before
        assert (lost.step in found) == (is_noticed or not is_kin)
    # Nor is it noticed when all of them go at once.
    gone = deletable(saves, disk.ledger, keep)
    assert outcomes(disk, [one for one in saves if one.step not in gone], keep) == before
    assert set(gone).isdisjoint(found)


def test_a_ledger_describes_its_newest_save():
    save = RunCheckpoint.saved(Path("step"), Disk().save(50).save(60, A).ledger)
    assert (save.step, save.parts, save.needed_parts) == (60, frozenset({A}), frozenset({A, B, C}))
    assert save.past is not None
    assert (save.past.step, save.past.lineage, save.past.history) == (60, "L1", {})
