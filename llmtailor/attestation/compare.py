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
from llmtailor.checkpoint.optimizer import COUNTERS, NAME_KEYS
from llmtailor.checkpoint.placement import Runs
from llmtailor.containers.unpickle import as_number
from llmtailor.errors import counted
from llmtailor.model.dtypes import FLOATING
from llmtailor.model.roles import BUFFER, FROZEN, MASTER, WEIGHT, State, is_optimizer_state
from llmtailor.storage.casts import cast, roundings

RUNS, RUN_ELEMENTS, MAX_RUNS = 8, 512, 64
CHUNK_BYTES, READ_BYTES = 1 << 22, 1 << 18
"""What a full comparison has of the training at once, and what it reads at once of a file: the latter is still in the
processor's cache when it is compared"""
Buffer = bytes | bytearray | memoryview
OFF, SAMPLE, FULL = "off", "sample", "full"
WARN, STOP = "warn", "stop"


class MismatchKind(Enum):
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
class ElementDiff:
    """A difference of a state."""

    state: State
    kind: MismatchKind
    detail: str = ""
    """Which step, param, part or rank its values are of, if that was found"""


class Subject(Enum):
    """What is compared beside states."""

    STEP = "Adam's step"
    NUMBER = "number"
    """A state of a param that is a single number, or what an optimizer counts in a param group"""
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
    kind: MismatchKind = MismatchKind.CHANGED
    count: int = 1
    """Params that have it"""
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.kind is MismatchKind.OTHER_RANK:
            return f"{self.what} are those of rank {self.live}"
        if self.kind is MismatchKind.LACKING:
            return f"{self.what} is missing in the checkpoint"
        if self.kind is MismatchKind.UNTRAINED:
            return f"{self.what}: it has other params than the checkpoint's"
        if self.kind is MismatchKind.UNTIED:
            return f"{self.what}: two params, tied in the checkpoint"
        if self.kind is MismatchKind.TIED:
            return f"{self.what}: tied, two params in the checkpoint"
        if self.kind is MismatchKind.STRAY:
            return f"{self.what}: {counted(self.live, 'param')} that the model does not have"
        if self.kind is MismatchKind.MISSING:
            return f"{self.what}: missing, {_value(self.saved)} in the checkpoint"
        return f"{self.what} is {_value(self.live)}, {_value(self.saved)} in the checkpoint"


@dataclass(frozen=True, slots=True)
class RankResult:
    """What one rank has found."""

    differences: tuple[ElementDiff, ...] = ()
    mismatches: tuple[Mismatch, ...] = ()
    notes: tuple[str, ...] = ()


def sample_runs(numel: int, at_least: int = RUNS) -> Runs:
    """Return the elements to compare: few long runs, because reads cost more than bytes, among them the first and the
    last elements. ``at_least`` runs are chosen, so that every rank's shard is sampled."""
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


def same_bytes(a: Buffer, b: Buffer) -> bool:
    """Return whether two buffers are equal, without copies: memoryviews compare their items one by one."""
    return len(a) == len(b) and (not len(a) or not memcmp(address_of(a), address_of(b), len(a)))


memcmp = ctypes.CDLL(None).memcmp
"""The C function; numpy would make an array of the differences"""
memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def address_of(data: Buffer) -> int:
    """Return the address of a buffer's first byte; the buffer is not empty."""
    return np.frombuffer(data, np.uint8).ctypes.data


def is_zero(data: Buffer) -> bool:
    return not len(data) or not np.frombuffer(data, np.uint8).any()


