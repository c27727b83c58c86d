"""What a training that was resumed holds, against its checkpoint: kinds of differences, and what they mean. Pure.

An *alarm* is a difference that makes the training another one than the one that was saved. A *note* is one that has a
known reason, such as moments rounded on purpose, or something that can't be compared.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np

from llmtailor.checkpoint.index import CheckpointIndex, TensorEntry
from llmtailor.checkpoint.optimizer import NAME_KEYS
from llmtailor.checkpoint.placement import Runs
from llmtailor.errors import counted, some
from llmtailor.model.roles import BUFFER, FLOATING, FROZEN, MASTER, WEIGHT, State, is_moment, is_optimizer_state
from llmtailor.storage.casts import cast

RUNS, RUN_ELEMENTS, MAX_RUNS = 8, 512, 64
CHUNK_BYTES, READ_BYTES = 1 << 22, 1 << 18
"""What a full comparison has of the training at once, and what it reads at once of a file: the latter is still in the
processor's cache when it is compared"""
Buffer = bytes | bytearray | memoryview
OFF, SAMPLE, FULL = "off", "sample", "full"
WARN, STOP = "warn", "stop"


class Kind(Enum):
    """How a state, or another value, differs from the checkpoint's."""

    MISSING = "missing"
    """The checkpoint has it, the training does not"""
    ZERO = "zero"
    ANOTHER_STEP = "of another step"
    PERMUTED = "of another param"
    OTHER_PART = "of another part"
    OTHER_RANK = "of another rank"
    ROUNDED = "rounded"
    FORWARD = "not the rounded master"
    """The weights of the forward pass are not the optimizer's"""
    UNSAVED = "not in the checkpoint"
    CHANGED = "other values"
    LACKING = "lacking in the checkpoint"
    """A file that the checkpoint must have, so that its loader has left something out"""
    UNTRAINED = "not trained"
    """The checkpoint trains it, the training does not"""
    UNFROZEN = "frozen in the checkpoint"
    UNTIED = "untied"
    TIED = "tied"
    STRAY = "not the model's"
    """The optimizer updates params that the model does not have"""


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference of a state."""

    state: State
    kind: Kind
    detail: str = ""
    """Which step, param, part or rank its values are of, if that was found"""


class Subject(Enum):
    """What is compared beside states."""

    STEP = "Adam's step"
    SCHEDULE = "schedule"
    RATE = "learning rate"
    OPTION = "option"
    SCALE = "loss scale"
    COUNTER = "counter"
    RANDOM = "random state"
    FILE = "file"
    OPTIMIZER = "optimizer"
    TIE = "tie"


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A difference of anything but states: a counter, the schedule, an option of a param group, random states."""

    subject: Subject
    what: str
    live: Any
    saved: Any
    is_alarm: bool
    kind: Kind = Kind.CHANGED
    count: int = 1
    """Params or groups that have it"""

    def __str__(self) -> str:
        if self.kind is Kind.LACKING:
            return f"{self.what} is missing in the checkpoint"
        if self.kind is Kind.UNTRAINED:
            return f"{self.what}: it has other params than the checkpoint's"
        if self.kind is Kind.UNTIED:
            return f"{self.what}: two params, tied in the checkpoint"
        if self.kind is Kind.TIED:
            return f"{self.what}: tied, two params in the checkpoint"
        if self.kind is Kind.STRAY:
            return f"{self.what}: {counted(self.live, 'param')} that the model does not have"
        if self.kind is Kind.MISSING:
            return f"{self.what}: missing, {_value(self.saved)} in the checkpoint"
        return f"{self.what} is {_value(self.live)}, {_value(self.saved)} in the checkpoint"


@dataclass(frozen=True, slots=True)
class Findings:
    """What one rank has found."""

    differences: tuple[Difference, ...] = ()
    mismatches: tuple[Mismatch, ...] = ()
    notes: tuple[str, ...] = ()


