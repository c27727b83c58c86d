"""Checkpoints of verl."""
