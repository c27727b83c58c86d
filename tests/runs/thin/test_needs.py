"""Random runs on paper: what is needed is what would be missed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.cases import examples
from llmtailor.checkpoint.lineage import Ledger, Past, RunCheckpoint, newer_masters, sources_at
from llmtailor.errors import SourceError
from llmtailor.runs.prune import LINKED, PARTIAL, STAYS, WEIGHTS, Chooser, FullFacts, Pruner, ThinOptions
from llmtailor.runs.retention import find_reachable
from recipe.structures import llama

ANATOMY = llama(2)
PARTS = ANATOMY.parts


@dataclass
class Disk:
    """A run's folder, with what the manifests tell."""

    partial: dict[int, RunCheckpoint] = field(default_factory=dict)
    full: dict[int, RunCheckpoint] = field(default_factory=dict)
    ledgers: dict[int, Ledger] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=lambda: Ledger("L0"))
    lineages: int = 0
    ids: dict[int, str] = field(default_factory=dict)

    def save(self, step: int, parts: Sequence[str], masters: str = "") -> None:
        """Save parts. ``masters``: also those of the others, ``m``, or ``b`` as differences from their last saves."""
        chosen = list(parts) if self.ledger.held_by else list(PARTS)
        self.ledger = self.ledgers[step] = self.ledger.after(step, chosen, PARTS)
        held = None if set(chosen) == set(PARTS) else frozenset(chosen)
        path = Path(f"partial/step-{step:08}")
        others = [part for part in PARTS if masters and part not in chosen]
        self.partial[step] = replace(
            RunCheckpoint.saved(path, self.ledger, others),
            parts=held,
            save_id=f"{step} of {self.ledger.lineage}",
            bases={part: self.ids[self.ledger.steps[part]] for part in others if masters == "b"},
        )
        self.ids[step] = self.partial[step].save_id

    def save_full(self, step: int, resumable: bool) -> None:
        self.full[step] = RunCheckpoint(Path(f"checkpoint-{step}"), step, None, resumable)

    def resume(self, step: int) -> None:
        self.lineages += 1
        self.ledger = self.ledgers[step].resumed(f"L{self.lineages}", step)

    @property
    def checkpoints(self) -> list[RunCheckpoint]:
        return sorted([*self.full.values(), *self.partial.values()], key=lambda one: one.step)


@st.composite
def disks(draw: st.DrawFn) -> Disk:
    """Saves in parts and in full, resumes from earlier, and folders that somebody has deleted."""
    disk, step = Disk(), 0
    subsets = st.lists(st.sampled_from(PARTS), min_size=1, max_size=4, unique=True)
    for kind in draw(st.lists(st.sampled_from("ssmbbbffxrddd"), min_size=1, max_size=12)):
        step = max([step, disk.ledger.step or 0]) + draw(st.integers(1, 3))
        if kind in "smb":
            disk.save(step, draw(subsets), kind.strip("s"))
        elif kind in "fx":
            disk.save_full(step - (kind == "x"), draw(st.integers(0, 4)) > 0)
        elif kind == "r" and disk.ledgers:
            step = draw(st.sampled_from(sorted(disk.ledgers)))
            disk.resume(step)
            for later in [at for at in disk.partial if at > step]:  # the saver moves them aside
                del disk.partial[later]
        elif kind == "d" and disk.partial:
            del disk.partial[draw(st.sampled_from(sorted(disk.partial)))]
    return disk


# --- the slow search -------------------------------------------------------------------------------------------------


def is_of(past: Past, other: Past) -> bool:
    return other.step <= ({**past.history, past.lineage: past.step}.get(other.lineage, -1))


