"""A recipe in its normal form: what another form of the YAML means."""

from __future__ import annotations

from pathlib import Path

from llmtailor.compose import dissect_checkpoint, open_sources
from llmtailor.errors import Problems
from llmtailor.recipe.parse import load_recipe
from llmtailor.recipe.resolve import resolve
from llmtailor.recipe.write import write_normal_form


def explain_recipe(config: Path, folder: Path | None, *, allow_split: bool = False) -> str:
    """Return the YAML of a recipe file in the short form; paths are relative to ``folder`` where that is close by.

    Raises a TailorError with every problem of the recipe and of its checkpoints.
    """
    recipe = load_recipe(config)
    problems = Problems()
    indexes, base = open_sources(recipe, problems)
    problems.raise_if_any()
    reference = indexes[base]
    anatomy = dissect_checkpoint(reference)
    choice = resolve(recipe, anatomy, reference.root, set(reference.params), allow_split=allow_split)
    return write_normal_form(recipe, choice.source_of, reference.root, anatomy, folder, choice.weights_of)
