"""A recipe over a model: one source for each tensor."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtailor.errors import Problem, RecipeError
from llmtailor.model.parts import ModelStructure
from llmtailor.recipe import LayerRange, Recipe, Rule, Select
from llmtailor.recipe.resolve import Choice, resolve
from recipe.structures import EMBED_NAME, HEAD_NAME, llama, params_of, read

BASE, A, B = Path("/w/base"), Path("/w/a"), Path("/w/b")


def choose(text: str, structure: ModelStructure, params: Collection[str] | None = None) -> Choice:
    return resolve(read(text), structure, BASE, params_of(structure) if params is None else params)


def sources_by_part(choice: Choice, structure: ModelStructure) -> dict[str, str]:
    """Return the folder name of each part's source; a part with two is an error here."""
    found: dict[str, set[str]] = {}
    for name, source in choice.source_of.items():
        found.setdefault(structure.part_of[name], set()).add(source.name)
    assert all(len(names) == 1 for names in found.values()), found
    return {part: names.pop() for part, names in found.items()}


def problems_of(text: str, structure: ModelStructure, params: Collection[str] | None = None) -> list[Problem]:
    with pytest.raises(RecipeError) as caught:
        choose(text, structure, params)
    assert all(problem.where.startswith("recipe.yaml") and problem.fix for problem in caught.value.problems)
    return list(caught.value.problems)


def test_what_no_rule_names_comes_from_the_base():
    structure = llama(4)
    choice = choose("base_model: base\nparts: [{from: a, select: [odd, norm]}]", structure)
    assert sources_by_part(choice, structure) == {
        "embed_tokens": "base", "layer 0": "base", "layer 1": "a", "layer 2": "base", "layer 3": "a", "norm": "a",
        "lm_head": "base",
    }  # fmt: skip
    assert choice.filled == ("embed_tokens", "layer 0", "layer 2", "lm_head")
    assert choice.source_of.keys() == structure.part_of.keys()


def test_a_base_alone_is_a_copy_of_it():
    choice = choose("base_model: base", llama(2))
    assert set(choice.source_of.values()) == {BASE}
    assert choice.filled == llama(2).parts


def test_parts_that_rules_name_in_part_are_told():
    choice = choose("base_model: base\nparts: [{from: a, select: model.layers.1.mlp.*}]", llama(2))
    assert choice.filled == ("embed_tokens", "layer 0", "layer 1 (partly)", "norm", "lm_head")
    assert choice.source_of["model.layers.1.mlp.up_proj.weight"] == A
    assert choice.source_of["model.layers.1.input_layernorm.weight"] == BASE


def test_a_part_that_is_named_as_the_bases_is_not_filled():
    choice = choose("base_model: base\nparts: [{from: base, select: norm}, {from: a, select: layers}]", llama(2))
    assert choice.filled == ("embed_tokens", "lm_head")


def test_slices_take_half_open_ranges_and_a_slice_without_one_takes_all():
    structure = llama(4)
    text = "base_model: base\nslices:\n  - sources: [{model: a, layer_range: [0, 1]}]\n" \
           "  - sources: [{model: b, layer_range: [2, 4]}]\n"  # fmt: skip
    found = sources_by_part(choose(text, structure), structure)
    assert [found[f"layer {number}"] for number in range(4)] == ["a", "base", "b", "b"]
    found = sources_by_part(choose("base_model: base\nslices: [{sources: [{model: a}]}]", structure), structure)
    assert [part for part, source in found.items() if source == "a"] == [f"layer {number}" for number in range(4)]


def test_later_parts_win_over_earlier_ones_and_over_slices():
    structure = llama(4)
    text = "base_model: base\nparts: [{from: a, select: [1, 2, norm]}, {from: b, select: [2, 3]}]\n" \
           "slices: [{sources: [{model: base, layer_range: [0, 4]}]}]\n" \
           "pre_weights: [{name: norm, model: base}]\n"  # fmt: skip
    found = sources_by_part(choose(text, structure), structure)
    assert [found[part] for part in ("layer 0", "layer 1", "layer 2", "layer 3", "norm")] == [
        "base",
        "a",
        "b",
        "b",
        "a",
    ]


@pytest.mark.parametrize(
    ("tied", "numbers"),
    [(False, {0: "norm", 5: "lm_head", 6: "embed_tokens"}), (True, {0: "norm", 5: "embed_tokens"})],
)
def test_numbers_of_auxiliary_parts(tied: bool, numbers: dict[int, str]):
    structure = llama(4, tied=tied)
    for number, part in numbers.items():
        text = f"base_model: base\nslices: [{{sources: [{{model: a, layer_range: [{number}, {number}]}}]}}]"
        found = sources_by_part(choose(text, structure), structure)
        assert [each for each, source in found.items() if source == "a"] == [part]


