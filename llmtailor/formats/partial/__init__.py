"""Partial checkpoints: what the training-side saver writes. See `manifest` for the folder's layout."""