def newest_of_each(checkpoints: Sequence[RunCheckpoint], past: Past | None, until: int) -> Mapping[str, Path]:
    """Look for each part going back step by step; of two of the same step the complete one, and the full one, first."""
    found: dict[str, Path] = {}
    for part in PARTS:
        for step in range(until, -1, -1):
            there = [one for one in checkpoints if one.step == step and one.holds(part)]
            there = [one for one in there if one.past is None or (past and is_of(past, one.past))]
            if there:
                found[part] = max(there, key=lambda one: (one.parts is None, not one.is_partial)).path
                break
    return found


def masters_of_each(checkpoints: Sequence[RunCheckpoint], past: Past | None, until: int) -> Mapping[str, int]:
    """Look for the newest masters of each part; differences count if what they differ from is there."""
    there = [one for one in checkpoints if one.step <= until and (one.past is None or (past and is_of(past, one.past)))]
    ids, found = {one.save_id for one in there}, {}
    for part in PARTS:
        able = [
            one for one in there if one.holds(part) or (part in one.masters and one.bases.get(part, "") in ids | {""})
        ]
        found[part] = max((one.step for one in able), default=-1)
    return found


def outcome(checkpoints: Sequence[RunCheckpoint], step: int) -> tuple[object, ...] | None:
    """Return what ``merge --run --at STEP`` chooses: the base, the sources, and the steps of the masters."""
    pasts = [one.past for one in checkpoints if one.past and one.step <= step]
    newest = max(pasts, key=lambda past: past.step, default=None)
    usable = [one for one in checkpoints if one.past is None or (newest and is_of(newest, one.past))]
    bases = [one for one in usable if one.step == step and one.resumable]
    sources = newest_of_each(checkpoints, newest, step)
    if not bases or len(sources) < len(PARTS):
        return None
    masters = masters_of_each(usable, newest, step)
    return max(bases, key=lambda one: (one.parts is None, not one.is_partial)).path, sources, masters


def able(checkpoints: Sequence[RunCheckpoint]) -> list[int]:
    return [step for step in sorted({one.step for one in checkpoints}) if outcome(checkpoints, step)]


def outcomes(disk: Disk, left: Sequence[RunCheckpoint], keep: int | None) -> list[object]:
    """Return all that shall not change: the composites of the newest steps, those of the newest steps if all full
    checkpoints were gone, and what partial checkpoints build on by themselves."""
    partial = [one for one in left if one.is_partial]
    promised, alone = able(disk.checkpoints), able(list(disk.partial.values()))
    newest = alone[-1] if alone else -1
    promised, alone = (steps[-keep:] if keep else steps for steps in (promised, alone))
    by_themselves = [
        (newest_of_each(partial, one.past, one.step), masters_of_each(partial, one.past, one.step))
        for one in disk.partial.values()
        if one.step in {*promised, *alone} or one.step > newest
    ]
    return [*(outcome(left, step) for step in promised), *(outcome(partial, step) for step in alone), *by_themselves]


@given(disks(), st.none() | st.integers(1, 3))
@settings(max_examples=examples(150, 1500))
def test_needed_is_exactly_what_would_be_missed(disk: Disk, keep: int | None) -> None:
    everything = disk.checkpoints
    reachable = find_reachable(everything, PARTS, keep)
    assert list(reachable.before) == able(everything)
    before = outcomes(disk, everything, keep)
    for lost in disk.partial.values():
        left = [one for one in everything if one is not lost]
        assert (lost in reachable.needed) == (outcomes(disk, left, keep) != before)
    left = [one for one in everything if not one.is_partial or one in reachable.needed]
    assert outcomes(disk, left, keep) == before
    assert set(reachable.after) >= set(able(everything)[-keep:] if keep else able(everything))


