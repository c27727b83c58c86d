"""Averages in recipes: what they weigh."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtailor.recipe import Average
from llmtailor.recipe.emit import write_normal_form
from llmtailor.recipe.parse import parse_recipe
from llmtailor.recipe.resolve import resolve, weigh
from recipe.structures import check, llama, params_of, problems_of, read

A, B, C = (Path(f"/w/{name}") for name in "abc")
STEPS = {A: 100, B: 200, C: 300}


def test_a_moving_average_weighs_by_step_whatever_the_order():
    recipe = read("merge_method: ema\nparameters: {decay: 0.9}\nmodels: [{model: c}, {model: a}, {model: b}]")
    (rule,) = weigh(recipe, STEPS).rules
    assert isinstance(rule.source, Average) and rule.source.decay is None
    total = 1 + 0.9 + 0.81
    assert [source for source, _ in rule.source.shares()] == [A, B, C]
    assert [share for _, share in rule.source.shares()] == pytest.approx([0.81 / total, 0.9 / total, 1 / total])


def test_two_members_of_a_moving_average_must_not_be_of_one_step():
    recipe = read("merge_method: ema\nparameters: {decay: 0.5}\nmodels: [{model: a}, {model: a}]")
    check(problems_of(lambda: weigh(recipe, STEPS)), (":3 models", "of step 100", "merge_method: linear"))


WEIGHTS = st.lists(st.floats(1e-150, 1e150), min_size=1, max_size=30)


@given(WEIGHTS)
def test_shares_sum_to_1_and_keep_proportions(weights):
    average = Average(tuple((Path(str(number)), weight) for number, weight in enumerate(weights)), "newest")
    shares = [share for _, share in average.shares()]
    assert math.fsum(shares) == pytest.approx(1, rel=1e-15)
    assert [share * math.fsum(weights) for share in shares] == pytest.approx(weights)


@given(WEIGHTS, st.sampled_from(["newest", "average", "reset"]), st.sampled_from(["linear", "ema"]))
def test_the_normal_form_means_the_same(weights, moments, method):
    structure = llama(2)
    steps = {Path(f"/w/checkpoint-{number}"): number for number in range(len(weights))}
    models = "".join(
        f"  - model: checkpoint-{number}\n" + f"    parameters: {{weight: {weight!r}}}\n" * (method == "linear")
        for number, weight in enumerate(weights)
    )
    decay = "parameters: {decay: 0.3}\n" * (method == "ema")
    recipe = weigh(read(f"merge_method: {method}\nbase_model: c\nmoments: {moments}\n{decay}models:\n{models}"), steps)
    first = resolve(recipe, structure, C, params_of(structure))
    text = write_normal_form(recipe, first.source_of, C, structure, Path("/w"))
    again = parse_recipe(text, name="again", folder=Path("/w"), environ={})
    second = resolve(again, structure, C, params_of(structure))
    assert second.source_of == first.source_of
    assert not again.notices