def judge(live: Buffer, live_dtype: str, saved: Buffer, saved_dtype: str) -> MismatchKind | None:
    """Return how elements differ from those of the checkpoint; None if they are the same.

    They are compared in the training's dtype, bit for bit. Values that were rounded to 16 bits in between are masters
    rebuilt from weights.
    """
    if live_dtype == saved_dtype and same_bytes(live, saved):
        return None
    if not {live_dtype, saved_dtype} <= FLOATING:
        return MismatchKind.CHANGED
    rounded = roundings(saved, saved_dtype, live_dtype, ("BF16", "F16"))
    if same_bytes(live, next(rounded)):
        if same_bytes(cast(live, live_dtype, saved_dtype), saved):
            return None
        return MismatchKind.ZERO if is_zero(live) else MismatchKind.ROUNDED
    if is_zero(live) and not is_zero(saved):
        return MismatchKind.ZERO
    is_rounded = any(same_bytes(live, values) for values in rounded)
    return MismatchKind.ROUNDED if is_rounded else MismatchKind.CHANGED


def has_vanished(live: Buffer, live_dtype: str, saved: Buffer, saved_dtype: str) -> bool:
    """Return whether an element is zero but not in the checkpoint: its value is too small for the training's dtype."""
    live_values, saved_values = (
        np.frombuffer(cast(data, dtype, "F32"), np.float32)
        for data, dtype in ((live, live_dtype), (saved, saved_dtype))
    )
    return bool(((live_values == 0) & (saved_values != 0)).any())


def entry_of(index: CheckpointIndex, state: State, aliases: Mapping[str, Sequence[str]]) -> TensorEntry | None:
    """Return what the checkpoint holds of a state of the training.

    A param that was frozen when it was saved is found as such, and a tied one by any of its names, which ``aliases``
    lists. None if the checkpoint does not hold it.
    """
    kinds = {
        MASTER: (MASTER, FROZEN, WEIGHT),
        FROZEN: (FROZEN, MASTER, WEIGHT),
        BUFFER: (BUFFER, FROZEN, WEIGHT),
    }.get(state.kind, (state.kind,))
    names = dict.fromkeys([state.param, *aliases.get(state.param, ())])
    names |= dict.fromkeys([index.tied[name] for name in names if name in index.tied])
    for kind in kinds:
        for name in names:
            entry = index.held.get(State(name, kind))
            if entry is not None and entry.is_here:
                return entry
    return None


def expected_states(index: CheckpointIndex) -> dict[str, list[str]]:
    """Return the kinds of states that a resume loads of each param in the checkpoint."""
    expected: dict[str, list[str]] = {}
    for state, entry in index.held.items():
        if state.kind != WEIGHT and entry.is_here and entry.numel and state.param in index.params:
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

    Stock loaders restore them from the checkpoint. Another value may be a wish. It is an alarm if two groups have
    exchanged their values, if an optimizer counts with it, or if it is a learning rate that the scheduler does not
    compute; without a scheduler, somebody has set the rate.
    """
    saved = {param: group.hyper for group in index.groups for param in group.params}
    if not saved:
        return [], ["param groups: the checkpoint does not state them"] if groups else []
    notes = []
    known = {frozenset(group.params) for group in index.groups}
    live_groups = [frozenset(group.params) for group in groups]
    if any(params & saved.keys() and params not in known for params in live_groups):
        notes.append(f"params are in {counted(len(groups), 'group')}, and in {len(index.groups)} in the checkpoint")
    by_values: dict[tuple[str, str, str], list[Mismatch]] = {}
    for group in groups:
        for param in group.params:
            for one in _compare_group(group, saved[param]) if param in saved else ():
                by_values.setdefault((one.what, repr(one.live), repr(one.saved)), []).append(one)
    mismatches = [  # an alarm also if two groups have exchanged their values
        replace(same[0], is_alarm=same[0].is_alarm or (what, before, live) in by_values, count=len(same))
        for (what, live, before), same in by_values.items()
    ]
    return mismatches, notes


def _compare_group(group: LiveGroup, saved: Mapping[str, Any]) -> Iterable[Mismatch]:
    live_rate, saved_rate = float_of(group.hyper.get("lr")), float_of(saved.get("lr"))
    if live_rate is not None and saved_rate is not None and not _alike(live_rate, saved_rate):
        is_explained = group.rate is None or _alike(live_rate, group.rate)
        yield Mismatch(Subject.RATE, "learning rate", live_rate, saved_rate, not is_explained)
    for key in group.hyper.keys() & saved.keys() - _NOT_COMPARED:
        live_value, number = plain(group.hyper[key]), as_number(saved[key])
        saved_value = plain(saved[key]) if number is None else number
        if _is_plain(live_value) and _is_plain(saved_value) and not _alike(live_value, saved_value):
            is_counter = key in COUNTERS
            yield Mismatch(Subject.NUMBER if is_counter else Subject.OPTION, key, live_value, saved_value, is_counter)


def compare_steps(
    index: CheckpointIndex, steps: Mapping[str, float | None], aliases: Mapping[str, Sequence[str]]
) -> list[Mismatch]:
    """Compare the optimizer's step of each param; ``steps`` are those of this rank, None for a param that has other
    states only."""
    saved = index.steps()
    counts: dict[tuple[float | None, float], int] = {}
    for param, live in steps.items():
        names = [name for name in (param, *aliases.get(param, ())) if name in saved]
        before = float(saved[names[0]]) if names else 0.0
        if names and (live or 0.0) != before:
            counts[live, before] = counts.get((live, before), 0) + 1
    return [
        Mismatch(
            Subject.STEP,
            "Adam's step",
            live,
            before,
            True,
            MismatchKind.CHANGED if live is not None else MismatchKind.MISSING,
            count,
        )
        for (live, before), count in counts.items()
    ]


@dataclass(frozen=True, slots=True)
class Number:
    """A state of a param that is a single number, such as the product of NAdam's momenta."""

    value: float
    precision: float = 1e-9
    """The relative distance of numbers that its dtype can't tell apart"""


