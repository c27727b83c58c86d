"""Checkpoints of FSDP trainings of the Trainer and of accelerate."""
