"""From a recipe to a composite: plan, check, write, verify."""
