"""The parts of a save: what the policy wants, and whatever would become too old without it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

from llmtailor.errors import Problem
from llmtailor.policies.situation import Choice, Policy, Situation
from llmtailor.policies.words import nearest

MAX_STALENESS = "max_staleness"
IN_NO_SAVE = "in no save"
OLDEST = "oldest"
"""Reasons for parts that the policy left out."""


def choose(policy: Policy, situation: Situation, max_staleness: int) -> Choice:
    """Ask a policy, and add every part that would otherwise become older than `max_staleness` saves.

    `max_staleness` is what `check_policy` returned. A policy whose own schedule keeps within it gets nothing added
    but what is due now. For any other policy, parts are added ahead of time where too many would be due at once (all
    of them are, some time after the base, if nothing changes): per save no more than an even share and one part.

    Never raises because of a policy: a training run must not end because of it. What is wrong with its answer is told
    in `Choice.problems`, and the rest of it counts. An empty answer becomes the part that was not saved for longest.
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
    """Return what the policy wants, as far as it can be followed, and what is wrong with the rest."""
    where = f"policy {policy.name}, save {situation.save}"
    try:
        answer: object = policy.choose(situation)
    except Exception as error:  # someone else's code
        return {}, [Problem(where, f"it raised {error!r}", "mend the policy, or take another")]
    if not isinstance(answer, Mapping):
        what = f"it answered with a {type(answer).__name__}"
        return {}, [Problem(where, what, "return a mapping from parts to reasons, such as {'layer 3': 'changed'}")]
    unknown = [part for part in answer if part not in situation.parts]
    problems = [Problem(where, f"there is no part {part!r}", nearest(part, situation.parts)) for part in unknown]
    return {part: str(answer[part]) for part in situation.parts if part in answer}, problems


def _own_bound(policy: Policy, situation: Situation) -> int | None:
    try:
        return policy.worst_staleness(situation.anatomy, situation.parts)
    except Exception:  # someone else's code; without a bound of its own it gets ours
        return None


def _due(situation: Situation, wanted: Mapping[str, str], max_staleness: int, *, is_paced: bool) -> dict[str, str]:
    """Return the parts that must be added to this save, and why."""
    left_out = [part for part in situation.parts if part not in wanted]
    new = {part: IN_NO_SAVE for part in left_out if part not in situation.last}
    # The save that a part can wait for, but not longer.
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
    """Return the parts to save now, so that no save will have to hold more than `share` + `largest` bytes of them.

    `share` bytes per save go round the whole model in time. What is due until a later save may wait as long as it is no
    more than the saves after this one can take at that rate, and one part; the excess is saved now, the most urgent
    first. If there is so much (another policy left it) that the share won't do, the smallest number that does is taken.
    """
    waiting = sorted(deadlines, key=lambda part: deadlines[part])
    until = dict(zip(waiting, accumulate(num_bytes[part] for part in waiting), strict=True))
    saves = {part: deadlines[part] - now for part in waiting}
    share = max([share, *(-((largest - until[part]) // (saves[part] + 1)) for part in waiting)])
    excess = max((until[part] - saves[part] * share - largest for part in waiting), default=0)
    return [part for part in waiting if saves[part] == 0 or until[part] - num_bytes[part] < excess]
