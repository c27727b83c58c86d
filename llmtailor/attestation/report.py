"""What an attestation has found on all ranks, its likeliest cause, and the report of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmtailor.attestation.compare import SAMPLE, Mismatch, MismatchKind, RankResult, Subject
from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.errors import counted, some
from llmtailor.model.roles import MASTER, is_moment

_RESTARTED = "the schedule was restarted"


@dataclass(frozen=True, slots=True)
class Cause:
    """The likeliest cause of the differences, and what it means for the training."""

    what: str
    meaning: str


def find_cause(facts: Facts) -> Cause:
    """Return the likeliest cause of the alarms; without one, nothing is the same."""
    kinds = facts.kinds
    moments = {kind for state_kind, counts in kinds.items() if is_moment(state_kind) for kind in counts}
    masters = kinds.get(MASTER, {}).keys()
    other_kinds = {kind for counts in kinds.values() for kind in counts}
    if any(mismatch.kind is MismatchKind.STRAY for mismatch in facts.mismatches):
        return Cause(
            "the optimizer was made before the model got other params (assign=True, resize_token_embeddings, "
            "fully_shard): it updates those that were replaced",
            "the params that replaced them are never trained",
        )
    if (unloaded := _unloaded(facts)) is not None:
        return unloaded
    if MismatchKind.UNTRAINED in other_kinds:
        what = "params that the checkpoint trains are not trained: frozen, or left out of the optimizer"
        return Cause(what, _UNTRAINED)
    if MismatchKind.UNFROZEN in other_kinds:
        return Cause(
            "params that were frozen when the checkpoint was saved are trained",
            "they leave the values of the checkpoint",
        )
    if MismatchKind.OTHER_RANK in other_kinds:
        return Cause(
            "states of another rank were loaded: shards were swapped, or one was loaded twice",
            "weights and moments belong to other params or other elements of them",
        )
    if steps := facts.other_steps:
        return Cause(f"states are of another checkpoint: {some(steps)}", "part of the training goes back to that step")
    if {MismatchKind.PERMUTED, MismatchKind.OTHER_PART} & other_kinds:
        return Cause(
            "states were given to other params: the order of the params differs from that of the checkpoint",
            "the optimizer scales each update by another param's gradients",
        )
    if MismatchKind.CHANGED in masters and not moments:
        return Cause(
            "the weights are not the checkpoint's, but the optimizer's states are: keys renamed, or loaded with "
            "strict=False",
            "params keep other values, and the optimizer continues as if they were right",
        )
    if MismatchKind.UNSAVED in masters:
        return Cause(
            "the checkpoint's files have no weights of that name: keys renamed, or left out when it was saved",
            "the loader gave these params nothing, so they keep their initial values",
        )
    if MismatchKind.MISSING in moments:
        return Cause("the optimizer has states of some params only", "the optimizer restarts for the others")
    if MismatchKind.ZERO in moments:
        return Cause(
            "moments were reset to zero, or rounded to it", "the optimizer restarts for them, or divides by zero"
        )
    if facts.schedule is not None:
        return Cause(facts.schedule, "the learning rates of the next steps are those of another step")
    if MismatchKind.FORWARD in other_kinds:
        return Cause(
            "the weights of the forward pass and the optimizer's masters are of different saves",
            "the first step computes gradients at other weights than those that it updates",
        )
    if MismatchKind.UNTIED in other_kinds:
        return Cause(_CAUSES[Subject.TIE], _TIED)
    if moments or masters:
        return Cause("states have other values than the checkpoint's", "training continues from a different state")
    if other_kinds:
        return Cause("frozen params or buffers are not the checkpoint's", "the forward pass is another one")
    if alarms := [mismatch for mismatch in facts.mismatches if mismatch.is_alarm]:
        what = _CAUSES.get(alarms[0].subject, f"{alarms[0].what} differs")
        return Cause(what, "the next steps differ from those of the training that was saved")
    return Cause("all states were rounded: the training has another precision", "it continues from other values")


def _unloaded(facts: Facts) -> Cause | None:
    """Return the cause if the optimizer's states, or all states, are not in the training."""
    if not facts.moments_gone:
        return None
    if facts.masters_gone:
        what = "the checkpoint was not loaded: neither its weights nor its optimizer states are in the training"
        return Cause(what, "it starts from other weights")
    what = "only the weights were loaded, not the optimizer's states"
    if facts.lacks_scheduler:
        what = "the checkpoint has no scheduler.pt, and without it the Trainer loads no optimizer states either"
    elif facts.schedule == _RESTARTED:
        what = "optimizer.pt and scheduler.pt were not loaded, only the weights"
    return Cause(what, "the optimizer restarts: its next steps are too large or too small")