@given(
    disks(),
    st.integers(1, 2),
    st.sampled_from(["parity", "full", "round_robin:3", "moments_in_turn:2", "select", None]),
    st.booleans(),
    st.data(),
)
@settings(max_examples=examples(60, 150))
def test_thinning_keeps_every_step_that_it_promises(
    disk: Disk, keep_full: int, strategy: str | None, reference: bool, data: st.DataObject
) -> None:
    everything = disk.checkpoints
    before = able(everything)
    chooser: Chooser | None = None
    if strategy is not None:
        options = ThinOptions(keep_full, *((None, ("odd", "norm")) if strategy == "select" else (strategy,)))
        chooser = Chooser.of(options, ANATOMY, PARTS, weights_are_masters=False)
    if not before:
        return
    facts = {
        one.path: FullFacts(
            "" if one.resumable else "nothing can resume from it",
            {one.step: data.draw(st.sampled_from([1.0, 2.0])), 1: data.draw(st.sampled_from([1.0, 2.0]))},
            dict.fromkeys(PARTS, 10),
        )
        for one in disk.full.values()
    }
    count = iter(range(1000))
    pruner = Pruner(
        checkpoints=everything,
        parts=PARTS,
        keep_full=keep_full,
        facts=lambda one: facts[one.path],
        chooser=chooser,
        reference=reference,
        thinned=[],
        new_lineage=lambda: f"thin-{next(count)}",
        path_of=lambda step: Path(f"partial/step-{step:08}"),
    )
    try:
        actions = pruner.decide()
    except SourceError as error:
        assert "no resumable checkpoint would remain" in str(error)
        return
    there = list(everything)
    for action in actions:
        if action.becomes == STAYS:
            continue
        assert action.becomes == (WEIGHTS if strategy is None else LINKED if reference else PARTIAL)
        assert not action.successor or action.successor.step == action.checkpoint.step
        there = [
            one for one in there if one.path not in (action.checkpoint.path, action.successor and action.successor.path)
        ]
        there += [action.successor] if action.successor else []
        steps = [step for step in before if outcome(there, step)]  # at each moment, not only in the end
        given_up = {one.checkpoint.step for one in actions if one.becomes == WEIGHTS}
        assert set(before) - given_up <= set(steps)
        if action.is_written:
            chosen = outcome(there, action.checkpoint.step)
            assert chosen
            assert {part for part in action.parts if chosen[1][part] != action.successor.path} == set()
        if action.links_to is not None:  # which is there, and as new as what a composite would take without it
            old = [part for part in PARTS if part not in action.parts]
            full = [one for one in there if not one.is_partial and one.step < action.checkpoint.step]
            known = [one for one in full if facts[one.path].losses.get(1) == facts[action.checkpoint.path].losses[1]]
            assert action.links_to in full
            for part in old:
                assert action.successor.step_of(part) == max(one.step_of(part) for one in known if one.resumable)
    newest = sorted(disk.full)[-keep_full:]
    assert {action.checkpoint.step for action in actions if action.becomes == STAYS} >= set(newest)


def test_an_incomplete_save_of_the_present_attempt_keeps_what_it_builds_on():
    """A later save may complete it, though no step that can be composed now needs the base."""
    disk = Disk()
    first, *others = PARTS
    disk.save(1, PARTS)
    disk.save(2, [first])
    disk.save(3, others)
    disk.resume(2)
    disk.save(4, [first])
    disk.partial[4] = replace(disk.partial[4], resumable=False)
    needed = find_reachable(disk.checkpoints, PARTS, keep=1).needed
    assert sorted(one.step for one in needed) == [1, 2, 3, 4]


def test_masters_that_differ_from_a_missing_save_count_as_not_saved() -> None:
    disk, one, other = Disk(), PARTS[0], PARTS[1]
    disk.save(1, PARTS)
    disk.save(2, [other], "m")
    disk.save(3, [one], "b")

    def masters_at_3(there: Sequence[RunCheckpoint]) -> int | None:
        sources = sources_at(there, 3, PARTS)
        assert sources is not None
        return newer_masters(there, sources).get(other, sources[other]).master_step_of(other)

    assert masters_at_3(disk.checkpoints) == 3
    del disk.partial[2]
    assert masters_at_3(disk.checkpoints) == 1
