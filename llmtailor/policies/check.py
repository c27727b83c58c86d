"""Try a policy out before training begins: a few hundred saves, simulated."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llmtailor.core.anatomy import Anatomy
from llmtailor.errors import Problem, TailorError, UsageError
from llmtailor.policies.bound import MAX_STALENESS, choose
from llmtailor.policies.situation import Choice, Policy, Situation, Stateful

NUM_SAVES = 240
STEPS_PER_SAVE = 50

Pattern = Callable[[int, int], float]
"""(position of the part, number of parts) -> relative change per save"""
PATTERNS: Mapping[str, Pattern] = {
    "no part changes": lambda at, num: 0.0,
    "all parts change alike": lambda at, num: 0.003,
    "one part changes": lambda at, num: 0.1 if at == num // 2 else 0.0,
    "later parts change more": lambda at, num: 0.02 * at / num,
    "every part changes beyond all bounds": lambda at, num: 1e9,
}


@dataclass(frozen=True, slots=True)
class _Ground:
    """What simulated saves have in common."""

    anatomy: Anatomy
    parts: tuple[str, ...]
    num_bytes: Mapping[str, int]
    max_staleness: int


def check_policy(
    policy: Policy,
    anatomy: Anatomy,
    parts: Sequence[str],
    num_bytes: Mapping[str, int],
    max_staleness: int | None = None,
) -> int:
    """Return the staleness that `choose` has to hold: `max_staleness`, or what the policy itself promises.

    Raises UsageError with every problem if the policy promises nothing and no `max_staleness` is given, if its schedule
    exceeds `max_staleness` or its promise, if it names unknown parts, never chooses any, raises, or answers
    differently when it is asked again or resumed. The policy's own state is the same afterwards.
    """
    where = f"policy {policy.name}"
    if not parts:
        raise UsageError.at(where, "no part of the model is trainable", "unfreeze something before attaching")
    with _blaming(policy, "mend its worst_staleness; None is an answer, too"):
        worst = policy.worst_staleness(anatomy, parts)
    limit = _limit(policy, worst, max_staleness)
    ground = _Ground(anatomy, tuple(parts), num_bytes, limit if worst is None else worst)
    with _blaming(policy, "make it copyable, or give it state_dict() and load_state_dict()"), _copies(policy) as fresh:
        problems = _try_out(fresh, ground, is_promise=worst is not None, needs_drift=policy.needs_drift)
    if problems:
        raise UsageError(Problem(where, what, fix) for what, fix in problems.items())
    return limit


def state_of(policy: Policy) -> dict[str, Any] | None:
    """Return the policy's own state as plain JSON data; None for one without. Raises UsageError if it is not JSON."""
    if not isinstance(policy, Stateful):
        return None
    try:
        state = json.loads(json.dumps(policy.state_dict()))
    except (TypeError, ValueError) as error:
        fix = "return numbers, texts, lists and mappings with texts as keys"
        raise UsageError.at(f"policy {policy.name}", f"its state is no JSON ({error})", fix) from error
    return {"policy": policy.name, "state": state}


def restore_state(policy: Policy, state: Mapping[str, Any] | None) -> None:
    """Give a policy the state that `state_of` returned; that of another policy is ignored.

    Raises UsageError if the policy can't load it.
    """
    if isinstance(policy, Stateful) and state is not None and state.get("policy") == policy.name:
        with _blaming(policy, "mend its load_state_dict, or resume with the policy that made the state"):
            policy.load_state_dict(state["state"])


