"""Makes a composite from a recipe: plan, check, write, verify."""