def test_the_whole_of_the_originals_form():
    structure = llama(4)
    text = "\n".join([
        "slices:",
        "  - sources: [{model: a, layer_range: [0, 0]}]",
        "  - sources: [{model: a, layer_range: [0, 2]}]",
        "  - sources: [{model: b, layer_range: [2, 4]}]",
        "  - sources: [{model: b, layer_range: [5, 5]}]",
        "  - sources: [{model: a, layer_range: [6, 6]}]",
        "pre_weights: [{name: model.norm.weight, model: a}]",
        "post_weights: [{name: lm_head.weight, model: b}, {name: model.embed_tokens.weight, model: a}]",
    ])  # fmt: skip
    choice = choose(text, structure)
    assert choice.filled == ()
    assert sources_by_part(choice, structure) == {
        "embed_tokens": "a", "layer 0": "a", "layer 1": "a", "layer 2": "b", "layer 3": "b", "norm": "a",
        "lm_head": "b",
    }  # fmt: skip


def test_weights_name_one_tensor_or_a_part():
    structure = llama(2, extra={"model.norm.bias": "norm"})
    choice = choose("base_model: base\npre_weights: [{name: model.norm.weight, model: a}]", structure)
    assert choice.source_of["model.norm.weight"] == A
    assert choice.source_of["model.norm.bias"] == BASE
    assert "norm (partly)" in choice.filled
    choice = choose("base_model: base\npost_weights: [{name: norm, model: a}]", structure)
    assert choice.source_of["model.norm.bias"] == A


@pytest.mark.parametrize("name", ["lm_head", HEAD_NAME, EMBED_NAME, "embed_tokens"])
def test_a_rule_for_either_name_of_tied_embeddings_counts_for_both(name: str):
    choice = choose(f"base_model: base\npre_weights: [{{name: {name}, model: a}}]", llama(2, tied=True))
    assert choice.source_of[EMBED_NAME] == choice.source_of[HEAD_NAME] == A
    assert "embed_tokens" not in choice.filled


def test_gaps_without_a_base_are_one_problem_that_lists_them():
    (problem,) = problems_of("parts: [{from: a, select: [first:3, embed_tokens, '9', '*.8.mlp.*']}]", llama(10))
    assert problem.where == "recipe.yaml"
    assert problem.what.endswith(": layers 3-7, layer 8 (partly), norm, lm_head")
    assert "base_model" in problem.fix


def test_no_gaps_need_no_base():
    assert choose("parts: [{from: a, select: all}]", llama(2)).filled == ()


@pytest.mark.parametrize(
    ("text", "where", "what", "fix"),
    [
        ("slices: [{sources: [{model: a, layer_range: [2, 5]}]}]", "slices[0].sources[0].layer_range",
         "layer_range [2, 5] is out of range", "4 layers, 0-3"),
        ("slices: [{sources: [{model: a, layer_range: [7, 9]}]}]", "slices[0].sources[0].layer_range",
         "layer_range [7, 9] is out of range", "4 layers, 0-3"),
        ("slices: [{sources: [{model: a, layer_range: [3, 3]}]}]", "slices[0].sources[0].layer_range",
         "[3, 3] is an empty layer range", "for layer 2, write [2, 3]; [0, 0] is norm, [5, 5] is lm_head"),
        ("slices: [{sources: [{model: a, layer_range: [7, 7]}]}]", "slices[0].sources[0].layer_range",
         "[7, 7] is not the number of a part", "[6, 6] is embed_tokens"),
        ("pre_weights: [{name: model.embed_token.weight, model: a}]", "pre_weights[0]",
         "no part or tensor 'model.embed_token.weight'", "did you mean 'model.embed_tokens.weight'"),
        ("post_weights: [{name: nrom, model: a}]", "post_weights[0]", "no part or tensor 'nrom'", "'norm'"),
        ("parts: [{from: a, select: [even, '8']}]", "parts[0]", "'8' is out of range", "4 layers, 0-3"),
        ("parts: [{from: a, select: visual}]", "parts[0]", "no part or tensor 'visual'", "embed_tokens, layers 0-3"),
        ("parts: [{from: a, select: '*.experts.*'}]", "parts[0]", "matches no tensor name", "names look like"),
    ],
)  # fmt: skip
def test_rules_that_name_what_the_model_lacks(text: str, where: str, what: str, fix: str):
    (problem,) = problems_of(f"base_model: base\n{text}", llama(4))
    assert problem.where == f"recipe.yaml:2 {where}"
    assert what in problem.what
    assert fix in problem.fix


