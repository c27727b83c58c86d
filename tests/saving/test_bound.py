"""No part becomes too old, whatever a policy answers, and forced parts are spread."""

from __future__ import annotations

from random import Random

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


def test_a_choice_is_in_the_order_of_the_model_and_knows_what_was_added():
    policy = Custom(lambda now: {HEAD: "mine", "layer 0": "mine"})
    found = choose(policy, situation(llama(2), 4, last=alike(llama(2).parts, 3) | {NORM: 0}), 3)
    assert list(found.parts.items()) == [("layer 0", "mine"), (NORM, MAX_STALENESS), (HEAD, "mine")]
    assert found.added == {NORM}
    assert found.problems == ()


def test_what_was_never_saved_is_saved():
    last = {EMBED: 0, "layer 0": 0, "layer 1": 1, NORM: 0, HEAD: 1}
    del last["layer 1"]  # unfrozen since the base
    found = choose(Parity(), situation(llama(2), 2, last=last), 1)
    assert found.parts["layer 1"] == IN_NO_SAVE
    assert found.added == {"layer 1"}


def test_an_empty_answer_becomes_the_oldest_part():
    last = {EMBED: 5, "layer 0": 3, "layer 1": 3, NORM: 4, HEAD: 6}
    assert choose(Custom(nothing), situation(llama(2), 7, last=last), 50).parts == {"layer 0": OLDEST}
    # Only odd layers are trainable, so the even half is empty.
    found = choose(Parity(), situation(llama(4), 2, parts=["layer 1", "layer 3"], last={"layer 1": 1, "layer 3": 0}), 9)
    assert found.parts == {"layer 3": OLDEST}


def test_a_policy_of_ones_own_can_be_wrong_without_ending_the_run():
    def problem(answer):
        found = choose(Custom(answer), situation(llama(2), 7, last=alike(llama(2).parts, 6)), 20)
        (told,) = found.problems
        assert told.where == "policy custom, save 7"
        return dict(found.parts), told.what, told.fix

    def fails(situation):
        raise KeyError("lr")

    parts, what, fix = problem(lambda now: {"layer 1": "mine", "layer 7": "mine"})
    assert parts == {"layer 1": "mine"}
    assert what == "there is no part 'layer 7'"
    assert fix == "did you mean 'layer 1'? Valid here: embed_tokens, layers 0-1, norm, lm_head"
    assert problem(fails)[:2] == ({EMBED: OLDEST}, "it raised KeyError('lr')")
    assert problem(lambda now: ["layer 1"])[:2] == ({EMBED: OLDEST}, "it returned a list")
    assert problem(lambda now: None)[1] == "it returned a NoneType"


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


def test_a_schedule_that_starts_from_elsewhere_is_held_to_the_limit():
    """Resumed from another policy's saves: what is overdue is saved at once, the rest when it is due."""
    last = {EMBED: 19, "layer 0": 11, "layer 1": 12, NORM: 20, HEAD: 20}
    policy = RoundRobin(5)  # at save 21 it is the embeddings' turn
    assert choose(policy, situation(llama(2), 21, last=last), 9).added == {"layer 0"}
    assert choose(policy, situation(llama(2), 21, last=last), 8).added == {"layer 0", "layer 1"}


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
