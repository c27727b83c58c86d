"""What is refused before training begins."""

from __future__ import annotations

import json
import random
import threading
from typing import Any

import pytest

from llmtailor.model.parts import EMBED
from llmtailor.policies import (
    Adaptive,
    Filter,
    Full,
    Parity,
    Policy,
    RoundRobin,
    check_policy,
    choose,
    restore_state,
    state_of,
)
from recipe.structures import llama
from saving.policy_runs import Custom, alike, refusal, situation

ANATOMY = llama(6)


def check(policy: Policy, max_staleness: Any = None) -> int:
    return check_policy(policy, ANATOMY, ANATOMY.parts, alike(ANATOMY.parts), max_staleness)


def why_not(policy: Policy, max_staleness: Any = None) -> str:
    (problem,) = refusal(lambda: check(policy, max_staleness))
    return f"{problem.where}: {problem.what}; {problem.fix}"


@pytest.mark.parametrize(
    ("policy", "given", "limit"),
    [
        (Full(), None, 0),
        (Parity(), None, 1),
        (Parity(), 7, 7),
        (Filter(), None, 9),
        (Filter(), 9, 9),
        (RoundRobin(4), None, 3),
        (RoundRobin(40), None, 8),
        (Adaptive(0.5), None, 8),
        (Adaptive(0.3), None, 14),
        (Adaptive(0.5), 1, 1),
    ],
)
def test_limits(policy, given, limit):
    assert check(policy, given) == limit


def fails_late(now):
    return {EMBED: ""} if now.save < 30 else {}[now.save]


def embed(now):
    return {EMBED: ""}


def all_but_one(now):
    return {part: "" for part in now.parts if part != "layer 3"}


CHANCE = random.Random(0)
BY_DRIFT = Custom(lambda now: {part: "" for part in now.parts if now.drift[part] > 0.008}, 1, needs_drift=True)
UNLIMITED = "does not limit how old a part can become; give max_staleness"


@pytest.mark.parametrize(
    ("policy", "given", "told"),
    [
        # schedules beyond the limit, no limit at all, and limits that are none
        (Filter(every=4), 5, "policy filter: by its schedule with first=2, last=2, every=4"),
        (
            Filter(every=4),
            5,
            "a part becomes up to 7 saves old, but max_staleness is 5; set max_staleness to 7 or more",
        ),
        (Parity(), 0, "by its schedule with aux_every=2 a part becomes up to 1 saves old"),
        (Custom(embed), None, UNLIMITED),
        *((Parity(), value, f"max_staleness is {value!r}") for value in (-1, 1.5, True, "20")),
        *((Custom(embed, value), None, f"worst_staleness is {value!r}") for value in (-1, "20")),
        # policies that break their promise
        (Custom(all_but_one, 2), None, "its worst_staleness is 2, but at save 3 layer 3 is older; fix worst_staleness"),
        (Custom(all_but_one, 2), 50, "its worst_staleness is 2, but at save 3"),
        (BY_DRIFT, None, "its worst_staleness is 1, but at save 2 layer 0 is older"),
        # that name what is not there, raise, never choose, or decide by chance
        (
            Custom(lambda now: {"layer 6": "", EMBED: ""}),
            5,
            "at save 1: there is no part 'layer 6'; did you mean 'layer 5'? "
            "Valid here: embed_tokens, layers 0-5, norm, lm_head",
        ),
        (Custom(lambda now: {EMBED}), 5, "at save 1: it returned a set; return a mapping"),
        (Custom(fails_late), 5, "at save 30: it raised KeyError(30)"),
        (Custom(lambda now: now.drift[EMBED]), 5, "at save 1: it raised TypeError"),
        (Custom(lambda now: {}), 5, "in 40 simulated saves it never chose a part"),
        (Custom(lambda now: {CHANCE.choice(now.parts): "drawn"}), 5, "asked twice, it chooses other parts at save"),
    ],
)
def test_what_is_refused(policy, given, told):
    assert told in why_not(policy, given)


def test_parts_that_can_not_be_chosen():
    """Those without trainable params; and a model may have no other."""
    (problem,) = refusal(lambda: check_policy(Custom(lambda now: {"norm": ""}), ANATOMY, [EMBED], {EMBED: 1}, 3))
    assert "there is no part 'norm'" in problem.what
    (problem,) = refusal(lambda: check_policy(Parity(), ANATOMY, (), {}))
    assert "no part of the model is trainable" in problem.what


def test_a_policy_whose_worst_staleness_raises():
    policy = Custom(embed)
    policy.worst_staleness = lambda structure, parts: 1 // 0
    assert "it raised ZeroDivisionError" in why_not(policy, 5)


class Counting(Custom):
    """Counts how often it was asked, and chooses one part after the other."""

    def __init__(self):
        super().__init__(self.next)
        self.asked = 0

    def next(self, now):
        self.asked += 1
        return {now.parts[self.asked % len(now.parts)]: "next"}

    def __deepcopy__(self, memo):
        copy = type(self)()
        copy.asked = self.asked
        return copy


class Remembering(Counting):
    def state_dict(self):
        return {"asked": self.asked}

    def load_state_dict(self, state):
        self.asked = state["asked"]


class Forgetful(Remembering):
    def state_dict(self):
        return {"asked": 0}


class Uncopyable(Remembering):
    """As if it held a model: it can't be copied, but its state can."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def __deepcopy__(self, memo):
        raise AssertionError("a policy with a state is not copied")


def test_policies_with_a_state_of_their_own():
    policy = Counting()
    told = why_not(policy, 20)
    assert policy.asked == 0  # a copy was tried out
    assert "asked twice, it chooses other parts at save 1; decide by the situation alone" in told
    assert "a state goes in state_dict()" in told
    assert check(Remembering(), 20) == 20
    assert check(Uncopyable(), 20) == 20
    assert "chooses other parts at save" in why_not(Forgetful(), 20)


@pytest.mark.parametrize("kind", [Remembering, Uncopyable])
def test_trying_out_leaves_no_trace(kind):
    policy = kind()
    choose(policy, situation(ANATOMY), 20)
    check(policy, 20)
    assert policy.asked == 1


def test_policies_that_cannot_be_tried_out():
    policy = Custom(embed)
    policy.lock = threading.Lock()
    told = why_not(policy, 5)
    assert "it raised TypeError" in told and "make it copyable, or give it state_dict() and load_state_dict()" in told

    class Odd(Remembering):
        def state_dict(self):
            return {"asked": {1, 2}}

    assert "its state is not JSON" in why_not(Odd(), 5)


def test_states():
    assert state_of(Parity()) is None
    policy = Remembering()
    policy.asked = 5
    state = state_of(policy)
    assert json.loads(json.dumps(state)) == state == {"policy": "custom", "state": {"asked": 5}}
    resumed = Remembering()
    restore_state(resumed, state)
    assert resumed.asked == 5


def test_a_run_may_resume_with_another_policy():
    policy = Remembering()
    for state in (None, {"policy": "another", "state": {"seen": 5}}, {}):
        restore_state(policy, state)
        restore_state(Parity(), state)
    assert policy.asked == 0
    told = refusal(lambda: restore_state(policy, {"policy": "custom", "state": {"seen": 5}}))
    assert "it raised KeyError('asked')" in told[0].what
