"""The recipe language: YAML to `Recipe`, and a recipe resolved against a model."""
