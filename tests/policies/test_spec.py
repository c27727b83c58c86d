"""From what a user writes to a policy, and what is said when it makes no sense."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.places import ROOT, SUPPORT
from llmtailor.errors import UsageError
from llmtailor.model.parts import ModelStructure, Part
from llmtailor.model.precision import Precision
from llmtailor.policies import POLICIES, Adaptive, Filter, Full, Parity, RoundRobin, Situation, choose, make_policy
from llmtailor.saving.arguments import Arguments
from saving.policy_runs import Custom, refusal


@pytest.mark.parametrize(
    ("spec", "policy"),
    [
        ("full", Full()),
        (" Parity ", Parity()),
        ("filter", Filter(2, 2, 5, 2, 3)),
        ("filter:", Filter()),
        ("filter:first=1, every = 3", Filter(first=1, every=3)),
        ("filter:0,last=4", Filter(first=0, last=4)),
        ("round_robin:4", RoundRobin(4)),
        ("round-robin:k=4", RoundRobin(4)),
        ("adaptive", Adaptive(0.5)),
        ("adaptive:0.25", Adaptive(share=0.25)),
        ({"name": "filter", "first": 1}, Filter(first=1)),
        ({"name": "round_robin", "k": 3.0}, RoundRobin(3)),
        (Filter(first=7), Filter(first=7)),
    ],
)
def test_specs(spec, policy):
    assert make_policy(spec) == policy


def test_an_object_is_taken_as_it_is():
    policy = Custom(lambda now: {})
    assert make_policy(policy) is policy


@pytest.mark.parametrize(
    ("spec", "where", "what", "fix"),
    [
        ("partiy", "policy", "there is no policy 'partiy'", "'parity'"),
        (
            "",
            "policy",
            "there is no policy ''",
            "full, rounded, parity, filter, round_robin, moments_in_turn, budget, adaptive",
        ),
        ("filter:frist=2", "policy filter", "there is no option 'frist' (in 'filter:frist=2')", "'first'"),
        ("filter:first=two", "policy filter", "first is 'two'", "a whole number, 0 or more"),
        ("filter:first=", "policy filter", "first is ''", "a whole number"),
        ("filter:first=1.5", "policy filter", "first is 1.5", "a whole number"),
        ("filter:first=-1", "policy filter", "first is -1", "0 or more"),
        ("filter:every=0", "policy filter", "every is 0", "1 or more"),
        ("filter:first=1,first=2", "policy filter", "first is given twice", "once"),
        ("filter:1,2", "policy filter", "2 is not an option", "first, last, every, groups, aux_every"),
        ("parity:3", "policy parity", "aux_every is 3", "give 1"),
        ("full:2", "policy full", "2 is not an option", "none"),
        ("round_robin", "policy round_robin", "k is missing", "round_robin:k=4"),
        ("round_robin:0", "policy round_robin", "k is 0", "1 or more"),
        ("adaptive:0", "policy adaptive", "share is 0", "more than 0, at most 1"),
        ("adaptive:1.5", "policy adaptive", "share is 1.5", "at most 1"),
        ("adaptive:nan", "policy adaptive", "share is nan", "a number"),
        ("adaptive:inf", "policy adaptive", "share is inf", "a number, 0.0 or more"),
        ("round_robin:inf", "policy round_robin", "k is inf", "a whole number, 1 or more"),
        ({"name": "filter", "first": True}, "policy filter", "first is True", "a whole number"),
        ({"name": "filter", "first": None}, "policy filter", "first is None", "a whole number"),
        ({"name": "filter", 3: 4}, "policy filter", "there is no option 3", "valid here"),
        ({"first": 2}, "policy", "names no policy", "full, rounded, parity"),
        ({"name": None}, "policy", "names no policy", "full, rounded, parity"),
        (None, "policy", "None is not a policy: it has no name, needs_drift, choose", "a name (full, rounded, parity,"),
        (4, "policy", "4 is not a policy", "follows Policy"),
        (Filter, "policy", "Filter is a class", "Filter(...)"),
    ],
)
def test_bad_specs(spec, where, what, fix):
    (problem,) = refusal(lambda: make_policy(spec))
    assert problem.where == where
    assert what in problem.what
    assert fix in problem.fix


def test_all_problems_are_told_at_once():
    told = refusal(lambda: make_policy("filter:frist=1,last=x,every=0,every=2"))
    assert [problem.what.split(" (")[0] for problem in told] == [
        "there is no option 'frist'", "every is given twice", "last is 'x'", "every is 0",
    ]  # fmt: skip
    assert len(refusal(lambda: Filter(-1, -1, 0, 0, 0))) == 5
    assert len(refusal(lambda: make_policy("round_robin:l=3"))) == 2


@given(st.data(), st.sampled_from(sorted(POLICIES)))
def test_settings_make_the_same_policy(data, name):
    counts = st.integers(1, 10**12)
    options = {
        "filter": st.fixed_dictionaries({}, optional=dict.fromkeys(("first", "last", "every", "groups"), counts)),
        "parity": st.fixed_dictionaries({}, optional={"aux_every": st.integers(1, 2)}),
        "budget": st.fixed_dictionaries({"size": st.floats(2.23, 20)}, optional={"exact": st.just(0)}),
        "round_robin": st.fixed_dictionaries({"k": counts}),
        "adaptive": st.fixed_dictionaries({}, optional={"share": st.floats(0.001, 1)}),
    }.get(name, st.just({}))
    policy = make_policy({"name": name, **data.draw(options)})
    assert make_policy(json.loads(json.dumps(policy.settings()))) == policy
    text = ",".join(f"{key}={value}" for key, value in policy.settings().items() if key != "name" and value is not None)
    assert make_policy(f"{name}:{text}") == policy


@pytest.mark.parametrize(
    ("size", "exact", "masters", "moments", "k"),
    [
        (12, 0, "fp32", "fp32", 1),
        (8.1, 0, "fp32", "bf16", 1),
        (7, 0, "24bit", "bf16", 1),
        (6, 0, "24bit", "8bit", 1),
        (4.1, 0, "24bit", "8bit", 2),
        (3.52, 0, "24bit", "8bit", 4),
        (3.51, 0, "bf16", "8bit", 3),
        (3.25, 0, "bf16", "8bit", 3),
        (0.27, 0, "bf16", "8bit", 3),
        (2.5, 0, "bf16", "8bit", 7),
        (6.5, 1, "fp32", "8bit", 1),
        (4.2, 1, "fp32", "8bit", 11),
    ],
)
def test_a_budget_is_met(size, exact, masters, moments, k):
    policy = make_policy(f"budget:{size},exact={exact}")
    assert policy.precision == Precision(masters, moments)
    parts, numel = tuple(Part(f"layer {number}") for number in range(36)), 128_000
    structure = ModelStructure({str(part): part for part in parts}, parts, 36, tied=False)
    assert policy.worst_staleness(structure, parts) == k - 1
    totals, last = [], dict.fromkeys(parts, 0)
    for save in range(1, k + 1):
        now = Situation(save, save, structure, parts, dict.fromkeys(parts, 12 * numel), dict(last))
        choice = choose(policy, now, k - 1)
        last |= dict.fromkeys(choice.parts, save)
        whole = policy.precision.master_bytes(with_moments=True) + policy.precision.moment_bytes
        totals.append(
            len(choice.parts) * whole + len(choice.masters) * policy.precision.master_bytes(with_moments=False)
        )
    assert sum(totals) / k / len(parts) <= (size if size > 1 else 12 * size) and set(last.values()) == set(
        range(1, k + 1)
    )


def test_a_budget_that_can_t_be_met_is_refused():
    assert [one.what for one in refusal(lambda: make_policy("budget"))] == ["size is missing (in 'budget')"]
    assert "give 2.23 or more bytes per param" in refusal(lambda: make_policy("budget:2.1"))[0].fix
    assert "the fp32 masters are the weights" in refusal(lambda: make_policy("budget:3.25,exact=1"))[0].what
    assert "the model has 2 parts" in refusal(lambda: make_policy("budget:3.25").worst_staleness(None, "ab"))[0].what
    told = refusal(lambda: Arguments.of({"policy": "budget:3.25", "moments": "bf16"}))
    assert "it chooses the precision of masters and moments itself: bf16 and 8bit" in told[0].what


# --- every process gets the same answers -----------------------------------------------------------------------------

SPECS = (
    "full",
    "parity",
    "filter:first=1,last=1,every=2",
    "round_robin:3",
    "adaptive:0.1",
    "adaptive:0.4",
)
ASK = """
import json, sys
from llmtailor.policies import Situation, choose, make_policy
from recipe.structures import qwen_vl

structure = qwen_vl(9)
num_bytes = {part: 100 + len(part) % 3 * 50 for part in structure.parts}
answers = []
for spec in json.loads(sys.argv[1]):
    policy, last = make_policy(spec), dict.fromkeys(structure.parts, 0)
    for save in range(1, 40):
        drift = {part: 0.1 * (save - last[part]) * (len(part) % 4) for part in structure.parts}
        now = Situation(save, save, structure, structure.parts, num_bytes, dict(last), drift, drift)
        choice = choose(policy, now, 20)
        last.update(dict.fromkeys(choice.parts, save))
        answers.append(list(choice.parts.items()))
print(json.dumps(answers))
"""


def test_every_process_gets_the_same_answers():
    """Ranks have different hash seeds, so nothing may depend on the order of a set."""
    path = os.pathsep.join([str(ROOT), str(SUPPORT)])
    said = {
        subprocess.run(
            [sys.executable, "-c", ASK, json.dumps(SPECS)],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(said) == 1
    assert len(json.loads(said.pop())) == 39 * len(SPECS)


def test_an_option_that_does_not_exist_is_taken_for_the_closest_one():
    with pytest.raises(UsageError, match="did you mean 'policy'"):
        Arguments.of({"polcy": "full"})
