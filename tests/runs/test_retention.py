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
from llmtailor.runs.retention import deletable, needed


@dataclass
class Disk:
    """A run's folder: what its saves leave there, one folder per step."""

    parts: str = "ABC"
    ledger: Ledger = field(default_factory=lambda: Ledger("L1"))
    partial: dict[int, RunCheckpoint] = field(default_factory=dict)
    ledgers: dict[int, Ledger] = field(default_factory=dict)
    lineages: int = 1

    def do(self, events: str) -> Disk:
        """Play what happens: ``50`` and ``60AB`` save all or some parts at a step, ``-50`` loses that save, ``r50``
        resumes from it, ``anew`` starts another run in the folder, and ``+C`` unfreezes a part."""
        for event in events.split():
            if event == "anew":
                self.ledger = Ledger(self._new_lineage())
            elif event[0] == "r":
                self.ledger = self.ledgers[int(event[1:])].resumed(self._new_lineage(), int(event[1:]))
            elif event[0] == "-":
                del self.partial[int(event[1:])]
            elif event[0] == "+":
                self.parts += event[1:]
            else:
                self.save(int(event.rstrip("ABC")), event.lstrip("0123456789"))
        return self

    def save(self, step: int, saved: str = "") -> None:
        parts = [*map(Part, saved or self.parts)]
        self.ledger = self.ledgers[step] = self.ledger.after(step, parts, [*map(Part, self.parts)])
        self.partial[step] = RunCheckpoint.saved(Path(f"step-{step:08}"), self.ledger)

    def _new_lineage(self) -> str:
        self.lineages += 1
        return f"L{self.lineages}"

    @property
    def saves(self) -> list[RunCheckpoint]:
        return list(self.partial.values())

    def sources(self, step: int) -> str | None:
        """Return the step that each part of a composite would come from."""
        save = self.partial[step]
        found = {part: one.step for part, one in partial_sources(save, self.saves).items()}
        return " ".join(f"{part}{found[part]}" for part in sorted(found)) if is_complete(save, self.saves) else None


ABANDONED = "50 100A 150B 200C r100"


@pytest.mark.parametrize(
    ("events", "complete", "sources", "kept", "lost"),
    [
        # steps that partial checkpoints alone can compose; of which saves; what keeping 1, 2, ... of them needs
        ("50", [50], {50: "A50 B50 C50"}, [[50]], ""),
        ("50 100A 150B 200A 250C", [50, 100, 150, 200, 250], {250: "A200 B150 C250", 150: "A100 B150 C50"},
         [[150, 200, 250], [50, 150, 200, 250], [50, 100, 150, 200, 250], [50, 100, 150, 200, 250]], ""),
        # a gap is filled with something older; the next save must hold what was lost
        ("50 100A 150A 200B -150", [50, 100, 200], {200: "A100 B200 C50"}, [[50, 100, 200]], "A"),
        # nothing fills it, but what is there holds newest states: once C is saved, everything is there
        ("50 100A 150B -50", [], {150: None}, [[100, 150]], "C"),
        ("50 100A 150B -50 200C", [200], {200: "A100 B150 C200"}, [[100, 150, 200]] * 2, ""),
        # another run's saves stay, and do not count; its base may take the place of the old one's
        ("50 500A anew 60 100B", [50, 60, 100, 500], {100: "A60 B100 C60", 500: "A500 B50 C50"},
         [[50, 60, 100, 500]], ""),
        ("50 500A anew 60 100B 150", [50, 60, 100, 150, 500], {}, [[50, 150, 500]], ""),
        ("50 500A anew 50 100B", [50, 100], {500: None}, [], ""),
        ("50 100A r100 150B r150 200C", [50, 100, 150, 200], {200: "A100 B150 C200"},
         [[100, 150, 200], [50, 100, 150, 200]], ""),
        # a resume from earlier forgets what came later, which goes once the run has passed it
        (ABANDONED, [50, 100, 150, 200], {}, [[50, 100, 150, 200]], ""),
        (f"{ABANDONED} 160A", [50, 100, 150, 160, 200], {160: "A160 B50 C50", 200: "A100 B150 C200"},
         [[50, 100, 150, 160, 200]], ""),
        (f"{ABANDONED} 160A 210B", [50, 100, 150, 160, 200, 210], {},
         [[50, 160, 210], [50, 100, 150, 160, 200, 210]], ""),
        # a save in the place of an abandoned one
        (f"{ABANDONED} 150A", [50, 100, 150, 200], {150: "A150 B50 C50", 200: "A100 B50 C200"}, [], ""),
        # a part that is unfrozen later
        ("50AB 100A +C 150C 200B", [50, 100, 150, 200], {100: "A100 B50", 200: "A100 B200 C150"}, [], ""),
    ],
)  # fmt: skip
def test_what_is_needed(events, complete, sources, kept, lost):
    disk = Disk("AB" if "+C" in events else "ABC").do(events)
    assert sorted(save.step for save in disk.saves if is_complete(save, disk.saves)) == complete
    assert {step: disk.sources(step) for step in sources} == sources
    for keep, steps in enumerate(kept, 1):
        assert sorted(needed(disk.saves, disk.ledger, keep)) == steps
        assert deletable(disk.saves, disk.ledger, keep) == sorted(disk.partial.keys() - {*steps})
    assert lost_parts(disk.ledger, disk.saves) == {*lost}
    assert not lost_parts(disk.ledger.without({*lost}), disk.saves)


def test_nothing_yet():
    assert needed([], Ledger("L1"), 1) == set()
    with pytest.raises(ValueError, match="no save"):
        RunCheckpoint.saved(Path(), Ledger("L1"))
    with pytest.raises(ValueError, match="1 or more"):
        needed([], Ledger("L1"), 0)


# --- the slow search -------------------------------------------------------------------------------------------------


@st.composite
def disks(draw: st.DrawFn) -> Disk:
    """Runs with resumes, forks, other runs, and folders deleted by hand."""
    disk = Disk().do(f"{draw(st.integers(1, 5))}")
    subsets = st.lists(st.sampled_from("ABC"), min_size=1, max_size=2, unique=True).map("".join)
    for kind in draw(st.lists(st.sampled_from("sssssrda"), max_size=14)):
        step = (disk.ledger.step or 0) + draw(st.integers(1, 4))
        if kind == "s":
            disk.save(step, draw(subsets) if disk.ledger.step else "")
        elif kind == "r":
            disk.do(f"r{draw(st.sampled_from(sorted(disk.ledgers)))}")
        elif kind == "d" and disk.partial:
            disk.do(f"-{draw(st.sampled_from(sorted(disk.partial)))}")
        elif kind == "a":
            disk.do(f"anew {draw(st.integers(1, 20))}")
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