def sample_runs(numel: int, at_least: int = RUNS) -> Runs:
    """Return the elements to compare of so many: few long runs, because reads cost more than bytes; the first and the
    last run included. ``at_least`` is their number, so that the share of any of so many ranks is hit."""
    count = min(max(RUNS, at_least), MAX_RUNS)
    if numel <= count * RUN_ELEMENTS:
        return ((0, numel),) if numel else ()
    last = numel - RUN_ELEMENTS
    begins = [last * number // (count - 1) for number in range(count)]
    return tuple((begin, begin + RUN_ELEMENTS) for begin in begins)


def all_runs(numel: int, itemsize: int) -> list[Runs]:
    """Return all elements in chunks, each as one run."""
    size = CHUNK_BYTES // itemsize
    return [((begin, min(begin + size, numel)),) for begin in range(0, numel, size)]


def same_bytes(one: Buffer, other: Buffer) -> bool:
    """Return whether two buffers are equal, without copies: memoryviews compare their items one by one."""
    return len(one) == len(other) and (not len(one) or not memcmp(address_of(one), address_of(other), len(one)))


memcmp = ctypes.CDLL(None).memcmp
"""The C function; numpy would make an array of the differences"""
memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def address_of(data: Buffer) -> int:
    """Return where a buffer that is not empty begins in memory."""
    return np.frombuffer(data, np.uint8).ctypes.data


def is_zero(data: Buffer) -> bool:
    return not len(data) or not np.frombuffer(data, np.uint8).any()


def judge(live: Buffer, live_dtype: str, saved: Buffer, saved_dtype: str) -> Kind | None:
    """Return how elements differ from those of the checkpoint; None if they are the same.

    They are compared in the training's dtype, bit for bit. Values that were rounded to 16 bits in between are masters
    rebuilt from weights.
    """
    castable = live_dtype in FLOATING and saved_dtype in FLOATING
    if live_dtype == saved_dtype:
        if same_bytes(live, saved):
            return None
    elif castable and same_bytes(live, cast(saved, saved_dtype, live_dtype)):
        if same_bytes(cast(live, live_dtype, saved_dtype), saved):
            return None
        return Kind.ZERO if is_zero(live) else Kind.ROUNDED
    if castable and is_zero(live) and not is_zero(saved):
        return Kind.ZERO
    is_rounded = castable and any(
        same_bytes(live, cast(cast(saved, saved_dtype, dtype), dtype, live_dtype)) for dtype in ("BF16", "F16")
    )
    return Kind.ROUNDED if is_rounded else Kind.CHANGED


def has_vanished(live: Buffer, live_dtype: str, saved: Buffer, saved_dtype: str) -> bool:
    """Return whether elements are zero that are not so in the checkpoint: too small for the training's dtype."""
    mine, other = (
        np.frombuffer(cast(data, dtype, "F32"), np.float32)
        for data, dtype in ((live, live_dtype), (saved, saved_dtype))
    )
    return bool(((mine == 0) & (other != 0)).any())


def entry_of(index: CheckpointIndex, state: State, aliases: Mapping[str, Sequence[str]]) -> TensorEntry | None:
    """Return what the checkpoint holds of a state of the training.

    A param that was frozen when it was saved is found as such, and a tied one by any of its names, which ``aliases``
    lists. None if the checkpoint does not hold it.
    """
    kinds = {
        MASTER: (MASTER, FROZEN, WEIGHT),
        FROZEN: (FROZEN, MASTER, WEIGHT),
        BUFFER: (BUFFER, WEIGHT),
    }.get(state.kind, (state.kind,))
    names = dict.fromkeys([state.param, *aliases.get(state.param, ())])
    names |= dict.fromkeys([index.tied[name] for name in names if name in index.tied])
    for kind in kinds:
        for name in names:
            held = index.held.get(State(name, kind))
            if held is not None and held.is_here:
                return held
    return None


def expected_states(index: CheckpointIndex) -> dict[str, list[str]]:
    """Return the kinds of states that a resume loads of each param in the checkpoint."""
    expected: dict[str, list[str]] = {}
    for state, held in index.held.items():
        if state.kind != WEIGHT and held.is_here and held.numel and state.param in index.params:
            expected.setdefault(state.param, []).append(state.kind)
    return expected


_NOT_COMPARED = {*NAME_KEYS, "params", "lr", "initial_lr", "foreach", "fused", "capturable", "differentiable"}
"""Keys of param groups that are compared elsewhere, or do not change what the optimizer computes"""


@dataclass(frozen=True, slots=True)
class LiveGroup:
    """A param group of the live optimizer."""

    params: tuple[str, ...]
    hyper: Mapping[str, Any]
    rate: float | None = None
    """The learning rate that the live scheduler computes for its own step; None if unknown"""


def compare_groups(index: CheckpointIndex, groups: Sequence[LiveGroup]) -> tuple[list[Mismatch], list[str]]:
    """Compare the hyperparameters that each param has, whatever group it is in; return differences and notes.

    Stock loaders restore them from the checkpoint. Another value may be a wish; exchanged values are an alarm. A
    learning rate that differs is one unless the scheduler computes it, or there is none: then somebody has set it.
    """
    saved = {param: group.hyper for group in index.groups for param in group.params}
    if not saved:
        return [], ["param groups: the checkpoint does not state them"] if groups else []
    notes = []
    known = {frozenset(group.params) for group in index.groups}
    mine = [frozenset(group.params) for group in groups]
    if any(one & saved.keys() and one not in known for one in mine):
        notes.append(f"params are in {len(groups)} groups, in {len(index.groups)} groups in the checkpoint")
    found: dict[tuple[str, str, str], list[Mismatch]] = {}
    for group in groups:
        for param in group.params:
            if param not in saved:
                continue
            for one in _compare_group(group, saved[param]):
                found.setdefault((one.what, repr(one.live), repr(one.saved)), []).append(one)
    mismatches = [
        replace(ones[0], is_alarm=ones[0].is_alarm or (what, before, live) in found, count=len(ones))
        for (what, live, before), ones in found.items()
    ]
    return mismatches, notes


def _compare_group(group: LiveGroup, saved: Mapping[str, Any]) -> Iterable[Mismatch]:
    live, before = float_of(group.hyper.get("lr")), float_of(saved.get("lr"))
    if live is not None and before is not None:
        of_schedule = group.rate
        if not _alike(live, before):
            is_explained = of_schedule is None or _alike(live, of_schedule)
            yield Mismatch(Subject.RATE, "learning rate", live, before, not is_explained)
    for key in group.hyper.keys() & saved.keys() - _NOT_COMPARED:
        mine, other = plain(group.hyper[key]), plain(saved[key])
        if _is_plain(mine) and _is_plain(other) and not _alike(mine, other):
            yield Mismatch(Subject.OPTION, key, mine, other, False)


def compare_steps(
    index: CheckpointIndex, steps: Mapping[str, float | None], aliases: Mapping[str, Sequence[str]]
) -> list[Mismatch]:
    """Compare the optimizer's step of each param; ``steps`` are those of this rank, None for a param without state."""
    saved = index.steps()
    found: dict[tuple[float, float], int] = {}
    for param, live in steps.items():
        names = [name for name in (param, *aliases.get(param, ())) if name in saved]
        if live is not None and names and float(live) != float(saved[names[0]]):
            key = (float(live), float(saved[names[0]]))
            found[key] = found.get(key, 0) + 1
    return [
        Mismatch(Subject.STEP, "Adam's step", live, before, True, count=count)
        for (live, before), count in found.items()
    ]


def compare_ties(
    index: CheckpointIndex, params: Collection[str], aliases: Mapping[str, Sequence[str]]
) -> list[Mismatch]:
    """Compare which names are those of one param. ``params`` are those of the training. A file may hold a tied param by
    each of its names, but the optimizer's states are those of one."""
    found = [
        Mismatch(Subject.TIE, f"{name} and {stored}", None, None, True, Kind.UNTIED)
        for name, stored in index.tied.items()
        if name in params and stored in params
    ]
    trained = {state.param for state in index.held if is_optimizer_state(state.kind)}
    for stored, names in aliases.items():
        of_both = [name for name in names if name in trained and stored in trained]
        found += [Mismatch(Subject.TIE, f"{name} and {stored}", None, None, True, Kind.TIED) for name in of_both]
    return found


def compare_strays(count: int) -> list[Mismatch]:
    """Return what is wrong with an optimizer that updates so many params that are not the model's."""
    return [Mismatch(Subject.OPTIMIZER, "optimizer", count, 0, True, Kind.STRAY)] if count else []


@dataclass(frozen=True, slots=True)
class Schedule:
    """A learning rate scheduler."""

    state: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of DeepSpeed's, whose state is only where it stands: type and params, as the engine's config has them"""
    rates: Sequence[float] = ()
    """Where it stands: live those that it computes, if its rule is not in its state; saved those that it had"""


_POSITION = (
    *("last_epoch", "last_batch_iteration", "num_updates"),
    *("T_cur", "T_i", "best", "num_bad_epochs", "cooldown_counter"),  # of warm restarts and plateaus
)
_INNER = "_schedulers"
"""The schedulers that torch's SequentialLR and ChainedScheduler consist of"""


def compare_schedule(live: Schedule | None, saved: Schedule | None) -> tuple[list[Mismatch], list[str]]:
    """Compare schedulers; return differences and notes: where a schedule stands is an alarm, what it consists of not.

    Stock loaders restore the rates of the checkpoint, whatever rule computes those of the next steps.
    """
    if live is None or saved is None:
        if saved is not None:
            return [Mismatch(Subject.SCHEDULE, "schedule", None, "a state", False, Kind.MISSING)], []
        return [], ["schedule: the checkpoint has none to compare with"] if live is not None else []
    found = list(_compare_scheduler("schedule", live.state, saved.state))
    if any(one.is_alarm for one in found):
        return [one for one in found if one.is_alarm], []
    if live.options and saved.options:
        found += _compare_plain("schedule", live.options, saved.options, live.options.keys() | saved.options.keys())
    for number, (mine, other) in enumerate(zip(live.rates, saved.rates, strict=False)):
        if not math.isclose(mine, other, rel_tol=1e-5, abs_tol=1e-12):
            what = f"schedule: the learning rate of param group {number} at its step"
            found.append(Mismatch(Subject.SCHEDULE, what, mine, other, False))
            break
    return found, []


def _compare_scheduler(what: str, live: Mapping[str, Any], saved: Mapping[str, Any]) -> Iterator[Mismatch]:
    for key in _POSITION:
        mine, other = float_of(live.get(key)), float_of(saved.get(key))
        if mine is not None and other is not None and mine != other:
            yield Mismatch(Subject.SCHEDULE, f"{what}: {key}", _whole(mine), _whole(other), True)
    ours, others = live.get(_INNER), saved.get(_INNER)
    if isinstance(ours, (list, tuple)) and isinstance(others, (list, tuple)):
        if len(ours) != len(others):
            yield Mismatch(Subject.SCHEDULE, f"{what}: number of schedulers", len(ours), len(others), False)
        for number, (mine, other) in enumerate(zip(ours, others, strict=False)):
            yield from _compare_scheduler(f"{what} {number}", mine, other)
    if more := sorted(key for key in live.keys() - saved.keys() if key[0] != "_" and key not in _NOT_OF_SCHEDULES):
        yield Mismatch(Subject.SCHEDULE, f"{what}: {', '.join(more)}", "of this scheduler", "another one", False)
    keys = live.keys() & saved.keys() - {*_POSITION, *_NOT_OF_SCHEDULES}
    yield from _compare_plain(what, live, saved, keys)


_NOT_OF_SCHEDULES = {"_step_count", "_last_lr", "_get_lr_called_within_step", "verbose"}


def _compare_plain(
    what: str, live: Mapping[str, Any], saved: Mapping[str, Any], keys: Iterable[str]
) -> Iterator[Mismatch]:
    for key in sorted(keys):
        mine, other = plain(live.get(key)), plain(saved.get(key))
        if _is_plain(mine) and _is_plain(other) and not _alike(mine, other):
            yield Mismatch(Subject.SCHEDULE, f"{what}: {key}", mine, other, False)


def compare_counters(subject: Subject, live: Mapping[str, Any], saved: Mapping[str, Any]) -> list[Mismatch]:
    """Compare counters, the loss scale and its like by name; those that only one side has are left out."""
    return [
        Mismatch(subject, key, plain(live[key]), plain(saved[key]), True)
        for key in live
        if key in saved and saved[key] is not None and not _alike(plain(live[key]), plain(saved[key]))
    ]


@dataclass(frozen=True, slots=True)
class Cause:
    """The likeliest cause of the differences, and what it means for the training."""

    what: str
    meaning: str


def find_cause(facts: Facts) -> Cause:
    """Return the likeliest cause of the alarms; without one, nothing is the same."""
    kinds = facts.kinds
    moments = {kind for state_kind, found in kinds.items() if is_moment(state_kind) for kind in found}
    masters = kinds.get(MASTER, {}).keys()
    others = {kind for found in kinds.values() for kind in found}
    if any(one.kind is Kind.STRAY for one in facts.mismatches):
        return Cause(
            "the optimizer was made before the model got other params (assign=True, resize_token_embeddings, "
            "fully_shard): it updates those that were replaced",
            "the params that replaced them are never trained",
        )
    if facts.moments_gone and facts.masters_gone:
        return Cause(
            "the checkpoint was not loaded: neither its weights nor its optimizer states are in the training",
            "it starts from other weights",
        )
    if facts.moments_gone:
        what = "only the weights were loaded, not the optimizer's states"
        if facts.lacks_scheduler:
            what = "the checkpoint has no scheduler.pt, and without it the Trainer loads no optimizer states either"
        elif facts.schedule_restarted:
            what = "optimizer.pt and scheduler.pt were not loaded, only the weights"
        return Cause(what, "the optimizer restarts: its next steps are too large or too small")
    if Kind.UNTRAINED in others:
        return Cause(
            "params that the checkpoint trains are not trained: frozen, or left out of the optimizer",
            _UNTRAINED,
        )
    if Kind.UNFROZEN in others:
        return Cause(
            "params that were frozen when the checkpoint was saved are trained",
            "they leave the values of the checkpoint",
        )
    if Kind.OTHER_RANK in others:
        return Cause(
            "states of another rank were loaded: shards were swapped, or one was loaded twice",
            "weights and moments belong to other params or other elements of them",
        )
    if steps := facts.other_steps:
        return Cause(f"states are of another checkpoint: {some(steps)}", "part of the training goes back to that step")
    if {Kind.PERMUTED, Kind.OTHER_PART} & others:
        return Cause(
            "states were given to other params: the order of the params differs from that of the checkpoint",
            "the optimizer scales each update by another param's gradients",
        )
    if Kind.CHANGED in masters and not moments:
        return Cause(
            "the weights are not the checkpoint's, but the optimizer's states are: keys renamed, or loaded with "
            "strict=False",
            "params keep other values, and the optimizer continues as if they were right",
        )
    if Kind.UNSAVED in masters:
        return Cause(
            "the checkpoint's files have no weights of that name: keys renamed, or left out when it was saved",
            "the loader gave these params nothing, so they keep their initial values",
        )
    if Kind.MISSING in moments:
        return Cause("the optimizer has states of some params only", "the optimizer restarts for the others")
    if Kind.ZERO in moments:
        return Cause(
            "moments were reset to zero, or rounded to it", "the optimizer restarts for them, or divides by zero"
        )
    if facts.schedule_restarted:
        return Cause("the schedule was restarted", "the learning rates of the next steps are those of its beginning")
    if Kind.FORWARD in others:
        return Cause(
            "the weights of the forward pass and the optimizer's masters are of different saves",
            "the first step computes gradients at other weights than those that it updates",
        )
    if Kind.UNTIED in others:
        return Cause(_CAUSES[Subject.TIE], _TIED)
    if moments or masters:
        return Cause("states have other values than the checkpoint's", "training continues from a different state")
    if others:
        return Cause("frozen params or buffers are not the checkpoint's", "the forward pass is another one")
    alarms = [one for one in facts.mismatches if one.is_alarm]
    if alarms:
        first = alarms[0]
        return Cause(
            _CAUSES.get(first.subject, f"{first.what} differs"),
            "the next steps differ from those of the training that was saved",
        )
    return Cause("all states were rounded: the training has another precision", "it continues from other values")


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

    kinds: Mapping[str, Mapping[Kind, int]]
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
        gone = (Kind.MISSING, Kind.ZERO)
        return (
            bool(kinds)
            and all(sum(self.kinds.get(kind, {}).get(how, 0) for how in gone) == self.totals[kind] for kind in kinds)
            and any(self.kinds.get(kind, {}).get(Kind.MISSING, 0) for kind in kinds)
        )

    @property
    def masters_gone(self) -> bool:
        """Whether most masters have values of their own"""
        other = self.kinds.get(MASTER, {}).get(Kind.CHANGED, 0)
        return other > 0 and other * 2 >= self.totals.get(MASTER, 0)

    @property
    def schedule_restarted(self) -> bool:
        return any(one.subject is Subject.SCHEDULE and one.is_alarm for one in self.mismatches)


def rates_off_schedule(live: Sequence[float | None], scheduled: Sequence[float]) -> str | None:
    """Return what is to be said of the learning rates after a step, by group, if they are not what the scheduler
    computes; None if they are, or that is unknown."""
    for number, (mine, other) in enumerate(zip(live, scheduled, strict=False)):
        if mine is not None and not _alike(mine, other):
            return f"the learning rate of param group {number} is {mine:g}, and the scheduler's is {other:g}"
    return None


def float_of(value: Any) -> float | None:
    value = plain(value)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def plain(value: Any) -> Any:
    """Return tensors and numpy scalars as numbers, tuples as lists."""
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if hasattr(value, "item") and getattr(value, "numel", lambda: getattr(value, "size", 0))() == 1:
        return value.item()
    return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=1e-6)
    return bool(one == other)


