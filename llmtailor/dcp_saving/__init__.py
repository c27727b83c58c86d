"""Partial saves through torch.distributed.checkpoint."""
