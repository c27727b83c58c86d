"""Tests a policy before training begins, in a few hundred simulated saves; chooses the parts of a save. Pure.

A save holds what the policy wants, and every part that would become too old without it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain
from typing import Any

from llmtailor.errors import Problem, TailorError, UsageError
from llmtailor.model.parts import ModelStructure, nearest
from llmtailor.policies.policy import Choice, Policy, Situation, Stateful
from llmtailor.policies.spec import POLICIES

MAX_STALENESS = "max_staleness"
IN_NO_SAVE = "in no save"
OLDEST = "oldest"
"""Reasons for parts that the policy left out"""


def choose(policy: Policy, situation: Situation, max_staleness: int) -> Choice:
    """Return the parts that a policy chooses, and every part that would otherwise exceed `max_staleness` saves.

    `max_staleness` is what `check_policy` returned. If the policy's own schedule keeps within it, only parts due now
    are added. For any other policy, parts are added early if too many would be due at once (if nothing changes, all of
    them are, some time after the base): per save at most an even share and one part.

    Never raises because of a policy, which must not end a training run. Invalid parts of its answer are reported in
    `Choice.problems`, and the rest counts. An empty answer becomes the part that has not been saved for longest.
    """
    wanted, problems = ask(policy, situation)
    own = _own_bound(policy, situation)
    added = _due(situation, wanted, max_staleness, is_paced=own is None or own > max_staleness)
    if not wanted and not added:
        added = {max(situation.parts, key=situation.age): OLDEST}
    reasons = wanted | added
    ordered = {part: reasons[part] for part in situation.parts if part in reasons}
    masters = tuple(part for part in situation.parts if part not in ordered) if saves_masters(policy) else ()
    return Choice(ordered, frozenset(added), tuple(problems), masters)


def saves_masters(policy: Policy) -> bool:
    """Return whether every save holds the masters of the parts that a policy does not choose."""
    return bool(getattr(policy, "saves_masters", False))


def ask(policy: Policy, situation: Situation) -> tuple[dict[str, str], list[Problem]]:
    """Return the valid part of the policy's answer, and the problems with the rest."""
    where = f"policy {policy.name}, save {situation.save}"
    try:
        answer: object = policy.choose(situation)
    except Exception as error:  # someone else's code
        return {}, [Problem(where, f"it raised {error!r}", "fix the policy, or use another one")]
    if not isinstance(answer, Mapping):
        what = f"it returned a {type(answer).__name__}"
        return {}, [Problem(where, what, "return a mapping from parts to reasons, such as {'layer 3': 'changed'}")]
    known = {*situation.parts}  # of a model with experts, thousands
    unknown = [part for part in answer if part not in known]
    problems = [Problem(where, f"there is no part {part!r}", nearest(part, situation.parts)) for part in unknown]
    return {part: str(answer[part]) for part in situation.parts if part in answer}, problems


def _own_bound(policy: Policy, situation: Situation) -> int | None:
    try:
        return policy.worst_staleness(situation.structure, situation.parts)
    except Exception:  # third-party code; without a bound of its own, max_staleness applies
        return None