def _whole(value: float) -> float | int:
    return int(value) if value.is_integer() else value


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


@dataclass(frozen=True, slots=True)
class Row:
    """States that differ alike."""

    state_kind: str
    kind: Kind
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
    rows: tuple[Row, ...] = ()
    mismatches: tuple[Mismatch, ...] = ()
    notes: tuple[str, ...] = ()
    cause: Cause | None = None
    seconds: float = 0.0

    @property
    def is_same(self) -> bool:
        """Whether nothing that was compared is an alarm, and some of it is exactly the checkpoint's"""
        has_alarm = any(row.is_alarm for row in self.rows) or any(one.is_alarm for one in self.mismatches)
        return not has_alarm and (self.num_same > 0 or not self.num_states)

    @property
    def num_same(self) -> int:
        """States that are the checkpoint's; those that differ for a known reason are not"""
        differing = {
            (param, row.state_kind)
            for row in self.rows
            if row.kind not in (Kind.UNSAVED, Kind.UNTIED)
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
            "others": [{"what": str(one), "kind": one.kind.value, "is_alarm": one.is_alarm} for one in self.mismatches],
            "notes": list(self.notes),
            "seconds": round(self.seconds, 3),
        }


_SHOWN = 8


def summarize(
    index: CheckpointIndex,
    ranks: Sequence[Findings],
    how: str,
    totals: Mapping[str, int],
    *,
    lacks_scheduler: bool = False,
    seconds: float = 0.0,
) -> Attestation:
    """Join what the ranks have found. ``totals`` are the states in the checkpoint that were to be compared, by kind.

    A state counts once, whatever number of ranks has elements of it.
    """
    params: dict[tuple[str, Kind, str], dict[str, None]] = {}
    by_rank: dict[tuple[str, Kind, str], set[int]] = {}
    for rank, found in enumerate(ranks):
        for one in found.differences:
            key = (one.state.kind, one.kind, one.detail)
            params.setdefault(key, {})[one.state.param] = None
            by_rank.setdefault(key, set()).add(rank)
    rows = tuple(
        Row(kind, how_, detail, tuple(names), tuple(sorted(by_rank[kind, how_, detail])), how_ is not Kind.ROUNDED)
        for (kind, how_, detail), names in params.items()
    )
    mismatches = tuple({str(one): one for found in ranks for one in found.mismatches}.values())
    notes = tuple(dict.fromkeys(note for found in ranks for note in found.notes))
    kinds: dict[str, dict[Kind, int]] = {}
    for row in rows:
        if row.is_alarm:
            of_kind = kinds.setdefault(row.state_kind, {})
            of_kind[row.kind] = of_kind.get(row.kind, 0) + len(row.params)
    steps = dict.fromkeys(row.detail for row in rows if row.kind is Kind.ANOTHER_STEP)
    facts = Facts(kinds, totals, mismatches, list(steps), lacks_scheduler)
    made = Attestation(index.name, index.global_step, how, sum(totals.values()), rows, mismatches, notes, None, seconds)
    return made if made.is_same else replace(made, cause=find_cause(facts))


