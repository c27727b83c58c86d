"""The recipe language: YAML text to `Recipe`, and a recipe over a model to a `Choice` of sources."""
