"""Parts whose weights and optimizer states come from different checkpoints: refused, unless it is meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtailor.errors import Problem, RecipeError
from llmtailor.model.parts import ModelStructure
from llmtailor.recipe.resolve import Choice, resolve
from recipe.structures import EMBED_NAME, HEAD_NAME, llama, params_of, read

BASE, A, B, C = Path("/w/base"), Path("/w/a"), Path("/w/b"), Path("/w/c")
NORM_NAME = "model.norm.weight"


def split(text: str, structure: ModelStructure) -> Choice:
    return resolve(read(f"base_model: base\n{text}"), structure, BASE, params_of(structure), allow_split=True)


def problems_of(text: str, structure: ModelStructure, *, allow_split: bool) -> list[Problem]:
    with pytest.raises(RecipeError) as caught:
        resolve(read(f"base_model: base\n{text}"), structure, BASE, params_of(structure), allow_split=allow_split)
    return list(caught.value.problems)


def group(number: int, source: str) -> str:
    return f"slices: [{{sources: [{{model: {source}, layer_range: [{number}, {number}]}}]}}]\n"


def test_a_number_decides_the_optimizer_and_a_named_weight_the_weight():
    choice = split(group(0, "a") + "pre_weights: [{name: model.norm.weight, model: b}]", llama(4))
    assert choice.source_of[NORM_NAME] == A
    assert choice.weights_of == {NORM_NAME: B}
    assert choice.split == ("norm",)
    assert "norm" not in choice.filled


def test_a_layer_range_decides_the_optimizer_of_its_layers_too():
    text = "slices: [{sources: [{model: a, layer_range: [0, 4]}]}]\npost_weights: [{name: layer 1, model: b}]"
    choice = split(text, llama(4))
    assert set(choice.weights_of) == set(llama(4).names("layer 1"))
    assert choice.split == ("layer 1",)
    name = "model.layers.2.mlp.up_proj.weight"
    choice = split(text.replace("layer 1", name), llama(4))
    assert choice.weights_of == {name: B}
    assert choice.split == ("layer 2 (partly)",)


def test_a_whole_model_decides_the_optimizer_too():
    choice = split("models: [{model: a}]\npre_weights: [{name: norm, model: b}]", llama(2))
    assert set(choice.source_of.values()) == {A}
    assert choice.weights_of == {NORM_NAME: B}


def test_the_order_of_the_rules_is_no_matter():
    one = split("pre_weights: [{name: norm, model: b}]\n" + group(0, "a"), llama(2))
    assert one == split(group(0, "a") + "pre_weights: [{name: norm, model: b}]", llama(2))


def test_weights_from_the_base_and_the_optimizer_from_elsewhere():
    choice = split(group(0, "a") + "pre_weights: [{name: norm, model: base}]", llama(2))
    assert choice.source_of[NORM_NAME] == A
    assert choice.weights_of == {NORM_NAME: BASE}


def test_tied_embeddings_are_split_under_both_names():
    choice = split(group(3, "a") + "post_weights: [{name: lm_head.weight, model: b}]", llama(2, tied=True))
    assert choice.source_of[EMBED_NAME] == choice.source_of[HEAD_NAME] == A
    assert choice.weights_of == {EMBED_NAME: B, HEAD_NAME: B}
    assert choice.split == ("embed_tokens",)


@pytest.mark.parametrize("allow_split", [False, True])
def test_a_weight_that_no_other_rule_names_takes_its_optimizer_along(allow_split: bool):
    recipe = read("base_model: base\npre_weights: [{name: norm, model: b}]")
    choice = resolve(recipe, llama(2), BASE, params_of(llama(2)), allow_split=allow_split)
    assert choice.source_of[NORM_NAME] == B
    assert not choice.weights_of
    assert not choice.split


def test_rules_that_agree_split_nothing():
    choice = split(group(0, "b") + "pre_weights: [{name: norm, model: b}]", llama(2))
    assert choice.source_of[NORM_NAME] == B
    assert not choice.weights_of


def test_parts_override_both():
    text = group(0, "a") + "pre_weights: [{name: norm, model: b}]\nparts: [{from: c, select: norm}]"
    choice = split(text, llama(2))
    assert choice.source_of[NORM_NAME] == C
    assert not choice.weights_of


def test_the_way_out_is_told():
    text = group(0, "a") + "pre_weights: [{name: norm, model: b}]"
    (problem,) = problems_of(text, llama(2), allow_split=False)
    assert "--allow-split for weights from /w/b" in problem.fix
    (problem,) = problems_of("pre_weights: [{name: norm, model: b}]\npost_weights: [{name: norm, model: a}]", llama(2),
                             allow_split=False)  # fmt: skip
    assert "--allow-split" not in problem.fix


@pytest.mark.parametrize(
    ("text", "tied"),
    [
        ("pre_weights: [{name: norm, model: a}]\npost_weights: [{name: model.norm.weight, model: b}]", False),
        ("pre_weights: [{name: embed_tokens, model: a}]\npost_weights: [{name: lm_head, model: b}]", True),
        ("slices: [{sources: [{model: a, layer_range: [0, 0]}]}, {sources: [{model: b, layer_range: [0, 0]}]}]", False),
    ],
)
def test_rules_of_the_same_kind_must_not_contradict_each_other_even_so(text: str, tied: bool):
    (problem,) = problems_of(text, llama(2, tied=tied), allow_split=True)
    assert "/w/b here, but /w/a" in problem.what


FUSED = "model.layers.1.mlp.experts.gate_up_proj"
EXPERT = "model.layers.1.mlp.experts.0.up_proj.weight"


def test_experts_that_go_by_other_names_on_disk_are_split_with_their_layer_or_not_at_all():
    structure = llama(3, extra=dict.fromkeys([FUSED, EXPERT], "layer 1"))
    params = params_of(structure) - {EXPERT}
    text = (
        "base_model: base\nslices: [{sources: [{model: a, layer_range: [0, 3]}]}]\npre_weights: [{name: %s, model: b}]"
    )
    choice = resolve(read(text % "layer 1"), structure, BASE, params, allow_split=True)
    assert choice.source_of[EXPERT] == A
    assert choice.weights_of[EXPERT] == B
    for name in (FUSED, EXPERT, "model.layers.1.self_attn.q_proj.weight"):
        with pytest.raises(RecipeError, match="layer 1: the weights on disk have other names"):
            resolve(read(text % name), structure, BASE, params, allow_split=True)