def with_random(found: Attestation, ranks: Sequence[tuple[Sequence[Mismatch], str]]) -> Attestation:
    """Add what each rank has found of its random states: differences, and a note if they can't be compared."""
    where = [rank for rank, (mismatches, _) in enumerate(ranks) if mismatches]
    mismatches = dict.fromkeys(one for mismatches, _ in ranks for one in mismatches)
    notes = dict.fromkeys(note for _, note in ranks if note)
    cause = found.cause
    if where and cause is None:
        what = f"the random states were not restored on {len(where)} of {len(ranks)} ranks"
        cause = Cause(what, "dropout and the order of the data differ")
    return replace(found, mismatches=(*found.mismatches, *mismatches), notes=(*found.notes, *notes), cause=cause)


def lacking(name: str, files: Sequence[str], how: str) -> Attestation:
    """Return the attestation of a checkpoint that lacks files, so that what it holds is not known."""
    what = f"the checkpoint lacks {some(files)}, which a resume needs"
    cause = Cause(what, "what these files hold restarts, and so does whatever the loader skips without them")
    mismatches = tuple(Mismatch(Subject.FILE, file, None, None, True, Kind.LACKING) for file in files)
    return Attestation(name, 0, how, 0, (), mismatches, (), cause)


def other_params(name: str, what: str, how: str) -> Attestation:
    """Return the attestation of a training whose optimizer has other params than that of the checkpoint."""
    cause = Cause(f"the optimizer has other params than it was saved with: {what}", _UNTRAINED)
    mismatch = Mismatch(Subject.OPTIMIZER, "optimizer", None, None, True, Kind.UNTRAINED)
    return Attestation(name, 0, how, 0, (), (mismatch,), (), cause)


