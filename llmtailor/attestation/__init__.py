"""Whether a training holds what the checkpoint says that it was resumed from."""