_UNTRAINED = "they keep the values of the checkpoint"
_TIED = "each has its own values and updates, or they now have the same"
_CAUSES = {
    Subject.STEP: "Adam's step count is not the checkpoint's, so its bias correction is another one",
    Subject.OPTION: "options of the optimizer, such as the weight decay, were exchanged between params",
    Subject.TIE: "params are not tied as they were when the checkpoint was saved",
    Subject.RATE: "the learning rate is neither the checkpoint's nor the schedule's",
}


@dataclass(frozen=True, slots=True)
class Facts:
    """What `find_cause` decides by."""

    kinds: Mapping[str, Mapping[MismatchKind, int]]
    """Kind of state -> kind of alarm -> states"""
    totals: Mapping[str, int]
    """Kind of state -> states in the checkpoint that were compared"""
    mismatches: Sequence[Mismatch] = ()
    other_steps: Sequence[str] = ()
    lacks_scheduler: bool = False

    @property
    def moments_gone(self) -> bool:
        """Whether no moment is in the training"""
        kinds = [kind for kind in self.totals if is_moment(kind)]
        gone = (MismatchKind.MISSING, MismatchKind.ZERO)
        return (
            bool(kinds)
            and all(sum(self.kinds.get(kind, {}).get(how, 0) for how in gone) == self.totals[kind] for kind in kinds)
            and any(self.kinds.get(kind, {}).get(MismatchKind.MISSING, 0) for kind in kinds)
        )

    @property
    def masters_gone(self) -> bool:
        """Whether most masters have values of their own"""
        num_changed = self.kinds.get(MASTER, {}).get(MismatchKind.CHANGED, 0)
        return num_changed > 0 and num_changed * 2 >= self.totals.get(MASTER, 0)

    @property
    def schedule(self) -> str | None:
        """Where the schedule stands, if not where the checkpoint's stood"""
        alarms = [bad for bad in self.mismatches if bad.subject is Subject.SCHEDULE and bad.is_alarm]
        if not alarms:
            return None
        live, saved = alarms[0].live, alarms[0].saved
        if live <= 0:  # DeepSpeed's begin at -1
            return _RESTARTED
        if alarms[0].kind is not MismatchKind.ANOTHER_STEP:
            return "the schedule does not stand where the checkpoint's stood"
        return f"the schedule is {abs(saved - live):,} steps {'behind' if live < saved else 'ahead'}"


@dataclass(frozen=True, slots=True)
class MismatchGroup:
    """States that differ alike."""

    state_kind: str
    kind: MismatchKind
    detail: str
    params: tuple[str, ...]
    ranks: tuple[int, ...]
    is_alarm: bool

    def __str__(self) -> str:
        how = f"{self.kind.value} ({self.detail})" if self.detail else self.kind.value
        return f"{self.state_kind} of {counted(len(self.params), 'param')}: {how}: {some(self.params)}"