def headline(found: Attestation) -> str:
    """Return the one line that says whether the training is the one that was saved."""
    how = "sampled" if found.how == SAMPLE else "every byte"
    counts = f"{found.num_same:,} of {found.num_states:,} states are the checkpoint's ({how})"
    if found.is_same:
        return f"resumed from {found.checkpoint}: {counts}"
    wrong = f"NOT THE TRAINING THAT WAS SAVED: resumed from {found.checkpoint}"
    if found.num_same < found.num_states or not found.num_states:
        return f"{wrong}, but only {counts}"
    return f"{wrong}; all {found.num_states:,} states of it are the same ({how}), but other things differ"


def lines_of(found: Attestation) -> list[str]:
    """Return the report: the headline, the cause, what differs, and the notes."""
    lines = [headline(found)]
    if found.cause is not None:
        lines += [f"  cause: {found.cause.what}", f"  effect: {found.cause.meaning}"]
    lines += [f"  {row}" for row in found.rows if row.is_alarm]
    lines += [f"  {one}{_times(one)}" for one in found.mismatches if one.is_alarm]
    lines += [f"  note: {row}" for row in found.rows if not row.is_alarm]
    lines += [f"  note: {one}{_times(one)}" for one in found.mismatches if not one.is_alarm]
    return [*lines, *(f"  note: {note}" for note in found.notes)]


