"""Checkpoints of the Trainer and of accelerate without DeepSpeed."""