@contextmanager
def _blaming(policy: Policy, fix: str) -> Iterator[None]:
    """Turn what someone else's code raises into a message."""
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
            raise UsageError.at(where, f"{title} is {value!r}", "it is a number of saves, 0 or more")
    if worst is not None and given is not None and worst > given:
        options = ", ".join(f"{key}={value}" for key, value in policy.settings().items() if key != "name")
        with_options = f" with {options}" if options else ""
        what = f"by its schedule{with_options} a part becomes up to {worst} saves old, but max_staleness is {given}"
        fix = f"set max_staleness to {worst} or more, or have parts saved more often"
        raise UsageError.at(where, what, fix)
    default: int | None = getattr(policy, "default_max_staleness", None)
    limits = [limit for limit in (given, worst, default) if limit is not None]
    if limits:
        return limits[0]
    raise UsageError.at(where, "it does not say how old a part can become", "give max_staleness, e.g. 20 (saves)")


@contextmanager
def _copies(policy: Policy) -> Iterator[Callable[[], Policy]]:
    """Yield what makes a policy in today's state.

    One with a state of its own is tried out itself and then restored, because a copy may be large: it can hold the
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


def _try_out(fresh: Callable[[], Policy], ground: _Ground, *, is_promise: bool, needs_drift: bool) -> dict[str, str]:
    """Return what goes wrong, each with its fix: the first case of each kind."""
    found: dict[str, tuple[str, str]] = {}
    is_active = False
    patterns: Mapping[str, Pattern | None] = PATTERNS if needs_drift else {"": None}
    for title, pattern in patterns.items():
        when = f" (when {title})" if title else ""
        answers = _simulate(fresh, ground, pattern)
        is_active |= any(len(answer.added) < len(answer.parts) for answer in answers)
        for save, answer in enumerate(answers, 1):
            for problem in answer.problems:
                found.setdefault("answer", (f"at save {save}{when}: {problem.what}", problem.fix))
            forced = [part for part, why in answer.parts.items() if part in answer.added and why == MAX_STALENESS]
            if is_promise and forced:
                what = f"its worst_staleness is {ground.max_staleness}, but at save {save}{when} {forced[0]} gets older"
                found.setdefault("promise", (what, "mend worst_staleness, or return None there and give max_staleness"))
        differing = _differ(answers, _simulate(fresh, ground, pattern))
        if differing is not None:
            fix = "decide by the situation alone: no random numbers, no clock, no state that state_dict leaves out"
            found.setdefault("again", (f"asked again, it answers differently at save {differing}{when}", fix))
            continue
        differing = _differ(answers, _simulate(fresh, ground, pattern, resume=True))
        if differing is not None:
            fix = "give it state_dict() and load_state_dict() with all that it remembers"
            found.setdefault("resume", (f"resumed, it answers differently at save {differing}{when}", fix))
    if not is_active and not found:
        return {f"in {NUM_SAVES} simulated saves it never chose a part": "have it choose something; check its options"}
    return dict(found.values())


def _simulate(
    fresh: Callable[[], Policy], ground: _Ground, pattern: Pattern | None, *, resume: bool = False
) -> list[Choice]:
    policy = fresh()
    last = dict.fromkeys(ground.parts, 0)
    answers = []
    for save in range(1, NUM_SAVES + 1):
        if resume and save == NUM_SAVES // 2 - 1:
            state = state_of(policy)
            policy = fresh()
            restore_state(policy, state)
        drift = None
        if pattern is not None:
            rates = [pattern(at, len(ground.parts)) for at in range(len(ground.parts))]
            drift = {part: rate * (save - last[part]) for part, rate in zip(ground.parts, rates, strict=True)}
        situation = Situation(
            save * STEPS_PER_SAVE, save, ground.anatomy, ground.parts, ground.num_bytes, dict(last), drift
        )
        answers.append(choose(policy, situation, ground.max_staleness))
        last |= dict.fromkeys(answers[-1].parts, save)
    return answers


def _differ(first: Sequence[Choice], second: Sequence[Choice]) -> int | None:
    """Return the number of the first save at which they differ."""
    pairs = enumerate(zip(first, second, strict=True), 1)
    return next((save for save, (one, other) in pairs if one.parts.keys() != other.parts.keys()), None)