def _times(one: Mismatch) -> str:
    return f" ({one.count:,} params)" if one.count > 1 else ""


@dataclass(slots=True)
class Losses:
    """The log of an attempt that was abandoned, against that of the attempt that repeats its steps."""

    before: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Step -> its log entry"""
    is_evidence: bool = True
    """Whether equal losses show that the resume is right: they don't show what the schedule will be"""
    same: list[int] = field(default_factory=list)

    def see(self, step: int, logs: Mapping[str, Any]) -> str | None:
        """Take a log entry of the new attempt; return what is to be said about it, if anything.

        The first loss after a resume is computed by weights and data alone, the second also by the optimizer's first
        step. So two equal losses show that the resume is right; other kernels or ranks may change them, so different
        ones show nothing. The rates of all steps are compared, until some differ.
        """
        old = self.before.get(step, {})
        if self.is_evidence and "learning_rate" in old and "learning_rate" in logs:
            live, before = logs["learning_rate"], old["learning_rate"]
            if not _alike(live, before):
                self.is_evidence = False
                return f"the learning rate of step {step} is {live:g}, {before:g} in the abandoned attempt"
        if "loss" not in old or "loss" not in logs or len(self.same) >= 2:
            return None
        if logs["loss"] == old["loss"]:
            self.same.append(step)
            if len(self.same) == 2 and self.is_evidence:
                first, second = self.same
                what = f"the losses of steps {first} and {second} equal those of the abandoned attempt"
                return f"{what}: strong evidence that the resume is right"
            return None
        self.before = {}
        return f"the loss of step {step} is {logs['loss']:g}, {old['loss']:g} in the abandoned attempt"
