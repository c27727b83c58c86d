"""The recipe language: YAML text to `Recipe`, and a recipe over a model to a `Choice` of sources."""

from llmtailor.recipe.parse import load_recipe, parse_recipe
from llmtailor.recipe.resolve import Choice, resolve
from llmtailor.recipe.selectors import select

__all__ = ["Choice", "load_recipe", "parse_recipe", "resolve", "select"]
