"""Every example of docs/recipes.md is a recipe that can be read and resolved, and says what the text claims."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from helpers.places import ROOT
from llmtailor.model.dtypes import SPELLINGS
from llmtailor.recipe import checkpoints_of, parse
from llmtailor.recipe.resolve import resolve
from recipe.structures import llama, mixtral, params_of, qwen_vl, read

PAGE = ROOT / "docs" / "recipes.md"
BLOCKS = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("block", BLOCKS, ids=[f"{at}-{next(iter(yaml.safe_load(b)))}" for at, b in enumerate(BLOCKS)])
def test_every_example_is_a_recipe(block: str):
    structure = qwen_vl(8) if "modules:" in block else mixtral(8) if "expert" in block else llama(8)
    recipe = read(block, RUN="runs/a")
    splits = "--allow-split" in block
    base = recipe.base or recipe.sources()[0]
    choice = resolve(recipe, structure, base, params_of(structure), allow_split=splits)
    assert choice.source_of.keys() == choice.structure.part_of.keys()
    assert bool(choice.weights_of) is splits
    assert not recipe.notices
    named = {source.name for source in recipe.sources()} - {recipe.base.name if recipe.base else ""}
    others = (*choice.weights_of.values(), *choice.moments_of.values())
    used = {source.name for source in checkpoints_of([*choice.source_of.values(), *others])}
    assert named <= used, "a source that nothing comes from"
    assert all(source.is_relative_to("/w/runs/a") for source in recipe.sources())


def test_examples_that_claim_to_be_the_same_are():
    structure = llama(8)
    same = [read(block) for block in BLOCKS if "!embed_tokens" in block]
    assert len(same) == 2
    first, second = (resolve(recipe, structure, recipe.sources()[0], params_of(structure)) for recipe in same)
    assert first.source_of == second.source_of


def test_examples_do_what_the_text_says():
    def parts_from_300(start: str) -> set[str]:
        (block,) = (block for block in BLOCKS if start in block)
        structure = qwen_vl(8)
        choice = resolve(read(block), structure, Path("/w/runs/a/checkpoint-400"), params_of(structure))
        return {structure.part_of[name] for name, source in choice.source_of.items() if source.name == "checkpoint-300"}

    tower = {"visual.patch_embed.proj", *(f"visual.blocks.{number}" for number in range(4))}
    assert parts_from_300("text_decoder:") == tower | {f"layer {number}" for number in range(4)}
    assert parts_from_300("modules:\n  vision_tower:") == {"visual.blocks.0", "visual.blocks.1"}


def test_the_page_names_every_key():
    text = PAGE.read_text(encoding="utf-8")
    keys = (*parse.TOP_KEYS, *parse.NO_EFFECT_IN_SLICE, *parse.TOKENIZER_KEYS[1:], *parse.CHAT_TEMPLATES, *SPELLINGS)
    assert not [key for key in keys if f"`{key}`" not in text]
