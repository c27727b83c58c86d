"""Partial checkpoints, the format of the training-side saver. `manifest` describes the folder's layout."""
