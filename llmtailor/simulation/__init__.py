"""Simulates a policy over a model: what its saves cost, and what a failure costs."""
