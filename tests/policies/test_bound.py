"""No part becomes too old, whatever a policy answers, and forced parts are spread."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtailor.model.parts import EMBED, HEAD, NORM
from llmtailor.policies import (
    IN_NO_SAVE,
    MAX_STALENESS,
    OLDEST,
    Adaptive,
    Filter,
    Parity,
    Policy,
    RoundRobin,
    choose,
)
from recipe.structures import llama
from saving.policy_runs import Custom, alike, run, situation


def nothing(situation):
    return {}


LAST = {EMBED: 19, "layer 0": 11, "layer 1": 12, NORM: 20, HEAD: 20}


@pytest.mark.parametrize(
    ("policy", "now", "limit", "added", "chosen"),
    [
        # what was added is in the order of the model
        (Custom(lambda now: {HEAD: "mine", "layer 0": "mine"}),
         situation(llama(2), 4, last=alike(llama(2).parts, 3) | {NORM: 0}), 3, {NORM},
         {"layer 0": "mine", NORM: MAX_STALENESS, HEAD: "mine"}),
        # layer 1 was unfrozen after the base
        (Custom(lambda now: {NORM: "mine"}), situation(llama(2), 2, last={EMBED: 0, "layer 0": 0, NORM: 0, HEAD: 1}), 9,
         {"layer 1"}, {"layer 1": IN_NO_SAVE, NORM: "mine"}),
        # an empty answer becomes the oldest part; of Parity, where only odd layers are trainable
        (Custom(nothing), situation(llama(2), 7, last={EMBED: 5, "layer 0": 3, "layer 1": 3, NORM: 4, HEAD: 6}), 50,
         {"layer 0"}, {"layer 0": OLDEST}),
        (Parity(), situation(llama(4), 2, parts=["layer 1", "layer 3"], last={"layer 1": 1, "layer 3": 0}), 9,
         {"layer 3"}, {"layer 3": OLDEST}),
        # resumed from another policy's saves, at the embeddings' turn: what is overdue is saved at once
        (RoundRobin(5), situation(llama(2), 21, last=LAST), 9, {"layer 0"},
         {EMBED: "group 1 of 5", "layer 0": MAX_STALENESS}),
        (RoundRobin(5), situation(llama(2), 21, last=LAST), 8, {"layer 0", "layer 1"},
         {EMBED: "group 1 of 5", "layer 0": MAX_STALENESS, "layer 1": MAX_STALENESS}),
    ],
)  # fmt: skip
def test_what_is_added(policy, now, limit, added, chosen):
    found = choose(policy, now, limit)
    assert (found.added, [*found.parts.items()], found.problems) == (added, [*chosen.items()], ())


@pytest.mark.parametrize(
    ("answer", "parts", "what"),
    [
        (lambda now: {"layer 1": "mine", "layer 7": "mine"}, {"layer 1": "mine"}, "there is no part 'layer 7'"),
        (lambda now: {}[now.save], {EMBED: OLDEST}, "it raised KeyError(7)"),
        (lambda now: ["layer 1"], {EMBED: OLDEST}, "it returned a list"),
        (lambda now: None, {EMBED: OLDEST}, "it returned a NoneType"),
    ],
)
def test_a_policy_of_ones_own_can_be_wrong_without_ending_the_run(answer, parts, what):
    found = choose(Custom(answer), situation(llama(2), 7, last=alike(llama(2).parts, 6)), 20)
    assert found.parts == parts
    assert [(one.where, one.what) for one in found.problems] == [("policy custom, save 7", what)]


def test_parts_that_wait_for_different_saves_are_added_no_sooner_than_they_must():
    last = alike(llama(3).parts, 10) | {"layer 0": 0, "layer 1": 2, "layer 2": 4}
    policy = Custom(lambda now: {EMBED: "mine", NORM: "mine", HEAD: "mine"})
    for save, due in ((10, None), (11, "layer 0"), (12, None), (13, "layer 1"), (14, None), (15, "layer 2")):
        assert choose(policy, situation(llama(3), save, last=last), 10).added == ({due} if due else set())
        last |= {due: save} if due else {}


def test_much_that_another_policy_left_is_spread_too():
    """12 parts that were all last saved at save 0 and may wait until save 21, but it is save 18 already."""
    made, last = [], alike(llama(9).parts, 0)
    for save in range(18, 24):
        added = choose(Custom(lambda now: {EMBED: "mine"}), situation(llama(9), save, last=last), 20).added
        made.append(len(added))
        last |= dict.fromkeys([EMBED, *added], save)
    assert made == [3, 3, 2, 3, 0, 0]


def test_a_schedule_within_the_limit_is_left_alone():
    for policy in (Parity(), Filter(), RoundRobin(7)):
        for slack in (0, 1, 30):
            limit = policy.worst_staleness(llama(12), llama(12).parts) + slack
            reasons = {why for saved in run(policy, llama(12), limit, 100).saved for why in saved.values()}
            assert not reasons & {MAX_STALENESS, IN_NO_SAVE, OLDEST}


sizes = st.lists(st.integers(0, 300), min_size=4, max_size=30)


@given(sizes, st.integers(0, 25), st.integers(1, 4))
def test_nothing_gets_too_old_and_saves_are_even(sizes, limit, per_save):
    """If a policy wants nothing, no save holds more than an even share of what must be saved, and one part more."""
    structure = llama(len(sizes) - 3)
    num_bytes = dict(zip(structure.parts, sizes, strict=True))
    made = run(Custom(nothing), structure, limit, 3 * limit + 5, num_bytes=num_bytes)
    assert made.oldest <= limit
    assert max(made.costs) <= -(-sum(sizes) // (limit + 1)) + max(sizes)


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    """Policies of every kind, and some that choose at random, from a seed."""
    kind = draw(st.sampled_from(["parity", "filter", "round_robin", "adaptive", "random"]))
    small = st.integers(1, 4)
    if kind == "parity":
        return Parity()
    if kind == "filter":
        return Filter(draw(st.integers(0, 4)), draw(st.integers(0, 4)), draw(small), draw(small), draw(small))
    if kind == "round_robin":
        return RoundRobin(draw(st.integers(1, 12)))
    share = draw(st.floats(0, 1))
    if kind == "adaptive":
        return Adaptive(max(share, 0.01))
    seed = draw(st.integers(0, 2**32))
    return Custom(lambda now: {part: "drawn" for part in now.parts if drawn(seed, now.save, part) < share})


def drawn(seed: int, save: int, part: str) -> float:
    return Random(f"{seed} {save} {part}").random()


@given(policies(), st.integers(1, 9), sizes, st.integers(0, 12), st.integers(0, 2**32))
def test_no_part_of_any_policy_gets_too_old(policy, num_layers, sizes, limit, seed):
    structure = llama(num_layers)
    num_bytes = {part: sizes[at % len(sizes)] for at, part in enumerate(structure.parts)}

    def drift(save, last):
        return {part: drawn(seed, save, part) ** 3 * (save - last[part]) for part in structure.parts}

    made = run(policy, structure, limit, 40, num_bytes=num_bytes, drift=drift if policy.needs_drift else None)
    assert made.oldest <= limit