def compare_numbers(
    index: CheckpointIndex, numbers: Mapping[str, Mapping[str, Number]], aliases: Mapping[str, Sequence[str]]
) -> list[Mismatch]:
    """Compare the states of each param that are single numbers, but for the step; ``numbers`` are those of this rank,
    of each trained param. A number that its dtype has rounded is no alarm."""
    saved = index.scalars()
    by_kind: dict[tuple[str, MismatchKind, bool], list[Mismatch]] = {}
    for param, live in numbers.items():
        name = next((name for name in (param, *aliases.get(param, ())) if name in saved), None)
        for kind, node in saved[name].items() if name is not None else ():
            if (before := as_number(node)) is None:
                continue
            mismatch = Mismatch(Subject.NUMBER, kind, None, before, True, MismatchKind.MISSING)
            if (mine := live.get(kind)) is not None:
                if mine.value == before or (math.isnan(mine.value) and math.isnan(before)):
                    continue
                is_rounded = math.isclose(mine.value, before, rel_tol=mine.precision)
                mismatch = replace(mismatch, live=mine.value, is_alarm=not is_rounded, kind=MismatchKind.CHANGED)
            by_kind.setdefault((kind, mismatch.kind, mismatch.is_alarm), []).append(mismatch)
    return [replace(same[0], count=len(same)) for same in by_kind.values()]


def compare_ties(
    index: CheckpointIndex, params: Collection[str], aliases: Mapping[str, Sequence[str]]
) -> list[Mismatch]:
    """Compare which names share one param; ``params`` are the training's. A file may hold a tied param under each of
    its names, but the optimizer's states under one only."""
    mismatches = [
        Mismatch(Subject.TIE, f"{name} and {stored}", None, None, True, MismatchKind.UNTIED)
        for name, stored in index.tied.items()
        if name in params and stored in params
    ]
    trained = {state.param for state in index.held if is_optimizer_state(state.kind)}
    for stored, names in aliases.items():
        of_both = [name for name in names if name in trained and stored in trained]
        mismatches += [
            Mismatch(Subject.TIE, f"{name} and {stored}", None, None, True, MismatchKind.TIED) for name in of_both
        ]
    return mismatches


def compare_strays(count: int) -> list[Mismatch]:
    """Return the difference if an optimizer updates ``count`` params that are not the model's."""
    return [Mismatch(Subject.OPTIMIZER, "optimizer", count, 0, True, MismatchKind.STRAY)] if count else []