def _due(situation: Situation, wanted: Mapping[str, str], max_staleness: int, *, is_paced: bool) -> dict[str, str]:
    """Return the parts that must be added to this save, with reasons."""
    now, last = situation.save, situation.last
    left_out = [part for part in situation.parts if part not in wanted]
    new = {part: IN_NO_SAVE for part in left_out if part not in last}
    # The latest save that a part can wait for.
    deadlines = {part: last[part] + max_staleness + 1 for part in left_out if part not in new}
    if is_paced:
        sizes = [situation.num_bytes[part] for part in situation.parts]
        share = -(-sum(sizes) // (max_staleness + 1))
        deadlines = {part: at if at > now else now for part, at in deadlines.items()}
        due = _ahead_of_time(deadlines, situation.num_bytes, now, share, max(sizes))
    else:
        due = [part for part, at in deadlines.items() if at <= now]
    return new | dict.fromkeys(due, MAX_STALENESS)


def _ahead_of_time(
    deadlines: Mapping[str, int], num_bytes: Mapping[str, int], now: int, share: int, largest: int
) -> list[str]:
    """Return the parts to save now, so that no save must hold more than `share` + `largest` bytes of them.

    `share` bytes per save cover the whole model in time. Parts due by a later save may wait if the saves after this one
    can hold them at that rate, plus one part; the excess is saved now, the most urgent first. If there is too much for
    the share (left by another policy), the smallest sufficient number is used.
    """
    due_by: dict[int, list[str]] = {}
    for part, deadline in deadlines.items():
        due_by.setdefault(deadline, []).append(part)
    in_time = sorted(due_by)
    until = dict(zip(in_time, accumulate(sum(map(num_bytes.__getitem__, due_by[at])) for at in in_time), strict=True))
    share = max([share, *(-((largest - until[at]) // (at - now + 1)) for at in in_time)])
    excess = max((until[at] - (at - now) * share - largest for at in in_time), default=0)
    chosen, load = due_by.get(now, []), until.get(now, 0)
    for part in (part for at in in_time if at > now for part in due_by[at]):
        if load >= excess:
            break
        chosen.append(part)
        load += num_bytes[part]
    return chosen


NUM_SAVES = 240
STEPS_PER_SAVE = 50

Pattern = Callable[[int, int], float]
"""(position of the part, number of parts) -> relative change per save"""
PATTERNS: Mapping[str, Pattern] = {
    "no part changes": lambda at, num: 0.0,
    "all parts change equally": lambda at, num: 0.003,
    "one part changes": lambda at, num: 0.1 if at == num // 2 else 0.0,
    "later parts change more": lambda at, num: 0.02 * at / num,
    "every part changes without limit": lambda at, num: 1e9,
}


def check_policy(
    policy: Policy,
    structure: ModelStructure,
    parts: Sequence[str],
    num_bytes: Mapping[str, int],
    max_staleness: int | None = None,
) -> int:
    """Return what `staleness_limit` does, and test the policy in simulated saves.

    Raises UsageError with every problem, also if the policy's schedule exceeds its promise, if it names unknown parts,
    never chooses any, raises, or answers differently when asked again or resumed. Of the policies in `POLICIES`, only
    the options are tested. The policy's own state is restored.
    """
    limit, promise = _limits(policy, structure, parts, max_staleness)
    first = Situation(STEPS_PER_SAVE, 1, structure, tuple(parts), num_bytes, dict.fromkeys(parts, 0))
    with _blaming(policy, "make it copyable, or give it state_dict() and load_state_dict()"), _copies(policy) as fresh:
        is_own = type(policy) in POLICIES.values()
        problems = _try_out(fresh, first, limit, promise, needs_drift=policy.needs_drift, is_own=is_own)
    if problems:
        raise UsageError(Problem(f"policy {policy.name}", what, fix) for what, fix in problems.items())
    return limit


def staleness_limit(policy: Policy, structure: ModelStructure, parts: Sequence[str], given: int | None) -> int:
    """Return the staleness that `choose` must guarantee: the given ``max_staleness``, or what the policy promises.

    Raises UsageError if neither says one, the policy's schedule exceeds the given one, or there are no parts.
    """
    return _limits(policy, structure, parts, given)[0]


def _limits(
    policy: Policy, structure: ModelStructure, parts: Sequence[str], given: int | None
) -> tuple[int, int | None]:
    """Return what `staleness_limit` does, and what the policy itself promises."""
    if not parts:
        fix = "unfreeze something before attaching"
        raise UsageError.at(f"policy {policy.name}", "no part of the model is trainable", fix)
    with _blaming(policy, "fix its worst_staleness, or return None there"):
        promise = policy.worst_staleness(structure, parts)
    return _limit(policy, promise, given), promise


def state_of(policy: Policy) -> dict[str, Any] | None:
    """Return the policy's own state as plain JSON data, None if it has none. Raises UsageError if it is not JSON."""
    if not isinstance(policy, Stateful):
        return None
    try:
        state = json.loads(json.dumps(policy.state_dict()))
    except (TypeError, ValueError) as error:
        fix = "return numbers, strings, lists, and mappings with string keys"
        raise UsageError.at(f"policy {policy.name}", f"its state is not JSON ({error})", fix) from error
    return {"policy": policy.name, "state": state}


def restore_state(policy: Policy, state: Mapping[str, Any] | None) -> None:
    """Load into a policy the state that `state_of` returned; ignore the state of another policy.

    Raises UsageError if the policy can't load it.
    """
    if isinstance(policy, Stateful) and state is not None and state.get("policy") == policy.name:
        with _blaming(policy, "fix its load_state_dict, or resume with the policy that made the state"):
            policy.load_state_dict(state["state"])


@contextmanager
def _blaming(policy: Policy, fix: str) -> Iterator[None]:
    """Turn an exception of third-party code into a UsageError."""
    try:
        yield
    except TailorError:
        raise
    except Exception as error:
        raise UsageError.at(f"policy {policy.name}", f"it raised {error!r}", fix) from error


def _limit(policy: Policy, worst: int | None, given: int | None) -> int:
    where = f"policy {policy.name}"
    for title, value in (("max_staleness", given), ("worst_staleness", worst)):
        if value is not None and (type(value) is not int or value < 0):
            raise UsageError.at(where, f"{title} is {value!r}", "give a number of saves, 0 or more")
    if worst is not None and given is not None and worst > given:
        options = ", ".join(f"{key}={value}" for key, value in policy.settings().items() if key != "name")
        with_options = f" with {options}" if options else ""
        what = f"by its schedule{with_options} a part becomes up to {worst} saves old, but max_staleness is {given}"
        fix = f"set max_staleness to {worst} or more, or save parts more often"
        raise UsageError.at(where, what, fix)
    default: int | None = getattr(policy, "default_max_staleness", None)
    limits = [limit for limit in (given, worst, default) if limit is not None]
    if limits:
        return limits[0]
    raise UsageError.at(where, "it does not limit how old a part can become", "give max_staleness, e.g. 20 (saves)")


@contextmanager
def _copies(policy: Policy) -> Iterator[Callable[[], Policy]]:
    """Yield a function that returns the policy in its current state.

    A policy with a state of its own is used itself and then restored, because a copy may be large: it can hold the
    model.
    """
    if not isinstance(policy, Stateful):
        yield lambda: copy.deepcopy(policy)
        return
    state = state_of(policy)

    def rewind() -> Policy:
        restore_state(policy, copy.deepcopy(state))
        return policy

    try:
        yield rewind
    finally:
        rewind()


_NEVER = {f"in {NUM_SAVES} simulated saves it never chose a part": "make it choose some; check its options"}


def _try_out(
    fresh: Callable[[], Policy],
    first: Situation,
    limit: int,
    promise: int | None,
    *,
    needs_drift: bool,
    is_own: bool,
) -> dict[str, str]:
    """Return the first problem of each kind, with its fix.

    Only the options of llmtailor's own may be wrong, so that it never chooses a part; tests check the rest.
    """
    found: dict[str, tuple[str, str]] = {}
    patterns: Mapping[str, Pattern | None] = PATTERNS if needs_drift else {"": None}
    simulate = partial(_simulate, fresh, first, limit if promise is None else promise)
    if is_own:
        is_active = any(map(_is_choice, chain.from_iterable(map(simulate, reversed([*patterns.values()])))))
        return {} if is_active else _NEVER
    is_active = False
    for title, pattern in patterns.items():
        when = f" (when {title})" if title else ""
        answers = [*simulate(pattern)]
        is_active |= any(map(_is_choice, answers))
        for save, answer in enumerate(answers, 1):
            for problem in answer.problems:
                found.setdefault("answer", (f"at save {save}{when}: {problem.what}", problem.fix))
            forced = [part for part, why in answer.parts.items() if part in answer.added and why == MAX_STALENESS]
            if promise is not None and forced:
                what = f"its worst_staleness is {promise}, but at save {save}{when} {forced[0]} is older"
                found.setdefault("promise", (what, "fix worst_staleness, or return None there and give max_staleness"))
        differing = _differ(answers, simulate(pattern, resume=True))
        if differing is None:
            continue
        again = _differ(answers, simulate(pattern))
        if again is not None:
            fix = "decide by the situation alone: no random numbers, no clock, no state missing from state_dict"
            found.setdefault("again", (f"asked again, it answers differently at save {again}{when}", fix))
        else:
            fix = "give it state_dict() and load_state_dict() that cover its whole state"
            found.setdefault("resume", (f"resumed, it answers differently at save {differing}{when}", fix))
    return dict(found.values()) if is_active or found else _NEVER


def _is_choice(answer: Choice) -> bool:
    """Return whether the policy itself chose some of the parts."""
    return len(answer.added) < len(answer.parts)


def _simulate(
    fresh: Callable[[], Policy], first: Situation, limit: int, pattern: Pattern | None, *, resume: bool = False
) -> Iterator[Choice]:
    """Yield the choices of a policy, save by save."""
    policy, last, num = fresh(), dict(first.last), len(first.parts)
    rates = {part: pattern(at, num) for at, part in enumerate(first.parts)} if pattern is not None else None
    for save in range(1, NUM_SAVES + 1):
        if resume and save == NUM_SAVES // 2 - 1:
            state = state_of(policy)
            policy = fresh()
            restore_state(policy, state)
        drift = {part: rate * (save - last[part]) for part, rate in rates.items()} if rates is not None else None
        step = save * STEPS_PER_SAVE
        now = replace(first, step=step, save=save, last=dict(last), drift=drift, expected_loss=drift)
        answer = choose(policy, now, limit)
        last |= dict.fromkeys(answer.parts, save)
        yield answer


def _differ(first: Iterable[Choice], second: Iterable[Choice]) -> int | None:
    """Return the number of the first save at which they differ."""
    pairs = enumerate(zip(first, second, strict=True), 1)
    return next((save for save, (one, other) in pairs if one.parts.keys() != other.parts.keys()), None)
