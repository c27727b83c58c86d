"""Tests a user's policy before training begins, in a few simulated saves; chooses the parts of a save. Pure.

A save holds what the policy chooses, and every part that would otherwise become too old.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any

from llmtailor.errors import Problem, TailorError, UsageError
from llmtailor.model.parts import ModelStructure, Part, nearest
from llmtailor.model.precision import EXACT, Precision, PrecisionOptions
from llmtailor.policies.policy import PartChoice, Policy, Situation, Stateful
from llmtailor.policies.schedules import POLICIES, Budget

MAX_STALENESS = "max_staleness"
IN_NO_SAVE = "in no save"
OLDEST = "oldest"
"""Reasons for parts that the policy left out"""


def choose(policy: Policy, situation: Situation, max_staleness: int) -> PartChoice:
    """Return the parts that a policy chooses, and every part that would otherwise exceed `max_staleness` saves.

    `max_staleness` is what `check_policy` returned. If the policy's own schedule keeps within it, only parts due now
    are added. For any other policy, parts are added early if too many would be due at once (if nothing changes, all of
    them are, some time after the base): per save at most an even share and one part.

    Never raises because of a policy, which must not end a training run. Invalid parts of its answer are reported in
    `PartChoice.problems`, and the rest counts. An empty answer becomes the part that has not been saved for longest.
    """
    wanted, problems = ask(policy, situation)
    try:
        own = policy.worst_staleness(situation.structure, situation.parts)
    except Exception:  # third-party code; without a bound of its own, max_staleness applies
        own = None
    added = _due(situation, wanted, max_staleness, is_paced=own is None or own > max_staleness)
    if not wanted and not added:
        added = {max(situation.parts, key=situation.age): OLDEST}
    reasons = wanted | added
    ordered = {part: reasons[part] for part in situation.parts if part in reasons}
    masters = tuple(part for part in situation.parts if part not in ordered) if saves_masters(policy) else ()
    return PartChoice(ordered, frozenset(added), tuple(problems), masters)


def saves_masters(policy: Policy) -> bool:
    """Return whether every save holds the masters of the parts that a policy does not choose."""
    return bool(getattr(policy, "saves_masters", False))


def precision_of(policy: Policy, given: PrecisionOptions, weights: str | None = None) -> Precision:
    """Return the precision of saves: that of the options, and where they leave it open, that of the policy.

    ``weights`` is the dtype that the forward pass rounds the masters to, fp32 if it does not; None if it is not known.
    Raises UsageError if a budget leaves no choice, and for bf16 masters without such weights.
    """
    own: Precision = getattr(policy, "precision", EXACT)
    precision = Precision(given.masters or own.masters, given.moments or own.moments)
    if isinstance(policy, Budget) and precision != own:
        what = f"it chooses the precision of masters and moments itself: {own.masters} and {own.moments}"
        raise UsageError.at(f"policy {policy.name}", what, "omit masters and moments")
    if precision.masters == "bf16" and weights not in ("BF16", None):
        what = "it is bf16, but only DeepSpeed's bf16 trainings have bf16 weights that are the rounded masters"
        raise UsageError.at("masters", what, "give 24bit")
    return precision


def ask(policy: Policy, situation: Situation) -> tuple[dict[Part, str], list[Problem]]:
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


def _due(situation: Situation, wanted: Mapping[Part, str], max_staleness: int, *, is_paced: bool) -> dict[Part, str]:
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
    deadlines: Mapping[Part, int], num_bytes: Mapping[str, int], now: int, share: int, largest: int
) -> list[Part]:
    """Return the parts to save now, so that no save must hold more than `share` + `largest` bytes of them.

    `share` bytes per save cover the whole model in time. Parts due by a later save may wait if the saves after this one
    can hold them at that rate, plus one part; the excess is saved now, the most urgent first. If there is too much for
    the share (left by another policy), the smallest sufficient number is used.
    """
    due_by: dict[int, list[Part]] = {}
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


NUM_SAVES = 40
"""Simulated saves"""
_CHANGE = 0.003
"""Relative change of each part from one simulated save to the next"""


def check_policy(
    policy: Policy,
    structure: ModelStructure,
    parts: Sequence[Part],
    num_bytes: Mapping[str, int],
    max_staleness: int | None = None,
    *,
    is_tested: bool = False,
) -> int:
    """Return the staleness that `choose` must guarantee: the given ``max_staleness``, or what the policy promises.

    A policy that does not come with llmtailor is tested in simulated saves, unless it was before; its own state is
    restored. Raises UsageError if there are no parts, neither the policy nor the user limits the staleness, the
    policy's schedule exceeds the user's limit, or a simulated save has problems.
    """
    parts, where = tuple(map(Part, parts)), f"policy {policy.name}"
    if not parts:
        raise UsageError.at(where, "no part of the model is trainable", "unfreeze something before attaching")
    with _blaming(policy, "fix its worst_staleness, or return None there"):
        promise = policy.worst_staleness(structure, parts)
    limit = _limit(policy, promise, max_staleness)
    if is_tested or type(policy) in POLICIES.values():
        return limit
    with _blaming(policy, "make it copyable, or give it state_dict() and load_state_dict()"):
        state = state_of(policy)
        # a policy with a state is not copied, because a copy may be large: it can hold the model
        tested = policy if isinstance(policy, Stateful) else copy.deepcopy(policy)
        try:
            _simulate(tested, Situation(1, 1, structure, parts, num_bytes, dict.fromkeys(parts, 0)), limit, promise)
        finally:
            restore_state(policy, state)
    return limit


def _simulate(policy: Policy, first: Situation, limit: int, promise: int | None) -> None:
    """Ask a policy about `NUM_SAVES` saves, twice about each, with its state restored in between.

    Raises UsageError with all problems of the first save that has one: a part is older than promised, the policy names
    unknown parts, raises, or gives two answers. Also if it never chooses a part.
    """
    where, last, has_chosen = f"policy {policy.name}", dict(first.last), False
    for save in range(1, NUM_SAVES + 1):
        drift: dict[str, float] | None = None
        if policy.needs_drift:
            drift = {part: _CHANGE * (save - last[part]) for part in first.parts}
        now = replace(first, step=save, save=save, last=dict(last), drift=drift, expected_loss=drift)
        state = state_of(policy)
        before = choose(policy, now, limit if promise is None else promise)
        restore_state(policy, state)
        answer = choose(policy, now, limit if promise is None else promise)
        problems = [Problem(where, f"at save {save}: {problem.what}", problem.fix) for problem in answer.problems]
        late = [part for part, why in answer.parts.items() if part in answer.added and why == MAX_STALENESS]
        if promise is not None and late:
            what = f"its worst_staleness is {promise}, but at save {save} {late[0]} is older"
            problems.append(Problem(where, what, "fix worst_staleness, or return None there and give max_staleness"))
        if answer.parts.keys() != before.parts.keys():
            fix = "decide by the situation alone, without random numbers or a clock; a state goes in state_dict()"
            problems.append(Problem(where, f"asked twice, it chooses other parts at save {save}", fix))
        if problems:
            raise UsageError(problems)
        has_chosen |= len(answer.added) < len(answer.parts)
        last |= dict.fromkeys(answer.parts, save)
    if not has_chosen:
        raise UsageError.at(where, f"in {NUM_SAVES} simulated saves it never chose a part", "make it choose some")


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
