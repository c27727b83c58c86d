"""Averages in recipes: how they are written, what they weigh, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtailor.errors import RecipeError
from llmtailor.recipe import Average, Select, Whole
from llmtailor.recipe.emit import write_normal_form
from llmtailor.recipe.parse import parse_recipe
from llmtailor.recipe.resolve import resolve, weigh
from recipe.structures import llama, params_of, read

A, B, C = (Path(f"/w/{name}") for name in "abc")
STEPS = {A: 100, B: 200, C: 300}


def problems_of(text: str) -> list[tuple[str, str, str]]:
    with pytest.raises(RecipeError) as error:
        weigh(read(text), STEPS)
    return [(problem.where, problem.what, problem.fix) for problem in error.value.problems]


LINEAR = """merge_method: linear
base_model: c
models:
  - model: a
    parameters: {weight: 0.25}
  - {model: b, parameters: {weight: 7.5e-1}}
"""


def test_linear_is_mergekits():
    recipe = read(LINEAR)
    average = Average(((A, 0.25), (B, 0.75)), "newest")
    assert recipe.rules == (Whole(average, None, "recipe.yaml:3 models"),)
    assert (recipe.base, recipe.sources()) == (C, (C, A, B))
    assert str(average) == "average of /w/a (0.25), /w/b (0.75)"
    assert not recipe.notices


def test_weights_at_the_top_are_for_models_without_their_own_and_are_normalized():
    recipe = read("merge_method: linear\nmodels: [{model: a}, {model: b, parameters: {weight: 3}}]\n"
                  "parameters: {weight: 1, normalize: true}\nmoments: average")  # fmt: skip
    (rule,) = recipe.rules
    assert isinstance(rule.source, Average)
    assert rule.source.shares() == ((A, 0.25), (B, 0.75)) and rule.source.moments == "average"
    assert recipe.base is None


def test_an_average_of_parts():
    recipe = read("base_model: c\nmoments: reset\nparts:\n"
                  "  - {average: [{from: a, weight: 1}, {from: {path: b}, weight: 3}], select: odd}\n"
                  "  - {average: [{from: a, weight: 1}], select: norm, moments: average}")  # fmt: skip
    assert recipe.rules == (
        Select(Average(((A, 1), (B, 3)), "reset"), ("odd",), "recipe.yaml:4 parts[0]"),
        Select(Average(((A, 1),), "average"), ("norm",), "recipe.yaml:5 parts[1]"),
    )


def test_parts_override_an_average():
    recipe = read(f"{LINEAR}parts: [{{from: c, select: norm}}]")
    choice = resolve(recipe, llama(2), C, params_of(llama(2)))
    assert choice.source_of["model.norm.weight"] == C
    assert isinstance(choice.source_of["model.layers.0.mlp.up_proj.weight"], Average)


def test_a_moving_average_weighs_by_step_whatever_the_order():
    recipe = read("merge_method: ema\nparameters: {decay: 0.9}\nmodels: [{model: c}, {model: a}, {model: b}]")
    (rule,) = weigh(recipe, STEPS).rules
    assert isinstance(rule.source, Average) and rule.source.decay is None
    total = 1 + 0.9 + 0.81
    assert [source for source, _ in rule.source.shares()] == [A, B, C]
    assert [share for _, share in rule.source.shares()] == pytest.approx([0.81 / total, 0.9 / total, 1 / total])


def test_a_weight_of_0_takes_nothing():
    recipe = read("merge_method: linear\nparameters: {weight: 0}\nmodels: [{model: a}, "
                  "{model: b, parameters: {weight: 2}}]")  # fmt: skip
    assert recipe.sources() == (B,)
    (notice,) = recipe.notices
    assert notice.what == "/w/a has the weight 0, so nothing comes from it"


@pytest.mark.parametrize("method", ["linear", "passthrough"])
def test_moments_without_an_average_have_no_effect(method):
    recipe = read("base_model: a\nmoments: reset\nparts: [{from: b, select: odd}]")
    assert [notice.what for notice in recipe.notices] == ["moments has no effect: nothing is averaged"]


BAD = [
    *(("base_model: a\nmerge_method: " + method, ":2 merge_method", f"'{method}' is not passthrough, linear or ema",
       "run mergekit-yaml with this method") for method in ("slerp", "ties", "dare_ties", "task_arithmetic", "sce")),
    ("merge_method: linear\nmodels: [{model: a}]", ":2 models[0]", "the model has no weight", "{weight: 1}"),
    ("merge_method: linear\nbase_model: a", "", "linear averages models, and models is missing", "add models:"),
    ("merge_method: ema\nmodels: [{model: a}]", "", "ema needs parameters", "{decay: 0.9}"),
    ("merge_method: ema\nparameters: {decay: 1}\nmodels: [{model: a}]", ":2 parameters.decay", "not between 0 and 1",
     "0.9"),
    ("merge_method: ema\nparameters: {decay: 0.5}\nmodels: [{model: a, parameters: {weight: 1}}]",
     ":3 models[0].parameters", "from decay and the steps", "leave parameters"),
    ("merge_method: ema\nparameters: {decay: 0.5}\nmodels: [{model: a}, {model: a}]", ":3 models", "of step 100",
     "merge_method: linear"),
    *((f"merge_method: linear\nmodels: [{{model: a, parameters: {{weight: {weight}}}}}]",
       ":2 models[0].parameters.weight", what, fix) for weight, what, fix in (
          ("-1", "negative", "0 or more"), ("x", "'x' is not a number", "decimal"), (".inf", "not a number", "decimal"),
          ("1e999", "not a number", "decimal"), ("[0, 1]", "one number here, not a list", "average: in parts:"),
          ("1_0", "not a number", "decimal"), ("{filter: mlp}", "not a mapping", "average: in parts:"))),
    ("merge_method: linear\nparameters: {weight: 0}\nmodels: [{model: a}, {model: b}]", ":3 models", "above 0",
     "at least one"),
    ("merge_method: linear\nparameters: {weight: 1, normalize: false}\nmodels: [{model: a}, {model: b}]",
     ":2 parameters.normalize", "sum to 2", "sum to 1"),
    ("merge_method: linear\nparameters: {weight: 1, normalize: maybe}\nmodels: [{model: a}]",
     ":2 parameters.normalize", "neither true nor false", "true or false"),
    ("merge_method: linear\nparameters: {weigth: 1}\nmodels: [{model: a}]", ":2 parameters.weigth", "unknown key",
     "weight"),
    ("merge_method: linear\nparameters: {weight: 1}\nmodels: [{model: a}]\nslices: [{sources: [{model: a}]}]",
     ":4 slices", "linear averages whole models", "{average: ["),
    ("merge_method: linear\nmoments: old\nparameters: {weight: 1}\nmodels: [{model: a}]", ":2 moments",
     "'old' is unknown", "newest"),
    ("base_model: a\nparts: [{average: [{from: b}], select: odd}]", ":2 parts[0].average[0]", "weight is missing",
     "add weight"),
    ("base_model: a\nparts: [{average: [{from: b, weight: 1}], from: b, select: odd}]", ":2 parts[0].from",
     "unknown key", ""),
    ("base_model: a\nparts: [{from: b, select: odd, moments: reset}]", ":2 parts[0].moments", "unknown key", ""),
    ("base_model: a\nmodels: [{model: a}, {model: b}]", ":2 models", "passthrough does not blend",
     "merge_method: linear"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "where", "what", "fix"), BAD, ids=[f"{row[0][:60]!r}" for row in BAD])
def test_what_is_no_average_is_refused(text, where, what, fix):
    found = problems_of(text)
    assert any(
        place.removeprefix("recipe.yaml").removeprefix(":1" if not where else "") == where
        and what in said
        and fix in mend
        for place, said, mend in found
    ), found


def test_all_problems_are_told_at_once():
    assert len(problems_of("merge_method: linear\nmodels: [{model: a, parameters: {weight: -1}}, {model: b}]\n"
                           "moments: x\nslices: []")) == 4  # fmt: skip


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
