"""Checkpoints of Megatron-core: made by hand in its layout, and by itself where it is installed."""