@dataclass(frozen=True, slots=True)
class LearningRates:
    """A learning rate scheduler."""

    state: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of DeepSpeed's, whose state is only its position: type and params, as the engine's config has them"""
    rates: Sequence[float] = ()
    """At its position: of a live one those that it computes, if its state lacks its rule; of a saved one, its last"""
    inner: Sequence[LearningRates] = ()
    """The live schedulers that it consists of"""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Of the Trainer's, whose rule is a function: what the function was made by"""
    logged: Mapping[int, tuple[float, float, float]] = field(default_factory=dict)
    """Step -> the rate that was logged, and those that the live rule computes before and after the step"""


_COUNTS = ("last_epoch", "last_batch_iteration", "num_updates")
_POSITION = (
    *_COUNTS,
    *("T_cur", "T_i", "best", "num_bad_epochs", "cooldown_counter"),  # of warm restarts and plateaus
)
_INNER = "_schedulers"
"""The schedulers that torch's SequentialLR and ChainedScheduler consist of"""


def compare_schedule(live: LearningRates | None, saved: LearningRates | None) -> tuple[list[Mismatch], list[str]]:
    """Compare schedulers; return differences and notes. Another position is an alarm, another rule is not.

    Stock loaders restore the rates of the checkpoint, whatever rule computes those of the next steps.
    """
    if live is None or saved is None:
        if saved is not None:
            return [], ["schedule: the checkpoint has one, but the training gives none to compare"]
        return [], ["schedule: the checkpoint has none to compare with"] if live is not None else []
    mismatches = list(_compare_scheduler("schedule", live, saved))
    if any(mismatch.is_alarm for mismatch in mismatches):
        return [mismatch for mismatch in mismatches if mismatch.is_alarm], []
    if live.options and saved.options:
        options = live.options.keys() | saved.options.keys()
        mismatches += _compare_plain("schedule", live.options, saved.options, options)
    arguments = live.arguments.keys() & saved.arguments.keys()
    mismatches += _compare_plain("schedule", live.arguments, saved.arguments, arguments)
    if mismatches:
        return mismatches, []
    # The Trainer logs the rate of before the step; with DeepSpeed, and in older versions, that of after it.
    pairs = [[(step, rates[at], rates[0]) for step, rates in live.logged.items()] for at in (1, 2)]
    off = min(([row for row in rows if not _is_rate(*row[1:])] for rows in pairs), key=len)
    for step, mine, logged in off[:1]:
        what = f"schedule: the learning rate of step {step}"
        mismatches.append(Mismatch(Subject.SCHEDULE, what, mine, logged, False))
    return mismatches, []


def rates_in(values: Any) -> list[float]:
    """Return learning rates of a checkpoint, by group; empty unless all are numbers."""
    rates = [rate for rate in map(float_of, values or ()) if rate is not None]
    return rates if len(rates) == len(values or ()) else []


def _is_rate(live: float, saved: float) -> bool:
    return math.isclose(live, saved, rel_tol=1e-5, abs_tol=1e-12)