@dataclass(frozen=True, slots=True)
class Attestation:
    """What a resumed training holds, compared with its checkpoint on all ranks."""

    checkpoint: str
    step: int
    how: str
    """``sample`` or ``full``"""
    num_states: int
    """States of the checkpoint that were compared"""
    rows: tuple[MismatchGroup, ...] = ()
    mismatches: tuple[Mismatch, ...] = ()
    notes: tuple[str, ...] = ()
    cause: Cause | None = None
    seconds: float = 0.0
    world_size: int = 1

    @property
    def is_same(self) -> bool:
        """Whether nothing that was compared is an alarm, and some of it is exactly the checkpoint's"""
        has_alarm = any(row.is_alarm for row in self.rows) or any(mismatch.is_alarm for mismatch in self.mismatches)
        return not has_alarm and (self.num_same > 0 or not self.num_states)

    @property
    def num_same(self) -> int:
        """States that are the checkpoint's; those that differ for a known reason are not"""
        differing = {
            (param, row.state_kind)
            for row in self.rows
            if row.kind not in (MismatchKind.UNSAVED, MismatchKind.UNTIED)
            for param in row.params
        }
        return max(0, self.num_states - len(differing))

    def to_json(self) -> dict[str, Any]:
        return {
            "checkpoint": self.checkpoint,
            "step": self.step,
            "how": self.how,
            "is_same": self.is_same,
            "num_states": self.num_states,
            "num_same": self.num_same,
            "cause": None if self.cause is None else self.cause.what,
            "meaning": None if self.cause is None else self.cause.meaning,
            "states": [
                {
                    "state": row.state_kind,
                    "kind": row.kind.value,
                    "detail": row.detail,
                    "num_params": len(row.params),
                    "params": list(row.params[:_SHOWN]),
                    "ranks": list(row.ranks),
                    "is_alarm": row.is_alarm,
                }
                for row in self.rows
            ],
            "others": [
                {"what": str(bad), "kind": bad.kind.value, "is_alarm": bad.is_alarm, "ranks": list(bad.ranks)}
                for bad in self.mismatches
            ],
            "notes": list(self.notes),
            "seconds": round(self.seconds, 3),
        }


_SHOWN = 8


def summarize(
    index: CheckpointIndex,
    ranks: Sequence[RankResult],
    how: str,
    totals: Mapping[str, int],
    *,
    lacks_scheduler: bool = False,
    seconds: float = 0.0,
) -> Attestation:
    """Join what the ranks have found. ``totals`` are the states in the checkpoint that were to be compared, by kind.

    A state counts once, whatever number of ranks has elements of it.
    """
    params: dict[tuple[str, MismatchKind, str], dict[str, None]] = {}
    by_rank: dict[tuple[str, MismatchKind, str], set[int]] = {}
    for rank, findings in enumerate(ranks):
        for difference in findings.differences:
            key = (difference.state.kind, difference.kind, difference.detail)
            params.setdefault(key, {})[difference.state.param] = None
            by_rank.setdefault(key, set()).add(rank)
    rows = tuple(
        MismatchGroup(
            kind,
            how_,
            detail,
            tuple(names),
            tuple(sorted(by_rank[kind, how_, detail])),
            how_ is not MismatchKind.ROUNDED,
        )
        for (kind, how_, detail), names in params.items()
    )
    mismatches = with_ranks([findings.mismatches for findings in ranks])
    notes = tuple(dict.fromkeys(note for findings in ranks for note in findings.notes))
    kinds: dict[str, dict[MismatchKind, int]] = {}
    for row in rows:
        if row.is_alarm:
            of_kind = kinds.setdefault(row.state_kind, {})
            of_kind[row.kind] = of_kind.get(row.kind, 0) + len(row.params)
    steps = dict.fromkeys(row.detail for row in rows if row.kind is MismatchKind.ANOTHER_STEP)
    facts = Facts(kinds, totals, mismatches, list(steps), lacks_scheduler)
    attestation = Attestation(
        *(index.name, index.global_step, how, sum(totals.values()), rows, mismatches, notes, None, seconds, len(ranks))
    )
    return attestation if attestation.is_same else replace(attestation, cause=find_cause(facts))


def with_ranks(by_rank: Sequence[Sequence[Mismatch]]) -> tuple[Mismatch, ...]:
    """Join what each rank has found."""
    by_text: dict[str, tuple[Mismatch, list[int]]] = {}
    for rank, mismatches in enumerate(by_rank):
        for mismatch in mismatches:
            by_text.setdefault(str(mismatch), (mismatch, []))[1].append(rank)
    return tuple(replace(mismatch, ranks=tuple(where)) for mismatch, where in by_text.values())


