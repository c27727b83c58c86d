"""Partial checkpoints, proved with the real Trainer and DeepSpeed."""