def _compare_scheduler(what: str, schedule: LearningRates, before: LearningRates) -> Iterator[Mismatch]:
    live, saved = schedule.state, before.state
    for key in _POSITION:
        value, before_value = float_of(live.get(key)), float_of(saved.get(key))
        if value is not None and before_value is not None and value != before_value:
            kind = MismatchKind.ANOTHER_STEP if key in _COUNTS else MismatchKind.CHANGED
            yield Mismatch(Subject.SCHEDULE, f"{what}: {key}", _whole(value), _whole(before_value), True, kind)
    ours, stored_inner = schedule.inner, saved.get(_INNER)
    if ours and isinstance(stored_inner, (list, tuple)):
        if len(ours) != len(stored_inner):
            yield Mismatch(Subject.SCHEDULE, f"{what}: number of schedulers", len(ours), len(stored_inner), False)
        for number, (inner, stored) in enumerate(zip(ours, stored_inner, strict=False)):
            yield from _compare_scheduler(
                f"{what} {number}", inner, LearningRates(stored, rates=rates_in(stored.get(_RATES)))
            )
    if more := sorted(key for key in live.keys() - saved.keys() if key[0] != "_" and key not in _NOT_OF_SCHEDULES):
        yield Mismatch(Subject.SCHEDULE, f"{what}: {', '.join(more)}", "of this scheduler", "another one", False)
    keys = live.keys() & saved.keys() - {*_POSITION, *_NOT_OF_SCHEDULES}
    yield from _compare_plain(what, live, saved, keys)
    for number, (rule, stored) in enumerate(zip(live.get(_RULES) or (), saved.get(_RULES) or (), strict=False)):
        if isinstance(stored, Mapping):  # the attributes of an object; torch keeps nothing of a function
            attributes = rule if isinstance(rule, Mapping) else {}
            yield from _compare_plain(f"{what}: rule {number}", attributes, stored, attributes.keys() | stored.keys())
    if live.get("last_epoch") == -1:  # of SequentialLR, and not its turn yet
        return
    for number, (value, before_value) in enumerate(zip(schedule.rates, before.rates, strict=False)):
        if not _is_rate(value, before_value):
            name = f"{what}: the learning rate of param group {number} at its step"
            yield Mismatch(Subject.SCHEDULE, name, value, before_value, False)
            break


_RATES, _RULES = "_last_lr", "lr_lambdas"
_NOT_OF_SCHEDULES = {"_step_count", _RATES, _RULES, _INNER, "_get_lr_called_within_step", "verbose"}


def _compare_plain(
    what: str, live: Mapping[str, Any], saved: Mapping[str, Any], keys: Iterable[str]
) -> Iterator[Mismatch]:
    for key in sorted(keys):
        live_value, saved_value = plain(live.get(key)), plain(saved.get(key))
        if _is_plain(live_value) and _is_plain(saved_value) and not _alike(live_value, saved_value):
            yield Mismatch(Subject.SCHEDULE, f"{what}: {key}", live_value, saved_value, False)


def compare_counters(subject: Subject, live: Mapping[str, Any], saved: Mapping[str, Any]) -> list[Mismatch]:
    """Compare counters, the loss scale and the like by name. What only one side has is left out."""
    return [
        Mismatch(subject, key, plain(live[key]), plain(saved[key]), True)
        for key in live
        if key in saved and saved[key] is not None and not _alike(plain(live[key]), plain(saved[key]))
    ]


def rates_off_schedule(live: Sequence[float | None], scheduled: Sequence[float]) -> str | None:
    """Return a warning if a group's learning rate after a step is not what the scheduler computes; otherwise None."""
    for number, (rate, scheduled_rate) in enumerate(zip(live, scheduled, strict=False)):
        if rate is not None and not _alike(rate, scheduled_rate):
            return f"the learning rate of param group {number} is {rate:g}, and the scheduler's is {scheduled_rate:g}"
    return None


def float_of(value: Any) -> float | None:
    value = plain(value)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def plain(value: Any) -> Any:
    """Return tensors and numpy scalars as numbers, tuples as lists."""
    if isinstance(value, (list, tuple)):
        return [plain(element) for element in value]
    if hasattr(value, "item") and getattr(value, "numel", lambda: getattr(value, "size", 0))() == 1:
        return value.item()
    return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, Mapping)):
        return all(map(_is_plain, value.values() if isinstance(value, Mapping) else value))
    return value is None or isinstance(value, (bool, int, float, str))


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_alike, a, b))
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=1e-6)
    return bool(a == b)


def _whole(value: float) -> float | int:
    return int(value) if value.is_integer() else value


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


@dataclass(slots=True)
class LossMonitor:
    """The log of an attempt that was abandoned, against that of the attempt that repeats its steps."""

    before: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Step -> its log entry"""
    is_evidence: bool = True
    """Whether equal losses show that the resume is right: they don't show what the schedule will be"""
    same: list[int] = field(default_factory=list)

    def see(self, step: int, logs: Mapping[str, Any]) -> str | None:
        """Record a log entry of the new attempt; return a message if it says whether the resume is right.

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
