"""Tests a policy before training begins, in a few hundred simulated saves; chooses the parts of a save. Pure.

A save holds what the policy wants, and every part that would become too old without it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

from llmtailor.errors import Problem, TailorError, UsageError
from llmtailor.model.parts import ModelStructure, nearest
from llmtailor.policies.policy import Choice, Policy, Situation, Stateful

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
    return Choice(ordered, frozenset(added), tuple(problems))


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
    unknown = [part for part in answer if part not in situation.parts]
    problems = [Problem(where, f"there is no part {part!r}", nearest(part, situation.parts)) for part in unknown]
    return {part: str(answer[part]) for part in situation.parts if part in answer}, problems


def _own_bound(policy: Policy, situation: Situation) -> int | None:
    try:
        return policy.worst_staleness(situation.structure, situation.parts)
    except Exception:  # third-party code; without a bound of its own, max_staleness applies
        return None


def _due(situation: Situation, wanted: Mapping[str, str], max_staleness: int, *, is_paced: bool) -> dict[str, str]:
    """Return the parts that must be added to this save, with reasons."""
    left_out = [part for part in situation.parts if part not in wanted]
    new = {part: IN_NO_SAVE for part in left_out if part not in situation.last}
    # The latest save that a part can wait for.
    deadlines = {
        part: max(situation.save, situation.last[part] + max_staleness + 1) for part in left_out if part not in new
    }
    sizes = [situation.num_bytes[part] for part in situation.parts]
    share = -(-sum(sizes) // (max_staleness + 1))
    due = [part for part, deadline in deadlines.items() if deadline == situation.save]
    if is_paced:
        due = _ahead_of_time(deadlines, situation.num_bytes, situation.save, share, max(sizes))
    return new | dict.fromkeys(due, MAX_STALENESS)


def _ahead_of_time(
    deadlines: Mapping[str, int], num_bytes: Mapping[str, int], now: int, share: int, largest: int
) -> list[str]:
    """Return the parts to save now, so that no save must hold more than `share` + `largest` bytes of them.

    `share` bytes per save cover the whole model in time. Parts due by a later save may wait if the saves after this one
    can hold them at that rate, plus one part; the excess is saved now, the most urgent first. If there is too much for
    the share (left by another policy), the smallest sufficient number is used.
    """
    waiting = sorted(deadlines, key=lambda part: deadlines[part])
    until = dict(zip(waiting, accumulate(num_bytes[part] for part in waiting), strict=True))
    saves = {part: deadlines[part] - now for part in waiting}
    share = max([share, *(-((largest - until[part]) // (saves[part] + 1)) for part in waiting)])
    excess = max((until[part] - saves[part] * share - largest for part in waiting), default=0)
    return [part for part in waiting if saves[part] == 0 or until[part] - num_bytes[part] < excess]


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
    """Return the staleness that `choose` must guarantee: `max_staleness`, or what the policy itself promises.

    Raises UsageError with every problem if the policy promises nothing and no `max_staleness` is given, if its schedule
    exceeds `max_staleness` or its promise, if it names unknown parts, never chooses any, raises, or answers
    differently when asked again or resumed. The policy's own state is restored.
    """
    where = f"policy {policy.name}"
    if not parts:
        raise UsageError.at(where, "no part of the model is trainable", "unfreeze something before attaching")
    with _blaming(policy, "fix its worst_staleness, or return None there"):
        worst = policy.worst_staleness(structure, parts)
    limit = _limit(policy, worst, max_staleness)
    first = Situation(STEPS_PER_SAVE, 1, structure, tuple(parts), num_bytes, dict.fromkeys(parts, 0))
    with _blaming(policy, "make it copyable, or give it state_dict() and load_state_dict()"), _copies(policy) as fresh:
        problems = _try_out(fresh, first, limit, worst, needs_drift=policy.needs_drift)
    if problems:
        raise UsageError(Problem(where, what, fix) for what, fix in problems.items())
    return limit


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


def _try_out(
    fresh: Callable[[], Policy], first: Situation, limit: int, promise: int | None, *, needs_drift: bool
) -> dict[str, str]:
    """Return the first problem of each kind, with its fix."""
    found: dict[str, tuple[str, str]] = {}
    is_active = False
    patterns: Mapping[str, Pattern | None] = PATTERNS if needs_drift else {"": None}
    for title, pattern in patterns.items():
        when = f" (when {title})" if title else ""
        simulate = partial(_simulate, fresh, first, limit if promise is None else promise, pattern)
        answers = simulate()
        is_active |= any(len(answer.added) < len(answer.parts) for answer in answers)
        for save, answer in enumerate(answers, 1):
            for problem in answer.problems:
                found.setdefault("answer", (f"at save {save}{when}: {problem.what}", problem.fix))
            forced = [part for part, why in answer.parts.items() if part in answer.added and why == MAX_STALENESS]
            if promise is not None and forced:
                what = f"its worst_staleness is {promise}, but at save {save}{when} {forced[0]} is older"
                found.setdefault("promise", (what, "fix worst_staleness, or return None there and give max_staleness"))
        differing = _differ(answers, simulate())
        if differing is not None:
            fix = "decide by the situation alone: no random numbers, no clock, no state missing from state_dict"
            found.setdefault("again", (f"asked again, it answers differently at save {differing}{when}", fix))
            continue
        differing = _differ(answers, simulate(resume=True))
        if differing is not None:
            fix = "give it state_dict() and load_state_dict() that cover its whole state"
            found.setdefault("resume", (f"resumed, it answers differently at save {differing}{when}", fix))
    if not is_active and not found:
        return {f"in {NUM_SAVES} simulated saves it never chose a part": "make it choose some; check its options"}
    return dict(found.values())


def _simulate(
    fresh: Callable[[], Policy], first: Situation, limit: int, pattern: Pattern | None, *, resume: bool = False
) -> list[Choice]:
    policy, last, num = fresh(), dict(first.last), len(first.parts)
    answers = []
    for save in range(1, NUM_SAVES + 1):
        if resume and save == NUM_SAVES // 2 - 1:
            state = state_of(policy)
            policy = fresh()
            restore_state(policy, state)
        drift = None
        if pattern is not None:
            drift = {part: pattern(at, num) * (save - last[part]) for at, part in enumerate(first.parts)}
        now = replace(first, step=save * STEPS_PER_SAVE, save=save, last=dict(last), drift=drift)
        answers.append(choose(policy, now, limit))
        last |= dict.fromkeys(answers[-1].parts, save)
    return answers


def _differ(first: Sequence[Choice], second: Sequence[Choice]) -> int | None:
    """Return the number of the first save at which they differ."""
    pairs = enumerate(zip(first, second, strict=True), 1)
    return next((save for save, (one, other) in pairs if one.parts.keys() != other.parts.keys()), None)
