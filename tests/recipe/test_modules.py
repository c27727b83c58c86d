"""``models:`` and ``modules:`` over a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtailor.errors import Problem, RecipeError
from llmtailor.model.parts import ModelStructure
from llmtailor.recipe.resolve import resolve
from recipe.structures import llama, params_of, qwen_vl, read

BASE, A = Path("/w/base"), Path("/w/a")


def from_a(text: str, structure: ModelStructure) -> list[str]:
    """Return the parts that come from a, whole; everything else is the base's."""
    choice = resolve(read(f"base_model: base\n{text}"), structure, BASE, params_of(structure))
    assert set(choice.source_of.values()) <= {A, BASE}
    parts = [part for part in structure.parts if all(choice.source_of[name] == A for name in structure.names(part))]
    assert {name for name, source in choice.source_of.items() if source == A} == {
        name for part in parts for name in structure.names(part)
    }
    return parts


def problems_of(text: str, structure: ModelStructure) -> list[Problem]:
    with pytest.raises(RecipeError) as caught:
        resolve(read(f"base_model: base\n{text}"), structure, BASE, params_of(structure))
    assert all(problem.fix for problem in caught.value.problems)
    return list(caught.value.problems)


def module(name: str, *bounds: int) -> str:
    if not bounds:
        return f"modules: {{{name}: {{models: [{{model: a}}]}}}}"
    return f"modules: {{{name}: {{slices: [{{sources: [{{model: a, layer_range: {list(bounds)}}}]}}]}}}}"


def test_one_model_gives_every_part():
    for structure in (llama(3), llama(3, tied=True), qwen_vl()):
        assert from_a("models: [{model: a}]", structure) == list(structure.parts)


def test_one_model_without_a_base_leaves_no_gap():
    choice = resolve(read("models: [{model: a}]"), llama(2), A, params_of(llama(2)))
    assert set(choice.source_of.values()) == {A}
    assert choice.filled == ()


def test_parts_override_models_but_weights_must_not_contradict_them():
    structure = llama(2)
    assert "norm" not in from_a("models: [{model: a}]\nparts: [{from: base, select: norm}]", structure)
    (problem,) = problems_of("models: [{model: a}]\npre_weights: [{name: norm, model: base}]", structure)
    assert problem.what.startswith("norm: /w/base here, but /w/a at recipe.yaml:2 models[0]")


@pytest.mark.parametrize("name", ["text_decoder", "language_model", "decoder", "default", "model", "llm"])
@pytest.mark.parametrize("known", [True, False])
def test_slices_of_the_text_model_are_its_layers(name: str, known: bool):
    assert from_a(module(name, 1, 3), qwen_vl(known=known)) == ["layer 1", "layer 2"]
    assert from_a(module(name, 1, 3), llama(4)) == ["layer 1", "layer 2"]


@pytest.mark.parametrize("known", [True, False])
def test_the_whole_text_model_is_all_but_the_towers(known: bool):
    text = ["embed_tokens", *(f"layer {number}" for number in range(4)), "norm", "lm_head"]
    assert from_a(module("text_decoder"), qwen_vl(known=known)) == text


def test_a_whole_submodel_by_mergekits_name():
    tower = ["visual.patch_embed.proj", *(f"visual.blocks.{number}" for number in range(4))]
    projector = ["visual.merger.ln_q", "visual.merger.mlp.0", "visual.merger.mlp.2"]
    assert from_a(module("vision_tower"), qwen_vl()) == tower
    assert from_a(module("multi_modal_projector"), qwen_vl()) == projector


@pytest.mark.parametrize("known", [True, False])
def test_a_submodel_by_its_path(known: bool):
    """Also where mergekit knows the model: its names are not the only ones."""
    every = [part for part in qwen_vl().parts if part.startswith("visual.")]
    assert from_a(module("visual"), qwen_vl(known=known)) == every
    assert from_a(module("visual.blocks"), qwen_vl(known=known)) == [f"visual.blocks.{number}" for number in range(4)]
    assert from_a(module("merger"), qwen_vl(known=known)) == every[-3:]


@pytest.mark.parametrize(("name", "known"), [("vision_tower", True), ("visual", False), ("blocks", False)])
def test_slices_of_a_tower_are_its_layers(name: str, known: bool):
    assert from_a(module(name, 0, 2), qwen_vl(known=known)) == ["visual.blocks.0", "visual.blocks.1"]
    assert from_a(module(name, 3, 4), qwen_vl(known=known)) == ["visual.blocks.3"]
    (problem,) = problems_of(module(name, 2, 5), qwen_vl(known=known))
    assert "layer_range [2, 5] is out of range" in problem.what
    assert f"{name} has 4 layers, 0-3" in problem.fix


def test_a_slice_without_layer_range_takes_all_layers_of_the_tower():
    text = "modules: {vision_tower: {slices: [{sources: [{model: a}]}]}}"
    assert from_a(text, qwen_vl()) == [f"visual.blocks.{number}" for number in range(4)]


def test_modules_together():
    text = """\
modules:
  text_decoder: {slices: [{sources: [{model: a, layer_range: [2, 4]}]}]}
  vision_tower: {slices: [{sources: [{model: a, layer_range: [0, 1]}]}]}
  multi_modal_projector: {models: [{model: a}]}
"""
    expected = [
        "layer 2",
        "layer 3",
        "visual.blocks.0",
        "visual.merger.ln_q",
        "visual.merger.mlp.0",
        "visual.merger.mlp.2",
    ]
    assert from_a(text, qwen_vl()) == expected


def test_modules_that_contradict_each_other():
    text = "modules: {visual: {models: [{model: a}]}, vision_tower: {models: [{model: base}]}}"
    (problem,) = problems_of(text, qwen_vl())
    assert "visual.blocks.0" in problem.what
    assert "/w/base here, but /w/a" in problem.what


@pytest.mark.parametrize(
    ("text", "known", "what", "fix"),
    [
        (module("vision_tower"), False, "no tensors are known to belong to the module 'vision_tower'", "visual"),
        (module("vision_towr"), True, "the module 'vision_towr'", "did you mean 'vision_tower'?"),
        (module("audio", 0, 2), True, "the module 'audio'", "text_decoder"),
        (
            module("multi_modal_projector", 0, 1),
            True,
            "has no layers for slices to name",
            "models: [{model: PATH}]",
        ),
        (module("patch_embed", 0, 1), False, "has no layers for slices to name", "models:"),
    ],
)
def test_modules_that_can_not_be_told(text: str, known: bool, what: str, fix: str):
    (problem,) = problems_of(text, qwen_vl(known=known))
    assert problem.where.startswith("recipe.yaml:2 modules.")
    assert what in problem.what
    assert fix in problem.fix
    assert "parts:" in problem.fix


def test_a_module_with_two_stacks_is_not_guessed():
    more = {"model.visual.deepstack.0.norm.weight": "visual.deepstack.0"}
    plain = qwen_vl(known=False)
    structure = ModelStructure(plain.part_of | more, (*plain.parts, "visual.deepstack.0"), 4, tied=False)
    (problem,) = problems_of(module("visual", 0, 1), structure)
    assert "several stacks of layers" in problem.what
    assert "visual.blocks, visual.deepstack" in problem.fix
    assert from_a(module("visual.blocks", 0, 1), structure) == ["visual.blocks.0"]