def test_a_number_of_a_part_that_the_model_lacks():
    headless = llama(2)
    names = {name: part for name, part in headless.part_of.items() if part != "lm_head"}
    structure = ModelStructure(names, headless.parts[:-1], 2, tied=False)
    text = "base_model: base\nslices: [{sources: [{model: a, layer_range: [3, 3]}]}]"
    (problem,) = problems_of(text, structure)
    assert "[3, 3] is not the number of a part of this model" in problem.what
    assert "lm_head" not in problem.fix


CLASHES = [
    # rules, tied, the second rule, the first one, parts
    ("slices: [{sources: [{model: a, layer_range: [0, 0]}]}]\npre_weights: [{name: model.norm.weight, model: b}]",
     False, "3 pre_weights[0]", "2 slices[0].sources[0].layer_range", "norm"),
    ("slices: [{sources: [{model: a, layer_range: [0, 2]}]}]\npost_weights: [{name: layer 1, model: b}]",
     False, "3 post_weights[0]", "2 slices[0].sources[0].layer_range", "layer 1"),
    ("pre_weights: [{name: lm_head, model: a}]\npost_weights: [{name: lm_head.weight, model: b}]",
     False, "3 post_weights[0]", "2 pre_weights[0]", "lm_head"),
    ("pre_weights: [{name: model.embed_tokens.weight, model: a}]\npost_weights: [{name: lm_head.weight, model: b}]",
     True, "3 post_weights[0]", "2 pre_weights[0]", "embed_tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "tied", "second", "first", "part"), CLASHES)
def test_rules_that_contradict_each_other(text: str, tied: bool, second: str, first: str, part: str):
    (problem,) = problems_of(f"base_model: base\n{text}", llama(4, tied=tied))
    assert problem.where == f"recipe.yaml:{second}"
    assert problem.what.startswith(f"{part}: /w/b here, but /w/a at recipe.yaml:{first}")
    assert "same source" in problem.fix


def test_rules_that_say_the_same_twice_are_fine():
    text = CLASHES[0][0].replace("model: b", "model: ./a/")
    assert choose(f"base_model: base\n{text}", llama(4)).source_of["model.norm.weight"] == A


def test_ranges_that_contradict_each_other_are_found_though_no_parser_saw_them():
    rules: tuple[Rule, ...] = (LayerRange(A, 0, 3, "r:1"), LayerRange(B, 2, 4, "r:2"))
    with pytest.raises(RecipeError, match="layer 2: /w/b here, but /w/a at r:1"):
        resolve(Recipe("r", "", BASE, rules, None, None), llama(4), BASE, params_of(llama(4)))


def test_everything_is_told_at_once():
    found = problems_of("""\
slices:
  - sources: [{model: a, layer_range: [0, 9]}]
pre_weights:
  - {name: nrom, model: a}
  - {name: lm_head, model: a}
post_weights:
  - {name: lm_head, model: b}
parts:
  - {from: a, select: ["7", "*.x.*", odd]}
""", llama(4))  # fmt: skip
    wheres = [problem.where.removeprefix("recipe.yaml") for problem in found]
    assert wheres == [":2 slices[0].sources[0].layer_range", ":4 pre_weights[0]", ":7 post_weights[0]", ":9 parts[0]",
                      ":9 parts[0]", ""]  # fmt: skip
    assert "embed_tokens, layers 0, 2, norm" in found[-1].what


# Weights that go by other names on disk: training knows gate_up_proj, the file holds one tensor per expert.

FUSED = "model.layers.1.mlp.experts.gate_up_proj"
EXPERTS = [f"model.layers.1.mlp.experts.{number}.up_proj.weight" for number in range(3)]


@pytest.fixture
def moe() -> tuple[ModelStructure, set[str]]:
    structure = llama(3, extra=dict.fromkeys([FUSED, *EXPERTS], "layer 1"))
    return structure, params_of(structure) - set(EXPERTS)


@pytest.mark.parametrize("select", ["1", "layers", "model.layers.1.*", "model.layers.1.[ims]*"])
def test_expert_weights_follow_the_params_of_their_layer(select: str, moe: tuple[ModelStructure, set[str]]):
    structure, params = moe
    choice = choose(f"base_model: base\nparts: [{{from: a, select: '{select}'}}]", structure, params)
    assert {choice.source_of[name] for name in [FUSED, *EXPERTS]} == {A}
    assert "layer 1" not in choice.filled


def test_expert_weights_follow_params_that_the_rule_names_by_their_own_name_only(moe: tuple[ModelStructure, set[str]]):
    structure, params = moe
    own = [name for name in structure.names("layer 1") if name in params]
    choice = choose(f"base_model: base\nparts: [{{from: a, select: [{', '.join(own)}]}}]", structure, params)
    assert {choice.source_of[name] for name in EXPERTS} == {A}
    assert choice.filled == ("embed_tokens", "layer 0", "layer 2", "norm", "lm_head")


@pytest.mark.parametrize("select", ["*.self_attn.*", "*.mlp.*", FUSED, EXPERTS[0], "*.experts.?.*"])
def test_a_layer_whose_weights_are_renamed_can_not_be_split(select: str, moe: tuple[ModelStructure, set[str]]):
    structure, params = moe
    (problem,) = problems_of(f"base_model: base\nparts: [{{from: a, select: '{select}'}}]", structure, params)
    assert problem.what.startswith("layer 1: the weights on disk have other names than the params")
    assert "one checkpoint" in problem.fix


def test_other_layers_of_such_a_model_can_be_split(moe: tuple[ModelStructure, set[str]]):
    structure, params = moe
    choice = choose("base_model: base\nparts: [{from: a, select: 'model.layers.0.mlp.*'}]", structure, params)
    assert choice.source_of["model.layers.0.mlp.up_proj.weight"] == A


def test_weights_in_a_part_without_params_need_a_single_source():
    """It can't be told whose they are, so nothing is guessed."""
    structure = llama(2, extra={"tower.blocks.0.w.weight": "tower.blocks.0"})
    params = params_of(structure) - {"tower.blocks.0.w.weight"}
    choice = choose("parts: [{from: a, select: layers}, {from: a, select: '!layers'}]", structure, params)
    assert set(choice.source_of.values()) == {A}
    for text in ("base_model: base\nparts: [{from: a, select: '0'}]",
                 "base_model: base\nparts: [{from: a, select: tower.blocks.0}]"):  # fmt: skip
        (problem,) = problems_of(text, structure, params)
        assert problem.what.startswith("tower.blocks.0: these weights on disk have other names")


@st.composite
def recipes(draw: st.DrawFn, num_layers: int) -> Recipe:
    """Draw recipes that make sense: slices in order, then parts."""
    rules: list[Rule] = []
    cuts = sorted(draw(st.sets(st.integers(0, num_layers), max_size=4)))
    for start, stop in itertools.pairwise(cuts):
        rules.append(LayerRange(draw(st.sampled_from([A, B, BASE])), start, stop, f"r:{start}"))
    words = ["even", "layers", "all", "norm", "lm_head", "embed_tokens", "first:1", "last:1", "*.mlp.*", "*norm*"]
    for selectors in draw(st.lists(st.lists(st.sampled_from(words), min_size=1, max_size=3), max_size=4)):
        rules.append(Select(draw(st.sampled_from([A, B, BASE])), tuple(selectors), "r"))
    return Recipe("r", "", BASE, tuple(rules), None, None)


@given(st.data(), st.integers(1, 8), st.booleans())
def test_every_name_has_the_source_of_the_last_rule_that_names_it(data: st.DataObject, num_layers: int, tied: bool):
    structure = llama(num_layers, tied=tied)
    recipe = data.draw(recipes(num_layers))
    choice = resolve(recipe, structure, BASE, params_of(structure))

    expected: dict[str, Path] = {}
    for rule in recipe.rules:
        for name, part in structure.part_of.items():
            number = int(part[6:]) if part.startswith("layer ") else None
            if isinstance(rule, LayerRange):
                names_it = number is not None and rule.start <= number < (rule.stop or 0)
            else:
                assert isinstance(rule, Select)
                aliases = {EMBED_NAME, HEAD_NAME} if tied and part == "embed_tokens" else {name}
                names_it = any(
                    word in ("all", part)
                    or (word == "lm_head" and HEAD_NAME in aliases)
                    or (word == "even" and number is not None and number % 2 == 0)
                    or (word == "layers" and number is not None)
                    or (word == "first:1" and number == 0)
                    or (word == "last:1" and number == num_layers - 1)
                    or (word.startswith("*") and any(word.strip("*") in alias for alias in aliases))
                    for word in rule.selectors
                )
            if names_it:
                expected[name] = rule.source
    assert choice.source_of == {name: expected.get(name, BASE) for name in structure.part_of}
    for part in structure.parts:
        named = sum(name in expected for name in structure.names(part))
        told = part if not named else f"{part} (partly)" if named < len(structure.names(part)) else None
        assert [each for each in choice.filled if each in (part, f"{part} (partly)")] == ([told] if told else [])