def with_random_states(attestation: Attestation, ranks: Sequence[tuple[Sequence[Mismatch], str]]) -> Attestation:
    """Add what each rank has found of its random states: differences, and a note if they can't be compared."""
    where = [rank for rank, (mismatches, _) in enumerate(ranks) if mismatches]
    mismatches = with_ranks([mismatches for mismatches, _ in ranks])
    notes = dict.fromkeys(note for _, note in ranks if note)
    cause = attestation.cause
    if where and cause is None:
        kinds = {mismatch.kind for mismatch in mismatches}
        how = "exchanged" if MismatchKind.OTHER_RANK in kinds else "not restored"
        what = f"the random states were {how} on {len(where)} of {len(ranks)} ranks"
        cause = Cause(what, "dropout and the order of the data differ")
    mismatches = (*attestation.mismatches, *mismatches)
    return replace(attestation, mismatches=mismatches, notes=(*attestation.notes, *notes), cause=cause)


def lacking(name: str, files: Sequence[str], how: str) -> Attestation:
    """Return the attestation of a checkpoint that lacks files, so that what it holds is not known."""
    what = f"the checkpoint lacks {some(files)}, which a resume needs"
    cause = Cause(what, "what these files hold restarts, and so does whatever the loader skips without them")
    mismatches = tuple(Mismatch(Subject.FILE, file, None, None, True, MismatchKind.LACKING) for file in files)
    return Attestation(name, 0, how, 0, (), mismatches, (), cause)


def other_params(name: str, what: str, how: str) -> Attestation:
    """Return the attestation of a training whose optimizer has other params than that of the checkpoint."""
    cause = Cause(f"the optimizer has other params than it was saved with: {what}", _UNTRAINED)
    mismatch = Mismatch(Subject.OPTIMIZER, "optimizer", None, None, True, MismatchKind.UNTRAINED)
    return Attestation(name, 0, how, 0, (), (mismatch,), (), cause)


def headline(attestation: Attestation) -> str:
    """Return the one line that says whether the training is the one that was saved."""
    how = "sampled" if attestation.how == SAMPLE else "every byte"
    counts = f"{attestation.num_same:,} of {attestation.num_states:,} states are the checkpoint's ({how})"
    if attestation.is_same:
        return f"resumed from {attestation.checkpoint}: {counts}"
    wrong = f"NOT THE TRAINING THAT WAS SAVED: resumed from {attestation.checkpoint}"
    if attestation.num_same < attestation.num_states or not attestation.num_states:
        return f"{wrong}, but only {counts}"
    return f"{wrong}; all {attestation.num_states:,} states of it are the same ({how}), but other things differ"


def lines_of(attestation: Attestation) -> list[str]:
    """Return the report: the headline, the cause, what differs, and the notes."""
    lines = [headline(attestation)]
    if attestation.cause is not None:
        lines += [f"  cause: {attestation.cause.what}", f"  effect: {attestation.cause.meaning}"]
    for is_alarm, mark in ((True, ""), (False, "note: ")):
        both: list[MismatchGroup | Mismatch] = [*attestation.rows, *attestation.mismatches]
        chosen = [item for item in both if item.is_alarm == is_alarm]
        lines += [f"  {mark}{item}{_times(item)}{_where(item, attestation.world_size)}" for item in chosen]
    return [*lines, *(f"  note: {note}" for note in attestation.notes)]


def _where(item: MismatchGroup | Mismatch, world_size: int) -> str:
    if not 0 < len(item.ranks) < world_size:
        return ""
    return f" (on {'rank' if len(item.ranks) == 1 else 'ranks'} {some(map(str, item.ranks))})"


def _times(item: MismatchGroup | Mismatch) -> str:
    return f" ({item.count:,} params)" if isinstance(item, Mismatch) and item.count > 1 else ""
