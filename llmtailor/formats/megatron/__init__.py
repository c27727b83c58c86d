"""Checkpoints of Megatron-core in the format ``torch_dist``. See `read` for the files, `names` for the params."""
